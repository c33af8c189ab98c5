"""Planted bugs of the product's loops: workers of every dialect, the relay, and clients.

The checkers must catch each of them, as in `core`. Several were real until the simulator ran these
loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.mutations.registry import mutation, mutation_for_kinds, patched
from taskyard.broker.transport import Connections
from taskyard.client.watches import Watches
from taskyard.core.events import Outcome
from taskyard.net.channel import Channel
from taskyard.relay.native import Condenser
from taskyard.relay.server import Forwarder
from taskyard.wire.ping_pong import frames as ping_pong_frames
from taskyard.wire.ping_pong import peer as ping_pong_peer
from taskyard.wire.round_robin import peer as round_robin_peer
from taskyard.wire.round_robin.frames import EXEC, INCREMENT, PING, Message
from taskyard.wire.wmp import frames as wmp_frames
from taskyard.wire.wmp import peer as wmp_peer
from taskyard.worker import native
from taskyard.worker.held_tasks import HeldTasks
from taskyard.worker.output import OutputSender
from taskyard.worker.requests import TaskRequests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.worker.jobs import JobResult

# ruff: noqa: ANN401, SLF001 - a broken function takes whatever the sound one takes, and is inside


def _no_op(*_arguments: Any, **_named: Any) -> None:
    """Do nothing."""


# The native worker.


@mutation_for_kinds("native")
def native_reconnect_not_noticed() -> Iterator[None]:
    """Resend a request that was lost with its connection only when it is overdue."""
    with patched(Channel, "_check_reconnected", _no_op):
        yield


@mutation_for_kinds("native")
def output_report_not_held_back() -> Iterator[None]:
    """Report a task before the broker has acknowledged all of its output."""
    sound = OutputSender.hold

    def hold(self: OutputSender, done: JobResult) -> bool:
        if sound(self, done):
            self.held.remove(done)
        return False

    with patched(OutputSender, "hold", hold):
        yield


@mutation_for_kinds("native")
def native_exit_busy_loop() -> Iterator[None]:
    """Turn in a busy loop until Exit is answered."""

    def wake_at_ns(self: native.NativeWorkerLoop) -> int:
        return self._heartbeats.due_ns

    with patched(native.NativeWorkerLoop, "wake_at_ns", wake_at_ns):
        yield


@mutation_for_kinds("native")
def native_reports_lost() -> Iterator[None]:
    """Drop every third report."""
    sound, counts = HeldTasks.take_results, [0]

    def take_results(self: HeldTasks) -> Any:
        counts[0] += 1
        done = sound(self)
        if counts[0] % 3 == 0 and len(done) > 1:
            self.lanes.pop(done[0].job.key)
            return done[1:]
        return done

    def note(self: native.NativeWorkerLoop, done: Any) -> None:
        self._held.results += [one for one in done if len(one.job.name) % 3]

    with (
        patched(HeldTasks, "take_results", take_results),
        patched(native.NativeWorkerLoop, "_collect_done", note),
    ):
        yield


@mutation_for_kinds("native")
def native_refusal_forgets_tasks() -> Iterator[None]:
    """Forget a refused task, but list it further."""

    def note(self: native.NativeWorkerLoop, done: Any) -> None:
        self._held.results += [one for one in done if one.outcome is not Outcome.REFUSED]

    with patched(native.NativeWorkerLoop, "_collect_done", note):
        yield


@mutation_for_kinds("native")
def native_asks_only_once() -> Iterator[None]:
    """Request tasks only once."""
    sound = TaskRequests.send

    def send(self: TaskRequests) -> None:
        if not self._sent_ns:
            sound(self)

    with patched(TaskRequests, "send", send):
        yield


# Ping-pong's worker.


@mutation_for_kinds("ping-pong")
def ping_pong_old_count_ends_job() -> Iterator[None]:
    """Take an old count for one of another connection."""
    sound = ping_pong_peer.Worker._on_frames

    def hear(self: ping_pong_peer.Worker, frames: list[bytes], now_ns: int) -> None:
        counted = self._count_received
        sound(self, frames, now_ns)
        if frames[1] == ping_pong_frames.PONG and len(frames) == ping_pong_frames.FRAMES:
            self._count_received = counted

    with patched(ping_pong_peer.Worker, "_on_frames", hear):
        yield


@mutation_for_kinds("ping-pong")
def ping_pong_silent_broker_kept() -> Iterator[None]:
    """Never open a new socket."""
    with patched(ping_pong_peer.Worker, "_reconnect_if_silent", _no_op):
        yield


@mutation_for_kinds("ping-pong")
def ping_pong_exit_busy_loop() -> Iterator[None]:
    """Turn in a busy loop until the last message is answered."""

    def wake_at_ns(self: ping_pong_peer.Worker) -> int:
        return min(self._ping_due_ns, self._waiting_since_ns + self._settings.lease_timeout_ns)

    with patched(ping_pong_peer.Worker, "wake_at_ns", wake_at_ns):
        yield


@mutation_for_kinds("ping-pong")
def ping_pong_result_sent_twice() -> Iterator[None]:
    """Send a result twice, so that the second is taken for the next job's."""
    sound = ping_pong_peer.Worker._report

    def report(self: ping_pong_peer.Worker, *done: Any) -> None:
        sound(self, *done)
        sound(self, *done)

    with patched(ping_pong_peer.Worker, "_report", report):
        yield


