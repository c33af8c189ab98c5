"""The servers of the dialects, built with the settings of a listener.

Owns the meaning of a listener's settings in each dialect. The sockets are in `listeners`.
"""

from __future__ import annotations

import random
import secrets
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct, structs

from taskyard.settings.keys import ListenSection
from taskyard.settings.loader import NATIVE_SERVICES
from taskyard.wire.dialect import (
    PING_PONG,
    ROUND_ROBIN,
    WMP,
    Dialect,
    TaskDefaults,
    listener_prefix,
)
from taskyard.wire.native.pending import plain_peers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.wire.native.pending import PlainPeers

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
