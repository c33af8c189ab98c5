"""The native worker as a process: socket, runner, announcements and logs around its loop.

With several brokers there is a worker for each, and they share the slots of the process. Without a
broker the worker waits. During a shutdown it waits for a limited time only: tasks that it could not
report run again when their leases expire.
"""

from __future__ import annotations

import logging
import select
import time
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from taskyard.calls.current_task import WORKER_VARIABLE
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal, counted, shown
from taskyard.core.resources import CPUS
from taskyard.errors import NameLost, Refused
from taskyard.net import sockets
from taskyard.net.channel import Channel
from taskyard.net.host import Host
from taskyard.worker.agents.runner import AgentRunner
from taskyard.worker.call_process import CallOptions
from taskyard.worker.native import NativeWorkerLoop
from taskyard.worker.output import OutputSpool
from taskyard.worker.runner import ProcessRunner
from taskyard.worker.slots import SlotBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from taskyard.net.keys import PeerKey
    from taskyard.net.zmq_socket import ZmqSocket
    from taskyard.worker.agents.rules import AgentSettings
    from taskyard.worker.jobs import Runner
    from taskyard.worker.settings import WorkerSettings
    from taskyard.worker.slots import Share


class Announcer:
    """Announces to the user whether a broker answers, and the steps of a shutdown."""

    def __init__(self, name: str, announce: Callable[[str], None], *, peer: str = "broker") -> None:
        self._name = name
        self._announce = announce
        self._peer = peer
        #: The last announcement for each endpoint: the address that answers, or that none does.
        self._answering: dict[str, str] = {}

    def connection(
        self, endpoint: str, *, connected: bool, missing: bool, address: str = ""
    ) -> None:
        """Announce once that a broker answers, and once that it is `missing`.

        A broker may be neither: it has not answered yet, and it is too early to miss it. If it
        has several addresses, it is announced again at another `address`.
        """
        found = (address or self._answering.get(endpoint) or endpoint) if connected else ""
        if found == self._answering.get(endpoint) or not (connected or missing):
            return
        self._answering[endpoint] = found
        if connected:
            self._announce(f"worker {self._name} works for the {self._peer} at {found}")
        else:
            self._announce(f"no {self._peer} answers at {endpoint}, worker {self._name} waits")

    def finishing(self, tasks: int) -> None:
        """Announce that the worker exits after its running tasks, if there are any."""
        if tasks:
            self._announce(
                f"worker {self._name} exits after {counted(tasks, 'task')} (a second signal stops "
                f"{'it' if tasks == 1 else 'them'})"
            )

    def stopping(self) -> None:
        """Announce that running tasks are stopped and returned."""
        self._announce(f"worker {self._name} stops its running tasks and returns them")

    def unreported(self, tasks: int) -> None:
        """Announce that the worker exits though it could not report tasks."""
        self._announce(
            f"worker {self._name} exits without a {self._peer} to report to: "
            f"{counted(tasks, 'task')} will run again"
        )


logger = logging.getLogger("taskyard.worker")

#: How long to wait for the reply to `Exit`.
EXIT_NS_MAX: Final = 2 * SECOND_NS

#: How long to run quick tasks without receiving, while their reports wait for more. A turn of the
#: whole loop costs as much as the start of a program. Messages and signals wait meanwhile.
GATHER_NS_MAX: Final = SECOND_NS // 50

_MILLISECOND_NS: Final = SECOND_NS // 1000

#: How often to check a connection that is announced and carries replies.
CHECK_NS: Final = SECOND_NS // 4

#: Announce that the broker is missing after this time without a reply.
BROKER_MISSING_NS: Final = 2 * SECOND_NS


