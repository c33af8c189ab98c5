"""The desk of the native dialect: who asked what and is not answered yet, and who works.

A request gets a ticket. The ticket's number goes into the event as `request` and comes back with
the effect that answers it. Requests that wait (a Steal, a Watch) have a time at which they are
answered whatever is there, so nothing is kept for ever on behalf of a peer that is gone.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.core import effects, events
from taskyard.core.limits import NUMBER_MAX, SECOND_NS, TASKS_MAX
from taskyard.core.model import WorkerFacts
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.dialect import request_numbers
from taskyard.wire.native.frames import DIALECT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from taskyard.wire.dialect import Reply

#: Workers whose words are remembered; most that are not there any more never say so.
FACTS_MAX: Final = 10_000

#: A plain worker keeps a task for this long after a restart of the broker: it may have lost it, and
#: can't tell.
PLAIN_LEASE_NS: Final = 600 * SECOND_NS

#: Requests of one route that may wait at once.
WAITING_MAX: Final = 1000

#: Names that one route may watch at once: as many as there can be tasks. More are of tasks that
#: nobody will ever submit, and each is kept in memory until then.
WATCHED_NAMES_MAX: Final = TASKS_MAX

_Q: Final = pb.QueryMsg

#: What a plain peer hears most, ready to send.
_ENCODED_PLAIN: Final = {
    kind: _Q(type=kind).SerializeToString() for kind in (_Q.NotFound, _Q.OK, _Q.Exit, _Q.Error)
}


class Request(Struct):
    """One request."""

    route: bytes
    query: pb.QueryMsg
    #: The peer knows our fields and types.
    extended: bool
    now_ns: int


class PendingRequest(Struct):
    """A request that is not answered yet."""

    route: bytes
    #: What it asked for.
    kind: pb.QueryMsg.Type
    #: The peer's own number for it; None: it gave none.
    request: int | None
    #: The peer knows our fields and types.
    extended: bool
    #: Steal: tasks are to come as columns.
    columns: bool = False
    worker: bytes = b""
    #: When it is looked at again; 0: it is answered in this turn.
    deadline_ns: int = 0
    #: Watch: how many tasks are not settled, and what was told of those that are.
    left: int = 0
    stream: bool = False
    notice: effects.Settled | None = None
    #: Complete with a Steal in it: what was not the worker's.
    missing: tuple[bytes, ...] = ()


class PendingRequests:
    """Tickets, and what is remembered of workers."""

    def __init__(
        self,
        broker: int,
        random_bits: Callable[[], int],
        dialect: int = 0,
        plain_lease_ns: int = PLAIN_LEASE_NS,
    ) -> None:
        #: What the scheduler is told of a plain worker: no slots, no heartbeat, one service.
        self.plain_worker = WorkerFacts(
            slots_total=0, dialect=DIALECT, restart_lease_ns=plain_lease_ns
        )
        #: Tells this process from the one before it.
        self._broker = broker
        #: Any number from 0 to 2**32.
        self.random_bits = random_bits
        self.entries: dict[int, PendingRequest] = {}
        self._numbers = request_numbers(dialect)
        #: What workers said of themselves last, so that it is told to the scheduler once.
        self.facts: dict[bytes, tuple[WorkerFacts, int]] = {}
        #: Tasks that a worker should stop; told when its heartbeat is answered.
        self.stops: dict[bytes, effects.Stop] = {}
        #: Requests that wait, by route.
        self._waiting: dict[bytes, dict[int, None]] = {}
        #: (when, ticket): what waits is looked at then.
        self._ends: list[tuple[int, int]] = []
        #: No more tasks are taken: the broker is about to leave.
        self.leaving = False
        #: Connections that were cut, by reason. Whoever cuts them counts.
        self.connections_cut: Mapping[str, int] = {}

    def add(self, incoming: Request, **more: Any) -> int:  # noqa: ANN401
        """A ticket for a request. Returns its number."""
        query = incoming.query
        request = query.request if query.HasField("request") else None
        entry = PendingRequest(incoming.route, query.type, request, incoming.extended, **more)
        number = next(self._numbers)
        self.entries[number] = entry
        if entry.deadline_ns:
            self._waiting.setdefault(incoming.route, {})[number] = None
            heappush(self._ends, (entry.deadline_ns, number))
        return number

    def check_waiting(self, route: bytes) -> None:
        """Refuse one more request that waits, where there are too many."""
        if self.is_at_limit(route):
            raise Malformed(f"{WAITING_MAX} requests of this peer wait already")

    def is_at_limit(self, route: bytes) -> bool:
        return len(self._waiting.get(route, ())) >= WAITING_MAX

    def check_watched(self, incoming: Request, count: int) -> None:
        """Refuse to watch so many names more, where there are too many."""
        if self.exceeds_watch_limit(incoming, count):
            raise Malformed(
                f"{count} names more would make over {WATCHED_NAMES_MAX} that this peer watches at "
                "once: watch them when others are settled, or watch their campaign"
            )

    def exceeds_watch_limit(self, incoming: Request, count: int) -> bool:
        """What is asked for again does not count twice."""
        waiting = self._waiting.get(incoming.route, {}).keys() - self._former(incoming)
        return count + sum(self.entries[number].left for number in waiting) > WATCHED_NAMES_MAX

    def replace_watch(self, incoming: Request) -> list[events.Event]:
        """A watch that is asked for again, by its own number, takes the place of the former."""
        former = self._former(incoming)
        for number in former:
            self.drop(number)
        return [events.WatchEnded(0, incoming.route, number) for number in former]

    def _former(self, incoming: Request) -> list[int]:
        """The watches that have the number of this request."""
        if not incoming.query.HasField("request"):
            return []
        request = incoming.query.request
        waiting = [
            (number, self.entries[number]) for number in self._waiting.get(incoming.route, ())
        ]
        return [
            number
            for number, entry in waiting
            if entry.request == request and entry.kind == _Q.Watch
        ]

    def drop(self, number: int) -> PendingRequest | None:
        """A request is answered, or nobody waits for its answer any more."""
        entry = self.entries.pop(number, None)
        if entry is None:
            return None
        waiting = self._waiting.get(entry.route) if entry.deadline_ns else None
        if waiting is not None:
            waiting.pop(number, None)
            if not waiting:
                del self._waiting[entry.route]
        return entry

    def drop_route(self, route: bytes) -> list[tuple[int, PendingRequest]]:
        """Nobody waits there any more. Returns what waited."""
        dropped = [(number, self.entries[number]) for number in self._waiting.get(route, ())]
        for number, _ in dropped:
            self.drop(number)
        return dropped

    def register_worker(
        self, worker: bytes, facts: WorkerFacts, message: pb.WorkerMsg
    ) -> list[events.Event]:
        """Tell the scheduler who works, if it was not told so already."""
        if self.facts.get(worker) == (facts, message.ahead):
            return []
        return [self.worker_registered(worker, facts, message)]

    def worker_registered(
        self, worker: bytes, facts: WorkerFacts, message: pb.WorkerMsg
    ) -> events.Event:
        """What a worker says of itself, to tell and to remember."""
        if len(self.facts) >= FACTS_MAX and worker not in self.facts:
            self.facts.clear()  # who is still there says it again
        self.facts[worker] = (facts, message.ahead)
        replaces = min(message.replaces, NUMBER_MAX)
        return events.WorkerRegistered(0, worker, facts, message.ahead, replaces)

    # Time.

    def wake_at_ns(self) -> int | None:
        """When a request has waited long enough; None while none waits."""
        while self._ends and self._ends[0][1] not in self.entries:
            heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def timed_out(self, now_ns: int) -> list[tuple[int, PendingRequest]]:
        """The requests that have waited long enough, each told once."""
        timed_out: list[tuple[int, PendingRequest]] = []
        while self._ends and self._ends[0][0] <= now_ns:
            number = heappop(self._ends)[1]
            if number in self.entries:
                timed_out.append((number, self.entries[number]))
        return timed_out

    def extend(self, number: int, deadline_ns: int) -> None:
        """Let a request wait until then."""
        self.entries[number].deadline_ns = deadline_ns
        heappush(self._ends, (deadline_ns, number))

    # Replies.

    def answer(self, number: int, kind: pb.QueryMsg.Type, **fields: Any) -> list[Reply]:  # noqa: ANN401
        """Answer a request and forget it."""
        entry = self.drop(number)
        return [] if entry is None else [self.reply(entry, kind, **fields)]

    def reply(self, entry: PendingRequest, kind: pb.QueryMsg.Type, **fields: Any) -> Reply:  # noqa: ANN401
        if not entry.extended:
            body = None if fields else _ENCODED_PLAIN.get(kind)
            return entry.route, [b"", body or _Q(type=kind, **fields).SerializeToString()]
        query = _Q(type=kind, broker=self._broker, **fields)
        if entry.request is not None:
            query.request = entry.request
        return entry.route, [b"", query.SerializeToString()]

    def fields_if_extended(self, number: int, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """These fields where the asker knows them, else none."""
        entry = self.entries.get(number)
        return fields if entry is not None and entry.extended else {}
