"""WMP at the manager: heartbeats, timeouts, routes and keys."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.core import deadlines
from taskyard.core.events import CancelRequested, DrainRequested, RequestRejected, Scope
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal
from taskyard.core.states import TaskState, WorkerState
from taskyard.core.timer_heap import NEVER_NS
from taskyard.wire.roles import AuthenticatedPeer, Role
from taskyard.wire.wmp import server as wmp
from taskyard.wire.wmp.server import Wmp
from tests.wire.wmp.kit import ME, Manager, Sent, frames
from tests.wire.wmp.test_server import WAKE, done, holding, no, state, taken

# Heartbeats and timeouts.


def ping(
    manager: Manager, held: list[Any] | None, command: str = "PING", **more: Any
) -> list[Sent]:
    headers = {"worker": "w", **({} if held is None else {"held": held}), **more}
    return manager.send(command, headers, route=b"w")


def pong(*, ready: bool = True) -> Sent:
    return Sent("PONG", {"worker": "w", **({} if ready else {"ready": False}), "manager": ME})


def test_ping_gets_a_pong_and_pong_gets_nothing() -> None:
    manager = Manager()
    manager.ready()
    assert ping(manager, []) == [pong()]
    assert ping(manager, [], "PONG") == []


def test_silent_worker_loses_its_lease() -> None:
    manager = holding(b"a")
    manager.pass_time(wmp.SILENCE_NS - 1)
    assert manager.task(b"a").state is TaskState.LEASED
    manager.pass_time(1)
    assert state(manager, b"a") == (TaskState.READY, 1, 0, 1)


@pytest.mark.parametrize("command", ["PING", "PONG", "STATUS", "READY"])
def test_every_message_is_a_heartbeat(command: str) -> None:
    manager = holding(b"a")
    manager.now_ns += wmp.SILENCE_NS - 1
    manager.send(command, {"worker": "w", "task": "a", "attempt": 1}, route=b"w")
    manager.pass_time(wmp.SILENCE_NS - 1)
    assert manager.task(b"a").state is TaskState.LEASED


def test_task_missing_in_two_heartbeats_was_lost_on_its_way() -> None:
    manager = holding(b"a", b"b")
    manager.now_ns += 2 * SECOND_NS - 1
    ping(manager, [["b", 1]], heartbeat_ms=1000)
    assert manager.task(b"a").state is TaskState.LEASED
    manager.now_ns += 1
    ping(manager, [["b", 1]], heartbeat_ms=1000)
    assert state(manager, b"a") == (TaskState.READY, 1, 0, 0)
    assert manager.task(b"b").state is TaskState.LEASED


def test_worker_that_follows_gets_an_interval_and_loses_nothing_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = holding(b"a")
    interval_ns = 3 * SECOND_NS
    monkeypatch.setattr(deadlines, "heartbeat_interval_ns", lambda *_: interval_ns)
    (reply,) = ping(manager, [["a", 1]], heartbeat_ms=1000, follows=True)
    assert reply.headers["heartbeat_ms"] == 3000
    manager.now_ns += 6 * SECOND_NS - 1
    ping(manager, [], heartbeat_ms=1000, follows=True)  # sent before the reply arrived
    assert manager.task(b"a").state is TaskState.LEASED
    manager.now_ns += 1
    ping(manager, [], heartbeat_ms=3000, follows=True)
    assert manager.task(b"a").state is TaskState.READY


def test_outdated_list_takes_nothing_away() -> None:
    manager = holding(b"a")
    manager.now_ns += 3 * SECOND_NS
    assert ping(manager, [["a", 1]], heartbeat_ms=1000, number=8) == [pong()]
    assert ping(manager, [], heartbeat_ms=1000, number=7) == [pong()]
    assert manager.task(b"a").state is TaskState.LEASED
    ping(manager, [], heartbeat_ms=1000, number=9)
    assert manager.task(b"a").state is TaskState.READY


def test_worker_without_a_promised_interval_has_the_manager_s() -> None:
    manager = holding(b"a")
    manager.now_ns += 2 * wmp.PING_NS - 1
    ping(manager, [], "PONG")
    assert manager.task(b"a").state is TaskState.LEASED
    manager.now_ns += 1
    ping(manager, [], "PONG")
    assert manager.task(b"a").state is TaskState.READY


def test_ping_without_a_list_takes_nothing_away() -> None:
    manager = holding(b"a")
    for _ in range(10):
        manager.now_ns += 10 * SECOND_NS
        ping(manager, None, heartbeat_ms=1000)
    assert manager.task(b"a").state is TaskState.LEASED


def test_listed_task_that_is_not_held_is_cancelled() -> None:
    manager = holding(b"a")
    done(manager, "a", "ok")
    replies = ping(manager, [["a", 1], ["never", 3]])
    assert replies == [
        Sent("CANCEL", {"task": "a", "attempt": 1, "manager": ME, "ended": True}),
        Sent("CANCEL", {"task": "never", "attempt": 3, "manager": ME, "ended": True}),
        pong(),
    ]


def test_silent_worker_is_pinged_and_then_forgotten() -> None:
    manager = Manager()
    manager.ready()
    asked = Sent("PING", {"worker": "w", "manager": ME})
    assert manager.dialect.timers.heap[0][0] == manager.now_ns + wmp.PING_NS
    assert manager.pass_time(wmp.PING_NS - 1) == []
    assert manager.pass_time(1) == [asked]
    assert manager.dialect.timers.heap[0][0] == manager.now_ns + wmp.PING_NS
    ping(manager, [], "PONG")
    assert manager.pass_time(wmp.PING_NS) == [asked]
    assert manager.pass_time(wmp.PING_NS) == [asked]
    manager.pass_time(wmp.FORGET_NS)
    assert manager.sent == []
    assert manager.dialect.timers.heap[0][0] == NEVER_NS


def test_pong_shows_that_the_ready_is_lost() -> None:
    manager = Manager()
    assert ping(manager, []) == [pong(ready=False)]
    manager.ready()
    assert ping(manager, []) == [pong()]
    manager.pass_time(wmp.SILENCE_NS)
    assert ping(manager, []) == [pong(ready=False)]


def test_give_of_an_unknown_worker_gets_no() -> None:
    manager = Manager()
    manager.submit(b"a")
    assert manager.given() == [no()]


def held_by(incarnation: int) -> Sent:
    reason = f"worker name 'wmp:w' is held by another process (incarnation {incarnation})"
    reason += ": wait until it exits, or choose another --name"
    headers = {"worker": "w", "reason": reason, "manager": ME}
    return Sent("BYE", {**headers, "code": "name-held"})


def newcomer(manager: Manager, command: str = "READY", **more: Any) -> list[Sent]:
    """Return the replies to process 2 of the id `w`, by its own route."""
    return manager.send(command, {"worker": "w", "incarnation": 2, **more}, route=b"2")


def test_other_process_of_the_same_id_waits_while_the_holder_is_alive() -> None:
    manager = holding(b"a", incarnation=1)
    for _ in range(10):
        manager.pass_time(5 * SECOND_NS)
        manager.send("PING", {"worker": "w", "incarnation": 1}, route=b"w")
        assert newcomer(manager) == [held_by(1)]
        assert newcomer(manager, "PING") == [held_by(1)]
        assert newcomer(manager, "GIVE", request=1) == [held_by(1)]
        assert newcomer(manager, "BYE") == []
    assert state(manager, b"a") == (TaskState.LEASED, 1, 0, 0)
    manager.handle([CancelRequested(0, b"client", Scope(names=(b"a",)))])
    (route, _, said), *_ = manager.sent
    assert (route, said.command) == (b"w", "CANCEL")


def test_other_process_of_the_same_id_takes_over_when_the_holder_is_silent() -> None:
    manager = holding(b"a", incarnation=1, heartbeat_ms=1000)
    manager.pass_time(SECOND_NS)
    assert newcomer(manager) == [held_by(1)]
    manager.pass_time(2 * SECOND_NS)
    assert state(manager, b"a") == (TaskState.READY, 1, 0, 1)
    assert newcomer(manager) == [WAKE]
    assert [route for route, _, _ in manager.sent] == [b"2"]
    (bye,) = manager.send("PING", {"worker": "w", "incarnation": 1}, route=b"w")
    assert (bye.command, bye.headers["code"]) == ("BYE", "name-lost")
    assert state(manager, b"a") == (TaskState.READY, 1, 0, 0)
    assert newcomer(manager, "GIVE", request="1") == [taken("a", 2)]


def test_other_process_takes_over_at_once_when_its_supervisor_reports_the_death() -> None:
    manager = holding(b"a", incarnation=1)
    assert newcomer(manager, replaces=1) == [WAKE]
    assert [route for route, _, _ in manager.sent] == [b"2"]
    assert state(manager, b"a") == (TaskState.READY, 1, 0, 1)


def test_holder_is_recognised_after_a_restart_even_if_a_newcomer_is_first() -> None:
    manager = holding(b"a", incarnation=1)
    manager.dialect = Wmp(1, ME, lambda: 0)  # a manager without state
    assert newcomer(manager) == []
    assert newcomer(manager, "PING") == [held_by(1)]
    manager.send("PING", {"worker": "w", "incarnation": 1}, route=b"w")
    manager.handle([CancelRequested(0, b"client", Scope(names=(b"a",)))])
    assert [(route, said.command) for route, _, said in manager.sent] == [(b"w", "CANCEL")]


def test_bye_returns_held_tasks_without_a_charge() -> None:
    manager = holding(b"a")
    assert manager.send("BYE", {"worker": "w", "reason": "going home"}, route=b"w") == []
    assert state(manager, b"a") == (TaskState.READY, 1, 0, 0)
    assert manager.scheduler.ledger.workers == {}
    assert manager.pass_time(wmp.PING_NS) == []
    assert manager.dialect.timers.heap[0][0] == NEVER_NS


def test_drained_worker_gets_bye_when_it_holds_nothing() -> None:
    bye = Sent("BYE", {"worker": "w", "reason": "no more tasks", "manager": ME})
    manager = holding(b"a")
    assert manager.handle([DrainRequested(0, b"client")]) == []
    assert manager.given() == [no()]
    assert done(manager, "a", "ok") == [bye]
    assert manager.given(request="2") == [no("2"), bye]
    assert bye in manager.ready()


def test_manager_that_shuts_down_accepts_no_worker() -> None:
    manager = holding(b"a")
    manager.dialect.leaving = True
    _, rejected = manager.dialect.receive(b"r", frames("READY", {"worker": "new"}), 1)
    text = "the manager is shutting down"
    assert rejected == RequestRejected(0, b"r", 129, Refusal.SHUTTING_DOWN, text)
    bye = Sent("BYE", {"worker": "new", "reason": text, "manager": ME})
    assert manager.ready("new") == [bye]
    assert [*manager.scheduler.ledger.workers] == [b"wmp:w"]
    assert manager.ready() == []


# Routes and relays.


def test_worker_is_reached_by_the_route_of_its_last_message() -> None:
    manager = Manager()
    manager.send("READY", {"worker": "w"}, route=b"r1", path=[b"a", b"b"])
    manager.send("PING", {"worker": "w"}, route=b"r2", path=[b"c"])
    manager.submit(b"x")
    assert manager.sent == [(b"r2", [b"c"], WAKE)]
    manager.send("GIVE", {"worker": "w", "request": 1}, route=b"r1", path=[b"a", b"b"])
    assert [(route, path) for route, path, _ in manager.sent] == [(b"r1", [b"a", b"b"])]


def test_unreachable_route_cuts_off_all_workers_behind_it() -> None:
    manager = Manager()
    for worker in ("w1", "w2"):
        manager.send("READY", {"worker": worker}, route=b"relay", path=[worker.encode()])
    manager.ready("w3")
    manager.send("READY", {"worker": "w2"}, route=b"other")
    manager.handle(manager.dialect.disconnected(b"relay"))
    workers = manager.scheduler.ledger.workers
    assert [workers[b"wmp:" + name].state for name in (b"w1", b"w2", b"w3")] == [
        *(WorkerState.BUSY, WorkerState.PARKED, WorkerState.PARKED)
    ]
    assert manager.send("PING", {"worker": "w1"}, route=b"relay")[0].headers["ready"] is False
    assert manager.dialect.disconnected(b"nobody") == []


@pytest.mark.parametrize("slots", [0, 2])
def test_unreachable_route_of_a_former_process_leaves_its_successor_ready(slots: int) -> None:
    manager = Manager()
    manager.ready(slots=slots, incarnation=1)
    headers = {"worker": "w", "incarnation": 2, "replaces": 1, **({"slots": 2} if slots else {})}
    received = manager.dialect.receive(b"new", frames("READY", headers), manager.now_ns)
    unreachable = manager.dialect.disconnected(b"w")  # by a reply of that turn
    manager.handle(received)
    manager.handle(unreachable)
    assert manager.submit(b"a") == [WAKE]
    give = {"worker": "w", "request": "1", "incarnation": 2}
    assert manager.send("GIVE", give, route=b"new") == [taken("a")]


def test_routes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wmp, "PEERS_MAX", 3)
    manager = Manager()
    for number in range(5):
        manager.ready(f"w{number}")
    assert manager.submit(b"a", b"b", b"c", b"d", b"e") == [WAKE] * 3
    assert [route for route, _, _ in manager.sent] == [b"w2", b"w3", b"w4"]


# Keys.


@pytest.mark.parametrize(
    ("guest", "path", "good"),
    [
        (AuthenticatedPeer("w", (Role.WORKER,)), [], True),
        (AuthenticatedPeer("other", (Role.WORKER,)), [], False),
        (AuthenticatedPeer("w", (Role.WORKER,)), [b"id"], True),
        (AuthenticatedPeer("site", (Role.WORKER,)), [b"id"], False),
        (AuthenticatedPeer("site", (Role.WORKER, Role.RELAY)), [b"id"], True),
        (AuthenticatedPeer("site", (Role.PRODUCER, Role.RELAY)), [b"id"], False),
        (AuthenticatedPeer("boss", (Role.ADMIN,)), [], True),
        (AuthenticatedPeer("looker", (Role.VIEWER,)), [b"id"], False),
        (AuthenticatedPeer("", ()), [], False),
    ],
)
def test_key_is_valid_for_its_worker_and_a_relay_s_for_all_behind_it(
    guest: AuthenticatedPeer, path: list[bytes], *, good: bool
) -> None:
    manager = Manager()
    manager.submit(b"a")
    message = frames("READY", {"worker": "w"})
    found = manager.dialect.receive(b"r", [*path, *message], manager.now_ns, guest)
    codes = [event.refusal for event in found if isinstance(event, RequestRejected)]
    assert codes == ([] if good else [Refusal.FORBIDDEN])
    (said,) = manager.take(message, b"r", path, guest)
    assert said.command == ("WAKE" if good else "BYE")
    assert bool(manager.scheduler.ledger.workers) is good
