"""The product's workers, as simulated processes over simulated sockets, runners and clocks.

    native       `worker.native` over a `Channel`, with `worker.native_process.WorkerMonitor`, also
                 behind a relay
    ping-pong    `worker.ping_pong`
    round-robin  `worker.round_robin`
    wmp          `worker.wmp`, behind relays or not

A relay is a process of its own: `relay.server.Relay` or `relay.native.NativeRelay` over a simulated
listener.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final
from zlib import crc32

from simulator.calls import Calls
from simulator.codecs.dialects import DO
from simulator.decoders import BY, decode
from simulator.listeners import DEFAULT, Listener
from simulator.network import Network
from simulator.outputs import CALLS, has_blobs
from simulator.processes import ProductWorker, SimProcess, SimRunner
from simulator.sockets import ENDPOINT, Socket
from taskyard.core import effects, events
from taskyard.core.events import Outcome
from taskyard.errors import NameLost
from taskyard.net.channel import Channel
from taskyard.relay.native import NativeRelay
from taskyard.relay.server import Relay
from taskyard.wire import dialect
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.ping_pong import peer as ping_pong_peer
from taskyard.wire.round_robin import peer as round_robin_peer
from taskyard.wire.round_robin import workers as round_robin_leases
from taskyard.wire.wmp import peer as wmp_peer
from taskyard.worker import native, ping_pong, round_robin, wmp
from taskyard.worker.native_process import WorkerMonitor
from taskyard.worker.output import OutputSpool
from taskyard.worker.settings import AUTO, WorkerSettings
from taskyard.worker.slots import Prefetch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.network import Link, Message
    from simulator.plan import Plan
    from simulator.world import World
    from taskyard.core.events import Event
    from taskyard.net.protocols import Transport
    from taskyard.worker.jobs import Job

_Q: Final = pb.QueryMsg

#: In one of this many schedules, workers have an `EagerPrefetch`.
_EAGER_SCHEDULES: Final = 5

#: WMP's replies to a GIVE.
_TAKE_OR_NO: Final = (b"\x04", b"\x05")

#: Incarnations of one worker. Another worker with the same name has later incarnations.
INCARNATIONS_MAX: Final = 1_000_000


def _say_nothing(_text: str) -> None:
    """Print nothing."""


def _print_nothing(_level: int, _text: str) -> None:
    """Print nothing."""


def heartbeat_ns_of(plan: Plan) -> int:
    """Return the interval of the product's workers. In every second schedule the broker sets it."""
    return AUTO if plan.seed % 2 else plan.size.heartbeat_ns


class EagerPrefetch(Prefetch):
    """A prefetch as if tasks were quick. Simulated tasks are too slow and too few for any."""

    def on_finished(self, tasks: int, now_ns: int) -> bool:
        return super().on_finished(50 * tasks, now_ns)


