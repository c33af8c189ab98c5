"""Guests: whoever came in by a key, and what becomes of them when it is revoked.

Owns which key is behind each route of the sockets that demand keys. The keys are looked at once a
turn, before anything of that turn means something, so a key that was revoked meanwhile is refused
with its next message, and what waits on its behalf is dropped before it can be answered. Whatever
can't be read makes everybody a stranger. Knows keys and routes; what a role may do is a table of
the wire's.
"""

from __future__ import annotations

import logging
import shlex
from typing import TYPE_CHECKING, Final, Protocol

from taskyard.core.model import shown
from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.net.keyring import Keyring
from taskyard.wire.roles import UNKNOWN_PEER, AuthenticatedPeer, Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from taskyard.core.events import Event

logger = logging.getLogger("taskyard.broker")

#: Routes whose keys are remembered, those that were heard last: nobody tells when a peer is gone.
#: One that is forgotten and still there gets no answer until it asks again.
ROUTES_MAX: Final = 100_000

#: The dialect in which messages are checked one by one; others can't be spoken with guests.
CHECKED_DIALECT: Final = "dwork"


class AuthDialect(Protocol):
    """A dialect that looks at who asks."""

    def receive(
        self, route: bytes, frames: Sequence[bytes], now_ns: int, peer: AuthenticatedPeer | None
    ) -> Sequence[Event]: ...


class Authenticator:
    """All of them, on however many sockets."""

    def __init__(self, keyring: Keyring, dialect: AuthDialect) -> None:
        self._keyring = keyring
        self._dialect = dialect
        #: The public key behind each route.
        self._users: dict[bytes, str] = {}
        self._readings = 0
        #: Why nobody is known; empty: those with a key are.
        self._trouble = ""

    def refresh(self) -> list[bytes]:
        """See whether keys have changed. Returns the routes that must not be told any more."""
        try:
            self._keyring.refresh()
            self._complain("")
        except UserError as error:
            self._complain(str(error))
            return self._forget(self._users)
        if self._keyring.load_count == self._readings:
            return []
        self._readings = self._keyring.load_count
        good = {user: self._guest(user).role is not None for user in self._users.values()}
        return self._forget(route for route, user in self._users.items() if not good[user])

    def is_reused_route(self, user: str, route: bytes) -> bool:
        """Whether somebody else was there before: a peer may choose its route."""
        return self._users.get(route, user) != user

    def receive(
        self, user: str, route: bytes, frames: Sequence[bytes], now_ns: int
    ) -> Sequence[Event]:
        """What a message of that key says, if it may say it."""
        former = self._users.pop(route, user)  # to stand last
        if former != user:
            self._log_reused_route(route, user, former)
        self._users[route] = user
        if len(self._users) > ROUTES_MAX:
            del self._users[next(iter(self._users))]
        return self._dialect.receive(route, frames, now_ns, self._guest(user))

    def _log_reused_route(self, route: bytes, user: str, former: str) -> None:
        """Log that a routing id is used by another key: a peer may choose one."""
        names = [self._guest(key).name or "a revoked key" for key in (user, former)]
        name = shown(route[1:])
        logger.warning("routing id %r is used by key %s now, it was %s's", name, *names)

    def may_send(self, route: bytes) -> bool:
        """Whether anything may leave by this route."""
        return route in self._users

    def _guest(self, user: str) -> AuthenticatedPeer:
        return UNKNOWN_PEER if self._trouble else self._keyring.get(user) or UNKNOWN_PEER

    def _forget(self, routes: Iterable[bytes]) -> list[bytes]:
        forgotten = list(routes)
        for route in forgotten:
            del self._users[route]
        return forgotten

    def _complain(self, trouble: str) -> None:
        """Once, until something else is wrong or nothing is."""
        if trouble and trouble != self._trouble:
            logger.warning("nobody with a key is served: %s", trouble)
        self._trouble = trouble


def requires_keys(dialect: str, endpoint: str, *, secure: bool) -> bool:
    """Whether nobody comes in there without a key: beyond this machine always, on it if asked for.
    Raises UserError where messages of guests could not be checked."""
    place = endpoints.parse(endpoint)
    is_remote = endpoints.is_remote(place)
    is_demanded = is_remote or (secure and isinstance(place, endpoints.Tcp))
    if is_demanded and dialect != CHECKED_DIALECT:
        where = "beyond this machine" if is_remote else "with --secure"
        raise UserError(
            f"{dialect} can't be spoken {where}, at {endpoint}: it knows no keys; give "
            f"tcp://127.0.0.1:PORT{'' if is_remote else ' without --secure'}, or let its peers "
            "come through a tunnel of yours"
        )
    return is_demanded


def keyring_for(state: Path, listen: Iterable[tuple[str, str]], *, secure: bool) -> Keyring | None:
    """The keys that such a broker needs; None: it needs none. Raises UserError if there are none
    of guests: nobody could come in, and who may is better said before than after."""
    demanded = [
        endpoint
        for dialect, text in listen
        for endpoint in endpoints.split_endpoints(text)
        if requires_keys(dialect, endpoint, secure=secure)
    ]
    if not demanded:
        return None
    keyring = Keyring(state)
    if not keyring.has_keys():
        is_remote = endpoints.is_remote(endpoints.parse(demanded[0]))
        why = "goes beyond this machine and needs" if is_remote else "is to be secure and needs"
        raise UserError(
            f"{demanded[0]} {why} keys, and {state} has none that is good; make one with "
            f"`taskyard keys new NAME --role {Role.PRODUCER} --state {shlex.quote(str(state))}`"
        )
    return keyring
