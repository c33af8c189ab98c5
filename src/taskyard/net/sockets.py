"""Opens ZeroMQ sockets that never block, with the options of one address: listeners and peers.

The socket itself is in `zmq_socket.py`, as are the sockets that connect.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import zmq

from taskyard.errors import UnusableKey
from taskyard.net import endpoints, zmq_socket
from taskyard.net.accepted import Arrivals, Connection, Cutter, inode_of
from taskyard.net.context import context, raise_file_limit, require_keys
from taskyard.net.endpoints import Ipc, Tcp
from taskyard.net.guard import Guard
from taskyard.net.keyring import Keyring, PeerKeys
from taskyard.net.keys import PeerKey
from taskyard.net.options import (
    CONNECT_OPTIONS,
    LISTEN_OPTIONS,
    ROUTER_CONNECT_OPTIONS,
    Options,
    curve_client,
    curve_server,
    set_options,
    with_failover,
    with_identity,
)
from taskyard.net.outbound import COUNTED_BYTES_MIN, Outbound
from taskyard.net.zmq_socket import CountingSocket, FailoverSocket, RouterClient, ZmqSocket


class CurveListener(ZmqSocket):
    """A listener that requires keys, and records which key sent each message."""

    is_secure = True

    def _note_sender(self, frame: zmq.Frame) -> None:
        """Set `user` to the sender's public key: a property of the frame, which costs 0.8 µs more a
        message."""
        self.user = _user_of(frame)

    def _note_empty(self) -> None:
        super()._note_empty()
        self.user = ""


class PeerListener(ZmqSocket):
    """A listener that records which connection each message came by, and can cut connections.

    ZeroMQ does not report that a peer has disconnected. A connection is its descriptor and the
    inode of its socket, which differ for any two open connections. A message to a peer with too
    many unread bytes is not sent.
    """

    #: The connection of the last message. The inode is 0 if it was closed by then.
    connection = (0, 0)

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        file: endpoints.SocketFile | None,
        arrivals: Arrivals | None = None,
    ) -> None:
        super().__init__(socket, endpoint, file, arrivals)
        self._cutter = Cutter()
        self._outbound = Outbound()

    def send(self, frames: Sequence[bytes], last: bytes | zmq.Frame | None = None) -> bool:
        if last is not None or len(frames[-1]) < COUNTED_BYTES_MIN:
            return super().send(frames, last)
        self._outbound.refresh()
        return self._outbound.send(self, frames[0], frames)

    def _note_sender(self, frame: zmq.Frame) -> None:
        descriptor = int(frame.get(zmq_socket.DESCRIPTOR))
        self.connection = (descriptor, inode_of(descriptor))

    def is_open(self, connection: tuple[int, int]) -> bool:
        """Return whether a connection is still open."""
        descriptor, inode = connection
        return bool(inode) and inode_of(descriptor) == inode

    def cut(self, connection: tuple[int, int]) -> None:
        """Disconnect a peer, whose socket reconnects."""
        if self._arrivals is not None:
            self._cutter.cut(Connection(*connection, self._arrivals, 0), is_named=False)

    def close(self) -> None:
        if not self.socket.closed and self._process == os.getpid():
            self._cutter.close()
        super().close()


class CurvePeerListener(PeerListener):
    """A `PeerListener` that requires keys. A peer whose key was revoked is cut."""

    is_secure = True

    #: The keys of its peers. Set after it is opened.
    keys: PeerKeys

    def _note_sender(self, frame: zmq.Frame) -> None:
        self.user = _user_of(frame)
        super()._note_sender(frame)

    def receive(self) -> list[bytes] | None:
        while (frames := super().receive()) is not None:
            if self.keys.accept(frames[0], self.connection, self.user):
                return frames
            self.cut(self.connection)
        return None

    def send(self, frames: Sequence[bytes], last: bytes | zmq.Frame | None = None) -> bool:
        connection = self.keys.connection(frames[0])
        if self.keys.is_accepted(connection):
            return super().send(frames, last)
        self.cut(connection)
        self.is_full = False
        return False

    def is_open(self, connection: tuple[int, int]) -> bool:
        """Return whether a connection is still open. With a revoked key it is cut."""
        if self.keys.is_accepted(connection):
            return super().is_open(connection)
        self.cut(connection)
        return False


def _user_of(frame: zmq.Frame) -> str:
    """Return the key that ZAP has set for a frame's connection. Peers can't set it."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""  # no key


def listen(  # noqa: PLR0913  # most are named
    endpoint: str,
    keyring: Keyring | None = None,
    *,
    is_named: bool = False,
    identity: str = "",
    guard: Guard | None = None,
    kind: type[ZmqSocket] = ZmqSocket,
) -> ZmqSocket:
    """Open a ROUTER that listens on an endpoint. The first frame of a message is its route.

    With a keyring, peers need one of its keys. If `is_named`, its routing id is `identity`, or its
    endpoint with the real port, for ROUTERs that connect to it. A guard watches it from its first
    connection on. Raise UserError.
    """
    raise_file_limit()
    address = endpoints.parse(endpoint)
    if keyring is None and endpoints.is_remote(address):
        raise UnusableKey(
            f"endpoint {endpoint}: other machines can reach it, so it needs keys (create one with "
            "`taskyard keys new`)"
        )
    options = LISTEN_OPTIONS
    if keyring is not None:
        options = curve_server(require_keys(keyring), keyring.secret().reveal())
        kind = CurvePeerListener if kind is PeerListener else CurveListener
    socket = context().socket(zmq.ROUTER)
    try:
        set_options(socket, options, is_ipv6=isinstance(address, Tcp) and address.is_ipv6)
        opened = endpoints.open_listener(address)
        socket.setsockopt(zmq.SocketOption.USE_FD, opened.descriptor)
        if is_named:
            name = identity or str(opened.address)
            socket.setsockopt(zmq.SocketOption.ROUTING_ID, name.encode())
        arrivals = None
        if guard is not None:
            is_local, has_keys = isinstance(address, Ipc), keyring is not None
            arrivals = guard.watch(socket, opened.descriptor, is_local=is_local, has_keys=has_keys)
        socket.bind(str(opened.address))
    except BaseException:
        socket.close()
        raise
    return kind(socket, str(opened.address), opened.file, arrivals)