class NativeWorker(ProductWorker):
    """A worker in the native dialect."""

    kind = "native"
    sends_incarnation = True
    truncates_results = True

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, services, slots)
        #: Open reports, by their request numbers.
        self._reports: dict[int, events.TasksReported] = {}

    def build(self) -> None:
        self._reports = {}
        first = self.twin * INCARNATIONS_MAX + 1
        settings = WorkerSettings(
            *(self.name, self.services, self.slots),
            incarnation=first - 1 + self.process,
            heartbeat_ns=heartbeat_ns_of(self.world.plan),
            lease_timeout_ns=self.world.plan.size.silence_ns,
            host=b"host",
            replaces=first if self.is_supervised else 0,
            resources=self.resources,
        )
        strange = (*UNUSUAL_OUTCOMES, Outcome.REFUSED)
        spool = None
        if has_blobs(self.world.plan.seed):
            spool = OutputSpool(self.clock.monotonic_ns)
        self._calls = Calls(self) if CALLS in self.services else None
        runner = SimRunner(self, self.slots, strange, spool=spool, calls=self._calls)
        self._socket = Socket(
            self._network(),
            self,
            Listener.NATIVE,
            decode_sent=self.decode_sent,
            on_received=self._on_received,
        )
        channel = Channel(self._socket, self.clock)
        prefetch = None
        if self.world.plan.seed % _EAGER_SCHEDULES == 0:
            prefetch = EagerPrefetch(self.slots, self.clock.monotonic_ns())
        self._loop = native.NativeWorkerLoop(
            settings, channel, runner, self.clock, runner, spool=spool, prefetch=prefetch
        )
        runner.on_output = self._loop.set_progress
        self._worker = WorkerMonitor(self._loop, channel, runner, _say_nothing)

    def _network(self) -> Network:
        """Return the network to the broker: direct, or through a relay."""
        ways = [self.world.network, *self.world.native_relay_networks]
        return ways[crc32(b"%d ways of %s" % (self.world.plan.seed, self.name)) % len(ways)]

    def turn(self) -> None:
        if self._calls is not None:
            self._calls.channel.turn()
        self._loop.turn()
        if not self.alive:
            return
        self.note_interval(self._loop.settings.incarnation, self._loop.heartbeat_ns)
        try:
            self._worker.after_turn(self._socket.endpoint)
        except NameLost:
            self.world.trace("lost its name", self.name)
            self.die()
            return
        if self._worker.has_exited:
            self.over()

    def wake_at_ns(self) -> int:
        wake_at_ns = self._loop.wake_at_ns()
        calls_ns = None if self._calls is None else self._calls.channel.wake_at_ns()
        return wake_at_ns if calls_ns is None else min(wake_at_ns, calls_ns)

    def close(self) -> None:
        self._socket.close()
        if self._calls is not None:
            self._calls.channel.close()

    def shut_down(self) -> None:
        self._worker.shut_down()

    def decode_sent(self, route: bytes, frames: Sequence[bytes]) -> tuple[Event, ...]:
        said = super().decode_sent(route, frames)
        for one in said:
            if isinstance(one, events.TasksReported):
                self._reports[one.request] = one
        return said

    def _on_received(self, frames: Sequence[bytes]) -> None:
        """Check that an acknowledged report is in the journal."""
        answer = _Q.FromString(frames[1])
        report = self._reports.pop(answer.request, None)
        if report is None or answer.type == _Q.Error:
            return
        missing = [pb.TaskMsg.FromString(raw).name for raw in answer.task]
        if answer.type == _Q.NotFound and not missing and not answer.reason:
            missing = report.names
        if answer.reason.startswith(b"not held: "):
            missing += answer.reason.removeprefix(b"not held: ").split(b", ")
        noted = effects.ReportAck(report.worker, answer.request, missing)
        self.world.checker.replies.on_report_ack(report, noted)


class PingPongWorker(ProductWorker):
    """A ping-pong worker: one job at a time, and a new socket when the broker is silent."""

    kind = "ping-pong"

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, (DEFAULT,), 1)
        self._sockets: list[Socket] = []
        del services, slots

    def build(self) -> None:
        settings = ping_pong_peer.Settings(ping_ns=self.world.plan.size.heartbeat_ns)
        runner = SimRunner(self, 1, (Outcome.REFUSED,), sends_attempts=False)
        self._loop = ping_pong.PingPongWorkerLoop(settings, self, runner, self.clock)

    def task_of(self, job: Job) -> bytes:
        return job.payload.removeprefix(DO)

    # The loop's `SocketFactory`.

    def open(self) -> Socket:
        socket = Socket(
            self.world.network, self, Listener.PING_BACKEND, decode_sent=self.decode_sent
        )
        self._sockets.append(socket)
        return socket

    def close(self, carrier: Transport | None = None) -> None:
        """Close one socket, or all of them."""
        for socket in [one for one in self._sockets if carrier is None or one is carrier]:
            self._sockets.remove(socket)
            socket.close()

    def turn(self) -> None:
        self._loop.turn()
        if self.alive and self._loop.has_exited:
            self.over()

    def wake_at_ns(self) -> int:
        return self._loop.wake_at_ns()

    def shut_down(self) -> None:
        self._loop.shut_down()


