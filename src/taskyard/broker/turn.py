"""The broker's turn: receive, decide, commit, reply.

A reply leaves only after the commit that contains its records, and after every commit before it: a
reply without own records, such as "known already", depends on them too. One commit serves
everything that arrived meanwhile. The loop takes its transport, store and clock as arguments, so
that the simulator runs this very code. Independent of sockets, dialects and SQLite.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from taskyard.broker.backpressure import Backpressure
from taskyard.broker.output_store import OutputMemory, OutputStore
from taskyard.broker.output_writer import OutputWriter
from taskyard.broker.record_stream import RecordStreams
from taskyard.broker.requests import Requests
from taskyard.broker.results import ResultLoader
from taskyard.broker.values import BrokerValues
from taskyard.broker.whole_results import WholeResults
from taskyard.core.counters import turn_histogram
from taskyard.core.effects import Effect
from taskyard.core.events import ClockSet, DiskSpaceChanged, Event, OutputSpaceChanged, TimePassed
from taskyard.core.limits import SECOND_NS
from taskyard.core.records import AnyRecord
from taskyard.core.scheduler import Scheduler
from taskyard.journal.recovery import EndedTaskIndex, encode, recall_for_event
from taskyard.journal.store import DISK_RESERVE_BYTES, Head, Store
from taskyard.net.protocols import Clock

#: The wall clock may drift this far from the monotonic one before it counts as a jump.
CLOCK_DRIFT_NS_MAX: Final = SECOND_NS // 100

#: How often the disk's free space is checked: after a time, and after this many bytes.
DISK_CHECK_NS: Final = SECOND_NS
DISK_CHECK_BYTES: Final = 4 * 1024 * 1024


class EventTransport(Protocol):
    """Receives events and sends effects, over sockets or a simulated network."""

    def receive(self, wait_ns: int | None) -> Sequence[Event]:
        """Return a bounded number of events. Waits up to `wait_ns` for one, or forever for None."""

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        """Send effects. Returns those that could not be delivered, as events."""


#: Timers that are this late were not delayed by the work of a turn.
HELD_UP_NS: Final = 2 * SECOND_NS

#: The longest delay of timers, however much arrives.
CATCH_UP_NS: Final = 5 * SECOND_NS


class CatchUp:
    """Delays late timers until the broker has read the messages that arrived meanwhile.

    After a pause, heartbeats of workers are still unread, and a turn reads a bounded number. Timers
    that ran first would expire workers that are alive.
    """

    def __init__(self) -> None:
        #: When timers run in any case. 0 while the broker is not late.
        self._ends_ns = 0

    def is_due(self, wake_at_ns: int | None, now_ns: int, *, has_read: bool) -> bool:
        """Return whether timers of `wake_at_ns` run now. 0 runs at once.

        `has_read` is whether this turn received something.
        """
        if wake_at_ns is None or wake_at_ns > now_ns:
            return False
        if has_read and wake_at_ns and now_ns - wake_at_ns >= HELD_UP_NS:
            self._ends_ns = self._ends_ns or now_ns + CATCH_UP_NS
            if now_ns < self._ends_ns:
                return False
        self._ends_ns = 0
        return True


def _do_nothing() -> None:
    pass


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
        outputs: OutputStore | None = None,
        values: BrokerValues | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.transport = transport
        self.store = store
        self.clock = clock
        #: Ended tasks that are no longer in memory. None if there are none.
        self.index = index
        #: Called with each durable row: its sequence and its records.
        self.on_commit: Callable[[int, Sequence[AnyRecord]], None] | None = None
        #: Raises if this broker may not answer any more, because another may have taken over.
        self.check_lease: Callable[[], None] = _do_nothing
        #: Returns whether a client reads its replies. Set by the owner of the sockets.
        self.is_reading: Callable[[bytes], bool] = lambda _client: True
        #: Long streams, and those of running attempts.
        self.outputs = OutputMemory() if outputs is None else outputs
        self._output_writer = OutputWriter(self.outputs)
        #: Large arguments and results. None: there are none.
        self.values = values
        self._results = ResultLoader(store, index, self._is_reading, self.outputs)
        self._whole_results = WholeResults(scheduler.ledger, self.outputs)
        self._record_streams = RecordStreams(store, scheduler.ledger, index, self._is_reading)
        self.requests = Requests(scheduler.ledger, self._is_reading)
        #: How long turns and commits took since the start.
        self.turn_times, self.sync_times = turn_histogram(), turn_histogram()
        #: Delays replies to submissions while compaction lags behind.
        self.backpressure = Backpressure()
        #: Events for the next turn: undelivered effects and enqueued events.
        self._undelivered: Sequence[Event] = ()
        self._output_problem = ""
        self._catch_up = CatchUp()
        self._disk_checked_ns: int | None = None
        self._bytes_since_check = 0
        scheduler.resume(clock.monotonic_ns())

    def turn(self) -> None:
        """Run one turn. Raises when the journal fails, and then no reply may be sent."""
        self.process(self.transport.receive(self.wait_ns()))

    def process(self, arrived: Sequence[Event]) -> None:
        """Run a turn on events that were received for it: decide, commit, reply."""
        since_ns = self.clock.monotonic_ns()
        effects = self._decide([*self._undelivered, *arrived], has_read=bool(arrived))
        records = self.scheduler.take_records()
        self._output_writer.sync(effects)
        if records:
            if self.values is not None:
                self.values.note(records, self.scheduler.ledger)
            body = encode(records)
            head = self._commit(body, len(records))
            if self.on_commit is not None:
                self.on_commit(head.sequence, records)
            self._bytes_since_check += len(body)
        has_room = self.scheduler.context.accepting
        self._bytes_since_check += self._output_writer.write(effects, has_room=has_room)
        if self.values is not None:
            self._bytes_since_check += self.values.fill(effects)
        self._results.fill(effects)
        self._whole_results.fill(effects)
        self._record_streams.fill(effects, records)
        passed = self.backpressure.throttle(effects, self.clock.monotonic_ns())
        self.check_lease()
        self._undelivered = self.transport.send(passed)
        self.turn_times.add(self.clock.monotonic_ns() - since_ns)

    def _commit(self, body: bytes, records: int) -> Head:
        since_ns = self.clock.monotonic_ns()
        head = self.store.commit(body, records)
        self.sync_times.add(self.clock.monotonic_ns() - since_ns)
        return head

    def enqueue(self, event: Event) -> None:
        """Add an event to the next turn that did not come from the transport."""
        self._undelivered = [*self._undelivered, event]

    def _is_reading(self, client: bytes) -> bool:
        return self.is_reading(client)

    def wait_ns(self) -> int | None:
        """Return how long the next turn may wait for events, or None for no limit."""
        if self._undelivered or self._has_pending() or self.requests.are_ready():
            return 0
        wake_at_ns, release_ns = self.scheduler.wake_at_ns(), self.backpressure.wake_at_ns()
        if wake_at_ns is None or (release_ns is not None and release_ns < wake_at_ns):
            wake_at_ns = release_ns
        return None if wake_at_ns is None else max(0, wake_at_ns - self.clock.monotonic_ns())

    def _has_pending(self) -> bool:
        """Return whether the last turn left replies incomplete."""
        return (
            self._results.has_pending()
            or self._whole_results.has_pending()
            or self._record_streams.has_pending()
        )

    def note_lag(self, percent: int) -> None:
        """Set how far compaction lags behind."""
        event = self.backpressure.update(percent)
        if event is not None:
            self.enqueue(event)

    def note_output_space(self, problem: str) -> None:
        """Set why no tasks are accepted because of their output. Empty: they are."""
        if problem != self._output_problem:
            self._output_problem = problem
            self.enqueue(OutputSpaceChanged(0, problem))

    def _decide(self, arrived: list[Event], *, has_read: bool) -> list[Effect]:
        now_ns = self.clock.monotonic_ns()

        def handle(event: Event) -> list[Effect]:
            event.now_ns = now_ns
            if self.index is not None:
                recall_for_event(self.scheduler.ledger, self.index, event)
            return self.scheduler.handle(event)

        admitted, effects = self.requests.admit([*self._environment_events(now_ns), *arrived])
        for event in admitted:
            effects += handle(event)
        if self.requests:
            effects += self.requests.run(handle)
        if self._catch_up.is_due(self.scheduler.wake_at_ns(), now_ns, has_read=has_read):
            effects += self.scheduler.handle(TimePassed(now_ns))
        return effects

    def _is_disk_check_due(self, now_ns: int) -> bool:
        checked_ns = self._disk_checked_ns
        if checked_ns is None or self._bytes_since_check >= DISK_CHECK_BYTES:
            return True
        return now_ns - checked_ns >= DISK_CHECK_NS

    def _environment_events(self, now_ns: int) -> list[Event]:
        """Return events of the machine: a changed clock, a full disk."""
        found: list[Event] = []
        wall_ns = self.clock.wall_ns()
        if abs(wall_ns - now_ns - self.scheduler.context.wall_offset_ns) > CLOCK_DRIFT_NS_MAX:
            found.append(ClockSet(now_ns, wall_ns))
        if self._is_disk_check_due(now_ns):
            self._disk_checked_ns, self._bytes_since_check = now_ns, 0
            accepting = self.store.disk_free_bytes() > DISK_RESERVE_BYTES
            if accepting is not self.scheduler.context.accepting:
                found.append(DiskSpaceChanged(now_ns, accepting))
        return found
