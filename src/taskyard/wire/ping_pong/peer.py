"""Ping-pong at a worker: READY, pings, one job at a time. No I/O, no clock.

Messages and outcomes of jobs go in, actions come out: messages to send, jobs to start and stop, and
a new connection. READY is sent only without a job. Without a job, a broker that does not answer is
dropped: another connection is opened. With a job, the worker waits. If the connection was renewed
meanwhile, the broker's count of pings restarts, and the job belongs to another worker: it is
stopped and not reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct

from taskyard.core.blobs import Blob, Content, text_of, truncated_result_reason
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.wire.ping_pong.frames import (
    DISCONNECT,
    ERROR,
    EXIT,
    FRAMES,
    FRAMES_MAX,
    PING,
    PONG,
    READY,
    is_count,
    is_word,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Delay before READY after a process could not be started: the same job would come back.
REFUSED_RETRY_NS: Final = SECOND_NS

#: How long to wait for the reply after DISCONNECT.
EXIT_NS_MAX: Final = SECOND_NS


class Settings(Struct, frozen=True):
    """The dialect's constants on the worker's side."""

    ping_ns: int = SECOND_NS
    #: BROKER_TIMEOUT, and N_TIMEOUTS.
    broker_timeout_ns: int = SECOND_NS
    timeouts: int = 3
    #: The service of payloads that are documents: see `calls.payloads`.
    service: bytes = b"default"

    @property
    def lease_timeout_ns(self) -> int:
        return self.broker_timeout_ns * self.timeouts


class Send(Struct):
    """Send frames, now or as soon as possible."""

    frames: list[bytes]
    #: Drop them if they can't be sent now.
    is_droppable: bool = False


class Start(Struct):
    """Start a job."""

    name: bytes
    payload: bytes


class Stop(Struct):
    """Stop a job. The outcome is ignored."""

    name: bytes


class Reconnect(Struct):
    """Close the connection with its unsent messages, and open another."""


class Warn(Struct):
    """Log a warning."""

    text: str


Action: TypeAlias = Send | Start | Stop | Reconnect | Warn


class Worker:
    """A worker of one broker, with one job at a time."""

    def __init__(self, settings: Settings, now_ns: int) -> None:
        self._settings = settings
        #: The current job. More than one only from a broker that violates the protocol.
        self._held: list[bytes] = []
        self._jobs = 0
        #: Of this connection: pings sent, and the broker's last count of them.
        self._pings = self._count_received = 0
        #: Replies that the broker owes.
        self._replies_expected = 0
        self._ping_due_ns = 0
        #: The broker has answered READY. Until then READY is sent in place of PING.
        self._is_registered = False
        #: When to send READY after DISCONNECT. 0: it was sent.
        self._ready_due_ns = 0
        #: When to stop waiting after DISCONNECT. 0: it was not sent.
        self._exit_deadline_ns = 0
        self._actions: list[Action] = []
        #: The broker has answered on any connection.
        self.was_connected = False
        #: It takes no more jobs, and exits when it has none.
        self.stopping = False
        #: EXIT was received, or DISCONNECT was sent.
        self.has_exited = False
        #: The last message of the broker, and since when a message is awaited on this connection.
        self._last_received_ns = self._waiting_since_ns = now_ns

    @property
    def is_working(self) -> bool:
        return bool(self._held)

    def unanswered_ns(self, now_ns: int) -> int:
        """Return the time since the last message of the broker."""
        return now_ns - self._last_received_ns

    # Input.

    def start(self, now_ns: int) -> list[Action]:
        """Send the first READY."""
        self._send_ready(now_ns)
        return self._taken()

    def take(self, frames: Sequence[bytes], now_ns: int) -> list[Action]:
        """Handle a message of the broker. Never raises."""
        if FRAMES <= len(frames) <= FRAMES_MAX and not frames[0]:
            self._on_frames(frames, now_ns)
        return self._taken()

    def done(self, name: bytes, outcome: Outcome, text: Content, now_ns: int) -> list[Action]:
        """Report a job, unless it was stopped."""
        if name in self._held:
            self._held.remove(name)
            self._report(outcome, text, now_ns)
        return self._taken()

    def stop_running(self) -> list[Action]:
        """Stop the current job. DISCONNECT returns it to the broker."""
        self._stop_job()
        return self._taken()

    def time_passed(self, now_ns: int) -> list[Action]:
        """Do everything that is due."""
        if self.stopping and not self._held:
            self._send_exit(now_ns)
        else:
            self._send_heartbeat(now_ns)
            self._reconnect_if_silent(now_ns)
        return self._taken()

    def wake_at_ns(self) -> int:
        """Return when to call `time_passed`."""
        due_ns = self._exit_deadline_ns or self._ready_due_ns or self._ping_due_ns
        if self._held or self._exit_deadline_ns:
            return due_ns
        return min(due_ns, self._waiting_since_ns + self._settings.lease_timeout_ns)

    # Messages of the broker.

    def _on_frames(self, frames: Sequence[bytes], now_ns: int) -> None:
        self._last_received_ns = self._waiting_since_ns = now_ns
        self.was_connected = True
        word = frames[1]
        if word == PONG:
            self._replies_expected -= 1
            if len(frames) == FRAMES:
                if not self._is_registered:
                    # A count from before READY may have come since.
                    self._count_received = 0
                self._is_registered = True
            elif is_count(frames[2]):
                self._check_count(int(frames[2]), now_ns)
        elif word == EXIT:
            self._stop_job()
            self.has_exited = True
        elif len(frames) == FRAMES and not self.stopping:
            self._start_job(word)

    def _check_count(self, count: int, now_ns: int) -> None:
        """Send READY after a count that restarts: the broker has a new connection without a worker.

        A current job now belongs to another worker. It is stopped first.
        """
        is_renewed = count <= self._count_received
        self._count_received = count
        if not is_renewed or self._ready_due_ns or self.stopping:
            return
        if self._held:
            self._actions.append(Warn("connection renewed: the job belongs to another worker now"))
            self._stop_job()
        self._send_ready(now_ns)

    def _start_job(self, payload: bytes) -> None:
        self._is_registered = True
        self._jobs += 1
        name = b"ping-pong-%d" % self._jobs
        self._held.append(name)
        self._actions.append(Start(name, payload))

    def _stop_job(self) -> None:
        self._actions += map(Stop, self._held)
        self._held.clear()

    # Messages to the broker.

    def _report(self, outcome: Outcome, content: Content, now_ns: int) -> None:
        """Send a result, or ERROR. A job that this machine can't start returns by DISCONNECT."""
        text = text_of(content)
        if outcome is Outcome.REFUSED:
            self._back_off(text, now_ns)
        elif outcome is not Outcome.DONE:
            self._send(ERROR, text)
        elif isinstance(content, Blob):
            self._send(ERROR, truncated_result_reason(content))
        elif is_word(text):
            self._send(ERROR, b"result is %s, a word of the protocol" % text)
        else:
            self._send(text)

    def _back_off(self, reason: bytes, now_ns: int) -> None:
        self._actions.append(Warn(f"job returned: {shown(reason)}"))
        self._send(DISCONNECT)
        self._count_received = 0
        self._ready_due_ns = now_ns + REFUSED_RETRY_NS

    def _send_ready(self, now_ns: int) -> None:
        self._ready_due_ns = 0
        self._is_registered = False
        self._replies_expected += 1
        self._send(READY)
        self._ping_due_ns = now_ns + self._settings.ping_ns

    def _ping(self, now_ns: int) -> None:
        self._pings += 1
        self._replies_expected += 1
        self._actions.append(Send([b"", PING, b"%d" % self._pings], is_droppable=True))
        self._ping_due_ns = now_ns + self._settings.ping_ns

    def _send_heartbeat(self, now_ns: int) -> None:
        if now_ns < (self._ready_due_ns or self._ping_due_ns):
            return
        if self._ready_due_ns or not (self._is_registered or self._held):
            self._send_ready(now_ns)
        else:
            self._ping(now_ns)

    def _reconnect_if_silent(self, now_ns: int) -> None:
        if self._held or now_ns - self._waiting_since_ns < self._settings.lease_timeout_ns:
            return
        self._actions.append(Reconnect())
        self._waiting_since_ns = now_ns
        self._pings = self._count_received = self._replies_expected = 0
        self._send_ready(now_ns)

    def _send_exit(self, now_ns: int) -> None:
        """Send DISCONNECT and a PING, and exit at the reply.

        DISCONNECT has no reply, and a closed socket loses unsent messages. The PONG shows that both
        have arrived.
        """
        if not self._exit_deadline_ns:
            self._exit_deadline_ns = now_ns + EXIT_NS_MAX
            self._send(DISCONNECT)
            self._ping(now_ns)
        elif self._replies_expected <= 0 or now_ns >= self._exit_deadline_ns:
            self.has_exited = True

    def _send(self, *words: bytes) -> None:
        self._actions.append(Send([b"", *words]))

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
