"""The broker's turn: receive, decide, commit, complete, reply.

A reply leaves only after the commit that contains its records, and after every commit before it: a
reply without own records, such as "known already", depends on them too. One commit serves
everything that arrived meanwhile. The loop takes its transport, store and clock as arguments, so
that the simulator runs this very code. Independent of sockets, dialects and SQLite.
"""

from collections.abc import Callable, Sequence
from functools import partial

from taskyard.broker.backpressure import Backpressure
from taskyard.broker.blobs import BrokerBlobs
from taskyard.broker.completer import Completer
from taskyard.broker.environment import CatchUp, Environment, EventTransport
from taskyard.broker.requests import Requests
from taskyard.broker.whole_bytes import WITH_BYTES, take_in
from taskyard.core.counters import turn_histogram
from taskyard.core.effects import Effect
from taskyard.core.events import Event, TimePassed
from taskyard.core.records import AnyRecord
from taskyard.core.scheduler import Scheduler
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
    ) -> None:
        """`index` has ended tasks that are no longer in memory, `blobs` what records refer to."""
        self.scheduler = scheduler
        self.transport = transport
        self.store = store
        self.clock = clock
        self.index = index
        #: Called with each durable row: its sequence and its records.
        self.on_commit: Callable[[int, Sequence[AnyRecord]], None] | None = None
        #: Raises if this broker may not answer any more, because another may have taken over.
        self.check_lease: Callable[[], None] = lambda: None
        #: Returns whether a client reads its replies. Set by the owner of the sockets.
        self.is_reading: Callable[[bytes], bool] = lambda _client: True
        self.blobs = blobs
        ledger = scheduler.ledger
        self.completer = Completer(store, ledger, index, self._is_reading, self.enqueue, blobs)
        self.requests = Requests(ledger, self._is_reading)
        #: How long turns and commits took since the start.
        self.turn_times, self.sync_times = turn_histogram(), turn_histogram()
        #: Delays replies to submissions while compaction lags behind.
        self.backpressure = Backpressure()
        #: Events for the next turn: undelivered effects and enqueued events.
        self._undelivered: list[Event] = []
        self._catch_up = CatchUp()
        self.environment = Environment(scheduler.context, store, clock, blobs)
        scheduler.resume(clock.monotonic_ns())

    def turn(self) -> None:
        """Run one turn. Raises when the journal fails, and then no reply may be sent."""
        self.process(self.transport.receive(self.wait_ns()))

    def process(self, arrived: Sequence[Event]) -> None:
        """Run a turn on events that were received for it: decide, commit, reply."""
        since_ns = self.clock.monotonic_ns()
        effects: Sequence[Effect] = self._decide(arrived, since_ns)
        records, row_bytes = self.scheduler.take_records(), 0
        is_completed = self.completer.is_needed(effects)
        if is_completed:
            self.completer.sync(effects)
        if records:
            row_bytes = self._commit(records)
        if is_completed:
            has_room = self.scheduler.context.accepting
            effects = self.completer.complete(effects, records, row_bytes, has_room=has_room)
            self.environment.bytes_written += self.completer.take_bytes_written()
        passed = self.backpressure.throttle(effects, self.clock.monotonic_ns())
        self.check_lease()
        self._undelivered += self.transport.send(passed)
        self.turn_times.add(self.clock.monotonic_ns() - since_ns)

    def _commit(self, records: Sequence[AnyRecord]) -> int:
        """Make the records of a turn durable. Return the bytes of their row."""
        if self.blobs is not None:
            self.blobs.note(records, self.completer.blobs_needed)
        body = encode([*records])
        since_ns = self.clock.monotonic_ns()
        head = self.store.commit(body, len(records))
        self.sync_times.add(self.clock.monotonic_ns() - since_ns)
        if self.on_commit is not None:
            self.on_commit(head.sequence, records)
        self.environment.bytes_written += len(body)
        return len(body)

    def enqueue(self, event: Event | None) -> None:
        """Add an event to the next turn that did not come from the transport, unless it is None."""
        if event is not None:
            self._undelivered.append(event)

    def _is_reading(self, client: bytes) -> bool:
        return self.is_reading(client)

    def wait_ns(self) -> int | None:
        """Return how long the next turn may wait for events, or None for no limit."""
        if self._undelivered or self.completer.has_pending() or self.requests.are_ready():
            return 0
        wake_at_ns, release_ns = self.scheduler.wake_at_ns(), self.backpressure.wake_at_ns()
        if wake_at_ns is None or (release_ns is not None and release_ns < wake_at_ns):
            wake_at_ns = release_ns
        if not self.scheduler.context.accepting:  # tasks wait for room on the disk
            wake_at_ns = self.environment.wake_at_ns(wake_at_ns)
        return None if wake_at_ns is None else max(0, wake_at_ns - self.clock.monotonic_ns())

    def _decide(self, arrived: Sequence[Event], now_ns: int) -> list[Effect]:
        handle = partial(self._handle, now_ns)
        changes = self.environment.events(now_ns)
        undelivered, self._undelivered = self._undelivered, []
        admitted, effects = self.requests.admit([*changes, *undelivered, *arrived])
        for event in admitted:
            effects += handle(event)
        if self.requests:
            effects += self.requests.run(handle)
        if self._catch_up.is_due(self.scheduler.wake_at_ns(), now_ns, has_read=bool(arrived)):
            effects += self.scheduler.handle(TimePassed(now_ns))
        return effects

    def _handle(self, now_ns: int, event: Event) -> list[Effect]:
        event.now_ns = now_ns
        if self.index is not None:
            recall_for_event(self.scheduler.ledger, self.index, event)
        if self.blobs is not None and type(event) in WITH_BYTES:
            refused = take_in(self.blobs, event, self.scheduler.context)
            if refused is not None:
                return [refused]
        return self.scheduler.handle(event)
