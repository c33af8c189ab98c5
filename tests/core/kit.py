"""A scheduler that checks itself after every event, for all tests of the core.

Every event is followed by `invariants.check`. Its records are encoded, decoded and applied to a
second ledger, which must have the same fingerprint. So each test of a decision also tests the
journal's encoding and recovery.
"""

from typing import Any

from simulator import invariants
from taskyard.core.apply import apply
from taskyard.core.effects import Assign, Effect, ReportAck
from taskyard.core.entities import Lane, Task
from taskyard.core.events import (
    CancelRequested,
    ClockSet,
    Event,
    Outcome,
    RetryRequested,
    RulesSet,
    Scope,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    TimePassed,
    WatchRequested,
    WorkerExited,
    WorkerHeartbeat,
    WorkerLost,
    WorkerRegistered,
)
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.records import AnyRecord
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.journal.recovery import decode, encode
from taskyard.journal.state_check import ledger_fingerprint

#: A worker without limits: it holds as many tasks as it requests, and has no timeout.
PLAIN = WorkerFacts(slots_total=0)


class Yard:
    """A scheduler under test, with short methods for common events."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.mirror = Ledger()
        self.now_ns = 0
        #: The records of the latest event.
        self.records: list[AnyRecord] = []

    def __getitem__(self, name: bytes) -> Task:
        return self.scheduler.ledger.tasks[name]

    def state(self, name: bytes) -> TaskState:
        return self[name].state

    def states(self, *names: bytes) -> list[TaskState]:
        return [self[name].state for name in names]

    def handle(self, event: Event) -> list[Effect]:
        """Handle an event now, with all checks."""
        event.now_ns = self.now_ns
        effects = self.scheduler.handle(event)
        self.records = self.scheduler.take_records()
        invariants.check(self.scheduler)
        for record in decode(encode(self.records)):
            apply(self.mirror, record)
        assert ledger_fingerprint(self.mirror) == ledger_fingerprint(self.scheduler.ledger)
        return effects

    def later(self, seconds: float) -> list[Effect]:
        """Advance the clock and handle `TimePassed`."""
        self.now_ns += int(seconds * SECOND_NS)
        return self.handle(TimePassed(0))

    def clock(self, wall_ns: int) -> list[Effect]:
        return self.handle(ClockSet(0, wall_ns))

    def submit(
        self, *names: bytes, after: list[list[bytes]] | None = None, **fields: Any
    ) -> list[Effect]:
        """Submit tasks with their names as payloads, and fields of `Terms` or `SubmitRequested`."""
        own = ("lanes", "payloads", "envelopes", "environment")
        columns = {key: fields.pop(key) for key in own if key in fields}
        asked = {key: fields.pop(key) for key in ("unknown", "repeat", "request") if key in fields}
        columns.setdefault("payloads", list(names))
        submission = Submission(list(names), terms=[Terms(**fields)], after=after, **columns)
        return self.handle(SubmitRequested(0, b"client", submission, **asked))

    def join(self, worker: bytes, **facts: Any) -> list[Effect]:
        return self.handle(WorkerRegistered(0, worker, WorkerFacts(**facts) if facts else PLAIN))

    def ask(self, worker: bytes, count: int = 1, *, parks: bool = False) -> list[Effect]:
        return self.handle(TasksRequested(0, worker, count, parks))

    def take(self, worker: bytes, count: int = 1) -> list[bytes]:
        """Request tasks for a worker and return their names."""
        return assigned(self.ask(worker, count))

    def finish(self, worker: bytes, *names: bytes, **fields: Any) -> list[Effect]:
        return self.handle(TasksReported(0, worker, list(names), **fields))

    def report(self, worker: bytes, name: bytes, outcome: Outcome, **fields: Any) -> list[Effect]:
        return self.handle(TasksReported(0, worker, [name], outcomes=[outcome], **fields))

    def rules(self, workers_max: int = 0, **fields: Any) -> list[Effect]:
        """Set options for every lane."""
        return self.handle(RulesSet(0, defaults=LaneOptions(**fields), workers_max=workers_max))

    def set_rules(self, *rules: Rule, workers_max: int = 0) -> list[Effect]:
        """Set rules, and default options for all other lanes."""
        return self.handle(RulesSet(0, rules, workers_max=workers_max))

    def cancel(self, *names: bytes) -> list[Effect]:
        return self.handle(CancelRequested(0, b"client", Scope(names=names)))

    def retry(self, *names: bytes) -> list[Effect]:
        return self.handle(RetryRequested(0, b"client", Scope(names=names)))

    def watch(self, *names: bytes, request: int = 0) -> list[Effect]:
        return self.handle(WatchRequested(0, b"watcher", list(names), request=request))

    def heartbeat(
        self, worker: bytes, *held: tuple[bytes, int], heartbeat_ns: int = 0
    ) -> list[Effect]:
        """Send a heartbeat with the tasks that the worker lists."""
        return self.handle(WorkerHeartbeat(0, worker, list(held), heartbeat_ns))

    def leave(self, worker: bytes) -> list[Effect]:
        return self.handle(WorkerExited(0, worker))

    def lose(self, worker: bytes, *names: bytes, times: int = 1) -> None:
        """Lease these tasks to a worker that then dies, as often as given."""
        for _ in range(times):
            self.join(worker, slots_total=0)
            assert sorted(self.take(worker, len(names))) == sorted(names)
            self.handle(WorkerLost(0, worker))


def with_tasks_in_most_states() -> Yard:
    """Return a yard with a task in every state but DELAYED, named after it. `w` holds one."""
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"done", b"failed", b"leased", b"cancelled")
    yard.take(b"w", 3)
    yard.finish(b"w", b"done")
    yard.report(b"w", b"failed", Outcome.FAILED_FINAL)
    yard.cancel(b"cancelled")
    yard.submit(b"ready")
    yard.submit(b"blocked", after=[[b"ready"]])
    return yard


def a_lane(name: bytes = b"lane") -> Lane:
    """Return a lane of a new ledger."""
    return Ledger().service(b"default").lane(name)


def assigned(effects: list[Effect]) -> list[bytes]:
    """Return the names in all assignments among the effects."""
    return [name for effect in effects if isinstance(effect, Assign) for name in effect.names]


def missing(effects: list[Effect]) -> list[bytes]:
    """Return the names that a report was refused for."""
    return [name for effect in effects if isinstance(effect, ReportAck) for name in effect.missing]
