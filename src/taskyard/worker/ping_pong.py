"""The ping-pong worker: sockets, signals and the runner around `wire.ping_pong.peer`.

A process has one loop for each slot, each with its own connection and runner.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from taskyard.core.model import shown
from taskyard.net import sockets
from taskyard.net.host import Host
from taskyard.net.outbound import RESEND_NS, SendQueue
from taskyard.wire.ping_pong import peer as ping_pong_peer
from taskyard.worker.jobs import Job
from taskyard.worker.native_process import Announcer
from taskyard.worker.settings import default_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.net.host import Poller
    from taskyard.net.keys import PeerKey
    from taskyard.net.protocols import Clock, MonotonicClock, Transport
    from taskyard.net.zmq_socket import ZmqSocket
    from taskyard.worker.jobs import Runner
    from taskyard.worker.runner import ProcessRunner

logger = logging.getLogger("taskyard.worker")

#: A job runs once: the dialect has no attempts.
_ATTEMPT: Final = 1


class SocketFactory(Protocol):
    """Opens and closes sockets to the broker."""

    def open(self) -> Transport: ...

    def close(self, transport: Transport) -> None: ...


class PingPongWorkerLoop:
    """A worker. Takes its sockets, runner and clock as arguments."""

    def __init__(
        self,
        settings: ping_pong_peer.Settings,
        socket_factory: SocketFactory,
        runner: Runner,
        clock: MonotonicClock,
    ) -> None:
        self._settings = settings
        self._socket_factory = socket_factory
        self._runner = runner
        self._clock = clock
        now_ns = clock.monotonic_ns()
        self.worker = ping_pong_peer.Worker(settings, now_ns)
        self._wire = socket_factory.open()
        self._outgoing = SendQueue(self._wire)
        self._run_actions(self.worker.start(now_ns))

    @property
    def has_exited(self) -> bool:
        return self.worker.has_exited

    def unanswered_ns(self) -> int:
        """Return the time since the last message of the broker."""
        return self.worker.unanswered_ns(self._clock.monotonic_ns())

    def shut_down(self) -> None:
        """Take no more jobs, and exit after the current job."""
        self.worker.stopping = True

    def stop_running(self) -> None:
        """Stop the current job, and return it to the broker."""
        self._run_actions(self.worker.stop_running())

    def turn(self) -> None:
        """Receive, run and send. Never blocks."""
        worker, clock = self.worker, self._clock
        while not worker.has_exited and (frames := self._wire.receive()) is not None:
            self._run_actions(worker.take(frames, clock.monotonic_ns()))
        for done in self._runner.turn():
            name, now_ns = done.job.name, clock.monotonic_ns()
            self._run_actions(worker.done(name, done.outcome, done.content, now_ns))
        if not worker.has_exited:
            self._outgoing.flush()
            self._run_actions(worker.time_passed(clock.monotonic_ns()))

    def wake_at_ns(self) -> int:
        """Return when the next turn is due without input."""
        times = [self.worker.wake_at_ns()]
        if self._outgoing.is_blocked:
            times.append(self._clock.monotonic_ns() + RESEND_NS)
        runner_ns = self._runner.wake_at_ns()
        return min(times if runner_ns is None else [*times, runner_ns])

    def _run_actions(self, actions: Iterable[ping_pong_peer.Action]) -> None:
        for action in actions:
            if isinstance(action, ping_pong_peer.Send):
                if action.is_droppable:
                    self._wire.send(action.frames)
                else:
                    self._outgoing.send(action.frames)
            elif isinstance(action, ping_pong_peer.Start):
                service = self._settings.service
                self._runner.start(Job(action.name, _ATTEMPT, service, action.payload))
            elif isinstance(action, ping_pong_peer.Stop):
                self._runner.stop(action.name, _ATTEMPT)
            elif isinstance(action, ping_pong_peer.Reconnect):
                self._socket_factory.close(self._wire)
                self._wire = self._socket_factory.open()
                self._outgoing = SendQueue(self._wire)
            else:
                logger.warning(action.text)


class PolledSockets:
    """The sockets of all loops. Implements `SocketFactory`, and polls them."""

    def __init__(self, endpoint: str, poller: Poller, key: PeerKey | None = None) -> None:
        self._endpoint = endpoint
        self._poller = poller
        self._key = key
        self._connections: list[ZmqSocket] = []

    def open(self) -> ZmqSocket:
        wire = sockets.connect(self._endpoint, self._key)
        self._connections.append(wire)
        self._poller.add(wire)
        return wire

    def close(self, transport: Transport) -> None:
        for wire in [one for one in self._connections if one is transport]:
            self._connections.remove(wire)
            self._poller.remove(wire)
            wire.close()

    def address(self) -> str:
        """Return the address of the broker, or nothing while none of several is connected."""
        return next((wire.address for wire in self._connections if wire.address), "")

    def check_accepted(self, unanswered_ns: int) -> None:
        """Raise `Refused` if the broker has refused the key."""
        for wire in self._connections:
            wire.check_accepted(unanswered_ns)

    def close_all(self) -> None:
        for wire in [*self._connections]:
            self.close(wire)


class PingPongGroup:
    """The loops of one process, one per slot, as the host drives them."""

    def __init__(
        self,
        loops: Sequence[PingPongWorkerLoop],
        endpoint: str,
        announce: Callable[[str], None],
        opened: PolledSockets,
    ) -> None:
        self._loops = loops
        self._endpoint = endpoint
        self._opened = opened
        self._announcer = Announcer(shown(default_name()), announce)

    @property
    def has_exited(self) -> bool:
        return not self._running()

    def turn(self) -> bool:
        for loop in self._running():
            loop.turn()
        if self._running():
            self._opened.check_accepted(min(loop.unanswered_ns() for loop in self._running()))
        missing_ns = ping_pong_peer.Settings().broker_timeout_ns * 2
        connected = [one for one in self._loops if one.unanswered_ns() <= missing_ns]
        self._announcer.connection(
            self._endpoint,
            connected=any(one.worker.was_connected for one in connected),
            missing=not connected,
            address=self._opened.address(),
        )
        return False

    def wake_at_ns(self) -> int:
        return min(loop.wake_at_ns() for loop in self._running())

    def shut_down(self) -> None:
        """Exit after the running jobs. Called again, stop them and return them."""
        loops = self._running()
        if all(loop.worker.stopping for loop in loops):
            for loop in loops:
                loop.stop_running()
            return
        for loop in loops:
            loop.shut_down()
        self._announcer.finishing(sum(loop.worker.is_working for loop in loops))

    def _running(self) -> list[PingPongWorkerLoop]:
        return [loop for loop in self._loops if not loop.has_exited]


def serve(  # noqa: PLR0913  # the last arguments are named
    endpoint: str,
    make_runner: Callable[[Clock], ProcessRunner],
    announce: Callable[[str], None],
    *,
    slots: int = 1,
    key: PeerKey | None = None,
    until_eof: bool = False,
) -> None:
    """Work for a broker until a signal, or until the broker sends EXIT.

    Each of the `slots` workers has its own connection and runner. `announce` takes lines for
    the user. Raises `Refused` if the broker refuses the key.
    """
    with Host(until_eof=until_eof) as host:
        socket_factory = PolledSockets(endpoint, host.poller, key)
        host.callback(socket_factory.close_all)
        loops = [
            PingPongWorkerLoop(
                ping_pong_peer.Settings(),
                socket_factory,
                host.add_resource(make_runner(host.clock)),
                host.clock,
            )
            for _ in range(slots)
        ]
        host.run(PingPongGroup(loops, endpoint, announce, socket_factory))
