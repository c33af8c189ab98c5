"""Requests of workers for tasks: each gets one reply. Workers that are woken, not served."""

from taskyard.core.effects import Assign, Effect, NoWork, ReportAck, Shutdown, UnknownWorker, Wake
from taskyard.core.events import (
    DrainRequested,
    Outcome,
    TasksRequested,
    TasksReturned,
    WaitEnded,
    WorkerExited,
    WorkerRegistered,
    WorkerUnreachable,
)
from taskyard.core.model import WorkerFacts
from tests.core.kit import Yard, assigned

TEN_NS = 10_000_000_000


def parked(request: int = 7) -> Yard:
    """Return a yard whose worker waits by this request."""
    yard = Yard()
    yard.join(b"w", lease_timeout_ns=TEN_NS, slots_total=5)
    assert yard.handle(TasksRequested(0, b"w", 1, request=request)) == []
    return yard


def requests(effects: list[Effect], kind: type) -> list[int]:
    return [effect.request for effect in effects if isinstance(effect, kind)]  # type: ignore[attr-defined]


def test_assignment_replies_to_the_waiting_request() -> None:
    yard = parked(7)
    assert requests(yard.submit(b"a"), Assign) == [7]
    assert requests(yard.submit(b"b"), Assign) == []


def test_immediate_assignment_replies_to_its_request() -> None:
    yard = Yard()
    yard.submit(b"a")
    yard.join(b"w")
    assert requests(yard.handle(TasksRequested(0, b"w", 1, parks=False, request=3)), Assign) == [3]


def test_new_request_ends_the_former_with_no_work() -> None:
    yard = parked(7)
    assert yard.handle(TasksRequested(0, b"w", 1, request=8)) == [
        NoWork(b"w", settled=False, request=7)
    ]
    assert requests(yard.submit(b"a"), Assign) == [8]


def test_request_that_does_not_wait_replaces_one_that_does() -> None:
    yard = parked(7)
    replies = yard.handle(TasksRequested(0, b"w", 1, parks=False, request=8))
    assert replies == [
        NoWork(b"w", settled=False, request=7),
        NoWork(b"w", settled=True, request=8),
    ]
    assert requests(yard.submit(b"a"), Assign) == []


def test_wait_that_ends_gets_no_work_and_nothing_more() -> None:
    yard = parked(7)
    assert yard.handle(WaitEnded(0, b"w", 7)) == [NoWork(b"w", settled=True, request=7)]
    assert requests(yard.submit(b"a"), Assign) == []


def test_end_of_a_former_wait_leaves_the_present_request_open() -> None:
    yard = parked(7)
    yard.handle(TasksRequested(0, b"w", 1, request=8))
    assert yard.handle(WaitEnded(0, b"w", 7)) == [NoWork(b"w", settled=False, request=7)]
    assert requests(yard.submit(b"a"), Assign) == [8]


def test_wait_of_a_worker_that_is_gone_ends_all_the_same() -> None:
    yard = parked(7)
    replies = yard.handle(WorkerExited(0, b"w", 9))
    assert replies == [NoWork(b"w", settled=False, request=7), ReportAck(b"w", 9, [])]
    assert yard.handle(WaitEnded(0, b"w", 7)) == [NoWork(b"w", settled=False, request=7)]


def test_open_request_of_a_lost_worker_gets_a_reply() -> None:
    yard = parked(7)
    assert yard.later(10) == [NoWork(b"w", settled=False, request=7)]


def test_request_of_a_former_process_gets_a_reply() -> None:
    yard = parked(7)
    replies = yard.handle(WorkerRegistered(0, b"w", WorkerFacts(incarnation=1)))
    assert replies == [NoWork(b"w", settled=False, request=7)]


def test_unreachable_worker_has_no_open_request() -> None:
    yard = parked(7)
    yard.handle(WorkerUnreachable(0, b"w"))
    assert yard.handle(TasksRequested(0, b"w", 1, request=8)) == []


def test_unknown_worker_gets_a_reply_to_its_request() -> None:
    yard = Yard()
    assert yard.handle(TasksRequested(0, b"x", 1, request=5)) == [UnknownWorker(b"x", 5)]
    assert yard.handle(WorkerExited(0, b"x", 6)) == [UnknownWorker(b"x", 6)]
    assert yard.handle(TasksReturned(0, b"x", [b"a"], request=7)) == [UnknownWorker(b"x", 7)]


def test_drained_worker_is_shut_down_by_its_request() -> None:
    yard = parked(7)
    assert requests(yard.handle(DrainRequested(0, b"client")), Shutdown) == [7]
    assert yard.handle(TasksRequested(0, b"w", 1, request=8)) == [Shutdown(b"w", 8)]


def test_draining_worker_waits_for_its_dismissal_until_it_holds_nothing() -> None:
    yard = parked(7)
    yard.submit(b"a")
    yard.handle(DrainRequested(0, b"client"))
    assert yard.handle(TasksRequested(0, b"w", 1, request=8)) == []
    assert yard.handle(WaitEnded(0, b"w", 8)) == [NoWork(b"w", settled=False, request=8)]
    assert yard.handle(TasksRequested(0, b"w", 1, request=9)) == []
    assert requests(yard.finish(b"w", b"a"), Shutdown) == [9]


# Workers that are woken.


def woken(effects: list[Effect]) -> list[bytes]:
    return [effect.worker for effect in effects if isinstance(effect, Wake)]


def test_worker_is_woken_again_for_the_task_that_it_failed() -> None:
    yard = Yard()
    yard.join(b"w", wants_wake=True)
    yard.ask(b"w", parks=True)
    assert woken(yard.submit(b"a", retry_delays_ns=(1,))) == [b"w"]
    yard.ask(b"w")
    yard.report(b"w", b"a", Outcome.FAILED)
    yard.ask(b"w", parks=True)
    assert woken(yard.later(1)) == [b"w"]


def test_second_worker_is_woken_when_a_failed_task_comes_due_beside_another() -> None:
    yard = Yard()
    for worker in (b"one", b"two"):
        yard.join(worker, wants_wake=True)
    yard.ask(b"one", parks=True)
    assert woken(yard.submit(b"a", retry_delays_ns=(1,))) == [b"one"]
    yard.ask(b"one")
    yard.report(b"one", b"a", Outcome.FAILED)
    for worker in (b"one", b"two"):
        yard.ask(worker, parks=True)
    first = woken(yard.submit(b"b"))
    assert sorted(first + woken(yard.later(0.5))) == [b"one", b"two"]


def test_worker_that_was_woken_twice_does_not_keep_another_from_being_woken() -> None:
    yard = Yard()
    for worker in (b"u", b"w"):
        yard.join(worker, wants_wake=True)
    yard.ask(b"u", parks=True)
    assert woken(yard.submit(b"a")) == [b"u"]
    assert woken(yard.ask(b"u", parks=True)) == [b"u"]  # it asked again before the wake reached it
    yard.ask(b"w", parks=True)
    assert woken(yard.submit(b"b")) == [b"w"]


def test_another_worker_is_woken_when_the_woken_one_takes_a_task_of_another_service() -> None:
    yard = Yard()
    yard.join(b"u", wants_wake=True, services=(b"x", b"y"))
    yard.ask(b"u", parks=True)
    assert woken(yard.submit(b"y0", service=b"y")) == [b"u"]
    yard.join(b"w", wants_wake=True, services=(b"y",))
    yard.ask(b"w", parks=True)
    yard.submit(b"x0", service=b"x")
    effects = yard.ask(b"u")
    assert (assigned(effects), woken(effects)) == ([b"x0"], [b"w"])
