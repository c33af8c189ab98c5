"""The relay as a process: sockets, poller and signals around the relay of a dialect.

WMP's relay forwards by the path in each message, and the native relay has one connection for all
its peers. Relays of other dialects are gateways, with a connection above for each peer below.
ZeroMQ connects without a report, and tries for ever, so the connections above are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Refused
from taskyard.net import sockets
from taskyard.net.guard import Guard
from taskyard.net.host import CountLog, Host
from taskyard.net.outbound import Outbound
from taskyard.net.zmq_socket import ZmqSocket
from taskyard.relay.gateway import Gateway
from taskyard.relay.native import NativeRelay
from taskyard.relay.server import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from taskyard.net.keyring import Keyring
    from taskyard.net.keys import PeerKey
    from taskyard.net.protocols import MonotonicClock


logger = logging.getLogger("taskyard.relay")

#: How often to check the connections.
CHECK_NS: Final = SECOND_NS

#: Log that a broker is not connected after this time.
MISSING_NS: Final = 3 * SECOND_NS

#: Log lines with the endpoint. ZeroMQ reports no reason, so the hint has likely reasons.
MISSING_TEXT: Final = (
    "broker at %s: no handshake for 3 s (is it running, does it listen there without keys?)"
)
MISSING_WITH_KEY_TEXT: Final = (
    "broker at %s: no handshake for 3 s (is it running, does it listen there with keys, and is key "
    "%r of this broker?)"
)
CONNECTED_TEXT: Final = "broker at %s: connected"


class UpstreamCheck:
    """Checks the connections to brokers every second."""

    def __init__(self, above: Sequence[ZmqSocket], clock: MonotonicClock) -> None:
        self._above = above
        self._clock = clock
        now_ns = clock.monotonic_ns()
        #: When each was last connected.
        self._connected_ns = [now_ns] * len(above)
        self._missing: set[int] = set()
        #: Where each was last connected.
        self._addresses = [""] * len(above)
        #: Brokers that refuse the key. ZeroMQ does not connect to them again.
        self._refused: dict[int, Refused] = {}
        self.check_at_ns = now_ns + CHECK_NS

    def run_if_due(self) -> None:
        """Log missing brokers. Raise `Refused` if all refuse the key, and log it if some do."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self.check_at_ns:
            return
        self.check_at_ns = now_ns + CHECK_NS
        known = {*self._refused}
        for number, upstream in enumerate(self._above):
            if number not in known:
                self._check(number, upstream, now_ns)
        if len(self._refused) == len(self._above):
            raise self._refused[0]
        for number in self._refused.keys() - known:
            logger.warning("%s", self._refused[number])

    def _check(self, number: int, upstream: ZmqSocket, now_ns: int) -> None:
        if upstream.is_connected():
            self._connected_ns[number] = now_ns
            former, self._addresses[number] = self._addresses[number], upstream.address
            if number in self._missing or former not in ("", upstream.address):
                self._missing.discard(number)
                logger.warning(CONNECTED_TEXT, upstream.address)
            return
        missing_ns = now_ns - self._connected_ns[number]
        try:
            upstream.check_accepted(missing_ns)
        except Refused as error:
            self._refused[number] = error
            return
        if missing_ns >= MISSING_NS and number not in self._missing:
            self._missing.add(number)
            _log_missing(upstream)


def _log_missing(upstream: ZmqSocket) -> None:
    if upstream.key_name:
        logger.warning(MISSING_WITH_KEY_TEXT, upstream.endpoint, upstream.key_name)
    else:
        logger.warning(MISSING_TEXT, upstream.endpoint)


WMP: Final = "wmp"
DWORK: Final = "dwork"

#: The dialect whose peers address each other by routing ids.
ROUND_ROBIN: Final = "round-robin"

#: ZeroMQ assigns routing ids that begin with this byte. No peer may choose such an id.
_ASSIGNED: Final = b"\0"


class AnyRelay(Protocol):
    """A relay of any dialect."""

    #: The names of its counts, each with a log line for new events and the total.
    counts: ClassVar[Mapping[str, str]]

    @property
    def endpoint(self) -> str: ...

    def turn(self) -> bool: ...

    def wake_at_ns(self) -> int | None: ...


class RelayProgram:
    """The relays of a process, as the host drives them. Logs their counts, and checks brokers."""

    def __init__(
        self, relays: Sequence[AnyRelay], check: UpstreamCheck, clock: MonotonicClock
    ) -> None:
        self._relays = relays
        self._check = check
        self._logs = [
            CountLog(partial(self._total, name), clock, logger, text)
            for name, text in relays[0].counts.items()
        ]
        self.has_exited = False

    def _total(self, name: str) -> int:
        return sum(getattr(relay, name) for relay in self._relays)

    @property
    def endpoint(self) -> str:
        return ",".join(relay.endpoint for relay in self._relays)

    def turn(self) -> bool:
        more = [relay.turn() for relay in self._relays]
        for log in self._logs:
            log.log_if_due()
        self._check.run_if_due()
        return any(more)

    def wake_at_ns(self) -> int:
        times_ns = [relay.wake_at_ns() for relay in self._relays]
        return min([self._check.check_at_ns, *(at_ns for at_ns in times_ns if at_ns is not None)])

    def shut_down(self) -> None:
        """Exit at once: peers repeat messages in transit."""
        self.has_exited = True

    def summary(self) -> str:
        """Return the counts for the log."""
        return ", ".join(f"{name} {self._total(name)}" for name in self._relays[0].counts)