def listen_to_peers(
    endpoint: str,
    guard: Guard,
    keyring: Keyring | None = None,
    *,
    is_named: bool = False,
    identity: str = "",
) -> PeerListener:
    """Open a listener that records the connection of each message, like `listen`."""
    listener = listen(
        endpoint,
        keyring,
        is_named=is_named,
        identity=identity,
        guard=guard,
        kind=PeerListener,
    )
    if isinstance(listener, CurvePeerListener) and keyring is not None:
        listener.keys = PeerKeys(keyring)
    return cast("PeerListener", listener)


def connect(endpoint: str, key: PeerKey | None = None, *, counts: bool = False) -> ZmqSocket:
    """Open a DEALER. Messages have no route. Return at once, connected or not.

    With `counts` and over TCP it counts its connections, and detects a refusal. A key is used over
    TCP only: on an ipc socket the kernel identifies the peer. Raise UserError.
    """
    addresses = _peer_addresses(endpoint, key)
    if len(addresses) > 1:
        return FailoverSocket(addresses, partial(_dial, _connect_dealer, key, CONNECT_OPTIONS))
    if counts or isinstance(addresses[0], Tcp):
        return _connect_dealer(addresses[0], key, CONNECT_OPTIONS)
    socket = context().socket(zmq.DEALER)
    wire = ZmqSocket(socket, str(addresses[0]), None)
    _connect(socket, wire, addresses[0], None, CONNECT_OPTIONS)
    return wire


def _connect_dealer(
    address: Ipc | Tcp, key: PeerKey | None, options: Options, host: str = ""
) -> CountingSocket:
    socket = context(host).socket(zmq.DEALER)
    wire = CountingSocket(socket, str(address), _key_name(address, key))
    _connect(socket, wire, address, key, options)
    return wire


def connect_by_name(endpoint: str, suffix: str, key: PeerKey | None = None) -> ZmqSocket:
    """Open a ROUTER to a listener that is named by its endpoint. Return at once, connected or not.

    Its own name is that endpoint, a colon and the suffix, which must be unique. A key is used over
    TCP only, as by `connect`. Of several addresses the name has the first. Raise UserError.
    """
    return connect_as(endpoint, f"{endpoints.parse_addresses(endpoint)[0]}:{suffix}".encode(), key)


def connect_as(endpoint: str, identity: bytes, key: PeerKey | None = None) -> ZmqSocket:
    """Open a ROUTER with this routing id, like `connect_by_name`. Empty: ZeroMQ assigns an id."""
    addresses = _peer_addresses(endpoint, key)
    options = ROUTER_CONNECT_OPTIONS
    if identity:
        options = with_identity(identity, options)
    if len(addresses) == 1:
        return _connect_router(addresses[0], key, options)
    return FailoverSocket(addresses, partial(_dial, _connect_router, key, options), is_router=True)


def _connect_router(
    address: Ipc | Tcp, key: PeerKey | None, options: Options, host: str = ""
) -> RouterClient:
    name = str(address)
    socket = context(host).socket(zmq.ROUTER)
    # The peer's name is set before it connects, so that messages can be queued for it.
    socket.setsockopt(zmq.SocketOption.CONNECT_ROUTING_ID, name.encode())
    wire = RouterClient(socket, name, _key_name(address, key))
    _connect(socket, wire, address, key, options)
    return wire


def _dial(
    connect_one: Callable[[Ipc | Tcp, PeerKey | None, Options, str], CountingSocket],
    key: PeerKey | None,
    options: Options,
    address: Ipc | Tcp,
) -> CountingSocket:
    """Open a socket to one of several addresses. A name that is slow to resolve delays no other."""
    host = address.host if isinstance(address, Tcp) and address.has_name else ""
    return connect_one(
        address, key, with_failover(options, is_local=isinstance(address, Ipc)), host
    )


def _peer_addresses(endpoint: str, key: PeerKey | None) -> tuple[Ipc | Tcp, ...]:
    """Return the addresses to connect to. Raise UserError if a key is missing."""
    addresses = endpoints.parse_addresses(endpoint)
    if key is None and any(map(endpoints.is_remote, addresses)):
        raise UnusableKey(
            f"endpoint {endpoint}: a broker on another machine needs a key (give --key FILE, "
            "TASKYARD_KEY=FILE or, in Python, Client(key=…))"
        )
    return addresses


def _key_name(address: Ipc | Tcp, key: PeerKey | None) -> str:
    """Return the name of the key that is used at an address. Empty: none."""
    return key.name if key is not None and isinstance(address, Tcp) else ""


def _connect(
    socket: zmq.Socket[bytes],
    wire: ZmqSocket,
    address: Ipc | Tcp,
    key: PeerKey | None,
    options: Options,
) -> None:
    """Set the options of a socket, and connect it. Close it if that fails."""
    with contextlib.ExitStack() as stack:
        stack.callback(wire.close)
        if key is not None and isinstance(address, Tcp):
            secret = key.secret
            options = curve_client(secret.reveal(), secret.public(), key.broker, options)
        set_options(socket, options, is_ipv6=isinstance(address, Tcp) and address.is_ipv6)
        socket.connect(str(address))
        stack.pop_all()
