"""The broker's turn: receive, decide, commit, complete, reply.

A reply leaves after the commit of its records and after every commit before, on which one without
records depends too. A commit serves all that arrived meanwhile. A stage that nothing needs costs no
call: types of events and effects, or a plain attribute, lead to it. Knows no sockets, no dialects.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from taskyard.broker import environment
from taskyard.broker.blobs import BrokerBlobs
from taskyard.broker.completer import KINDS, Completer
from taskyard.broker.environment import CatchUp, CommitObserver, Environment, EventTransport
from taskyard.broker.requests import ESTIMATED, Requests
from taskyard.broker.whole_bytes import WITH_BYTES, take_in
from taskyard.core.counters import turn_histogram
from taskyard.core.effects import Accepted, Assign, Effect, Settled
from taskyard.core.events import Event, TimePassed
from taskyard.core.records import AnyRecord
from taskyard.core.scheduler import Scheduler
from taskyard.core.timer_heap import AT_ONCE_NS, NEVER_NS
from taskyard.journal.blob_names import NAMING
from taskyard.journal.recovery import EndedTaskIndex, encode, recall_for_event
from taskyard.journal.store import Store
from taskyard.net.protocols import Clock


class Broker:
    """One scheduler, one journal, one transport."""

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
        """Handle all events of a turn. Those that cost much may wait for a later one."""
        effects, timers, has_read = list[Effect](), self.timers, bool(arrived)
        scheduler, requests, machine = self.scheduler, self.requests, self.environment
        is_due = now_ns >= machine.check_at_ns or machine.bytes_written >= environment.CHECK_BYTES
        drift_ns = self.clock.wall_ns() - now_ns - scheduler.context.wall_offset_ns
        if is_due or abs(drift_ns) > environment.CLOCK_DRIFT_NS_MAX:
            self._undelivered = [*machine.check(now_ns), *self._undelivered]
        # Timers of dialects become events. Those that are late wait, as does `TimePassed` below.
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
