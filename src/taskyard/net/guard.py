"""A thread that disconnects peers which take too much memory or too many descriptors.

ZeroMQ keeps a message until its last frame arrives, and aborts when memory or descriptors run out.
So the guard counts accepted connections, and checks memory many times a second. It cuts strangers
(connections that never sent a whole message) when there are too many of them, and senders of
unfinished messages when memory has grown, and peers that ZeroMQ does not route. It holds senders of
many large messages until the broker has received these. A cut peer may reconnect. The guard reads
no message and changes no durable state.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import resource
import struct
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.net import accepted, memory
from taskyard.net.accepted import Arrivals, Connection
from taskyard.net.context import ask_for_room, context
from taskyard.net.event_log import PeerLog
from taskyard.net.host import Waker
from taskyard.net.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

logger = logging.getLogger("taskyard.net")

#: Events read from one listener before the next listener is served.
EVENTS_MAX: Final = 100

#: Strangers are cut with the gates shut once more than this part of the descriptors is in use.
GATES_SHARE: Final = 2

#: The interval of checks while nothing happens and every peer has sent a message.
CHECK_ALL_NS: Final = 5 * SECOND_NS

#: How often to check which strangers have sent a message since.
CHECK_NS: Final = SECOND_NS // 50

#: While a gate is shut and peers wait, it opens for a pulse about this often. A pulse is longer the
#: more descriptors are left. ZeroMQ accepts one peer in 10 to 50 µs, but the guard may be suspended
#: during a pulse.
PULSE_MS: Final = 1
PULSE_NS_EACH: Final = 200
PULSE_NS_MIN: Final = SECOND_NS // 20_000
PULSE_NS_MAX: Final = SECOND_NS // 500

#: ZeroMQ closes a connection much sooner after it is cut.
ENDING_NS_MAX: Final = SECOND_NS

#: A message that was unfinished for less than this is in transit.
UNFINISHED_NS: Final = SECOND_NS // 10
#: A stranger older than this has had time for a first message.
STRANGER_NS: Final = SECOND_NS // 10
#: After this time with no connection to blame, the memory belongs to tasks and is the new normal.
ACCEPT_NS: Final = SECOND_NS
#: How often to return memory while it is short. ZeroMQ frees it after a cut, but malloc keeps it.
GIVE_BACK_NS: Final = SECOND_NS // 5
#: The shortest interval of returning memory in normal operation.
CALM_GIVE_BACK_NS: Final = 2 * SECOND_NS

_EVENT: Final = struct.Struct("=HI")
#: ZeroMQ reports a failed handshake just before the end of its connection.
_FAILED: Final = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_WATCHED: Final = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED[0] | _FAILED[1])
_numbers = itertools.count(1)


class Guard:
    """Watch listeners from its own thread.

    Call `watch` for each listener before it is bound, then `start`. Close it before the listeners.
    Does nothing on systems other than Linux.
    """

    def __init__(self, limits: memory.ConnectionLimits | None = None) -> None:
        self._is_able = sys.platform == "linux"
        self._limits = limits
        #: Connections cut, by reason.
        self.cut: Counter[str] = Counter()
        self._listeners: list[_Listener] = []
        self._thread: threading.Thread | None = None
        #: Ends the thread.
        self._waker = Waker()

    def watch(
        self,
        socket: zmq.Socket[bytes],
        descriptor: int,
        *,
        is_local: bool,
        has_keys: bool = False,
    ) -> Arrivals | None:
        """Watch a listener that accepts on this descriptor. Return the counts that it must keep."""
        if not self._is_able:
            return None
        arrivals = Arrivals(int(socket.FD), is_local, has_keys)
        listener = _Listener(socket, arrivals, accepted.Gate(descriptor))
        self._listeners.append(listener)
        return listener.arrivals

    def connections(self) -> int | None:
        """Return the number of open connections. None: they can't be counted on this system."""
        if not self._is_able:
            return None
        return sum(len(listener.connections) for listener in self._listeners)

    def start(self) -> None:
        """Start the thread."""
        if not self._is_able:
            logger.warning("connections are not protected against floods on this system")
            return
        limits = self._limits or _limits_of_process()
        work = _Work(self._listeners, limits, self.cut, self._waker)
        self._thread = threading.Thread(target=work.run, name="taskyard-guard", daemon=True)
        ask_for_room(work.has_room)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            ask_for_room(None)
            self._waker.wake()
            self._thread.join()
        else:
            for listener in self._listeners:
                listener.close()
        self._listeners.clear()
        self._waker.close()