class RoundRobinWorker(ProductWorker):
    """A round-robin worker: registers, and answers messages one after the other."""

    kind = "round-robin"

    def __init__(self, world: World, name: bytes, services: tuple[bytes, ...], slots: int) -> None:
        super().__init__(world, name, (DEFAULT,), round_robin_peer.SLOTS)
        self._is_leaving = False
        self._identity = name
        del services, slots

    def build(self) -> None:
        self._is_leaving = False
        suffix = b"%s-%d" % (self.name, self.process)
        self._identity = ENDPOINT.encode() + b":" + suffix
        self._socket = Socket(
            *(self.world.network, self, Listener.ROUND_ROBIN),
            name=self._identity,
            decode_sent=self.decode_sent,
        )
        name = suffix.decode()
        self._loop = round_robin.RoundRobinWorkerLoop(
            self._socket, self.clock, name, _print_nothing, self._perform
        )
        self._loop.register()

    def core_name(self) -> bytes:
        return round_robin_leases.name_of(self._identity)

    def _perform(self, arguments: Sequence[bytes]) -> list[bytes]:
        """Answer a message."""
        task = arguments[-1].removeprefix(DO)
        if task in self.world.poisoned:
            raise _Died(task)
        self.served_ns = self.world.timeline.now_ns
        assign = effects.Assign(self.core_name(), [task], [0], [], [], [], 0)
        self.world.checker.replies.on_assigned(assign)
        return [task + BY + self.name]

    def turn(self) -> None:
        try:
            self._loop.turn()
        except _Died as death:
            self.world.trace("dies of", death.args[0])
            self.die()
            return
        if self._is_leaving and not self._loop.worker.is_waiting:
            self.over()

    def wake_at_ns(self) -> int | None:
        return self._loop.wake_at_ns()

    def close(self) -> None:
        self._socket.close()

    def shut_down(self) -> None:
        self._is_leaving = True
        self._loop.deregister()


class RelayProgram(SimProcess):
    """A relay, as `relay.server` runs it. Implements `network.BrokerInbox` for its workers."""

    endpoint = ENDPOINT
    is_full = False

    def __init__(self, world: World, name: bytes) -> None:
        super().__init__(world, name)
        #: The network between the relay and its workers.
        self.network = Network(world.timeline, world.rng, world.faults, self)
        self._arrived: deque[Message] = deque()
        #: The connection of the last message.
        self.connection = (0, 0)
        #: The connections of peers, by number.
        self._links: dict[int, Link] = {}

    @property
    def up(self) -> bool:
        return self.alive

    def build(self) -> None:
        self._above = Socket(self.world.network, self, Listener.WMP, decode_sent=decode)
        self._relay = Relay(self, [self._above])

    def turn(self) -> None:
        if self._relay.turn():
            self.wake()

    def wake_at_ns(self) -> None:
        """Return None: it only waits for messages."""

    def close(self) -> None:
        self._above.close()
        self._arrived.clear()
        self.network.broker_went_down()

    # The listener.

    def on_message(self, incoming: Message) -> None:
        self._arrived.append(incoming)
        self.wake()

    def receive(self) -> list[bytes] | None:
        if not self._arrived:
            return None
        incoming = self._arrived.popleft()
        self.connection = (0, incoming.connection)
        return [incoming.route[1:], *incoming.frames]

    def send(self, frames: Sequence[bytes]) -> bool:
        route = bytes([Listener.WMP]) + frames[0]
        return self.network.to_peer(route, frames[1:], self.world.timeline.now_ns)

    def is_open(self, connection: tuple[int, int]) -> bool:
        link = self._links.get(connection[0])
        return link is not None and self.network.links.get(link.route) is link

    def cut(self, connection: tuple[int, int]) -> None:
        link = self._links.pop(connection[0], None)
        if link is not None:
            self.network.break_link(link)


