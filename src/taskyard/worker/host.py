"""The worker as a process: sockets, signals and the runner around its loop.

SIGTERM and SIGINT let it leave: it takes no more tasks, gives back what it has not begun, finishes
what runs, and says goodbye. A second one ends what runs and gives that back too. Without a broker
it waits for one, except that it does not stay for ever to deliver its last reports.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import NAME_BYTES_MAX, SECOND_NS
from taskyard.core.model import shown
from taskyard.errors import NameLost, UserError
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.leash import ParentPipe
from taskyard.net.poller import Poller
from taskyard.net.protocols import SystemClock
from taskyard.net.signals import Signals
from taskyard.wire.roles import Role, may_act_as, with_article
from taskyard.worker.agents.runner import AgentRunner
from taskyard.worker.native import NativeWorkerLoop, WorkerSettings
from taskyard.worker.runner import make_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from taskyard.net.keys import PeerKey
    from taskyard.worker.agents.runner import AgentSettings
    from taskyard.worker.runner import ProcessRunner

logger = logging.getLogger("taskyard.worker")

#: How long to wait for a broker that does not answer a goodbye.
EXIT_NS_MAX: Final = 2 * SECOND_NS

#: A broker that was not heard for so long is missed aloud.
BROKER_MISSING_NS: Final = 2 * SECOND_NS

#: How much of a name that is no good is shown.
_SHOWN: Final = 40


def name_of_this_process() -> bytes:
    """A worker's name if nobody gives one: where it runs, and which process it is."""
    return f"{socket.gethostname()}-{os.getpid()}".encode()


def name_for_key(key: PeerKey | None, name: str | None) -> str | None:
    """The name under which this key lets it work; None: the usual one. Raises UserError."""
    if key is None or key.role is Role.ADMIN:
        return name
    if key.role is not Role.WORKER:
        raise UserError(
            f"the key {key.name} is {with_article(key.role)}'s, and can't be worked with; make a "
            "worker's with `taskyard keys new NAME --role worker`"
        )
    if name is None:
        return f"{key.name}/{name_of_this_process().decode()}"
    if not may_act_as(key.name, name.encode(errors="surrogateescape")):
        raise UserError(
            f"the key {key.name} is for workers named {key.name} or {key.name}/…, not for "
            f"{name[:_SHOWN]!r}; give such a --name, or none"
        )
    return name


def worker_settings(
    slots: int, services: Sequence[str], name: str | None = None, **more: int
) -> WorkerSettings:
    """Raises UserError where a broker would refuse whatever such a worker says."""
    return WorkerSettings(
        name=_encode_name("name", name) if name is not None else name_of_this_process(),
        services=tuple(_encode_name("service", service) for service in services),
        slots=slots,
        host=socket.gethostname().encode(errors="replace")[:NAME_BYTES_MAX],
        pid=os.getpid(),
        incarnation=more.pop("incarnation", 0) or 1 + secrets.randbits(61),
        **more,
    )


def _encode_name(what: str, given: str) -> bytes:
    encoded = given.encode(errors="surrogateescape")
    if not 0 < len(encoded) <= NAME_BYTES_MAX:
        raise UserError(
            f"a worker's {what} must have 1 to {NAME_BYTES_MAX} bytes, this one has "
            f"{len(encoded)}: {given[:_SHOWN]!r}"
        )
    return encoded


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
    until_eof: bool = False,
) -> None:
    """Work for a broker until told to stop, or sent home. `announce` is told what a user should
    know. `command` is fed the tasks that don't say what to do, `agents` are fed all of them.
    Without them the broker says which agents are fed with which tasks. Agents find `env` in their
    environment.

    Raises `Refused` if the broker does not want the key, `NameLost` if it has given the name to
    another process. With `until_eof` the end of stdin ends it at once: its owner was killed.
    """
    with ExitStack() as stack:
        clock = SystemClock()
        signals = stack.enter_context(Signals())
        slots, host = settings.slots, None
        if command is None:
            host = AgentRunner(
                slots, clock, agents, allow=allow, allow_pickle=allow_pickle, env=env
            )
        runner = host or make_runner(slots, clock, command, allow, allow_pickle=allow_pickle)
        stack.enter_context(closing(runner))
        wire = stack.enter_context(closing(sockets.connect(endpoint, key, counts=True)))
        channel = Channel(wire, clock)
        loop = NativeWorkerLoop(settings, channel, runner, clock, host)
        if host is not None:
            host.on_output = loop.set_progress
        monitor = WorkerMonitor(loop, channel, runner, settings, announce)
        parent_pipe = ParentPipe() if until_eof else None
        parent = [] if parent_pipe is None else [parent_pipe.fileno()]
        poller = _poller(wire, signals.fileno(), *runner.filenos(), *parent)
        while not loop.has_exited and not monitor.should_give_up():
            ready = poller.wait(max(0, loop.wake_at_ns() - clock.monotonic_ns()))
            if parent_pipe is not None and _is_orphaned(parent_pipe, ready):
                return
            for _ in signals.received() if signals.fileno() in ready else ():
                monitor.shut_down()
            loop.turn()
            wire.check_accepted(channel.unanswered_ns())
            monitor.watch_broker(endpoint)
            monitor.log_refusal()


