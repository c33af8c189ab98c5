"""Subscriptions to settled tasks, their texts, and `NoWork.settled` for idle workers."""

import pytest

from taskyard.core.effects import Effect, NoWork, Settled
from taskyard.core.events import (
    ClientDisconnected,
    DuplicatePolicy,
    Outcome,
    TasksReturned,
    UnknownPolicy,
    WatchRequested,
)
from taskyard.core.limits import SECOND_NS, STUCK_CHECK_NS
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import NEVER_NS
from tests.core.kit import Yard

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState


@pytest.fixture
def yard() -> Yard:
    """Return a yard with a worker w."""
    yard = Yard()
    yard.join(b"w")
    return yard


def watch_campaign(yard: Yard, name: bytes) -> list[Effect]:
    return yard.handle(WatchRequested(0, b"watcher", campaign=name, request=1))


def notice(name: bytes, state: TaskState, text: bytes = b"", request: int = 0) -> Settled:
    return Settled(b"watcher", request, [name], [state], [text])


def notices(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, Settled)]


CAMPAIGN_SETTLED = [Settled(b"watcher", 1, [], [], [])]


# Names.


def test_watcher_gets_the_result(yard: Yard) -> None:
    yard.submit(b"a")
    assert yard.watch(b"a", request=5) == []
    yard.take(b"w")
    effects = yard.finish(b"w", b"a", texts=[b"42"])
    assert notices(effects) == [notice(b"a", DONE, b"42", request=5)]
    assert yard.scheduler.context.watchers == {}


def test_watcher_gets_the_reason_of_a_failure(yard: Yard) -> None:
    yard.submit(b"a")
    yard.watch(b"a")
    yard.take(b"w")
    effects = yard.report(b"w", b"a", Outcome.FAILED, texts=[b"oh"])
    assert notices(effects) == [notice(b"a", FAILED, b"oh")]


def test_watcher_is_notified_of_cancelled_tasks_and_their_dependents_at_once(yard: Yard) -> None:
    yard.submit(b"a", b"b", after=[[], [b"a"]])
    yard.watch(b"a", b"b")
    states = [CANCELLED, CANCELLED]
    expected = Settled(b"watcher", 0, [b"a", b"b"], states, [b"", b""])
    assert notices(yard.cancel(b"a")) == [expected]


def test_watcher_is_notified_of_an_expired_task(yard: Yard) -> None:
    yard.submit(b"a", expires_hard_ns=SECOND_NS)
    yard.watch(b"a")
    assert notices(yard.later(1)) == [notice(b"a", FAILED, b"too old")]


def test_watcher_is_notified_of_a_task_that_lost_too_many_workers(yard: Yard) -> None:
    yard.submit(b"a", crashes_max=1)
    yard.watch(b"a")
    yard.take(b"w")
    effects = yard.join(b"w", incarnation=9)
    assert notices(effects) == [notice(b"a", FAILED, b"lost its worker")]


def test_watcher_of_a_settled_task_is_notified_at_once(yard: Yard) -> None:
    yard.submit(b"done", b"failed", b"cancelled", b"ready")
    yard.take(b"w", 2)
    yard.finish(b"w", b"done", texts=[b"result"])
    yard.report(b"w", b"failed", Outcome.FAILED, texts=[b"oh"])
    yard.cancel(b"cancelled")
    names = [b"done", b"failed", b"cancelled"]
    effects = yard.watch(*names, b"ready", b"unknown")
    done = yard[b"done"].ending
    assert done is not None
    states = [DONE, FAILED, CANCELLED]
    assert effects == [Settled(b"watcher", 0, names, states, [None, b"oh", b""], [done.record])]
    assert list(yard.scheduler.context.watchers) == [b"ready", b"unknown"]


def test_unknown_task_can_be_watched_until_it_is_submitted_and_settled(yard: Yard) -> None:
    yard.watch(b"a")
    yard.submit(b"a")
    yard.take(b"w")
    assert notices(yard.finish(b"w", b"a")) == [notice(b"a", DONE)]


def test_failure_that_is_tried_again_settles_nothing(yard: Yard) -> None:
    yard.submit(b"a", retry_delays_ns=(0,))
    yard.watch(b"a")
    yard.take(b"w")
    assert notices(yard.report(b"w", b"a", Outcome.FAILED)) == []


