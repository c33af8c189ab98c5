"""Authentication of peers by key, and what happens when a key is revoked.

Owns the key behind each route of the sockets that require keys. The keys are read once a turn,
before its messages. So a revoked key is refused with its next message, and pending replies to it
are dropped. If the keys can't be read, every peer is unknown. The permissions of the roles are
in `wire.roles`, and the dialects check them.
"""

from __future__ import annotations

import logging
import shlex
from typing import TYPE_CHECKING, Final

from taskyard.core.events import Command, StoreRequested, ValueSent
from taskyard.core.model import shown
from taskyard.errors import UnusableKey, UserError
from taskyard.net import endpoints
from taskyard.wire.roles import UNKNOWN_PEER, AuthenticatedPeer, Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.core.events import Event
    from taskyard.net.keyring import Keyring
    from taskyard.wire.dialect import Dialect

logger = logging.getLogger("taskyard.broker")

#: Routes with a remembered key, by last message: nothing reports that a peer is gone. A forgotten
#: peer gets no reply until its next request.
ROUTES_MAX: Final = 100_000


class Authenticator:
    """The authenticated peers on all sockets, of all dialects."""

    def __init__(self, keyring: Keyring, dialect: Dialect) -> None:
        self._keyring = keyring
        self._dialect = dialect
        #: The public key behind each route.
        self._users: dict[bytes, str] = {}
        self._readings = 0
        #: Why all keys are refused. Empty if the keys were read.
        self._problem = ""

    def refresh(self) -> list[bytes]:
        """Read changed keys. Returns the routes that may not receive replies any more."""
        try:
            self._keyring.refresh()
            self._log_problem("")
        except UserError as error:
            self._log_problem(str(error))
            return self._forget(self._users)
        if self._keyring.load_count == self._readings:
            return []
        self._readings = self._keyring.load_count
        good = {user: bool(self._peer(user).roles) for user in self._users.values()}
        return self._forget(route for route, user in self._users.items() if not good[user])

    def is_reused_route(self, user: str, route: bytes) -> bool:
        """Return whether another key used this route before: a peer may choose its route."""
        return self._users.get(route, user) != user

    def receive(
        self, user: str, route: bytes, frames: Sequence[bytes], now_ns: int
    ) -> Sequence[Event]:
        """Decode a message, with the permissions of its key. Events get what they need of it."""
        former = self._users.pop(route, user)  # reinserted as the newest
        if former != user:
            self._log_reused_route(route, user, former)
        self._users[route] = user
        if len(self._users) > ROUTES_MAX:
            del self._users[next(iter(self._users))]
        peer = self._peer(user)
        events = self._dialect.receive(route, frames, now_ns, peer)
        for event in events:
            if isinstance(event, Command | StoreRequested | ValueSent):
                event.by = peer.name.encode()
        return events

    def _log_reused_route(self, route: bytes, user: str, former: str) -> None:
        """Log that another key uses this routing id."""
        names = [self._peer(key).name or "a revoked key" for key in (user, former)]
        name = shown(route[1:])
        logger.warning("routing id %r is used by key %s now, it was %s's", name, *names)

    def may_send(self, route: bytes) -> bool:
        """Return whether a reply may be sent to this route."""
        return route in self._users

    def _peer(self, user: str) -> AuthenticatedPeer:
        return UNKNOWN_PEER if self._problem else self._keyring.get(user) or UNKNOWN_PEER

    def _forget(self, routes: Iterable[bytes]) -> list[bytes]:
        forgotten = list(routes)
        for route in forgotten:
            del self._users[route]
        return forgotten

    def _log_problem(self, problem: str) -> None:
        """Log a new problem, once."""
        if problem and problem != self._problem:
            logger.warning("all keys are refused: %s", problem)
        self._problem = problem


def requires_keys(endpoint: str, *, secure: bool) -> bool:
    """Return whether an endpoint requires keys: if it is remote, or with `secure` if it is TCP."""
    address = endpoints.parse(endpoint)
    return endpoints.is_remote(address) or (secure and isinstance(address, endpoints.Tcp))


def keyring_for(
    keyring: Keyring, listen: Iterable[tuple[str, str]], *, secure: bool
) -> Keyring | None:
    """Return the keyring of a broker, or None if no endpoint requires keys.

    Raises UserError if a key is required and none exists: no peer could connect.
    """
    demanded = [
        endpoint
        for _, text in listen
        for endpoint in endpoints.split_endpoints(text)
        if requires_keys(endpoint, secure=secure)
    ]
    if not demanded:
        return None
    if not keyring.has_keys():
        is_remote = endpoints.is_remote(endpoints.parse(demanded[0]))
        why, state = "a remote endpoint" if is_remote else "--secure", keyring.state
        raise UnusableKey(
            f"{demanded[0]}: {why} requires keys, and {state} has no valid key (create one with "
            f"`taskyard keys new NAME --role {Role.PRODUCER} --state {shlex.quote(str(state))}`)"
        )
    return keyring