@mutation_for_kinds("ping-pong")
def ping_pong_new_socket_not_ready() -> Iterator[None]:
    """Send READY on the first socket only."""
    sound = ping_pong_peer.Worker._send_ready

    def say_ready(self: ping_pong_peer.Worker, now_ns: int) -> None:
        if not self.was_connected:
            sound(self, now_ns)
        self._ping_due_ns = now_ns + self._settings.ping_ns
        self._is_registered = True

    with patched(ping_pong_peer.Worker, "_send_ready", say_ready):
        yield


# Round-robin's worker.


@mutation_for_kinds("round-robin")
def round_robin_reconnect_not_noticed() -> Iterator[None]:
    """Keep a message for ever that was lost with its connection, if the server does not notice that
    either, as the original server."""
    sound = round_robin_peer.Worker.check_reconnected

    def notice(self: round_robin_peer.Worker, now_ns: int, connections: int) -> Any:
        self._connections = 1 << 30
        return sound(self, now_ns, connections)

    with (
        patched(round_robin_peer.Worker, "check_reconnected", notice),
        patched(Connections, "is_renewed", lambda *_arguments: False),
    ):
        yield


@mutation_for_kinds("round-robin")
def round_robin_register_sent_once() -> Iterator[None]:
    """Never repeat REGISTER."""

    def not_answered(
        self: round_robin_peer.Worker, number: bytes, *_rest: Any, **_named: Any
    ) -> None:
        del self._open_registers[number]

    with (
        patched(round_robin_peer.Worker, "_on_no_reply", not_answered),
        patched(round_robin_peer.Worker, "check_reconnected", round_robin_ignore_reconnect),
    ):
        yield


@mutation_for_kinds("round-robin")
def round_robin_slot_never_freed() -> Iterator[None]:
    """Never send INCREMENT."""
    sound = round_robin_peer.Peer._send

    def send(self: round_robin_peer.Peer, message: Message) -> None:
        if message.command != EXEC or message.arguments[0] != INCREMENT:
            sound(self, message)

    with patched(round_robin_peer.Peer, "_send", send):
        yield


@mutation_for_kinds("round-robin")
def round_robin_restart_ignored() -> Iterator[None]:
    """Ignore a restart of the server, and PING."""
    sound = round_robin_peer.Worker._on_message

    def hear(self: round_robin_peer.Worker, message: Message, now_ns: int) -> None:
        if message.command != PING:
            sound(self, message, now_ns)

    with (
        patched(round_robin_peer.Worker, "_on_message", hear),
        patched(round_robin_peer.Worker, "check_reconnected", round_robin_ignore_reconnect),
    ):
        yield


