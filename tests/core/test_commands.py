"""Commands of clients: cancel, retry, pause, resume, drain."""

from typing import Any

import pytest

from taskyard.core.commands import tasks_in_scope
from taskyard.core.effects import CommandAck, NoWork, Refused, ReportAck, Shutdown, Stop
from taskyard.core.events import (
    CancelRequested,
    DrainRequested,
    Outcome,
    PauseRequested,
    ResumeRequested,
    RetryRequested,
    Scope,
    TasksReturned,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal
from taskyard.core.records import Cancelled, Paused, Resumed, Retried, StaleReport
from taskyard.core.states import TaskState
from tests.core.kit import Yard, assigned

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState


def acted(count: int) -> CommandAck:
    return CommandAck(b"client", 0, count)


# Cancel.


def test_cancel_takes_all_dependents_along() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c", b"other", after=[[], [b"a"], [b"b"], []])
    assert yard.cancel(b"a") == [acted(3)]
    assert yard.records == [Cancelled(0, [b"a", b"b", b"c"], [0, 0])]
    assert yard.states(b"a", b"b", b"c", b"other") == [CANCELLED] * 3 + [READY]


def test_cancel_writes_down_which_tasks_were_asked_for_and_why_the_others_went() -> None:
    yard = Yard()
    after = [[], [], [b"a"], [b"b"], [b"d", b"c"], []]
    yard.submit(b"a", b"b", b"c", b"d", b"e", b"other", after=after)
    yard.cancel(b"b", b"a")
    assert yard.records == [Cancelled(0, [b"b", b"a", b"d", b"c", b"e"], [0, 1, 0])]
    yard.cancel(b"other")
    assert yard.records == [Cancelled(0, [b"other"], [])]


def test_cancel_of_leased_tasks_sends_stop_to_their_workers() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c", b"d")
    for worker in (b"v", b"w"):
        yard.join(worker)
        yard.take(worker, 2)
    assert yard.cancel(b"a", b"c", b"b") == [
        Stop(b"v", [b"a", b"b"], [1, 1], [True, True]),
        Stop(b"w", [b"c"], [1], [True]),
        acted(3),
    ]
    assert yard.finish(b"v", b"a", attempts=[1]) == [ReportAck(b"v", 0, [b"a"])]
    assert yard.records == [StaleReport(0, b"v", [b"a"], [1])]
    assert yard.states(b"a", b"b", b"c", b"d") == [CANCELLED] * 3 + [LEASED]


def test_cancel_of_ended_or_unknown_tasks_changes_nothing() -> None:
    yard = Yard()
    yard.submit(b"a")
    yard.cancel(b"a")
    assert yard.cancel(b"a", b"a", b"x") == [acted(0)]
    assert yard.records == []


@pytest.mark.parametrize("state", [BLOCKED, DELAYED, READY, LEASED, FAILED])
def test_task_can_be_cancelled_in_any_unfinished_state(state: TaskState) -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"before")
    yard.take(b"w")
    if state is BLOCKED:
        yard.submit(b"a", after=[[b"before"]])
    else:
        yard.submit(b"a", due_ns=1 if state is DELAYED else 0)
    if state in (LEASED, FAILED):
        yard.take(b"w")
    if state is FAILED:
        yard.report(b"w", b"a", Outcome.FAILED, texts=[b"oh"])
    assert yard.state(b"a") is state
    yard.cancel(b"a")
    assert yard.state(b"a") is CANCELLED
    assert yard.scheduler.ledger.reasons == {}
    yard.finish(b"w", b"before")
    yard.later(1)
    assert yard.take(b"w", 9) == []


def test_cancelled_suspect_is_gone_from_its_lane() -> None:
    yard = Yard()
    yard.submit(b"bad")
    yard.lose(b"v", b"bad")
    yard.cancel(b"bad")
    yard.join(b"w")
    assert yard.take(b"w") == []


def test_scope_chooses_by_everything_that_it_gives() -> None:
    yard = Yard()
    yard.submit(b"a", campaign=b"c")
    yard.submit(b"b", campaign=b"c", service=b"s", lanes=[b"x"])
    yard.submit(b"d", campaign=b"d", service=b"s", lanes=[b"x"], due_ns=1)
    yard.submit(b"e", campaign=b"c", service=b"s", lanes=[b"y"])

    def chosen(**fields: Any) -> list[bytes]:
        return [task.name for task in tasks_in_scope(yard.scheduler.ledger, Scope(**fields))]

    assert chosen() == [b"c/a", b"c/b", b"d/d", b"c/e"]
    assert chosen(campaign=b"c") == [b"c/a", b"c/b", b"c/e"]
    assert chosen(service=b"s") == [b"c/b", b"d/d", b"c/e"]
    assert chosen(lane=b"x") == [b"c/b", b"d/d"]
    assert chosen(states=(DELAYED,)) == [b"d/d"]
    assert chosen(campaign=b"c", service=b"s", lane=b"x", states=(READY,)) == [b"c/b"]
    assert chosen(names=(b"c/e", b"nobody", b"c/e", b"c/a")) == [b"c/e", b"c/a"]


