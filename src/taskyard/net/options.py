"""Every socket option that matters, set once, with its reason. A test reads each one back.

ZeroMQ's defaults suit general use. These suit a broker that must not block, drop a reply silently
or keep data of a dead peer. Times are in ZeroMQ's units, which the names give.
"""

from collections.abc import Mapping
from contextlib import closing
from typing import Final, TypeAlias

import zmq

from taskyard.net.endpoints import BACKLOG

#: The ZAP domain of listeners without keys. `zap.py` decides which peers are admitted.
LISTENING_DOMAIN: Final = b"taskyard.listening"

#: The prefix of the ZAP domains of listeners that require keys.
SECURE_DOMAIN: Final = b"taskyard.secure"

#: The largest frame that a listener accepts: the longest payload (16 MiB) and its message. A peer
#: that announces a larger frame is disconnected before any of it is kept.
FRAME_BYTES_MAX: Final = 32 << 20

#: The largest number of frames in a message, a route included. ZeroMQ has no such limit.
FRAMES_MAX: Final = 64

#: More frames than this in one message take a tenth of a second to read. Their sender is cut off.
FRAMES_DROPPED_MAX: Final = 1 << 16

#: Messages queued to or from one peer. More would only hide that the peer is slow.
MESSAGES_WAITING_MAX: Final = 1_000

HANDSHAKE_MS_MAX: Final = 3_000
RECONNECT_MS_MIN: Final = 20
RECONNECT_MS_MAX: Final = 1_000
KEEPALIVE_IDLE_S: Final = 60
KEEPALIVE_INTERVAL_S: Final = 10
KEEPALIVE_COUNT: Final = 3

#: At several addresses an absent broker is looked for more often: a standby may take over any time.
FAILOVER_RECONNECT_MS_MAX: Final = 250

#: How often a socket of several addresses makes its broker send something.
FAILOVER_HEARTBEAT_MS: Final = 1_000

#: A local broker is disconnected after this time without a reply.
FAILOVER_SILENT_MS: Final = 2_000

UNACKNOWLEDGED_MS_MAX: Final = 1_000 * (KEEPALIVE_IDLE_S + KEEPALIVE_COUNT * KEEPALIVE_INTERVAL_S)

CONTEXT: Final[dict[zmq.ContextOption, int]] = {
    # A socket slot takes a few bytes, and a load generator opens a socket for each simulated peer.
    zmq.ContextOption.MAX_SOCKETS: 16_384,
    # A thread moves over a million small messages a second. Python is slower than that.
    zmq.ContextOption.IO_THREADS: 1,
}

Options: TypeAlias = dict[zmq.SocketOption, int | bytes]

_COMMON: Final[Options] = {
    # Closing a socket discards unsent messages. Peers repeat their requests.
    zmq.SocketOption.LINGER: 0,
    zmq.SocketOption.SNDHWM: MESSAGES_WAITING_MAX,
    zmq.SocketOption.RCVHWM: MESSAGES_WAITING_MAX,
    # Every call is non-blocking already. These make sure of it.
    zmq.SocketOption.SNDTIMEO: 0,
    zmq.SocketOption.RCVTIMEO: 0,
    # A peer that stops in the middle of the handshake is disconnected after this time.
    zmq.SocketOption.HANDSHAKE_IVL: HANDSHAKE_MS_MAX,
    # A machine that vanished is noticed after 90 s, even by a peer that only receives.
    zmq.SocketOption.TCP_KEEPALIVE: 1,
    zmq.SocketOption.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE_S,
    zmq.SocketOption.TCP_KEEPALIVE_INTVL: KEEPALIVE_INTERVAL_S,
    zmq.SocketOption.TCP_KEEPALIVE_CNT: KEEPALIVE_COUNT,
    # And after the same time if it has not acknowledged what was sent. Without this, the system
    # retries for a quarter of an hour, during which the peer's routing id stays in use.
    zmq.SocketOption.TCP_MAXRT: UNACKNOWLEDGED_MS_MAX,
    # Off: ZeroMQ would answer its heartbeats even for a hung program. Our protocols have their own.
    zmq.SocketOption.HEARTBEAT_IVL: 0,
    # Off unless the endpoint is IPv6: a dual-stack socket shows IPv4 peers under other addresses.
    zmq.SocketOption.IPV6: 0,
}

LISTEN_OPTIONS: Final[dict[zmq.SocketOption, int | bytes]] = {
    **_COMMON,
    zmq.SocketOption.MAXMSGSIZE: FRAME_BYTES_MAX,
    # Sending to an unknown route fails. Otherwise ZeroMQ drops the message and reports success.
    zmq.SocketOption.ROUTER_MANDATORY: 1,
    # A peer that reconnects under its old routing id takes over the route. A routing id is no proof
    # of identity: any peer can claim it and receive the replies, so messages carry names.
    zmq.SocketOption.ROUTER_HANDOVER: 1,
    # With a domain, ZeroMQ asks the ZAP thread about every connection and refuses versions before
    # ZMTP 3. Without a domain, an HTTP POST is accepted as ZMTP 1.0 and its body as messages.
    zmq.SocketOption.ZAP_DOMAIN: LISTENING_DOMAIN,
    # If the ZAP thread does not reply, the peer is refused.
    zmq.SocketOption.ZAP_ENFORCE_DOMAIN: 1,
    # For the record: `endpoints.py` opens the descriptor with the same number.
    zmq.SocketOption.BACKLOG: BACKLOG,
}


