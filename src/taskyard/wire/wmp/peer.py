"""WMP at a worker: managers, slots, locks, held tasks, and messages. No I/O, no clock.

Messages and outcomes of tasks go in, actions come out: messages to send, tasks to start and stop. A
worker has a connection to each manager or relay in its settings, and finds any number of managers
behind them.

    slots_free = slots - running tasks - locks

A report is kept, listed as held and sent again until its manager has it, because a relay may have
failed with it. A manager that has settled the task replies to a heartbeat that lists it with
CANCEL, as for any task that is not the worker's. So reports need no acknowledgement of their own.
To a manager that sends no such CANCEL, a report is sent a few times more than needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from msgspec import Struct, field, structs

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Malformed
from taskyard.wire.wmp import frames as wmp
from taskyard.wire.wmp.frames import Side, name_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


#: Managers that are kept, and routes to each. Beyond that a new manager or route replaces the
#: entry that was silent for longest.
MANAGERS_MAX: Final = 1_000
ROUTES_MAX: Final = 16


class Route(Struct, frozen=True):
    """A connection, by number, and the upstreams behind it."""

    wire: int
    back: tuple[int, ...] = ()


class Manager(Struct, eq=False):
    """A manager and the state that a worker keeps of it."""

    #: The name. None: it sends no name.
    name: str | None
    #: The route of its last message is the last.
    routes: dict[Route, None] = field(default_factory=dict)
    last_seen_ns: int = 0
    #: When to send the next heartbeat, and the interval after that.
    ping_due_ns: int = 0
    ping_after_ns: int = 0
    pinged_ns: int = 0
    #: The interval that it has set.
    heartbeat_ns: int = SECOND_NS
    #: Tasks that are held for it. Heartbeats to it list these only.
    held: dict[tuple[bytes, int], None] = field(default_factory=dict)
    #: It has sent BYE.
    is_over: bool = False
    #: Why it refuses the worker's id for now. Empty: it does not.
    name_held: str = ""

    #: The manager that it is, found by another route.
    became: Manager | None = None

    @property
    def route(self) -> Route | None:
        """Return the route of its last message, or None if there is none any more."""
        return next(reversed(self.routes), None)

    def current(self) -> Manager:
        return self if self.became is None else self.became.current()


class Managers:
    """All managers, by the time of the latest message, the newest last."""

    def __init__(self) -> None:
        self._by_way: dict[Route, Manager] = {}
        self._known: dict[int, Manager] = {}

    def __iter__(self) -> Iterator[Manager]:
        return iter([*self._known.values()])

    def touch(self, route: Route, name: str | None, now_ns: int) -> Manager:
        """Return the manager that sent a message by this route, with this name if it sent any."""
        manager = self._find(route, name)
        manager.last_seen_ns = now_ns
        manager.routes.pop(route, None)
        manager.routes[route] = None
        self._by_way[route] = manager
        self._known[id(manager)] = self._known.pop(id(manager), manager)
        if len(manager.routes) > ROUTES_MAX:
            self._drop_way(manager, next(iter(manager.routes)))
        if len(self._known) > MANAGERS_MAX:
            self.forget(next(iter(self._known.values())))
        return manager

    def _find(self, route: Route, name: str | None) -> Manager:
        here = self._by_way.get(route)
        if here is not None and name in (None, here.name):
            return here
        named = None if name is None else self._named(name)
        if here is None:
            return named or Manager(name)
        if named is None and len(here.routes) == 1:
            here.name = name  # it sends its name now, or has a new one since a restart
            return here
        named = named or Manager(name)
        self._move(route, here, named)
        return named

    def _named(self, name: str) -> Manager | None:
        return next((one for one in self._known.values() if one.name == name), None)

    def _move(self, route: Route, former: Manager, manager: Manager) -> None:
        """Assign a route to another manager. If the former has no other route, both are the same,
        under another name."""
        self._drop_way(former, route)
        if not former.routes:
            manager.held.update(former.held)
            former.became = manager
            self.forget(former)

    def _drop_way(self, manager: Manager, route: Route) -> None:
        manager.routes.pop(route, None)
        self._by_way.pop(route, None)

    def forget(self, manager: Manager) -> None:
        for route in [*manager.routes]:
            self._drop_way(manager, route)
        self._known.pop(id(manager), None)

    def on(self, wire: int) -> list[Manager]:
        """Return the managers with a route by this connection."""
        return [one for one in self if any(route.wire == wire for route in one.routes)]


#: The interval of READY while there are free slots, because a manager may have lost it.
READY_NS_MIN: Final = SECOND_NS
READY_NS_MAX: Final = 32 * SECOND_NS

#: A lock without TAKE or NO ends after this.
LOCK_NS: Final = 5 * SECOND_NS

#: How long a slot is not offered after its task was refused because no process could be started.
REST_NS: Final = SECOND_NS

#: How long a manager waits for the reply to its WAKE. After that another worker gets it.
WAKE_NS: Final = SECOND_NS

#: WAKEs that wait for a slot, one for each route.
WAKES_MAX: Final = 1_000

#: The longest interval of heartbeats to a silent manager. It doubles up to this.
PING_NS_MAX: Final = 8 * SECOND_NS

#: Bounds of the interval that a manager may set. A manager pings a worker after 5 s of silence.
HEARTBEAT_NS_MIN: Final = SECOND_NS // 10
HEARTBEAT_NS_MAX: Final = 4 * SECOND_NS

#: Heartbeats in the time of a lease: one or two may be lost.
PINGS_PER_LEASE: Final = 3

#: Silence after which a manager for whom no task is held is forgotten.
FORGOTTEN_NS: Final = 120 * SECOND_NS

#: When to repeat a report if its manager has sent a message since, and how often, in case that the
#: manager sends no CANCEL.
REPORT_NS: Final = 3 * SECOND_NS
REPORTS_MAX: Final = 5

#: Reports that are kept for repetition, and their bytes. If managers are away for longer, the
#: oldest are dropped, and the tasks run again.
REPORTS_KEPT_MAX: Final = 1_000
REPORTS_KEPT_BYTES_MAX: Final = 64 << 20

#: How long to wait at exit until the managers have the last reports.
BYE_NS_MAX: Final = 2 * SECOND_NS

_MILLISECOND_NS: Final = SECOND_NS // 1000

Key: TypeAlias = tuple[bytes, int]

#: Messages to one manager.
ToManager: TypeAlias = wmp.Give | wmp.Done | wmp.Status | wmp.WorkerPing | wmp.WorkerPong


class Settings(Struct, frozen=True):
    """The worker's id, services and slots."""

    worker: bytes
    #: Empty: its managers choose them, as for workers that name none.
    services: tuple[bytes, ...] = (b"default",)
    slots: int = 1
    #: Distinguishes this process from earlier processes of the same id.
    incarnation: int = 0
    #: 0: each manager sets it, up to HEARTBEAT_NS_MAX.
    heartbeat_ns: int = SECOND_NS
    #: A supervisor saw all processes of its id end, from this incarnation on. 0: no supervisor.
    replaces: int = 0
    #: It submits its tasks to another broker, and to which.
    forwards: bool = False
    forwards_to: bytes = b""


