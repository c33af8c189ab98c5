"""A worker that speaks WMP: sockets, signals and the runner around the machine of `wire.wmp.peer`.

It works for any number of managers, each by a wire of its own or behind a relay. What a task of
`exec` or `call` is to do is in its payload, as everywhere; tasks of other services are of that form
too, or they are fed to one program: payload on stdin, result on stdout.

SIGTERM and SIGINT let it leave: it takes no more tasks, gives back what it has not begun, finishes
what runs, and says goodbye. A second one ends what runs and gives that back too. It leaves by
itself when all managers have sent it home.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.errors import NameLost
from taskyard.net import sockets
from taskyard.net.protocols import SystemClock
from taskyard.wire.wmp import peer as wmp_peer
from taskyard.worker.host import Announcer, WorkerHost
from taskyard.worker.jobs import Job
from taskyard.worker.runner import make_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.net.protocols import MonotonicClock, Transport
    from taskyard.net.sockets import ZmqSocket
    from taskyard.worker.jobs import JobResult, Runner
    from taskyard.worker.settings import WorkerSettings

logger = logging.getLogger("taskyard.worker")

#: What the protocol calls the ends of a task. It has no word for a failure that is for good.
STATUSES: Final = {
    Outcome.DONE: "ok",
    Outcome.FAILED: "error",
    Outcome.FAILED_FINAL: "error",
    Outcome.REFUSED: "refused",
}

#: Messages taken from one wire before the next one has its turn.
MESSAGES_PER_TURN: Final = 64

#: A wire on which nobody was heard for so long is missed aloud: managers are asked every second,
#: but less often when they do not answer.
BROKER_MISSING_NS: Final = 10 * SECOND_NS

#: How long a goodbye may take to leave: nobody answers it.
EXIT_LINGER_MS: Final = 500


class WmpWorkerLoop:
    """One worker; its wires, hands and clock are given to it."""

    def __init__(
        self,
        settings: WorkerSettings,
        connections: Sequence[Transport],
        runner: Runner,
        clock: MonotonicClock,
    ) -> None:
        self._connections = list(connections)
        self._runner = runner
        self._clock = clock
        now_ns = clock.monotonic_ns()
        me = wmp_peer.Settings(
            worker=settings.name,
            services=settings.services,
            slots=settings.slots,
            incarnation=settings.incarnation,
            heartbeat_ns=settings.heartbeat_ns,
            replaces=settings.replaces,
        )
        self.worker = wmp_peer.Worker(me, len(self._connections), now_ns)
        #: When something was heard on each wire; None: never yet.
        self.last_received_ns: list[int | None] = [None] * len(self._connections)

    @property
    def has_exited(self) -> bool:
        return self.worker.gone

    def turn(self) -> bool:
        """Once around: never waits. Whether there may be more to take in."""
        left = False
        for number in range(len(self._connections)):
            left = self._receive(number) or left
        for done in self._runner.turn():
            self._report(done)
        now_ns = self._clock.monotonic_ns()
        if self.worker.is_dismissed and not self.worker.leaving:
            self.shut_down()
        self._run_actions(self.worker.time_passed(now_ns))
        return left

    def wake_at_ns(self) -> int | None:
        """When the next turn is due though nothing arrives."""
        times = [self.worker.wake_at_ns(), self._runner.wake_at_ns()]
        return min((time for time in times if time is not None), default=None)

    def shut_down(self) -> None:
        """Take no more tasks, give back what is not begun, and go when the rest is done."""
        self._run_actions(self.worker.leave(self._clock.monotonic_ns()))
        self._return_tasks(self._runner.unstarted())

    def stop_running(self, jobs: Sequence[Job]) -> None:
        """End what runs, and give it back."""
        for job in jobs:
            self._runner.stop(*job.key)
        self._return_tasks(jobs)

    def _receive(self, number: int) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            frames = self._connections[number].receive()
            if frames is None:
                return False
            now_ns = self._clock.monotonic_ns()
            self.last_received_ns[number] = now_ns
            self._run_actions(self.worker.take(number, frames, now_ns))
        return True

    def _report(self, done: JobResult) -> None:
        if done.output:
            printed = done.output.decode(errors="replace")
            self._run_actions(self.worker.progressed(done.job.key, text=printed))
        self._finish(done.job, STATUSES[done.outcome], done.text, done.result_bytes_total)

    def _return_tasks(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._finish(job, "refused", b"the worker leaves")

    def _finish(self, job: Job, status: str, text: bytes, bytes_total: int = 0) -> None:
        now_ns = self._clock.monotonic_ns()
        self._run_actions(self.worker.done(job.key, status, text, now_ns, bytes_total))

    def _run_actions(self, actions: Iterable[wmp_peer.Action]) -> None:
        for order in actions:
            if isinstance(order, wmp_peer.Send):
                self._connections[order.wire].send(order.frames)  # what is lost is said again
            elif isinstance(order, wmp_peer.Stop):
                self._runner.stop(order.name, order.attempt)
            else:
                self._runner.start(
                    Job(
                        *(order.name, order.attempt, order.service, order.payload),
                        time_limit_ns=order.time_limit_ns,
                        slots=order.slots,
                    )
                )


class WmpWorker:
    """A worker loop with its announcements and logs, as the host drives it."""

    def __init__(
        self,
        loop: WmpWorkerLoop,
        connections: Sequence[ZmqSocket],
        runner: Runner,
        name: str,
        announce: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._connections = connections
        self._runner = runner
        self._name = name
        self._announcer = Announcer(name, announce, peer="manager")
        self._since_ns = SystemClock.monotonic_ns()
        self._waits_for_name = False

    @property
    def has_exited(self) -> bool:
        return self._loop.has_exited

    def turn(self) -> bool:
        more = self._loop.turn()
        if self._loop.worker.name_lost:
            raise NameLost(self._loop.worker.name_lost)
        self._watch_managers()
        self._watch_name()
        if self._loop.has_exited:
            self._flush_exit()
        return more

    def wake_at_ns(self) -> int | None:
        return self._loop.wake_at_ns()

    def shut_down(self) -> None:
        """Exit after the running tasks. Called again, return them to their managers."""
        if not self._loop.worker.leaving:
            self._loop.shut_down()
            self._announcer.finishing(len(self._runner.running()))
        elif running := self._runner.running():
            self._announcer.stopping()
            self._loop.stop_running(running)

    def _watch_managers(self) -> None:
        now_ns = SystemClock.monotonic_ns()
        for wire, received_ns in zip(self._connections, self._loop.last_received_ns, strict=True):
            missing = now_ns - (received_ns or self._since_ns) > BROKER_MISSING_NS
            connected = received_ns is not None and not missing
            self._announcer.connection(wire.endpoint, connected=connected, missing=missing)

    def _watch_name(self) -> None:
        """Log once that another process holds this worker's name, and once that it is free."""
        held_by_other = self._loop.worker.name_held
        if held_by_other and not self._waits_for_name:
            logger.warning("worker %s: refused by the manager: %s", self._name, held_by_other)
        elif self._waits_for_name and not held_by_other:
            logger.warning("worker %s: holds its name now", self._name)
        self._waits_for_name = bool(held_by_other)

    def _flush_exit(self) -> None:
        """Let the last messages leave, or a manager would have to wait for the lease to expire."""
        for wire in self._connections:
            wire.socket.linger = EXIT_LINGER_MS


def serve(  # noqa: PLR0913  # the last ones are named
    endpoints: Sequence[str],
    settings: WorkerSettings,
    allow: Sequence[str],
    announce: Callable[[str], None],
    *,
    command: Sequence[str] | None = None,
    allow_pickle: bool = False,
    until_eof: bool = False,
) -> None:
    """Work for managers until a signal, or until all of them have dismissed this worker.

    `announce` takes lines for the user. `command` runs tasks of services without a payload format.
    Raises `NameLost` if a manager gave the name to another process.
    """
    with WorkerHost(until_eof=until_eof) as host:
        runner = host.add_runner(
            make_runner(settings.slots, host.clock, command, allow, allow_pickle=allow_pickle)
        )
        connections = [host.add_socket(sockets.connect(one)) for one in endpoints]
        loop = WmpWorkerLoop(settings, connections, runner, host.clock)
        host.run(WmpWorker(loop, connections, runner, shown(settings.name), announce))
