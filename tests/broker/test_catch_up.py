"""Late timers: a broker first reads the messages that arrived meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.broker.turn import CATCH_UP_NS, Broker, CatchUp
from taskyard.core.events import WorkerHeartbeat, WorkerRegistered
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.core.scheduler import Scheduler
from taskyard.core.timer_heap import AT_ONCE_NS, TimerHeap
from taskyard.journal.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.effects import Effect
    from taskyard.core.events import Event

FACTS = WorkerFacts(slots_total=1, lease_timeout_ns=60 * SECOND_NS)


class ManualTransport:
    """A transport and a clock moved by the test. A turn reads one event."""

    def __init__(self) -> None:
        self.now_ns = SECOND_NS
        self.arrived: list[Event] = []
        self.timers = TimerHeap()

    def monotonic_ns(self) -> int:
        return self.now_ns

    wall_ns = monotonic_ns

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        del wait_ns
        taken, self.arrived = self.arrived[:1], self.arrived[1:]
        return taken

    def is_reading(self, client: bytes) -> bool:
        del client
        return True

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        del effects
        return ()


def test_live_workers_are_kept_when_the_broker_was_stopped() -> None:
    hands, names = ManualTransport(), [b"u", b"v", b"w"]
    broker = Broker(Scheduler(), hands, MemoryStore(), hands)
    hands.arrived = [WorkerRegistered(0, name, FACTS) for name in names]
    for _ in names:
        broker.turn()
    hands.now_ns += 70 * SECOND_NS
    hands.arrived = [WorkerHeartbeat(0, name, []) for name in names[:2]]
    for _ in names:
        broker.turn()
    assert [*broker.scheduler.ledger.workers] == names[:2]


def test_timers_of_dialects_wait_for_messages_too_but_not_those_that_are_due_at_once() -> None:
    hands, ran = ManualTransport(), list[tuple[str, int]]()
    broker = Broker(Scheduler(), hands, MemoryStore(), hands)

    def note(now_ns: int, key: str) -> list[Event]:
        ran.append((key, now_ns))
        return []

    hands.timers.add(2 * SECOND_NS, note, "late")
    hands.now_ns = 60 * SECOND_NS
    hands.timers.add(AT_ONCE_NS, note, "at once")
    hands.arrived = [WorkerRegistered(0, name, FACTS) for name in (b"u", b"v")]
    for _ in range(3):
        assert broker.wait_ns() == 0
        broker.turn()
        hands.now_ns += 1
    assert ran == [("at once", 60 * SECOND_NS), ("late", 60 * SECOND_NS + 2)]
    assert broker.wait_ns() == FACTS.lease_timeout_ns - 3


def test_events_of_a_dialects_timer_are_decided_in_its_turn() -> None:
    hands = ManualTransport()
    broker = Broker(Scheduler(), hands, MemoryStore(), hands)
    hands.timers.add(SECOND_NS, lambda _, name: [WorkerRegistered(0, name, FACTS)], b"w")
    broker.turn()
    assert [*broker.scheduler.ledger.workers] == [b"w"]


def test_timers_wait_while_there_is_something_to_read_but_not_for_ever() -> None:
    catch_up, due_ns, now_ns = CatchUp(), SECOND_NS, 60 * SECOND_NS
    assert not catch_up.is_over(due_ns, now_ns, has_read=True)
    assert not catch_up.is_over(due_ns, now_ns + CATCH_UP_NS - 1, has_read=True)
    assert catch_up.is_over(due_ns, now_ns + CATCH_UP_NS, has_read=True)
    assert not catch_up.is_over(due_ns, now_ns + CATCH_UP_NS, has_read=True)
    assert catch_up.is_over(due_ns, now_ns + CATCH_UP_NS, has_read=False)


def test_timers_that_are_hardly_late_do_not_wait() -> None:
    assert CatchUp().is_over(SECOND_NS, 2 * SECOND_NS, has_read=True)
