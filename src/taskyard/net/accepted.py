"""Accepted connections: counters of the kernel, cutting and holding them, and unrouted peers.

Descriptors belong to ZeroMQ. They are read and disconnected here, never closed. ZeroMQ then
detects a dead connection, frees its memory, and closes the descriptor itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import select
import socket
import struct
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from msgspec import Struct, field

from taskyard.core.limits import SECOND_NS
from taskyard.net.options import HANDSHAKE_MS_MAX

logger = logging.getLogger("taskyard.net")

_libc = ctypes.CDLL(None)

#: Calls through this object keep the GIL, so that no other thread runs between two of them.
_fast_libc = ctypes.PyDLL(None)

#: The words of Linux's `struct tcp_info` up to `tcpi_data_segs_in`, and the places of its counters.
#: The segments are half a word. A kernel before 4.6 does not count them.
_TCP_INFO_WORDS: Final = 20
_BYTES_ACKNOWLEDGED_WORD: Final = 15
_BYTES_RECEIVED_WORD: Final = 16
_SEGMENTS_HALF_WORD: Final = 38
_SEGMENTS_UNACKNOWLEDGED_HALF_WORD: Final = 6
_BYTES_UNSENT_HALF_WORD: Final = 36

#: An address of the family AF_UNSPEC. Connecting to it disconnects.
_NOWHERE: Final = bytes(16)

#: Longer waits sleep, and shorter waits spin.
_WAIT_NS_MAX: Final = SECOND_NS // 5_000

#: Linux constants for a packet filter with one instruction, which drops all packets.
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_BPF_RETURN: Final = 0x06


#: The interval of warnings: a flood makes six lines a minute.
WARNING_NS: Final = 10 * SECOND_NS

#: Reasons for a cut, as they are counted.
FOR_CONNECTIONS: Final = "connections"
FOR_MEMORY: Final = "memory"
FOR_FRAMES: Final = "frames"
FOR_ROUTE: Final = "routing id"

#: The reason of a hold.
HELD: Final = "held"

#: The log line of each reason, with a count and the address of one peer.
_TEXTS: Final = {
    FOR_CONNECTIONS: "connections cut: %d without a message, too many are open (such as %s)",
    FOR_MEMORY: "connections cut: %d with unfinished messages, memory is short (such as %s)",
    FOR_FRAMES: "connections cut: %d with a message of too many frames (such as %s)",
    FOR_ROUTE: "connections cut: %d under a routing id that another peer uses (such as %s)",
    HELD: "peers held back: %d with many large messages (such as %s)",
}

#: Shorter frames are not counted.
COUNTED_BYTES_MIN: Final = 4 << 10

#: A connection with fewer waiting bytes than this is ignored.
WAITING_BYTES_MIN: Final = 1 << 20

#: How long a released peer may take for its next bytes, in addition to the time of the hold. TCP
#: resends at growing intervals: the next interval is as long as all before.
RESUME_NS: Final = 2 * SECOND_NS


class Arrivals(Struct, eq=False):
    """Whole messages that a listener received. Written by the receiving thread, read by the guard.

    The counts show for each connection whether its bytes became messages.
    """

    #: ZeroMQ's descriptor of the listener: readable when there may be more to receive.
    events: int
    is_local: bool
    #: The listener requires keys.
    has_keys: bool = False
    #: By descriptor: the messages of its connection.
    messages: dict[int, int] = field(default_factory=dict)
    #: The messages of all connections.
    total: int = 0
    #: The last receive found no message.
    is_empty: bool = True
    #: By descriptor: the bytes of its frames of COUNTED_BYTES_MIN or more.
    counted: dict[int, int] = field(default_factory=dict)
    #: Descriptors of connections that sent a message of far too many frames.
    overlong: list[int] = field(default_factory=list)
    #: Descriptors of connections whose message was dropped because there was no memory for it.
    refused: list[int] = field(default_factory=list)

    def note_bytes(self, descriptor: int, size: int) -> None:
        """Count the bytes of a frame of COUNTED_BYTES_MIN or more."""
        self.counted[descriptor] = self.counted.get(descriptor, 0) + size

    def taken_bytes(self, descriptor: int) -> int:
        """Estimate the bytes of a connection's messages from above.

        Short frames are not counted. They are estimated as COUNTED_BYTES_MIN a message.
        """
        short = self.messages.get(descriptor, 0) * COUNTED_BYTES_MIN
        return self.counted.get(descriptor, 0) + short

    def is_caught_up(self) -> bool:
        """Return whether every whole message was received."""
        poll = select.poll()
        poll.register(self.events, select.POLLIN)
        return self.is_empty and not poll.poll(0)


class Connection(Struct, eq=False):
    """An accepted connection, and the bytes of it that are not a whole message yet."""

    descriptor: int
    #: Distinguishes this connection from a later connection with its descriptor.
    inode: int
    arrivals: Arrivals
    accepted_ns: int
    #: The peer's address, if it is logged.
    address: str = ""
    #: As of the last sample: its time, bytes received, and messages of all connections.
    sampled_ns: int = 0
    received: int = 0
    total: int = 0
    #: As of the last sample with a new message: bytes received, and messages.
    settled: int = 0
    messages: int = 0
    #: Bytes of an unfinished message: every whole message was received since they arrived. And
    #: since when.
    unfinished: int = 0
    unfinished_ns: int = 0
    #: Bytes that ZeroMQ has read and the broker has not received, as of the last sample.
    waiting: int = 0
    #: All its whole messages were received. What is left is an unfinished message.
    is_drained: bool = True
    #: By how much the estimate of taken bytes exceeds the received bytes.
    overcount: int = 0
    #: Since when the kernel drops its packets. 0: it does not.
    held_ns: int = 0
    #: An unfinished message is no fault of its sender before this time, because it was held.
    excused_ns: int = 0

    @property
    def has_spoken(self) -> bool:
        """Return whether a whole message has arrived on it."""
        return self.descriptor in self.arrivals.messages

    def is_overdue(self, ripe_ns: int) -> bool:
        """Return whether its message is unfinished since before `ripe_ns`, and not due to a hold.

        A stranger is overdue at once.
        """
        if not self.unfinished or self.held_ns:
            return False
        return not self.has_spoken or max(self.unfinished_ns, self.excused_ns) <= ripe_ns

    def note_released(self, now_ns: int) -> None:
        self.excused_ns = 2 * now_ns - self.held_ns + RESUME_NS
        self.held_ns = 0

    def sample(self, now_ns: int, *, is_caught_up: bool, connections: int) -> None:
        """Sample its received bytes. `connections` is the number of all connections."""
        arrivals = self.arrivals
        messages = arrivals.messages.get(self.descriptor, 0)
        received = self.count_received()
        # ZeroMQ reads its connections in turns: a whole message would have been received by now.
        is_passed = messages == self.messages and arrivals.total - self.total > 2 * connections
        self.is_drained = is_caught_up or is_passed
        if messages != self.messages:
            self.messages, self.settled, self.unfinished = messages, received, 0
        elif self.is_drained:
            if not self.unfinished:
                self.unfinished_ns = self.sampled_ns
            self.unfinished = self.received - self.settled
        if received > self.received:
            # Bytes arrive again after a hold. The message is in transit from now on.
            self.excused_ns = min(self.excused_ns, now_ns)
        self.received, self.total, self.sampled_ns = received, arrivals.total, now_ns
        self._sample_waiting()

    def _sample_waiting(self) -> None:
        self.waiting = 0
        if self.arrivals.is_local:
            return
        waiting = self.received - self.arrivals.taken_bytes(self.descriptor) + self.overcount
        self.overcount -= min(0, waiting)
        if waiting > WAITING_BYTES_MIN:
            # The kernel's part is not the memory of this process.
            self.waiting = max(0, waiting - waiting_bytes(self.descriptor))

    def count_received(self) -> int:
        """Return the bytes received so far. For a local connection: the bytes seen waiting."""
        if not self.arrivals.is_local:
            return received_bytes(self.descriptor)
        return self.received + waiting_bytes(self.descriptor)

    def count_segments(self) -> int:
        """Return the TCP segments received so far. 0 if unknown."""
        return received_segments(self.descriptor)


class Cutter:
    """Disconnect or hold connections. Keeps spare descriptors, to work when none is left."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._nothing)

    def cut(self, connection: Connection, *, is_named: bool) -> str:
        """Disconnect a connection. Return its peer's address if `is_named`, or "" if unknown.

        After a `shutdown` of TCP the other end could still send, and ZeroMQ would still read.
        Connecting to AF_UNSPEC ends the connection at once and discards unread bytes.
        """
        with self._borrowed(connection) as copy:
            address = peer_address(copy.fileno()) if copy is not None and is_named else ""
            if copy is None:
                pass
            elif connection.arrivals.is_local:
                _libc.shutdown(copy.fileno(), socket.SHUT_RDWR)
            else:
                _libc.connect(copy.fileno(), _NOWHERE, len(_NOWHERE))
        return address

    def hold(self, connection: Connection) -> str:
        """Make the kernel drop packets of a TCP peer until `release`. Then the peer resends them.

        Return the peer's address, or "" if unknown. A kernel that allows filters to root only drops
        nothing. Memory is then bounded by cuts alone.
        """
        with self._borrowed(connection) as copy:
            if copy is None:
                return ""
            with contextlib.suppress(OSError):
                _drop_packets(copy)
            return peer_address(copy.fileno())

    def release(self, connection: Connection) -> None:
        """Accept packets of a held peer again."""
        with self._borrowed(connection) as copy, contextlib.suppress(OSError):
            if copy is not None:
                copy.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    @contextlib.contextmanager
    def _borrowed(self, connection: Connection) -> Iterator[socket.socket | None]:
        """Yield a copy of a connection's descriptor, or None if the connection is gone.

        The copy refers to the same socket even if ZeroMQ closes its own descriptor.
        """
        copy = None
        with contextlib.suppress(OSError):
            os.dup2(connection.descriptor, self._copy, inheritable=False)
            if os.fstat(self._copy).st_ino == connection.inode:
                copy = socket.socket(fileno=self._copy)
        try:
            yield copy
        finally:
            if copy is not None:
                copy.detach()
            os.dup2(self._nothing, self._copy, inheritable=False)

    def close(self) -> None:
        os.close(self._copy)
        os.close(self._nothing)


