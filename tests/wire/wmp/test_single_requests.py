"""READY without `slots` at the manager: a request of its own for one task, as in the draft."""

from __future__ import annotations

import pytest

from taskyard.core.apply import apply
from taskyard.core.events import ClockSet, TimePassed
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.journal.recovery import decode, encode
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.wire.wmp import server as wmp
from tests.wire.wmp.kit import ME, WALL_NS, Manager, Sent

WAKE = Sent("WAKE", {"service": "default", "manager": ME})


def commands(sent: list[Sent]) -> list[str]:
    return [one.command for one in sent]


def request(manager: Manager, worker: str = "w") -> list[str]:
    """Send READY without slots."""
    return commands(manager.ready(worker, slots=0))


def give(manager: Manager, worker: str = "w") -> list[str]:
    return commands(manager.given(worker))


def done(manager: Manager, task: str, status: str = "ok") -> list[str]:
    headers = {"worker": "w", "task": task, "attempt": 1, "status": status}
    return commands(manager.send("DONE", headers, b"", route=b"w"))


def restarted(manager: Manager) -> Manager:
    """Return a manager that has recovered the records of another one."""
    ledger = Ledger()
    for record in decode(encode(manager.scheduler.take_records())):
        apply(ledger, record)
    later = Manager()
    later.scheduler = Scheduler(ledger)
    later.now_ns = manager.now_ns
    later.scheduler.resume(later.now_ns)
    later.handle([ClockSet(later.now_ns, WALL_NS)])
    return later


def test_take_uses_up_the_request() -> None:
    manager = Manager()
    request(manager)
    assert commands(manager.submit(b"a", b"b")) == ["WAKE"]
    assert give(manager) == ["TAKE"]
    assert give(manager) == ["NO"]
    assert done(manager, "a") == []
    assert manager.task(b"b").state is TaskState.READY


def test_ready_before_the_take_changes_nothing() -> None:
    manager = Manager()
    for _ in range(3):
        assert request(manager) == []
    assert commands(manager.submit(b"a", b"b")) == ["WAKE"]
    assert request(manager) == []  # the WAKE stands
    assert give(manager) == ["TAKE"]
    assert give(manager) == ["NO"]


def test_ready_after_the_take_requests_one_more() -> None:
    manager = Manager()
    manager.submit(*(b"%d" % number for number in range(5)))
    for _ in range(5):
        assert request(manager) == ["WAKE"]
        assert give(manager) == ["TAKE"]
    assert len(manager.scheduler.ledger.workers[b"wmp:w"].held()) == 5


def test_request_stands_after_no_and_after_an_unanswered_wake() -> None:
    manager = Manager()
    request(manager)
    assert give(manager) == ["NO"]
    assert commands(manager.submit(b"a")) == ["WAKE"]
    assert commands(manager.pass_time(SECOND_NS)) == ["WAKE"]
    assert give(manager) == ["TAKE"]


def test_unanswered_wake_goes_to_the_next_worker() -> None:
    manager = Manager()
    request(manager, "w1")
    request(manager, "w2")
    manager.submit(b"a")
    assert manager.pass_time(SECOND_NS) == [WAKE]
    assert [route for route, _, _ in manager.sent] == [b"w2"]
    assert give(manager, "w1") == ["TAKE"]  # late, but its request stands
    assert give(manager, "w2") == ["NO"]


@pytest.mark.parametrize("status", ["refused", "cancelled"])
def test_refused_task_needs_a_new_request(status: str) -> None:
    manager = Manager()
    manager.submit(b"a")
    request(manager)
    give(manager)
    assert done(manager, "a", status) == []
    assert manager.task(b"a").state is TaskState.READY
    assert request(manager) == ["WAKE"]


def test_bye_ends_the_request_and_returns_the_tasks() -> None:
    manager = Manager()
    manager.submit(b"a")
    request(manager)
    give(manager)
    request(manager)
    manager.send("BYE", {"worker": "w"}, route=b"w")
    assert manager.task(b"a").state is TaskState.READY
    assert give(manager) == ["NO"]
    assert request(manager) == ["WAKE"]


def test_lost_take_returns_by_the_list_of_a_heartbeat() -> None:
    manager = Manager()
    manager.submit(b"a")
    request(manager)
    give(manager)
    manager.pass_time(2 * wmp.PING_NS)
    request(manager)
    headers = {"worker": "w", "held": []}
    assert commands(manager.send("PING", headers, route=b"w")) == ["PONG", "WAKE"]
    assert give(manager) == ["TAKE"]
    assert manager.task(b"a").attempt == 2


def test_after_a_restart_the_request_is_void_and_older_leases_have_a_deadline() -> None:
    """The DONE may be lost with the manager, and this worker can't list its tasks."""
    manager = Manager()
    manager.submit(b"a", b"b")
    request(manager)
    give(manager)
    request(manager)
    later = restarted(manager)
    assert give(later) == ["NO"]
    for _ in range(int(wmp.SILENCE_NS // wmp.PING_NS)):
        assert later.task(b"a").state is TaskState.LEASED
        later.pass_time(wmp.PING_NS)
        later.send("PONG", {"worker": "w"}, route=b"w")
    assert later.task(b"a").state is TaskState.READY
    assert later.task(b"a").losses == 0
    assert request(later) == ["WAKE"]


def test_after_a_restart_a_worker_with_heartbeats_keeps_its_tasks() -> None:
    manager = Manager()
    manager.submit(b"a")
    manager.ready(slots=0, heartbeat_ms=1000)
    give(manager)
    later = restarted(manager)
    for _ in range(int(2 * wmp.SILENCE_NS // wmp.PING_NS)):
        later.pass_time(wmp.PING_NS)
        later.send("PING", {"worker": "w", "held": [["a", 1]]}, route=b"w")
    assert later.task(b"a").state is TaskState.LEASED


@pytest.mark.parametrize("headers", [[], [b""], [b"{}"], [b" { } "]])
@pytest.mark.parametrize("path", [[], [b"lower", b"worker"]])
def test_ready_without_headers_gets_bye_with_a_reason(
    headers: list[bytes], path: list[bytes]
) -> None:
    manager = Manager()
    manager.submit(b"a")
    before = ledger_fingerprint(manager.scheduler.ledger)
    said = manager.take([b"", b"WMP01", b"\x01", *headers], b"route", path)
    assert said == [Sent("BYE", {"reason": wmp.EMPTY_READY, "manager": ME})]
    assert manager.sent[0][:2] == (b"route", path)
    assert manager.dialect.malformed == 1
    assert ledger_fingerprint(manager.scheduler.ledger) == before
    assert manager.handle([TimePassed(0)]) == []
