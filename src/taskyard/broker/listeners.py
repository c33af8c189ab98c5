"""The doors of a broker: which sockets are open, and which dialect is spoken at each.

Owns the table of dialects. One that is spoken at several endpoints is one dialect with one memory.
"""

from __future__ import annotations

import random
import secrets
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from taskyard.broker.auth import requires_keys
from taskyard.broker.transport import DialectRouter
from taskyard.net import sockets
from taskyard.wire.dialect import Dialect
from taskyard.wire.native.pending import PLAIN_LEASE_NS
from taskyard.wire.native.server import NativeServer
from taskyard.wire.ping_pong import server as ping_pong
from taskyard.wire.round_robin import server as round_robin
from taskyard.wire.wmp import server as wmp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.guard import Guard
    from taskyard.net.keyring import Keyring
    from taskyard.net.sockets import ZmqSocket

NATIVE: Final = "native"
DWORK: Final = "dwork"


class ServerDialect(Dialect, Protocol):
    """A dialect that counts what made no sense, and can be told that the broker leaves."""

    malformed: int
    leaving: bool


#: What builds each dialect: one for each of its endpoints. It is given the number of the first, and
#: the identity of the journal.
_BUILDERS: Final[dict[str, Callable[[int, bytes], Sequence[ServerDialect]]]] = {
    "ping-pong": lambda number, _identity: ping_pong.make_server(
        number, _random_bits, settings=ping_pong.Settings(secret=secrets.token_bytes(16))
    ),
    "round-robin": lambda number, _identity: [round_robin.make_server(number, _random_bits)],
    "wmp": lambda number, identity: [wmp.make_server(number, identity, random_bits=_random_bits)],
}

#: Every dialect that a broker can listen to.
DIALECTS: Final = (DWORK, *_BUILDERS)


def _random_bits() -> int:
    return random.getrandbits(32)


class Listener(Struct):
    """A dialect at its endpoints."""

    name: str
    sockets: list[ZmqSocket]

    def __str__(self) -> str:
        return f"{self.name} {','.join(wire.endpoint for wire in self.sockets)}"


class Listeners:
    """All of them, open. Close it."""

    def __init__(
        self, identity: bytes, plain_lease_ns: int = PLAIN_LEASE_NS, guard: Guard | None = None
    ) -> None:
        """`identity` is that of the journal. A guard watches every socket."""
        self._guard = guard
        self._identity = identity
        #: The native dialect, which guests with keys speak.
        self.dwork = NativeServer(
            secrets.randbits(63) | 1, _random_bits, plain_lease_ns=plain_lease_ns
        )
        if guard is not None:
            self.dwork.report_cut(guard.cut)
        #: The others, from number 1 on, and the numbers of each by name.
        self._others: list[ServerDialect] = []
        self._numbers: dict[str, list[int]] = {DWORK: [0]}
        #: For each socket, the number of its dialect.
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
        """Open a door: one socket for each of the dialect's sides."""
        numbers = self._dialect_numbers(DWORK if name == NATIVE else name)
        listener = Listener(name, [])
        self._open.append(listener)
        for number, place in zip(numbers, places, strict=True):
            is_secure = name != NATIVE and requires_keys(name, place, secure=secure)
            keys, dialect = keyring if is_secure else None, self._dialects()[number]
            if isinstance(dialect, round_robin.RoundRobin):
                dialect.add_socket(len(self._dialect_of_socket))
            # The peers of round-robin know the socket by its endpoint.
            is_named = name == "round-robin"
            wire = sockets.listen(place, keys, is_named=is_named, guard=self._guard)
            listener.sockets.append(wire)
            self._dialect_of_socket.append(number)

    def _dialect_numbers(self, name: str) -> list[int]:
        """The numbers of a dialect, which is made when it is first needed."""
        if name not in self._numbers:
            first = 1 + len(self._others)
            self._others += _BUILDERS[name](first, self._identity)
            self._numbers[name] = [*range(first, 1 + len(self._others))]
        return self._numbers[name]

    def _dialects(self) -> list[Dialect]:
        """All of them, by number."""
        return [self.dwork, *self._others]

    @property
    def sockets(self) -> list[ZmqSocket]:
        return [wire for listener in self._open for wire in listener.sockets]

    def ready_lines(self) -> list[str]:
        """A line for each door, as it is told when all is ready."""
        return [f"listening {listener}" for listener in self._open]

    def dialect(self) -> Dialect:
        """What a port speaks. Where there is one dialect, there is nothing to choose."""
        if not self._others:
            return self.dwork
        return DialectRouter(self._dialects(), self._dialect_of_socket)

    def malformed(self) -> int:
        """Messages that made no sense, over all dialects and sockets."""
        dropped = sum(wire.dropped for wire in self.sockets)
        return dropped + self.dwork.malformed + sum(one.malformed for one in self._others)

    def drain(self) -> None:
        """The native dialect was told that the broker leaves: the others must know, too."""
        for dialect in self._others:
            dialect.leaving = True

    def close(self) -> None:
        for wire in self.sockets:
            wire.close()