class Gate:
    """Stop a listener from accepting for a while. Peers wait in the kernel's queue.

    ZeroMQ accepts on a descriptor number. While the gate is shut, that number is another listener,
    which no peer can reach.
    """

    def __init__(self, descriptor: int) -> None:
        self._number = descriptor
        self._listener = os.dup(descriptor)
        self._deaf = _deaf_listener()
        self._is_shut = False
        self._waiting = select.poll()
        self._waiting.register(self._listener, select.POLLIN)

    def shut(self) -> None:
        self._is_shut = True
        _become(self._number, self._deaf)

    def open(self) -> None:
        if self._is_shut:
            _become(self._number, self._listener)
            self._is_shut = False

    def has_waiting(self) -> bool:
        """Return whether peers wait to be accepted."""
        return bool(self._waiting.poll(0))

    def pulse(self, open_ns: int) -> None:
        """Open a shut gate for a short time, so that few peers are accepted."""
        _become(self._number, self._listener)
        if open_ns > _WAIT_NS_MAX:
            time.sleep(open_ns / SECOND_NS)
        else:
            # After a sleep, other threads could keep the GIL for much longer than this.
            ends_ns = time.monotonic_ns() + open_ns
            while time.monotonic_ns() < ends_ns:
                pass
        _become(self._number, self._deaf)

    def close(self) -> None:
        """Open the gate and close its descriptors."""
        self.open()
        os.close(self._listener)
        os.close(self._deaf)