def round_robin_ignore_reconnect(
    self: round_robin_peer.Worker, now_ns: int, _connections: int
) -> list[Any]:
    """Do nothing."""
    self.connection_due_ns = now_ns + round_robin_peer.CONNECTION_NS
    return []


# WMP's worker, and the relay.


@mutation_for_kinds("wmp")
def wmp_report_sent_once() -> Iterator[None]:
    """Never repeat a lost report, and list its task for ever."""
    with patched(wmp_peer.Worker, "_report_again", _no_op):
        yield


@mutation_for_kinds("wmp")
def wmp_lock_never_ends() -> Iterator[None]:
    """Keep a slot locked without a reply of the manager."""
    with patched(wmp_peer.Worker, "_end_locks", _no_op):
        yield


@mutation_for_kinds("wmp")
def wmp_slot_of_done_task_taken() -> Iterator[None]:
    """Keep the slot of a done task."""
    sound = wmp_peer.Worker._keep

    def keep(self: wmp_peer.Worker, held: Any) -> None:
        self._slots_used += held.slots
        sound(self, held)

    with patched(wmp_peer.Worker, "_keep", keep):
        yield


@mutation_for_kinds("wmp")
def wmp_wake_ignored() -> Iterator[None]:
    """Ignore WAKE."""
    meanings = {**wmp_peer.Worker._HANDLERS, wmp_frames.Wake: _no_op}
    with patched(wmp_peer.Worker, "_HANDLERS", meanings):
        yield


@mutation_for_kinds("wmp")
def wmp_ready_sent_once() -> Iterator[None]:
    """Never repeat READY: a restarted manager does not know the worker."""

    def is_ready_due(self: wmp_peer.Worker, now_ns: int) -> bool:
        return not self._managers.on(0) and self._ready_due_ns <= now_ns

    def have_room(self: wmp_peer.Worker, now_ns: int) -> None:
        self._answer_wakes(now_ns)

    with (
        patched(wmp_peer.Worker, "_is_ready_due", is_ready_due),
        patched(wmp_peer.Worker, "_on_slot_free", have_room),
        patched(wmp_peer.Worker, "_on_pong", _no_op),
        patched(
            wmp_peer.Worker,
            "_HANDLERS",
            {**wmp_peer.Worker._HANDLERS, wmp_frames.ManagerPong: _no_op},
        ),
    ):
        yield


@mutation_for_kinds("wmp")
def relay_answers_lost() -> Iterator[None]:
    """Drop all messages from the manager in a relay."""
    with patched(Forwarder, "_down", _no_op):
        yield


@mutation_for_kinds("native")
def relay_answers_another_peer() -> Iterator[None]:
    """Send replies to the first peer of a native relay."""
    sound = Condenser.down

    def down(self: Condenser, frames: Any) -> Any:
        first = next(iter(self._peers), b"")
        return [(first, message) for _, message in sound(self, frames)]

    with patched(Condenser, "down", down):
        yield


# Clients.


@mutation
def client_does_not_watch() -> Iterator[None]:
    """Never watch accepted tasks."""
    sound = Watches.on_accepted

    def taken(self: Watches, number: int, futures: Any) -> None:
        sound(self, number, futures)
        self.open.pop(number, None)
        self.channel.drop(number)

    with patched(Watches, "on_accepted", taken):
        yield


@mutation
def client_stops_after_first_reply() -> Iterator[None]:
    """Stop waiting after the first settled tasks."""
    sound = Watches.on_reply

    def told(self: Watches, reply: Any) -> None:
        sound(self, reply)
        if self.open.pop(reply.request, None) is not None:
            self._named_count.pop(reply.request, None)
            self.channel.drop(reply.request)

    with patched(Watches, "on_reply", told):
        yield
