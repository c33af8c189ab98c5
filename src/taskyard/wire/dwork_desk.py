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
from taskyard.core.workers import WorkerFacts
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.dwork_tasks import DIALECT
from taskyard.wire.numbering import numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: A reply: where to, and its frames.
Reply = tuple[bytes, list[bytes]]

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
_BARE: Final = {
    kind: _Q(type=kind).SerializeToString() for kind in (_Q.NotFound, _Q.OK, _Q.Exit, _Q.Error)
}


class Asked(Struct):
    """One request."""

    route: bytes
    query: pb.QueryMsg
    #: The peer knows our fields and types.
    extended: bool
    now_ns: int


class Ticket(Struct):
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
    ends_ns: int = 0
    #: Watch: how many tasks are not settled, and what was told of those that are.
    left: int = 0
    stream: bool = False
    told: effects.Told | None = None
    #: Complete with a Steal in it: what was not the worker's.
    missing: tuple[bytes, ...] = ()


class Desk:
    """Tickets, and what is remembered of workers."""

    def __init__(
        self,
        broker: int,
        luck: Callable[[], int],
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
        self.luck = luck
        self.tickets: dict[int, Ticket] = {}
        self._numbers = numbers(dialect)
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

    def issue(self, asked: Asked, **more: Any) -> int:  # noqa: ANN401
        """A ticket for a request. Returns its number."""
        query = asked.query
        request = query.request if query.HasField("request") else None
        ticket = Ticket(asked.route, query.type, request, asked.extended, **more)
        number = next(self._numbers)
        self.tickets[number] = ticket
        if ticket.ends_ns:
            self._waiting.setdefault(asked.route, {})[number] = None
            heappush(self._ends, (ticket.ends_ns, number))
        return number

    def check_waiting(self, route: bytes) -> None:
        """Refuse one more request that waits, where there are too many."""
        if self.has_many_waiting(route):
            raise Malformed(f"{WAITING_MAX} requests of this peer wait already")

    def has_many_waiting(self, route: bytes) -> bool:
        return len(self._waiting.get(route, ())) >= WAITING_MAX

    def check_watched(self, asked: Asked, count: int) -> None:
        """Refuse to watch so many names more, where there are too many."""
        if self.would_watch_many(asked, count):
            raise Malformed(
                f"{count} names more would make over {WATCHED_NAMES_MAX} that this peer watches at "
                "once: watch them when others are settled, or watch their campaign"
            )

    def would_watch_many(self, asked: Asked, count: int) -> bool:
        """What is asked for again does not count twice."""
        waiting = self._waiting.get(asked.route, {}).keys() - self._former(asked)
        return count + sum(self.tickets[number].left for number in waiting) > WATCHED_NAMES_MAX

    def ask_again(self, asked: Asked) -> list[events.Event]:
        """A watch that is asked for again, by its own number, takes the place of the former."""
        former = self._former(asked)
        for number in former:
            self.drop(number)
        return [events.WatchEnded(0, asked.route, number) for number in former]

    def _former(self, asked: Asked) -> list[int]:
        """The watches that have the number of this request."""
        if not asked.query.HasField("request"):
            return []
        request = asked.query.request
        waiting = [(number, self.tickets[number]) for number in self._waiting.get(asked.route, ())]
        return [
            number
            for number, ticket in waiting
            if ticket.request == request and ticket.kind == _Q.Watch
        ]

    def drop(self, number: int) -> Ticket | None:
        """A request is answered, or nobody waits for its answer any more."""
        ticket = self.tickets.pop(number, None)
        if ticket is None:
            return None
        waiting = self._waiting.get(ticket.route) if ticket.ends_ns else None
        if waiting is not None:
            waiting.pop(number, None)
            if not waiting:
                del self._waiting[ticket.route]
        return ticket

    def drop_route(self, route: bytes) -> list[tuple[int, Ticket]]:
        """Nobody waits there any more. Returns what waited."""
        dropped = [(number, self.tickets[number]) for number in self._waiting.get(route, ())]
        for number, _ in dropped:
            self.drop(number)
        return dropped

    def introduce(
        self, worker: bytes, facts: WorkerFacts, said: pb.WorkerMsg
    ) -> list[events.Event]:
        """Tell the scheduler who works, if it was not told so already."""
        if self.facts.get(worker) == (facts, said.ahead):
            return []
        return [self.appeared(worker, facts, said)]

    def appeared(self, worker: bytes, facts: WorkerFacts, said: pb.WorkerMsg) -> events.Event:
        """What a worker says of itself, to tell and to remember."""
        if len(self.facts) >= FACTS_MAX and worker not in self.facts:
            self.facts.clear()  # who is still there says it again
        self.facts[worker] = (facts, said.ahead)
        replaces = min(said.replaces, NUMBER_MAX)
        return events.WorkerAppeared(0, worker, facts, said.ahead, replaces)

    # Time.

    def wake_at_ns(self) -> int | None:
        """When a request has waited long enough; None while none waits."""
        while self._ends and self._ends[0][1] not in self.tickets:
            heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def ended(self, now_ns: int) -> list[tuple[int, Ticket]]:
        """The requests that have waited long enough, each told once."""
        ended: list[tuple[int, Ticket]] = []
        while self._ends and self._ends[0][0] <= now_ns:
            number = heappop(self._ends)[1]
            if number in self.tickets:
                ended.append((number, self.tickets[number]))
        return ended

    def extend(self, number: int, ends_ns: int) -> None:
        """Let a request wait until then."""
        self.tickets[number].ends_ns = ends_ns
        heappush(self._ends, (ends_ns, number))

    # Replies.

    def answer(self, number: int, kind: pb.QueryMsg.Type, **fields: Any) -> list[Reply]:  # noqa: ANN401
        """Answer a request and forget it."""
        ticket = self.drop(number)
        return [] if ticket is None else [self.reply(ticket, kind, **fields)]

    def reply(self, ticket: Ticket, kind: pb.QueryMsg.Type, **fields: Any) -> Reply:  # noqa: ANN401
        if not ticket.extended:
            body = None if fields else _BARE.get(kind)
            return ticket.route, [b"", body or _Q(type=kind, **fields).SerializeToString()]
        query = _Q(type=kind, broker=self._broker, **fields)
        if ticket.request is not None:
            query.request = ticket.request
        return ticket.route, [b"", query.SerializeToString()]

    def if_extended(self, number: int, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """These fields where the asker knows them, else none."""
        ticket = self.tickets.get(number)
        return fields if ticket is not None and ticket.extended else {}
