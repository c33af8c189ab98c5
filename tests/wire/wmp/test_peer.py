"""WMP at the worker: READY and its back-off, locks, held tasks, and many managers at once."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.core.limits import SECOND_NS
from taskyard.wire.wmp import peer
from taskyard.wire.wmp.peer import Send, Settings, Start, Stop
from tests.wire.wmp.kit import Sent, frames, read

READY = Sent("READY", {"worker": "w", "slots": 1, "services": ["default"]})
HELLO = Sent("PING", {"worker": "w"})


class Bench:
    """A worker whose managers are simulated by the test."""

    def __init__(self, wires: int = 1, slots: int = 1, **settings: Any) -> None:
        self.now_ns = 100 * SECOND_NS
        self.worker = peer.Worker(Settings(b"w", slots=slots, **settings), wires, self.now_ns)
        self.started: list[Start] = []
        self.stopped: list[Stop] = []

    def _sort(self, orders: list[peer.Action]) -> list[tuple[int, Sent]]:
        self.started = [one for one in orders if isinstance(one, Start)]
        self.stopped = [one for one in orders if isinstance(one, Stop)]
        return [(one.wire, read(one.frames)) for one in orders if isinstance(one, Send)]

    def start(self) -> list[tuple[int, Sent]]:
        return self._sort(self.worker.time_passed(self.now_ns))

    def receive(
        self, command: str, wire: int = 0, payload: bytes | None = None, **headers: Any
    ) -> list[tuple[int, Sent]]:
        """Deliver a message, and return the worker's messages."""
        orders = self.worker.take(wire, frames(command, headers, payload), self.now_ns)
        return self._sort(orders)

    def done(
        self, name: bytes, status: str = "ok", text: bytes = b"", attempt: int = 1
    ) -> list[tuple[int, Sent]]:
        return self._sort(self.worker.done((name, attempt), status, text, self.now_ns))

    def later(self, ns: int) -> list[tuple[int, Sent]]:
        self.now_ns += ns
        return self._sort(self.worker.time_passed(self.now_ns))

    def leave(self) -> list[tuple[int, Sent]]:
        return self._sort(self.worker.leave(self.now_ns))

    def set_slots(self, slots: int) -> list[tuple[int, Sent]]:
        return self._sort(self.worker.set_slots(slots, self.now_ns))

    def wake(self, wire: int = 0, **more: Any) -> list[tuple[int, Sent]]:
        return self.receive("WAKE", wire, service="default", **more)

    def give(self, task: str, request: str = "1", wire: int = 0, **more: Any) -> list[Any]:
        headers = {"request": request, "task": task, "attempt": 1, "service": "default"}
        headers |= {"lease_ms": 15_000, **more}
        return self.receive("TAKE", wire, b"payload", **headers)

    def quiet(self) -> None:
        """Return the first READY."""
        self.start()


def give(request: str = "1", **more: Any) -> Sent:
    return Sent("GIVE", {"worker": "w", "request": request, "services": ["default"], **more})


def reported(task: str, status: str = "ok", payload: bytes = b"", **more: Any) -> Sent:
    headers = {"worker": "w", "task": task, "attempt": 1, "status": status, **more}
    return Sent("DONE", headers, payload)


def commands(said: list[tuple[int, Sent]]) -> list[str]:
    return [one.command for _, one in said]


# READY.


def test_first_ready_goes_to_all_with_a_ping() -> None:
    assert Bench(wires=2).start() == [(0, READY), (0, HELLO), (1, READY), (1, HELLO)]


def test_ready_has_the_facts_of_the_worker() -> None:
    bench = Bench(slots=3, services=(b"x", b"\xff"), incarnation=7)
    (_, said), _ = bench.start()
    services = ["x", "\0ÿ"]
    headers = {"worker": "w", "slots": 3, "services": services, "incarnation": 7}
    headers |= {"heartbeat_ms": 1000}
    assert said == Sent("READY", headers)


