"""The keys behind the peers of a relay: whether each may still send and receive.

A key may be revoked while its peer is connected. The directory of keys is checked with every
message, in both directions, and for idle peers whenever the relay checks its connections.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from taskyard.errors import UserError

if TYPE_CHECKING:
    from taskyard.net.keyring import Keyring

logger = logging.getLogger("taskyard.net")

#: Peers whose key is remembered, those with the latest messages. Others get no message before they
#: send one.
PEERS_MAX: Final = 100_000

#: A descriptor and the inode of its socket.
Connection = tuple[int, int]

_UNKNOWN: Final = (-1, 0)


class PeerKeys:
    """The connection of each route, and the public key of each connection."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._connections: dict[bytes, Connection] = {}
        self._users: dict[Connection, str] = {}
        #: Why all keys are refused. Empty if the keys were read.
        self._problem = ""
        #: Revoked keys that were logged.
        self._reported: set[str] = set()

    def accept(self, route: bytes, connection: Connection, user: str) -> bool:
        """Return whether a peer may send. Its key is remembered if so."""
        if not self._is_valid(user):
            return False
        if self._connections.get(route) != connection:
            self._forget(route)
        self._connections.pop(route, None)  # reinserted as the newest
        self._connections[route] = connection
        self._users[connection] = user
        if len(self._connections) > PEERS_MAX:
            self._forget(next(iter(self._connections)))
        return True

    def connection(self, route: bytes) -> Connection:
        """Return the connection of a peer. One without an inode is closed or unknown."""
        return self._connections.get(route, _UNKNOWN)

    def is_accepted(self, connection: Connection) -> bool:
        """Return whether the key of a connection is known and valid."""
        user = self._users.get(connection)
        return user is not None and self._is_valid(user)

    def _forget(self, route: bytes) -> None:
        connection = self._connections.pop(route, None)
        if connection is not None:
            self._users.pop(connection, None)

    def _is_valid(self, user: str) -> bool:
        """Return whether a key is valid, after a look at the directory."""
        try:
            peer = self._keyring.find(user)
        except UserError as error:
            if str(error) != self._problem:
                logger.warning("all keys are refused: %s", error)
            self._problem = str(error)
            return False
        self._problem = ""
        if peer is not None and peer.roles:
            return True
        if user not in self._reported:
            self._reported.add(user)
            name = "a removed key" if peer is None else f"the revoked key {peer.name}"
            logger.warning("peers with %s are disconnected", name)
        return False
