"""The managers of a WMP worker, and the routes to them.

A route is a connection of the worker and the numbers that relays have added, `back`. Parallel
relays make several routes to one manager. A manager sends its name, and messages to it take the
route of its last message. Without a name it is identified by its route. Pure, without tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field

from taskyard.core.limits import SECOND_NS

#: Managers that are kept, and routes to one of them. Beyond that a new one replaces the one that
#: was silent for longest.
MANAGERS_MAX: Final = 1_000
ROUTES_MAX: Final = 16


class Route(Struct, frozen=True):
    """A connection, by number, and the upstreams behind it."""

    wire: int
    back: tuple[int, ...] = ()


class Manager(Struct, eq=False):
    """A manager and the state that a worker keeps of it."""

    #: Its name. None: it sends none.
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

    #: It is the same as this one, found by another route.
    became: Manager | None = None

    @property
    def route(self) -> Route | None:
        """Return the route of its last message, or None if there is none any more."""
        return next(reversed(self.routes), None)

    def current(self) -> Manager:
        return self if self.became is None else self.became.current()


class Managers:
    """All managers, the one with the latest message last."""

    def __init__(self) -> None:
        self._by_way: dict[Route, Manager] = {}
        self._known: dict[int, Manager] = {}

    def __iter__(self) -> Iterator[Manager]:
        return iter([*self._known.values()])

    def touch(self, route: Route, name: str | None, now_ns: int) -> Manager:
        """Return the manager that sent a message by this route, with this name if it sent one."""
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
