"""Pages of tasks and charts agree with a plain loop over the same tasks."""

from __future__ import annotations

import errno
import random
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from simulator.schedule import run
from taskyard.client.task_filters import SORTS, Filter, form_of
from taskyard.core.limits import SECOND_NS
from taskyard.journal import lock, recovery
from taskyard.journal.row_file import Block, ColumnBuilder
from taskyard.journal.sqlite import SqliteStore
from taskyard.web.charts import throughput_figure
from taskyard.web.events import Batch, Pause, columns_of
from taskyard.web.follower import EventFeed, Follower
from taskyard.web.tables import STATE_NAMES
from taskyard.web.view import View
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.journal.chain import Row

#: The key of each order in a row, and whether the largest comes first.
_KEYS = {
    "submitted": ("submitted_record", False),
    "name": ("full_name", False),
    "started": ("leased_ns", True),
    "duration": ("run_ns", True),
    "memory": ("memory_max_bytes", True),
    "cpu": ("cpu_ns", True),
    "ended": ("ended_ns", True),
    "priority": ("priority", True),
}


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """Return the view of a simulated history with many tasks."""
    state: Path = tmp_path_factory.mktemp("view") / "state"
    rows: list[Row] = []
    run(5, invariants=False, on_row=rows.append)
    with closing(SqliteStore(state)) as store:
        for row in rows:
            store.commit(row.body, len(recovery.decode(row.body)))
        found = View()
        for batch in EventFeed(state).read():
            found.update(batch)
    return found


def all_rows(view: View) -> list[dict[str, Any]]:
    every = [view.row(row) for row in range(view.tasks.count) if view.tasks.state[row] < 7]
    assert len(every) > 20  # or the test shows nothing
    return every


def matches(row: dict[str, Any], wanted: Filter) -> bool:
    for name in ("campaign", "service", "lane", "worker"):
        value = getattr(wanted, name)
        if value is not None and row[name] != value:
            return False
    return (
        (not wanted.only or row["state"].lower() in wanted.only)
        and (wanted.reason or "") in row["reason"]
        and wanted.reason_like in (None, form_of(row["reason"]))
        and (wanted.match or "") in row["full_name"]
    )


def random_filter(choose: random.Random, rows: list[dict[str, Any]]) -> Filter:
    one = choose.choice(rows)
    fields: dict[str, Any] = {
        name: one[name]
        for name in ("campaign", "service", "lane", "worker")
        if choose.random() < 0.25
    }
    if choose.random() < 0.3:
        fields["match"] = one["full_name"][-2:]
    if choose.random() < 0.2:
        fields["reason_like"] = form_of(one["reason"])
    if choose.random() < 0.3:
        fields["only"] = (one["state"].lower(),)
    return Filter(**fields, sort=choose.choice(SORTS), reverse=choose.random() < 0.5)


@pytest.mark.parametrize("seed", range(60))
def test_page_is_a_part_of_the_sorted_matches(view: View, seed: int) -> None:
    choose = random.Random(seed)
    rows = all_rows(view)
    wanted = random_filter(choose, rows)
    first, count = choose.randrange(8), choose.randrange(1, 12)
    key, is_falling = _KEYS[wanted.sort]
    chosen = [row for row in rows if matches(row, wanted)]
    chosen.sort(key=lambda row: row[key], reverse=is_falling != wanted.reverse)
    page = view.page(wanted, first, count)
    assert page.total == len(chosen)
    shown = [row[key] for row in page.rows]
    assert shown == [row[key] for row in chosen[first : first + count]]
    assert all(matches(row, wanted) for row in page.rows)


def test_pages_together_have_every_match_once(view: View) -> None:
    for sort in SORTS:
        wanted = Filter(sort=sort)
        total = view.page(wanted, 0, 1).total
        names = [
            row["full_name"]
            for first in range(0, total, 7)
            for row in view.page(wanted, first, 7).rows
        ]
        assert sorted(names) == sorted(row["full_name"] for row in all_rows(view)), sort


def test_counts_are_those_of_the_rows(view: View) -> None:
    rows = all_rows(view)
    assert +Counter(view.counts()) == Counter(row["state"] for row in rows)
    for column in ("campaign", "service", "lane", "worker"):
        found = view.counts_by(column)
        expected = Counter((row[column], row["state"]) for row in rows)
        assert (
            Counter({(name, state): found[name][state] for name in found for state in STATE_NAMES})
            == expected + Counter()
        )


def test_failures_and_durations_count_the_rows(view: View) -> None:
    rows = all_rows(view)
    chosen = view.select(Filter())
    found = view.failures(chosen)
    assert {group.form: group.count for group in found} == Counter(
        form_of(row["reason"]) for row in rows if row["state"] == "FAILED"
    )
    for group in found:
        assert (
            view.page(Filter(only=("failed",), reason_like=group.form), 0, 1).total == group.count
        )
        assert form_of(group.example["reason"]) == group.form
    measured = [row["run_ns"] for row in rows if row["run_ns"]]
    assert sum(count for _, count in view.durations(chosen)) == len(measured)


