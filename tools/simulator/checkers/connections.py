"""The checker of new connections: leases that were on an old one end in time, and not too early.

A worker that can't list its tasks and reconnects under its name keeps its leases for a limited
time, whatever it sends. Observes the network and the journal, not the adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from simulator.listeners import Listener
from simulator.models import Violation
from taskyard.core import effects, events, records
from taskyard.wire import dialect
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.round_robin import workers as round_robin_leases

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from simulator.models import WorkerModel
    from simulator.network import Link, Message
    from simulator.reference_model import ReferenceModel
    from taskyard.core.events import Event
    from taskyard.core.model import WorkerFacts

#: The broker may end a lease so much earlier: its clock is read once a turn.
EARLY_NS_MAX: Final = 20_000_000


#: Events that name tasks which their worker has.
_NAMING: Final = (events.WorkerHeartbeat, events.TasksProgressed, events.OutputAppended)

#: Workers of these dialects can't name their tasks.
_UNNAMING: Final = (dialect.ROUND_ROBIN, dialect.PING_PONG)

_Q: Final = pb.QueryMsg


def kept_ns(worker: WorkerModel, *, shortest: bool = False) -> int:
    """Return how long a worker may keep uncertain leases. Tasks may have a longer lease."""
    facts = worker.facts
    asked_ns = worker.lease_ns_max if worker.lease_ns_max > facts.lease_timeout_ns else 0
    return max(facts.restart_lease_ns or facts.lease_timeout_ns, 0 if shortest else asked_ns)


def _senders(message: Message) -> list[tuple[Process, Place]]:
    """Return the processes of WMP and extended native workers that a message is from."""
    route, connection = message.route, message.connection
    if route[0] == Listener.WMP:
        path = tuple(message.frames[: message.frames.index(b"")])  # those behind relays come first
        return [
            ((event.worker, getattr(event, "incarnation", None)), (route, connection, path))
            for event in message.sent_events
            if hasattr(event, "worker") and not isinstance(event, events.WorkerRegistered)
        ]
    if route[0] != Listener.NATIVE:
        return []
    found: list[tuple[Process, Place]] = []
    query = _Q.FromString(message.frames[1])
    queries: list[tuple[pb.QueryMsg, tuple[bytes, ...]]] = []
    for raw in query.envelope:
        envelope = pb.Envelope.FromString(raw)
        queries.append((_Q.FromString(envelope.message), (b"%d" % envelope.peer,)))
    for one, numbers in queries or [(query, ())]:
        process = one.worker if one.HasField("worker") else one  # reports have no other facts
        if process.HasField("incarnation") and one.HasField("location"):
            place = (route, connection, numbers)
            found.append(((one.location, process.incarnation), place))
    return found


#: A process of a worker, by name and incarnation, and its connection: its route and number, and the
#: numbers or routes of it behind relays.
Process: TypeAlias = tuple[bytes, int | None]
Place: TypeAlias = tuple[bytes, int, tuple[bytes, ...]]


class ConnectionChecker:
    """Observes which workers reconnect, and which assignments may be lost with it."""

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        #: The latest connection of each route, for this process of the broker.
        self._latest: dict[bytes, int] = {}
        #: Messages that went to each connection of round-robin before the broker knew of it.
        self._early: dict[int, list[tuple[bytes, ...]]] = {}
        #: By worker: its tasks and attempts at a new connection, and when that was. They must end.
        self._doubted_ns: dict[bytes, dict[tuple[bytes, int], int]] = {}
        #: The same for WMP and the native dialect. Their workers may get another route with each
        #: connection, also behind a relay. Workers that list their tasks may keep them.
        self._latest_place: dict[Process, Place] = {}
        self._maybe_doubted_ns: dict[bytes, dict[tuple[bytes, int], int]] = {}
        #: Processes that have sent a list of tasks or a report on a running task.
        self._has_named: dict[Process, None] = {}
        #: Workers with a new connection in this turn.
        self._renewed_ns: dict[bytes, int] = {}

    def broker_down(self) -> None:
        self._latest, self._doubted_ns = {}, {}
        self._latest_place, self._maybe_doubted_ns = {}, {}
        self._has_named, self._renewed_ns = {}, {}

    def on_disconnected(self, route: bytes, now_ns: int) -> None:
        """Note that the broker could not send by a route.

        A later WMP message is of a new connection, and messages to native workers behind a relay
        may be lost.
        """
        for process, place in [*self._latest_place.items()]:
            if place[0] != route:
                continue
            if route[0] == Listener.WMP:
                self._latest_place[process] = (b"", 0, ())
            elif place[2]:
                self._doubt(process, now_ns)

    def on_unsent(self, cause: object, now_ns: int) -> None:
        """Note that a reply could not be sent."""
        if isinstance(cause, effects.Assign):
            doubted_ns = self._maybe_doubted_ns.setdefault(cause.worker, {})
            for key in zip(cause.names, cause.attempts, strict=True):
                doubted_ns.setdefault(key, now_ns)

    def on_sent(self, route: bytes, frames: Sequence[bytes], link: Link | None) -> None:
        """Note a message that goes to a connection of which the broker does not know yet."""
        is_early = link is not None and self._latest.get(route) != link.number
        if link is not None and is_early and route[0] == Listener.ROUND_ROBIN:
            self._early.setdefault(link.number, []).append(tuple(frames))

    def was_early(self, link: Link | None, frames: tuple[bytes, ...]) -> bool:
        """Return whether a message went to a connection before the broker knew of it.

        The broker learns of a new connection by the next message, and may take all that it sent
        before for lost: the slots are free after the lease.
        """
        return link is not None and frames in self._early.get(link.number, ())

    def on_turn(self) -> None:
        self._renewed_ns = {}

    def on_message(self, message: Message, now_ns: int) -> None:
        """Note a message, and the leases of its sender if it is the first on its connection."""
        route = message.route
        for process, place in _senders(message):
            if self._latest_place.setdefault(process, place) != place:
                self._latest_place[process] = place
                self._doubt(process, now_ns)
        for event in message.sent_events:
            if isinstance(event, _NAMING):
                self._note_named(event)
        if route[0] != Listener.ROUND_ROBIN:
            return
        latest = self._latest.get(route)
        self._latest[route] = message.connection
        worker = round_robin_leases.name_of(route[1:])
        if latest in (None, message.connection) or worker not in self._model.workers:
            return
        self._renewed_ns[worker] = now_ns
        doubted_ns = self._doubted_ns.setdefault(worker, {})
        for held in self._model.workers[worker].held.values():
            doubted_ns.setdefault((held.name, held.attempt), now_ns)

    def _doubt(self, process: Process, now_ns: int) -> None:
        """Note the leases of a process on its former connection."""
        worker, incarnation = process
        self._renewed_ns[worker] = now_ns  # the process may register in this turn
        known = self._model.workers.get(worker)
        if known is None or incarnation not in (None, known.facts.incarnation):
            return
        kinds = [self._maybe_doubted_ns]
        if process not in self._has_named and not worker.startswith(dialect.WMP):
            kinds.append(self._doubted_ns)
        for kind in kinds:
            doubted_ns = kind.setdefault(worker, {})
            for held in known.held.values():
                doubted_ns.setdefault((held.name, held.attempt), now_ns)

    def _note_named(self, event: Event) -> None:
        if isinstance(event, events.WorkerHeartbeat) and event.held is None:
            return
        worker: bytes = event.worker  # type: ignore[attr-defined]
        self._has_named[worker, event.incarnation] = None  # type: ignore[attr-defined]
        if not worker.startswith(_UNNAMING):
            self._doubted_ns.pop(worker, None)

    def on_leased(self, record: records.Leased) -> None:
        """Note a lease that was granted to a former connection in the turn of a new connection."""
        if record.worker in self._renewed_ns:
            doubted_ns = self._maybe_doubted_ns.setdefault(record.worker, {})
            for key in zip(record.names, record.attempts, strict=True):
                doubted_ns.setdefault(key, self._renewed_ns[record.worker])

    def has_ended(self, worker: bytes, keys: Iterable[tuple[bytes, int]], now_ns: int) -> bool:
        """Return whether the time of leases on an old connection is over."""
        doubted_ns = self._all_doubted_ns(worker)
        lease_ns = kept_ns(self._model.workers[worker], shortest=True) - EARLY_NS_MAX
        return all(key in doubted_ns and now_ns >= doubted_ns[key] + lease_ns for key in keys)

    def are_doubted(self, worker: bytes, keys: Iterable[tuple[bytes, int]]) -> bool:
        """Return whether leases may be on an old connection."""
        return self._all_doubted_ns(worker).keys() >= {*keys}

    def has_named(self, worker: bytes, facts: WorkerFacts) -> bool:
        """Return whether a worker has named tasks since the broker's start."""
        processes = (worker, None), (worker, facts.incarnation)
        return any(one in self._has_named for one in processes)

    def _all_doubted_ns(self, worker: bytes) -> dict[tuple[bytes, int], int]:
        return self._doubted_ns.get(worker, {}) | self._maybe_doubted_ns.get(worker, {})

    def check_leaked(self, name: bytes, worker: WorkerModel, ends_ns: int) -> None:
        """Require that no lease on an old connection goes on for long. `ends_ns` is the time up to
        which leases may have ended."""
        doubted_ns = self._doubted_ns.get(name, {})
        lease_ns = kept_ns(worker)
        for held in worker.held.values():
            since_ns = doubted_ns.get((held.name, held.attempt))
            if since_ns is not None and since_ns + lease_ns < ends_ns:
                raise Violation("leaked", f"{name!r} reconnected at {since_ns} and keeps {held}")
