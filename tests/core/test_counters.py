"""Counters of the scheduler: each decision counts once, by its service."""

import pytest

from taskyard.core.counters import (
    OTHER_SERVICES,
    OUTCOMES,
    SERVICES_COUNTED_MAX,
    TASK_BOUNDS_NS,
    TURN_BOUNDS_NS,
    Counters,
    task_histogram,
    turn_histogram,
)
from taskyard.core.events import Outcome, StatsRequested
from taskyard.core.limits import SECOND_NS
from taskyard.core.runs import Run, run_columns
from tests.core.kit import Yard


@pytest.fixture
def yard() -> Yard:
    return Yard()


def counters(yard: Yard) -> Counters:
    return yard.scheduler.context.counters.copied()


def attempts(yard: Yard, service: bytes = b"default") -> dict[str, int]:
    counts = counters(yard).services[service].attempts
    return {name: count for name, count in zip(OUTCOMES, counts, strict=True) if count}


@pytest.mark.parametrize("bounds", [TASK_BOUNDS_NS, TURN_BOUNDS_NS])
def test_bounds_grow(bounds: tuple[int, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_bucket_includes_its_upper_bound() -> None:
    found = task_histogram()
    for value_ns in (0, TASK_BOUNDS_NS[0], TASK_BOUNDS_NS[0] + 1, TASK_BOUNDS_NS[-1] + 1):
        found.add(value_ns)
    found = found.copied()
    assert found.counts == [2, 1, *[0] * (len(TASK_BOUNDS_NS) - 2), 1]
    assert found.sum_ns == 2 * TASK_BOUNDS_NS[0] + 1 + TASK_BOUNDS_NS[-1] + 1
    assert found.longest_ns == TASK_BOUNDS_NS[-1] + 1


def test_durations_together_count_like_each_alone() -> None:
    together, alone = task_histogram(), task_histogram()
    for number in range(2000):
        value_ns = number**4 - 10
        together.add(value_ns)
        alone.add(value_ns)
        alone = alone.copied()
    assert together.copied() == alone


def test_duration_before_zero_counts_as_zero() -> None:
    found = task_histogram()
    found.add(-5)
    found = found.copied()
    assert (found.counts[0], found.sum_ns, found.longest_ns) == (1, 0, 0)


def test_quantile_lies_within_its_bucket_and_below_the_longest() -> None:
    found = turn_histogram()
    assert found.quantile_ns(0.5) == 0
    found.add(TURN_BOUNDS_NS[3] + 1, times=99)
    found.add(TURN_BOUNDS_NS[8] + 1)
    found = found.copied()
    assert TURN_BOUNDS_NS[3] < found.quantile_ns(0.5) <= TURN_BOUNDS_NS[4]
    assert found.quantile_ns(1.0) == TURN_BOUNDS_NS[8] + 1


def test_finished_batch_counts_by_service(yard: Yard) -> None:
    yard.join(b"w", services=(b"default", b"x"), slots_total=0)
    yard.submit(b"a", b"b")
    yard.submit(b"c", service=b"x")
    yard.take(b"w", 3)
    yard.finish(b"w", b"a", b"b", b"c")
    assert counters(yard).submitted == 3
    assert attempts(yard) == {"finished": 2}
    assert attempts(yard, b"x") == {"finished": 1}


def test_run_is_as_measured_or_else_since_the_lease(yard: Yard) -> None:
    yard.join(b"w")
    yard.submit(b"a", b"b")
    yard.take(b"w", 2)
    yard.later(7)
    start_ns = yard.scheduler.context.at_ns
    yard.finish(b"w", b"a", runs=run_columns([Run(start_ns, 2 * SECOND_NS)], b"host"))
    yard.finish(b"w", b"b")
    run = counters(yard).services[b"default"].run
    assert (run.sum_ns, run.longest_ns) == (9 * SECOND_NS, 7 * SECOND_NS)


def test_wait_begins_when_the_last_predecessor_is_done(yard: Yard) -> None:
    yard.clock(1000 * SECOND_NS)
    yard.join(b"w")
    yard.submit(b"a")
    yard.submit(b"b", after=[[b"a"]])
    yard.later(10)
    yard.take(b"w")
    yard.later(100)
    yard.finish(b"w", b"a")
    yard.later(1)
    yard.take(b"w")
    wait = counters(yard).services[b"default"].wait
    assert (wait.sum_ns, sum(wait.counts)) == (11 * SECOND_NS, 2)


def test_wait_begins_again_when_a_task_is_due(yard: Yard) -> None:
    yard.clock(1000 * SECOND_NS)
    yard.join(b"w")
    yard.submit(b"a", retry_delays_ns=(60 * SECOND_NS,))
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED)
    yard.later(60)
    yard.later(3)
    yard.take(b"w")
    wait = counters(yard).services[b"default"].wait
    assert wait.sum_ns == 3 * SECOND_NS
    assert attempts(yard) == {"postponed": 1}
    assert counters(yard).retries == 1


def test_task_from_before_the_start_has_no_wait(yard: Yard) -> None:
    yard.join(b"w")
    yard.submit(b"a")
    yard.later(5)
    yard.scheduler.context.counters.started_ns = yard.scheduler.context.at_ns
    yard.take(b"w")
    assert sum(counters(yard).services[b"default"].wait.counts) == 0


def test_lost_worker_counts_its_leases(yard: Yard) -> None:
    yard.submit(b"a", crashes_max=2)
    yard.lose(b"w", b"a")
    yard.lose(b"v", b"a")
    assert counters(yard).lease_expiries == 2
    assert attempts(yard) == {"expired": 1, "failed": 1}


def test_stale_and_cancelled_are_counted(yard: Yard) -> None:
    yard.join(b"w")
    yard.submit(b"a", b"b")
    yard.take(b"w")
    yard.cancel(b"a", b"b")
    yard.finish(b"w", b"a")
    assert counters(yard).stale_results == 1
    assert attempts(yard) == {"cancelled": 1}


def test_many_services_are_counted_together() -> None:
    counted = Counters()
    for number in range(SERVICES_COUNTED_MAX + 2):
        counted.service(b"%d" % number).attempts[0] += 1
    assert len(counted.services) == SERVICES_COUNTED_MAX + 1
    assert counted.services[OTHER_SERVICES].attempts[0] == 2


def test_status_is_a_copy(yard: Yard) -> None:
    yard.join(b"w")
    yard.submit(b"a")
    yard.take(b"w")
    (reply,) = yard.handle(StatsRequested(0, b"client", 5))
    yard.finish(b"w", b"a")
    assert reply.stats.counters.services[b"default"].attempts == [0] * len(OUTCOMES)  # type: ignore[attr-defined]
    (brief,) = yard.handle(StatsRequested(0, b"client", 6, is_brief=True))
    assert brief.stats.counters is None  # type: ignore[attr-defined]


def oldest_ready_ns(yard: Yard) -> dict[bytes, int]:
    (reply,) = yard.handle(StatsRequested(0, b"client", 5))
    return reply.stats.oldest_ready_ns  # type: ignore[attr-defined, no-any-return]


def test_oldest_ready_task_is_found_behind_others(yard: Yard) -> None:
    yard.clock(1000 * SECOND_NS)
    yard.join(b"w")
    yard.submit(b"old", priority=-1)
    yard.later(5)
    yard.submit(b"urgent", priority=9)
    yard.submit(b"x", service=b"x")
    assert oldest_ready_ns(yard) == {b"default": 1000 * SECOND_NS, b"x": 1005 * SECOND_NS}
    yard.cancel(b"old")
    assert oldest_ready_ns(yard)[b"default"] == 1005 * SECOND_NS
    yard.take(b"w")
    assert oldest_ready_ns(yard) == {b"x": 1005 * SECOND_NS}


def test_released_task_may_be_the_oldest_ready_one(yard: Yard) -> None:
    yard.clock(1000 * SECOND_NS)
    yard.join(b"w")
    yard.submit(b"first")
    yard.submit(b"second", after=[[b"first"]])
    yard.take(b"w")
    yard.later(5)
    yard.finish(b"w", b"first")
    yard.later(5)
    yard.submit(b"third")
    assert oldest_ready_ns(yard) == {b"default": 1005 * SECOND_NS}
