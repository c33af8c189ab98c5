"""The order in which the replies of a turn leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.broker.turn import Broker
from taskyard.core.effects import Accepted, Assign, Settled
from taskyard.core.events import SubmitRequested, TasksReported, TasksRequested, WorkerRegistered
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.scheduler import Scheduler
from taskyard.core.timer_heap import TimerHeap
from taskyard.journal.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.effects import Effect
    from taskyard.core.events import Event


class SentEffects:
    """A transport that keeps the types of what is sent, and a clock that stands still."""

    def __init__(self) -> None:
        self.sent: list[type] = []
        self.timers = TimerHeap()

    def monotonic_ns(self) -> int:
        return SECOND_NS

    wall_ns = monotonic_ns

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        del wait_ns
        return ()

    def is_reading(self, client: bytes) -> bool:
        del client
        return True

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        self.sent += map(type, effects)
        return ()


def submit(*names: bytes, watch: bool) -> SubmitRequested:
    submission = Submission([*names], [b""], [Terms()])
    return SubmitRequested(0, b"client", submission, 1, watch=watch)


def test_a_parked_worker_gets_its_task_before_the_client_its_acknowledgement() -> None:
    transport = SentEffects()
    broker = Broker(Scheduler(), transport, MemoryStore(), transport)
    for number in range(2):
        worker = b"worker-%d" % number
        facts = WorkerFacts(slots_total=1, lease_timeout_ns=60 * SECOND_NS)
        broker.process([WorkerRegistered(0, worker, facts)])
        broker.process([TasksRequested(0, worker, 1, True, 2 + number)])  # noqa: FBT003  # it parks
    broker.process([submit(b"first", b"second", watch=False)])
    assert transport.sent == [Assign, Assign, Accepted]


def test_an_acknowledgement_precedes_the_results_that_are_there_already() -> None:
    transport = SentEffects()
    broker = Broker(Scheduler(), transport, MemoryStore(), transport)
    facts = WorkerFacts(slots_total=1, lease_timeout_ns=60 * SECOND_NS)
    broker.process([WorkerRegistered(0, b"worker", facts)])
    broker.process([TasksRequested(0, b"worker", 1, True, 2)])  # noqa: FBT003  # it parks
    broker.process([submit(b"task", watch=False)])
    broker.process([TasksReported(0, b"worker", [b"task"], request=3)])
    broker.process([TasksRequested(0, b"worker", 1, True, 4)])  # noqa: FBT003  # it parks
    transport.sent.clear()
    broker.process([submit(b"task", b"other", watch=True)])
    assert transport.sent == [Accepted, Settled, Assign]
