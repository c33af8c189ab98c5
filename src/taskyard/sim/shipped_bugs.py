"""Planted bugs of the loops that we ship: workers of every dialect, the relay, and clients.

Beside `bugs`, whose rules hold here too. Several of them were in the product until the simulator
ran these loops.
"""
# ruff: noqa: ANN401, SLF001 - a broken function takes whatever the sound one takes, and is inside

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskyard.client.courier import Courier
from taskyard.core.events import Outcome
from taskyard.net.line import Channel
from taskyard.relay.forwarding import Forwarder
from taskyard.sim.planting import plant, plant_in, swapped
from taskyard.wire import ping_pong_words, wmp_frames, wmp_peer
from taskyard.wire.round_robin_frames import EXEC, INCREMENT, PING, Message
from taskyard.worker import loop, ping_pong, round_robin

if TYPE_CHECKING:
    from collections.abc import Iterator


def _nothing(*_arguments: Any, **_named: Any) -> None:
    """Do nothing."""


# The native worker.


@plant_in("native")
def native_reconnect_not_noticed() -> Iterator[None]:
    """A request that was lost with its connection is not asked again until it is overdue."""
    with swapped(Channel, "_notice_connection", _nothing):
        yield


@plant_in("native")
def native_goodbye_without_rest() -> Iterator[None]:
    """The worker turns without rest until its goodbye is answered."""

    def wake_at_ns(self: loop.Loop) -> int:
        return self._heartbeat_due_ns

    with swapped(loop.Loop, "wake_at_ns", wake_at_ns):
        yield


@plant_in("native")
def native_reports_lost() -> Iterator[None]:
    """Every third report never leaves."""
    sound, counts = loop.Loop._next_reports, [0]

    def next_reports(self: loop.Loop) -> Any:
        counts[0] += 1
        done = sound(self)
        if counts[0] % 3 == 0 and len(done) > 1:
            self._held.pop(done[0].job.key)
            return done[1:]
        return done

    def note(self: loop.Loop, done: Any) -> None:
        self._reports += [one for one in done if len(one.job.name) % 3]

    with swapped(loop.Loop, "_next_reports", next_reports), swapped(loop.Loop, "_note", note):
        yield


@plant_in("native")
def native_refusal_forgets_tasks() -> Iterator[None]:
    """A task that has to be refused is forgotten, and goes on being listed."""

    def note(self: loop.Loop, done: Any) -> None:
        self._reports += [one for one in done if one.outcome is not Outcome.REFUSED]

    with swapped(loop.Loop, "_note", note):
        yield


@plant_in("native")
def native_one_wish_a_life() -> Iterator[None]:
    """A worker that was answered once does not ask again."""
    sound = loop.Loop._ask_for_tasks

    def ask_for_tasks(self: loop.Loop) -> None:
        if not self._stole_ns:
            sound(self)

    with swapped(loop.Loop, "_ask_for_tasks", ask_for_tasks):
        yield


# Ping-pong's worker.


@plant_in("ping-pong")
def ping_pong_old_count_ends_job() -> Iterator[None]:
    """A count of before a rest makes the next one look like another connection's."""
    sound = ping_pong.Loop._hear

    def hear(self: ping_pong.Loop, frames: list[bytes]) -> None:
        counted = self._counted
        sound(self, frames)
        if frames[1] == ping_pong_words.PONG and len(frames) == ping_pong_words.FRAMES:
            self._counted = counted

    with swapped(ping_pong.Loop, "_hear", hear):
        yield


@plant_in("ping-pong")
def ping_pong_silent_broker_kept() -> Iterator[None]:
    """The worker never opens another socket."""
    with swapped(ping_pong.Loop, "_give_up_silent_broker", _nothing):
        yield


@plant_in("ping-pong")
def ping_pong_goodbye_without_rest() -> Iterator[None]:
    """The worker turns without rest until its goodbye is answered."""

    def wake_at_ns(self: ping_pong.Loop) -> int:
        return min(self._ping_due_ns, self._awaited_ns + self._settings.silence_ns)

    with swapped(ping_pong.Loop, "wake_at_ns", wake_at_ns):
        yield


@plant_in("ping-pong")
def ping_pong_result_sent_twice() -> Iterator[None]:
    """The second copy of a result is taken for the next job's."""
    sound = ping_pong.Loop._report

    def report(self: ping_pong.Loop, done: Any) -> None:
        sound(self, done)
        sound(self, done)

    with swapped(ping_pong.Loop, "_report", report):
        yield


@plant_in("ping-pong")
def ping_pong_new_socket_not_ready() -> Iterator[None]:
    """READY is said on the first socket alone."""
    sound = ping_pong.Loop._say_ready

    def say_ready(self: ping_pong.Loop) -> None:
        if not self.answered:
            sound(self)
        self._ping_due_ns = self._clock.monotonic_ns() + self._settings.ping_ns
        self._is_enlisted = True

    with swapped(ping_pong.Loop, "_say_ready", say_ready):
        yield


# Round-robin's worker.