class RelayUpstream:
    """The connection of a native relay to the broker."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self.receive, self.send = socket.receive, socket.send
        self.connections = socket.connections

    def is_connected(self) -> bool:
        return self._socket.is_connected

    def is_congested(self) -> bool:
        return False

    def check_accepted(self, unanswered_ns: int) -> None:
        """Do nothing: there are no keys."""

    def send_after_close(self, wait_ms: int) -> None:
        """Do nothing: a relay keeps its connection."""

    def close(self) -> None:
        self._socket.close()


class NativeRelayProgram(RelayProgram):
    """A native relay, as `relay.native` runs it."""

    def build(self) -> None:
        self._links.clear()
        self._above = Socket(
            self.world.network, self, Listener.NATIVE, decode_sent=self._decode_sent
        )
        self._native = NativeRelay(self, RelayUpstream(self._above), self.clock)

    def _decode_sent(self, route: bytes, frames: Sequence[bytes]) -> tuple[Event, ...]:
        """Return the events of all peers in a message."""
        envelopes = map(pb.Envelope.FromString, _Q.FromString(frames[1]).envelope)
        return tuple(found for one in envelopes for found in decode(route, [b"", one.message]))

    def turn(self) -> None:
        if self._native.turn():
            self.wake()

    def wake_at_ns(self) -> int | None:  # type: ignore[override]  # WMP's relay has no timers
        return self._native.wake_at_ns()

    # The listener.

    def receive(self) -> list[bytes] | None:
        if not self._arrived:
            return None
        incoming = self._arrived.popleft()
        link = self.network.links.get(incoming.route)
        self.connection = (0, 0)
        if link is not None:
            self._links[id(link)] = link
            self.connection = (id(link), 1)
        return [incoming.route[1:], *incoming.frames]

    def send(self, frames: Sequence[bytes]) -> bool:
        route = bytes([Listener.NATIVE]) + frames[0]
        return self.network.to_peer(route, frames[1:], self.world.timeline.now_ns)


class _Died(Exception):
    """The process dies because of a task."""


class WmpWorker(ProductWorker):
    """A WMP worker: woken by managers, behind relays or not."""

    kind = "wmp"
    sends_incarnation = True

    def build(self) -> None:
        first = self.twin * INCARNATIONS_MAX + 1
        settings = WorkerSettings(
            *(self.name, self.services, self.slots),
            incarnation=first - 1 + self.process,
            heartbeat_ns=heartbeat_ns_of(self.world.plan),
            replaces=first if self.is_supervised else 0,
        )
        runner = SimRunner(self, self.slots, (Outcome.REFUSED, Outcome.FAILED_FINAL))
        self._sockets = [
            Socket(
                network,
                self,
                Listener.WMP,
                decode_sent=self.decode_sent,
                on_received=self._on_received,
            )
            for network in self._networks()
        ]
        self._loop = wmp.WmpWorkerLoop(settings, self._sockets, runner, self.clock)
        self._knows_manager = False

    @property
    def silent_ns_max(self) -> int:
        """Return the longest back-off of READY if no manager has replied yet: it has none to ping
        then, and a READY that was lost with a connection is repeated after up to 32 s, as WMP's
        page says."""
        return 0 if self._knows_manager else wmp_peer.READY_NS_MAX

    def _on_received(self, frames: Sequence[bytes]) -> None:
        """Count an answered GIVE as work: quicker workers may have taken all tasks."""
        self._knows_manager = True
        if frames[[*frames].index(b"") + 2] in _TAKE_OR_NO:
            self.served_ns = self.world.timeline.now_ns

    def _networks(self) -> list[Network]:
        """Return the networks to the manager: direct, through relays, or both."""
        relays = self.world.relay_networks
        choice = crc32(b"%d ways of %s" % (self.world.plan.seed, self.name)) % 3
        if not relays or choice == 0:
            return [self.world.network]
        return relays if choice == 1 else [self.world.network, relays[0]]

    def core_name(self) -> bytes:
        return dialect.WMP + self.name

    def turn(self) -> None:
        if self._loop.turn():
            self.wake()
        if not self.alive:
            return
        first = self.twin * INCARNATIONS_MAX + 1
        self.note_interval(first - 1 + self.process, self._loop.worker.heartbeat_ns)
        if self._loop.worker.name_lost:
            self.world.trace("lost its name", self.name)
            self.die()
        elif self._loop.has_exited:
            self.over()

    def wake_at_ns(self) -> int | None:
        return self._loop.wake_at_ns()

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()

    def shut_down(self) -> None:
        self._loop.shut_down()


#: Outcomes beside DONE, FAILED and REFUSED.
UNUSUAL_OUTCOMES: Final = (
    Outcome.FAILED_FINAL,
    Outcome.RETRY_AT,
    Outcome.DEFER_ALL,
    Outcome.DEFER_BACK,
    Outcome.CRASHED,
)

KINDS: Final[dict[str, type[ProductWorker]]] = {
    one.kind: one for one in (NativeWorker, PingPongWorker, RoundRobinWorker, WmpWorker)
}