def test_whole_campaign_can_be_cancelled() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", campaign=b"c")
    yard.submit(b"other")
    assert yard.handle(CancelRequested(0, b"client", Scope(campaign=b"c"), 5)) == [
        CommandAck(b"client", 5, 2)
    ]
    assert yard.state(b"other") is READY


# Retry.


def test_retried_task_has_all_its_attempts_again_and_its_number_keeps_rising() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", retry_delays_ns=(0,))
    for _ in range(2):
        yard.take(b"w")
        yard.report(b"w", b"a", Outcome.FAILED, texts=[b"oh"])
        yard.later(0)
    assert (yard.state(b"a"), yard[b"a"].failures) == (FAILED, 2)
    assert yard.retry(b"a") == [acted(1)]
    assert yard.records == [Retried(0, [b"a"])]
    task = yard[b"a"]
    assert (task.state, task.attempt, task.failures, task.losses) == (READY, 2, 0, 0)
    assert yard.scheduler.ledger.reasons == {}
    yard.take(b"w")
    assert yard[b"a"].attempt == 3
    yard.report(b"w", b"a", Outcome.FAILED)
    assert yard.state(b"a") is DELAYED


def test_retried_task_that_killed_its_workers_has_all_its_crash_attempts_again() -> None:
    yard = Yard()
    yard.submit(b"a", crashes_max=2)
    yard.lose(b"v", b"a")
    yard.lose(b"v", b"a")
    assert yard.state(b"a") is FAILED
    yard.retry(b"a")
    yard.lose(b"v", b"a")
    assert yard.state(b"a") is READY


def test_retry_makes_a_delayed_task_due_at_once_and_keeps_its_failures() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", retry_delays_ns=(SECOND_NS,))
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED, texts=[b"oh"])
    assert yard.retry(b"a") == [acted(1)]
    assert (yard.state(b"a"), yard[b"a"].failures) == (READY, 1)
    yard.take(b"w")
    yard.later(5)
    assert yard.state(b"a") is LEASED


def test_retry_of_a_task_that_grew_too_old_while_it_was_blocked_blocks_it_again() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a")
    yard.submit(b"b", after=[[b"a"]], expires_hard_ns=SECOND_NS)
    yard.take(b"w")
    yard.later(1)
    assert yard.state(b"b") is FAILED
    yard.retry(b"b")
    assert yard.state(b"b") is BLOCKED
    yard.finish(b"w", b"a")
    assert yard.state(b"b") is READY


def test_retry_of_a_task_that_is_not_stopped_is_nothing() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", after=[[], [b"a"]])
    yard.take(b"w")
    assert yard.retry(b"a", b"b", b"x") == [acted(0)]
    assert yard.records == []


def test_retried_failures_let_their_dependents_go_on() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", after=[[], [b"a"]])
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED)
    yard.handle(RetryRequested(0, b"client", Scope(states=(FAILED,))))
    yard.take(b"w")
    yard.finish(b"w", b"a")
    assert yard.take(b"w") == [b"b"]


# Pause and resume.


@pytest.mark.parametrize(
    ("service", "lane"), [(b"", None), (b"default", None), (b"default", b""), (b"default", b"x")]
)
def test_pause_and_resume_are_recorded(service: bytes, lane: bytes | None) -> None:
    yard = Yard()
    assert yard.handle(PauseRequested(0, b"client", service, lane)) == [acted(1)]
    assert yard.records == [Paused(0, service, lane)]
    assert yard.handle(ResumeRequested(0, b"client", service, lane)) == [acted(1)]
    assert yard.records == [Resumed(0, service, lane)]


@pytest.mark.parametrize("kind", [PauseRequested, ResumeRequested])
def test_lane_without_its_service_is_refused(
    kind: type[PauseRequested] | type[ResumeRequested],
) -> None:
    yard = Yard()
    text = "lane x: no service given"
    refused = Refused(b"client", 4, Refusal.MALFORMED, text)
    assert yard.handle(kind(0, b"client", lane=b"x", request=4)) == [refused]
    assert yard.records == []


