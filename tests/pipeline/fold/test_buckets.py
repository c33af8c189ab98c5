"""Buckets, histograms and metrics of hand-written histories and of simulated ones."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from taskyard.pipeline.fold.histograms import ERROR_MAX, bins, middles, percentile
from taskyard.pipeline.fold.metrics import DAY_NS, day_metrics
from taskyard.pipeline.fold.schemas import LEVELS
from taskyard.pipeline.fold.share import FoldedShare, fold_share
from taskyard.pipeline.fold.stays import FoldedStays, fold_stays
from tests.pipeline.event_log import START_NS, EventLog, at
from tests.pipeline.fold.histories import BROKER, SECOND_NS, log_of_two


def fold(events: pa.Table) -> tuple[FoldedShare, FoldedStays]:
    found = fold_share(events, BROKER)
    return found, fold_stays(events, found.attempts, found.attempts_open, BROKER)


def rows_of(scope: str, *columns: str) -> list[tuple[Any, ...]]:
    folded, stays = fold(log_of_two().tables()[0])
    workers = pa.concat_tables([stays.workers, stays.workers_open])
    found = day_metrics(
        START_NS // DAY_NS, folded.buckets, LEVELS.empty_table(), workers, START_NS + DAY_NS
    )
    assert not len(found.levels)
    rows = [row for row in found.metrics.to_pylist() if row["scope"] == scope]
    return [(row["bucket"].replace(tzinfo=None), *(row[name] for name in columns)) for row in rows]


def test_minute_counts_its_steps_and_has_a_row_if_something_runs() -> None:
    columns = ("submitted", "leased", "finished", "failed", "retries", "depth", "running")
    assert rows_of("campaign", *columns) == [
        (at(0), 2, 0, 0, 0, 0, 2, 0),
        (at(60), 0, 2, 0, 0, 0, 0, 2),
        (at(120), 0, 0, 0, 0, 1, 0, 1),
        (at(180), 0, 0, 0, 0, 0, 0, 1),
        (at(240), 0, 0, 1, 0, 0, 0, 0),
        (at(360), 0, 1, 0, 1, 0, 0, 0),
    ]


def test_busy_time_utilisation_and_reasons() -> None:
    busy = [row[1] / (60 * SECOND_NS) for row in rows_of("campaign", "busy_ns")]
    assert busy == [0, 0.75, 1, 1, 0.5, 0.25]
    found = rows_of("worker", "utilisation", "depth")
    assert found[0] == (at(60), 0.75 / 2, None)
    reasons = [row[1] for row in rows_of("campaign", "reasons")]
    assert [reasons[2], reasons[3], reasons[5]] == [[("busy", 1)], None, [("busy", 1)]]


def test_open_attempt_runs_until_the_last_event_of_the_history() -> None:
    """Levels are carried over midnight. A queue that only waits has no rows."""
    log = EventLog()
    log.submit(0, "waits")
    log.submit(0, "a")
    log.lease(0, "a")
    folded, _ = fold(log.tables()[0])
    buckets = pa.concat_tables([folded.buckets, folded.buckets_open])
    day, workers = START_NS // DAY_NS, fold(log.tables()[0])[1].workers
    last_ns = (day + 1) * DAY_NS + 90 * SECOND_NS
    first = day_metrics(day, buckets, LEVELS.empty_table(), workers, last_ns)
    assert len(first.metrics) == 3 * 12 * 60, "campaign, service and worker from noon on"
    second = day_metrics(day + 1, buckets.slice(0, 0), first.levels, workers, last_ns)
    columns = ["scope", "depth", "running", "busy_ns"]
    assert second.metrics.select(columns).to_pylist() == [
        dict(zip(columns, (scope, depth, 1, busy_s * SECOND_NS), strict=True))
        for scope, depth in (("campaign", 1), ("service", 1), ("worker", None))
        for busy_s in (60, 30)
    ]
    third = day_metrics(day + 2, buckets.slice(0, 0), second.levels, workers, last_ns)
    assert not len(third.metrics)


def test_bins_are_ordered_and_close_to_their_values() -> None:
    rng = Random(1)
    values = np.array(
        sorted([*range(600), *(rng.randrange(1 << rng.randrange(1, 63)) for _ in range(5000))])
    )
    found = bins(values)
    assert (np.diff(found) >= 0).all()
    assert (np.abs(middles(found) - values) <= values * ERROR_MAX).all()
    assert (bins(middles(found)) == found).all()
    assert (middles(found[:256]) == values[:256]).all(), "exact"
    assert bins(np.array([-5]))[0] == 0


def test_percentile_has_the_exact_rank() -> None:
    rng = Random(2)
    values = sorted(rng.randrange(1, 10**10) for _ in range(101))
    numbers, counts = np.unique(bins(np.array(values)), return_counts=True)
    rows = np.ones(len(numbers), np.int64)
    for share, rank in ((0.5, 51), (0.95, 96)):
        found = percentile(rows, numbers, counts, 2, share)
        assert found.is_known.tolist() == [False, True]
        assert bins(found.values)[1] == bins(np.array([values[rank - 1]]))[0]
