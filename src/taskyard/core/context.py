"""The working state of the deciders: the ledger, both clocks, and all that is volatile.

A decider reads the ledger, emits records and sends effects, all through a `Context`. Only `apply`
changes durable state. Everything else in the context is rebuilt after a restart. It imports no
decider, so the deciders can import it.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from taskyard.core import deadlines
from taskyard.core.apply import apply
from taskyard.core.counters import COUNTED, Counters
from taskyard.core.effects import UnknownWorker
from taskyard.core.limits import SECOND_NS, WARNINGS_MAX
from taskyard.core.timer_heap import TimerHeap

if TYPE_CHECKING:
    from taskyard.core.effects import Effect, RefusedTasks
    from taskyard.core.entities import Lease, Task, Worker
    from taskyard.core.ledger import Ledger
    from taskyard.core.records import AnyRecord


#: Checks of timeouts that are farther away than this share the steps of this clock. Most workers
#: send a heartbeat before that, and each check of its own would wake the broker.
TIMEOUT_FAR_NS: Final = 2 * SECOND_NS
TIMEOUT_STEP_NS: Final = SECOND_NS


class TimerKind(IntEnum):
    """Kinds of timers, in the order in which one `TimePassed` handles them."""

    #: Uncertain leases of a worker end.
    UNCERTAIN = 0
    #: A worker's heartbeats are checked.
    HEARTBEATS = 1
    #: A woken worker that has requested nothing is passed over.
    WAKE = 2
    #: A lane has debounced.
    DEBOUNCE = 3
    #: Watched tasks behind a failure are searched for.
    STUCK = 4


class Context:
    """State and output of the scheduler, as its deciders use them."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        #: The monotonic clock at the latest event.
        self.now_ns = 0
        #: Added to the monotonic clock, it gives the wall clock.
        self.wall_offset_ns = 0
        #: False while the disk has room only for completions: submissions are refused.
        self.accepting = True
        #: Why no tasks are accepted because of their output. Empty: they are.
        self.output_problem = ""
        #: How far the journal's compaction lags behind: 100 makes one due.
        self.lag_percent = 0
        #: Tasks of partial submissions refused since the start, and the latest of them.
        self.refused = 0
        self.refused_last: RefusedTasks | None = None
        #: Timers of workers by name, of lanes, and that of the stuck check. A timer may be early,
        #: never late.
        self.timers = TimerHeap()
        #: The workers with a timer of kind `WAKE`.
        self.woken: dict[bytes, None] = {}
        #: A search for watched tasks behind a failure is scheduled.
        self.is_stuck_checked = False
        #: The last record of the process before this process.
        self.resumed_record = 0
        #: Subscriptions (client, request) by task, and by campaign.
        self.watchers: dict[bytes, list[tuple[bytes, int]]] = {}
        self.campaign_watchers: dict[bytes, list[tuple[bytes, int]]] = {}
        #: The unsettled tasks of each subscription, so that dropping one takes no search.
        self.watched: dict[tuple[bytes, int], dict[bytes, None]] = {}
        #: Counts assignments. Orders workers by when they were last used.
        self.use_count = 0
        #: Counts down from -1. Orders workers that register ahead of all other workers.
        self.top_count = -1
        #: What was decided since the start.
        self.counters = Counters()
        self.records: list[AnyRecord] = []
        self.effects: list[Effect] = []
        #: Lines for the broker's log.
        self.warnings: deque[str] = deque(maxlen=WARNINGS_MAX)

    @property
    def at_ns(self) -> int:
        """The wall clock, for records and due times."""
        return self.now_ns + self.wall_offset_ns

    @property
    def accepts_tasks(self) -> bool:
        """Whether there is room for tasks and their output."""
        return self.accepting and not self.output_problem

    def emit(self, record: AnyRecord, tasks: list[Task] | None = None) -> None:
        """Apply a decision and keep its record for the journal."""
        self.records.append(record)
        counted = COUNTED.get(type(record))
        if counted is not None:
            counted(self.counters, record, tasks)
        apply(self.ledger, record, tasks)

    def send(self, effect: Effect) -> None:
        self.effects.append(effect)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def touch_worker(self, name: bytes, request: int = 0) -> Worker | None:
        """Return a worker and note that it is alive. Send `UnknownWorker` if there is none."""
        worker = self.ledger.workers.get(name)
        if worker is None:
            self.send(UnknownWorker(name, request))
        else:
            worker.last_seen_ns = self.now_ns
        return worker

    def schedule_timeout(self, worker: Worker) -> None:
        """Schedule a check of the worker's heartbeats, no later than its timeout."""
        facts, check_ns = worker.facts, worker.timeout_check_ns
        shortest_ns = facts.lease_timeout_ns or facts.restart_lease_ns
        if 0 < check_ns <= worker.last_seen_ns + shortest_ns and not worker.contested_until_ns:
            return
        timeout_at_ns = worker.timeout_at_ns
        if timeout_at_ns and (
            not worker.timeout_check_ns or timeout_at_ns < worker.timeout_check_ns
        ):
            self.schedule_timeout_at(worker, timeout_at_ns)

    def schedule_timeout_at(self, worker: Worker, timeout_at_ns: int) -> None:
        """Schedule the next check of a worker that times out then. A check may be early."""
        check_ns = timeout_at_ns
        if timeout_at_ns - self.now_ns > TIMEOUT_FAR_NS:
            check_ns -= timeout_at_ns % TIMEOUT_STEP_NS
        worker.timeout_check_ns = check_ns
        self.timers.add(check_ns, TimerKind.HEARTBEATS, worker.name)

    def schedule_deadline(self, worker: Worker) -> None:
        """Schedule the end of the worker's uncertain assignments, if it has any."""
        deadline_ns = deadlines.next_ns(worker)
        if deadline_ns:
            self.timers.add(deadline_ns, TimerKind.UNCERTAIN, worker.name)

    def is_before_restart(self, lease: Lease) -> bool:
        """Return whether a former process of the broker granted a lease."""
        return lease.number <= self.resumed_record
