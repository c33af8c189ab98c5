"""Regressions: bugs that reviews found in the scheduler."""

from typing import Any

import pytest

from taskyard.core.effects import Assign, Refused, ReportAck, Wake
from taskyard.core.events import (
    DrainRequested,
    DuplicatePolicy,
    Outcome,
    RulesSet,
    SubmitRequested,
    WorkerHeartbeat,
    WorkerRegistered,
    WorkerUnreachable,
)
from taskyard.core.limits import NUMBER_MAX, RETRIES_MAX, SECOND_NS
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.records import Postponed
from taskyard.core.rules import LaneOptions
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from tests.core.kit import Yard, assigned


@pytest.mark.parametrize("attempts", [None, [1, 1]])
def test_report_of_a_whole_lease_again_is_stale_where_it_was_settled(attempts: Any) -> None:
    yard = Yard()
    yard.submit(b"a", b"b")
    yard.join(b"w")
    yard.take(b"w", 2)
    yard.finish(b"w", b"b")
    assert yard.finish(b"w", b"a", b"b", attempts=attempts) == [ReportAck(b"w", 0, [b"b"])]


def test_report_of_a_whole_lease_does_not_finish_what_another_worker_holds_now() -> None:
    yard = Yard()
    yard.submit(b"a", b"b")
    yard.join(b"w")
    yard.join(b"v")
    yard.take(b"w", 2)
    yard.report(b"w", b"b", Outcome.REFUSED)
    assert yard.take(b"v") == [b"b"]
    assert yard.finish(b"w", b"a", b"b") == [ReportAck(b"w", 0, [b"b"])]
    assert yard.states(b"a", b"b") == [TaskState.DONE, TaskState.LEASED]


def wants_wake(yard: Yard, worker: bytes, *services: bytes) -> None:
    yard.join(worker, slots_total=1, wants_wake=True, services=services or (b"default",))
    yard.ask(worker, parks=True)


@pytest.mark.parametrize("goes", ["leaves", "is cut off", "is drained"])
def test_next_worker_is_woken_when_the_woken_one_leaves(goes: str) -> None:
    yard = Yard()
    wants_wake(yard, b"w1")
    wants_wake(yard, b"w2")
    assert Wake(b"w1", b"default") in yard.submit(b"a")
    if goes == "leaves":
        effects = yard.leave(b"w1")
    elif goes == "is cut off":
        effects = yard.handle(WorkerUnreachable(0, b"w1"))
    else:
        effects = yard.handle(DrainRequested(0, b"c", b"w1"))
    assert Wake(b"w2", b"default") in effects


def test_worker_woken_for_one_service_does_not_count_for_another() -> None:
    yard = Yard()
    wants_wake(yard, b"w1", b"A", b"B")
    wants_wake(yard, b"w2", b"B")
    assert Wake(b"w1", b"A") in yard.submit(b"a", service=b"A")
    assert Wake(b"w2", b"B") in yard.submit(b"b", service=b"B")


def test_woken_worker_that_gets_nothing_keeps_waiting_and_is_woken_again() -> None:
    yard = Yard()
    wants_wake(yard, b"w")
    yard.submit(b"a")
    yard.join(b"fast")
    yard.take(b"fast")
    yard.ask(b"w")
    assert Wake(b"w", b"default") in yard.submit(b"b")


def test_standing_worker_gets_work_again_after_a_restart_and_after_a_cut() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, always_ready=True, lease_timeout_ns=60 * SECOND_NS)
    yard.scheduler = Scheduler(yard.scheduler.ledger)
    for worker in yard.scheduler.ledger.workers.values():  # as recovered
        worker.state, worker.listed_as, worker.timeout_check_ns = type(worker.state)(0), -1, 0
    yard.scheduler.resume(0)
    yard.submit(b"a")
    assert assigned(yard.handle(WorkerHeartbeat(0, b"w"))) == [b"a"]
    yard.finish(b"w", b"a")
    yard.handle(WorkerUnreachable(0, b"w"))
    yard.submit(b"b")
    assert assigned(yard.handle(WorkerHeartbeat(0, b"w"))) == [b"b"]


