"""The WMP worker: sockets, signals and the runner around `wire.wmp.peer`.

It works for any number of managers, each on its own connection or behind a relay. Payloads of
`exec` and `call` describe the task. Payloads of other services do too, or go to one program:
payload on stdin, result on stdout. The output of running programs goes to their managers as STATUS.
The worker exits when all managers have dismissed it.
"""

from __future__ import annotations

import logging
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from taskyard.core.blobs import Blob
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal, shown
from taskyard.errors import NameLost, Refused
from taskyard.net import sockets
from taskyard.net.host import Host
from taskyard.net.protocols import SystemClock
from taskyard.wire.wmp import peer as wmp_peer
from taskyard.worker.jobs import Job
from taskyard.worker.native_process import Announcer
from taskyard.worker.runner import ProcessRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from taskyard.net.keys import PeerKey
    from taskyard.net.protocols import MonotonicClock, Transport
    from taskyard.net.zmq_socket import ZmqSocket
    from taskyard.wire.wmp.peer import Route
    from taskyard.worker.jobs import JobResult, Runner
    from taskyard.worker.settings import WorkerSettings

logger = logging.getLogger("taskyard.worker")

#: The protocol's words for outcomes. It has none for a final failure.
STATUSES: Final = {
    Outcome.DONE: "ok",
    Outcome.FAILED: "error",
    Outcome.FAILED_FINAL: "error",
    Outcome.REFUSED: "refused",
}

#: Messages read from one connection before the next has its turn.
MESSAGES_PER_TURN: Final = 64

#: Announce a missing manager after this time. Managers are pinged every second, but less often when
#: they do not answer.
BROKER_MISSING_NS: Final = 10 * SECOND_NS

#: How often the output of running programs is sent.
PROGRESS_NS: Final = SECOND_NS

#: How long the last messages may take to leave: they have no reply.
EXIT_LINGER_MS: Final = 500


