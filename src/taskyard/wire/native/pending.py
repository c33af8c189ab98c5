"""Open requests of the native dialect, and the facts that workers have sent.

Each request gets a number. It goes into the event as `request` and returns with the effect that
replies to it. Requests that wait (a Steal, a Watch) have a deadline for their reply, so nothing is
kept for ever on behalf of a peer that is gone.
"""

from __future__ import annotations

from heapq import heappop
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from msgspec import Struct

from taskyard.core import effects, events
from taskyard.core.limits import NUMBER_MAX, SECOND_NS, TASKS_MAX
from taskyard.core.model import WorkerFacts
from taskyard.core.timer_heap import TimerHeap
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.dialect import TaskDefaults, chose_its_id, request_numbers
from taskyard.wire.native.frames import DIALECT, FACTS_CACHE_BYTES_MAX
from taskyard.wire.native.raw_messages import TooMany

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from taskyard.wire.dialect import Reply
    from taskyard.wire.health_views import BrokerMeasures


class HandOver(Protocol):
    """Ends a term of the broker, so that a standby takes over."""

    def __call__(self, epoch: int, *, force: bool) -> str:
        """Return why not, or "". With `force`, do it even if no standby is ready."""
        ...


def _no_standby(epoch: int, *, force: bool) -> str:  # noqa: ARG001  # as `HandOver`
    """Refuse, because only a journal in PostgreSQL can have a standby."""
    return "the broker has no standby: its journal is not in PostgreSQL"


#: Workers whose facts and last heartbeat are kept, with a few kilobytes each at most. Most workers
#: leave without an Exit.
FACTS_MAX: Final = 50_000

#: How long a plain worker keeps a task after a restart of the broker. It may have lost the task,
#: and can't report that.
PLAIN_LEASE_NS: Final = 600 * SECOND_NS

#: Workers with a routing id of their own whose routes are kept. A worker beyond them is not noticed
#: when it reconnects.
WORKERS_MAX: Final = 10_000

#: Routes of a process that are kept, the latest ones. It has one for each connection.
ROUTES_MAX: Final = 8

#: Processes of workers whose routes are kept. Most leave without an Exit.
PROCESSES_MAX: Final = 50_000

#: A process of a worker: its name and incarnation. None: a plain peer, which has no incarnation.
Process: TypeAlias = tuple[bytes, int | None]

#: How long the reply to a plain Steal is held, if the last reply was NotFound too: until the end of
#: the next step that begins after this time. So the holds of many idle peers end together.
HOLD_NS: Final = SECOND_NS // 50
HOLD_STEP_NS: Final = SECOND_NS // 50

#: Idle plain peers that are kept. A further peer gets its next NotFound at once.
IDLE_MAX: Final = 10_000

#: Requests of one route that may wait at once.
WAITING_MAX: Final = 1000

#: Names that one route may watch at once: the most tasks that can exist. More are names of tasks
#: that will never be submitted, and each is kept in memory until then.
WATCHED_NAMES_MAX: Final = TASKS_MAX

#: Requests that wait for tasks. A Complete that waits has a Steal in it.
STEALS: Final = (pb.QueryMsg.Steal, pb.QueryMsg.Complete)

#: In the first byte of a relayed peer's route, beside the number of the socket.
RELAYED: Final = 0x80

_Q: Final = pb.QueryMsg

_TASK_DEFAULTS: Final = TaskDefaults()

#: The most frequent replies to plain peers, encoded.
ENCODED_PLAIN: Final = {
    kind: _Q(type=kind).SerializeToString() for kind in (_Q.NotFound, _Q.OK, _Q.Exit, _Q.Error)
}


class Request(Struct):
    """A request."""

    route: bytes
    query: pb.QueryMsg
    #: The peer uses our fields and types.
    extended: bool
    now_ns: int