def test_terms_that_two_submissions_share_are_not_written_to() -> None:
    yard = Yard()
    terms = Terms(submitted_ns=77)
    yard.handle(SubmitRequested(0, b"c", Submission([b"a"], terms=[terms])))
    yard.later(5)
    yard.handle(SubmitRequested(0, b"c", Submission([b"b"], terms=[terms])))
    assert (yard[b"a"].terms.submitted_ns, yard[b"b"].terms.submitted_ns) == (0, 5 * SECOND_NS)
    assert terms.submitted_ns == 77


def test_due_times_beyond_all_numbers_are_kept_within_them() -> None:
    yard = Yard()
    yard.handle(RulesSet(0, defaults=LaneOptions(jitter_percent=100)))
    yard.submit(b"a", b"b", retry_delays_ns=(NUMBER_MAX,))
    yard.join(b"w")
    yard.take(b"w", 2)
    yard.report(b"w", b"a", Outcome.FAILED, random_bits=2**32 - 1)
    yard.report(b"w", b"b", Outcome.RETRY_AT, retry_at_ns=[2**70])
    assert [yard[name].due_ns for name in (b"a", b"b")] == [NUMBER_MAX, NUMBER_MAX]
    assert isinstance(yard.records[0], Postponed)


@pytest.mark.parametrize(
    "facts",
    [
        {"slots_total": -1},
        {"lease_timeout_ns": 2**64},
        {"incarnation": 2**70},
        {"services": tuple(b"%d" % number for number in range(1001))},
        {"services": (b"x" * 2000,)},
    ],
)
def test_worker_with_unsound_facts_is_refused(facts: dict[str, Any]) -> None:
    yard = Yard()
    (refused,) = yard.handle(WorkerRegistered(0, b"w", WorkerFacts(**facts)))
    assert isinstance(refused, Refused)
    assert not yard.scheduler.ledger.workers


def test_schedule_of_too_many_retries_and_terms_without_tasks_are_refused() -> None:
    yard = Yard()
    (refused,) = yard.submit(b"a", retry_delays_ns=(1,) * (RETRIES_MAX + 1))
    assert isinstance(refused, Refused)
    submission = Submission([b"a"], terms=[Terms(), Terms()], terms_at=[0])
    (refused,) = yard.handle(SubmitRequested(0, b"c", submission))
    assert isinstance(refused, Refused)


def test_suspect_that_is_too_wide_does_not_hide_the_one_that_fits() -> None:
    yard = Yard()
    yard.submit(b"wide", slots=4, priority=9)
    yard.submit(b"slim")
    yard.lose(b"gone", b"wide", b"slim", times=2)
    yard.join(b"w", slots_total=1)
    assert yard.take(b"w") == [b"slim"]


def test_extending_many_ready_tasks_in_any_order_leaves_the_queue_right() -> None:
    yard = Yard()
    names = [b"t%03d" % number for number in range(50)]
    yard.submit(*names, b"gate")
    middle = names[10:40:2][::-1]
    yard.submit(*middle, after=[[b"gate"]] * len(middle), repeat=DuplicatePolicy.EXTEND)
    yard.join(b"w")
    left = [name for name in names if name not in middle]
    assert yard.take(b"w", 99) == [*left, b"gate"]
    yard.finish(b"w", b"gate")
    assert yard.take(b"w", 99) == middle


def test_cancelled_heads_are_passed_over_one_lease_at_a_time() -> None:
    yard = Yard()
    names = [b"t%03d" % number for number in range(20)]
    yard.submit(*names)
    yard.cancel(*names[::2])
    yard.join(b"w")
    assert [yard.take(b"w") for _ in range(10)] == [[name] for name in names[1::2]]


def test_heartbeat_without_an_interval_returns_no_task() -> None:
    yard = Yard()
    yard.submit(b"a")
    yard.join(b"w", lease_timeout_ns=SECOND_NS)
    yard.take(b"w")
    assert yard.handle(WorkerHeartbeat(0, b"w", [])) == []
    assert yard.state(b"a") is TaskState.LEASED


def test_assignments_name_their_lanes() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c", lanes=[b"x", b"y", b""])
    yard.join(b"w")
    (assign,) = yard.ask(b"w", 9)
    assert isinstance(assign, Assign)
    assert dict(zip(assign.names, assign.lanes, strict=True)) == {b"a": b"x", b"b": b"y", b"c": b""}