def _become(number: int, descriptor: int) -> None:
    """Make a descriptor number refer to the file of another descriptor."""
    _fast_libc.dup3(descriptor, number, os.O_CLOEXEC)


def _deaf_listener() -> int:
    """Open a listener that no peer can reach: its name is removed.

    A packet filter would do the same for TCP, but some kernels allow it to root only.
    """
    with (
        tempfile.TemporaryDirectory(prefix="taskyard-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf,
    ):
        folder = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            deaf.bind(f"/proc/self/fd/{folder}/deaf")  # short, however long the directory's path is
        finally:
            os.close(folder)
        deaf.listen(1)
        deaf.settimeout(0)
        return deaf.detach()


def _drop_packets(one: socket.socket) -> None:
    """Make the kernel drop every packet for a socket."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def inode_of(descriptor: int) -> int:
    """Read the inode of a socket. 0 if the descriptor is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0


def received_bytes(descriptor: int) -> int:
    """Return the bytes that a TCP connection has received. 0 if it is gone."""
    return int(_tcp_info(descriptor)[_BYTES_RECEIVED_WORD])


def received_segments(descriptor: int) -> int:
    """Return the segments with data that a TCP connection has received. 0 if unknown."""
    halves = ctypes.cast(_tcp_info(descriptor), ctypes.POINTER(ctypes.c_uint32))
    return int(halves[_SEGMENTS_HALF_WORD])


def transferred_bytes(descriptor: int) -> tuple[int, int]:
    """Return the bytes that a TCP connection has received, and how many of the sent
    bytes were acknowledged while more wait. The second is 0 if nothing waits."""
    words = _tcp_info(descriptor)
    halves = ctypes.cast(words, ctypes.POINTER(ctypes.c_uint32))
    waits = halves[_SEGMENTS_UNACKNOWLEDGED_HALF_WORD] or halves[_BYTES_UNSENT_HALF_WORD]
    return int(words[_BYTES_RECEIVED_WORD]), int(words[_BYTES_ACKNOWLEDGED_WORD]) if waits else 0


def _tcp_info(descriptor: int) -> ctypes.Array[ctypes.c_uint64]:
    """Read the kernel's counters of a TCP connection. All are 0 if it is gone."""
    found = (ctypes.c_uint64 * _TCP_INFO_WORDS)()
    length = ctypes.c_uint32(ctypes.sizeof(found))
    _fast_libc.getsockopt(
        descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, found, ctypes.byref(length)
    )
    return found


def waiting_bytes(descriptor: int) -> int:
    """Return the bytes that wait to be read. 0 if the connection is gone."""
    found = ctypes.c_int(0)
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, found)
    except OSError:
        return 0
    return found.value


