"""The managers that a WMP worker has heard, and the ways to them.

A way is a wire of the worker and the numbers that relays have noted on it, `back`. One manager may
be heard by several ways, through relays side by side: it says its name, and what is for it goes by
the way that it was heard from last. A manager that says no name is its way. Pure, and knows nothing
of tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field

#: Managers that are known at once, and ways to one of them. Whoever is met beyond that takes the
#: place of the one that was not heard for longest.
MANAGERS_MAX: Final = 1_000
ROUTES_MAX: Final = 16


class Route(Struct, frozen=True):
    wire: int
    back: tuple[int, ...] = ()


class Manager(Struct, eq=False):
    #: As it calls itself; None: it does not.
    name: str | None
    #: The one that it was heard from last is the last.
    routes: dict[Route, None] = field(default_factory=dict)
    last_seen_ns: int = 0
    #: When to show it life, and how long after that again.
    ping_due_ns: int = 0
    ping_after_ns: int = 0
    pinged_ns: int = 0
    #: Held for it: it is told of these only.
    held: dict[tuple[bytes, int], None] = field(default_factory=dict)
    #: It said goodbye.
    is_over: bool = False
    #: Why it refuses the worker's id for now; empty: it does not.
    name_held: str = ""

    #: It was found to be this one, known by another way.
    became: Manager | None = None

    @property
    def route(self) -> Route | None:
        """The one that it was heard from last; None: there is none any more."""
        return next(reversed(self.routes), None)

    def current(self) -> Manager:
        return self if self.became is None else self.became.current()


class Managers:
    """All of them, those that were heard last at the end."""

    def __init__(self) -> None:
        self._by_way: dict[Route, Manager] = {}
        self._known: dict[int, Manager] = {}

    def __iter__(self) -> Iterator[Manager]:
        return iter([*self._known.values()])

    def touch(self, route: Route, name: str | None, now_ns: int) -> Manager:
        """Whoever speaks there, under that name; None: under the name that it has."""
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
            here.name = name  # it says its name at last, or has another since it was restarted
            return here
        named = named or Manager(name)
        self._move(route, here, named)
        return named

    def _named(self, name: str) -> Manager | None:
        return next((one for one in self._known.values() if one.name == name), None)

    def _move(self, route: Route, former: Manager, manager: Manager) -> None:
        """Another manager is met on this way. If there is no other way to the former, it is the
        same, under another name."""
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
        """Those that were heard on a wire."""
        return [one for one in self if any(route.wire == wire for route in one.routes)]