@plant_in("round-robin")
def round_robin_reconnect_not_noticed() -> Iterator[None]:
    """A message that was lost with its connection stays the worker's for ever."""
    sound = round_robin.Loop._notice_connection

    def notice(self: round_robin.Loop, now_ns: int) -> None:
        self._connections = 1 << 30
        sound(self, now_ns)

    with swapped(round_robin.Loop, "_notice_connection", notice):
        yield


@plant_in("round-robin")
def round_robin_register_said_once() -> Iterator[None]:
    """A REGISTER that is not answered is not repeated."""

    def not_answered(self: round_robin.Loop, number: bytes, _key: bytes) -> None:
        del self._asked[number]

    def notice(self: round_robin.Loop, now_ns: int) -> None:
        self._connection_due_ns = now_ns + round_robin.CONNECTION_NS

    with (
        swapped(round_robin.Loop, "_not_answered", not_answered),
        swapped(round_robin.Loop, "_notice_connection", notice),
    ):
        yield


@plant_in("round-robin")
def round_robin_slot_never_freed() -> Iterator[None]:
    """The worker does not say INCREMENT."""
    sound = round_robin.Loop._send

    def send(self: round_robin.Loop, message: Message) -> None:
        if message.command != EXEC or message.arguments[0] != INCREMENT:
            sound(self, message)

    with swapped(round_robin.Loop, "_send", send):
        yield


@plant_in("round-robin")
def round_robin_restart_not_heard() -> Iterator[None]:
    """A worker goes on after a restart as if nothing had been, and does not answer PING."""
    sound = round_robin.Loop._hear

    def hear(self: round_robin.Loop, message: Message) -> None:
        if message.command != PING:
            sound(self, message)

    with (
        swapped(round_robin.Loop, "_hear", hear),
        swapped(round_robin.Loop, "_notice_connection", round_robin_silent_notice),
    ):
        yield


def round_robin_silent_notice(self: round_robin.Loop, now_ns: int) -> None:
    """Look away."""
    self._connection_due_ns = now_ns + round_robin.CONNECTION_NS


# WMP's worker, and the relay.


@plant_in("wmp")
def wmp_report_said_once() -> Iterator[None]:
    """A report that is lost is not repeated, and its task is listed for ever."""
    with swapped(wmp_peer.Worker, "_report_again", _nothing):
        yield


@plant_in("wmp")
def wmp_lock_never_ends() -> Iterator[None]:
    """A slot that is locked for a manager's word stays locked without one."""
    with swapped(wmp_peer.Worker, "_end_locks", _nothing):
        yield


@plant_in("wmp")
def wmp_slot_of_done_task_taken() -> Iterator[None]:
    """A task that is done keeps its slot."""
    sound = wmp_peer.Worker._keep

    def keep(self: wmp_peer.Worker, held: Any) -> None:
        self._slots_used += held.slots
        sound(self, held)

    with swapped(wmp_peer.Worker, "_keep", keep):
        yield


@plant_in("wmp")
def wmp_wake_not_heard() -> Iterator[None]:
    """The worker does not come when it is woken."""
    meanings = {**wmp_peer.Worker._HANDLERS, wmp_frames.Wake: _nothing}
    with swapped(wmp_peer.Worker, "_HANDLERS", meanings):
        yield


@plant_in("wmp")
def wmp_ready_said_once() -> Iterator[None]:
    """READY is not repeated: a manager that has restarted does not know the worker."""

    def is_ready_due(self: wmp_peer.Worker, now_ns: int) -> bool:
        return not self._managers.on(0) and self._ready_due_ns <= now_ns

    def have_room(self: wmp_peer.Worker, now_ns: int) -> None:
        self._answer_wakes(now_ns)

    with (
        swapped(wmp_peer.Worker, "_is_ready_due", is_ready_due),
        swapped(wmp_peer.Worker, "_on_slot_free", have_room),
        swapped(wmp_peer.Worker, "_answered", _nothing),
        swapped(
            wmp_peer.Worker,
            "_HANDLERS",
            {**wmp_peer.Worker._HANDLERS, wmp_frames.ManagerPong: _nothing},
        ),
    ):
        yield


@plant_in("wmp")
def relay_answers_lost() -> Iterator[None]:
    """A relay hands nothing on to those below it."""
    with swapped(Forwarder, "_down", _nothing):
        yield


# Clients.


@plant
def client_does_not_watch() -> Iterator[None]:
    """A task that was taken is not watched."""
    sound = Courier._taken

    def taken(self: Courier, number: int, parcels: Any) -> None:
        sound(self, number, parcels)
        self._watches.pop(number, None)
        self._line.drop(number)

    with swapped(Courier, "_taken", taken):
        yield


@plant
def client_first_answer_is_all() -> Iterator[None]:
    """A client that is told of some tasks waits no more for the others."""
    sound = Courier._told

    def told(self: Courier, number: int, reply: Any) -> None:
        sound(self, number, reply)
        if self._watches.pop(number, None) is not None:
            self._named.pop(number, None)
            self._line.drop(number)

    with swapped(Courier, "_told", told):
        yield
