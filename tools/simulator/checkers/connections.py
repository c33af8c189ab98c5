"""The checker of new connections: leases that were on an old one end in time, and not too early.

A worker that can't list its tasks and reconnects under its name keeps its leases for a limited
time, whatever it sends. Observes the network and the journal, not the adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulator.listeners import Listener
from simulator.models import Violation
from taskyard.wire.round_robin import leases as round_robin_leases

if TYPE_CHECKING:
    from collections.abc import Iterable

    from simulator.models import WorkerModel
    from simulator.network import Message
    from simulator.reference_model import ReferenceModel

#: The broker may end a lease so much earlier: its clock is read once a turn.
EARLY_NS_MAX: Final = 20_000_000


def kept_ns(worker: WorkerModel) -> int:
    """Return how long a worker may keep uncertain leases. Tasks may have a longer lease."""
    facts = worker.facts
    asked_ns = worker.lease_ns_max if worker.lease_ns_max > facts.lease_timeout_ns else 0
    return max(facts.restart_lease_ns, asked_ns)


class ConnectionChecker:
    """Observes which workers of a dialect with fixed names reconnect."""

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        #: The latest connection of each route, for this process of the broker.
        self._latest: dict[bytes, int] = {}
        #: By worker: its tasks and attempts at a new connection, and when that was.
        self._doubted_ns: dict[bytes, dict[tuple[bytes, int], int]] = {}
        #: The same for WMP. Its workers may get another route with each connection, also behind a
        #: relay, and list their tasks at times, so a lease that is doubted need not end.
        self._latest_wmp: dict[bytes, tuple[bytes, int, tuple[bytes, ...]]] = {}
        self._maybe_doubted_ns: dict[bytes, dict[tuple[bytes, int], int]] = {}

    def broker_down(self) -> None:
        self._latest, self._doubted_ns = {}, {}
        self._latest_wmp, self._maybe_doubted_ns = {}, {}

    def on_disconnected(self, route: bytes) -> None:
        """Note that the broker could not send by a route. A later message is of a new one."""
        for worker in [one for one, place in self._latest_wmp.items() if place[0] == route]:
            del self._latest_wmp[worker]

    def on_message(self, message: Message, now_ns: int) -> None:
        """Note a message, and the leases of its sender if it is the first on its connection."""
        route = message.route
        if route[0] == Listener.WMP:
            self._note_wmp(message, now_ns)
        if route[0] != Listener.ROUND_ROBIN:
            return
        latest = self._latest.get(route)
        self._latest[route] = message.connection
        worker = round_robin_leases.name_of(route[1:])
        if latest in (None, message.connection) or worker not in self._model.workers:
            return
        doubted_ns = self._doubted_ns.setdefault(worker, {})
        for held in self._model.workers[worker].held.values():
            doubted_ns.setdefault((held.name, held.attempt), now_ns)

    def _note_wmp(self, message: Message, now_ns: int) -> None:
        path = message.frames[: message.frames.index(b"")]  # the routes behind relays come first
        place = (message.route, message.connection, path)
        for worker in {getattr(one, "worker", None) for one in message.sent_events}:
            if worker is None or self._latest_wmp.get(worker) == place:
                continue
            self._latest_wmp[worker] = place
            doubted_ns = self._maybe_doubted_ns.setdefault(worker, {})
            known = self._model.workers.get(worker)
            for held in known.held.values() if known else ():
                doubted_ns.setdefault((held.name, held.attempt), now_ns)

    def has_ended(self, worker: bytes, keys: Iterable[tuple[bytes, int]], now_ns: int) -> bool:
        """Return whether the time of leases on an old connection is over."""
        doubted_ns = self._all_doubted_ns(worker)
        lease_ns = self._model.workers[worker].facts.restart_lease_ns - EARLY_NS_MAX
        return all(key in doubted_ns and now_ns >= doubted_ns[key] + lease_ns for key in keys)

    def are_doubted(self, worker: bytes, keys: Iterable[tuple[bytes, int]]) -> bool:
        """Return whether leases may be on an old connection."""
        return self._all_doubted_ns(worker).keys() >= {*keys}

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
