"""Endpoints: their forms, the native endpoint of a state directory, and listening on them.

An endpoint is `ipc://PATH` or `tcp://ADDRESS:PORT`. Where other machines can reach it, it needs
keys: `is_remote` detects it, and `sockets.py` requires them. A broker listens on addresses only. A
peer may also connect to a host name, because the key authenticates the broker. Imports no zmq.

A broker that may be at one of several addresses is written with plus signs between them:
`tcp://a.example:6125+tcp://b.example:6125`. Peers find it: see `FailoverSocket`.
"""

import contextlib
import hashlib
import ipaddress
import os
import re
import socket
import stat
from pathlib import Path
from typing import Final, NamedTuple

from taskyard.errors import UnusableEndpoint
from taskyard.journal.files import PRIVATE_DIRECTORY, PRIVATE_FILE, make_private_directory

SOCKET_NAME: Final = "broker.sock"

#: A socket's address has 108 bytes on Linux, one of them for the terminating NUL.
IPC_PATH_BYTES_MAX: Final = 107

#: Connections waiting to be accepted. The kernel has its own maximum and takes the smaller.
BACKLOG: Final = 4_096

PORT_MAX: Final = 65_535

#: Parent of the short directories. Not TMPDIR: broker and client may differ in it.
SHORT_DIRECTORY = Path("/tmp")  # noqa: S108 - anybody may write there, so the owner and mode are checked

#: 64 bits of a path's hash distinguish the state directories of one user.
_DIGEST_CHARACTERS: Final = 16

_COMMA = re.compile(r",(?=(?:tcp|ipc)://)")
_PLUS = re.compile(r"\+(?=(?:tcp|ipc)://)")
_TCP = re.compile(r"tcp://(?P<host>\[[^]/]*]|[^]:/;[]+):(?P<port>\*|[0-9]{1,5})")
_FORMS_HINT = "give tcp://127.0.0.1:PORT or ipc://PATH"

#: A host name as DNS allows it, but no address of four numbers.
_NAME = re.compile(
    r"(?=.{1,253}\Z)(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*"
    r"[A-Za-z](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
)


class Tcp(NamedTuple):
    """An address without brackets, or a host name. Port 0 means any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return (
            f"tcp://[{self.host}]:{self.port}" if self.is_ipv6 else f"tcp://{self.host}:{self.port}"
        )

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    @property
    def has_name(self) -> bool:
        """Return whether the host is a name."""
        return _NAME.fullmatch(self.host) is not None

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach it. False for every host name."""
        return not self.has_name and ipaddress.ip_address(self.host).is_loopback


class Ipc(NamedTuple):
    """A Unix socket. The path is absolute."""

    path: str

    def __str__(self) -> str:
        return f"ipc://{self.path}"


def native_endpoint(state: Path) -> str:
    """Return the endpoint of a state directory's broker, which its clients derive as well.

    A path too long for a socket is replaced by a short private directory. It is created here, so
    that no other user can create it first.
    """
    path = state.resolve() / SOCKET_NAME
    if _fits(str(path)):
        return str(Ipc(str(path)))
    return str(Ipc(str(_short_directory(path.parent) / SOCKET_NAME)))


def listen_endpoint(endpoint: str) -> str:
    """Return the canonical form of an endpoint to listen on. Port 0 or * means any free port."""
    return str(parse(endpoint))


def peer_endpoint(endpoint: str) -> str:
    """Return the canonical form of an endpoint to connect to, which may have several addresses."""
    return "+".join(map(str, parse_addresses(endpoint)))


def parse_addresses(endpoint: str) -> tuple[Tcp | Ipc, ...]:
    """Parse the addresses of an endpoint to connect to. Each is returned once. Raise UserError."""
    return tuple(dict.fromkeys(parse_peer(one.strip()) for one in _PLUS.split(endpoint)))


def uses_tcp(endpoint: str) -> bool:
    """Return whether one of the addresses of an endpoint is on TCP, where keys are used."""
    return any(one.startswith("tcp://") for one in _PLUS.split(endpoint))


