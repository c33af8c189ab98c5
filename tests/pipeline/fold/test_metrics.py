"""Metrics: counts, depth and times by interval of a campaign, a lane and a worker."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.pipeline.fold.metrics import DAY_NS, day_metrics
from taskyard.pipeline.fold.schemas import LEVELS
from taskyard.pipeline.fold.share import fold_share
from taskyard.pipeline.fold.stays import fold_stays
from tests.pipeline.event_log import SECOND_NS, START_NS, EventLog, at
from tests.pipeline.fold.histories import log_of_two

MINUTE_NS = 60 * SECOND_NS

Row = dict[str, Any]


def of_lanes() -> EventLog:
    log = EventLog("laned")
    for event in log_of_two().events:
        log.events.append({**event, "record": int(str(event["record"])) + 100})
        if event.get("task"):
            log.events[-1] |= {"campaign": "laned", "lane": "x", "task": f"laned {event['task']}"}
    return log


@pytest.fixture(scope="module")
def found() -> list[Row]:
    whole = log_of_two()
    whole.events += [event for event in of_lanes().events if event.get("task")]
    events, _ = whole.tables()
    folded = fold_share(events, "broker")
    stays = fold_stays(events, folded.attempts, folded.attempts_open, "broker")
    levels = LEVELS.empty_table()
    day = START_NS // DAY_NS
    last_ns = START_NS + 400 * SECOND_NS
    table = day_metrics(day, folded.buckets, levels, stays.workers_open, last_ns).metrics
    made: list[Row] = table.to_pylist()
    return [row | {"bucket": row["bucket"].replace(tzinfo=None)} for row in made]


def rows(found: list[Row], scope: str, campaign: str | None, *columns: str) -> list[Any]:
    mine = [row for row in found if (row["scope"], row["campaign"]) == (scope, campaign)]
    return sorted(tuple(row[name] for name in ("bucket", *columns)) for row in mine)


def test_each_interval_counts_its_events(found: list[Row]) -> None:
    columns = ("submitted", "leased", "finished", "failed", "retries", "throughput")
    assert rows(found, "campaign", "c", *columns) == [
        (at(0), 2, 0, 0, 0, 0, 0.0),
        (at(60), 0, 2, 0, 0, 0, 0.0),
        (at(120), 0, 0, 0, 0, 1, 0.0),
        (at(180), 0, 0, 0, 0, 0, 0.0),
        (at(240), 0, 0, 1, 0, 0, 1 / 60),
        (at(360), 0, 1, 0, 1, 0, 0.0),
    ]


def test_depth_and_running_accumulate(found: list[Row]) -> None:
    found_rows = rows(found, "campaign", "c", "depth", "running", "busy_ns")
    assert [(depth, running, busy / MINUTE_NS) for _, depth, running, busy in found_rows] == [
        (2, 0, 0),
        (0, 2, 0.75),
        (0, 1, 1),
        (0, 1, 1),
        (0, 0, 0.5),
        (0, 0, 0.25),
    ]


def test_times_are_in_the_intervals_of_begin_and_end(found: list[Row]) -> None:
    found_rows = rows(found, "campaign", "c", "wait_p50_ns", "wait_max_ns", "run_max_ns", "reasons")
    begun, postponed, ended = found_rows[1], found_rows[2], found_rows[5]
    assert begun[0] == at(60)
    assert begun[1] == pytest.approx(75_000_000_000, rel=0.004)
    assert begun[2:] == (90_000_000_000, None, None)
    assert postponed == (at(120), None, None, 15_000_000_000, [("busy", 1)])
    assert ended[1] == pytest.approx(15_000_000_000, rel=0.004)
    assert ended[2:] == (15_000_000_000, 15_000_000_000, [("busy", 1)])


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
    assert times == [at(second) for second in (0, 60, 120, 180, 240, 360)]


def test_utilisation_is_relative_to_slots(found: list[Row]) -> None:
    found_rows = rows(
        found, "worker", None, "leased", "finished", "running", "utilisation", "depth"
    )
    assert found_rows[0] == (at(60), 4, 0, 4, 0.75, None)
    assert [row[4] for row in found_rows] == [0.75, 1.0, 1.0, 0.5, 0.25]
