"""The connections of peers that choose their routing id: which messages come by a new one.

ZeroMQ reconnects silently. Messages that were on the old connection are lost, and neither end
learns of it. A peer without a routing id of its own gets a new one with each connection, so its
route shows that. Owns the latest connection of each other route. Does not decode messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.wire.dialect import chose_its_id

if TYPE_CHECKING:
    from collections.abc import Callable

#: Routes that are kept, those of the latest connections. A peer beyond them is not noticed when it
#: reconnects.
ROUTES_MAX: Final = 20_000


class Connections:
    """The latest connection of each route whose peer chose its routing id."""

    def __init__(self) -> None:
        self._latest: dict[bytes, tuple[int, int]] = {}

    def is_renewed(self, route: bytes, find: Callable[[], tuple[int, int]]) -> bool:
        """Return whether a message of a route came by another connection than the one before.

        `find` returns the connection of the message. It costs a system call, and is not called for
        routes that ZeroMQ assigned.
        """
        if not chose_its_id(route):
            return False
        connection = find()
        latest = self._latest.get(route)
        is_closed = not connection[1]  # a message that was read after its connection ended
        if latest == connection or (is_closed and latest is not None):
            return False
        self._latest.pop(route, None)
        self._latest[route] = connection
        if len(self._latest) > ROUTES_MAX:
            del self._latest[next(iter(self._latest))]
        return latest is not None
