"""Buckets, histograms and metrics of hand-written histories and of simulated ones."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from taskyard.pipeline.fold.buckets import add_up, resampled
from taskyard.pipeline.fold.histograms import ERROR_MAX, bins, middles, percentile
from taskyard.pipeline.fold.metrics import metrics
from taskyard.pipeline.fold.schemas import BUCKETS
from taskyard.pipeline.fold.share import FoldedShare, fold_share
from taskyard.pipeline.fold.stays import FoldedStays, fold_stays
from tests.pipeline.event_log import EventLog, at
from tests.pipeline.fold.histories import BROKER, SECOND_NS, history, table_rows


def fold(events: pa.Table) -> tuple[FoldedShare, FoldedStays]:
    found = fold_share(events, BROKER, bucket_ns=SECOND_NS)
    return found, fold_stays(events, found.attempts, found.attempts_open, BROKER)


def log_of_two() -> EventLog:
    """Return a log of two tasks. One is done after three seconds, the other fails twice."""
    log = EventLog()
    log.join(0, "w", slots=2)
    log.submit(0, "a")
    log.submit(0.5, "b")
    log.lease(1.5, "a")
    log.lease(1.75, "b")
    log.add(2, "postponed", "b", worker="w", reason=" busy\nsince noon", own_fault=True)
    log.finish(4.5, "a")
    log.add(6, "due", "b")
    log.ready(6, "b", "due")
    log.lease(6.25, "b")
    log.fail(6.5, "b", "busy")
    return log


def rows_of(scope: str, *columns: str) -> list[tuple[Any, ...]]:
    folded, stays = fold(log_of_two().tables()[0])
    workers = pa.concat_tables([stays.workers, stays.workers_open])
    table = metrics([folded.buckets, folded.buckets_open], workers, SECOND_NS)
    rows = [row for row in table.to_pylist() if row["scope"] == scope]
    return [(row["bucket"].replace(tzinfo=None), *(row[name] for name in columns)) for row in rows]


def test_each_interval_counts_its_steps_and_empty_ones_have_a_row() -> None:
    columns = ("submitted", "leased", "finished", "failed", "retries", "depth", "running")
    assert rows_of("campaign", *columns) == [
        (at(0), 2, 0, 0, 0, 0, 2, 0),
        (at(1), 0, 2, 0, 0, 0, 0, 2),
        (at(2), 0, 0, 0, 0, 1, 0, 1),
        (at(3), 0, 0, 0, 0, 0, 0, 1),
        (at(4), 0, 0, 1, 0, 0, 0, 0),
        (at(5), 0, 0, 0, 0, 0, 0, 0),
        (at(6), 0, 1, 0, 1, 0, 0, 0),
    ]


def test_busy_time_utilisation_and_reasons() -> None:
    busy = [row[1] / SECOND_NS for row in rows_of("campaign", "busy_ns")]
    assert busy == [0, 0.75, 1, 1, 0.5, 0, 0.25]
    found = rows_of("worker", "utilisation", "depth")
    assert found[0] == (at(1), 0.75 / 2, None)
    reasons = [row[1] for row in rows_of("campaign", "reasons")]
    assert [reasons[2], reasons[3], reasons[6]] == [[("busy", 1)], None, [("busy", 1)]]


@pytest.mark.parametrize("seed", [3, 7])
def test_wider_buckets_equal_those_made_from_the_changes(seed: int) -> None:
    events = history(seed, 0.7).events
    narrow = fold_share(events, BROKER, bucket_ns=SECOND_NS)
    wide = fold_share(events, BROKER, bucket_ns=5 * SECOND_NS)
    for name in ("buckets", "buckets_open"):
        made = resampled(getattr(narrow, name), 5 * SECOND_NS)
        expected = add_up([getattr(wide, name)])
        assert table_rows([made], BUCKETS) == table_rows([expected], BUCKETS)


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
