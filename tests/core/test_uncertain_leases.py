"""Uncertain assignments: after a new connection, a restart, or a reply that could not be sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from taskyard.core.effects import Assign, CommandAck, Effect, LeasesEnded, NoWork, Stop
from taskyard.core.events import (
    AssignmentUnsent,
    OutputAppended,
    TasksProgressed,
    TasksRequested,
    WorkerHeartbeat,
    WorkerLost,
    WorkerReconnected,
    WorkerRegistered,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Stream, WorkerFacts
from taskyard.core.records import LeaseExpired, Returned, ReturnReason, WorkerJoined, WorkerLeft
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from tests.core.kit import Yard, assigned, missing
from tests.kit.snapshots import reopened

if TYPE_CHECKING:
    from collections.abc import Callable

_, _, READY, LEASED, DONE, FAILED, _ = TaskState
TEN_NS = 10 * SECOND_NS

#: The facts of an extended dwork worker: slots, and a timeout of its own.
FACTS = {"slots_total": 9, "lease_timeout_ns": TEN_NS}


def leased(*names: bytes, **facts: Any) -> Yard:
    """Return a yard whose worker w holds tasks, all by one assignment."""
    yard = Yard()
    yard.join(b"w", **{**FACTS, **facts})
    yard.submit(*names or (b"a",))
    yard.ask(b"w", 9)
    return yard


def reconnect(yard: Yard) -> None:
    yard.handle(WorkerReconnected(0, b"w"))


def restart(yard: Yard) -> None:
    yard.scheduler = Scheduler(reopened(yard.mirror))
    yard.scheduler.resume(yard.now_ns)


def lose_reply(yard: Yard) -> None:
    lease = next(reversed(yard.scheduler.ledger.workers[b"w"].leases.values()))
    yard.handle(AssignmentUnsent(0, b"w", [*lease.names], [*lease.attempts]))


def requests(effects: list[Effect]) -> list[int]:
    """Return the requests that assignments reply to."""
    return [one.request for one in effects if isinstance(one, Assign)]


UNLISTED, RESTARTED = ReturnReason.UNLISTED, ReturnReason.BROKER_RESTARTED
CAUSES = [
    pytest.param(reconnect, UNLISTED, id="a new connection"),
    pytest.param(restart, RESTARTED, id="a restart"),
    pytest.param(lose_reply, UNLISTED, id="a lost reply"),
]


@pytest.mark.parametrize(("cause", "reason"), CAUSES)
def test_task_of_a_worker_that_only_requests_more_returns_after_its_timeout(
    cause: Callable[[Yard], None], reason: ReturnReason
) -> None:
    yard = leased()
    cause(yard)
    for _ in range(9):
        yard.later(1)
        yard.ask(b"w")
    assert yard.state(b"a") is LEASED
    assert yard.later(1) == [LeasesEnded(b"w", [b"a"], [1], 0)]
    assert yard.records == [Returned(TEN_NS, b"w", [b"a"], [1], reason)]
    assert yard[b"a"].losses == 0
    assert missing(yard.finish(b"w", b"a", attempts=[1])) == [b"a"]
    assert assigned(yard.ask(b"w")) == [b"a"]
    for _ in range(30):  # the second assignment is certain
        yard.later(1)
        assert yard.records == []
        yard.ask(b"w")


@pytest.mark.parametrize(("cause", "reason"), CAUSES)
def test_loss_of_a_worker_is_not_charged_to_uncertain_assignments(
    cause: Callable[[Yard], None], reason: ReturnReason
) -> None:
    yard = leased()
    cause(yard)
    assert yard.handle(WorkerLost(0, b"w")) == [LeasesEnded(b"w", [b"a"], [1], 0)]
    assert yard.records == [
        Returned(0, b"w", [b"a"], [1], reason),
        WorkerLeft(0, b"w", b"silent"),
    ]
    assert (yard.state(b"a"), yard[b"a"].losses) == (READY, 0)


def test_last_attempt_is_not_charged_when_its_assignment_is_uncertain() -> None:
    yard = Yard()
    yard.join(b"w", **FACTS)
    yard.submit(b"a", crashes_max=1)
    yard.ask(b"w")
    restart(yard)
    yard.later(10)
    assert yard.state(b"a") is READY


@pytest.mark.parametrize(("cause", "reason"), CAUSES)
def test_listed_task_is_kept_and_charged_when_its_worker_is_lost(
    cause: Callable[[Yard], None],
    reason: ReturnReason,  # noqa: ARG001
) -> None:
    yard = leased()
    cause(yard)
    yard.later(9)
    yard.heartbeat(b"w", (b"a", 1), heartbeat_ns=SECOND_NS)
    for _ in range(30):
        yard.later(1)
        assert yard.records == []
        yard.handle(WorkerHeartbeat(0, b"w"))
    yard.handle(WorkerLost(0, b"w"))
    assert yard.records == [
        LeaseExpired(39 * SECOND_NS, b"w", [b"a"], [1]),
        WorkerLeft(39 * SECOND_NS, b"w", b"silent"),
    ]


def test_task_assigned_after_the_new_connection_is_charged_when_its_worker_is_lost() -> None:
    yard = leased()
    reconnect(yard)
    yard.heartbeat(b"w", (b"a", 1), heartbeat_ns=SECOND_NS)
    yard.submit(b"poison")
    yard.finish(b"w", b"a", attempts=[1])
    yard.ask(b"w")  # it dies before its next list
    yard.handle(WorkerLost(0, b"w"))
    assert yard.records == [
        LeaseExpired(0, b"w", [b"poison"], [1]),
        WorkerLeft(0, b"w", b"silent"),
    ]


def test_worker_that_parked_at_the_instant_of_a_restart_gets_a_task_for_an_ended_one() -> None:
    yard = leased(b"a", slots_total=1, restart_lease_ns=SECOND_NS)
    restart(yard)
    yard.handle(TasksRequested(0, b"w", 1, parks=True, request=2))
    yard.submit(b"b", priority=1)
    effects = yard.later(1)
    assert (assigned(effects), requests(effects)) == ([b"b"], [2])


def test_cancelled_task_of_before_a_restart_frees_no_slot_of_a_worker_not_heard_since() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, lease_timeout_ns=TEN_NS, always_ready=True)
    yard.submit(b"a")
    restart(yard)
    yard.submit(b"b")
    effects = yard.cancel(b"a")
    assert [type(one) for one in effects] == [Stop, CommandAck]
    assert assigned(yard.handle(WorkerHeartbeat(0, b"w"))) == [b"b"]


def test_new_connection_ends_the_open_request_of_the_former() -> None:
    yard = leased(incarnation=1, slots_total=1)
    yard.submit(b"b")
    yard.handle(TasksRequested(0, b"w", 1, request=7))  # waits: its slot is taken
    ended = yard.handle(WorkerReconnected(0, b"w", 1))
    assert ended == [NoWork(b"w", settled=False, request=7)]
    yard.finish(b"w", b"a", attempts=[1])
    assert yard.state(b"b") is READY
    assert requests(yard.handle(TasksRequested(0, b"w", 1, request=8))) == [8]


def test_new_connection_leaves_requests_of_other_peers_with_the_name_open() -> None:
    yard = leased()  # work is left
    yard.join(b"plain")
    for request in (7, 8):
        yard.handle(TasksRequested(0, b"plain", 1, request=request, is_shared=True))
    yard.handle(WorkerReconnected(0, b"plain"))
    assert requests(yard.submit(b"b")) == [7]
    assert requests(yard.submit(b"c")) == [8]


def test_uncertain_task_does_not_wait_for_the_longer_lease_of_its_neighbour() -> None:
    yard = Yard()
    yard.join(b"w", **FACTS)
    yard.submit(b"a")
    yard.submit(b"long", lease_ns=3 * TEN_NS)
    yard.ask(b"w", 9)
    reconnect(yard)
    yard.later(10)
    assert yard.states(b"a", b"long") == [READY, LEASED]
    yard.later(19)
    assert yard.state(b"long") is LEASED
    yard.later(1)
    assert yard.state(b"long") is READY


@pytest.mark.parametrize("doubt", [reconnect, restart])
def test_worker_without_a_timeout_gets_no_longer_deadline_by_a_task(
    doubt: Callable[[Yard], None],
) -> None:
    yard = Yard()
    yard.join(b"w", slots_total=9, restart_lease_ns=TEN_NS)
    yard.submit(b"long", lease_ns=3 * TEN_NS)
    yard.ask(b"w")
    doubt(yard)
    yard.later(10)
    assert yard.state(b"long") is READY


def test_next_process_of_a_name_charges_certain_assignments_only() -> None:
    yard = leased(incarnation=1)
    reconnect(yard)
    yard.submit(b"b")
    yard.ask(b"w")
    facts = WorkerFacts(**FACTS, incarnation=2)  # type: ignore[arg-type]
    yard.handle(WorkerRegistered(0, b"w", facts))
    assert yard.records == [
        Returned(0, b"w", [b"a"], [1], UNLISTED),
        Returned(0, b"w", [b"b"], [1], ReturnReason.RESTARTED),
        WorkerLeft(0, b"w", b"restarted"),
        WorkerJoined(0, b"w", facts),
    ]
    assert (yard[b"a"].losses, yard[b"b"].losses) == (0, 1)


def test_lost_reply_makes_no_other_assignment_uncertain() -> None:
    yard = leased()
    yard.submit(b"b")
    yard.ask(b"w")
    lose_reply(yard)
    yard.handle(WorkerLost(0, b"w"))
    assert yard.records[:2] == [
        Returned(0, b"w", [b"b"], [1], UNLISTED),
        LeaseExpired(0, b"w", [b"a"], [1]),
    ]


def test_lost_reply_to_an_attempt_that_is_over_changes_nothing() -> None:
    yard = leased()
    late = AssignmentUnsent(0, b"w", [b"a", b"unknown"], [1, 1])
    yard.handle(WorkerLost(0, b"w"))
    yard.join(b"w", **FACTS)
    yard.ask(b"w")
    assert yard.handle(late) == []
    yard.handle(WorkerHeartbeat(0, b"w"))
    yard.later(9)
    yard.handle(WorkerHeartbeat(0, b"w"))
    yard.later(9)
    assert yard.state(b"a") is LEASED


def test_unlisted_task_of_an_assignment_returns_alone() -> None:
    yard = leased(b"a", b"b", b"c")
    reconnect(yard)
    for _ in range(9):
        yard.later(1)
        yard.heartbeat(b"w", (b"a", 1), (b"c", 1))  # without an interval, so none counts as lost
    assert yard.later(1) == [LeasesEnded(b"w", [b"b"], [1], 0)]
    assert yard.states(b"a", b"b", b"c") == [LEASED, READY, LEASED]
    yard.heartbeat(b"w", (b"a", 1), (b"c", 1))
    assert yard.later(9) == []


def test_listed_task_becomes_uncertain_again_with_the_next_connection() -> None:
    yard = leased(b"a", b"b")
    reconnect(yard)
    yard.later(5)
    yard.heartbeat(b"w", (b"a", 1))
    reconnect(yard)
    yard.later(5)
    assert yard.states(b"a", b"b") == [LEASED, READY]
    yard.ask(b"w", 0)
    yard.later(4)
    assert yard.state(b"a") is LEASED
    yard.later(1)
    assert yard.records == [Returned(15 * SECOND_NS, b"w", [b"a"], [1], UNLISTED)]


@pytest.mark.parametrize(
    "report",
    [
        TasksProgressed(0, b"w", [b"a"], [1], [50]),
        OutputAppended(0, b"w", [b"a"], [1], [Stream.STDOUT], [0], [b"text"]),
    ],
    ids=["progress", "output"],
)
def test_report_on_a_running_task_makes_its_assignment_certain(
    report: TasksProgressed | OutputAppended,
) -> None:
    yard = leased(b"a", b"b")
    reconnect(yard)
    yard.later(1)
    yard.handle(report)
    yard.ask(b"w", 0)
    yard.later(9)
    assert yard.states(b"a", b"b") == [LEASED, READY]


def test_task_of_five_lease_times_is_run_once_without_a_doubt() -> None:
    yard = leased()
    for _ in range(50):
        yard.later(1)
        assert yard.records == []
        yard.handle(WorkerHeartbeat(0, b"w"))
    yard.finish(b"w", b"a", attempts=[1])
    assert yard.state(b"a") is DONE
