"""Every socket option that matters, stated once, with its reason. A test reads each one back.

ZeroMQ's defaults serve everybody; these serve a broker that must not block, lose an answer silently
or hold what a dead peer left. Times are in ZeroMQ's units, so the names say which.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias

import zmq

from taskyard.net.endpoints import BACKLOG

#: The ZAP domain of what listens; `zap.py` knows who may come in.
LISTENING_DOMAIN: Final = b"taskyard.listening"

#: How the domains begin of what listens and demands keys.
SECURE_DOMAIN: Final = b"taskyard.secure"

#: The largest frame that a listener takes: room for the longest payload (16 MiB) and what goes with
#: it. A peer that announces a larger one is cut off before any of it is kept.
FRAME_BYTES_MAX: Final = 32 << 20

#: The largest number of frames in a message, a route included. ZeroMQ has no such limit.
FRAMES_MAX: Final = 64

#: A message of so many more is read in a tenth of a second. Beyond that its sender is cut off.
FRAMES_DROPPED_MAX: Final = 1 << 16

#: Messages that wait for, or from, one peer. More would only hide that somebody is slow.
MESSAGES_WAITING_MAX: Final = 1_000

HANDSHAKE_MS_MAX: Final = 3_000
RECONNECT_MS_MIN: Final = 20
RECONNECT_MS_MAX: Final = 1_000
KEEPALIVE_IDLE_S: Final = 60
KEEPALIVE_INTERVAL_S: Final = 10
KEEPALIVE_COUNT: Final = 3

CONTEXT: Final[dict[zmq.ContextOption, int]] = {
    # A socket slot is a few bytes, and a load generator opens a wire for each peer that it plays.
    zmq.ContextOption.MAX_SOCKETS: 16_384,
    # One thread moves over a million small messages a second: Python is the slower side.
    zmq.ContextOption.IO_THREADS: 1,
}

_Options: TypeAlias = dict[zmq.SocketOption, int | bytes]

_COMMON: Final[_Options] = {
    # What is not sent when a wire closes is not waited for: peers ask again.
    zmq.SocketOption.LINGER: 0,
    zmq.SocketOption.SNDHWM: MESSAGES_WAITING_MAX,
    zmq.SocketOption.RCVHWM: MESSAGES_WAITING_MAX,
    # Every call says that it does not wait; these say it a second time.
    zmq.SocketOption.SNDTIMEO: 0,
    zmq.SocketOption.RCVTIMEO: 0,
    # Half a greeting holds a descriptor for this long and no longer.
    zmq.SocketOption.HANDSHAKE_IVL: HANDSHAKE_MS_MAX,
    # A machine that vanished without a word is noticed after 90 s, also by a peer that only reads.
    zmq.SocketOption.TCP_KEEPALIVE: 1,
    zmq.SocketOption.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE_S,
    zmq.SocketOption.TCP_KEEPALIVE_INTVL: KEEPALIVE_INTERVAL_S,
    zmq.SocketOption.TCP_KEEPALIVE_CNT: KEEPALIVE_COUNT,
    # Off: ZeroMQ's own heartbeats answer for a hung program. Our loops have theirs.
    zmq.SocketOption.HEARTBEAT_IVL: 0,
    # Off unless the endpoint is [::1]: a socket for both shows IPv4 peers under other addresses.
    zmq.SocketOption.IPV6: 0,
}

LISTEN_OPTIONS: Final[dict[zmq.SocketOption, int | bytes]] = {
    **_COMMON,
    zmq.SocketOption.MAXMSGSIZE: FRAME_BYTES_MAX,
    # A message to nobody is refused; without this it is dropped and reported as sent.
    zmq.SocketOption.ROUTER_MANDATORY: 1,
    # A peer that comes back under its old routing id is heard. An id is a route, not a name:
    # whoever takes another's gets its answers, so who somebody is stands in the message.
    zmq.SocketOption.ROUTER_HANDOVER: 1,
    # With a domain, ZeroMQ asks about every connection, and hangs up on what speaks older than
    # ZMTP 3. Without, an HTTP POST is taken for ZMTP 1.0 and its body for messages.
    zmq.SocketOption.ZAP_DOMAIN: LISTENING_DOMAIN,
    # Should nobody answer the question, nobody comes in.
    zmq.SocketOption.ZAP_ENFORCE_DOMAIN: 1,
    # For the record: `endpoints.py` opens the descriptor, with the same number.
    zmq.SocketOption.BACKLOG: BACKLOG,
}


def curve_server(domain: bytes, secret: bytes) -> dict[zmq.SocketOption, int | bytes]:
    """The options of a listener that demands keys, with the broker's own."""
    return {
        **LISTEN_OPTIONS,
        zmq.SocketOption.ZAP_DOMAIN: domain,
        # No peer takes the route of another that is connected: its answers are not for all guests.
        # A peer that comes back under a routing id of its own, before the old connection is known
        # to be dead, is not heard until then. Our peers choose none.
        zmq.SocketOption.ROUTER_HANDOVER: 0,
        zmq.SocketOption.CURVE_SERVER: 1,
        zmq.SocketOption.CURVE_SECRETKEY: secret,
    }


