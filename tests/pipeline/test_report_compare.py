"""A report with restarts, a pause and an earlier campaign. Checked by plain Python over events."""

from __future__ import annotations

import json
import math
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from docs.schemas import check
from taskyard.cli.entry import run, taskyard
from taskyard.core.events import Outcome, PauseRequested, ResumeRequested
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.journal import lock
from taskyard.journal.lock import StartWord
from taskyard.journal.sqlite import SqliteStore
from taskyard.pipeline.jobs.broker_tables import fold_files
from taskyard.pipeline.jobs.earlier import compare, find_earlier
from taskyard.pipeline.report import comparison
from taskyard.pipeline.report.comparison import FIGURES, Compared, Comparison
from taskyard.pipeline.sources import history
from tests.journal.scenarios import BEGIN_NS, WritingYard
from tests.kit.processes import run_here
from tests.pipeline.event_log import EventLog, measured, write_part

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: A measured attempt's CPU time, and its memory.
CPU_NS, MEMORY_BYTES = 3 * SECOND_NS, 48_000_000


def fill(yard: WritingYard, state: Path) -> None:
    """Run the campaign `new`: a kill, a pause, a stop, a retry and a failure."""

    def note(word: StartWord) -> None:
        lock.note_start(state, word, BEGIN_NS + yard.now_ns)

    note(StartWord.STARTED)
    yard.join(b"w", slots_total=1, services=(b"exec",), lease_timeout_ns=60 * SECOND_NS)
    yard.submit(*(b"t%d" % n for n in range(8)), campaign=b"new", service=b"exec")
    yard.submit(b"other", campaign=b"more", service=b"exec")
    for place in range(8):
        yard.later(1 + place / 8)
        (name,) = yard.take(b"w", 1)
        yard.later(1 + place)
        if place == 2:
            note(StartWord.STARTED)  # after a kill
        if place == 4:
            yard.handle(PauseRequested(0, b"client"))
            yard.later(5)
            yard.handle(ResumeRequested(0, b"client"))
        if place == 5:
            note(StartWord.STOPPED)
            yard.later(3)
            note(StartWord.STARTED)
        if place == 3:
            yard.report(b"w", name, Outcome.FAILED_FINAL, texts=[b"bad"])
        elif place == 1:
            due_ns = BEGIN_NS + yard.now_ns + SECOND_NS // 2
            yard.report(b"w", name, Outcome.RETRY_AT, texts=[b"busy"], retry_at_ns=[due_ns])
        else:
            yard.finish(b"w", name)


def earlier_log() -> EventLog:
    log = EventLog("old")
    log.join(0, "w")
    for number in range(5):
        log.submit(0, f"old/t{number}")
    log.lease(0.2, "old/t0")
    log.add(0.6, "expired", "old/t0", worker="w")
    log.ready(0.6, "old/t0", "expired")
    for number in range(5):
        start = 10 * number + 1
        log.lease(start, f"old/t{number}")
        more = measured(start, 2 + number, cpu_ns=CPU_NS, memory_max_bytes=MEMORY_BYTES + number)
        log.add(start + 2 + number, "finished", f"old/t{number}", worker="w", **more)
    log.add(60, "worker_left", worker="w", reason="left")
    return log


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compare")
    state = directory / ".taskyard"
    state.mkdir()
    with closing(SqliteStore(state)) as store:
        fill(WritingYard(store), state)
    log = earlier_log()
    write_part(directory / "earlier", 1, int(str(log.events[-1]["sequence"])), log)
    return directory


@pytest.fixture(scope="module")
def document(place: Path, spark: SparkSession) -> dict[str, Any]:
    assert spark is not None
    words = ("report", "--campaign", "new", "--compare", "earlier:old", "--json")
    code, text, err = run_here(place, *words)
    assert code == 0, err
    check(text)
    found: dict[str, Any] = json.loads(text)
    return found