class WorkerMonitor:
    """A worker loop with its announcements and logs."""

    def __init__(
        self,
        loop: NativeWorkerLoop,
        channel: Channel,
        runner: Runner,
        announce: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self.wake_at_ns = loop.wake_at_ns
        self._channel = channel
        self._runner = runner
        #: The name in logs, with the broker if there are several.
        self.log_name = shown(loop.settings.name)
        self._announcer = Announcer(self.log_name, announce)
        self._refusal_logged = ""
        self._waits_for_name = False
        self.has_exited = False
        #: When to check the connection again. 0: in each turn.
        self._check_due_ns = 0

    def is_steady(self) -> bool:
        """Return whether there is nothing to announce, to log or to check in this turn."""
        loop = self._loop
        if loop.stopping or loop.refusal != self._refusal_logged:
            return False
        is_same = loop.waits_for_name == self._waits_for_name
        return is_same and time.monotonic_ns() < self._check_due_ns

    def after_turn(self, endpoint: str, address: str = "") -> None:
        """Announce and log changes of the turn. `address` is where a broker with
        several addresses is now.

        Raises `NameLost` if the broker gave the name to another process, `Refused` if it refuses
        the key.
        """
        missing = self._channel.unanswered_ns() > BROKER_MISSING_NS
        connected = self._channel.was_connected and not missing
        self._announcer.connection(endpoint, connected=connected, missing=missing, address=address)
        self._log_refusal()
        self._check_due_ns = time.monotonic_ns() + CHECK_NS if connected else 0
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
        if self._loop.forbidden:
            raise Refused(
                f"worker {self.log_name}: {self._loop.forbidden}", Refusal.FORBIDDEN.value
            )
        if self._waits_for_name and not self._loop.waits_for_name:
            logger.warning("worker %s: holds its name now", self.log_name)
        self._waits_for_name = self._loop.waits_for_name
        if self._loop.refusal != self._refusal_logged:
            self._refusal_logged = self._loop.refusal
            if self._refusal_logged:
                logger.warning("worker %s: %s", self.log_name, self._refusal_logged)

    def _should_give_up(self) -> bool:
        """Return whether to exit without a reply: only reports and `Exit` are left to send."""
        if not self._loop.stopping or self._runner.running():
            return False
        unanswered_ns = self._channel.unanswered_ns()
        if not self._loop.held:
            return unanswered_ns > EXIT_NS_MAX
        if unanswered_ns <= self._loop.settings.lease_timeout_ns:
            return False
        self._announcer.unreported(self._loop.held)
        return True


def run_quick_tasks(loop: NativeWorkerLoop, runner_poll: select.poll) -> None:
    """Run tasks, without receiving, while reports wait for more. Ends soon.

    `runner_poll` is ready when a process of the runner has ended or printed.
    """
    until_ns = time.monotonic_ns() + GATHER_NS_MAX
    while loop.is_gathering():
        left_ns = until_ns - time.monotonic_ns()
        if left_ns <= 0 or not runner_poll.poll(left_ns / _MILLISECOND_NS):
            return
        loop.run_tasks()


class SocketWorker(WorkerMonitor):
    """A native worker on a socket, as the host drives it."""

    wire: ZmqSocket
    host: Host
    #: Ready when a process of the runner has ended or printed. None: it runs no quick tasks.
    runner_poll: select.poll | None = None
    #: The part of a process that works for several brokers.
    share: Share | None = None

    def turn(self) -> bool:
        # A socket that is not ready is not asked.
        has_reports = (
            self._loop.receive() if self.wire in self.host.ready else self._loop.run_tasks()
        )
        if has_reports and self.runner_poll is not None:
            run_quick_tasks(self._loop, self.runner_poll)
        self.send()
        return False

    def receive(self) -> None:
        """Receive, and run tasks. The first half of a turn."""
        self._loop.receive()

    def send(self) -> None:
        """Send, announce and log. Raises `Refused` if the broker refuses this worker."""
        self._loop.send()
        if not self.is_steady():
            self.wire.check_accepted(self._channel.unanswered_ns())
            self.after_turn(self.wire.endpoint, self.wire.address)

    def abandon(self) -> Runner:
        """Exit without the broker, and stop all tasks. Return the runner, which ends them."""
        self.has_exited = True
        self._runner.unstarted()
        for job in self._runner.running():
            self._runner.stop(*job.key)
        return self._runner


class BrokerTarget(NamedTuple):
    """A broker to work for, and the worker's settings there."""

    endpoint: str
    key: PeerKey | None
    settings: WorkerSettings
    #: Variables for its tasks: the broker, and the key file.
    task_env: Mapping[str, str] = {}


class WorkerOptions(NamedTuple):
    """How to run tasks, for any broker."""

    #: Modules whose functions may be called, and whether pickled functions are, too.
    allow: Sequence[str] = ()
    allow_pickle: bool = False
    #: Start the processes for functions with the worker, not with the first tasks.
    starts_children: bool = False
    call_options: CallOptions = CallOptions()
    #: Runs tasks of services without a payload format.
    command: Sequence[str] | None = None
    #: Take all tasks. Without them and `command`, a broker's rules name the agents of a service.
    agents: AgentSettings | None = None
    #: Added to the environment of agents.
    env: Mapping[str, str] | None = None
    #: The ids of the GPUs among the resources.
    gpus: Sequence[str] = ()


class _BrokerWorkers:
    """The workers of several brokers in one process, as the host drives them."""

    def __init__(self, workers: Sequence[SocketWorker], budget: SlotBudget) -> None:
        self._workers = [*workers]
        self._budget = budget
        #: Runners of workers that a broker refuses. They end their tasks.
        self._refused: list[Runner] = []
        self._turns = 0

    @property
    def has_exited(self) -> bool:
        return all(worker.has_exited for worker in self._workers)

    def turn(self) -> bool:
        """Let all receive first. The worker with the fewest slots sends first."""
        for worker in self._live():
            worker.receive()
        for runner in self._refused:
            runner.turn()
        self._turns += 1
        first = self._turns % len(self._workers)
        rotated = self._workers[first:] + self._workers[:first]
        for worker in sorted(rotated, key=lambda one: one.share.slots_taken() if one.share else 0):
            if not worker.has_exited:
                self._send(worker)
        return self._budget.has_freed()

    def _send(self, worker: SocketWorker) -> None:
        """End a worker whose key or name its broker refuses. Raises if no other is left."""
        try:
            worker.send()
        except Refused as refused:
            if len(self._live()) <= 1:
                raise
            endpoint = worker.wire.endpoint
            logger.warning("broker at %s: %s: works for the other brokers only", endpoint, refused)
            self._refused.append(worker.abandon())

    def _live(self) -> list[SocketWorker]:
        return [worker for worker in self._workers if not worker.has_exited]

    def wake_at_ns(self) -> int | None:
        times = [worker.wake_at_ns() for worker in self._live()]
        times += [time for one in self._refused if (time := one.wake_at_ns()) is not None]
        return min(times, default=None)

    def shut_down(self) -> None:
        for worker in self._live():
            worker.shut_down()


def serve(
    brokers: Sequence[BrokerTarget],
    options: WorkerOptions,
    announce: Callable[[str], None],
    *,
    until_eof: bool = False,
) -> None:
    """Work for brokers until a signal, or until all of them have drained this worker.

    `announce` takes lines for the user. Raises `Refused` if a broker refuses the key, `NameLost` if
    it gave the name to another process. Of several brokers, this is logged until none is left.
    """
    with Host(until_eof=until_eof) as host:
        if len(brokers) == 1:
            host.run(_make_worker(host, brokers[0], options, announce))
            return
        settings = brokers[0].settings
        budget = SlotBudget(settings.slots, settings.resources, options.gpus, host.clock)
        workers = [_make_worker(host, one, options, announce, budget.add()) for one in brokers]
        host.run(_BrokerWorkers(workers, budget))


def _make_worker(
    host: Host,
    broker: BrokerTarget,
    options: WorkerOptions,
    announce: Callable[[str], None],
    share: Share | None = None,
) -> SocketWorker:
    """Return the worker of one broker, with its socket and its runner."""
    settings = broker.settings
    spool = OutputSpool(host.clock.monotonic_ns)
    kind: Callable[..., ProcessRunner] = partial(ProcessRunner, command=options.command)
    if options.command is None:
        kind = partial(AgentRunner, program=options.agents, env=options.env)
    runner = kind(
        settings.slots,
        clock=host.clock,
        allow=options.allow,
        allow_pickle=options.allow_pickle,
        gpus=options.gpus,
        spool=spool,
    )
    rule_runner = runner if isinstance(runner, AgentRunner) else None
    host.add_resource(runner)
    runner.call_options = options.call_options
    runner.set_task_env({**broker.task_env, WORKER_VARIABLE: shown(broker.settings.name)})
    runner.cores_total = dict(settings.resources).get(CPUS, 0)
    if options.starts_children:
        runner.fork_children()  # before ZeroMQ starts its threads
    wire = host.add_socket(sockets.connect(broker.endpoint, broker.key, counts=True))
    channel = Channel(wire, host.clock)
    loop = NativeWorkerLoop(settings, channel, runner, host.clock, rule_runner, spool=spool)
    worker = SocketWorker(loop, channel, runner, announce)
    if share is not None:
        runner.use_share(share)
        loop.use_share(share)
        worker.log_name += f" at {broker.endpoint}"
    if rule_runner is not None:
        rule_runner.on_output = loop.set_progress
    worker.wire, worker.host, worker.share = wire, host, share
    worker.runner_poll = select.poll()
    for descriptor in runner.filenos():
        worker.runner_poll.register(descriptor, select.POLLIN)
    return worker