def is_local(endpoint: str) -> bool:
    """Return whether all addresses of an endpoint are sockets of this machine's file system."""
    return all(one.startswith("ipc://") for one in _PLUS.split(endpoint))


def has_addresses(endpoint: str) -> bool:
    """Return whether an endpoint has several addresses."""
    return _PLUS.search(endpoint) is not None


def is_remote(address: Tcp | Ipc) -> bool:
    """Return whether other machines can reach an address, or it is on another machine."""
    return isinstance(address, Tcp) and not address.is_loopback


def is_wildcard(address: Tcp | Ipc) -> bool:
    """Return whether an endpoint stands for all addresses of a machine."""
    return isinstance(address, Tcp) and address.host in ("0.0.0.0", "::", "[::]")  # noqa: S104 - a test


def parse_peer(endpoint: str) -> Tcp | Ipc:
    """Parse an endpoint to connect to. It must have a port and may have a host name."""
    address = parse(endpoint, by_name=True)
    if isinstance(address, Ipc):
        return address
    if address.port == 0:
        raise UnusableEndpoint(f"endpoint {endpoint}: no port to connect to ({_FORMS_HINT})")
    if is_wildcard(address):
        raise UnusableEndpoint(
            f"endpoint {endpoint}: stands for all addresses of a machine (give one of them)"
        )
    return address


def split_endpoints(given: str) -> list[str]:
    """Split a comma-separated list of endpoints. A path may contain commas."""
    return _COMMA.split(given)


def parse(endpoint: str, *, by_name: bool = False) -> Tcp | Ipc:
    """Parse an endpoint. `by_name` allows a host name. Raise UserError if it is invalid."""
    if has_addresses(endpoint):
        raise UnusableEndpoint(f"endpoint {endpoint}: several addresses, expected one")
    if endpoint.startswith("ipc://"):
        return _parse_ipc(endpoint)
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise UnusableEndpoint(f"endpoint {endpoint!r}: unknown form ({_FORMS_HINT})")
    port = 0 if match["port"] == "*" else int(match["port"])
    if port > PORT_MAX:
        raise UnusableEndpoint(f"endpoint {endpoint}: port over {PORT_MAX}")
    return Tcp(_host(match["host"], endpoint, by_name=by_name), port)


def _parse_ipc(endpoint: str) -> Ipc:
    given = endpoint.removeprefix("ipc://")
    if not given or given == "*" or given.endswith("/"):
        raise UnusableEndpoint(f"endpoint {endpoint!r}: no socket path ({_FORMS_HINT})")
    if given.startswith("@"):
        raise UnusableEndpoint(
            f"endpoint {endpoint}: any user of this machine could open an abstract socket (give "
            "ipc://PATH)"
        )
    path = os.path.abspath(given)  # noqa: PTH100 - Path.resolve would follow links, this only joins
    if not _fits(path):
        raise UnusableEndpoint(
            f"endpoint {endpoint!r}: path is longer than the {IPC_PATH_BYTES_MAX} bytes of UTF-8 "
            "that a socket allows"
        )
    return Ipc(path)


def _host(host: str, endpoint: str, *, by_name: bool) -> str:
    if host.lower() == "localhost":
        return "127.0.0.1"
    if by_name and _NAME.fullmatch(host):
        return host.lower()
    try:
        return str(_address(host))
    except ValueError:
        # A host name is never resolved for a listener: its address may change.
        raise UnusableEndpoint(
            f"endpoint {endpoint}: no valid address ({_FORMS_HINT}, for other machines an address "
            "of this one, or tcp://0.0.0.0:PORT for all)"
        ) from None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    if not host.startswith("["):
        return ipaddress.IPv4Address(host)
    address = ipaddress.IPv6Address(host[1:-1])
    if address.scope_id or address.ipv4_mapped:
        raise ValueError  # a scope id is only valid on one machine, a mapped address has two forms
    return address


