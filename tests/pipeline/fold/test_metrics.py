"""Metrics: counts, depth and times by interval of a campaign, a lane and a worker."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.pipeline.fold.metrics import BUCKETS_MAX, chart_width_ns, metrics
from taskyard.pipeline.fold.whole import fold_whole
from tests.pipeline.event_log import SECOND_NS, EventLog, at

Row = dict[str, Any]


def make_log() -> EventLog:
    """Return a log of two tasks. One is done after three seconds, the other fails twice."""
    log = EventLog()
    log.join(0, "w", slots=2)
    log.submit(0, "a")
    log.submit(0.5, "b")
    log.lease(1.5, "a")
    log.lease(1.75, "b")
    log.add(2, "postponed", "b", worker="w", reason="busy\nsince noon", own_fault=True)
    log.finish(4.5, "a")
    log.add(6, "due", "b")
    log.ready(6, "b", "due")
    log.lease(6.25, "b")
    log.fail(6.5, "b", "busy")
    return log


def of_lanes() -> EventLog:
    log = EventLog("laned")
    for event in make_log().events:
        log.events.append({**event, "record": int(str(event["record"])) + 100})
        if event.get("task"):
            log.events[-1] |= {"campaign": "laned", "lane": "x", "task": f"laned {event['task']}"}
    return log


@pytest.fixture(scope="module")
def found() -> list[Row]:
    whole = make_log()
    whole.events += [event for event in of_lanes().events if event.get("task")]
    folded = fold_whole(*whole.tables(), "broker", SECOND_NS)
    made: list[Row] = metrics([folded.buckets], folded.workers, SECOND_NS).to_pylist()
    return [row | {"bucket": row["bucket"].replace(tzinfo=None)} for row in made]


def rows(found: list[Row], scope: str, campaign: str | None, *columns: str) -> list[Any]:
    mine = [row for row in found if (row["scope"], row["campaign"]) == (scope, campaign)]
    return sorted(tuple(row[name] for name in ("bucket", *columns)) for row in mine)


def test_each_interval_counts_its_events(found: list[Row]) -> None:
    columns = ("submitted", "leased", "finished", "failed", "retries", "throughput")
    assert rows(found, "campaign", "c", *columns) == [
        (at(0), 2, 0, 0, 0, 0, 0.0),
        (at(1), 0, 2, 0, 0, 0, 0.0),
        (at(2), 0, 0, 0, 0, 1, 0.0),
        (at(3), 0, 0, 0, 0, 0, 0.0),
        (at(4), 0, 0, 1, 0, 0, 1.0),
        (at(5), 0, 0, 0, 0, 0, 0.0),
        (at(6), 0, 1, 0, 1, 0, 0.0),
    ]


def test_depth_and_running_accumulate(found: list[Row]) -> None:
    found_rows = rows(found, "campaign", "c", "depth", "running", "busy_ns")
    assert [(depth, running, busy / SECOND_NS) for _, depth, running, busy in found_rows] == [
        (2, 0, 0),
        (0, 2, 0.75),
        (0, 1, 1),
        (0, 1, 1),
        (0, 0, 0.5),
        (0, 0, 0),
        (0, 0, 0.25),
    ]


def test_times_are_in_the_intervals_of_begin_and_end(found: list[Row]) -> None:
    found_rows = rows(found, "campaign", "c", "wait_p50_ns", "wait_max_ns", "run_max_ns", "reasons")
    begun, postponed, ended = found_rows[1], found_rows[2], found_rows[6]
    assert begun[0] == at(1)
    assert begun[1] == pytest.approx(1_250_000_000, rel=0.004)
    assert begun[2:] == (1_500_000_000, None, None)
    assert postponed == (at(2), None, None, 250_000_000, [("busy", 1)])
    assert ended[1] == pytest.approx(250_000_000, rel=0.004)
    assert ended[2:] == (250_000_000, 250_000_000, [("busy", 1)])


def test_services_lanes_and_workers_have_their_own_rows(found: list[Row]) -> None:
    scopes = {
        (row["scope"], row["campaign"], row["service"], row["lane"], row["worker"]) for row in found
    }
    assert scopes == {
        ("campaign", "c", None, None, None),
        ("campaign", "laned", None, None, None),
        ("service", "c", "exec", None, None),
        ("service", "laned", "exec", None, None),
        ("lane", "laned", "exec", "x", None),
        ("worker", None, None, None, "w"),
    }  # fmt: skip
    times = [row[0] for row in rows(found, "lane", "laned")]
    assert times == [at(second) for second in (0, 1, 2, 4, 6)], "where something happened"


def test_utilisation_is_relative_to_slots(found: list[Row]) -> None:
    found_rows = rows(
        found, "worker", None, "leased", "finished", "running", "utilisation", "depth"
    )
    assert found_rows[0] == (at(1), 4, 0, 4, 0.75, None)
    assert [row[4] for row in found_rows] == [0.75, 1.0, 1.0, 0.5, 0.0, 0.25]


def test_intervals_get_longer_with_the_campaign() -> None:
    for seconds in (1, 1000, 100_000, 10_000_000):
        width_ns = chart_width_ns(seconds * SECOND_NS)
        assert seconds * SECOND_NS / width_ns <= BUCKETS_MAX
    assert chart_width_ns(100_000 * SECOND_NS) == 600 * SECOND_NS
