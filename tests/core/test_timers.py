"""Timers: due times, expiry, wakes, rates, and a `wake_at_ns` that is never late."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.core import timers
from taskyard.core.effects import Wake
from taskyard.core.events import DiskSpaceChanged, Outcome, RulesSet, SubmitRequested, TimePassed
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.records import CameDue, TaskExpired
from taskyard.core.rules import LaneOptions
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import NEVER_NS
from tests.core.kit import Yard, assigned
from tests.core.strategies import Step, steps, take_step

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState


# Due times.


def test_delayed_tasks_come_due_together_and_go_to_parked_workers() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.ask(b"w", 9, parks=True)
    yard.submit(b"a", b"b", due_ns=SECOND_NS)
    assert yard.scheduler.wake_at_ns() == SECOND_NS
    yard.later(0.5)
    assert yard.records == []
    assert assigned(yard.later(0.5)) == [b"a", b"b"]
    assert yard.records[0] == CameDue(SECOND_NS, [b"a", b"b"])
    assert yard.scheduler.wake_at_ns() == NEVER_NS


def test_full_disk_holds_delayed_tasks_until_there_is_room() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.ask(b"w", 9, parks=True)
    yard.submit(b"a", due_ns=SECOND_NS)
    yard.handle(DiskSpaceChanged(0, accepting=False))
    assert yard.scheduler.wake_at_ns() == NEVER_NS
    assert assigned(yard.later(2)) == []
    found = yard.handle(DiskSpaceChanged(yard.now_ns, accepting=True))
    assert yard.records[0] == CameDue(2 * SECOND_NS, [b"a"])
    assert assigned(found) == [b"a"]


def test_due_time_is_by_the_wall_clock_also_when_it_jumps() -> None:
    yard = Yard()
    yard.clock(1000 * SECOND_NS)
    yard.submit(b"a", due_ns=1010 * SECOND_NS)
    assert yard.scheduler.wake_at_ns() == 10 * SECOND_NS
    yard.clock(500 * SECOND_NS)
    assert yard.scheduler.wake_at_ns() == 510 * SECOND_NS
    yard.later(10)
    assert yard.state(b"a") is DELAYED
    yard.clock(2000 * SECOND_NS)
    assert yard.state(b"a") is READY


def test_task_that_is_released_before_its_time_waits_for_it() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a")
    yard.submit(b"early", b"late", due_ns=10 * SECOND_NS, after=[[b"a"], [b"a"]])
    yard.submit(b"now", after=[[b"a"]])
    yard.take(b"w")
    yard.finish(b"w", b"a")
    assert yard.states(b"early", b"late", b"now") == [DELAYED, DELAYED, READY]
    yard.later(10)
    assert yard.states(b"early", b"late") == [READY, READY]


def test_more_than_a_turn_can_move_follows_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    yard = Yard()
    for number in range(5):
        yard.submit(b"%d" % number, due_ns=SECOND_NS)
    monkeypatch.setattr(timers, "TIMER_TASKS_MAX", 2)
    for ready in (2, 4, 5):
        assert (yard.scheduler.wake_at_ns() or 0) <= yard.now_ns or ready == 2
        yard.later(1 if ready == 2 else 0)
        assert yard.scheduler.ledger.counts[READY] == ready
    assert yard.scheduler.wake_at_ns() == NEVER_NS


# Age.


def test_task_ends_failed_when_its_time_is_over_tried_or_not() -> None:
    yard = Yard()
    yard.submit(b"a", expires_hard_ns=SECOND_NS)
    yard.submit(b"b", after=[[b"a"]], expires_hard_ns=SECOND_NS)
    yard.submit(b"c", due_ns=5 * SECOND_NS, expires_hard_ns=SECOND_NS)
    assert yard.scheduler.wake_at_ns() == SECOND_NS
    yard.later(1)
    assert yard.records == [TaskExpired(SECOND_NS, [b"a", b"b", b"c"])]
    assert yard.states(b"a", b"b", b"c") == [FAILED] * 3
    assert set(yard.scheduler.ledger.reasons.values()) == {b"too old"}
    yard.join(b"w")
    assert yard.take(b"w", 9) == []


def test_expired_task_is_never_leased() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.later(2)
    yard.submit(b"late", expires_hard_ns=3 * SECOND_NS)
    yard.now_ns = 3 * SECOND_NS
    assert yard.take(b"w") == []  # before `TimePassed`
    yard.join(b"parked")
    yard.ask(b"parked", parks=True)
    assert assigned(yard.submit(b"past", expires_hard_ns=SECOND_NS)) == []
    assert yard.states(b"late", b"past") == [FAILED, FAILED]


def test_task_that_was_not_tried_does_not_grow_too_old_by_the_soft_limit() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", expires_ns=SECOND_NS, retry_delays_ns=(5 * SECOND_NS,))
    yard.later(2)
    assert yard.state(b"a") is READY
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.REFUSED)
    yard.later(0)
    assert yard.state(b"a") is READY
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED)
    yard.later(0)
    assert (yard.state(b"a"), yard.scheduler.ledger.reasons[b"a"]) == (FAILED, b"too old")


def test_leased_task_may_finish_after_its_expiry() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", expires_hard_ns=SECOND_NS)
    yard.take(b"w", 2)
    yard.later(9)
    assert yard.states(b"a", b"b") == [LEASED, LEASED]
    yard.finish(b"w", b"a")
    yard.report(b"w", b"b", Outcome.REFUSED)
    yard.later(0)
    assert yard.states(b"a", b"b") == [DONE, FAILED]


def test_task_expires_although_the_clock_jumped_past_its_expiry_and_back_while_leased() -> None:
    yard = Yard()
    yard.submit(b"a", expires_hard_ns=10 * SECOND_NS)
    yard.join(b"w")
    yard.take(b"w")
    yard.clock(99 * SECOND_NS)
    yard.later(0)
    yard.clock(0)
    yard.report(b"w", b"a", Outcome.REFUSED)
    yard.later(9)
    assert yard.state(b"a") is READY
    yard.later(1)
    assert yard.state(b"a") is FAILED


def test_age_is_looked_at_again_when_a_lost_task_comes_back() -> None:
    yard = Yard()
    yard.submit(b"a", expires_ns=SECOND_NS)
    yard.join(b"w", lease_timeout_ns=5 * SECOND_NS)
    yard.take(b"w")
    yard.later(5)
    yard.later(0)
    assert yard.state(b"a") is FAILED


def test_ended_and_forgotten_tasks_do_not_grow_old() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", expires_hard_ns=SECOND_NS)
    yard.cancel(b"a", b"b")
    yard.scheduler.ledger.archive([b"b"])
    yard.mirror.archive([b"b"])
    yard.later(1)
    assert yard.records == []


def test_tasks_of_one_submission_may_grow_old_at_different_times() -> None:
    yard = Yard()
    terms = [Terms(expires_hard_ns=2 * SECOND_NS), Terms(), Terms(expires_hard_ns=SECOND_NS)]
    submission = Submission([b"a", b"b", b"c", b"d"], terms=terms, terms_at=[2, 0, 1, 2])
    yard.handle(SubmitRequested(0, b"client", submission))
    yard.later(1)
    assert yard.states(b"a", b"b", b"c", b"d") == [FAILED, READY, READY, FAILED]
    yard.later(1)
    assert yard.states(b"a", b"b", b"c", b"d") == [FAILED, FAILED, READY, FAILED]


def test_retry_of_a_task_that_is_too_old_forgives_its_age_live_and_recovered() -> None:
    yard = Yard()
    yard.submit(b"a", expires_hard_ns=SECOND_NS)
    yard.later(2)
    assert yard.state(b"a") is FAILED
    yard.retry(b"a")
    again = Scheduler(yard.mirror)
    again.handle(TimePassed(yard.now_ns))
    yard.later(0)
    states = [yard.state(b"a"), again.ledger.tasks[b"a"].state]
    assert states == [READY, READY]
    yard.join(b"w")
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.REFUSED)
    yard.later(0)
    assert yard.state(b"a") is READY


# Rates and calls.


def test_wake_time_is_set_for_the_rate_while_a_worker_waits_for_it() -> None:
    yard = Yard()
    yard.rules(rate_interval_ns=SECOND_NS)
    yard.submit(b"a", b"b")
    yard.join(b"w", slots_total=9, always_ready=True)
    assert yard.scheduler.wake_at_ns() == SECOND_NS
    assert assigned(yard.later(1)) == [b"b"]
    yard.later(1)
    assert yard.scheduler.wake_at_ns() == NEVER_NS


def test_alarm_is_not_set_for_a_rate_that_is_not_what_holds_the_work_back() -> None:
    yard = Yard()
    yard.handle(RulesSet(0, defaults=LaneOptions(workers_max=1, rate_interval_ns=SECOND_NS)))
    yard.submit(b"a", b"b")
    for worker in (b"v", b"w"):
        yard.join(worker)
        yard.ask(worker, parks=True)
    yard.later(100)
    wake_at_ns = yard.scheduler.wake_at_ns()
    assert wake_at_ns > yard.now_ns


def test_alarm_is_set_for_a_call() -> None:
    yard = Yard()
    yard.join(b"w", wants_wake=True)
    yard.ask(b"w", parks=True)
    yard.submit(b"a")
    assert yard.scheduler.wake_at_ns() == SECOND_NS
    assert yard.later(1) == [Wake(b"w", b"default")]
    assert yard.scheduler.wake_at_ns() == 2 * SECOND_NS


# The alarm is never late, and never rings for nothing at once.


@pytest.mark.slow
@pytest.mark.no_cover
@given(steps(30), st.integers(1, 40))
def test_nothing_happens_by_time_before_the_alarm(scenario: list[Step], seconds: int) -> None:
    yard = Yard()
    for step in scenario:
        take_step(yard, step)
    wake_at_ns = yard.scheduler.wake_at_ns()
    target_ns = yard.now_ns + seconds * SECOND_NS
    before_ns = min(target_ns, wake_at_ns - 1)
    if before_ns > yard.now_ns:
        yard.now_ns = before_ns
        assert yard.later(0) == []
        assert yard.records == []


@pytest.mark.no_cover
@given(steps(30))
def test_wake_time_is_in_the_future_after_time_passed(scenario: list[Step]) -> None:
    yard = Yard()
    for step in scenario:
        take_step(yard, step)
    for _ in range(3):
        yard.later(0)
    wake_at_ns = yard.scheduler.wake_at_ns()
    assert wake_at_ns > yard.now_ns
