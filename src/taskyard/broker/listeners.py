"""The broker's listeners: its open sockets and the dialect of each.

Owns the table of dialects. A dialect with several endpoints is one object with one state.
"""

from __future__ import annotations

import random
import secrets
from typing import TYPE_CHECKING, Final, Protocol, cast

from msgspec import Struct

from taskyard.broker.auth import requires_keys
from taskyard.broker.transport import DialectRouter
from taskyard.net import sockets
from taskyard.wire.dialect import Dialect
from taskyard.wire.native.pending import PLAIN_LEASE_NS
from taskyard.wire.native.server import NativeServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.guard import Guard
    from taskyard.net.keyring import Keyring
    from taskyard.net.sockets import ZmqSocket
    from taskyard.wire.round_robin.server import RoundRobin

NATIVE: Final = "native"
DWORK: Final = "dwork"


class ServerDialect(Dialect, Protocol):
    """A dialect that counts malformed and forbidden messages and can drain."""

    malformed: int
    forbidden: int
    leaving: bool


# Most brokers listen to the native dialect alone, so the others are imported when they are built.


def _build_ping_pong(number: int, _identity: bytes) -> Sequence[ServerDialect]:
    from taskyard.wire.ping_pong import server  # noqa: PLC0415  # see above

    settings = server.Settings(secret=secrets.token_bytes(16))
    return server.make_server(number, _random_bits, settings=settings)


def _build_round_robin(number: int, _identity: bytes) -> Sequence[ServerDialect]:
    from taskyard.wire.round_robin import server  # noqa: PLC0415  # see above

    return [server.make_server(number, _random_bits)]


def _build_wmp(number: int, identity: bytes) -> Sequence[ServerDialect]:
    from taskyard.wire.wmp import server  # noqa: PLC0415  # see above

    return [server.make_server(number, identity, random_bits=_random_bits)]


#: Builds the servers of a dialect, one for each of its endpoints, from the number of the first and
#: the journal's identity.
_BUILDERS: Final[dict[str, Callable[[int, bytes], Sequence[ServerDialect]]]] = {
    "ping-pong": _build_ping_pong,
    "round-robin": _build_round_robin,
    "wmp": _build_wmp,
}

#: Every dialect that a broker can listen to.
DIALECTS: Final = (DWORK, *_BUILDERS)


def _random_bits() -> int:
    return random.getrandbits(32)


class Listener(Struct):
    """A dialect and its sockets."""

    name: str
    sockets: list[ZmqSocket]

    def __str__(self) -> str:
        return f"{self.name} {','.join(wire.endpoint for wire in self.sockets)}"


class Listeners:
    """All open listeners."""

    def __init__(
        self, identity: bytes, plain_lease_ns: int = PLAIN_LEASE_NS, guard: Guard | None = None
    ) -> None:
        """Start without sockets. `identity` is the journal's. `guard` watches every socket."""
        self._guard = guard
        self._identity = identity
        #: The native dialect.
        self.dwork = NativeServer(
            secrets.randbits(63) | 1, _random_bits, plain_lease_ns=plain_lease_ns
        )
        if guard is not None:
            self.dwork.report_cut(guard.cut)
        #: The other dialects, from number 1 on, and the numbers of each by name.
        self._others: list[ServerDialect] = []
        self._numbers: dict[str, list[int]] = {DWORK: [0]}
        #: The dialect number of each socket.
        self._dialect_of_socket: list[int] = []
        self._open: list[Listener] = []

    def open(
        self,
        name: str,
        places: Sequence[str],
        keyring: Keyring | None = None,
        *,
        secure: bool = False,
    ) -> None:
        """Open a listener, with one socket for each of the dialect's endpoints."""
        numbers = self._dialect_numbers(DWORK if name == NATIVE else name)
        listener = Listener(name, [])
        self._open.append(listener)
        for number, place in zip(numbers, places, strict=True):
            is_secure = name != NATIVE and requires_keys(place, secure=secure)
            keys, dialect = keyring if is_secure else None, self._dialects()[number]
            # Round-robin peers identify the socket by its endpoint.
            is_named = name == "round-robin"
            if is_named:
                cast("RoundRobin", dialect).add_socket(len(self._dialect_of_socket))
            wire = sockets.listen(place, keys, is_named=is_named, guard=self._guard)
            listener.sockets.append(wire)
            self._dialect_of_socket.append(number)

    def _dialect_numbers(self, name: str) -> list[int]:
        """Return the numbers of a dialect, which is built at its first use."""
        if name not in self._numbers:
            first = 1 + len(self._others)
            self._others += _BUILDERS[name](first, self._identity)
            self._numbers[name] = [*range(first, 1 + len(self._others))]
        return self._numbers[name]

    def _dialects(self) -> list[Dialect]:
        """Return all dialects, by number."""
        return [self.dwork, *self._others]

    @property
    def sockets(self) -> list[ZmqSocket]:
        return [wire for listener in self._open for wire in listener.sockets]

    def ready_lines(self) -> list[str]:
        """Return a line for each listener, printed when the broker is ready."""
        return [f"listening {listener}" for listener in self._open]

    def dialect(self) -> Dialect:
        """Return the dialect of the transport: the only one, or a router over all."""
        if not self._others:
            return self.dwork
        return DialectRouter(self._dialects(), self._dialect_of_socket)

    def malformed(self) -> int:
        """Count malformed messages, over all dialects and sockets."""
        dropped = sum(wire.dropped for wire in self.sockets)
        return dropped + self.dwork.malformed + sum(one.malformed for one in self._others)

    def forbidden(self) -> int:
        """Count messages that a peer's key does not allow, over all dialects."""
        return self.dwork.forbidden + sum(one.forbidden for one in self._others)

    def drain(self) -> None:
        """Drain the other dialects, as the native one does already."""
        for dialect in self._others:
            dialect.leaving = True

    def close(self) -> None:
        for wire in self.sockets:
            wire.close()