class PendingRequest(Struct):
    """A request without a reply."""

    route: bytes
    #: The type of the request.
    kind: pb.QueryMsg.Type
    #: The peer's number of the request. None: it has none.
    request: int | None
    #: The peer uses our fields and types.
    extended: bool
    #: Steal: send the tasks as columns.
    columns: bool = False
    #: Steal: send the times of their submission, too.
    forwards: bool = False
    worker: bytes = b""
    #: When it times out. 0: it gets its reply in this turn.
    deadline_ns: int = 0
    #: Watch: the number of tasks that are not settled, and the collected results.
    left: int = 0
    stream: bool = False
    notice: effects.Settled | None = None
    #: Complete with a Steal in it: tasks that the worker did not hold.
    missing: tuple[bytes, ...] = ()
    #: Heartbeat: the worker's waiting Steal that it names. 0: none.
    steal: int = 0

    def take_missing(self) -> dict[str, bytes]:
        """Return the field of a reply with the tasks that the worker did not hold, once."""
        missing, self.missing = self.missing, ()
        return {"reason": b"not held: " + b", ".join(missing)} if missing else {}


class KnownWorker(Struct, eq=False):
    """The last facts of a worker."""

    registration: events.WorkerRegistered
    #: The message with the facts, to recognize a repetition. b"": it is too long, or there is none.
    raw: bytes
    #: The waiting Steal that its last heartbeat names. 0: none.
    steal: int = 0

    @property
    def facts(self) -> WorkerFacts:
        return self.registration.facts


class PlainPeers(Struct, frozen=True):
    """The terms of plain peers at a socket: of the tasks that they create, and of workers."""

    #: A plain worker has no slots, no heartbeat and one service.
    worker: WorkerFacts
    tasks: TaskDefaults = TaskDefaults()


def plain_peers(
    restart_lease_ns: int = PLAIN_LEASE_NS,
    service: bytes = b"default",
    lease_timeout_ns: int = 0,
    tasks: TaskDefaults = _TASK_DEFAULTS,
) -> PlainPeers:
    """Return the terms of plain peers. `lease_timeout_ns` is the silence after which a worker loses
    its tasks, 0 for never."""
    facts = WorkerFacts(
        services=(service,),
        slots_total=0,
        lease_timeout_ns=lease_timeout_ns,
        dialect=DIALECT,
        restart_lease_ns=lease_timeout_ns or restart_lease_ns,
    )
    return PlainPeers(facts, tasks)