def curve_server(domain: bytes, secret: bytes) -> dict[zmq.SocketOption, int | bytes]:
    """Return the options of a listener that requires keys. `secret` is the broker's own key."""
    return {
        **LISTEN_OPTIONS,
        zmq.SocketOption.ZAP_DOMAIN: domain,
        # A peer can't take over the route of a connected peer, whose replies may be confidential.
        # A peer that reconnects under a fixed routing id is ignored until ZeroMQ has noticed that
        # the old connection is dead. Our peers choose no routing id.
        zmq.SocketOption.ROUTER_HANDOVER: 0,
        zmq.SocketOption.CURVE_SERVER: 1,
        zmq.SocketOption.CURVE_SECRETKEY: secret,
    }


CONNECT_OPTIONS: Final[dict[zmq.SocketOption, int | bytes]] = {
    **_COMMON,
    # No limit: a peer has requested everything that its broker sends. A worker that can't receive
    # its tasks would be sent them again and again.
    zmq.SocketOption.MAXMSGSIZE: -1,
    # Messages are queued while there is no connection. After a restart the new broker receives
    # the messages that the old broker did not read. Requests are idempotent.
    zmq.SocketOption.IMMEDIATE: 0,
    # A restarted broker is found at once. An absent one costs one attempt a second.
    zmq.SocketOption.RECONNECT_IVL: RECONNECT_MS_MIN,
    zmq.SocketOption.RECONNECT_IVL_MAX: RECONNECT_MS_MAX,
    # As long as for a handshake. The system's own limit is minutes.
    zmq.SocketOption.CONNECT_TIMEOUT: HANDSHAKE_MS_MAX,
    # And no ZAP_DOMAIN: no stranger can send to a socket that chooses its peer. A connecting socket
    # that refuses a greeting never retries, so one invalid greeting would disable it for good.
    zmq.SocketOption.ZAP_ENFORCE_DOMAIN: 0,
}


def with_failover(options: Options, *, is_local: bool) -> Options:
    """Return the options of a socket to one of several addresses of a broker.

    ZeroMQ sends heartbeats, so that a live broker is never silent. Over TCP it does not disconnect
    without a reply, which may be behind a large message on a slow network: see `FailoverSocket`.
    """
    return {
        **options,
        zmq.SocketOption.RECONNECT_IVL_MAX: FAILOVER_RECONNECT_MS_MAX,
        zmq.SocketOption.HEARTBEAT_IVL: FAILOVER_HEARTBEAT_MS,
        zmq.SocketOption.HEARTBEAT_TIMEOUT: FAILOVER_SILENT_MS if is_local else 0,
    }


def with_identity(identity: bytes, options: Options) -> Options:
    """Return options with a fixed routing id, by which other sockets address this socket."""
    return {**options, zmq.SocketOption.ROUTING_ID: identity}


#: For a ROUTER that connects. It and its peer address each other by name.
ROUTER_CONNECT_OPTIONS: Final[Options] = {
    **CONNECT_OPTIONS,
    # As for a listener: sending to an unknown route fails.
    zmq.SocketOption.ROUTER_MANDATORY: 1,
    # It has one connection. A second peer of that name does not replace it.
    zmq.SocketOption.ROUTER_HANDOVER: 0,
}


def curve_client(
    secret: bytes, public: str, broker: str, options: Options = CONNECT_OPTIONS
) -> Options:
    """Return the options of a peer with a key. It connects only to the broker whose public key is
    `broker`."""
    return {
        **options,
        zmq.SocketOption.CURVE_SECRETKEY: secret,
        zmq.SocketOption.CURVE_PUBLICKEY: public.encode("ascii"),
        zmq.SocketOption.CURVE_SERVERKEY: broker.encode("ascii"),
    }


def set_options(
    socket: zmq.Socket[bytes], options: Mapping[zmq.SocketOption, int | bytes], *, is_ipv6: bool
) -> None:
    """Set all options. Call it before the socket binds or connects."""
    for option, value in options.items():
        socket.setsockopt(option, value)
    if is_ipv6:
        socket.setsockopt(zmq.SocketOption.IPV6, 1)


def query_once(endpoint: str, body: bytes, wait_ms: int) -> bytes | None:
    """Send a request to a local broker and return the last frame of the reply.

    Return None after `wait_ms`. For shell completion, which must be fast: the imports and the ZAP
    thread of `sockets` take longer than the request. Only for ipc endpoints, which need no key.
    """
    with zmq.Context() as context:
        for option, value in CONTEXT.items():
            context.set(option, value)
        with closing(context.socket(zmq.DEALER)) as socket:
            set_options(socket, CONNECT_OPTIONS, is_ipv6=False)
            socket.connect(endpoint)
            socket.send_multipart([b"", body], zmq.NOBLOCK)
            reply = socket.recv_multipart()[-1] if socket.poll(wait_ms) else None
            socket.setsockopt(zmq.LINGER, 0)
            return reply
