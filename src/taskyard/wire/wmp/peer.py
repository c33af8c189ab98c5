"""WMP at a worker: slots, locks, what it holds, and what it says to its managers. No sockets, no
clock, no processes.

What arrives and what the hands have done go in, orders come out: messages to send, tasks to start
and to stop. A worker has a wire to each manager or relay that it knows, and meets behind them as
many managers as there are (`wmp_ways`).

    slots_free = slots - tasks at work - locks

A report is kept, listed as held and sent again until its manager is known to have it: a relay may
have died with it. A manager that has it down as settled answers a heartbeat that lists it with
CANCEL, like anything else that is listed and not ours. So nothing is acknowledged by a word of its
own, and to a manager that does not answer so it is sent a few times more than needed.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Malformed
from taskyard.wire.wmp import frames as wmp
from taskyard.wire.wmp.frames import Side, name_of, text_of
from taskyard.wire.wmp.managers import Manager, Managers, Route

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: A READY that is repeated while there are free slots: it may have been forgotten.
READY_NS_MIN: Final = SECOND_NS
READY_NS_MAX: Final = 32 * SECOND_NS

#: A lock that is answered neither with TAKE nor with NO ends after this.
LOCK_NS: Final = 5 * SECOND_NS

#: A slot whose task had to be refused, because the machine gives it no process, is not offered for
#: so long.
REST_NS: Final = SECOND_NS

#: A manager waits so long for the answer to its WAKE; after that another one has it.
WAKE_NS: Final = SECOND_NS

#: WAKEs that wait for a slot, one of each way.
WAKES_MAX: Final = 1_000

#: A manager that is not heard is shown life less and less often, down to this.
PING_NS_MAX: Final = 8 * SECOND_NS

#: Signs of life in the time of a lease: one or two may be lost.
PINGS_PER_LEASE: Final = 3

#: A manager that was not heard for so long, and for whom nothing is held, is forgotten.
FORGOTTEN_NS: Final = 120 * SECOND_NS

#: A report of which nothing is known is sent again after this, if its manager was heard since; and
#: so often, in case that its manager does not say what it has.
REPORT_NS: Final = 3 * SECOND_NS
REPORTS_MAX: Final = 5

#: Reports that are kept to be sent again, and their bytes: of managers that are away for longer,
#: the oldest are let go, and the tasks are done again.
REPORTS_KEPT_MAX: Final = 1_000
REPORTS_KEPT_BYTES_MAX: Final = 64 << 20

#: How long to wait, when leaving, until the managers are known to have the last reports.
BYE_NS_MAX: Final = 2 * SECOND_NS

_MILLISECOND_NS: Final = SECOND_NS // 1000

Key: TypeAlias = tuple[bytes, int]

#: What goes to one manager.
ToManager: TypeAlias = wmp.Give | wmp.Done | wmp.Status | wmp.WorkerPing | wmp.WorkerPong


class Settings(Struct, frozen=True):
    """Who works, and how much at once."""

    worker: bytes
    services: tuple[bytes, ...] = (b"default",)
    slots: int = 1
    #: Tells this process from an earlier one of the same id.
    incarnation: int = 0
    heartbeat_ns: int = SECOND_NS
    #: Its supervisor saw the processes of its id end, from this incarnation on; 0: no supervisor.
    replaces: int = 0


class Send(Struct):
    """Send this by that wire."""

    wire: int
    frames: list[bytes]


class Start(Struct):
    """Begin with this task."""

    name: bytes
    attempt: int
    service: bytes
    payload: bytes
    #: 0: as long as it takes.
    time_limit_ns: int = 0
    slots: int = 1


class Stop(Struct):
    """End that task; nothing more is to be said of it."""

    name: bytes
    attempt: int


Action: TypeAlias = Send | Start | Stop


class Held(Struct):
    """A task, from TAKE until its manager is known to have the report."""

    name: bytes
    attempt: int
    manager: Manager
    #: Whose task it is, as TAKE says; said again in every report.
    owner: str | None
    slots: int = 1
    #: What came of it; None: it is at work.
    status: str | None = None
    payload: bytes = b""
    #: Length of the result before it was cut; 0: it is whole.
    bytes_total: int = 0
    sent_ns: int = 0
    sent_count: int = 0

    @property
    def key(self) -> Key:
        return self.name, self.attempt


class Worker:
    """One worker, and all its managers. `wires` are numbered from 0."""

    def __init__(self, settings: Settings, wires: int, now_ns: int) -> None:
        self._settings = settings
        self._id = text_of(settings.worker)
        self._managers = Managers()
        #: Slots that wait for a manager's word, and until when.
        self._locks: dict[str, int] = {}
        self._lock_numbers = count(1)
        #: Numbers of PINGs and PONGs: of two that overtake each other, the higher one is newer.
        self._sign_numbers = count(1)
        #: WAKEs that wait for a slot, and until when, in order of arrival.
        self._wakes: dict[Route, int] = {}
        self._held: dict[Key, Held] = {}
        #: Slots of those that are at work.
        self._slots_used = 0
        #: Those of them that are reported, oldest first.
        self._reported: dict[Key, Held] = {}
        self._reported_bytes = 0
        self._ready_due_ns = now_ns
        self._ready_after_ns = READY_NS_MIN
        #: When READY goes by a wire again where everybody has said goodbye.
        self._quiet_until_ns = [now_ns] * wires
        self._actions: list[Action] = []
        self._farewell_ends_ns = 0
        #: No more tasks: it is gone when it holds none.
        self.leaving = False
        #: It has said goodbye to all.
        self.gone = False
        #: Messages that made no sense.
        self.malformed = 0
        #: Why a manager gave its id to another process for good; empty: none did.
        self.name_lost = ""

    @property
    def slots_free(self) -> int:
        """Below 0 where a task is wider than the lock that it came by."""
        return self._settings.slots - self._slots_used - len(self._locks)

    @property
    def working(self) -> int:
        """Tasks at work."""
        return len(self._held) - len(self._reported)

    @property
    def unconfirmed(self) -> int:
        """Reports that their managers are not known to have."""
        return len(self._reported)

    @property
    def name_held(self) -> str:
        """Why a manager refuses its id for now; empty: none does."""
        return next((one.name_held for one in self._managers if one.name_held), "")

    @property
    def is_dismissed(self) -> bool:
        """On every wire somebody has said goodbye, and nobody is left who has not."""
        managers = [self._managers.on(wire) for wire in range(len(self._quiet_until_ns))]
        return all(on and all(one.is_over for one in on) for on in managers)

    # What goes in.

    def take(self, wire: int, frames: Sequence[bytes], now_ns: int) -> list[Action]:
        """A message. Whatever it is, this returns."""
        try:
            self._decode(wire, frames, now_ns)
        except Malformed:
            self.malformed += 1
        return self._taken()

    def _decode(self, wire: int, frames: Sequence[bytes], now_ns: int) -> None:
        path, message, payload = wmp.decode(frames, Side.MANAGER)
        if path:
            raise Malformed("a worker is the end of the way")
        route = Route(wire, tuple(message.back or ()))
        # The manager in TAKE is whose task it is, who may be somebody behind this one.
        name = None if isinstance(message, wmp.Take) else message.manager
        self._HANDLERS[type(message)](
            self, self._hear(route, name, now_ns), message, payload, now_ns
        )

    def done(
        self, key: Key, status: str, payload: bytes, now_ns: int, bytes_total: int = 0
    ) -> list[Action]:
        """What came of a task: `ok` and its result, or `error` or `refused` and why."""
        held = self._held.get(key)
        if held is not None and held.status is None:
            held.status, held.payload, held.bytes_total = status, payload, bytes_total
            self._slots_used -= held.slots
            self._report(held, now_ns)
            if status == "refused":
                self._drop(held)  # should it be lost, the task is not listed and goes back, too
                self._rest(now_ns)
            else:
                self._keep(held)
            self._on_slot_free(now_ns)
        return self._taken()

    def _rest(self, now_ns: int) -> None:
        """It would be given the same task at once: let the slot wait a little."""
        if not self.leaving:
            self._locks[f"rest-{next(self._lock_numbers)}"] = now_ns + REST_NS

    def progressed(
        self, key: Key, percent: float | None = None, text: str | None = None
    ) -> list[Action]:
        held = self._held.get(key)
        if held is not None and held.status is None:
            message = wmp.Status(self._id, text_of(held.name), held.attempt, percent, text)
            message.manager = held.owner
            self._send_to(held.manager, message)
        return self._taken()

    def leave(self, now_ns: int) -> list[Action]:
        """Take no more. It is gone when what it holds is reported."""
        self.leaving = True
        self._locks.clear()
        self._wakes.clear()
        return self.time_passed(now_ns)

    def time_passed(self, now_ns: int) -> list[Action]:
        """Whatever is due."""
        self._end_locks(now_ns)
        if self._is_ready_due(now_ns):
            self._send_ready(now_ns)
        for manager in self._managers:
            if manager.ping_due_ns <= now_ns:
                self._ping(manager, now_ns)
            if manager.last_seen_ns + FORGOTTEN_NS <= now_ns and not manager.held:
                self._managers.forget(manager)
        self._report_again(now_ns)
        if self.leaving and not self.working and not self.gone:
            self._send_bye(now_ns)
        return self._taken()

    def wake_at_ns(self) -> int | None:
        """When `time_passed` should be called; None: when something arrives."""
        times = [*self._locks.values()]
        times += [manager.ping_due_ns for manager in self._managers]
        if self.slots_free > 0 and not self.leaving:
            times.append(self._ready_due_ns)
        if self._farewell_ends_ns:
            times.append(self._farewell_ends_ns)
        return min(times, default=None)

    # What managers say.

    def _wake(self, manager: Manager, _told: wmp.Wake, _payload: bytes, now_ns: int) -> None:
        manager.is_over = False
        route = manager.route  # the one that this came by
        if route is None or self.leaving or len(self._wakes) >= WAKES_MAX:
            return
        self._quiet_until_ns[route.wire] = now_ns
        self._wakes.setdefault(route, now_ns + WAKE_NS)
        self._answer_wakes(now_ns)

    def _answer_wakes(self, now_ns: int) -> None:
        """In order of arrival, one lock for each free slot."""
        while self._wakes and self.slots_free > 0:
            route = next(iter(self._wakes))
            if self._wakes.pop(route) > now_ns:
                self._give(route, now_ns)

    def _give(self, route: Route, now_ns: int) -> None:
        request = str(next(self._lock_numbers))
        self._locks[request] = now_ns + LOCK_NS
        services = [text_of(one) for one in self._settings.services]
        self._send(route, wmp.Give(self._id, request, services))

    def _take(self, manager: Manager, message: wmp.Take, payload: bytes, now_ns: int) -> None:
        self._locks.pop(str(message.request), None)
        name, service = name_of(message.task), name_of(message.service, "service")
        known = self._held.get((name, message.attempt))
        if known is not None and known.manager.current() is manager:
            return  # it was said twice
        held = Held(name, message.attempt, manager, message.manager, message.slots)
        if known is not None or self.leaving or self.slots_free <= 0:
            held.status = "refused"
            self._report(held, now_ns)
        else:
            self._held[held.key] = held
            manager.held[held.key] = None
            self._slots_used += held.slots
            self._raise_ping_rate(manager, message.lease_ms * _MILLISECOND_NS, now_ns)
            limit_ns = message.time_limit_ms * _MILLISECOND_NS
            self._actions.append(
                Start(name, message.attempt, service, payload, limit_ns, message.slots)
            )
        self._on_slot_free(now_ns)

    def _raise_ping_rate(self, manager: Manager, lease_ns: int, now_ns: int) -> None:
        """Show life often enough for a lease that is short."""
        if 0 < lease_ns < PINGS_PER_LEASE * self._settings.heartbeat_ns:
            manager.ping_due_ns = min(manager.ping_due_ns, now_ns + lease_ns // PINGS_PER_LEASE)

    def _no(self, _manager: Manager, message: wmp.No, _payload: bytes, now_ns: int) -> None:
        self._locks.pop(str(message.request), None)
        self._answer_wakes(now_ns)

    def _cancel(self, manager: Manager, message: wmp.Cancel, _payload: bytes, now_ns: int) -> None:
        held = self._held.get((name_of(message.task), message.attempt))
        if held is None or held.manager.current() is not manager:
            return
        at_work = held.status is None
        self._drop(held)
        if at_work:
            held.status = "cancelled"
            self._slots_used -= held.slots
            self._actions.append(Stop(*held.key))
            self._report(held, now_ns)
            self._on_slot_free(now_ns)

    def _on_ping(
        self, manager: Manager, message: wmp.ManagerPing, _payload: bytes, now_ns: int
    ) -> None:
        self._send_to(manager, self._heartbeat(wmp.WorkerPong, manager))
        self._on_pong(manager, message, _payload, now_ns)

    def _on_pong(
        self,
        manager: Manager,
        message: wmp.ManagerPing | wmp.ManagerPong,
        _payload: bytes,
        now_ns: int,
    ) -> None:
        """It is there. If it has forgotten our READY, it hears it again."""
        manager.name_held = ""
        if not message.ready and self.slots_free > 0 and not self.leaving:
            self._send_ready(now_ns)

    def _bye(self, manager: Manager, message: wmp.ManagerBye, _payload: bytes, now_ns: int) -> None:
        """It has nothing for us, for now at least: a restarted one may have."""
        if message.code in (wmp.NAME_HELD, wmp.NAME_LOST):
            self._on_name_refused(manager, message, now_ns)
            return
        manager.is_over = True
        for route in manager.routes:
            self._wakes.pop(route, None)
        for wire in dict.fromkeys(route.wire for route in manager.routes):
            if all(one.is_over and not one.held for one in self._managers.on(wire)):
                self._quiet_until_ns[wire] = now_ns + READY_NS_MAX
                self._actions.append(Send(wire, wmp.encode((), self._goodbye())))

    def _on_name_refused(self, manager: Manager, message: wmp.ManagerBye, now_ns: int) -> None:
        """Another process has the id: stop what is held for this manager, and ask again soon."""
        manager.name_held = message.reason
        if message.code == wmp.NAME_LOST:
            self.name_lost = message.reason
        for held in [one for one in self._held.values() if one.manager.current() is manager]:
            self._drop(held)
            if held.status is None:
                held.status = "cancelled"
                self._slots_used -= held.slots
                self._actions.append(Stop(*held.key))
        self._ready_after_ns = READY_NS_MIN
        self._ready_due_ns = min(self._ready_due_ns, now_ns + READY_NS_MIN)

    def _goodbye(self, reason: str = "") -> wmp.WorkerBye:
        return wmp.WorkerBye(self._id, reason, self._settings.incarnation or None)

    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        wmp.Wake: _wake,
        wmp.Take: _take,
        wmp.No: _no,
        wmp.Cancel: _cancel,
        wmp.ManagerPing: _on_ping,
        wmp.ManagerPong: _on_pong,
        wmp.ManagerBye: _bye,
    }

    def _hear(self, route: Route, name: str | None, now_ns: int) -> Manager:
        manager = self._managers.touch(route, name, now_ns)
        if not manager.ping_after_ns:
            manager.ping_after_ns = self._settings.heartbeat_ns
            manager.ping_due_ns = now_ns + manager.ping_after_ns
        return manager

    # What managers are told.

    def _on_slot_free(self, now_ns: int) -> None:
        """A slot came free, or some are left: who has called is answered, and all are told."""
        self._answer_wakes(now_ns)
        self._ready_after_ns = READY_NS_MIN
        if self.slots_free <= 0:
            self._ready_due_ns = now_ns  # when a GIVE that took the slot is answered by NO
        elif not self.leaving:
            self._send_ready(now_ns)

    def _is_ready_due(self, now_ns: int) -> bool:
        return self.slots_free > 0 and not self.leaving and self._ready_due_ns <= now_ns

    def _send_ready(self, now_ns: int) -> None:
        settings = self._settings
        message = wmp.Ready(self._id, settings.slots, incarnation=settings.incarnation)
        if settings.incarnation:
            message.replaces = settings.replaces
            message.heartbeat_ms = settings.heartbeat_ns // _MILLISECOND_NS
        message.services = [text_of(one) for one in settings.services]
        for wire, quiet_until_ns in enumerate(self._quiet_until_ns):
            if quiet_until_ns <= now_ns:
                self._actions.append(Send(wire, wmp.encode((), message)))
                if not self._managers.on(wire):
                    # Whoever is there answers, and says by which way.
                    ping = wmp.WorkerPing(self._id, incarnation=settings.incarnation or None)
                    self._actions.append(Send(wire, wmp.encode((), ping)))
        self._ready_due_ns = now_ns + self._ready_after_ns
        self._ready_after_ns = min(2 * self._ready_after_ns, READY_NS_MAX)

    def _ping(self, manager: Manager, now_ns: int) -> None:
        heard = manager.last_seen_ns >= manager.pinged_ns
        heartbeat_ns = self._settings.heartbeat_ns
        longer_ns = min(2 * manager.ping_after_ns, max(heartbeat_ns, PING_NS_MAX))
        manager.ping_after_ns = heartbeat_ns if heard else longer_ns
        manager.ping_due_ns = now_ns + manager.ping_after_ns
        manager.pinged_ns = now_ns
        self._send_to(manager, self._heartbeat(wmp.WorkerPing, manager))

    def _heartbeat(
        self, kind: type[wmp.WorkerPing | wmp.WorkerPong], manager: Manager
    ) -> wmp.WorkerPing | wmp.WorkerPong:
        """A manager without a name may be known by other ways, too, for which other tasks are
        held: if there are none for this one, nothing is said about it."""
        sign = kind(self._id, manager=manager.name)
        if self._settings.incarnation:
            sign.number = next(self._sign_numbers)
        sign.heartbeat_ms = self._settings.heartbeat_ns // _MILLISECOND_NS
        if manager.held or manager.name is not None:
            sign.held = [(text_of(name), attempt) for name, attempt in manager.held]
            if wmp.encoded_size(sign) > wmp.HEADER_BYTES_MAX // 2:
                sign.held = None
        return sign

    def _report(self, held: Held, now_ns: int) -> None:
        held.sent_ns = now_ns
        held.sent_count += 1
        message = wmp.Done(self._id, text_of(held.name), held.attempt, held.status or "refused")  # type: ignore[arg-type]
        message.manager, message.bytes_total = held.owner, held.bytes_total
        self._send_to(held.manager, message, held.payload)

    def _keep(self, held: Held) -> None:
        self._reported[held.key] = held
        self._reported_bytes += len(held.payload)
        while (
            len(self._reported) > REPORTS_KEPT_MAX or self._reported_bytes > REPORTS_KEPT_BYTES_MAX
        ):
            self._drop(next(iter(self._reported.values())))

    def _drop(self, held: Held) -> None:
        """It is over, for us."""
        self._held.pop(held.key, None)
        held.manager.current().held.pop(held.key, None)
        if self._reported.pop(held.key, None) is not None:
            self._reported_bytes -= len(held.payload)

    def _report_again(self, now_ns: int) -> None:
        """What its manager should have told us to forget, if it had got it."""
        for held in [*self._reported.values()]:
            heard = held.manager.current().last_seen_ns > held.sent_ns
            if heard and held.sent_ns + REPORT_NS <= now_ns:
                if held.sent_count > REPORTS_MAX:
                    self._drop(held)
                else:
                    self._report(held, now_ns)

    def _end_locks(self, now_ns: int) -> None:
        ended = [request for request, ends_ns in self._locks.items() if ends_ns <= now_ns]
        for request in ended:
            del self._locks[request]
        if ended:
            self._on_slot_free(now_ns)

    def _send_bye(self, now_ns: int) -> None:
        """When the managers have the last reports, or have had the time to say so."""
        if not self._farewell_ends_ns:
            self._farewell_ends_ns = now_ns + BYE_NS_MAX
            for manager in self._managers:
                if manager.held:
                    self._ping(manager, now_ns)
        if not self._reported or now_ns >= self._farewell_ends_ns:
            self.gone = True
            for wire in range(len(self._quiet_until_ns)):
                self._actions.append(Send(wire, wmp.encode((), self._goodbye("leaves"))))

    def _send_to(self, manager: Manager, message: ToManager, payload: bytes | None = None) -> None:
        route = manager.current().route
        if route is not None:
            self._send(route, message, payload)

    def _send(self, route: Route, message: ToManager, payload: bytes | None = None) -> None:
        message.back = [*route.back] or None
        message.incarnation = self._settings.incarnation or None
        self._actions.append(Send(route.wire, wmp.encode((), message, payload)))

    def _taken(self) -> list[Action]:
        orders, self._actions = self._actions, []
        return orders
