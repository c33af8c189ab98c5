"""The broker's turn: receive, decide, commit, complete, reply.

A reply leaves after the commit of its records and after every commit before, on which a reply
without records depends too. A commit serves all that arrived meanwhile. A stage that nothing needs
costs no call: types of events and effects, or a plain attribute, lead to it. Knows no sockets, no
dialects.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from taskyard.broker.blobs import BrokerBlobs
from taskyard.broker.completer import KINDS, Completer
from taskyard.broker.contents import WITH_BYTES, take_in
from taskyard.broker.requests import ESTIMATED, Requests
from taskyard.core.context import Context
from taskyard.core.counters import turn_histogram
from taskyard.core.effects import Accepted, Assign, Effect, Settled
from taskyard.core.events import ClockSet, DiskSpaceChanged, Event, OutputSpaceChanged, TimePassed
from taskyard.core.limits import SECOND_NS
from taskyard.core.records import AnyRecord
from taskyard.core.scheduler import Scheduler
from taskyard.core.timer_heap import AT_ONCE_NS, NEVER_NS, TimerHeap
from taskyard.journal.blobs import NAMING
from taskyard.journal.recovery import EndedTaskIndex, encode, recall_for_event
from taskyard.journal.store import DISK_RESERVE_BYTES, Store
from taskyard.net.protocols import Clock

#: The wall clock may drift this far from the monotonic clock before it counts as a jump.
CLOCK_DRIFT_NS_MAX: Final = SECOND_NS // 100

#: How often the disk's free space is checked: after a time, and after this many bytes.
CHECK_NS: Final = SECOND_NS
CHECK_BYTES: Final = 4 * 1024 * 1024

#: Timers that are this late were not delayed by the work of a turn.
HELD_UP_NS: Final = 2 * SECOND_NS

#: The longest delay of timers, however much arrives.
CATCH_UP_NS: Final = 5 * SECOND_NS


class EventTransport(Protocol):
    """Receives events and sends effects, over sockets or a simulated network."""

    #: The deadlines of its dialects, run by the turn.
    timers: TimerHeap

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        """Return a bounded number of events. Waits up to `wait_ns` for one, or forever for None."""

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        """Send effects. Returns effects that could not be delivered, as events."""

    def is_reading(self, client: bytes) -> bool:
        """Return whether a client reads its replies."""


class CommitObserver(NamedTuple):
    """Is told of durable rows."""

    #: The rows with a record of these types.
    kinds: frozenset[type]
    #: Called with the sequence of a row and its records.
    observe: Callable[[int, Sequence[AnyRecord]], None]


class CatchUp:
    """Delays late timers until the broker has read the messages that arrived meanwhile.

    After a pause, heartbeats of workers are still unread, and a turn reads a bounded number. Timers
    that ran first would expire workers that are alive.
    """

    def __init__(self) -> None:
        #: When timers run in any case. 0 while the broker is not late.
        self._ends_ns = 0

    def is_over(self, earliest_ns: int, now_ns: int, *, has_read: bool) -> bool:
        """Return whether timers run now, of which the first was due at `earliest_ns`.

        `has_read` is whether this turn received something.
        """
        if has_read and now_ns - earliest_ns >= HELD_UP_NS:
            self._ends_ns = self._ends_ns or now_ns + CATCH_UP_NS
            if now_ns < self._ends_ns:
                return False
        self._ends_ns = 0
        return True


class Environment:
    """The clock and the disk of a broker."""

    def __init__(
        self, context: Context, store: Store, clock: Clock, blobs: BrokerBlobs | None = None
    ) -> None:
        self._context = context
        self._store = store
        self._clock = clock
        self._blobs = blobs
        #: Bytes written since the last check. The next is due after `CHECK_BYTES`, or at this time.
        self.bytes_written = 0
        self.check_at_ns = 0
        self._output_problem = ""

    def check(self, now_ns: int) -> list[Event]:
        """Return what has changed: the clock was set, the disk is full or has room again."""
        self.check_at_ns, self.bytes_written = now_ns + CHECK_NS, 0
        found: list[Event] = []
        wall_ns = self._clock.wall_ns()
        if abs(wall_ns - now_ns - self._context.wall_offset_ns) > CLOCK_DRIFT_NS_MAX:
            found.append(ClockSet(now_ns, wall_ns))
        accepting = self._disk_free_bytes() > DISK_RESERVE_BYTES
        if accepting is not self._context.accepting:
            found.append(DiskSpaceChanged(now_ns, accepting))
        return found

    def _disk_free_bytes(self) -> int:
        """Return the free bytes of the fullest disk: blobs may have their own."""
        free = self._store.disk_free_bytes()
        of_blobs = None if self._blobs is None else self._blobs.disk_free_bytes()
        return free if of_blobs is None else min(free, of_blobs)

    def output_space_changed(self) -> OutputSpaceChanged | None:
        """Return whether tasks are accepted that may have output, if that has changed."""
        problem = "" if self._blobs is None else self._blobs.problem()
        if problem == self._output_problem:
            return None
        self._output_problem = problem
        return OutputSpaceChanged(0, problem)


class Broker:
    """A scheduler, a journal and a transport."""

    def __init__(  # noqa: PLR0913  # all parts of a broker
        self,
        scheduler: Scheduler,
        transport: EventTransport,
        store: Store,
        clock: Clock,
        index: EndedTaskIndex | None = None,
        *,
        blobs: BrokerBlobs | None = None,
        observers: Iterable[CommitObserver] = (),
        check_lease: Callable[[], None] | None = None,
    ) -> None:
        """`index` has ended tasks. `check_lease` raises if another broker may have taken over."""
        self.scheduler, self.transport, self.store = scheduler, transport, store
        self.clock, self.index, self.blobs = clock, index, blobs
        self.timers = transport.timers
        self._observers, self._check_lease = [*observers], check_lease
        ledger, is_reading = scheduler.ledger, transport.is_reading
        self.completer = Completer(store, ledger, index, is_reading, self.enqueue, blobs)
        self.requests = Requests(ledger, is_reading)
        #: How long turns and commits took since the start.
        self.turn_times, self.sync_times = turn_histogram(), turn_histogram()
        self._undelivered: list[Event] = []  # and enqueued events, for the next turn
        self._catch_up = CatchUp()
        self.environment = Environment(scheduler.context, store, clock, blobs)
        scheduler.resume(clock.monotonic_ns())
        #: When the scheduler's next timer is due, as of the last turn.
        self._wake_at_ns = scheduler.wake_at_ns()

    def turn(self) -> None:
        """Run one turn. Raises when the journal fails, and then no reply may be sent."""
        self.process(self.transport.receive(self.wait_ns()))

    def process(self, arrived: Sequence[Event]) -> None:
        """Run a turn on events that were received for it: decide, commit, reply."""
        since_ns = self.clock.monotonic_ns()
        effects = self._decide(arrived, since_ns)
        context, completer = self.scheduler.context, self.completer
        records, context.records = context.records, []
        kinds = [*map(type, effects)]
        is_completed = completer.is_waiting or not KINDS.isdisjoint(kinds)
        is_completed = is_completed or (Settled in kinds and completer.owes_results(effects))
        if is_completed:
            completer.sync(effects)
        row_bytes = self._commit(records) if records else 0
        if is_completed:
            effects = completer.complete(effects, records, row_bytes, has_room=context.accepting)
            self.environment.bytes_written += completer.take_bytes_written()
            self.enqueue(self.environment.output_space_changed())
        if self._check_lease is not None:
            self._check_lease()
        self._undelivered += self.transport.send(effects)
        self.turn_times.pending_ns.append(self.clock.monotonic_ns() - since_ns)

    def _commit(self, records: list[AnyRecord]) -> int:
        """Make the records of a turn durable. Return the bytes of their row."""
        if self.blobs is not None and not NAMING.isdisjoint(map(type, records)):
            self.blobs.note(records, self.completer.blobs_needed)
        body, since_ns = encode(records), self.clock.monotonic_ns()
        head = self.store.commit(body, len(records))
        self.sync_times.pending_ns.append(self.clock.monotonic_ns() - since_ns)
        for kinds, observe in self._observers:
            if not kinds.isdisjoint(map(type, records)):
                observe(head.sequence, records)
        self.environment.bytes_written += len(body)
        return len(body)

    def enqueue(self, event: Event | None) -> None:
        """Add an event of other origin to the next turn, unless it is None."""
        if event is not None:
            self._undelivered.append(event)

    def wait_ns(self) -> int | None:
        """Return how long the next turn may wait for events, or None for no limit."""
        completer, requests = self.completer, self.requests
        if self._undelivered or (completer.is_waiting and completer.has_pending()):
            return 0
        wake_at_ns = min(self._wake_at_ns, self.timers.heap[0][0])
        if requests.queues:
            wake_at_ns = min(wake_at_ns, requests.ready_at_ns())
        if not self.scheduler.context.accepting:  # tasks wait for room on the disk
            wake_at_ns = min(wake_at_ns, self.environment.check_at_ns)
        return None if wake_at_ns == NEVER_NS else max(0, wake_at_ns - self.clock.monotonic_ns())

    def _decide(self, arrived: Sequence[Event], now_ns: int) -> list[Effect]:
        """Handle all events of a turn. Costly events may wait for a later turn."""
        effects, timers, has_read = list[Effect](), self.timers, bool(arrived)
        scheduler, requests, machine = self.scheduler, self.requests, self.environment
        is_due = now_ns >= machine.check_at_ns or machine.bytes_written >= CHECK_BYTES
        drift_ns = self.clock.wall_ns() - now_ns - scheduler.context.wall_offset_ns
        if is_due or abs(drift_ns) > CLOCK_DRIFT_NS_MAX:
            self._undelivered = [*machine.check(now_ns), *self._undelivered]
        # Timers of dialects become events. Late timers wait, as does `TimePassed` below.
        due = [] if timers.heap[0][0] else timers.pop_due(AT_ONCE_NS)
        earliest_ns = min(timers.heap[0][0], self._wake_at_ns)
        is_late = earliest_ns <= now_ns
        is_late = is_late and not self._catch_up.is_over(earliest_ns, now_ns, has_read=has_read)
        if not is_late and timers.heap[0][0] <= now_ns:
            due += timers.pop_due(now_ns)
        if due:
            arrived = [*arrived, *(event for react, key in due for event in react(now_ns, key))]
        if self._undelivered:
            arrived, self._undelivered = [*self._undelivered, *arrived], []
        if requests.queues or requests.is_holding or not ESTIMATED.isdisjoint(map(type, arrived)):
            arrived, effects = requests.admit(arrived, now_ns)
        for event in arrived:
            found = self._handle(now_ns, event)
            if len(found) > 1 and type(found[1]) is Assign and type(found[0]) is Accepted:
                found.append(found.pop(0))  # the worker starts while the client gets its reply
            effects += found
        if requests.queues:
            effects += requests.run(partial(self._handle, now_ns), now_ns)
        wake_at_ns = scheduler.wake_at_ns()
        if wake_at_ns <= now_ns and not is_late:
            effects += scheduler.handle(TimePassed(now_ns))
            wake_at_ns = scheduler.wake_at_ns()
        self._wake_at_ns = wake_at_ns
        return effects

    def _handle(self, now_ns: int, event: Event) -> list[Effect]:
        event.now_ns = now_ns
        if self.index is not None and self.index.has_any:
            recall_for_event(self.scheduler.ledger, self.index, event)
        if self.blobs is not None and type(event) in WITH_BYTES:
            refused = take_in(self.blobs, event, self.scheduler.context)
            if refused is not None:
                return [refused]
        return self.scheduler.handle(event)
