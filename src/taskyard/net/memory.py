"""The memory of this process: its use and limits, its growth, and the connections to blame.

Reads the figures of Linux, and returns free memory to the system. The decisions of the guard are
pure functions of these figures and of the samples of connections. Knows nothing of sockets.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.net.options import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from taskyard.net.accepted import Connection


#: Where files of the system are. Tests show another machine.
_ROOT: Final = Path("/")

#: The format of version 2 of control groups, where all controllers share a tree.
UNIFIED: Final = ""

#: More than the numbers of `statm` ever take.
_STATM_BYTES_MAX: Final = 256


class Memory(NamedTuple):
    """Mapped bytes, and the bytes in physical memory."""

    address_space: int
    resident: int


class MemoryMeter:
    """Read this process's memory use. Keeps a descriptor open, to work when none is left."""

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> Memory:
        words = os.pread(self._descriptor, _STATM_BYTES_MAX, 0).split()
        return Memory(int(words[0]) * self._page_bytes, int(words[1]) * self._page_bytes)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def memory_max(root: Path = _ROOT) -> Memory:
    """Read the limits of this process.

    The address space is that of `ulimit -v`. Resident memory is limited by the control groups of
    the process, and by the machine's memory.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    # An endless address space is a number that is never reached, so callers need no special case.
    space = 1 << 62 if soft == resource.RLIM_INFINITY else soft
    return Memory(space, min([space, machine, *memory_limits(root)]))


def memory_limits(root: Path = _ROOT) -> list[int]:
    """Return the memory limits of the control groups of this process."""
    limits = [read_text(group / "memory.max") for group in control_groups(root, UNIFIED)]
    limits += [
        read_text(group / "memory.limit_in_bytes") for group in control_groups(root, "memory")
    ]
    return [int(limit) for limit in limits if limit.isdecimal()]


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the control group of this process for a controller, and the groups above it."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
            own = top / path.lstrip("/")
            # In a container the path may be that of the host, and only the top is visible.
            yield from dict.fromkeys([own, *own.parents, top])


def read_text(path: Path) -> str:
    """Return the text of a small file, "" if it can't be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def give_back() -> bool:
    """Return free memory to the system. False where the C library can't."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


#: Numbers of glibc's `mallopt`.
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8

#: Allocations from this size on are returned to the kernel when they are freed.
RETURNED_BYTES_MIN: Final = 256 << 10


def return_memory() -> None:
    """Make malloc return freed memory of large messages to the kernel at once, if it can.

    By default glibc keeps it for later use, and reserves 64 MiB of address space for each
    thread.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_ARENA_MAX, 1)
        library.mallopt(_MMAP_THRESHOLD, RETURNED_BYTES_MIN)


MIB: Final = 1 << 20

#: The shortest and the longest interval of looks in normal operation: a flood of tiny frames takes
#: 30 and 120 MiB in this time. Between them it is the time in which a flood takes half the budget.
LOOK_MS: Final = 50
LOOK_MS_MAX: Final = 200
#: Bytes that a flood of tiny frames takes in a millisecond.
FLOOD_BYTES_MS: Final = 600 << 10
#: The interval while memory is short.
TROUBLE_MS: Final = 20
#: Sampling many connections takes long. Then the guard rests for this multiple of its CPU time.
REST_FACTOR: Final = 20
#: But no longer than this, in which a flood of tiny frames takes 60 MiB.
REST_MS_MAX: Final = 100

#: Unfinished messages may hold this part of the process's memory, and this much at least and most.
BUDGET_SHARE: Final = 8
BUDGET_BYTES_MIN: Final = 32 * MIB
BUDGET_BYTES_MAX: Final = 256 * MIB

#: Whole messages that are not received yet may hold this part of that.
WAITING_SHARE: Final = 2

#: The address space that ZeroMQ takes per connection. A third of it is resident.
CONNECTION_BYTES: Final = 96 << 10
#: All connections may take this part of the memory, strangers half of that.
CONNECTIONS_SHARE: Final = 4
#: Connections over TCP leave this part to local connections: the owner of a broker always gets in.
LOCAL_SHARE: Final = 8

#: Strangers may take this part of the descriptors.
STRANGERS_SHARE: Final = 4
#: This part of the descriptors stays free, but never more than DESCRIPTORS_FREE_MAX.
DESCRIPTORS_FREE_SHARE: Final = 8
DESCRIPTORS_FREE_MAX: Final = 2_048

#: The bytes of a greeting in ZMTP 3. Peers that sent fewer are cut first.
GREETING_BYTES: Final = 64
#: Strangers examined to find a silent peer. The oldest are the most likely.
STRANGERS_TRIED_MAX: Final = 64

#: An empty frame takes 2 bytes on the wire and 64 in ZeroMQ's queue. Of local connections, only the
#: bytes that were seen waiting are counted.
AMPLIFICATION: Final = 32
AMPLIFICATION_LOCAL: Final = 256
#: Together with the largest, connections that hold at least this part of it are cut or held.
UNFINISHED_SHARE: Final = 16


class Level(IntEnum):
    """How far memory has grown."""

    CALM = 0
    #: Samples are taken, nothing is cut.
    ALERT = 1
    #: Senders of unfinished messages are cut, else strangers that had time for a message.
    TROUBLE = 2
    #: Where no message is to blame, strangers are cut at once.
    SEVERE = 3


