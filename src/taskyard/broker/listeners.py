"""The broker's listeners: its open sockets, and the dialect and the settings of each.

A listener with several endpoints is one object with one state. The native dialect is one object for
all listeners. Also owns the meaning of a listener's settings in each dialect.
"""

from __future__ import annotations

import logging
import random
import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Protocol, cast

from msgspec import Struct, structs

from taskyard.broker.auth import requires_keys
from taskyard.broker.transport import DialectRouter
from taskyard.errors import UnusableEndpoint
from taskyard.net import endpoints, sockets
from taskyard.process.state_files import OpenListener
from taskyard.settings.keys import ListenSection
from taskyard.settings.loader import NATIVE_SERVICES
from taskyard.wire.dialect import (
    DIALECTS_MAX,
    PING_PONG,
    ROUND_ROBIN,
    WMP,
    Dialect,
    TaskDefaults,
    listener_prefix,
)
from taskyard.wire.health_views import RelayedDialect
from taskyard.wire.native.pending import PLAIN_LEASE_NS, plain_peers
from taskyard.wire.native.server import NativeServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.guard import Guard
    from taskyard.net.keyring import Keyring
    from taskyard.net.zmq_socket import ZmqSocket
    from taskyard.wire.health_views import RelayHealth
    from taskyard.wire.native.pending import PlainPeers
    from taskyard.wire.round_robin.server import RoundRobin


#: A silent worker is pinged so often before it expires.
PINGS_PER_EXPIRY: Final = 3


class ServerDialect(Dialect, Protocol):
    """A dialect that counts malformed and forbidden messages and can drain."""

    malformed: int
    forbidden: int
    leaving: bool


class ListenerOptions(Struct, frozen=True):
    """A listener's settings, and its name if that is not its dialect's."""

    section: ListenSection
    name: str = ""

    def worker_services(self) -> tuple[bytes, ...]:
        """Return the services of workers that name none. A service of native workers is for clients
        only: a worker of another dialect never receives a program."""
        service = self.section.service
        return (b"default",) if service in NATIVE_SERVICES else (service.encode(),)

    def tasks(self) -> TaskDefaults:
        """Return the terms of tasks whose clients can't express them."""
        return TaskDefaults(self.section.service.encode(), self.section.lane.encode())

    def times(self) -> dict[str, int]:
        """Return the set timeouts, by the names of the wire's settings."""
        section = self.section
        given = {"expire_ns": section.expire_ns, "lease_ns": section.timeout_ns}
        return {name: value for name, value in given.items() if value is not None}

    def notice(self) -> str:
        """Return what the settings do not apply to. Empty: they apply to all peers."""
        if self.section.service not in NATIVE_SERVICES:
            return ""
        name = self.name or self.section.dialect
        return (
            f"listener {name}: service {self.section.service} is for clients, workers that connect "
            "here serve default"
        )

    def prefix(self, prefix: bytes) -> bytes:
        return listener_prefix(prefix, self.name.encode())

    def plain_peers(self, restart_lease_ns: int) -> PlainPeers:
        """Return the terms of plain dwork peers."""
        (service,) = self.worker_services()
        timeout_ns = self.section.timeout_ns or 0
        return plain_peers(restart_lease_ns, service, timeout_ns, self.tasks())


def random_bits() -> int:
    return random.getrandbits(32)


# Most brokers listen to the native dialect alone, so other dialects are imported when they are
# built.


def _build_ping_pong(
    number: int, _identity: bytes, options: ListenerOptions
) -> Sequence[ServerDialect]:
    from taskyard.wire.ping_pong import server  # noqa: PLC0415  # see above

    settings = server.Settings(
        services=options.worker_services(),
        tasks=options.tasks(),
        secret=secrets.token_bytes(16),
        prefix=options.prefix(PING_PONG),
        **options.times(),
    )
    # A worker without pings never has less time than one with.
    lease_ns = max(settings.lease_ns, settings.expire_ns)
    settings = structs.replace(settings, lease_ns=lease_ns)
    return server.make_server(number, random_bits, settings=settings)