def _fits(path: str) -> bool:
    try:
        return len(path.encode()) <= IPC_PATH_BYTES_MAX
    except UnicodeEncodeError:
        return False


def _short_directory(state: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(state)).hexdigest()[:_DIGEST_CHARACTERS]
    directory = SHORT_DIRECTORY / f"taskyard-{os.getuid()}-{digest}"
    try:
        directory.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    except OSError as error:
        raise UnusableEndpoint(
            f"{state}: path too long for a socket, and can't create {directory} instead: "
            f"{error.strerror} (give a --state with a shorter path)"
        ) from error
    # A link is not followed: its target could change.
    found = directory.lstat()
    private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == PRIVATE_DIRECTORY
    if not private or found.st_uid != os.getuid():
        raise UnusableEndpoint(
            f"{directory}: not a private directory of yours, for the socket of {state} (remove it, "
            "or give a --state with a shorter path)"
        )
    return directory


class SocketFile(NamedTuple):
    """A socket's file, identified by device and inode."""

    path: Path
    device: int
    inode: int

    def remove(self) -> None:
        """Remove the file, unless another file has replaced it."""
        with contextlib.suppress(FileNotFoundError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                self.path.unlink()


class ListeningDescriptor(NamedTuple):
    """A listening descriptor. The caller closes it."""

    descriptor: int
    #: Has the real port.
    address: Tcp | Ipc
    file: SocketFile | None


def open_listener(address: Tcp | Ipc) -> ListeningDescriptor:
    """Listen on an endpoint. Raise UserError if that fails or another process listens there."""
    try:
        return _open_tcp(address) if isinstance(address, Tcp) else _open_ipc(address)
    except OSError as error:
        raise UnusableEndpoint(f"can't listen on {address}: {error.strerror}") from error


def _open_tcp(address: Tcp) -> ListeningDescriptor:
    family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # A port is free as soon as no process listens on it, whatever old connections linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        _listen(listener)
        port: int = listener.getsockname()[1]
        return ListeningDescriptor(listener.detach(), Tcp(address.host, port), None)


def reserve(address: Tcp) -> socket.socket:
    """Bind an address without listening there: connections are refused, as without a process.

    Raise UserError if that fails.
    """
    family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            reserved.bind((address.host, address.port))
        except OSError:
            # Old connections may linger. Another process can bind it then, but not listen too.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind((address.host, address.port))
    except OSError as error:
        reserved.close()
        raise UnusableEndpoint(f"can't listen on {address}: {error.strerror}") from error
    return reserved


def _open_ipc(address: Ipc) -> ListeningDescriptor:
    path = Path(address.path)
    make_private_directory(path.parent)
    _check_directory_private(path.parent)
    _remove_stale_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address.path)
        # No peer can connect before it listens, so it is never open to other users.
        path.chmod(PRIVATE_FILE)
        _listen(listener)
        found = path.lstat()
        return ListeningDescriptor(
            listener.detach(), address, SocketFile(path, found.st_dev, found.st_ino)
        )


def _listen(listener: socket.socket) -> None:
    # Non-blocking: a peer may disconnect between poll and accept.
    listener.settimeout(0)
    listener.listen(BACKLOG)


def _check_directory_private(directory: Path) -> None:
    """Raise UserError if other users could replace a socket in a directory."""
    mode = directory.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise UnusableEndpoint(
            f"{directory}: other users may write here and could replace the socket (chmod 700 "
            f"{directory}, or give another endpoint)"
        )


def _remove_stale_socket(path: Path) -> None:
    """Remove the file of a broker that ended without closing. Keep the file of a live broker."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UnusableEndpoint(f"{path}: exists and is not a socket")
    if _is_alive(path):
        raise UnusableEndpoint(f"ipc://{path}: another process listens here already")
    path.unlink(missing_ok=True)


def _is_alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A busy broker's queue may be full. That means it is alive, so there is no need to wait.
        probe.settimeout(0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            return True
        return True
