"""WMP at the manager, frame by frame, and the decisions of its docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from taskyard.core.blobs import Blob
from taskyard.core.events import CancelRequested, Scope, WorkerReconnected, WorkerRegistered
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.core.records import Finished
from taskyard.core.states import TaskState
from taskyard.wire.dialect import request_numbers
from taskyard.wire.wmp import server as wmp
from taskyard.wire.wmp.server import Wmp, manager_name
from tests.wire.wmp.kit import ME, Manager, Sent, frames

if TYPE_CHECKING:
    from taskyard.core.entities import Task

WAKE = Sent("WAKE", {"service": "default", "manager": ME})


def taken(task: str, attempt: int = 1, request: Any = "1", payload: bytes = b"payload") -> Sent:
    headers = {"request": request, "task": task, "attempt": attempt}
    headers |= {"service": "default", "lease_ms": 15_000, "manager": ME}
    return Sent("TAKE", headers, payload)


def no(request: Any = "1") -> Sent:
    return Sent("NO", {"request": request, "manager": ME})


def done(
    yard: Manager, task: str, status: str, payload: bytes = b"", attempt: int = 1, **more: Any
) -> list[Sent]:
    headers = {"worker": "w", "task": task, "attempt": attempt, "status": status, **more}
    return yard.send("DONE", headers, payload, route=b"w")


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
    facts = WorkerFacts(
        *((b"x", b"y"), 3, wmp.SILENCE_NS, 0),
        wants_wake=True,
        dialect=b"wmp",
        restart_lease_ns=wmp.SILENCE_NS,
    )
    assert events[0] == WorkerReconnected(0, b"wmp:w", 0)
    assert events[1] == WorkerRegistered(0, b"wmp:w", facts)
    plain = Wmp(1, ME, lambda: 0).receive(b"r", frames("READY", {"worker": "w"}), 5)
    assert isinstance(plain[1], WorkerRegistered)
    assert (plain[1].facts.services, plain[1].facts.slots_total) == ((b"default",), 0)


def test_requests_have_the_numbers_of_the_dialect() -> None:
    _, asked = Wmp(3, ME, lambda: 0).receive(b"r", frames("GIVE", {"worker": "w", "request": 1}), 5)
    assert getattr(asked, "request", 0) == next(request_numbers(3))


def test_manager_is_named_after_its_journal_and_keeps_the_name_after_a_restart() -> None:
    dialect = Wmp(2, manager_name(b"\x01\xfe"), lambda: 0)
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
    assert manager.submit(b"b", service=b"y") == [Sent("WAKE", {"service": "y", "manager": ME})]


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
    assert manager.send("GIVE", headers, route=b"w")[-1].command == "TAKE"


def test_take_of_a_worker_that_forwards_has_the_time_of_submission() -> None:
    manager = Manager()
    manager.ready()
    manager.submit(b"a")
    headers = {"worker": "w", "request": 1, "forwards": True}
    (take,) = manager.send("GIVE", headers, route=b"w")
    assert take.headers["submitted_ns"] == manager.task(b"a").terms.submitted_ns > 0


def test_worker_that_forwards_is_marked() -> None:
    manager = Manager()
    manager.ready(forwards=True, forwards_to="tcp://low:1")
    facts = manager.scheduler.ledger.workers[b"wmp:w"].facts
    assert (facts.forwards, facts.forwards_to) == (True, b"tcp://low:1")


# WAKE without a thundering herd.


@pytest.mark.no_cover
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
    manager.send("DONE", {"worker": "w1", "task": "a", "attempt": 1, "status": "ok"}, route=b"w1")
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
    manager.send("STATUS", headers, route=b"w")
    (record,) = [
        one for one in manager.scheduler.take_records() if type(one).__name__ == "Progressed"
    ]
    assert (record.names, record.percents, record.texts) == ([b"a"], [40], [b"half"])  # type: ignore[union-attr]


def test_empty_status_is_a_heartbeat() -> None:
    manager = holding(b"a")
    manager.scheduler.take_records()
    manager.now_ns += 10 * SECOND_NS
    manager.send("STATUS", {"worker": "w", "task": "a", "attempt": 1}, route=b"w")
    assert manager.scheduler.take_records() == []
    assert manager.scheduler.ledger.workers[b"wmp:w"].last_seen_ns == manager.now_ns


def test_truncated_result_is_recorded_with_its_length() -> None:
    manager = holding(b"a")
    headers = {"worker": "w", "task": "a", "attempt": 1, "status": "ok", "bytes_total": 9}
    manager.take(frames("DONE", headers, b"end"), b"w")
    (record,) = [one for one in manager.scheduler.take_records() if isinstance(one, Finished)]
    assert record.results == [Blob(b"", 9, b"end")]


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
    headers = {"task": "a", "attempt": 1, "manager": ME, "ended": True}
    assert replies == [Sent("CANCEL", headers)]
    assert done(manager, "a", "cancelled") == []
    assert manager.task(b"a").state is TaskState.CANCELLED


# New connections.


def test_task_lost_with_its_connection_returns_if_its_worker_never_lists_tasks() -> None:
    for slots in (0, 1):
        manager = Manager()
        manager.ready(slots=slots)
        manager.submit(b"a")
        sent = manager.given()
        for second in range(15):
            assert manager.task(b"a").state is TaskState.LEASED, (slots, second)
            manager.send("PING", {"worker": "w"}, route=b"another route")
            sent = manager.pass_time(SECOND_NS)
        assert manager.task(b"a").state is TaskState.READY
        assert manager.task(b"a").losses == 0
        assert sent == [Sent("PING", {"worker": "w", "ready": False, "manager": ME})]


def test_worker_that_keeps_its_route_on_a_new_connection_has_a_deadline() -> None:
    manager = Manager()
    manager.ready()
    manager.submit(b"a")
    manager.given()
    manager.handle(manager.dialect.reconnected(b"w", manager.now_ns))
    for _ in range(15):
        manager.send("PING", {"worker": "w"}, route=b"w")
        manager.pass_time(SECOND_NS)
    assert manager.task(b"a").state is TaskState.READY


def test_next_process_with_the_same_route_is_no_new_connection_of_the_former() -> None:
    manager = Manager()
    manager.send("READY", {"worker": "w", "slots": 1, "incarnation": 1}, route=b"w")
    assert manager.dialect.reconnected(b"w", manager.now_ns) == []
    next_ready = frames("READY", {"worker": "w", "slots": 1, "incarnation": 2})
    events = manager.dialect.receive(b"w", next_ready, manager.now_ns)
    assert not any(isinstance(event, WorkerReconnected) for event in events)
    ready = frames("READY", {"worker": "w", "slots": 1, "incarnation": 1})
    events = manager.dialect.receive(b"w", ready, manager.now_ns)
    assert events[0] == WorkerReconnected(0, b"wmp:w", 1)


def test_task_that_is_listed_on_a_new_connection_stays_leased() -> None:
    manager = Manager()
    manager.ready()
    manager.submit(b"a")
    manager.given()
    manager.send("PING", {"worker": "w", "held": [["a", 1]]}, route=b"another route")
    for _ in range(30):
        manager.send("PING", {"worker": "w"}, route=b"another route")
        manager.pass_time(SECOND_NS)
    assert manager.task(b"a").state is TaskState.LEASED


def test_known_routes_by_several_relays_are_no_new_connections() -> None:
    manager = Manager()
    for relay in (b"1", b"2"):
        manager.send("READY", {"worker": "w", "slots": 1}, route=relay, path=[b"p"])
    manager.submit(b"a")
    manager.send("GIVE", {"worker": "w", "request": 1}, route=b"1", path=[b"p"])
    for _ in range(15):
        for relay in (b"1", b"2"):
            manager.send("PING", {"worker": "w"}, route=relay, path=[b"p"])
        manager.pass_time(SECOND_NS)
    assert manager.task(b"a").state is TaskState.LEASED