class BoundedSocket:
    """A socket to the broker that does not queue without limit while the broker does not read."""

    def __init__(self, wire: ZmqSocket, on_close: Callable[[ZmqSocket], None]) -> None:
        self._wire = wire
        self._on_close = on_close
        self._outbound = Outbound()
        self.receive = wire.receive
        self.connections = wire.connections
        self.is_connected = wire.is_connected
        self.check_accepted = wire.check_accepted
        self.send_after_close = wire.send_after_close

    def send(self, frames: Sequence[bytes]) -> bool:
        return self._outbound.send(self._wire, frames[0], frames)

    def is_congested(self) -> bool:
        """Return whether many bytes are queued."""
        self._outbound.refresh()
        return not self._outbound.is_reading(b"")

    def close(self) -> None:
        self._on_close(self._wire)
        self._wire.close()


class Connector:
    """Opens a socket to the broker for each peer of a gateway. The host polls them.

    A named socket is a ROUTER under the routing id of its peer. A ROUTER addresses the other end by
    an id. The connecting side may choose it, so the broker's own does not matter here."""

    def __init__(self, host: Host, endpoint: str, key: PeerKey | None, *, is_named: bool) -> None:
        self._host = host
        self._endpoint = endpoint
        self._key = key
        self.is_named = is_named
        self.address: tuple[bytes, ...] = (endpoint.encode(),) if is_named else ()
        self._open: dict[ZmqSocket, BoundedSocket] = {}

    def open(self, route: bytes) -> BoundedSocket:
        if self.is_named:
            identity = b"" if route.startswith(_ASSIGNED) else route
            wire = sockets.connect_as(self._endpoint, identity, self._key)
        else:
            wire = sockets.connect(self._endpoint, self._key, counts=True)
        self._open[wire] = BoundedSocket(wire, self._forget)
        self._host.poller.add(wire)
        return self._open[wire]

    def _forget(self, wire: ZmqSocket) -> None:
        del self._open[wire]
        self._host.poller.remove(wire)

    def ready(self) -> Iterable[BoundedSocket]:
        found = (self._open.get(one) for one in self._host.ready if not isinstance(one, int))
        return [one for one in found if one is not None]


class RelayOptions(Struct, frozen=True):
    """A relay: its dialect, and where it listens and connects."""

    dialect: str
    #: Where it listens, once for each endpoint of the dialect.
    endpoints: tuple[str, ...]
    #: Brokers or relays, each with as many endpoints. Only WMP takes several.
    upstreams: tuple[tuple[str, ...], ...]
    key: PeerKey | None = None
    #: The keys that peers need, each endpoint on TCP. None: none, so all are of this machine.
    keyring: Keyring | None = None
    #: The routing id of a round-robin listener. Empty: its endpoint.
    identity: str = ""
    #: The key of each upstream in place of `key`. Empty: they have the same.
    upstream_keys: tuple[PeerKey | None, ...] = ()


#: Relays, and their sockets to brokers whose connections are checked.
Opened = tuple[Sequence[AnyRelay], Sequence[ZmqSocket]]


def serve(
    options: RelayOptions, announce: Callable[[str], None], *, until_eof: bool = False
) -> None:
    """Relay messages until a signal. `announce` receives a line with the open endpoints."""
    with Host(until_eof=until_eof) as host:
        guard = Guard()
        relays, above = _OPENERS.get(options.dialect, _open_gateways)(options, host, guard)
        program = RelayProgram(relays, UpstreamCheck(above, host.clock), host.clock)
        host.callback(guard.close)
        guard.start()
        announce(f"listening {options.dialect} {program.endpoint}")
        host.run(program)
        logger.info("stopped: %s", program.summary())


def _open_wmp(options: RelayOptions, host: Host, guard: Guard) -> Opened:
    below = sockets.listen_to_peers(options.endpoints[0], guard, options.keyring)
    host.add_socket(below)
    addresses = [address for (address,) in options.upstreams]
    keys = options.upstream_keys or [options.key] * len(addresses)
    pairs = zip(addresses, keys, strict=True)
    above = [host.add_socket(sockets.connect(*pair, counts=True)) for pair in pairs]
    return [Relay(below, above)], above


def _open_native(options: RelayOptions, host: Host, guard: Guard) -> Opened:
    below = sockets.listen_to_peers(options.endpoints[0], guard, options.keyring)
    host.add_socket(below)
    wire = sockets.connect(options.upstreams[0][0], options.key, counts=True)
    host.add_socket(wire)

    def set_reading(reads: bool) -> None:  # noqa: FBT001  # called by position
        (host.poller.add if reads else host.poller.remove)(below)

    above = BoundedSocket(wire, host.poller.remove)
    return [NativeRelay(below, above, host.clock, set_reading)], [wire]


def _open_gateways(options: RelayOptions, host: Host, guard: Guard) -> Opened:
    """Open a gateway for each endpoint, and a connection that is only checked.

    A gateway connects for its peers, and without any a wrong key would not be noticed.
    """
    is_named = options.dialect == ROUND_ROBIN
    gateways, checked = [], []
    for endpoint, upstream in zip(options.endpoints, options.upstreams[0], strict=True):
        below = sockets.listen_to_peers(
            endpoint, guard, options.keyring, is_named=is_named, identity=options.identity
        )
        host.add_socket(below)
        connector = Connector(host, upstream, options.key, is_named=is_named)
        gateway = Gateway(below, connector, host.clock)
        host.callback(gateway.close)
        gateways.append(gateway)
        checked.append(sockets.connect(upstream, options.key, counts=True))
        host.callback(checked[-1].close)
    return gateways, checked


#: The functions that open the sockets of a dialect. Other dialects have a gateway.
_OPENERS: Final[dict[str, Callable[[RelayOptions, Host, Guard], Opened]]] = {
    WMP: _open_wmp,
    DWORK: _open_native,
}