def _build_round_robin(
    number: int, _identity: bytes, options: ListenerOptions
) -> Sequence[ServerDialect]:
    from taskyard.wire.round_robin import server  # noqa: PLC0415  # see above

    settings = server.Settings(
        services=options.worker_services(),
        tasks=options.tasks(),
        prefix=options.prefix(ROUND_ROBIN),
        **options.times(),
    )
    heartbeat_ns = min(settings.heartbeat_ns, settings.expire_ns // PINGS_PER_EXPIRY)
    settings = structs.replace(settings, heartbeat_ns=heartbeat_ns)
    return [server.RoundRobin(number, random_bits, settings)]


def _build_wmp(number: int, identity: bytes, options: ListenerOptions) -> Sequence[ServerDialect]:
    from taskyard.wire.wmp import server  # noqa: PLC0415  # see above

    expire_ns = options.section.expire_ns or server.SILENCE_NS
    settings = server.Settings(
        services=options.worker_services(),
        ping_ns=min(server.PING_NS, expire_ns // PINGS_PER_EXPIRY),
        lease_timeout_ns=expire_ns,
        prefix=options.prefix(WMP),
    )
    manager = server.manager_name(identity, options.name)
    return [server.Wmp(number, manager, random_bits, settings)]


#: Builds the servers of a listener, one for each of its endpoints, from the number of the first,
#: the journal's identity and the listener's settings.
BUILDERS: Final[dict[str, Callable[[int, bytes, ListenerOptions], Sequence[ServerDialect]]]] = {
    "ping-pong": _build_ping_pong,
    "round-robin": _build_round_robin,
    "wmp": _build_wmp,
}


logger = logging.getLogger("taskyard.broker")

#: A route begins with the number of its socket, in seven bits. The eighth marks relayed peers.
SOCKETS_MAX: Final = 128

NATIVE: Final = "native"
DWORK: Final = "dwork"


#: Every dialect that a broker can listen to.
DIALECTS: Final = (DWORK, *BUILDERS)


class Listener(Struct):
    """A dialect and its sockets, and the listener's name if that is not the dialect's."""

    dialect: str
    sockets: list[ZmqSocket]
    name: str = ""
    identity: str = ""

    def __str__(self) -> str:
        found = ",".join(wire.endpoint for wire in self.sockets)
        return f"{self.dialect} {found} {self.name}".rstrip()


class Reservations:
    """The addresses of listeners, bound but not open: a peer is refused there."""

    def __init__(self, listen: Sequence[tuple[str, str]]) -> None:
        """Bind all TCP endpoints of (listener, endpoints). Raises UserError."""
        self._stack = ExitStack()
        #: As given, with real ports.
        self.listen: tuple[tuple[str, str], ...] = ()
        try:
            for name, text in listen:
                found = [self._reserve(endpoint) for endpoint in endpoints.split_endpoints(text)]
                self.listen += ((name, ",".join(found)),)
        except BaseException:
            self.close()
            raise

    def _reserve(self, endpoint: str) -> str:
        address = endpoints.parse(endpoint)
        if not isinstance(address, endpoints.Tcp):
            return endpoint
        reserved = self._stack.enter_context(endpoints.reserve(address))
        return str(endpoints.Tcp(address.host, reserved.getsockname()[1]))

    def close(self) -> None:
        self._stack.close()


class Listeners:
    """All open listeners."""

    def __init__(
        self, identity: bytes, plain_lease_ns: int = PLAIN_LEASE_NS, guard: Guard | None = None
    ) -> None:
        """Start without sockets. `identity` is the journal's. `guard` watches every socket."""
        self._guard = guard
        self._identity = identity
        self._plain_lease_ns = plain_lease_ns
        #: The native dialect.
        self.dwork = NativeServer(
            secrets.randbits(63) | 1, random_bits, plain_lease_ns=plain_lease_ns
        )
        #: Relays of any dialect whose first message was just received, and peers that were refused.
        #: The transport sets their addresses.
        self.newcomers = self.dwork.newcomers
        if guard is not None:
            self.dwork.report_cut(guard.cut)
        #: The other dialects, from number 1 on, and the numbers of each by listener.
        self._others: list[ServerDialect] = []
        self._numbers: dict[str, list[int]] = {}
        #: The dialect number of each socket.
        self._dialect_of_socket: list[int] = []
        self._open: list[Listener] = []

    def open(
        self,
        name: str,
        addresses: Sequence[str],
        keyring: Keyring | None = None,
        *,
        secure: bool = False,
        section: ListenSection | None = None,
    ) -> None:
        """Open a listener, with one socket for each of its endpoints. Raises UserError.

        Without a `section` its name is its dialect's.
        """
        section = section or ListenSection(dialect=name)
        is_own = name != section.dialect
        options = ListenerOptions(section, name if is_own else "")
        if notice := options.notice():
            logger.info(notice)
        numbers = self._dialect_numbers(name, options)
        listener = Listener(section.dialect, [], options.name, section.identity)
        self._open.append(listener)
        for number, endpoint in zip(numbers, addresses, strict=True):
            is_secure = name != NATIVE and requires_keys(endpoint, secure=secure)
            keys, socket = keyring if is_secure else None, self._next_socket(endpoint)
            # Round-robin peers identify the socket by its endpoint, or by the setting.
            is_named, identity = section.dialect == "round-robin", section.identity
            if is_named:
                cast("RoundRobin", self._dialects()[number]).add_socket(socket)
            elif section.dialect == DWORK:
                self.dwork.set_plain(socket, options.plain_peers(self._plain_lease_ns))
            wire = sockets.listen(
                endpoint, keys, is_named=is_named, identity=identity, guard=self._guard
            )
            listener.sockets.append(wire)
            self._dialect_of_socket.append(number)

    def _next_socket(self, endpoint: str) -> int:
        """Return the number of the next socket."""
        if len(self._dialect_of_socket) >= SOCKETS_MAX:
            raise UnusableEndpoint(f"{endpoint}: a broker has at most {SOCKETS_MAX} endpoints")
        return len(self._dialect_of_socket)

    def _dialect_numbers(self, name: str, options: ListenerOptions) -> list[int]:
        """Return the numbers of a listener's servers, which are built at its first use."""
        dialect = options.section.dialect
        if dialect in (NATIVE, DWORK):
            return [0]
        if name not in self._numbers:
            first = 1 + len(self._others)
            if first + 1 >= DIALECTS_MAX:
                raise UnusableEndpoint(f"listener {name}: too many listeners with servers")
            made = BUILDERS[dialect](first, self._identity, options)
            for one in made:
                if isinstance(one, RelayedDialect):
                    one.newcomers = self.newcomers
            self._others += made
            self._numbers[name] = [*range(first, first + len(made))]
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

    def listed(self) -> list[OpenListener]:
        """Return the open listeners beside the native socket, for other processes."""
        return [
            OpenListener(one.dialect, tuple(wire.endpoint for wire in one.sockets), one.identity)
            for one in self._open
            if one.dialect != NATIVE
        ]

    def dialect(self) -> Dialect:
        """Return the dialect of the transport: the only dialect, or a router over all."""
        if not self._others:
            return self.dwork
        return DialectRouter(self._dialects(), self._dialect_of_socket)

    def malformed(self) -> int:
        """Count malformed messages, over all dialects and sockets. Called every turn."""
        count = self.dwork.malformed
        for dialect in self._others:
            count += dialect.malformed
        for listener in self._open:
            for wire in listener.sockets:
                count += wire.dropped
        return count

    def malformed_by_dialect(self) -> dict[str, int]:
        """Count malformed messages by the dialects of open listeners."""
        found, dialects = {DWORK: self.dwork.malformed}, dict[str, str]()
        for listener in self._open:
            dialect = DWORK if listener.dialect == NATIVE else listener.dialect
            dialects[listener.name or listener.dialect] = dialect
            found.setdefault(dialect, 0)
            found[dialect] += sum(wire.dropped for wire in listener.sockets)
        for name, numbers in self._numbers.items():
            found[dialects[name]] += sum(self._others[one - 1].malformed for one in numbers)
        return found

    def relays(self, now_ns: int) -> list[RelayHealth]:
        """Return the relays for the status, by dialect, the latest messages first."""
        relayed = [one for one in self._dialects() if isinstance(one, RelayedDialect)]
        return [relay for one in relayed for relay in one.relays(now_ns)]

    def forbidden(self) -> int:
        """Count messages that a peer's key does not allow, over all dialects."""
        return self.dwork.forbidden + sum(one.forbidden for one in self._others)

    def drain(self) -> None:
        """Drain the other dialects, as the native dialect does already."""
        for dialect in self._others:
            dialect.leaving = True

    def close(self) -> None:
        for wire in self.sockets:
            wire.close()