def test_ready_is_repeated_with_a_back_off() -> None:
    bench = Bench()
    bench.start()
    gaps: list[int] = []
    last_ns = bench.now_ns
    while len(gaps) < 8:
        at_ns = bench.worker.wake_at_ns()
        assert at_ns is not None
        said = bench.later(at_ns - bench.now_ns)
        if (0, READY) in said:
            gaps.append((bench.now_ns - last_ns) // SECOND_NS)
            last_ns = bench.now_ns
    assert gaps == [1, 2, 4, 8, 16, 32, 32, 32]


def test_ready_is_sent_after_a_take_with_slots_left_and_when_a_slot_is_freed() -> None:
    bench = Bench(slots=2)
    bench.quiet()
    bench.wake()
    assert commands(bench.give("a", "1")) == ["READY"]
    bench.wake()
    assert bench.give("b", "2") == []
    assert bench.later(64 * SECOND_NS) == [
        (0, Sent("PING", {"worker": "w", "held": [["a", 1], ["b", 1]], "heartbeat_ms": 1000}))
    ]
    assert commands(bench.done(b"a")) == ["DONE", "READY"]


def test_ready_is_sent_at_once_to_a_manager_that_has_lost_it() -> None:
    bench = Bench()
    bench.quiet()
    assert bench.receive("PONG", worker="w") == []
    assert bench.receive("PONG", worker="w", ready=False) == [(0, READY)]
    assert commands(bench.receive("PING", worker="w", ready=False)) == ["PONG", "READY"]


# Locks.


def test_wake_give_take() -> None:
    bench = Bench()
    bench.quiet()
    assert bench.wake() == [(0, give())]
    assert bench.give("a") == []
    assert bench.started == [Start(b"a", 1, b"default", b"payload")]


def test_time_limit_and_slots_are_passed_on() -> None:
    bench = Bench(slots=4)
    bench.quiet()
    bench.wake()
    assert bench.give("a", time_limit_ms=1500, slots=4) == []
    assert bench.started == [Start(b"a", 1, b"default", b"payload", 1_500_000_000, 4)]
    assert bench.worker.slots_free == 0


def test_each_free_slot_gets_one_lock() -> None:
    bench = Bench(wires=3, slots=2)
    bench.quiet()
    assert bench.wake(0) == [(0, give("1"))]
    assert bench.wake(1) == [(1, give("2"))]
    assert bench.wake(2) == []


def test_wakes_without_a_slot_are_answered_in_order_when_one_is_unlocked() -> None:
    bench = Bench(wires=3)
    bench.quiet()
    bench.wake(0)
    bench.wake(2)
    bench.wake(1)
    assert bench.receive("NO", 0, request="1") == [(2, give("2"))]
    assert bench.receive("NO", 2, request="2") == [(1, give("3"))]


def test_wake_that_is_too_old_is_ignored() -> None:
    bench = Bench(wires=2)
    bench.quiet()
    bench.wake(0)
    bench.wake(1)
    bench.now_ns += peer.WAKE_NS
    assert bench.receive("NO", 0, request="1") == []


def test_wake_of_a_full_worker_is_answered_when_a_slot_is_freed_in_time() -> None:
    bench = Bench(wires=2)
    bench.quiet()
    bench.wake(0)
    bench.give("a")
    assert bench.wake(1) == []
    assert commands(bench.done(b"a")) == ["DONE", "GIVE"]


def test_ready_is_sent_when_the_give_that_took_a_freed_slot_gets_no() -> None:
    """TAKE has used up the READY, and the manager would not wake the worker again."""
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a")
    bench.wake()
    assert commands(bench.done(b"a")) == ["DONE", "GIVE"]
    bench.receive("NO", request="2")
    assert bench.worker.wake_at_ns() == bench.now_ns
    assert bench.later(0) == [(0, READY)]


def test_lock_ends_by_take_by_no_and_by_timeout() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    assert bench.worker.slots_free == 0
    bench.receive("NO", request="1")
    assert bench.worker.slots_free == 1
    bench.wake()
    assert "READY" not in commands(bench.later(peer.LOCK_NS - 1))
    assert bench.worker.slots_free == 0
    assert "READY" in commands(bench.later(1))
    assert bench.worker.slots_free == 1


def test_late_take_is_accepted_if_a_slot_is_free() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.later(peer.LOCK_NS)
    assert bench.give("a") == []
    assert [one.name for one in bench.started] == [b"a"]


def test_late_take_is_refused_without_a_free_slot() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.later(peer.LOCK_NS)
    bench.wake()
    bench.give("b", "2")
    assert bench.give("a", "1", manager="m") == [(0, reported("a", "refused", manager="m"))]
    assert bench.started == []


def test_repeated_take_is_accepted_once() -> None:
    bench = Bench(slots=2)
    bench.quiet()
    bench.wake()
    bench.give("a")
    assert bench.give("a") == []
    assert bench.started == []


def test_slot_of_a_refused_task_is_not_offered_for_a_while() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a")
    assert bench.done(b"a", "refused", b"no room") == [(0, reported("a", "refused", b"no room"))]
    assert bench.wake() == []
    assert "READY" in commands(bench.later(peer.REST_NS))


# Reports and held tasks.


def test_report_is_listed_until_its_manager_has_it() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a", manager="m")
    assert bench.done(b"a", "ok", b"result")[0] == (0, reported("a", "ok", b"result", manager="m"))
    assert (0, _ping([["a", 1]])) in bench.later(SECOND_NS)
    assert bench.receive("CANCEL", task="a", attempt=1) == []
    assert bench.worker.unconfirmed == 0
    assert not any(said.headers.get("held") for _, said in bench.later(SECOND_NS))


def _ping(held: list[Any]) -> Sent:
    return Sent("PING", {"worker": "w", "held": held, "heartbeat_ms": 1000})


def test_report_is_repeated_when_its_manager_is_alive_and_has_not_cancelled_it() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a")
    bench.done(b"a", "ok", b"result")
    assert "DONE" not in commands(bench.later(60 * SECOND_NS))  # the manager is not there
    bench.receive("PONG", worker="w")
    assert (0, reported("a", "ok", b"result")) in bench.later(1)
    assert "DONE" not in commands(bench.later(peer.REPORT_NS))
    assert bench.worker.unconfirmed == 1


def test_report_is_dropped_after_a_few_times() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a")
    bench.done(b"a")
    sent = 1
    for _ in range(20):
        bench.now_ns += SECOND_NS
        bench.receive("PONG", worker="w")
        sent += commands(bench.later(peer.REPORT_NS)).count("DONE")
    assert sent == peer.REPORTS_MAX + 1
    assert bench.worker.unconfirmed == 0


@pytest.mark.parametrize(
    ("name", "limit"), [("REPORTS_KEPT_MAX", 2), ("REPORTS_KEPT_BYTES_MAX", 25)]
)
def test_reports_are_kept_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(peer, name, limit)
    bench = Bench()
    bench.quiet()
    for number in range(5):
        bench.wake()
        bench.give(f"t{number}", str(number + 1))
        bench.done(b"t%d" % number, "ok", b"0123456789")
    assert bench.worker.unconfirmed == 2
    assert bench.worker.slots_free == 1


def test_cancelled_task_is_stopped_and_reported() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a", manager="m")
    said = bench.receive("CANCEL", task="a", attempt=1)
    assert said == [(0, reported("a", "cancelled", manager="m")), (0, READY)]
    assert bench.stopped == [Stop(b"a", 1, ended=True)]
    assert bench.done(b"a") == []


def test_manager_with_times_of_submission_sends_whether_a_cancelled_task_has_ended() -> None:
    bench = Bench(slots=2, forwards=True)
    bench.quiet()
    assert bench.wake() == [(0, give(forwards=True))]
    bench.give("a", manager="m", submitted_ns=7)
    start = Start(b"a", 1, b"default", b"payload", owner="m", submitted_ns=7)
    assert bench.started == [start]
    bench.receive("CANCEL", task="a", attempt=1)
    assert bench.stopped == [Stop(b"a", 1)]
    bench.give("b", manager="m", submitted_ns=7)
    bench.receive("CANCEL", task="b", attempt=1, ended=True)
    assert bench.stopped == [Stop(b"b", 1, ended=True)]


def test_task_with_the_name_of_another_managers_is_refused_and_the_slot_rests() -> None:
    bench = Bench(wires=2, slots=3)
    bench.quiet()
    for wire in (0, 1):
        bench.wake(wire)
    bench.give("a", "1")
    said = bench.give("a", "2", wire=1, manager="n")
    assert said[0] == (1, reported("a", "refused", manager="n"))
    assert bench.worker.slots_free == 1
    bench.later(peer.REST_NS)
    assert bench.worker.slots_free == 2


def test_other_slots_are_sent_with_the_next_ready() -> None:
    bench = Bench(slots=1)
    bench.quiet()
    bench.wake()
    bench.give("a")
    (_, ready), *_ = bench.set_slots(3)
    assert (ready.command, ready.headers["slots"]) == ("READY", 3)
    assert bench.worker.slots_free == 2


def test_cancel_of_an_unknown_task_is_ignored() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a")
    assert bench.receive("CANCEL", task="b", attempt=1) == []
    assert bench.receive("CANCEL", task="a", attempt=2) == []
    assert (bench.stopped, bench.worker.working) == ([], 1)


def test_progress_has_the_owner_of_the_task() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a", manager="m", back=[3])
    orders = bench.worker.progressed((b"a", 1), 50, "half")
    headers = {"worker": "w", "task": "a", "attempt": 1, "percent": 50, "text": "half"}
    (order,) = orders
    assert isinstance(order, Send)
    assert read(order.frames) == Sent("STATUS", {**headers, "manager": "m", "back": [3]})
    assert bench.worker.progressed((b"b", 1), 50) == []


def test_short_lease_gets_heartbeats_often_enough() -> None:
    bench = Bench(heartbeat_ns=10 * SECOND_NS)
    bench.quiet()
    bench.wake()
    bench.give("a", lease_ms=3000)
    assert commands(bench.later(SECOND_NS)) == ["PING"]


def test_silent_manager_gets_heartbeats_less_often() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a")
    times: list[int] = []
    while len(times) < 6:
        at_ns = bench.worker.wake_at_ns()
        assert at_ns is not None
        times.append((at_ns - bench.now_ns) // SECOND_NS)
        assert commands(bench.later(at_ns - bench.now_ns)) == ["PING"]
    assert times == [1, 1, 2, 4, 8, 8]
    bench.receive("PONG", worker="w")
    bench.later(8 * SECOND_NS)
    assert commands(bench.later(SECOND_NS)) == ["PING"]


def ping_intervals(bench: Bench, wire: int, seconds: int) -> list[int]:
    """Return the intervals in the PINGs of a worker. The manager answers them all."""
    found = []
    for _ in range(4 * seconds):
        for to, sent in bench.later(SECOND_NS // 4):
            if sent.command == "PING" and to == wire and "heartbeat_ms" in sent.headers:
                found.append(sent.headers["heartbeat_ms"])
                bench.receive("PONG", wire, worker="w", heartbeat_ms=3000 if wire else 60_000)
    return found


@pytest.mark.parametrize(("wire", "interval_ms", "count"), [(0, 4000, 5), (1, 3000, 7)])
def test_worker_uses_the_interval_of_each_manager(wire: int, interval_ms: int, count: int) -> None:
    bench = Bench(wires=2, heartbeat_ns=0)
    bench.start()
    bench.receive("PONG", wire, worker="w")
    assert ping_intervals(bench, wire, 2) == [1000]
    sent = ping_intervals(bench, wire, 21)
    assert (sent[0], len(sent)) == (interval_ms, count)


def test_worker_with_a_fixed_interval_keeps_it() -> None:
    bench = Bench(heartbeat_ns=2 * SECOND_NS)
    bench.start()
    bench.receive("PONG", worker="w")
    assert ping_intervals(bench, 0, 20) == [2000] * 10
