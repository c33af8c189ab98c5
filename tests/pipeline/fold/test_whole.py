"""All tables of hand-written histories: attempts, tasks, workers and critical path."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.pipeline.fold import schemas
from taskyard.pipeline.fold.links import links
from taskyard.pipeline.fold.whole import fold_whole
from tests.pipeline.event_log import SECOND_NS, START_NS, EventLog, at, measured

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

Rows = list[tuple[Any, ...]]

#: Columns of an attempt but its broker.
_NAMES = schemas.ATTEMPTS.names[1:]

#: The histories of this file, by campaign. All are computed together for the first test.
SCENARIOS: dict[str, Callable[[EventLog], None]] = {}


def scenario(write: Callable[[EventLog], None]) -> Callable[[EventLog], None]:
    SCENARIOS[write.__name__] = write
    return write


class Computed:
    """The tables of all histories, folded at once."""

    def __init__(self) -> None:
        numbers, whole = count(1), EventLog()
        for name, write in SCENARIOS.items():
            one = EventLog(name, numbers)
            write(one)
            whole.events += one.events
            whole.edges += one.edges
        events, edges = whole.tables()
        folded = fold_whole(events, edges, "broker")
        self._tables = {
            "attempts": _plain_rows(folded.attempts),
            "tasks": _plain_rows(folded.tasks),
            "workers": _plain_rows(folded.workers),
            "paths": _plain_rows(folded.critical_path),
        }
        pairs = links(folded.tasks, edges)
        tasks = self._tables["tasks"]
        #: Both ends of each edge between known tasks.
        self.links = [
            (tasks[one], tasks[other])
            for one, other in zip(pairs.waiting.tolist(), pairs.before.tolist(), strict=True)
        ]

    def attempts(self, campaign: str, *columns: str) -> Rows:
        return self.rows("attempts", campaign, "task", "attempt", *columns)

    def tasks(self, campaign: str, *columns: str) -> Rows:
        return self.rows("tasks", campaign, "task", "generation", *columns)

    def workers(self, worker: str, *columns: str) -> Rows:
        found = [row for row in self._tables["workers"] if row["worker"] == worker]
        return sorted(tuple(row[name] for name in columns) for row in found)

    def rows(self, table: str, campaign: str, *columns: str) -> Rows:
        found = [row for row in self._tables[table] if row["campaign"] == campaign]
        return sorted(tuple(row[name] for name in columns) for row in found)

    def linked(self, campaign: str, column: str) -> Rows:
        """Return each task with the task it waits for, and a column of that."""
        found = [pair for pair in self.links if pair[0]["campaign"] == campaign]
        return sorted((one["task"], other["task"], other[column]) for one, other in found)


def _plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows with times without a zone, as the log's clock has them."""
    return [
        {
            name: value.replace(tzinfo=None) if isinstance(value, datetime) else value
            for name, value in row.items()
        }
        for row in table.to_pylist()
    ]


@pytest.fixture(scope="module")
def computed() -> Computed:
    return Computed()


@scenario
def plain(log: EventLog) -> None:
    log.submit(0, "a")
    log.run("a", leased=2, finished=5.5)


def test_attempt_has_all_its_times(computed: Computed) -> None:
    (found,) = computed.rows("attempts", "plain", *_NAMES)
    assert dict(zip(_NAMES, found, strict=True)) == {
        "campaign": "plain", "task": "a", "name": "a", "generation": 1, "attempt": 1,
        "service": "exec", "lane": "", "priority": 0, "worker": "w", "dialect": "native",
        "submitted": at(0), "ready": at(0), "leased": at(2), "settled": at(5.5), "leased_record": 2,
        "outcome": "finished", "reason": None, "own_fault": None, "wait_ns": 2 * SECOND_NS,
        "run_ns": 3_500_000_000, "result_bytes": 7, "leased_ns": START_NS + 2 * SECOND_NS,
        "started": None, "ended": None,
        "queued_ns": None, "exit_status": None, "signal": None, "host": None, "cpu_ns": None,
        "memory_max_bytes": None,
    }  # fmt: skip


@scenario
def held_ahead(log: EventLog) -> None:
    log.join(0, "holder", slots=1)
    for task in ("a", "b"):
        log.submit(0, task)
        log.lease(1, task, "holder")
    log.add(5, "finished", "a", worker="holder", **measured(1.5, 2, cpu_ns=7, exit_status=0))
    log.add(5, "failed", "b", worker="holder", own_fault=True, **measured(3.5, 1, signal=9))


