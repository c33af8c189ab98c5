"""A broker over lists and a clock moved by the test, for tests of live compaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskyard.broker.compaction import CompactionLimits, Compactor
from taskyard.broker.turn import Broker, CommitObserver
from taskyard.core.blobs import Content, text_of
from taskyard.core.effects import Accepted, Assign, Effect, Settled, TaskDetails
from taskyard.core.events import (
    Event,
    LookupRequested,
    ResultsRequested,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    WorkerRegistered,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, WorkerFacts
from taskyard.core.scheduler import Scheduler
from taskyard.core.timer_heap import TimerHeap
from taskyard.journal import recovery
from taskyard.journal.archive import Archive
from taskyard.journal.ended_tasks import ENDING, EndedTasks
from taskyard.journal.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


#: Limits that no test reaches.
NEVER = CompactionLimits(rows=10**9, rows_bytes=10**15, ended=10**9)


class Harness:
    """A broker on a real journal, with a transport and a clock controlled by the test."""

    timers = TimerHeap()

    def __init__(self, directory: Path, limits: CompactionLimits = NEVER) -> None:
        self.directory = directory
        self.now_ns = SECOND_NS
        self.store = SqliteStore(directory)
        self.index = Archive(directory)
        self.ledger = recovery.open_ledger(directory, self.store)
        self.archive = EndedTasks(self.index, self.ledger, self.store.head.sequence)
        observers = [CommitObserver(ENDING, self.archive.on_commit)]
        self.broker = Broker(
            *(Scheduler(self.ledger), self, self.store, self, self.archive), observers=observers
        )
        self.compactor = Compactor(directory, self.store, self.archive, self, limits)
        self._arrived: Sequence[Event] = ()
        self.sent: list[Effect] = []
        self.turn(WorkerRegistered(0, b"w", WorkerFacts(slots_total=0)))

    def fill_filter(self) -> None:
        """Build the name filter, the compactor's first work."""
        while self.archive.needs_filter:
            self.look()

    def close(self) -> None:
        self.compactor.close()
        self.index.close()
        self.store.close()

    def monotonic_ns(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        del wait_ns
        return self._arrived

    def is_reading(self, client: bytes) -> bool:
        del client
        return True

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        self.sent = [*effects]
        return ()

    def turn(self, *events: Event) -> list[Effect]:
        self._arrived = events
        self.broker.turn()
        return self.sent

    def submit(self, *names: bytes, **more: Any) -> Effect:
        [answer] = self.turn(SubmitRequested(0, b"c", Submission([*names], **more)))
        return answer

    def do(self, *names: bytes) -> None:
        """Submit tasks and finish them. The result is the name in capitals."""
        answer = self.submit(*names)
        assert isinstance(answer, Accepted)
        taken = self.turn(TasksRequested(0, b"w", len(names)))
        [assign] = [effect for effect in taken if isinstance(effect, Assign)]
        results: list[Content] = [name.upper() for name in assign.names]
        self.turn(TasksReported(0, b"w", assign.names, assign.attempts, texts=results))

    def results(self, *names: bytes) -> list[bytes | None]:
        [replies] = self.turn(ResultsRequested(0, b"c", [*names]))
        assert isinstance(replies, Settled)
        return [None if one is None else text_of(one) for one in replies.texts]

    def found(self, *names: bytes) -> list[bytes]:
        [found] = self.turn(LookupRequested(0, b"c", [*names]))
        assert isinstance(found, TaskDetails)
        return [view.name for view in found.views]

    def look(self, seconds: float = 10) -> int | None:
        """Advance the clock, at most by the wait that the compactor wants."""
        self.now_ns += int(seconds * SECOND_NS)
        return self.compactor.run_step()