class Send(Struct):
    """Send frames by a connection."""

    wire: int
    frames: list[bytes]


class Start(Struct):
    """Start a task."""

    name: bytes
    attempt: int
    service: bytes
    payload: bytes
    #: 0: no limit.
    time_limit_ns: int = 0
    slots: int = 1
    #: The manager that owns it. None: it has no name.
    owner: str | None = None
    #: The route that it came by.
    route: Route = Route(0)
    #: When it was submitted. 0: only some managers send it, to workers that forward.
    submitted_ns: int = 0


class Stop(Struct):
    """Stop a task. The outcome is ignored."""

    name: bytes
    attempt: int
    #: It has ended at its manager. Otherwise another worker may hold it.
    ended: bool = False


Action: TypeAlias = Send | Start | Stop


class Held(Struct):
    """A task, from TAKE until its manager has the report."""

    name: bytes
    attempt: int
    manager: Manager
    #: The manager in TAKE, repeated in every report.
    owner: str | None
    slots: int = 1
    #: The outcome. None: it is running.
    status: str | None = None
    payload: bytes = b""
    #: Length of the result before it was truncated. 0: it is complete.
    bytes_total: int = 0
    sent_ns: int = 0
    sent_count: int = 0
    #: The manager sends whether a task that it stops has ended.
    is_end_sent: bool = False

    @property
    def key(self) -> Key:
        return self.name, self.attempt