def peer_address(descriptor: int) -> str:
    """Return the peer's address and port, or its process if it is local. "" if unknown."""
    held = socket.socket(fileno=descriptor)
    try:
        if held.family == socket.AF_UNIX:
            raw = held.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return f"process {struct.unpack('3i', raw)[0]}"
        return _with_port(held.getpeername())
    except OSError:
        return ""
    finally:
        held.detach()


def listener_address(descriptor: int) -> str:
    """Return the address and port at which a connection over TCP was accepted."""
    held = socket.socket(fileno=descriptor)
    try:
        return _with_port(held.getsockname())
    finally:
        held.detach()


def _with_port(address: tuple[Any, ...]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class CutReport:
    """Count cuts and held peers, and log them at intervals."""

    def __init__(self, cut: Counter[str]) -> None:
        self._cut = cut
        self._fresh: Counter[str] = Counter()
        #: The address of one peer that was cut since the last log line.
        self.peer = ""
        self._logged_ns = -WARNING_NS

    def add(self, reason: str, peer: str) -> None:
        if reason != HELD:
            self._cut[reason] += 1
        self._fresh[reason] += 1
        self.peer = self.peer or peer

    def log(self, now_ns: int) -> None:
        """Log the cuts since the last call, at most every WARNING_NS."""
        if not self._fresh or now_ns - self._logged_ns < WARNING_NS:
            return
        self._logged_ns = now_ns
        for reason, count in self._fresh.items():
            logger.warning(_TEXTS[reason], count, self.peer)
        self._fresh.clear()
        self.peer = ""


#: How often connections are examined.
EXAMINE_NS: Final = SECOND_NS

#: Bytes of a handshake may arrive this long after a connection.
HANDSHAKE_NS_MAX: Final = HANDSHAKE_MS_MAX * SECOND_NS // 1000 + EXAMINE_NS

#: More bytes than this in one interval may be a part of one long message.
SMALL_BYTES_MAX: Final = 16 << 10

#: Segments of a long message are longer on average: every link carries 512 bytes in a packet.
SEGMENT_BYTES_MIN: Final = 400

#: Intervals without a byte that separate two messages. A link of 1 KiB/s has one between segments.
QUIET_INTERVALS_MIN: Final = 2

#: Intervals with a short message and no delivery. A message may be in transit, and lost packets
#: make the segments of an interval look shorter.
INTERVALS_MIN: Final = 3


class _Examined(Struct):
    """A connection as of the last examination."""

    received: int
    segments: int
    #: Intervals without a byte since the last interval with some.
    quiet: int = 0
    #: Intervals in which a short message arrived.
    short: int = 0

    def examine(self, received: int, segments: int) -> None:
        """Count the bytes and segments of an interval."""
        grown = received - self.received
        if grown <= 0:
            self.quiet += 1
            return
        is_in_short_segments = grown < SEGMENT_BYTES_MIN * (segments - self.segments)
        is_separate = self.quiet >= QUIET_INTERVALS_MIN
        if grown <= SMALL_BYTES_MAX and (is_in_short_segments or is_separate):
            self.short += 1
        else:
            self.short = 0
        self.received, self.segments, self.quiet = received, segments, 0


class UnroutedPeers:
    """Finds connections with keys whose messages ZeroMQ does not deliver.

    On a listener with keys the first peer of a routing id keeps it. ZeroMQ delivers no message of a
    second peer, and does not report it, even after the first has left. So a connection that sends
    and never has a message delivered is found here by the kernel's counters. Once cut, its peer
    reconnects, and is served if the id is free by then.

    A long first message over a slow link has no message delivered either. But it arrives without
    long pauses and in full segments. Short messages arrive in short segments, or with pauses.
    """

    def __init__(self) -> None:
        self._examined: dict[Connection, _Examined] = {}
        self._examine_at_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Return whether to call `find`."""
        return now_ns >= self._examine_at_ns

    def find(self, strangers: Iterable[Connection], now_ns: int) -> list[Connection]:
        """Examine connections without a message. Return the unrouted connections."""
        self._examine_at_ns = now_ns + EXAMINE_NS
        examined: dict[Connection, _Examined] = {}
        for one in strangers:
            if now_ns - one.accepted_ns < HANDSHAKE_NS_MAX or not one.arrivals.is_caught_up():
                continue
            received, segments = one.count_received(), one.count_segments()
            found = self._examined.get(one) or _Examined(received, segments)
            found.examine(received, segments)
            examined[one] = found
        self._examined = examined
        return [one for one, found in examined.items() if found.short >= INTERVALS_MIN]
