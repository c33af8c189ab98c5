"""The machine of a broker: its transport, the wall clock, free space, and timers that are late.

Each becomes an event of the scheduler, or delays its timers. Independent of peers and the journal's
rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from taskyard.core.events import ClockSet, DiskSpaceChanged, OutputSpaceChanged
from taskyard.core.limits import SECOND_NS
from taskyard.journal.store import DISK_RESERVE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.broker.blobs import BrokerBlobs
    from taskyard.core.context import Context
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.core.records import AnyRecord
    from taskyard.core.timer_heap import TimerHeap
    from taskyard.journal.store import Store
    from taskyard.net.protocols import Clock

#: The wall clock may drift this far from the monotonic one before it counts as a jump.
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
        """Send effects. Returns those that could not be delivered, as events."""

    def is_reading(self, client: bytes) -> bool:
        """Return whether a client reads its replies."""


class CommitObserver(NamedTuple):
    """Is told of durable rows."""

    #: The rows with a record of one of these types.
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
        #: Bytes written since the last check. After `CHECK_BYTES`, or at this time, the next one is
        #: due.
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
        """Return the free bytes of the fullest disk: blobs may have one of their own."""
        free = self._store.disk_free_bytes()
        of_blobs = None if self._blobs is None else self._blobs.disk_free_bytes()
        return free if of_blobs is None else min(free, of_blobs)

    def output_space_changed(self) -> OutputSpaceChanged | None:
        """Return whether tasks are accepted that may have output. None: that is known."""
        problem = "" if self._blobs is None else self._blobs.problem()
        if problem == self._output_problem:
            return None
        self._output_problem = problem
        return OutputSpaceChanged(0, problem)