class Worker:
    """A worker and all its managers. `wires` is the number of its connections."""

    def __init__(self, settings: Settings, wires: int, now_ns: int) -> None:
        self._settings = settings
        self._id = text_of(settings.worker)
        self._managers = Managers()
        #: Locks by request, and when they end.
        self._locks: dict[str, int] = {}
        self._lock_numbers = count(1)
        #: Numbers of PINGs and PONGs. If one overtakes another, the higher number is newer.
        self._heartbeat_numbers = count(1)
        #: WAKEs that wait for a slot, and until when, in order of arrival.
        self._wakes: dict[Route, int] = {}
        self._held: dict[Key, Held] = {}
        #: Slots of running tasks.
        self._slots_used = 0
        #: Tasks with a report, oldest first.
        self._reported: dict[Key, Held] = {}
        self._reported_bytes = 0
        self._ready_due_ns = now_ns
        self._ready_after_ns = READY_NS_MIN
        #: When to send READY again by a connection whose managers have all sent BYE.
        self._quiet_until_ns = [now_ns] * wires
        self._actions: list[Action] = []
        self._exit_ends_ns = 0
        #: It takes no more tasks, and exits when it holds none.
        self.leaving = False
        #: It has sent BYE to all managers.
        self.gone = False
        #: Malformed messages.
        self.malformed = 0
        #: Why a manager gave its id to another process for good. Empty: none did.
        self.name_lost = ""
        #: Why a manager does not allow the key. Empty: none has sent that.
        self.forbidden = ""

    @property
    def slots_free(self) -> int:
        """Return the free slots. Below 0 if a task needs more slots than its lock."""
        return self._settings.slots - self._slots_used - len(self._locks)

    @property
    def working(self) -> int:
        """Return the number of running tasks."""
        return len(self._held) - len(self._reported)

    @property
    def unconfirmed(self) -> int:
        """Return the number of reports that managers may not have."""
        return len(self._reported)

    @property
    def name_held(self) -> str:
        """Return why a manager refuses its id for now. Empty: none does."""
        return next((one.name_held for one in self._managers if one.name_held), "")

    @property
    def is_dismissed(self) -> bool:
        """Return whether all managers on all connections have sent BYE."""
        managers = [self._managers.on(wire) for wire in range(len(self._quiet_until_ns))]
        return all(on and all(one.is_over for one in on) for on in managers)

    # Input.

    def take(self, wire: int, frames: Sequence[bytes], now_ns: int) -> list[Action]:
        """Handle a message. Never raises."""
        try:
            self._decode(wire, frames, now_ns)
        except Malformed:
            self.malformed += 1
        return self._taken()

    def _decode(self, wire: int, frames: Sequence[bytes], now_ns: int) -> None:
        path, message, payload = wmp.decode(frames, Side.MANAGER)
        if path:
            raise Malformed("a message to a worker must not have a path")
        route = Route(wire, tuple(message.back or ()))
        # The manager in TAKE is the owner of the task, which may be behind this manager.
        name = None if isinstance(message, wmp.Take) else message.manager
        self._HANDLERS[type(message)](
            self, self._touch(route, name, now_ns), message, payload, now_ns
        )

    def done(
        self, key: Key, status: str, payload: bytes, now_ns: int, bytes_total: int = 0
    ) -> list[Action]:
        """Report a task: `ok` and its result, or `error` or `refused` and the reason."""
        held = self._held.get(key)
        if held is not None and held.status is None:
            held.status, held.payload, held.bytes_total = status, payload, bytes_total
            self._slots_used -= held.slots
            self._report(held, now_ns)
            if status == "refused":
                self._drop(held)  # if the report is lost, the task returns as not listed
                self._rest(now_ns)
            else:
                self._keep(held)
            self._on_slot_free(now_ns)
        return self._taken()

    def _rest(self, now_ns: int) -> None:
        """Lock the slot for a while. Otherwise it would get the same task at once."""
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

    def set_slots(self, slots: int, now_ns: int) -> list[Action]:
        """Use another number of slots from now on."""
        self._settings = structs.replace(self._settings, slots=slots)
        self._on_slot_free(now_ns)
        return self._taken()

    @property
    def heartbeat_ns(self) -> int:
        """The longest interval of its heartbeats to a manager."""
        return max(map(self._heartbeat_ns, self._managers), default=self._settings.heartbeat_ns)

    def leave(self, now_ns: int) -> list[Action]:
        """Take no more tasks. The worker exits when its tasks are reported."""
        self.leaving = True
        self._locks.clear()
        self._wakes.clear()
        return self.time_passed(now_ns)

    def time_passed(self, now_ns: int) -> list[Action]:
        """Do everything that is due."""
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
        """Return when to call `time_passed`. None: when a message arrives."""
        times = [*self._locks.values()]
        times += [manager.ping_due_ns for manager in self._managers]
        if self.slots_free > 0 and not self.leaving:
            times.append(self._ready_due_ns)
        if self._exit_ends_ns:
            times.append(self._exit_ends_ns)
        return min(times, default=None)

    # Messages of managers.

    def _wake(self, manager: Manager, _message: wmp.Wake, _payload: bytes, now_ns: int) -> None:
        manager.is_over = False
        route = manager.route  # the route of this message
        if route is None or self.leaving or len(self._wakes) >= WAKES_MAX:
            return
        self._quiet_until_ns[route.wire] = now_ns
        self._wakes.setdefault(route, now_ns + WAKE_NS)
        self._answer_wakes(now_ns)

    def _answer_wakes(self, now_ns: int) -> None:
        """Reply to WAKEs in order of arrival, with one lock for each free slot."""
        while self._wakes and self.slots_free > 0:
            route = next(iter(self._wakes))
            if self._wakes.pop(route) > now_ns:
                self._give(route, now_ns)

    def _give(self, route: Route, now_ns: int) -> None:
        request = str(next(self._lock_numbers))
        self._locks[request] = now_ns + LOCK_NS
        services = [text_of(one) for one in self._settings.services]
        give = wmp.Give(self._id, request, services or None, forwards=self._settings.forwards)
        self._send(route, give)

    def _take(self, manager: Manager, message: wmp.Take, payload: bytes, now_ns: int) -> None:
        self._locks.pop(str(message.request), None)
        name, service = name_of(message.task), name_of(message.service, "service")
        known = self._held.get((name, message.attempt))
        if known is not None and known.manager.current() is manager:
            return  # a repeated TAKE
        held = Held(name, message.attempt, manager, message.manager, message.slots)
        if known is not None or self.leaving or self.slots_free <= 0:
            held.status = "refused"
            self._report(held, now_ns)
            if known is not None:  # another manager's, of the same name
                self._rest(now_ns)
        else:
            held.is_end_sent = message.submitted_ns > 0
            self._held[held.key] = held
            manager.held[held.key] = None
            self._slots_used += held.slots
            self._raise_ping_rate(manager, message.lease_ms * _MILLISECOND_NS, now_ns)
            start = Start(name, message.attempt, service, payload)
            start.time_limit_ns = message.time_limit_ms * _MILLISECOND_NS
            start.slots, start.submitted_ns = message.slots, message.submitted_ns
            start.owner, start.route = message.manager, manager.route or start.route
            self._actions.append(start)
        self._on_slot_free(now_ns)

    def _raise_ping_rate(self, manager: Manager, lease_ns: int, now_ns: int) -> None:
        """Send heartbeats often enough for a short lease."""
        if 0 < lease_ns < PINGS_PER_LEASE * self._heartbeat_ns(manager):
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
            ended = message.ended or not held.is_end_sent
            self._actions.append(Stop(*held.key, ended=ended))
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
        """Send READY again to a manager that has lost it, and use its interval."""
        manager.name_held = ""
        if message.heartbeat_ms and not self._settings.heartbeat_ns:
            heartbeat_ns = message.heartbeat_ms * _MILLISECOND_NS
            manager.heartbeat_ns = min(max(heartbeat_ns, HEARTBEAT_NS_MIN), HEARTBEAT_NS_MAX)
            manager.ping_after_ns = manager.heartbeat_ns
            manager.ping_due_ns = (manager.pinged_ns or now_ns) + manager.heartbeat_ns
        if not message.ready and self.slots_free > 0 and not self.leaving:
            self._send_ready(now_ns)

    def _bye(self, manager: Manager, message: wmp.ManagerBye, _payload: bytes, now_ns: int) -> None:
        """Mark a manager that has no tasks for this worker. After a restart it may have some."""
        if message.code in (wmp.NAME_HELD, wmp.NAME_LOST):
            self._on_name_refused(manager, message, now_ns)
            return
        if message.code == wmp.FORBIDDEN:
            self.forbidden = message.reason
        manager.is_over = True
        for route in manager.routes:
            self._wakes.pop(route, None)
        for wire in dict.fromkeys(route.wire for route in manager.routes):
            if all(one.is_over and not one.held for one in self._managers.on(wire)):
                self._quiet_until_ns[wire] = now_ns + READY_NS_MAX
                self._actions.append(Send(wire, wmp.encode((), self._exit_message())))

    def _on_name_refused(self, manager: Manager, message: wmp.ManagerBye, now_ns: int) -> None:
        """Stop the tasks of a manager that refuses the id, and send READY soon."""
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

    def _exit_message(self, reason: str = "") -> wmp.WorkerBye:
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

    def _touch(self, route: Route, name: str | None, now_ns: int) -> Manager:
        manager = self._managers.touch(route, name, now_ns)
        if not manager.ping_after_ns:
            manager.ping_after_ns = self._heartbeat_ns(manager)
            manager.ping_due_ns = now_ns + manager.ping_after_ns
        return manager

    # Messages to managers.

    def _on_slot_free(self, now_ns: int) -> None:
        """Reply to waiting WAKEs, and send READY if slots are left."""
        self._answer_wakes(now_ns)
        self._ready_after_ns = READY_NS_MIN
        if self.slots_free <= 0:
            self._ready_due_ns = now_ns  # sent when a GIVE that took the slot gets NO
        elif not self.leaving:
            self._send_ready(now_ns)

    def _is_ready_due(self, now_ns: int) -> bool:
        return self.slots_free > 0 and not self.leaving and self._ready_due_ns <= now_ns

    def _send_ready(self, now_ns: int) -> None:
        settings = self._settings
        message = wmp.Ready(self._id, settings.slots, incarnation=settings.incarnation)
        message.forwards = settings.forwards
        message.forwards_to = text_of(settings.forwards_to) or None
        if settings.incarnation:
            message.replaces = settings.replaces
            longest_ns = settings.heartbeat_ns or HEARTBEAT_NS_MAX
            message.heartbeat_ms = longest_ns // _MILLISECOND_NS
        message.services = [text_of(one) for one in settings.services] or None
        for wire, quiet_until_ns in enumerate(self._quiet_until_ns):
            if quiet_until_ns <= now_ns:
                self._actions.append(Send(wire, wmp.encode((), message)))
                if not self._managers.on(wire):
                    # A manager replies, and its reply has the route.
                    ping = wmp.WorkerPing(self._id, incarnation=settings.incarnation or None)
                    self._actions.append(Send(wire, wmp.encode((), ping)))
        self._ready_due_ns = now_ns + self._ready_after_ns
        self._ready_after_ns = min(2 * self._ready_after_ns, READY_NS_MAX)

    def _heartbeat_ns(self, manager: Manager) -> int:
        return self._settings.heartbeat_ns or manager.heartbeat_ns

    def _ping(self, manager: Manager, now_ns: int) -> None:
        was_answered = manager.last_seen_ns >= manager.pinged_ns
        heartbeat_ns = self._heartbeat_ns(manager)
        longer_ns = min(2 * manager.ping_after_ns, max(heartbeat_ns, PING_NS_MAX))
        manager.ping_after_ns = heartbeat_ns if was_answered else longer_ns
        manager.ping_due_ns = now_ns + manager.ping_after_ns
        manager.pinged_ns = now_ns
        self._send_to(manager, self._heartbeat(wmp.WorkerPing, manager))

    def _heartbeat(
        self, kind: type[wmp.WorkerPing | wmp.WorkerPong], manager: Manager
    ) -> wmp.WorkerPing | wmp.WorkerPong:
        """Return a heartbeat. A manager without a name may have other routes, for which other tasks
        are held. If none is held for this route, the list is left out."""
        message = kind(self._id, manager=manager.name)
        if self._settings.incarnation:
            message.number = next(self._heartbeat_numbers)
        message.heartbeat_ms = self._heartbeat_ns(manager) // _MILLISECOND_NS
        message.follows = not self._settings.heartbeat_ns
        if manager.held or manager.name is not None:
            message.held = [(text_of(name), attempt) for name, attempt in manager.held]
            if wmp.encoded_size(message) > wmp.HEADER_BYTES_MAX // 2:
                message.held = None
        return message

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
        """Forget a task."""
        self._held.pop(held.key, None)
        held.manager.current().held.pop(held.key, None)
        if self._reported.pop(held.key, None) is not None:
            self._reported_bytes -= len(held.payload)

    def _report_again(self, now_ns: int) -> None:
        """Repeat reports that their managers have not cancelled, so may not have."""
        for held in [*self._reported.values()]:
            is_alive = held.manager.current().last_seen_ns > held.sent_ns
            if is_alive and held.sent_ns + REPORT_NS <= now_ns:
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
        """Send BYE when the managers have the last reports, or after a timeout."""
        if not self._exit_ends_ns:
            self._exit_ends_ns = now_ns + BYE_NS_MAX
            for manager in self._managers:
                if manager.held:
                    self._ping(manager, now_ns)
        if not self._reported or now_ns >= self._exit_ends_ns:
            self.gone = True
            for wire in range(len(self._quiet_until_ns)):
                self._actions.append(Send(wire, wmp.encode((), self._exit_message("exits"))))

    def _send_to(self, manager: Manager, message: ToManager, payload: bytes | None = None) -> None:
        route = manager.current().route
        if route is not None:
            self._send(route, message, payload)

    def _send(self, route: Route, message: ToManager, payload: bytes | None = None) -> None:
        message.back = [*route.back] or None
        message.incarnation = self._settings.incarnation or None
        self._actions.append(Send(route.wire, wmp.encode((), message, payload)))

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