def test_depth_ends_with_the_counts(view: View) -> None:
    counts = view.counts()
    for state in ("READY", "LEASED", "DONE", "FAILED", "CANCELLED"):
        assert view.series.depth(STATE_NAMES.index(state))[-1] == counts[state]  # type: ignore[arg-type]


def test_error_of_the_system_ends_no_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError(errno.EMFILE, "too many open files")]

    def read(_: EventFeed) -> Iterator[Batch]:
        if errors:
            raise errors.pop()
        return iter(())

    monkeypatch.setattr("taskyard.web.follower._RETRY_SECONDS", 0.01)
    monkeypatch.setattr(EventFeed, "read", read)
    with closing(SqliteStore(tmp_path)):
        pass
    follower = Follower(tmp_path)
    follower.start()
    try:
        assert follower.caught_up.wait(PATIENCE_SECONDS)
    finally:
        follower.stop()
    assert follower.error is None


def test_restarts_of_the_broker_are_marked_over_time(view: View, tmp_path: Path) -> None:
    begin_ns = view.series.begin_ns
    with closing(SqliteStore(tmp_path)):
        pass
    words = [(-9, "started"), (-5, "started"), (20, "stopped"), (30, "started"), (50, "started")]
    for seconds, word in words:
        lock.note_start(tmp_path, lock.StartWord(word), begin_ns + seconds * SECOND_NS)
    restarts = Follower(tmp_path).restarts()
    layout = throughput_figure(view.series, 0, restarts)["layout"]
    drawn = [
        tuple(
            round(datetime.fromisoformat(one[end]).timestamp() - begin_ns / SECOND_NS, 3)
            for end in ("x0", "x1")
        )
        for one in layout["shapes"]
    ]
    assert [one["type"] for one in layout["shapes"]] == ["rect", "line", "line"]
    assert drawn == [(20, 30), (30, 30), (50, 50)]
    (label,) = layout["annotations"]
    shown = datetime.fromtimestamp(begin_ns / SECOND_NS + 50, UTC)
    assert label["text"] == f"broker restarted {shown:%H:%M:%S}"
    assert "shapes" not in throughput_figure(view.series)["layout"]


def test_kills_and_pauses_are_marked_over_time(view: View) -> None:
    begin_ns = view.series.begin_ns

    def at(seconds: int) -> int:
        return begin_ns + seconds * SECOND_NS

    kill = lock.Start(at(30), recorded_ns=at(10))
    pauses = [Pause("<b>exec/lane", at(-5), at(5)), Pause("", at(40))]
    layout = throughput_figure(view.series, at(60), [kill], pauses)["layout"]
    spans = [(one["x0"], one["x1"]) for one in layout["shapes"] if one["type"] == "rect"]
    assert [
        tuple(round(datetime.fromisoformat(end).timestamp() * SECOND_NS) - begin_ns for end in one)
        for one in spans
    ] == [
        (10 * SECOND_NS, 30 * SECOND_NS),
        (0, 5 * SECOND_NS),
        (40 * SECOND_NS, 60 * SECOND_NS),
    ]
    restarted, paused = (one["text"] for one in layout["annotations"])
    times = [f"{datetime.fromtimestamp(at(one) // SECOND_NS, UTC):%H:%M:%S}" for one in (30, 10)]
    assert restarted == "broker restarted {}, killed after {}".format(*times)
    assert paused == "everything paused"
    layout = throughput_figure(view.series, at(60), [], pauses[:1])["layout"]
    assert layout["annotations"][0]["text"] == "&lt;b&gt;exec/lane paused"


def test_pauses_and_joined_workers_come_from_events() -> None:
    view = View()
    catalog = view.catalog

    def add(kind: bytes, time_ns: int, incarnation: int = 0, **names: bytes) -> None:
        columns = columns_of(rows_of(kind, time_ns, incarnation, **names), catalog)
        view.broker.add(columns)

    add(b"paused", 1, service=b"exec")
    add(b"paused", 2, service=b"exec")
    add(b"paused", 3, service=b"exec", lane=b"a.org")
    add(b"resumed", 4, service=b"exec")
    add(b"paused", 5)
    found = [(one.subject, one.begin_ns, one.end_ns) for one in view.broker.pauses]
    assert found == [("exec", 1, 4), ("exec/a.org", 3, 0), ("", 5, 0)]
    add(b"worker_joined", 6, 7, worker=b"w")
    add(b"worker_joined", 8, 7, worker=b"w")
    assert view.broker.joined_ns("w") == 6
    add(b"worker_joined", 9, 8, worker=b"w")
    assert view.broker.joined_ns("w") == 9
    add(b"worker_left", 10, worker=b"w")
    assert view.broker.joined_ns("w") == 0


def rows_of(kind: bytes, time_ns: int, incarnation: int, **names: bytes) -> Block:
    """Return a block with one event."""
    builder = ColumnBuilder("events")
    values = {"sequence": 1, "record": 1, "kind": kind, "time_ns": time_ns, **names}
    builder.add(1, values | ({"incarnation": incarnation} if incarnation else {}))
    return builder.take()