class WmpWorkerLoop:
    """A worker. Takes its connections, runner and clock as arguments."""

    #: Called with running tasks that have ended at their managers, before they are stopped.
    on_ended: Callable[[Sequence[tuple[bytes, int]]], None] | None = None

    def __init__(  # noqa: PLR0913  # the last arguments are named
        self,
        settings: WorkerSettings,
        connections: Sequence[Transport],
        runner: Runner,
        clock: MonotonicClock,
        *,
        new_output: Callable[[], list[tuple[Job, bytes]]] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """`new_output` returns the output of running tasks since its last call.

        `names` has a name for each connection, for managers that send none.
        """
        self._new_output = new_output
        self._connections = list(connections)
        self._names = names or [str(number) for number in range(len(self._connections))]
        self._runner = runner
        self._clock = clock
        now_ns = clock.monotonic_ns()
        self._progress_due_ns = now_ns + PROGRESS_NS
        me = wmp_peer.Settings(
            worker=settings.name,
            services=settings.services,
            slots=settings.slots,
            incarnation=settings.incarnation,
            heartbeat_ns=settings.heartbeat_ns,
            replaces=settings.replaces,
            forwards=settings.forwards,
            forwards_to=settings.forwards_to,
        )
        self.worker = wmp_peer.Worker(me, len(self._connections), now_ns)
        #: The time of the last message on each connection. None: never.
        self.last_received_ns: list[int | None] = [None] * len(self._connections)

    @property
    def has_exited(self) -> bool:
        return self.worker.gone

    def turn(self) -> bool:
        """Receive, run and send. Never blocks. Return whether more input waits."""
        more = False
        for number in range(len(self._connections)):
            more = self._receive(number) or more
        for done in self._runner.turn():
            self._report(done)
        now_ns = self._clock.monotonic_ns()
        self._send_progress(now_ns)
        if self.worker.is_dismissed and not self.worker.leaving:
            self.shut_down()
        self._run_actions(self.worker.time_passed(now_ns))
        return more

    def wake_at_ns(self) -> int | None:
        """Return when the next turn is due without input."""
        times = [self.worker.wake_at_ns(), self._runner.wake_at_ns()]
        if self._new_output is not None and self.worker.working:
            times.append(self._progress_due_ns)
        return min((time for time in times if time is not None), default=None)

    def set_slots(self, slots: int) -> None:
        """Use another number of slots from now on."""
        self._run_actions(self.worker.set_slots(slots, self._clock.monotonic_ns()))

    def shut_down(self) -> None:
        """Take no more tasks, return unstarted tasks, and exit after running tasks."""
        self._run_actions(self.worker.leave(self._clock.monotonic_ns()))
        self._return_tasks(self._runner.unstarted())

    def stop_running(self, jobs: Sequence[Job]) -> None:
        """Stop running tasks, and return them to their managers."""
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

    def _send_progress(self, now_ns: int) -> None:
        """Send STATUS for running tasks that have printed."""
        if self._new_output is None or now_ns < self._progress_due_ns:
            return
        self._progress_due_ns = now_ns + PROGRESS_NS
        for job, output in self._new_output():
            printed = output.decode(errors="replace")
            self._run_actions(self.worker.progressed(job.key, text=printed))

    def _report(self, done: JobResult) -> None:
        if done.output:
            printed = done.output.decode(errors="replace")
            self._run_actions(self.worker.progressed(done.job.key, text=printed))
        bytes_total = done.content.length if isinstance(done.content, Blob) else 0
        self._finish(done.job, STATUSES[done.outcome], done.text, bytes_total)

    def _return_tasks(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._finish(job, "refused", b"the worker shuts down")

    def _finish(self, job: Job, status: str, text: bytes, bytes_total: int = 0) -> None:
        now_ns = self._clock.monotonic_ns()
        self._run_actions(self.worker.done(job.key, status, text, now_ns, bytes_total))

    def _run_actions(self, actions: Iterable[wmp_peer.Action]) -> None:
        for action in actions:
            if isinstance(action, wmp_peer.Send):
                self._connections[action.wire].send(action.frames)  # the peer resends lost messages
            elif isinstance(action, wmp_peer.Stop):
                if action.ended and self.on_ended is not None:
                    self.on_ended([(action.name, action.attempt)])
                self._runner.stop(action.name, action.attempt)
            else:
                self._runner.start(
                    Job(
                        action.name,
                        action.attempt,
                        action.service,
                        action.payload,
                        time_limit_ns=action.time_limit_ns,
                        slots=action.slots,
                        submitted_ns=action.submitted_ns,
                        manager=action.owner or self._route_name(action.route),
                    )
                )

    def _route_name(self, route: Route) -> str:
        """Return a name for a manager that sends none: its connection and the relays behind it."""
        return ".".join(map(str, (self._names[route.wire], *route.back)))


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
        self._logged_refusals: set[str] = set()

    @property
    def has_exited(self) -> bool:
        return self._loop.has_exited

    def turn(self) -> bool:
        more = self._loop.turn()
        if self._loop.worker.name_lost:
            raise NameLost(self._loop.worker.name_lost)
        self._check_key()
        self._watch_managers()
        self._watch_name()
        if self._loop.has_exited:
            # Let the last messages leave, or a manager would wait for the lease to expire.
            for wire in self._connections:
                wire.send_after_close(EXIT_LINGER_MS)
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

    def _check_key(self) -> None:
        """Raise `Refused` if no manager is left because of the key. Log other refusals once."""
        worker, refused = self._loop.worker, []
        now_ns = SystemClock.monotonic_ns()
        for wire, received_ns in zip(self._connections, self._loop.last_received_ns, strict=True):
            try:
                wire.check_accepted(now_ns - (received_ns or self._since_ns))
            except Refused as error:
                refused.append(error)
        if refused and len(refused) == len(self._connections):
            raise refused[0]
        if worker.forbidden and worker.is_dismissed:
            raise Refused(worker.forbidden, Refusal.FORBIDDEN.value)
        for text in {*map(str, refused), worker.forbidden} - self._logged_refusals - {""}:
            self._logged_refusals.add(text)
            logger.warning("worker %s: %s", self._name, text)

    def _watch_managers(self) -> None:
        now_ns = SystemClock.monotonic_ns()
        for wire, received_ns in zip(self._connections, self._loop.last_received_ns, strict=True):
            missing = now_ns - (received_ns or self._since_ns) > BROKER_MISSING_NS
            connected = received_ns is not None and not missing
            self._announcer.connection(
                wire.endpoint, connected=connected, missing=missing, address=wire.address
            )

    def _watch_name(self) -> None:
        """Log once that another process holds this worker's name, and once that it is free."""
        held_by_other = self._loop.worker.name_held
        if held_by_other and not self._waits_for_name:
            logger.warning("worker %s: refused by the manager: %s", self._name, held_by_other)
        elif self._waits_for_name and not held_by_other:
            logger.warning("worker %s: holds its name now", self._name)
        self._waits_for_name = bool(held_by_other)


def serve(  # noqa: PLR0913  # the last arguments are named
    endpoints: Sequence[str],
    settings: WorkerSettings,
    allow: Sequence[str],
    announce: Callable[[str], None],
    *,
    keys: Sequence[PeerKey | None] = (),
    command: Sequence[str] | None = None,
    allow_pickle: bool = False,
    until_eof: bool = False,
) -> None:
    """Work for managers until a signal, or until all of them have dismissed this worker.

    `announce` takes lines for the user. `keys` has the key of each endpoint. `command` runs tasks
    of services without a payload format. Raises `NameLost` if a manager gave the name to another
    process, and `Refused` if the key is refused."""
    with Host(until_eof=until_eof) as host:
        runner = host.add_resource(
            ProcessRunner(
                settings.slots, allow, host.clock, command=command, allow_pickle=allow_pickle
            )
        )
        pairs = zip_longest(endpoints, keys)
        connections = [host.add_socket(sockets.connect(*pair)) for pair in pairs]
        loop = WmpWorkerLoop(
            settings, connections, runner, host.clock, new_output=runner.new_output
        )
        host.run(WmpWorker(loop, connections, runner, shown(settings.name), announce))
