"""The native worker as a process: socket, runner, announcements and logs around its loop.

Without a broker the worker waits for one. During a shutdown it waits for a limited time only: the
tasks that it could not report run again when their leases expire.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.errors import NameLost
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.host import Host
from taskyard.worker.agents.runner import AgentRunner
from taskyard.worker.announcer import Announcer
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.runner import make_runner
from taskyard.worker.spool import OutputSpool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from taskyard.net.keys import PeerKey
    from taskyard.net.sockets import ZmqSocket
    from taskyard.worker.agents.rules import AgentSettings
    from taskyard.worker.jobs import Runner
    from taskyard.worker.settings import WorkerSettings

logger = logging.getLogger("taskyard.worker")

#: How long to wait for the reply to `Exit`.
EXIT_NS_MAX: Final = 2 * SECOND_NS

#: Announce that the broker is missing after this time without a reply.
BROKER_MISSING_NS: Final = 2 * SECOND_NS


class WorkerMonitor:
    """A worker loop with its announcements and logs."""

    def __init__(
        self,
        loop: NativeWorkerLoop,
        channel: Channel,
        runner: Runner,
        settings: WorkerSettings,
        announce: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._runner = runner
        self._settings = settings
        self._name = shown(settings.name)
        self._announcer = Announcer(self._name, announce)
        self._refusal_logged = ""
        self._waits_for_name = False
        self.has_exited = False

    def after_turn(self, endpoint: str) -> None:
        """Announce and log changes of the turn.

        Raises `NameLost` if the broker gave the name to another process.
        """
        missing = self._channel.unanswered_ns() > BROKER_MISSING_NS
        connected = self._channel.was_connected and not missing
        self._announcer.connection(endpoint, connected=connected, missing=missing)
        self._log_refusal()
        self.has_exited = self._loop.has_exited or self._should_give_up()

    def shut_down(self) -> None:
        """Exit after the running tasks. Called again, return them to the broker."""
        if not self._loop.stopping:
            self._loop.shut_down()
            self._announcer.finishing(len(self._runner.running()))
        elif running := self._runner.running():
            self._announcer.stopping()
            self._loop.stop_running(running)

    def _log_refusal(self) -> None:
        if self._loop.name_lost:
            raise NameLost(self._loop.name_lost)
        if self._waits_for_name and not self._loop.waits_for_name:
            logger.warning("worker %s: holds its name now", self._name)
        self._waits_for_name = self._loop.waits_for_name
        if self._loop.refusal != self._refusal_logged:
            self._refusal_logged = self._loop.refusal
            if self._refusal_logged:
                logger.warning("worker %s: %s", self._name, self._refusal_logged)

    def _should_give_up(self) -> bool:
        """Return whether to exit without a reply: only reports and `Exit` are left to send."""
        if not self._loop.stopping or self._runner.running():
            return False
        unanswered_ns = self._channel.unanswered_ns()
        if not self._loop.held:
            return unanswered_ns > EXIT_NS_MAX
        if unanswered_ns <= self._settings.lease_timeout_ns:
            return False
        self._announcer.unreported(self._loop.held)
        return True


class SocketWorker(WorkerMonitor):
    """A native worker on a socket, as the host drives it."""

    wire: ZmqSocket

    def turn(self) -> bool:
        self._loop.turn()
        self.wire.check_accepted(self._channel.unanswered_ns())
        self.after_turn(self.wire.endpoint)
        return False

    def wake_at_ns(self) -> int:
        return self._loop.wake_at_ns()


def serve(  # noqa: PLR0913  # the last ones are named
    endpoint: str,
    settings: WorkerSettings,
    allow: Sequence[str],
    announce: Callable[[str], None],
    *,
    key: PeerKey | None = None,
    command: Sequence[str] | None = None,
    agents: AgentSettings | None = None,
    env: Mapping[str, str] | None = None,
    allow_pickle: bool = False,
    gpus: Sequence[str] = (),
    until_eof: bool = False,
) -> None:
    """Work for a broker until a signal, or until the broker drains this worker.

    `announce` takes lines for the user. `command` runs tasks of services without a payload format.
    `agents` take all tasks, with `env` added to their environment. Without both, the broker's rules
    name the agents of each service. `gpus` are the ids of the GPUs among its resources.

    Raises `Refused` if the broker refuses the key, `NameLost` if it gave the name to another
    process.
    """
    with Host(until_eof=until_eof) as host:
        slots, rule_runner = settings.slots, None
        spool = OutputSpool(host.clock.monotonic_ns)
        shared: Any = {"allow_pickle": allow_pickle, "gpus": gpus, "spool": spool}
        if command is None:
            rule_runner = AgentRunner(slots, host.clock, agents, allow=allow, env=env, **shared)
        runner = host.add_resource(
            rule_runner or make_runner(slots, host.clock, command, allow, **shared)
        )
        wire = host.add_socket(sockets.connect(endpoint, key, counts=True))
        channel = Channel(wire, host.clock)
        loop = NativeWorkerLoop(settings, channel, runner, host.clock, rule_runner, spool=spool)
        if rule_runner is not None:
            rule_runner.on_output = loop.set_progress
        worker = SocketWorker(loop, channel, runner, settings, announce)
        worker.wire = wire
        host.run(worker)