CONNECT_OPTIONS: Final[dict[zmq.SocketOption, int | bytes]] = {
    **_COMMON,
    # No limit: a peer asked for what its broker sends, and a worker that can't be given its tasks
    # would be given them again and again.
    zmq.SocketOption.MAXMSGSIZE: -1,
    # A message may wait for the connection: a first request need not be tried until somebody is
    # there. After a restart the new broker gets what the old one did not take: asked twice is once.
    zmq.SocketOption.IMMEDIATE: 0,
    # A restarted broker is found at once, and a long absent one costs a try a second.
    zmq.SocketOption.RECONNECT_IVL: RECONNECT_MS_MIN,
    zmq.SocketOption.RECONNECT_IVL_MAX: RECONNECT_MS_MAX,
    # As long as for a handshake; the system's own would be minutes.
    zmq.SocketOption.CONNECT_TIMEOUT: HANDSHAKE_MS_MAX,
    # And no ZAP_DOMAIN: nobody can push bytes into a socket that chooses its peer, and one that
    # connects and refuses a greeting never tries again. Junk met once would make it deaf for good.
    zmq.SocketOption.ZAP_ENFORCE_DOMAIN: 0,
}


def with_identity(identity: bytes, options: _Options) -> _Options:
    """The same options for a socket that others address by a name of its own choosing."""
    return {**options, zmq.SocketOption.ROUTING_ID: identity}


#: Of a ROUTER that connects: it and who it connects to address each other by name.
ROUTER_CONNECT_OPTIONS: Final[_Options] = {
    **CONNECT_OPTIONS,
    # As for a listener: what is for nobody is refused, not dropped.
    zmq.SocketOption.ROUTER_MANDATORY: 1,
    # It has one connection; whoever else says the same name is not let in its place.
    zmq.SocketOption.ROUTER_HANDOVER: 0,
}


def curve_client(secret: bytes, public: str, broker: str) -> dict[zmq.SocketOption, int | bytes]:
    """The options of a peer with a key: it talks to the broker that has the other half of `broker`,
    and to nobody else."""
    return {
        **CONNECT_OPTIONS,
        zmq.SocketOption.CURVE_SECRETKEY: secret,
        zmq.SocketOption.CURVE_PUBLICKEY: public.encode("ascii"),
        zmq.SocketOption.CURVE_SERVERKEY: broker.encode("ascii"),
    }


def set_options(
    socket: zmq.Socket[bytes], options: Mapping[zmq.SocketOption, int | bytes], *, is_ipv6: bool
) -> None:
    """Set them all; to be done before the socket binds or connects."""
    for option, value in options.items():
        socket.setsockopt(option, value)
    if is_ipv6:
        socket.setsockopt(zmq.SocketOption.IPV6, 1)
