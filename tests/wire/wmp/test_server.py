"""WMP at the manager, frame by frame, and the decisions of its docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from taskyard.core.events import CancelRequested, DrainRequested, Scope, WorkerRegistered
from taskyard.core.limits import SECOND_NS
from taskyard.core.records import Finished
from taskyard.core.states import TaskState, WorkerState
from taskyard.core.workers import WorkerFacts
from taskyard.wire.dialect import request_numbers
from taskyard.wire.roles import AuthenticatedPeer, Role
from taskyard.wire.wmp import server as wmp
from taskyard.wire.wmp.server import Wmp, make_server
from tests.wire.wmp.kit import ME, Manager, Said, frames

if TYPE_CHECKING:
    from taskyard.core.model import Task

WAKE = Said("WAKE", {"service": "default", "manager": ME})


def taken(task: str, attempt: int = 1, request: Any = "1", payload: bytes = b"payload") -> Said:
    headers = {"request": request, "task": task, "attempt": attempt}
    headers |= {"service": "default", "lease_ms": 15_000, "manager": ME}
    return Said("TAKE", headers, payload)


def no(request: Any = "1") -> Said:
    return Said("NO", {"request": request, "manager": ME})


def done(
    yard: Manager, task: str, status: str, payload: bytes = b"", attempt: int = 1, **more: Any
) -> list[Said]:
    headers = {"worker": "w", "task": task, "attempt": attempt, "status": status, **more}
    return yard.say("DONE", headers, payload, route=b"w")


def holding(*names: bytes, **more: Any) -> Manager:
    """Return a manager whose worker `w` has taken these tasks."""
    manager = Manager()
    manager.ready(slots=len(names), **more)
    manager.submit(*names)
    for number, _ in enumerate(names):
        manager.given(request=number)
    return manager


def state(manager: Manager, name: bytes) -> tuple[TaskState, int, int, int]:
    task: Task = manager.task(name)
    return task.state, task.attempt, task.failures, task.losses


# The dialogue.


def test_ready_wake_give_take_done() -> None:
    manager = Manager()
    assert manager.ready() == []
    assert manager.submit(b"a") == [WAKE]
    assert manager.given() == [taken("a")]
    assert manager.given() == [no()]
    assert done(manager, "a", "ok", b"result") == []
    assert manager.task(b"a").state is TaskState.DONE
    assert manager.dialect.malformed == 0


def test_frames_are_those_of_the_docs() -> None:
    manager = Manager()
    manager.handle(manager.dialect.receive(b"\1id", [*_ready_frames()], manager.now_ns))
    manager.submit(b"a")
    give = [b"", b"WMP01", b"\x03", b'{"worker":"w","request":7}']
    replies = manager.dialect.receive(b"\1id", [b"relay", *give], manager.now_ns)
    (effect,) = manager.scheduler.handle(_now(replies[0], manager.now_ns))
    headers = (
        b'{"request":7,"task":"a","attempt":1,"service":"default","lease_ms":15000,"manager":"m"}'
    )
    assert manager.dialect.reply(effect) == [
        (b"\1id", [b"relay", b"", b"WMP01", b"\x04", headers, b"payload"])
    ]


def _ready_frames() -> list[bytes]:
    return [b"relay", b"", b"WMP01", b"\x01", b'{"worker":"w","slots":2,"services":["default"]}']


def _now(event: Any, now_ns: int) -> Any:
    event.now_ns = now_ns
    return event


def test_ready_has_the_facts_of_a_worker() -> None:
    events = Wmp(1, ME, lambda: 0).receive(
        b"r", frames("READY", {"worker": "w", "slots": 3, "services": ["x", "y", "x"]}), 5
    )
    facts = WorkerFacts((b"x", b"y"), 3, wmp.SILENCE_NS, 0, wants_wake=True, dialect=b"wmp")
    assert events[0] == WorkerRegistered(0, b"wmp:w", facts)
    plain = Wmp(1, ME, lambda: 0).receive(b"r", frames("READY", {"worker": "w"}), 5)
    assert isinstance(plain[0], WorkerRegistered)
    assert (plain[0].facts.services, plain[0].facts.slots_total) == ((b"default",), 1)


def test_requests_have_the_numbers_of_the_dialect() -> None:
    (asked,) = Wmp(3, ME, lambda: 0).receive(b"r", frames("GIVE", {"worker": "w", "request": 1}), 5)
    assert getattr(asked, "request", 0) == next(request_numbers(3))


def test_manager_is_named_after_its_journal_and_keeps_the_name_after_a_restart() -> None:
    dialect = make_server(2, b"\x01\xfe", random_bits=lambda: 0)
    dialect.receive(b"r", frames("READY", {"worker": "w"}), 5)
    done_for = frames(
        "DONE", {"worker": "w", "task": "a", "attempt": 1, "status": "ok", "manager": "01fe"}
    )
    assert dialect.receive(b"r", done_for, 5)


# READY is a level.


def test_repeated_ready_changes_nothing() -> None:
    manager = Manager()
    for _ in range(3):
        assert manager.ready() == []
    assert manager.submit(b"a", b"b", b"c") == [WAKE]


def test_ready_stays_after_no() -> None:
    manager = Manager()
    manager.ready()
    assert manager.given() == [no()]
    assert manager.submit(b"a") == [WAKE]


def test_ready_ends_when_the_slots_are_full() -> None:
    manager = Manager()
    manager.ready(slots=2)
    assert manager.submit(b"a", b"b", b"c") == [WAKE]
    assert manager.given(request="1") == [taken("a", request="1"), WAKE]
    assert manager.given(request="2") == [taken("b", request="2")]
    assert done(manager, "a", "ok") == []
    assert manager.ready(slots=2) == [WAKE]


def test_ready_changes_the_facts_in_it() -> None:
    manager = Manager()
    manager.ready(services=["x"])
    manager.ready(services=["y"])
    assert manager.submit(b"a", service=b"x") == []
    assert manager.submit(b"b", service=b"y") == [Said("WAKE", {"service": "y", "manager": ME})]


def test_ready_cancels_an_unanswered_wake() -> None:
    manager = Manager()
    manager.ready("w1")
    manager.ready("w2")
    assert manager.submit(b"a") == [WAKE]
    assert manager.ready("w1") == [WAKE]
    assert [route for route, _, _ in manager.sent] == [b"w1"]


def test_give_with_other_services_changes_them() -> None:
    manager = Manager()
    manager.ready(services=["x"])
    manager.submit(b"a", service=b"y")
    headers = {"worker": "w", "request": 1, "services": ["y"]}
    assert manager.say("GIVE", headers, route=b"w")[-1].command == "TAKE"


# WAKE without a thundering herd.


def test_one_task_wakes_one_of_a_hundred_workers() -> None:
    manager = Manager()
    for number in range(100):
        manager.ready(f"w{number}")
    assert manager.submit(b"a") == [WAKE]
    assert manager.sent[0][0] == b"w0"
    assert manager.given("w0") == [taken("a")]


def test_as_many_are_woken_as_there_are_tasks_least_recently_used_first() -> None:
    manager = Manager()
    for worker in ("w1", "w2", "w3"):
        manager.ready(worker)
    manager.submit(b"a")
    manager.given("w1")
    manager.say("DONE", {"worker": "w1", "task": "a", "attempt": 1, "status": "ok"}, route=b"w1")
    manager.ready("w1")
    assert manager.submit(b"b", b"c") == [WAKE, WAKE]
    assert [route for route, _, _ in manager.sent] == [b"w2", b"w3"]


def test_new_worker_is_the_least_recently_used() -> None:
    manager = holding(b"a")
    done(manager, "a", "ok")
    manager.ready("w")
    manager.ready("new")
    manager.submit(b"b")
    assert [route for route, _, _ in manager.sent] == [b"new"]


def test_worker_that_does_not_give_within_a_second_is_skipped() -> None:
    manager = Manager()
    manager.ready("w1")
    manager.ready("w2")
    manager.submit(b"a")
    assert manager.pass_time(SECOND_NS - 1) == []
    assert manager.pass_time(1) == [WAKE]
    assert manager.sent[0][0] == b"w2"


# Reports.


@pytest.mark.parametrize(
    ("status", "after"),
    [
        ("ok", TaskState.DONE),
        ("error", TaskState.FAILED),
        ("refused", TaskState.READY),
        ("cancelled", TaskState.READY),
    ],
)
def test_status_of_a_report(status: str, after: TaskState) -> None:
    manager = holding(b"a")
    done(manager, "a", status, b"text")
    assert manager.task(b"a").state is after


def test_error_starts_the_retry_policy_with_the_payload_as_reason() -> None:
    manager = Manager()
    manager.ready()
    manager.submit(b"a", retry_delays_ns=(SECOND_NS,))
    manager.given()
    done(manager, "a", "error", b"no such file")
    assert state(manager, b"a") == (TaskState.DELAYED, 1, 1, 0)
    (record,) = [
        one for one in manager.scheduler.take_records() if type(one).__name__ == "Postponed"
    ]
    assert record.reasons == [b"no such file"]  # type: ignore[union-attr]


def test_refused_task_goes_to_the_next_and_costs_no_attempt() -> None:
    manager = holding(b"a")
    manager.ready("other")
    assert done(manager, "a", "refused") == [WAKE]
    assert manager.given("other") == [taken("a", attempt=2)]
    assert state(manager, b"a") == (TaskState.LEASED, 2, 0, 0)


def test_repeated_report_and_that_of_another_attempt_are_dropped() -> None:
    manager = holding(b"a")
    done(manager, "a", "error", attempt=2)
    assert manager.task(b"a").state is TaskState.LEASED
    done(manager, "a", "ok", b"first")
    done(manager, "a", "error", b"second")
    assert manager.task(b"a").state is TaskState.DONE


def test_report_for_another_manager_is_dropped() -> None:
    manager = holding(b"a")
    done(manager, "a", "ok", manager="another")
    assert manager.task(b"a").state is TaskState.LEASED
    assert manager.dialect.malformed == 1
    done(manager, "a", "ok", manager=ME)
    assert manager.task(b"a").state is TaskState.DONE


def test_status_is_progress() -> None:
    manager = holding(b"a")
    headers = {"worker": "w", "task": "a", "attempt": 1, "percent": 40.5, "text": "half"}
    manager.say("STATUS", headers, route=b"w")
    (record,) = [
        one for one in manager.scheduler.take_records() if type(one).__name__ == "Progressed"
    ]
    assert (record.names, record.percents, record.texts) == ([b"a"], [40], [b"half"])  # type: ignore[union-attr]


def test_empty_status_is_a_heartbeat() -> None:
    manager = holding(b"a")
    manager.scheduler.take_records()
    manager.now_ns += 10 * SECOND_NS
    manager.say("STATUS", {"worker": "w", "task": "a", "attempt": 1}, route=b"w")
    assert manager.scheduler.take_records() == []
    assert manager.scheduler.ledger.workers[b"wmp:w"].last_seen_ns == manager.now_ns


def test_truncated_result_is_recorded_with_its_length() -> None:
    manager = holding(b"a")
    headers = {"worker": "w", "task": "a", "attempt": 1, "status": "ok", "bytes_total": 9}
    manager.take(frames("DONE", headers, b"end"), b"w")
    (record,) = [one for one in manager.scheduler.take_records() if isinstance(one, Finished)]
    assert (record.results, record.result_bytes_total) == ([b"end"], [9])


def test_several_payload_frames_are_one_result() -> None:
    manager = holding(b"a")
    message = frames("DONE", {"worker": "w", "task": "a", "attempt": 1, "status": "ok"}, b"x")
    manager.take([*message, b"y"], b"w")
    (record,) = [
        one for one in manager.scheduler.take_records() if type(one).__name__ == "Finished"
    ]
    assert record.results == [b"\x92\xc4\x01x\xc4\x01y"]  # type: ignore[union-attr]


# Payloads and names.


def test_task_without_a_payload_is_sent_with_its_name() -> None:
    manager = Manager()
    manager.ready()
    manager.submit("Ähre".encode(), payload=b"")
    assert manager.given() == [taken("Ähre", payload="Ähre".encode())]


@pytest.mark.parametrize("name", [b"\xff\xfe", b"\0zero", b"a\xffb", "ÿ".encode("latin-1")])
def test_name_that_is_not_text_is_restored(name: bytes) -> None:
    manager = Manager()
    manager.ready()
    manager.submit(name)
    (take,) = manager.given()
    assert take.headers["task"] == "\0" + name.decode("latin-1")
    done(manager, take.headers["task"], "ok")
    assert manager.task(name).state is TaskState.DONE


def test_time_limit_and_slots_are_sent_if_set() -> None:
    manager = Manager()
    manager.ready(slots=4)
    manager.submit(b"a", time_limit_ns=1_500_000_001, slots=3)
    (take,) = manager.given()
    assert (take.headers["time_limit_ms"], take.headers["slots"]) == (1501, 3)


def test_lock_is_repeated_as_received() -> None:
    manager = Manager()
    manager.ready()
    for request in ("lock", 17, "", -3):
        assert manager.given(request=request) == [no(request)]


def test_task_of_another_dialect_is_cancelled_at_its_worker() -> None:
    manager = holding(b"a")
    replies = manager.handle([CancelRequested(0, b"client", Scope(names=(b"a",)))])
    assert replies == [Said("CANCEL", {"task": "a", "attempt": 1, "manager": ME})]
    assert done(manager, "a", "cancelled") == []
    assert manager.task(b"a").state is TaskState.CANCELLED


# Heartbeats and timeouts.


def ping(
    manager: Manager, held: list[Any] | None, command: str = "PING", **more: Any
) -> list[Said]:
    headers = {"worker": "w", **({} if held is None else {"held": held}), **more}
    return manager.say(command, headers, route=b"w")


def pong(*, ready: bool = True) -> Said:
    return Said("PONG", {"worker": "w", **({} if ready else {"ready": False}), "manager": ME})


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
    manager.say(command, {"worker": "w", "task": "a", "attempt": 1}, route=b"w")
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
        Said("CANCEL", {"task": "a", "attempt": 1, "manager": ME}),
        Said("CANCEL", {"task": "never", "attempt": 3, "manager": ME}),
        pong(),
    ]


def test_silent_worker_is_pinged_and_then_forgotten() -> None:
    manager = Manager()
    manager.ready()
    asked = Said("PING", {"worker": "w", "manager": ME})
    assert manager.dialect.wake_at_ns() == manager.now_ns + wmp.PING_NS
    assert manager.pass_time(wmp.PING_NS - 1) == []
    assert manager.pass_time(1) == [asked]
    assert manager.dialect.wake_at_ns() == manager.now_ns + wmp.PING_NS
    ping(manager, [], "PONG")
    assert manager.pass_time(wmp.PING_NS) == [asked]
    assert manager.pass_time(wmp.PING_NS) == [asked]
    manager.pass_time(wmp.FORGET_NS)
    assert manager.sent == []
    assert manager.dialect.wake_at_ns() is None


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


def held_by(incarnation: int) -> Said:
    reason = f"worker name 'wmp:w' is held by another process (incarnation {incarnation})"
    reason += "; wait for it, or give another --name"
    headers = {"worker": "w", "reason": reason, "manager": ME}
    return Said("BYE", {**headers, "code": "name-held"})


def newcomer(manager: Manager, command: str = "READY", **more: Any) -> list[Said]:
    """Return the replies to process 2 of the id `w`, by its own route."""
    return manager.say(command, {"worker": "w", "incarnation": 2, **more}, route=b"2")


def test_other_process_of_the_same_id_waits_while_the_holder_is_alive() -> None:
    manager = holding(b"a", incarnation=1)
    for _ in range(10):
        manager.pass_time(5 * SECOND_NS)
        manager.say("PING", {"worker": "w", "incarnation": 1}, route=b"w")
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
    (bye,) = manager.say("PING", {"worker": "w", "incarnation": 1}, route=b"w")
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
    manager.say("PING", {"worker": "w", "incarnation": 1}, route=b"w")
    manager.handle([CancelRequested(0, b"client", Scope(names=(b"a",)))])
    assert [(route, said.command) for route, _, said in manager.sent] == [(b"w", "CANCEL")]


def test_bye_returns_held_tasks_without_a_charge() -> None:
    manager = holding(b"a")
    assert manager.say("BYE", {"worker": "w", "reason": "going home"}, route=b"w") == []
    assert state(manager, b"a") == (TaskState.READY, 1, 0, 0)
    assert manager.scheduler.ledger.workers == {}
    assert manager.dialect.wake_at_ns() is None


def test_drained_worker_gets_bye_when_it_holds_nothing() -> None:
    bye = Said("BYE", {"worker": "w", "reason": "no more tasks", "manager": ME})
    manager = holding(b"a")
    assert manager.handle([DrainRequested(0, b"client")]) == []
    assert manager.given() == [no()]
    assert done(manager, "a", "ok") == [bye]
    assert manager.given(request="2") == [no("2"), bye]
    assert bye in manager.ready()


def test_manager_that_shuts_down_accepts_no_worker() -> None:
    manager = holding(b"a")
    manager.dialect.leaving = True
    bye = Said("BYE", {"worker": "new", "reason": "the manager is shutting down", "manager": ME})
    assert manager.ready("new") == [bye]
    assert [*manager.scheduler.ledger.workers] == [b"wmp:w"]
    assert manager.ready() == []


# Routes and relays.


def test_worker_is_reached_by_the_route_of_its_last_message() -> None:
    manager = Manager()
    manager.say("READY", {"worker": "w"}, route=b"r1", path=[b"a", b"b"])
    manager.say("PING", {"worker": "w"}, route=b"r2", path=[b"c"])
    manager.submit(b"x")
    assert manager.sent == [(b"r2", [b"c"], WAKE)]
    manager.say("GIVE", {"worker": "w", "request": 1}, route=b"r1", path=[b"a", b"b"])
    assert [(route, path) for route, path, _ in manager.sent] == [(b"r1", [b"a", b"b"])]


def test_unreachable_route_cuts_off_all_workers_behind_it() -> None:
    manager = Manager()
    for worker in ("w1", "w2"):
        manager.say("READY", {"worker": worker}, route=b"relay", path=[worker.encode()])
    manager.ready("w3")
    manager.say("READY", {"worker": "w2"}, route=b"other")
    manager.handle(manager.dialect.disconnected(b"relay"))
    workers = manager.scheduler.ledger.workers
    assert [workers[b"wmp:" + name].state for name in (b"w1", b"w2", b"w3")] == [
        *(WorkerState.BUSY, WorkerState.PARKED, WorkerState.PARKED)
    ]
    assert manager.say("PING", {"worker": "w1"}, route=b"relay")[0].headers["ready"] is False
    assert manager.dialect.disconnected(b"nobody") == []


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
        (AuthenticatedPeer("w", Role.WORKER), [], True),
        (AuthenticatedPeer("other", Role.WORKER), [], False),
        (AuthenticatedPeer("relay", Role.WORKER), [b"id"], True),
        (AuthenticatedPeer("boss", Role.ADMIN), [], True),
        (AuthenticatedPeer("looker", Role.VIEWER), [b"id"], False),
        (AuthenticatedPeer("", None), [], False),
    ],
)
def test_key_is_valid_for_its_worker_and_a_relay_s_for_all_behind_it(
    guest: AuthenticatedPeer, path: list[bytes], *, good: bool
) -> None:
    manager = Manager()
    manager.submit(b"a")
    (said,) = manager.take(frames("READY", {"worker": "w"}), b"r", path, guest)
    assert said.command == ("WAKE" if good else "BYE")
    assert bool(manager.scheduler.ledger.workers) is good