def _is_orphaned(parent_pipe: ParentPipe, ready: Sequence[object]) -> bool:
    """Return whether the process that started this one has ended."""
    return parent_pipe.fileno() in ready and parent_pipe.is_closed()


def _poller(*things: sockets.ZmqSocket | int) -> Poller:
    poller = Poller()
    for thing in things:
        poller.add(thing)
    return poller


class WorkerMonitor:
    """What a worker does about a broker that is not there, and about its own leaving."""

    def __init__(
        self,
        loop: NativeWorkerLoop,
        channel: Channel,
        runner: ProcessRunner,
        settings: WorkerSettings,
        announce: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._runner = runner
        self._settings = settings
        self._announce = announce
        #: What was said last of the broker: it is there, it is not; None: nothing yet.
        self._broker_seen: bool | None = None
        #: What was logged last of the broker's refusals.
        self._refusal_logged = ""
        self._waits_for_name = False

    def watch_broker(self, endpoint: str) -> None:
        """Say once that the broker is not there, and once that it is."""
        silent = self._channel.unanswered_ns() > BROKER_MISSING_NS
        broker_seen = self._channel.was_connected and not silent
        if broker_seen is self._broker_seen or (not broker_seen and not silent):
            return
        if broker_seen:
            self._announce(f"worker {self._name()} works for the broker at {endpoint}")
        else:
            self._announce(f"no broker answers at {endpoint}; worker {self._name()} waits for one")
        self._broker_seen = broker_seen

    def log_refusal(self) -> None:
        """Log once why the broker refuses this worker, and that it got its name at last.

        Raises `NameLost` where the name was given to another process.
        """
        if self._loop.name_lost:
            raise NameLost(self._loop.name_lost)
        if self._waits_for_name and not self._loop.waits_for_name:
            logger.warning("worker %s: it holds its name now", self._name())
        self._waits_for_name = self._loop.waits_for_name
        if self._loop.refusal != self._refusal_logged:
            self._refusal_logged = self._loop.refusal
            if self._refusal_logged:
                logger.warning("worker %s: %s", self._name(), self._refusal_logged)

    def shut_down(self) -> None:
        """Go when what runs is done; asked again, give that back too."""
        running = self._runner.running()
        if not self._loop.stopping:
            self._loop.shut_down()
            running = self._runner.running()
            if running:
                self._announce(
                    f"worker {self._name()} leaves when {_count_text(len(running))} done; once "
                    "more ends what runs"
                )
        elif running:
            self._announce(f"worker {self._name()} ends what runs and gives it back")
            self._loop.stop_running(running)

    def should_give_up(self) -> bool:
        """It has nothing to do but to report and to say goodbye, and nobody listens."""
        if not self._loop.stopping or self._runner.running():
            return False
        unanswered_ns = self._channel.unanswered_ns()
        if not self._loop.held:
            return unanswered_ns > EXIT_NS_MAX
        if unanswered_ns <= self._settings.lease_timeout_ns:
            return False
        self._announce(
            f"worker {self._name()} leaves without a broker to report to: "
            f"{_count_text(self._loop.held)} to be done again"
        )
        return True

    def _name(self) -> str:
        return shown(self._settings.name)


def _count_text(count: int) -> str:
    return "1 task is" if count == 1 else f"{count} tasks are"