def events_of(state: Path, scratch: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = history.find(state, scratch).read("events").to_pylist()
    return rows


def counted(events: list[dict[str, Any]], campaign: str) -> dict[str, float | None]:
    """Count the figures of a campaign, event by event."""
    mine = [row for row in events if row.get("campaign") == campaign]
    kinds = [row["kind"] for row in mine]
    ends = [row for row in mine if row["kind"] in ("finished", "failed")]
    first_ns = min(row["time_ns"] for row in mine)
    leased_ns, runs = {}, []
    for row in mine:
        if row["kind"] == "leased":
            leased_ns[row["task"]] = row["time_ns"]
        elif row["kind"] in ("finished", "failed", "postponed"):
            runs.append(row.get("run_ns") or row["time_ns"] - leased_ns[row["task"]])
    runs.sort()
    makespan_ns = max(row["time_ns"] for row in ends) - first_ns
    measured_ns = [row["cpu_ns"] for row in ends if row.get("cpu_ns")]
    lost = kinds.count("expired") + kinds.count("returned")
    return {
        "tasks": kinds.count("submitted"),
        "done": kinds.count("finished"),
        "failed": kinds.count("failed"),
        "makespan_ns": makespan_ns,
        "done_per_second": kinds.count("finished") / (makespan_ns / 1e9),
        "run_p50_ns": runs[math.ceil(len(runs) * 0.5) - 1],
        "run_p95_ns": runs[math.ceil(len(runs) * 0.95) - 1],
        "cpu_ns": sum(measured_ns) if measured_ns else None,
        "memory_max_bytes": max(row.get("memory_max_bytes") or 0 for row in ends) or None,
        "retries": kinds.count("postponed") + lost,
        "lost": lost,
    }


def test_figures_of_both_campaigns_equal_those_of_their_events(
    document: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    now = counted(events_of(place / ".taskyard", tmp_path), "new")
    then = counted(earlier_log().events, "old")
    assert (then["lost"], then["retries"]) == (1, 1)
    assert (then["cpu_ns"], now["cpu_ns"]) == (5 * CPU_NS, None)
    assert (now["tasks"], now["failed"], now["retries"]) == (8, 1, 1)
    found = document["comparison"]
    assert (found["campaign"], found["source"]) == ("old", "earlier")
    assert found["sentence"] in document["summary"]
    for one in found["figures"]:
        name, value, earlier = one["name"], now[one["name"]], then[one["name"]]
        assert one["value"] == pytest.approx(value), name
        assert one["earlier"] == pytest.approx(earlier), name
        if value is None or earlier is None:
            assert one["difference"] is None
            continue
        assert one["difference"] == pytest.approx(value - earlier), name
        assert one["ratio"] == (pytest.approx(value / earlier) if earlier else None), name
    assert [one["name"] for one in found["figures"]] == list(now)


def test_restarts_and_pauses_are_marked_where_they_happened(
    document: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    events = events_of(place / ".taskyard", tmp_path)
    begin_ns = min(row["time_ns"] for row in events if row["kind"] == "submitted")
    (paused,) = [row["time_ns"] for row in events if row["kind"] == "paused"]
    (resumed,) = [row["time_ns"] for row in events if row["kind"] == "resumed"]
    lines = json.loads((place / ".taskyard" / "starts").read_text())
    times = [time_ns for time_ns, _ in lines]
    assert [word for _, word in lines] == ["started", "started", "stopped", "started"]
    text = (place / document["page"]).read_text()
    figures = json.loads(re.findall(r'id="figures">(.*?)</script>', text)[0])
    layout = figures["over-time"]["layout"]
    assert layout["xaxis"]["title"]["text"].startswith("seconds")
    drawn = [(one["x0"], one["x1"]) for one in layout["shapes"] if one["type"] == "rect"]
    spans = [(paused, resumed), (times[2], times[3])]
    assert drawn == [tuple((one - begin_ns) / 1e9 for one in span) for span in spans]
    alone = next(one["x0"] for one in layout["shapes"] if one["type"] == "line")
    assert alone == (times[1] - begin_ns) / 1e9
    assert "1 restart of a broker after a kill or crash: at 00:00:" in text
    assert "for 5.0 s." in text


def test_earlier_campaign_may_be_in_a_report_or_in_the_same_history(
    spark: SparkSession, document: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    brokers = [fold_files(history.find(place / ".taskyard", tmp_path))]
    known = ["more", "new"]
    found = find_earlier(str(place / "report"), "new", known, tmp_path)
    assert found.tables == place / "report" / "tables"
    same = compare(spark, brokers, "new", found, tmp_path)
    values = [one["value"] for one in document["comparison"]["figures"]]
    assert [one.value for one in same.figures] == pytest.approx(values)
    assert [one.earlier for one in same.figures] == pytest.approx(values)
    other = compare(spark, brokers, "new", find_earlier("more", "new", known, tmp_path), tmp_path)
    assert [one.earlier for one in other.figures][:4] == [1, 0, 0, None]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nothing", "--compare nothing: neither a campaign nor a directory (this history has more"),
        ("new", "--compare new: the campaign of the report itself"),
        ("earlier", "--compare earlier: unknown campaign 'new' (this history has old, or use PATH"),
        ("earlier:x", "--compare earlier: unknown campaign 'x'"),
        (".", "no history found"),
    ],
)
def test_unknown_earlier_campaign_is_refused_before_spark_starts(
    text: str,
    problem: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    assert run(taskyard, ["report", "--campaign", "new", "--compare", text]) == 2
    err = capsys.readouterr().err
    assert problem in err
    assert "starting Spark" not in err


def test_report_of_all_campaigns_is_not_compared_with_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--compare old: needs --campaign"):
        find_earlier("old", None, ["new", "old"], tmp_path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "the same time, no failures in either"),
        ({"makespan_ns": 88}, "12 % less time, no failures in either"),
        ({"makespan_ns": 250}, "150 % more time, no failures in either"),
        ({"failed": 3, "done": 97, "makespan_ns": 50}, "50 % less time, 3 more failures"),
        ({"tasks": 101, "done_per_second": 11}, "1 more task, 10 % more tasks per second, no fa"),
        ({"done": 90, "done_per_second": 9}, "10 % fewer tasks per second, no failures"),
        ({"lost": 1}, "the same time, no failures in either, 1 more lost attempt"),
        ({"makespan_ns": None}, "speed unknown"),
    ],
)
def test_sentence_names_the_differences(changes: dict[str, Any], text: str) -> None:
    base = dict.fromkeys((one.name for one in FIGURES), 0)
    base |= {"tasks": 100, "done": 100, "makespan_ns": 100, "done_per_second": 10}
    now = base | changes
    figures = [Compared(one.name, now[one.name], base[one.name]) for one in FIGURES]
    found = comparison.sentence(Comparison("<old>", "", figures))
    assert found.startswith(f"Compared with <old>: {text}")
