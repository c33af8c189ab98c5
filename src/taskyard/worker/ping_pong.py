"""The ping-pong worker: sends READY, runs jobs one by one, and sends PING meanwhile.

Owns the dialogue with one broker over one connection. READY is sent only without a job. Without a
job, a broker that does not answer is dropped: the socket is closed and another opened. With a job,
the worker waits. If the connection was renewed meanwhile, the broker's count of pings restarts, and
the job belongs to another worker: it is stopped and not reported.

Takes its sockets, runner and clock as arguments.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown, truncated_result_reason
from taskyard.net import sockets
from taskyard.net.host import Host
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
from taskyard.worker.announcer import Announcer
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.settings import default_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.poller import Poller
    from taskyard.net.protocols import Clock, MonotonicClock, Transport
    from taskyard.net.sockets import ZmqSocket
    from taskyard.worker.jobs import Runner
    from taskyard.worker.runner import ProcessRunner

logger = logging.getLogger("taskyard.worker")

#: Delay before READY after a process could not be started: the same job would come back.
REFUSED_RETRY_NS: Final = SECOND_NS

#: How long to wait for the reply after DISCONNECT.
EXIT_NS_MAX: Final = SECOND_NS

#: How soon to resend a message that could not be sent.
RESEND_NS: Final = SECOND_NS // 10


class PingPongSettings(Struct, frozen=True):
    """The dialect's constants on the worker's side."""

    ping_ns: int = SECOND_NS
    #: BROKER_TIMEOUT, and N_TIMEOUTS.
    broker_timeout_ns: int = SECOND_NS
    timeouts: int = 3
    #: The service of payloads that are documents: see `wire.payloads`.
    service: bytes = b"default"

    @property
    def lease_timeout_ns(self) -> int:
        return self.broker_timeout_ns * self.timeouts


class SocketFactory(Protocol):
    """Opens and closes sockets to the broker."""

    def open(self) -> Transport: ...

    def close(self, transport: Transport) -> None: ...


class PingPongWorkerLoop:
    """One worker, one broker, one job at a time."""

    def __init__(
        self,
        settings: PingPongSettings,
        socket_factory: SocketFactory,
        runner: Runner,
        clock: MonotonicClock,
    ) -> None:
        self._settings = settings
        self._socket_factory = socket_factory
        self._runner = runner
        self._clock = clock
        #: The current job. More than one only from a broker that violates the protocol.
        self._held: list[Job] = []
        self._jobs = 0
        #: Messages that could not be sent yet.
        self._unsent: list[list[bytes]] = []
        #: Of this socket: pings sent, and the broker's last count of them.
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
        #: The broker has answered on any socket.
        self.was_connected = False
        #: Take no more jobs, and exit without one.
        self.stopping = False
        #: EXIT was received, or DISCONNECT was sent.
        self.has_exited = False
        #: The last message of the broker, and since when one is awaited on this socket.
        self._last_received_ns = self._waiting_since_ns = clock.monotonic_ns()
        self._wire = socket_factory.open()
        self._send_ready()

    @property
    def is_working(self) -> bool:
        return bool(self._held)

    def unanswered_ns(self) -> int:
        """Return the time since the last message of the broker."""
        return self._clock.monotonic_ns() - self._last_received_ns

    def shut_down(self) -> None:
        """Take no more jobs, and exit after the current one."""
        self.stopping = True

    def stop_running(self) -> None:
        """Stop the current job. DISCONNECT returns it to the broker."""
        for job in self._held:
            self._runner.stop(*job.key)
        self._held.clear()

    def turn(self) -> None:
        """Receive, run and send. Never blocks."""
        while not self.has_exited and (frames := self._wire.receive()) is not None:
            self._on_frames(frames)
        for done in self._runner.turn():
            if done.job in self._held:
                self._held.remove(done.job)
                self._report(done)
        if self.has_exited:
            return
        self._send_unsent()
        if self.stopping and not self._held:
            self._send_exit()
        else:
            self._send_heartbeat()
            self._reconnect_if_silent()

    def wake_at_ns(self) -> int:
        """Return when the next turn is due without input."""
        times = [self._exit_deadline_ns or self._ready_due_ns or self._ping_due_ns]
        if not self._held and not self._exit_deadline_ns:
            times.append(self._waiting_since_ns + self._settings.lease_timeout_ns)
        if self._unsent:
            times.append(self._clock.monotonic_ns() + RESEND_NS)
        runner_ns = self._runner.wake_at_ns()
        return min(times if runner_ns is None else [*times, runner_ns])

    # Messages of the broker.

    def _on_frames(self, frames: list[bytes]) -> None:
        if not FRAMES <= len(frames) <= FRAMES_MAX or frames[0]:
            return  # no message of this dialect
        self._last_received_ns = self._waiting_since_ns = self._clock.monotonic_ns()
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
                self._check_count(int(frames[2]))
        elif word == EXIT:
            self.stop_running()
            self.has_exited = True
        elif len(frames) == FRAMES and not self.stopping:
            self._start_job(word)

    def _check_count(self, count: int) -> None:
        """Send READY after a count that restarts: the broker has a new connection without a worker.

        A current job now belongs to another worker. It is stopped first.
        """
        is_renewed = count <= self._count_received
        self._count_received = count
        if not is_renewed or self._ready_due_ns or self.stopping:
            return
        if self._held:
            logger.warning("connection renewed: the job belongs to another worker now")
            self.stop_running()
        self._send_ready()

    def _start_job(self, payload: bytes) -> None:
        self._is_registered = True
        self._jobs += 1
        job = Job(b"ping-pong-%d" % self._jobs, 1, self._settings.service, payload)
        self._held.append(job)
        self._runner.start(job)

    # Messages to the broker.

    def _report(self, done: JobResult) -> None:
        """Send a result, or ERROR. A job that this machine can't start returns by DISCONNECT."""
        if done.outcome is Outcome.REFUSED:
            self._back_off(done)
        elif done.outcome is not Outcome.DONE:
            self._send(ERROR, done.text)
        elif done.result_bytes_total:
            self._send(ERROR, truncated_result_reason(done.text, done.result_bytes_total))
        elif is_word(done.text):
            self._send(ERROR, b"result is %s, a word of the protocol" % done.text)
        else:
            self._send(done.text)

    def _back_off(self, done: JobResult) -> None:
        logger.warning("job returned: %s", shown(done.text))
        self._send(DISCONNECT)
        self._count_received = 0
        self._ready_due_ns = self._clock.monotonic_ns() + REFUSED_RETRY_NS

    def _send_ready(self) -> None:
        self._ready_due_ns = 0
        self._is_registered = False
        self._replies_expected += 1
        self._send(READY)
        self._ping_due_ns = self._clock.monotonic_ns() + self._settings.ping_ns

    def _ping(self) -> None:
        self._pings += 1
        self._replies_expected += 1
        # A ping that can't be sent is dropped.
        self._wire.send([b"", PING, b"%d" % self._pings])
        self._ping_due_ns = self._clock.monotonic_ns() + self._settings.ping_ns

    def _send_heartbeat(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if now_ns < (self._ready_due_ns or self._ping_due_ns):
            return
        if self._ready_due_ns or not (self._is_registered or self._held):
            self._send_ready()
        else:
            self._ping()

    def _reconnect_if_silent(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._held or now_ns - self._waiting_since_ns < self._settings.lease_timeout_ns:
            return
        self._socket_factory.close(self._wire)
        self._wire = self._socket_factory.open()
        self._waiting_since_ns = now_ns
        self._unsent.clear()
        self._pings = self._count_received = self._replies_expected = 0
        self._send_ready()

    def _send_exit(self) -> None:
        """Send DISCONNECT and a PING, and exit at the reply.

        DISCONNECT has no reply, and a closed socket loses unsent messages. The PONG shows that both
        have arrived.
        """
        now_ns = self._clock.monotonic_ns()
        if not self._exit_deadline_ns:
            self._exit_deadline_ns = now_ns + EXIT_NS_MAX
            self._send(DISCONNECT)
            self._ping()
        elif self._replies_expected <= 0 or now_ns >= self._exit_deadline_ns:
            self.has_exited = True

    def _send(self, *words: bytes) -> None:
        self._unsent.append([b"", *words])
        self._send_unsent()

    def _send_unsent(self) -> None:
        while self._unsent and self._wire.send(self._unsent[0]):
            del self._unsent[0]


class _PolledSockets:
    """Implements `SocketFactory`, and polls the sockets."""

    def __init__(self, endpoint: str, poller: Poller) -> None:
        self._endpoint = endpoint
        self._poller = poller
        self._connections: list[ZmqSocket] = []

    def open(self) -> ZmqSocket:
        wire = sockets.connect(self._endpoint)
        self._connections.append(wire)
        self._poller.add(wire)
        return wire

    def close(self, transport: Transport) -> None:
        for wire in [one for one in self._connections if one is transport]:
            self._connections.remove(wire)
            self._poller.remove(wire)
            wire.close()

    def close_all(self) -> None:
        for wire in [*self._connections]:
            self.close(wire)


class PingPongGroup:
    """The loops of one process, one per slot, as the host drives them."""

    def __init__(
        self, loops: Sequence[PingPongWorkerLoop], endpoint: str, announce: Callable[[str], None]
    ) -> None:
        self._loops = loops
        self._endpoint = endpoint
        self._announcer = Announcer(shown(default_name()), announce)

    @property
    def has_exited(self) -> bool:
        return not self._running()

    def turn(self) -> bool:
        for loop in self._running():
            loop.turn()
        missing_ns = PingPongSettings().broker_timeout_ns * 2
        connected = [one for one in self._loops if one.unanswered_ns() <= missing_ns]
        self._announcer.connection(
            self._endpoint,
            connected=any(one.was_connected for one in connected),
            missing=not connected,
        )
        return False

    def wake_at_ns(self) -> int:
        return min(loop.wake_at_ns() for loop in self._running())

    def shut_down(self) -> None:
        """Exit after the running jobs. Called again, stop them and return them."""
        loops = self._running()
        if all(loop.stopping for loop in loops):
            for loop in loops:
                loop.stop_running()
            return
        for loop in loops:
            loop.shut_down()
        self._announcer.finishing(sum(loop.is_working for loop in loops))

    def _running(self) -> list[PingPongWorkerLoop]:
        return [loop for loop in self._loops if not loop.has_exited]


def serve(  # noqa: PLR0913  # the last ones are named
    endpoint: str,
    make_runner: Callable[[Clock], ProcessRunner],
    announce: Callable[[str], None],
    *,
    slots: int = 1,
    settings: PingPongSettings | None = None,
    until_eof: bool = False,
) -> None:
    """Work for a broker until a signal, or until the broker sends EXIT.

    Each of the `slots` workers has its own connection and runner. `announce` takes lines for
    the user.
    """
    with Host(until_eof=until_eof) as host:
        socket_factory = _PolledSockets(endpoint, host.poller)
        host.callback(socket_factory.close_all)
        loops = [
            PingPongWorkerLoop(
                settings or PingPongSettings(),
                socket_factory,
                host.add_resource(make_runner(host.clock)),
                host.clock,
            )
            for _ in range(slots)
        ]
        host.run(PingPongGroup(loops, endpoint, announce))
