"""Stays of workers: where they begin and end, and their busy time against brute force."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest

from taskyard.pipeline.fold.columns import plain
from taskyard.pipeline.fold.schemas import WORKERS
from taskyard.pipeline.fold.share import fold_share
from taskyard.pipeline.fold.stays import FoldedStays, fold_stays
from taskyard.pipeline.fold.steps import Carried
from tests.pipeline.event_log import EventLog, at
from tests.pipeline.fold.histories import BROKER, SECOND_NS


def fold(events: pa.Table) -> FoldedStays:
    found = fold_share(events, BROKER)
    return fold_stays(events, found.attempts, found.attempts_open, BROKER)


def test_stay_ends_when_the_worker_leaves_or_its_process_changes() -> None:
    log = EventLog()
    log.join(0, "w", slots=2)
    log.submit(0, "a")
    log.lease(1, "a", "w")
    log.join(6, "w", slots=4)
    log.add(10, "worker_left", worker="w", reason="exit")
    log.join(20, "w", incarnation=2)
    log.join(25, "w", incarnation=3)
    found = fold(log.tables()[0])
    columns = ("stay", "incarnation", "slots", "joined", "left", "attempts", "reason")
    final, still_open = (
        [tuple(row[name] for name in columns) for row in plain(table, WORKERS).to_pylist()]
        for table in (found.workers, found.workers_open)
    )
    assert [row[:3] for row in final] == [(2, 2, 1)], "replaced, without attempts"
    assert [row[:3] for row in still_open] == [(1, 1, 4), (3, 3, 1)], "one has an open attempt"
    assert still_open[0][3].replace(tzinfo=None) == at(0)
    assert still_open[0][4].replace(tzinfo=None) == at(10)
    assert still_open[0][5:] == (1, "exit")


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(2, 20))]
)
def test_busy_time_counts_each_moment_once(seed: int) -> None:
    """Second by second, over attempts that overlap, in one fold and in many."""
    rng = Random(seed)
    log, busy = EventLog(), set[int]()
    log.join(0, "w", slots=3)
    spans = [(begin, begin + rng.randrange(1, 9)) for begin in rng.sample(range(60), 25)]
    moments = [
        (at, f"t{number}", kind)
        for number, span in enumerate(spans)
        for kind, at in enumerate(span)
    ]
    for number in range(len(spans)):
        log.submit(0, f"t{number}")
    for second, task, kind in sorted(moments, key=lambda one: one[0]):
        if kind:
            log.finish(second, task)
        else:
            log.lease(second, task)
    for begin, end in spans:
        busy.update(range(begin, end))
    events, _ = log.tables()
    carried: Carried | None = None
    stays: FoldedStays | None = None
    for first in range(0, len(events), 10):
        folded = fold_share(events.slice(first, 10), BROKER, carried)
        before = None if stays is None else stays.carried
        ended, still_open = folded.attempts, folded.attempts_open
        stays = fold_stays(events.slice(first, 10), ended, still_open, BROKER, before)
        carried = folded.carried
    assert stays is not None
    for found in (stays, fold(events)):
        (row,) = found.workers_open.to_pylist()
        assert row["busy_ns"] == len(busy) * SECOND_NS
        assert row["run_ns"] == sum(end - begin for begin, end in spans) * SECOND_NS
        assert row["finished"] == row["attempts"] == len(spans)
    assert len(stays.carried.work) < len(spans), "spans that touch are merged"