class _Listener:
    """A listener's socket, its monitor, and its connections by descriptor."""

    def __init__(self, socket: zmq.Socket[bytes], arrivals: Arrivals, gate: accepted.Gate) -> None:
        self.arrivals = arrivals
        self.gate = gate
        self.connections: dict[int, Connection] = {}
        #: The last event of a failed handshake and its error, until its connection ends.
        self.failure = (0, 0)
        self._socket = socket
        endpoint = f"inproc://taskyard.guard.{next(_numbers)}"
        socket.monitor(endpoint, _WATCHED)
        self.monitor: zmq.Socket[bytes] = context().socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.SocketOption.LINGER, 0)
        self.monitor.connect(endpoint)

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield new events: the kind of each, and its descriptor or error."""
        with contextlib.suppress(zmq.Again):
            while True:
                event, _ = self.monitor.recv_multipart(zmq.NOBLOCK)
                yield _EVENT.unpack(event)

    def close(self) -> None:
        """Close the monitor. Read all events first, because ZeroMQ's thread waits for that."""
        self.gate.close()
        for _ in self.events():
            pass
        if not self._socket.closed:
            self._socket.monitor(None, 0)
        self.monitor.close()


class _Work:
    """The state of the thread."""

    def __init__(
        self,
        listeners: list[_Listener],
        limits: memory.ConnectionLimits,
        cut: Counter[str],
        waker: Waker,
    ) -> None:
        self._listeners = list(listeners)
        self._limits = limits
        self._waker = waker
        self._meter = memory.MemoryMeter()
        self._cutter = accepted.Cutter()
        self._pressure = memory.Pressure(limits.memory, self._meter.read())
        self._report = accepted.CutReport(cut)
        self._peers = PeerLog()
        #: Connections without a message, the oldest first. Some may have sent one since.
        self._strangers: dict[Connection, None] = {}
        self._strangers_checked_ns = 0
        self._unrouted = accepted.UnroutedPeers()
        #: Connections that are cut and not yet closed by ZeroMQ, and when they were cut.
        self._ending: dict[Connection, int] = {}
        self._count = 0
        self._descriptors_used = 0
        self._is_shut = False
        self._pulse_ns = 0
        self._look_at_ns = 0
        #: When to check all that is watched, if nothing happens before. Between these, a look at
        #: the memory is enough.
        self._check_all_ns = 0
        #: Connections whose packets the kernel drops for now.
        self._held: dict[Connection, None] = {}
        #: Since when memory has grown with no message to blame. 0: it has not.
        self._blameless_since_ns = 0
        #: The connections at the time when growth was accepted as normal. It may be theirs after
        #: all, so memory is returned when one of them has ended.
        self._accepted_with: dict[Connection, None] = {}
        self._is_trim_due = False
        #: When memory was last returned to the system.
        self._gave_back_ns = 0

    def has_room(self, *, is_local: bool) -> bool:
        """Return whether one more connection is allowed. Called by the ZAP thread."""
        most = self._limits.connections
        return self._count <= (most if is_local else most - most // memory.LOCAL_SHARE)

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        for listener in self._listeners:
            poller.register(listener.monitor, zmq.POLLIN)
        end = self._waker.fileno()
        with self._meter, contextlib.closing(self._cutter):
            while end not in (ready := dict(poller.poll(self._wait_ms()))):
                try:
                    self._turn(ready)
                except Exception:
                    # The thread must not end: ZeroMQ's thread waits for events to be read.
                    logger.exception("internal error in the connection guard")
                    self._open_gates()
                    time.sleep(memory.LOOK_MS / 1000)
        for listener in self._listeners:
            listener.close()

    def _wait_ms(self) -> int:
        if self._is_shut:
            return PULSE_MS
        return max(0, self._look_at_ns - time.monotonic_ns()) * 1000 // SECOND_NS + 1

    def _turn(self, ready: Container[object]) -> None:
        now_ns = time.monotonic_ns()
        for listener in self._listeners:
            if listener.monitor not in ready:
                continue
            self._check_all_ns = now_ns
            for kind, descriptor in itertools.islice(listener.events(), EVENTS_MAX):
                if kind == zmq.EVENT_ACCEPTED:
                    self._accepted(listener, descriptor, now_ns)
                elif kind == zmq.EVENT_DISCONNECTED:
                    self._disconnected(listener, descriptor)
                elif kind in _FAILED:
                    listener.failure = kind, descriptor
        if self._is_shut:
            self._let_in()
        if now_ns >= self._look_at_ns:
            wait_ms = self._pressure.look_ms if self._is_quiet(now_ns) else self._check(now_ns)
            self._look_at_ns = time.monotonic_ns() + wait_ms * SECOND_NS // 1000

    def _is_quiet(self, now_ns: int) -> bool:
        """Return whether a look is enough: no event since the last check, and memory is calm."""
        if now_ns >= self._check_all_ns or self._held or self._ending or self._strangers:
            return False
        for listener in self._listeners:
            if listener.arrivals.overlong or listener.arrivals.refused:
                return False
        return self._pressure.is_calm(self._meter.read())

    def _accepted(self, listener: _Listener, descriptor: int, now_ns: int) -> None:
        found = Connection(descriptor, accepted.inode_of(descriptor), listener.arrivals, now_ns)
        listener.connections[descriptor] = found
        self._count += 1
        self._descriptors_used += 1
        self._strangers[found] = None
        self._peers.on_accepted(found, now_ns)
        self._pulse_ns = 0
        self._limit_strangers(now_ns)

    def _disconnected(self, listener: _Listener, descriptor: int) -> None:
        messages = listener.arrivals.messages.pop(descriptor, 0)
        listener.arrivals.counted.pop(descriptor, None)
        found = listener.connections.pop(descriptor, None)
        failure, listener.failure = listener.failure, (0, 0)
        if found is None:
            return
        now_ns = time.monotonic_ns()
        if failure[0]:
            self._peers.on_refused(found, *failure, now_ns)
        else:
            self._peers.on_disconnected(found, messages, now_ns)
        self._count -= 1
        self._descriptors_used -= 1
        self._strangers.pop(found, None)
        self._ending.pop(found, None)
        self._held.pop(found, None)
        if found in self._accepted_with:
            del self._accepted_with[found]
            self._is_trim_due = True

    def _limit_strangers(self, now_ns: int) -> None:
        """Cut strangers if there are too many, or too few descriptors are left.

        ZeroMQ accepts faster than connections are cut, so the gates shut near the limit.
        """
        excess = self._excess()
        if excess > 0 and now_ns - self._strangers_checked_ns > CHECK_NS:
            self._strangers_checked_ns = now_ns
            self._strangers = {one: None for one in self._strangers if not one.has_spoken}
            excess = self._excess()
        for _ in range(excess):
            found = memory.stranger_to_cut(self._strangers, now_ns - accepted.HANDSHAKE_NS_MAX)
            if found is None:
                return
            if self._descriptors_used > self._limits.descriptors // GATES_SHARE:
                self._shut_gates()
            self._cut(found, accepted.FOR_CONNECTIONS)

    def _excess(self) -> int:
        """Return the number of strangers to cut."""
        limits = self._limits
        used = self._descriptors_used - len(self._ending)
        too_many = len(self._strangers) - limits.strangers
        return max(too_many, used + limits.descriptors_free - limits.descriptors)

    def _let_in(self) -> None:
        """Accept in pulses while peers wait at a gate. Open it when none does."""
        if self._ending:
            return  # wait until ZeroMQ has closed cut connections
        waiting = [one.gate for one in self._listeners if one.gate.has_waiting()]
        if not waiting:
            self._open_gates()
        # If ZeroMQ's thread did not run during a pulse, no peer was accepted. Make the next longer.
        left = self._limits.descriptors - self._descriptors_used
        shortest_ns = max(PULSE_NS_MIN, left * PULSE_NS_EACH)
        self._pulse_ns = min(max(shortest_ns, 2 * self._pulse_ns), PULSE_NS_MAX)
        for gate in waiting:
            gate.pulse(self._pulse_ns)

    def _shut_gates(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            for listener in self._listeners:
                listener.gate.shut()

    def _open_gates(self) -> None:
        if self._is_shut:
            self._is_shut = False
            for listener in self._listeners:
                listener.gate.open()

    def _cut(self, found: Connection, reason: str) -> None:
        self._strangers.pop(found, None)
        if found in self._ending:
            return
        self._ending[found] = time.monotonic_ns()
        self._report.add(reason, self._cutter.cut(found, is_named=not self._report.peer))

    def _check(self, now_ns: int) -> int:
        """Check descriptors and memory. Return the milliseconds until the next check."""
        cpu_ns = time.thread_time_ns()
        self._check_all_ns = now_ns + CHECK_ALL_NS
        if self._strangers:
            self._strangers = {one: None for one in self._strangers if not one.has_spoken}
        self._descriptors_used = _descriptors_used(self._limits.descriptors)
        # Connections that ZeroMQ has not closed by now may be cut again.
        late_ns = now_ns - ENDING_NS_MAX
        self._ending = {one: cut_ns for one, cut_ns in self._ending.items() if cut_ns > late_ns}
        self._limit_strangers(now_ns)
        self._cut_unrouted(now_ns)
        self._cut_reported()
        self._report.log(now_ns)
        self._peers.log_if_due(now_ns)
        now = self._meter.read()
        self._pressure.backlog = 0
        level = self._pressure.level(now)
        if level is not memory.Level.CALM or self._held:
            self._sample(now_ns)
            self._hold_back(now_ns)
            self._pressure.backlog = memory.backlog_bytes(self._connections())
            level = self._pressure.level(now)
        if level is memory.Level.CALM:
            self._blameless_since_ns = 0
            if self._is_trim_due and now_ns - self._gave_back_ns > CALM_GIVE_BACK_NS:
                self._is_trim_due = False
                now = self._return_memory(now_ns)
            self._pressure.follow_down(now)
        else:
            self._relieve(level, now, now_ns)
        is_error = level >= memory.Level.TROUBLE or bool(self._held)
        if is_error or level is not memory.Level.CALM:
            self._check_all_ns = now_ns
        cpu_ns = time.thread_time_ns() - cpu_ns
        return memory.wait_ms_after(cpu_ns, is_error=is_error, look_ms=self._pressure.look_ms)

    def _sample(self, now_ns: int) -> None:
        """Sample the received bytes of each connection."""
        for listener in self._listeners:
            is_caught_up = listener.arrivals.is_caught_up()
            for found in listener.connections.values():
                found.sample(now_ns, is_caught_up=is_caught_up, connections=self._count)

    def _hold_back(self, now_ns: int) -> None:
        """Hold the senders of whole messages while too many bytes are not received."""
        for found in [*self._held]:
            if found.is_drained or found.waiting <= accepted.WAITING_BYTES_MIN:
                del self._held[found]
                found.note_released(now_ns)
                self._cutter.release(found)
        for found in memory.backlog_of(
            self._connections(), self._pressure.budget // memory.WAITING_SHARE
        ):
            if found not in self._held:
                self._held[found] = None
                found.held_ns = now_ns
                self._report.add(accepted.HELD, self._cutter.hold(found))

    def _relieve(self, level: memory.Level, now: Memory, now_ns: int) -> None:
        """Cut the connections that are to blame for the memory, or accept it as normal."""
        connections = self._connections()
        ripe_ns = now_ns if level is memory.Level.SEVERE else now_ns - UNFINISHED_NS
        suspects = memory.suspects_of(connections, self._pressure.excess(now), ripe_ns)
        if suspects or self._held:
            self._blameless_since_ns = 0
        elif not self._blameless_since_ns:
            self._blameless_since_ns = now_ns
        elif now_ns - self._blameless_since_ns > ACCEPT_NS:
            self._pressure.calm = self._return_memory(now_ns)
            self._accepted_with = dict.fromkeys(connections)
            return
        if level is memory.Level.ALERT:
            return
        if not suspects and self._held:
            return  # the memory is freed with the messages
        if not suspects and now_ns - self._gave_back_ns > GIVE_BACK_NS:
            level = self._pressure.level(self._return_memory(now_ns))
        if not suspects and level >= memory.Level.TROUBLE:
            ripe_ns = now_ns if level is memory.Level.SEVERE else now_ns - STRANGER_NS
            suspects = memory.strangers_of(connections, ripe_ns)
        for found in suspects:
            self._cut(found, accepted.FOR_MEMORY)

    def _return_memory(self, now_ns: int) -> Memory:
        """Return free memory to the system, and read the remaining use."""
        self._gave_back_ns = now_ns
        memory.give_back()
        return self._meter.read()

    def _cut_unrouted(self, now_ns: int) -> None:
        """Cut peers with keys whose routing id is in use. They reconnect."""
        if not self._unrouted.is_due(now_ns):
            return
        admitted_ns = now_ns - accepted.HANDSHAKE_NS_MAX
        strangers = [one for one in self._strangers if not one.has_spoken]
        # The last to be cut go to the end, because only the beginning is examined.
        strangers.sort(key=lambda one: memory.merit(one, admitted_ns))
        self._strangers = dict.fromkeys(strangers)
        with_keys = [one for one in self._strangers if one.arrivals.has_keys]
        for found in self._unrouted.find(with_keys, now_ns):
            self._cut(found, accepted.FOR_ROUTE)

    def _cut_reported(self) -> None:
        for listener in self._listeners:
            while listener.arrivals.overlong:
                found = listener.connections.get(listener.arrivals.overlong.pop())
                if found is not None:
                    self._cut(found, accepted.FOR_FRAMES)
            while listener.arrivals.refused:
                found = listener.connections.get(listener.arrivals.refused.pop())
                if found is not None:
                    self._cut(found, accepted.FOR_MEMORY)

    def _connections(self) -> list[Connection]:
        every = [one for listener in self._listeners for one in listener.connections.values()]
        return [one for one in every if one not in self._ending]


def _limits_of_process() -> memory.ConnectionLimits:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return memory.ConnectionLimits(
        1 << 30 if soft == resource.RLIM_INFINITY else soft, memory.memory_max()
    )


def _descriptors_used(most: int) -> int:
    """Count the open descriptors of this process."""
    with contextlib.suppress(OSError):
        # Since Linux 6.2 the size of the directory. Before that, 0.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # noqa: PTH116, PTH208 - without objects
    return most