def test_pause_of_one_lane_leaves_the_others() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", b"open", lanes=[b"x", b"y", b""])
    yard.handle(PauseRequested(0, b"client", b"default", b"x"))
    assert yard.take(b"w", 9) == [b"b", b"open"]


def test_pause_of_the_open_lane_leaves_the_others() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"open", lanes=[b"x", b""])
    yard.handle(PauseRequested(0, b"client", b"default", b""))
    assert yard.take(b"w", 9) == [b"a"]


def test_pause_of_one_service_leaves_the_others() -> None:
    yard = Yard()
    yard.join(b"w", services=(b"x", b"y"), slots_total=0)
    yard.submit(b"a", service=b"x")
    yard.submit(b"b", service=b"y")
    yard.handle(PauseRequested(0, b"client", b"x"))
    assert yard.take(b"w", 9) == [b"b"]


def test_pause_lets_what_is_leased_be_finished() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b", after=[[], [b"a"]])
    yard.take(b"w")
    yard.handle(PauseRequested(0, b"client"))
    yard.finish(b"w", b"a")
    assert yard.states(b"a", b"b") == [DONE, READY]
    assert yard.ask(b"w") == [NoWork(b"w", settled=False)]


def test_pause_is_remembered_for_what_does_not_exist_yet() -> None:
    yard = Yard()
    yard.handle(PauseRequested(0, b"client", b"later", b"x"))
    yard.join(b"w", services=(b"later",), slots_total=0)
    yard.submit(b"a", b"b", service=b"later", lanes=[b"x", b"y"])
    assert yard.take(b"w", 9) == [b"b"]
    yard.handle(ResumeRequested(0, b"client", b"later", b"x"))
    assert yard.take(b"w", 9) == [b"a"]


# Drain.


def test_drained_worker_that_holds_nothing_goes_at_once() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.ask(b"w", parks=True)
    effects = yard.handle(DrainRequested(0, b"client", b"w", 3))
    assert effects == [Shutdown(b"w"), CommandAck(b"client", 3, 1)]
    yard.submit(b"a")
    assert yard.ask(b"w") == [Shutdown(b"w")]
    assert yard.state(b"a") is READY


@pytest.mark.parametrize("way", ["finish", "fail", "return", "cancel"])
def test_drained_worker_goes_when_its_last_task_is_settled_by(way: str) -> None:
    yard = Yard()
    yard.join(b"w", slots_total=2, always_ready=True)
    yard.submit(b"a", b"b", b"c")
    assert yard.handle(DrainRequested(0, b"client")) == [acted(1)]
    assert Shutdown(b"w") not in yard.finish(b"w", b"a")
    if way == "finish":
        effects = yard.finish(b"w", b"b")
    elif way == "fail":
        effects = yard.report(b"w", b"b", Outcome.FAILED)
    elif way == "return":
        effects = yard.handle(TasksReturned(0, b"w", [b"b"]))
    else:
        effects = yard.cancel(b"b")
    assert Shutdown(b"w") in effects
    assert assigned(effects) == []


def test_drained_worker_that_still_holds_a_task_is_answered() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", b"b")
    yard.take(b"w")
    yard.handle(DrainRequested(0, b"client"))
    assert yard.ask(b"w") == [NoWork(b"w", settled=False)]
    assert yard.ask(b"w", parks=True) == []
    assert yard.finish(b"w", b"a") == [ReportAck(b"w", 0, []), Shutdown(b"w")]


def test_drain_of_all_reaches_each_and_of_an_unknown_one_none() -> None:
    yard = Yard()
    for worker in (b"u", b"v"):
        yard.join(worker)
    assert yard.handle(DrainRequested(0, b"client", b"nobody")) == [acted(0)]
    assert yard.handle(DrainRequested(0, b"client")) == [Shutdown(b"u"), Shutdown(b"v"), acted(2)]


def test_worker_that_comes_back_as_another_process_is_not_drained_any_more() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.handle(DrainRequested(0, b"client", b"w"))
    yard.submit(b"a")
    yard.join(b"w", slots_total=0, incarnation=2)
    assert yard.take(b"w") == [b"a"]


def test_names_and_states_together_mean_those_that_fit_both() -> None:
    yard = Yard()
    yard.submit(b"out", b"waiting")
    yard.join(b"w")
    yard.take(b"w")
    scope = Scope(names=(b"out", b"waiting"), states=(READY,))
    assert yard.handle(CancelRequested(0, b"client", scope)) == [acted(1)]
    assert yard.states(b"out", b"waiting") == [LEASED, CANCELLED]