def test_every_watcher_is_notified_once(yard: Yard) -> None:
    yard.submit(b"a", b"b")
    yard.watch(b"a", b"b", request=1)
    yard.watch(b"a", request=2)
    yard.handle(WatchRequested(0, b"other", [b"b"], request=1))
    yard.take(b"w", 2)
    assert notices(yard.finish(b"w", b"a", b"b", texts=[b"1", b"2"])) == [
        Settled(b"watcher", 1, [b"a", b"b"], [DONE, DONE], [b"1", b"2"]),
        Settled(b"watcher", 2, [b"a"], [DONE], [b"1"]),
        Settled(b"other", 1, [b"b"], [DONE], [b"2"]),
    ]


def test_disconnected_client_is_not_notified(yard: Yard) -> None:
    yard.submit(b"a", b"b", campaign=b"c")
    yard.watch(b"c/a", b"c/b")
    watch_campaign(yard, b"c")
    yard.handle(WatchRequested(0, b"other", [b"c/b"]))
    assert yard.handle(ClientDisconnected(0, b"watcher")) == []
    assert yard.scheduler.context.watchers == {b"c/b": [(b"other", 0)]}
    assert yard.scheduler.context.campaign_watchers == {}
    yard.take(b"w", 2)
    assert notices(yard.finish(b"w", b"c/a", b"c/b")) == [
        Settled(b"other", 0, [b"c/b"], [DONE], [b""])
    ]


# Behind a failure.


def soon(yard: Yard) -> list[Effect]:
    return notices(yard.later(STUCK_CHECK_NS / SECOND_NS))


def fail(yard: Yard, name: bytes) -> list[Effect]:
    while name not in [task.name for task in yard.scheduler.ledger.workers[b"w"].held()]:
        assert yard.take(b"w", 9) != []
    return notices(yard.report(b"w", name, Outcome.FAILED_FINAL))


def test_task_behind_a_failure_is_settled_soon(yard: Yard) -> None:
    yard.submit(b"f", b"c", b"d", after=[[], [b"f"], [b"c"]])
    yard.watch(b"d")
    fail(yard, b"f")
    assert yard.scheduler.wake_at_ns() == STUCK_CHECK_NS
    assert soon(yard) == [notice(b"d", BLOCKED, b"f\n")]


def test_watcher_of_a_task_behind_a_failure_is_notified_at_once(yard: Yard) -> None:
    yard.submit(b"f", b"c", after=[[], [b"f"]])
    fail(yard, b"f")
    assert yard.watch(b"c") == [notice(b"c", BLOCKED, b"f\n")]


def test_task_that_waits_for_more_than_a_failure_is_settled_when_that_is_done(yard: Yard) -> None:
    yard.submit(b"f", b"r", b"c", after=[[], [], [b"f", b"r"]])
    yard.watch(b"c")
    fail(yard, b"f")
    assert soon(yard) == []
    yard.finish(b"w", b"r")
    assert soon(yard) == [notice(b"c", BLOCKED, b"f\n")]


@pytest.mark.parametrize("way", ["extend", "return", "submit"])
def test_task_that_gets_behind_a_failure_later_is_settled_by(yard: Yard, way: str) -> None:
    yard.submit(b"f")
    fail(yard, b"f")
    if way == "extend":
        yard.submit(b"c")
        yard.watch(b"c")
        yard.submit(b"c", after=[[b"f"]], repeat=DuplicatePolicy.EXTEND)
    elif way == "return":
        yard.submit(b"c")
        yard.watch(b"c")
        yard.take(b"w")
        yard.handle(TasksReturned(0, b"w", [b"c"], [[b"f"]]))
    else:
        yard.submit(b"c", after=[[b"x"]], unknown=UnknownPolicy.WAIT)
        yard.watch(b"c")
        yard.submit(b"x", after=[[b"f"]])
    assert soon(yard) == [notice(b"c", BLOCKED, b"f\n")]


def test_no_watcher_is_notified_if_the_failure_is_retried_at_once(yard: Yard) -> None:
    yard.submit(b"f", b"c", after=[[], [b"f"]])
    yard.watch(b"c")
    fail(yard, b"f")
    yard.retry(b"f")
    assert soon(yard) == []


