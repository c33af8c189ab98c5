"""The relay as a process: sockets, poller and signals around the relay of a dialect.

WMP's relay forwards by the path in each message, and the native relay has one connection for all
its peers. Relays of other dialects are gateways, with a connection above for each peer below.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from taskyard.net import sockets
from taskyard.net.guard import Guard
from taskyard.net.host import Host, HostedProgram
from taskyard.relay.gateway import Gateway, GatewayProgram
from taskyard.relay.native import NativeRelay
from taskyard.relay.server import LoggedRelay, Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from taskyard.net.keys import PeerKey
    from taskyard.net.sockets import ZmqSocket
    from taskyard.relay.gateway import Upstream

logger = logging.getLogger("taskyard.relay")

WMP: Final = "wmp"
DWORK: Final = "dwork"

#: Its peers address each other by routing ids.
ROUND_ROBIN: Final = "round-robin"

#: ZeroMQ assigns routing ids that begin with this byte. No peer may choose such an id.
_ASSIGNED: Final = b"\0"


class RelayProgram(HostedProgram, Protocol):
    """A relay of any dialect."""

    @property
    def endpoint(self) -> str: ...

    def summary(self) -> str: ...


class Connector:
    """Opens a DEALER to the broker for each peer of a gateway. The host polls them."""

    is_named = False
    address: tuple[bytes, ...] = ()

    def __init__(self, host: Host, endpoint: str, key: PeerKey | None) -> None:
        self._host = host
        self._endpoint = endpoint
        self._key = key
        self._open: dict[int, ZmqSocket] = {}

    def open(self, route: bytes) -> ZmqSocket:
        wire = self._connect(route)
        self._open[id(wire)] = wire
        self._host.poller.add(wire)
        return wire

    def _connect(self, _route: bytes) -> ZmqSocket:
        return sockets.connect(self._endpoint, self._key, counts=True)

    def close(self, upstream: Upstream) -> None:
        wire = self._open.pop(id(upstream))
        self._host.poller.remove(wire)
        wire.close()

    def ready(self) -> Iterable[Upstream]:
        return [self._open[id(one)] for one in self._host.ready if id(one) in self._open]


class NamedConnector(Connector):
    """Opens a ROUTER to the broker under the routing id of each peer.

    A ROUTER addresses the other end by an id. The connecting side may choose it, so the broker's
    own does not matter here.
    """

    is_named = True

    def __init__(self, host: Host, endpoint: str, key: PeerKey | None) -> None:
        super().__init__(host, endpoint, key)
        self.address = (endpoint.encode(),)

    def _connect(self, route: bytes) -> ZmqSocket:
        identity = b"" if route.startswith(_ASSIGNED) else route
        return sockets.connect_as(self._endpoint, identity, self._key)


class RelayOptions(Struct, frozen=True):
    """A relay: its dialect, and where it listens and connects."""

    dialect: str
    #: One for each endpoint of the dialect.
    endpoints: tuple[str, ...]
    #: Brokers or relays, each with as many endpoints. Only WMP takes several.
    upstreams: tuple[tuple[str, ...], ...]
    key: PeerKey | None = None


def serve(
    options: RelayOptions, announce: Callable[[str], None], *, until_eof: bool = False
) -> None:
    """Relay messages until a signal. `announce` receives a line with the open endpoints."""
    with Host(until_eof=until_eof) as host:
        guard = Guard()
        program = _OPENERS.get(options.dialect, _open_gateway)(options, host, guard)
        host.callback(guard.close)
        guard.start()
        announce(f"listening {options.dialect} {program.endpoint}")
        host.run(program)
        logger.info("stopped: %s", program.summary())


def _open_wmp(options: RelayOptions, host: Host, guard: Guard) -> LoggedRelay:
    below = host.add_socket(sockets.listen(options.endpoints[0], guard=guard))
    above = [host.add_socket(sockets.connect(one, options.key)) for (one,) in options.upstreams]
    return LoggedRelay(Relay(below, above), host.clock, below.endpoint)


def _open_native(options: RelayOptions, host: Host, guard: Guard) -> NativeRelay:
    below = sockets.listen_to_peers(options.endpoints[0], guard)
    host.add_socket(below)
    above = sockets.connect(options.upstreams[0][0], options.key, counts=True)
    host.add_socket(above)

    def set_reading(reads: bool) -> None:  # noqa: FBT001  # called by position
        (host.poller.add if reads else host.poller.remove)(below)

    return NativeRelay(below, above, host.clock, set_reading)


def _open_gateway(options: RelayOptions, host: Host, guard: Guard) -> GatewayProgram:
    is_named = options.dialect == ROUND_ROBIN
    kind = NamedConnector if is_named else Connector
    gateways = []
    for endpoint, upstream in zip(options.endpoints, options.upstreams[0], strict=True):
        below = sockets.listen_to_peers(endpoint, guard, is_named=is_named)
        host.add_socket(below)
        gateway = Gateway(below, kind(host, upstream, options.key), host.clock)
        host.callback(gateway.close)
        gateways.append(gateway)
    return GatewayProgram(gateways, host.clock)


#: The functions that open the sockets of a dialect. All others have a gateway.
_OPENERS: Final[dict[str, Callable[[RelayOptions, Host, Guard], RelayProgram]]] = {
    WMP: _open_wmp,
    DWORK: _open_native,
}