class PendingRequests:
    """Open requests by number, and the facts of workers."""

    #: Returns events for a request whose deadline has passed. The server sets it.
    on_deadline: Callable[[int, int], list[events.Event]]

    def __init__(
        self,
        broker: int,
        random_bits: Callable[[], int],
        dialect: int = 0,
        plain_lease_ns: int = PLAIN_LEASE_NS,
    ) -> None:
        #: The terms of plain peers: at the sockets with settings of their own, and elsewhere.
        self._plain_by_socket: dict[int, PlainPeers] = {}
        self._plain = plain_peers(plain_lease_ns)
        #: Distinguishes this process from earlier processes.
        self.broker = broker
        #: Any number from 0 to 2**32.
        self.random_bits = random_bits
        self.entries: dict[int, PendingRequest] = {}
        #: The numbers of the next requests.
        self.numbers = request_numbers(dialect)
        #: The last facts of each worker, so that the scheduler gets each of them once.
        self.facts: dict[bytes, KnownWorker] = {}
        #: The routes of each process's messages, the latest last. For an extended worker the first
        #: message by another route is the first on a new connection. Of a plain peer the first
        #: route is kept. The facts of a worker may be facts of a process that was refused.
        self.routes: dict[Process, tuple[bytes, ...]] = {}
        #: The process behind each route that its peer chose, the latest routes.
        self.workers: dict[bytes, Process] = {}
        #: Plain peers whose last reply was NotFound to a Steal, or whose Steal is held since.
        #: The number of that Steal, or 0.
        self.idle: dict[bytes, int] = {}
        #: Completes of this turn that may wait for tasks, and have no acknowledgement yet.
        self.unacknowledged: list[int] = []
        #: Tasks that a worker should stop, for the reply to its heartbeat.
        self.stops: dict[bytes, effects.Stop] = {}
        #: Waiting requests by route.
        self._waiting: dict[bytes, dict[int, None]] = {}
        #: Deadlines of waiting requests, by number.
        self.timers = TimerHeap()
        #: The broker is shutting down and accepts no more tasks.
        self.leaving = False
        #: Connections cut by the guard, by reason. The guard updates it.
        self.connections_cut: Mapping[str, int] = {}
        #: Measures the broker for its status. None: no broker is running.
        self.measures: Callable[[], BrokerMeasures] | None = None
        #: Ends a term of the broker, so that a standby takes over.
        self.hand_over: HandOver = _no_standby

    def set_plain(self, socket: int, plain: PlainPeers) -> None:
        """Set the terms of plain peers at the socket with this number."""
        self._plain_by_socket[socket] = plain

    def plain_at(self, route: bytes) -> PlainPeers:
        """Return the terms of a plain peer."""
        return self._plain_by_socket.get(route[0] & ~RELAYED, self._plain)

    def is_plain_worker(self, facts: WorkerFacts) -> bool:
        """Return whether these are the facts of a plain worker at any socket."""
        return facts == self._plain.worker or any(
            facts == plain.worker for plain in self._plain_by_socket.values()
        )

    def add(self, incoming: Request, **more: Any) -> int:  # noqa: ANN401
        """Add a request and return its number."""
        query = incoming.query
        request = query.request if query.HasField("request") else None
        entry = PendingRequest(incoming.route, query.type, request, incoming.extended, **more)
        number = next(self.numbers)
        self.entries[number] = entry
        if entry.deadline_ns:
            self._wait(number, entry)
        return number

    def _wait(self, number: int, entry: PendingRequest) -> None:
        """Let a request wait until its deadline."""
        self._waiting.setdefault(entry.route, {})[number] = None
        self.timers.add(entry.deadline_ns, self.on_deadline, number)

    def check_waiting(self, route: bytes) -> None:
        """Raise `TooMany` if too many requests of a route wait already."""
        if self.is_at_limit(route):
            raise TooMany(f"{WAITING_MAX} requests of this peer are waiting already")

    def is_at_limit(self, route: bytes) -> bool:
        return len(self._waiting.get(route, ())) >= WAITING_MAX

    def check_watched(self, incoming: Request, count: int) -> None:
        """Raise `TooMany` if a peer would watch too many names."""
        if self.exceeds_watch_limit(incoming, count):
            raise TooMany(
                f"this peer would watch more than {WATCHED_NAMES_MAX} names: wait until others are "
                "settled, or watch their campaign"
            )

    def exceeds_watch_limit(self, incoming: Request, count: int) -> bool:
        """Return whether a peer would watch too many names. A repeated watch counts once."""
        if incoming.route not in self._waiting:
            return count > WATCHED_NAMES_MAX
        waiting = self._waiting[incoming.route].keys() - self._former(incoming)
        return count + sum(self.entries[number].left for number in waiting) > WATCHED_NAMES_MAX

    def replace_watch(self, incoming: Request) -> list[events.Event]:
        """Drop earlier watches with the number of this request, which replaces them."""
        ended: list[events.Event] = []
        for number in self._former(incoming) if incoming.route in self._waiting else ():
            self.drop(number)
            ended.append(events.WatchEnded(0, incoming.route, number))
        return ended

    def _former(self, incoming: Request) -> list[int]:
        """Return the numbers of watches that this request replaces."""
        if not incoming.query.HasField("request"):
            return []
        request, former = incoming.query.request, list[int]()
        for number in self._waiting.get(incoming.route, ()):
            entry = self.entries[number]
            if entry.request == request and entry.kind == _Q.Watch:
                former.append(number)
        return former

    def name_steal(self, heartbeat: int, worker: bytes, request: int) -> None:
        """Note which waiting Steal a heartbeat names by the peer's number of it, 0 for none."""
        entry, found = self.entries[heartbeat], 0
        for number in self._waiting.get(entry.route, ()) if request else ():
            steal = self.entries[number]
            if steal.request == request and steal.kind in STEALS and steal.worker == worker:
                found = number
        entry.steal = self.facts[worker].steal = found

    def is_named(self, number: int) -> bool:
        """Return whether a waiting Steal is named by its worker's heartbeats. It waits until they
        don't, or until they cease: then the worker is lost, which ends its request."""
        known = self.facts.get(self.entries[number].worker)
        return known is not None and known.steal == number and known.facts.lease_timeout_ns > 0

    def drop(self, number: int) -> PendingRequest | None:
        """Remove a request: it has its reply, or its peer is gone."""
        entry = self.entries.pop(number, None)
        if entry is None:
            return None
        waiting = self._waiting.get(entry.route) if entry.deadline_ns else None
        if waiting is not None:
            waiting.pop(number, None)
            if not waiting:
                del self._waiting[entry.route]
            heap = self.timers.heap
            while heap[0][2] is self.on_deadline and heap[0][3] not in self.entries:
                heappop(heap)  # else an idle broker would wake up for nothing
        return entry

    def drop_route(self, route: bytes) -> list[tuple[int, PendingRequest]]:
        """Remove the waiting requests of a route and return them."""
        dropped = [(number, self.entries[number]) for number in self._waiting.get(route, ())]
        for number, _ in dropped:
            self.drop(number)
        return dropped

    def register_worker(
        self, incoming: Request, worker: bytes, facts: WorkerFacts
    ) -> list[events.Event]:
        """Return the registration of a worker, and before it the event of a new connection. Nothing
        if all is unchanged."""
        known, ahead = self.facts.get(worker), incoming.query.worker.ahead
        former = None if known is None else known.registration
        if former is None or former.facts != facts or former.prefetch != ahead:
            return self.worker_registered(incoming, worker, facts)
        return self.note_sender(incoming, worker, facts.incarnation)

    def note_sender(
        self, incoming: Request, worker: bytes, incarnation: int | None
    ) -> list[events.Event]:
        """Note the route of a message, if the process that sent it is known by its incarnation.
        Return an event if it came by a new connection."""
        if incarnation is None or not incoming.extended:
            return []
        process = (worker, incarnation)
        routes = self.routes.get(process)
        if routes and routes[-1] == incoming.route:
            return []
        return self._note_route(incoming.route, process, routes)

    def _note_route(
        self, route: bytes, process: Process, routes: tuple[bytes, ...] | None
    ) -> list[events.Event]:
        """Keep a route as the latest of a process. Return an event if it is a new connection."""
        result: list[events.Event] = []
        if routes is None:
            result = self._forget_excess()
        elif route not in routes:
            result = [events.WorkerReconnected(0, *process)]
        others = [one for one in routes or () if one != route]
        self.routes[process] = (*others[1 - ROUTES_MAX :], route)
        self.note_worker(route, process)
        return result

    def _forget_excess(self) -> list[events.Event]:
        """Make room for the routes of one more process. The next connection would not be noticed,
        so doubt its tasks now."""
        if len(self.routes) < PROCESSES_MAX:
            return []
        worker, incarnation = oldest = next(iter(self.routes))
        del self.routes[oldest]
        return [] if incarnation is None else [events.WorkerReconnected(0, worker, incarnation)]

    def worker_registered(
        self, incoming: Request, worker: bytes, facts: WorkerFacts
    ) -> list[events.Event]:
        """Keep the facts of a worker. Return its registration, and before it the event of a new
        connection, if it is one."""
        result = self.note_sender(incoming, worker, facts.incarnation)
        if not incoming.extended:
            self.routes.setdefault((worker, None), (incoming.route,))
        message = incoming.query.worker
        if len(self.facts) >= FACTS_MAX and worker not in self.facts:
            self.facts.clear()  # live workers send them again
        raw = message.SerializeToString()
        if len(raw) > FACTS_CACHE_BYTES_MAX or len(worker) > FACTS_CACHE_BYTES_MAX:
            raw = b""
        replaces = min(message.replaces, NUMBER_MAX)
        registration = events.WorkerRegistered(0, worker, facts, message.ahead, replaces)
        self.facts[worker] = KnownWorker(registration, raw)
        return [*result, registration]

    def note_worker(self, route: bytes, process: Process) -> None:
        """Keep a process by its route, if a new connection can have that route."""
        if not chose_its_id(route):
            return
        self.workers.pop(route, None)
        self.workers[route] = process
        if len(self.workers) > WORKERS_MAX:
            del self.workers[next(iter(self.workers))]

    def renew(self, route: bytes) -> list[events.Event]:
        """Note that the next message by a route comes by a new connection. The first one of an
        extended worker shows whether it is the same process."""
        process = self.workers.get(route)
        if process is None:
            return []
        if process[1] is None:
            return [events.WorkerReconnected(0, process[0])]
        if process in self.routes:
            self.routes[process] = tuple([one for one in self.routes[process] if one != route])
        return []

    def behind(self, routes: Collection[bytes]) -> list[events.Event]:
        """Return events for the workers behind a lost connection of a relay, whose messages may be
        lost with it."""
        return [
            events.WorkerReconnected(0, *process)
            for process, kept in (self.routes.items() if routes else ())
            if kept and kept[-1] in routes
        ]

    # Idle plain peers. dwork's workers steal again as soon as they get NotFound.

    def note_idle(self, number: int, steal: PendingRequest) -> None:
        """Note that a plain Steal got NotFound: the reply to the next Steal is held, unless the
        peer has sent another request since."""
        route = steal.route
        if steal.deadline_ns and self.idle.get(route) != number:
            return
        if len(self.idle) >= IDLE_MAX:
            del self.idle[next(iter(self.idle))]
        self.idle[route] = 0

    def hold(self, steal: events.TasksRequested, now_ns: int) -> None:
        """Let a plain Steal wait for tasks for a moment."""
        entry = self.entries[steal.request]
        entry.deadline_ns = -(-(now_ns + HOLD_NS) // HOLD_STEP_NS) * HOLD_STEP_NS
        self._wait(steal.request, entry)
        self.idle[entry.route] = steal.request
        steal.parks = True

    def extend(self, number: int, deadline_ns: int) -> None:
        """Set a new deadline of a request."""
        self.entries[number].deadline_ns = deadline_ns
        self.timers.add(deadline_ns, self.on_deadline, number)

    # Replies.

    def answer(self, number: int, kind: pb.QueryMsg.Type, **fields: Any) -> list[Reply]:  # noqa: ANN401
        """Reply to a request and remove it."""
        entry = self.drop(number)
        return [] if entry is None else [self.reply(entry, kind, **fields)]

    def reply(self, entry: PendingRequest, kind: pb.QueryMsg.Type, **fields: Any) -> Reply:  # noqa: ANN401
        if not entry.extended:
            body = None if fields else ENCODED_PLAIN.get(kind)
            return entry.route, [b"", body or _Q(type=kind, **fields).SerializeToString()]
        query = _Q(type=kind, broker=self.broker, **fields)
        if entry.request is not None:
            query.request = entry.request
        return entry.route, [b"", query.SerializeToString()]

    def acknowledge_reports(self) -> list[Reply]:
        """Acknowledge the reports of this turn whose Completes wait for tasks from now on."""
        replies: list[Reply] = []
        for number in self.unacknowledged:
            entry = self.entries.get(number)
            if entry is not None:
                missing = entry.take_missing() if entry.missing else {}
                replies.append(self.reply(entry, _Q.OK, **missing))
        self.unacknowledged.clear()
        return replies

    def fields_if_extended(self, number: int, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return these fields if the peer of the request uses them, else none."""
        entry = self.entries.get(number)
        return fields if entry is not None and entry.extended else {}