def test_run_time_is_measured_and_queue_time_is_separate(
    computed: Computed,
) -> None:
    times = ("started", "ended", "queued_ns", "run_ns")
    assert computed.attempts("held_ahead", *times) == [
        ("a", 1, at(1.5), at(3.5), SECOND_NS // 2, 2 * SECOND_NS),
        ("b", 1, at(3.5), at(4.5), SECOND_NS * 5 // 2, SECOND_NS),
    ]
    used = ("exit_status", "signal", "host", "cpu_ns")
    assert computed.attempts("held_ahead", *used) == [
        ("a", 1, 0, None, "h", 7),
        ("b", 1, None, 9, "h", None),
    ]
    assert computed.tasks("held_ahead", "queued_ns", "run_ns", "path_ns") == [
        ("a", 1, SECOND_NS // 2, 2 * SECOND_NS, 2 * SECOND_NS),
        ("b", 1, SECOND_NS * 5 // 2, SECOND_NS, SECOND_NS),
    ]
    assert computed.workers("holder", "busy_ns", "run_ns") == [(3 * SECOND_NS, 3 * SECOND_NS)]
    parts = ("wait_ns", "queued_ns", "retry_ns", "run_ns")
    assert computed.rows("paths", "held_ahead", "task", *parts) == [
        ("a", SECOND_NS, 2 * SECOND_NS, 0, 2 * SECOND_NS)
    ]


@scenario
def retried(log: EventLog) -> None:
    log.submit(0, "a")
    log.lease(1, "a")
    log.add(2, "postponed", "a", worker="w", reason="exit 1", own_fault=True)
    log.add(5, "due", "a")
    log.ready(5, "a", "due")
    log.lease(6, "a")
    log.fail(9, "a", "exit 2")


def test_each_retry_is_an_attempt(computed: Computed) -> None:
    found = computed.attempts("retried", "outcome", "reason", "own_fault", "wait_ns", "run_ns")
    assert found == [
        ("a", 1, "postponed", "exit 1", True, 1 * SECOND_NS, 1 * SECOND_NS),
        ("a", 2, "failed", "exit 2", True, 1 * SECOND_NS, 3 * SECOND_NS),
    ]
    assert computed.tasks("retried", "state", "attempts", "failures", "reason") == [
        ("a", 1, "FAILED", 2, 2, "exit 2")
    ]
    assert computed.tasks("retried", "wait_ns", "run_ns", "run_last_ns") == [
        ("a", 1, 2 * SECOND_NS, 4 * SECOND_NS, 3 * SECOND_NS)
    ]


@scenario
def lost_worker(log: EventLog) -> None:
    log.submit(0, "a")
    log.lease(1, "a", "lost")
    log.add(11, "expired", "a", worker="lost")
    log.ready(11, "a", "expired")
    log.lease(12, "a", "other")
    log.add(13, "stale", "a", worker="lost", attempt=1, campaign=None)
    log.add(13, "progressed", "a", worker="other", percent=50)
    log.finish(14, "a", "other")


def test_attempt_ends_with_its_worker_and_ignores_stale_reports(computed: Computed) -> None:
    assert computed.attempts("lost_worker", "worker", "outcome", "run_ns") == [
        ("a", 1, "lost", "expired", None),
        ("a", 2, "other", "finished", 2 * SECOND_NS),
    ]
    assert computed.tasks("lost_worker", "losses", "failures", "worker") == [
        ("a", 1, 1, 0, "other")
    ]


@scenario
def still_out(log: EventLog) -> None:
    log.submit(0, "a")
    log.lease(1, "a")


def test_open_lease_has_no_end(computed: Computed) -> None:
    columns = ("settled", "outcome", "run_ns")
    assert computed.attempts("still_out", *columns) == [("a", 1, None, None, None)]
    assert computed.tasks("still_out", "state", "ended", "run_ns") == [("a", 1, "LEASED", None, 0)]


@scenario
def called_off(log: EventLog) -> None:
    log.submit(0, "a")
    log.submit(0, "b", "a")
    log.lease(1, "a")
    log.add(4, "cancelled", "a")
    log.add(4, "cancelled", "b")


def test_task_is_cancelled_during_and_before_its_lease(computed: Computed) -> None:
    assert computed.attempts("called_off", "outcome", "run_ns") == [("a", 1, "cancelled", None)]
    assert computed.tasks("called_off", "state", "attempts", "ended") == [
        ("a", 1, "CANCELLED", 1, at(4)),
        ("b", 1, "CANCELLED", 0, at(4)),
    ]


@scenario
def given_back(log: EventLog) -> None:
    log.submit(0, "a")
    log.lease(1, "a")
    log.add(2, "returned", "a", worker="w", reason="refused")
    log.ready(2, "a", "returned")
    log.add(3, "postponed", "a", own_fault=False)
    log.add(4, "aged", "a", reason="too old")


def test_settled_attempt_is_not_settled_again(computed: Computed) -> None:
    """Events of a waiting task have the number of its last attempt."""
    assert computed.attempts("given_back", "outcome", "run_ns") == [("a", 1, "returned", None)]
    assert computed.tasks("given_back", "state", "reason", "losses") == [
        ("a", 1, "FAILED", "too old", 0)
    ]


@scenario
def generations(log: EventLog) -> None:
    log.submit(0, "a")
    log.run("a", 1, 2)
    log.submit(10, "b", "a")
    log.ready(10, "b", "submitted")
    log.submit(20, "a")
    log.submit(21, "c", "a")
    log.run("a", 23, 30)
    log.ready(30, "c")


def test_each_generation_of_a_name_is_a_task(computed: Computed) -> None:
    assert computed.attempts("generations", "generation", "submitted") == [
        ("a", 1, 1, at(0)),
        ("a", 2, 2, at(20)),
    ]
    assert computed.tasks("generations", "state", "ended", "run_ns", "level") == [
        ("a", 1, "DONE", at(2), 1 * SECOND_NS, 0),
        ("a", 2, "DONE", at(30), 7 * SECOND_NS, 0),
        ("b", 1, "READY", None, 0, 1),
        ("c", 1, "READY", None, 0, 1),
    ]
    assert computed.linked("generations", "generation") == [
        ("b", "a", 1),
        ("c", "a", 2),
    ]


@scenario
def first_campaign(log: EventLog) -> None:
    log.submit(0, "x")
    log.submit(0, "y", "x")
    log.run("x", 1, 2)
    log.ready(2, "y")
    log.run("y", 3, 4)
    log.campaign = "next_campaign"
    log.submit(10, "y", "x")
    log.ready(10, "y", "submitted")


def test_name_may_be_reused_in_another_campaign(computed: Computed) -> None:
    assert computed.tasks("first_campaign", "waits_for", "level") == [
        ("x", 1, 0, 0),
        ("y", 1, 1, 1),
    ]
    assert computed.tasks("next_campaign", "waits_for", "level") == [("y", 1, 1, 1)]
    for campaign in ("first_campaign", "next_campaign"):
        assert computed.linked(campaign, "campaign") == [("y", "x", "first_campaign")]


@scenario
def delayed(log: EventLog) -> None:
    log.submit(0, "a", due=60)
    log.submit(0, "b", due=30)
    log.add(30, "due", "b")
    log.ready(30, "b", "due")
    log.run("b", 32, 33)


def test_delayed_task_waits_for_its_due_time_then_for_a_worker(computed: Computed) -> None:
    assert computed.tasks("delayed", "state", "due", "ready", "blocked_ns", "wait_ns") == [
        ("a", 1, "DELAYED", at(60), None, None, 0),
        ("b", 1, "DONE", at(30), at(30), 30 * SECOND_NS, 2 * SECOND_NS),
    ]


@scenario
def failing(log: EventLog) -> None:
    log.submit(0, "bad")
    log.submit(0, "slow")
    log.submit(0, "behind", "bad")
    log.submit(0, "far", "behind")
    log.submit(0, "hopes", "bad", "slow")
    log.lease(1, "bad")
    log.fail(2, "bad", "no")


def test_blocked_by_a_failure_differs_from_blocked_for_now(computed: Computed) -> None:
    assert computed.tasks("failing", "state", "is_behind_failure", "level") == [
        ("bad", 1, "FAILED", False, 0),
        ("behind", 1, "BLOCKED", True, 1),
        ("far", 1, "BLOCKED", True, 2),
        ("hopes", 1, "BLOCKED", False, 1),
        ("slow", 1, "READY", False, 0),
    ]


@scenario
def diamond(log: EventLog) -> None:
    """Write `a`, then `b` and a long `c`, then `d`, which waits for a worker and is retried."""
    log.submit(0, "a")
    log.submit(0, "b", "a")
    log.submit(0, "c", "a")
    log.submit(0, "d", "b", "c")
    log.run("a", 1, 3)
    log.ready(3, "b")
    log.ready(3, "c")
    log.lease(3, "b")
    log.lease(4, "c")
    log.finish(5, "b")
    log.finish(14, "c")
    log.ready(14, "d")
    log.lease(24, "d")
    log.add(26, "expired", "d", worker="w")
    log.ready(26, "d", "expired")
    log.run("d", 27, 32)


def test_level_and_path_follow_the_longest_chain(computed: Computed) -> None:
    assert computed.tasks("diamond", "waits_for", "level", "path_ns") == [
        ("a", 1, 0, 0, 2 * SECOND_NS),
        ("b", 1, 1, 1, 4 * SECOND_NS),
        ("c", 1, 1, 1, 12 * SECOND_NS),
        ("d", 1, 2, 2, 17 * SECOND_NS),
    ]


def test_critical_path_splits_the_time(computed: Computed) -> None:
    spans = ("total_ns", "held_ns", "wait_ns", "retry_ns", "run_ns", "gain_ns")
    found = computed.rows("paths", "diamond", "position", "task", "after", *spans)
    assert [(*row[:3], *(value / SECOND_NS for value in row[3:])) for row in found] == [
        (1, "a", None, 3, 0, 1, 0, 2, 1),
        (2, "c", "a", 11, 0, 1, 0, 10, 1),
        (3, "d", "c", 18, 0, 11, 2, 5, 13),
    ]
    assert computed.rows("paths", "diamond", "task", "started", "ended")[0] == ("a", at(0), at(3))


def test_campaign_without_ended_tasks_has_no_critical_path(computed: Computed) -> None:
    assert computed.rows("paths", "still_out", "task") == []


@scenario
def stays(log: EventLog) -> None:
    log.join(0, "visitor", slots=2)
    log.submit(0, "a")
    log.submit(0, "b")
    log.lease(1, "a", "visitor")
    log.lease(2, "b", "visitor")
    log.finish(3, "a", "visitor")
    log.fail(5, "b", "no")
    log.join(6, "visitor", slots=4)
    log.add(10, "worker_left", worker="visitor", reason="goodbye")
    log.join(20, "visitor", incarnation=2)
    log.join(25, "visitor", incarnation=3)
    log.submit(25, "c")
    log.run("c", 26, 30, "visitor")


def test_stay_ends_when_the_worker_leaves_or_its_process_changes(computed: Computed) -> None:
    times = computed.workers(
        "visitor", "stay", "incarnation", "slots", "joined", "left", "attempts"
    )
    assert times == [
        (1, 1, 4, at(0), at(10), 2),
        (2, 2, 1, at(20), None, 0),
        (3, 3, 1, at(25), None, 1),
    ]
    work = computed.workers("visitor", "stay", "finished", "failed", "busy_ns", "run_ns", "stay_ns")
    assert work == [
        (1, 1, 1, 4 * SECOND_NS, 5 * SECOND_NS, 10 * SECOND_NS),
        (2, 0, 0, 0, 0, 0),
        (3, 1, 0, 4 * SECOND_NS, 4 * SECOND_NS, 5 * SECOND_NS),
    ]
    assert computed.workers("visitor", "stay", "utilisation") == [
        (1, 5 / 40),
        (2, None),
        (3, 4 / 5),
    ]


@scenario
def exact(log: EventLog) -> None:
    log.join(0, "exact", slots=2)
    for name, leased_ns, ended_ns in (
        ("a", 1_700, 4_300),
        ("b", 4_100, 9_950),
        ("c", 20_001, 20_002),
    ):
        log.submit(0, name)
        log.run(name, leased_ns / 1e9, ended_ns / 1e9, "exact")


def test_busy_time_of_a_worker_is_exact(computed: Computed) -> None:
    assert computed.workers("exact", "busy_ns") == [((9_950 - 1_700) + 1,)]