class Pressure:
    """Compare memory with its calm level."""

    def __init__(self, limit: Memory, calm: Memory) -> None:
        self.limit = limit
        self.calm = calm
        #: Bytes of whole messages that wait. Their senders are held, so no peer is cut for them.
        self.backlog = 0
        self.budget = min(max(limit.resident // BUDGET_SHARE, BUDGET_BYTES_MIN), BUDGET_BYTES_MAX)
        #: The interval of looks while memory is calm.
        self.look_ms = min(max(self.budget // 2 // FLOOD_BYTES_MS, LOOK_MS), LOOK_MS_MAX)

    def is_calm(self, now: Memory) -> bool:
        """Return whether memory has not grown much, with one look at the figures."""
        resident, space = self.calm.resident, self.calm.address_space
        return (
            now.resident - resident <= self.budget // 4
            and now.address_space - space <= (self.limit.address_space - space) // 4
        )

    def level(self, now: Memory) -> Level:
        grown = self._growth(now)
        room = self._room()
        if grown.resident > self.budget * 3 // 2 or grown.address_space > room * 3 // 4:
            return Level.SEVERE
        if grown.resident > self.budget or grown.address_space > room // 2:
            return Level.TROUBLE
        if grown.resident > self.budget // 4 or grown.address_space > room // 4:
            return Level.ALERT
        return Level.CALM

    def excess(self, now: Memory) -> Memory:
        """Return the growth of memory where it is too much, else 0."""
        grown = self._growth(now)
        return Memory(
            grown.address_space if grown.address_space > self._room() // 4 else 0,
            grown.resident if grown.resident > self.budget // 4 else 0,
        )

    def _growth(self, now: Memory) -> Memory:
        return Memory(
            now.address_space - self.calm.address_space - self.backlog,
            now.resident - self.calm.resident - self.backlog,
        )

    def _room(self) -> int:
        """Return the address space that was left when memory was calm."""
        return self.limit.address_space - self.calm.address_space

    def follow_down(self, now: Memory) -> None:
        """Lower the calm level when memory was returned."""
        self.calm = Memory(*map(min, self.calm, now))


class ConnectionLimits(Struct, frozen=True):
    """The limits of connections, by descriptors and memory."""

    descriptors: int
    memory: Memory

    @property
    def connections(self) -> int:
        return self.memory.resident // CONNECTIONS_SHARE // CONNECTION_BYTES

    @property
    def strangers(self) -> int:
        return min(self.connections // 2, self.descriptors // STRANGERS_SHARE)

    @property
    def descriptors_free(self) -> int:
        return min(self.descriptors // DESCRIPTORS_FREE_SHARE, DESCRIPTORS_FREE_MAX)


def wait_ms_after(cpu_ns: int, *, is_error: bool, look_ms: int = LOOK_MS) -> int:
    """Return the milliseconds until the next check, by the CPU time of the last check.

    The time that passed does not count. On a busy machine a check may be suspended, and memory
    would run out during a rest in proportion to that.
    """
    rest_ms = min(REST_FACTOR * cpu_ns * 1000 // SECOND_NS, REST_MS_MAX)
    return max(TROUBLE_MS if is_error else look_ms, rest_ms)


def backlog_bytes(connections: list[Connection]) -> int:
    """Return the bytes of whole messages that are not received yet."""
    return sum(one.waiting for one in connections if not one.is_drained)


def backlog_of(connections: list[Connection], budget: int) -> list[Connection]:
    """Choose the connections to hold: the senders of most bytes that are not received yet.

    Empty unless all waiting messages exceed the budget. A connection with only an unfinished
    message is not held, because nothing of it could be received in the meantime.
    """
    if backlog_bytes(connections) <= budget:
        return []
    waiting = [one for one in connections if one.waiting and not one.is_drained]
    largest = max(one.waiting for one in waiting)
    return [one for one in waiting if one.waiting >= largest // UNFINISHED_SHARE]


def suspects_of(connections: list[Connection], excess: Memory, ripe_ns: int) -> list[Connection]:
    """Choose the connections whose messages are to blame for the memory.

    Their messages are overdue as of `ripe_ns`. All of these together must account for half of the
    excess. Otherwise the cause is something else.
    """
    unfinished = [one for one in connections if one.is_overdue(ripe_ns)]
    held = sum(one.unfinished * _amplification(one) for one in unfinished)
    if excess.resident and 2 * held >= excess.resident:
        largest = max(one.unfinished for one in unfinished)
        return [one for one in unfinished if one.unfinished >= largest // UNFINISHED_SHARE]
    # A frame takes its address space as soon as its length has arrived.
    announced = len(unfinished) * FRAME_BYTES_MAX
    return unfinished if excess.address_space and 2 * announced >= excess.address_space else []


def _amplification(connection: Connection) -> int:
    return AMPLIFICATION_LOCAL if connection.arrivals.is_local else AMPLIFICATION


def stranger_to_cut(strangers: Iterable[Connection], admitted_ns: int) -> Connection | None:
    """Choose the stranger to cut when there are too many. The oldest are given first.

    A stranger without a greeting comes first. Strangers with keys that were accepted before
    `admitted_ns` come late: their handshake is over, so they may be sending a long message. Local
    strangers come last, because one may be the owner of the broker.
    """
    tried: list[Connection] = []
    for found in itertools.islice(strangers, STRANGERS_TRIED_MAX):
        if found.has_spoken:
            continue
        if not found.arrivals.is_local and found.count_received() < GREETING_BYTES:
            return found
        tried.append(found)
    return min(tried, key=lambda one: merit(one, admitted_ns), default=None)


def merit(connection: Connection, admitted_ns: int) -> tuple[bool, bool]:
    """Return a key that sorts strangers in the order of cuts. See `stranger_to_cut`."""
    arrivals = connection.arrivals
    return arrivals.is_local, arrivals.has_keys and connection.accepted_ns < admitted_ns


def strangers_of(connections: list[Connection], ripe_ns: int) -> list[Connection]:
    """Choose the strangers accepted before a time. They lose nothing when they are cut."""
    return [one for one in connections if not one.has_spoken and one.accepted_ns <= ripe_ns]