def test_broker_does_not_look_for_stuck_tasks_again_and_again(yard: Yard) -> None:
    yard.submit(b"f", b"a")
    yard.watch(b"a")
    fail(yard, b"f")
    yard.finish(b"w", b"nothing")
    for _ in range(3):
        soon(yard)
    assert yard.scheduler.wake_at_ns() == NEVER_NS


# Campaigns.


def test_campaign_is_settled_when_nothing_of_it_can_run_any_more(yard: Yard) -> None:
    yard.submit(b"a", b"b", b"c", campaign=b"x")
    yard.submit(b"other")
    assert watch_campaign(yard, b"x") == []
    yard.take(b"w", 3)
    assert notices(yard.finish(b"w", b"x/a")) == []
    assert notices(yard.report(b"w", b"x/b", Outcome.FAILED)) == []
    assert notices(yard.cancel(b"x/c")) == CAMPAIGN_SETTLED


def test_settled_campaign_is_notified_at_once_and_an_unknown_one_is_waited_for(yard: Yard) -> None:
    assert watch_campaign(yard, b"x") == []
    yard.submit(b"a", campaign=b"x")
    yard.take(b"w")
    assert notices(yard.finish(b"w", b"x/a")) == CAMPAIGN_SETTLED
    assert watch_campaign(yard, b"x") == CAMPAIGN_SETTLED


def test_campaign_behind_its_own_failure_is_settled_soon(yard: Yard) -> None:
    yard.submit(b"f", b"c", after=[[], [b"f"]], campaign=b"x")
    watch_campaign(yard, b"x")
    assert fail(yard, b"x/f") + soon(yard) == CAMPAIGN_SETTLED


def test_campaign_behind_the_failure_of_another_is_settled_soon(yard: Yard) -> None:
    yard.submit(b"f", campaign=b"y")
    yard.submit(b"c", after=[[b"y/f"]], campaign=b"x")
    watch_campaign(yard, b"x")
    assert fail(yard, b"y/f") + soon(yard) == CAMPAIGN_SETTLED


def test_campaign_that_waits_for_another_is_not_settled(yard: Yard) -> None:
    yard.submit(b"a", campaign=b"y")
    yard.submit(b"f", b"c", after=[[], [b"y/a"]], campaign=b"x")
    watch_campaign(yard, b"x")
    assert fail(yard, b"x/f") + soon(yard) == []


# Replies to an idle worker.


def idle(yard: Yard) -> bool:
    """Return whether a worker's request is answered by `NoWork` with `settled`."""
    (nothing,) = yard.ask(b"w")
    assert isinstance(nothing, NoWork)
    return nothing.settled


def test_no_work_is_settled_when_all_tasks_are(yard: Yard) -> None:
    assert idle(yard)
    yard.submit(b"a", b"b")
    yard.cancel(b"b")
    yard.take(b"w")
    assert not idle(yard)
    yard.finish(b"w", b"a")
    assert idle(yard)


def test_no_work_is_unsettled_while_tasks_are_delayed(yard: Yard) -> None:
    yard.submit(b"a", due_ns=SECOND_NS)
    assert not idle(yard)


def test_work_of_other_services_does_not_concern_a_worker(yard: Yard) -> None:
    yard.submit(b"a", service=b"other")
    assert idle(yard)


def test_no_work_is_unsettled_while_tasks_are_blocked(yard: Yard) -> None:
    yard.submit(b"a", service=b"other")
    yard.submit(b"b", after=[[b"a"]])
    assert not idle(yard)


def test_no_work_is_settled_if_the_rest_is_behind_a_failure(yard: Yard) -> None:
    yard.submit(b"f", b"c", after=[[], [b"f"]])
    fail(yard, b"f")
    assert idle(yard)
    yard.submit(b"d", after=[[b"x"]], unknown=UnknownPolicy.WAIT)
    assert not idle(yard)


def test_watching_no_task_at_all_is_answered_at_once() -> None:
    yard = Yard()
    assert yard.handle(WatchRequested(0, b"watcher", [], request=3)) == [
        Settled(b"watcher", 3, [], [], [])
    ]
