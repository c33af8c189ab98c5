"""Where sockets are: the native endpoint of a state directory, and which endpoints a user may give.

An endpoint is `ipc://PATH` or `tcp://ADDRESS:PORT`. What is beyond this machine needs keys:
`is_remote` tells it, and `sockets.py` sees to it. A broker listens at addresses alone; a peer may
also go by the name of a machine, because a key tells the broker from whoever answers to its name.
Opens nothing but the private directory for long paths.
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

from taskyard.errors import UserError
from taskyard.journal.files import PRIVATE_DIRECTORY, PRIVATE_FILE, make_private_directory

SOCKET_NAME: Final = "broker.sock"

#: A socket's address has 108 bytes on Linux, one of them for the end of the string.
IPC_PATH_BYTES_MAX: Final = 107

#: Connections that wait to be accepted. The kernel has its own maximum and takes the smaller.
BACKLOG: Final = 4_096

PORT_MAX: Final = 65_535

#: Where the short directories are. Not TMPDIR: broker and client may have different ones.
SHORT_DIRECTORY = Path("/tmp")  # noqa: S108 - anybody may write there, so the owner and mode are checked

#: 64 bits of a path tell the states of one user apart.
_DIGEST_CHARACTERS: Final = 16

_COMMA = re.compile(r",(?=(?:tcp|ipc)://)")
_TCP = re.compile(r"tcp://(?P<host>\[[^]/]*]|[^]:/;[]+):(?P<port>\*|[0-9]{1,5})")
_FORMS_HINT = "give tcp://127.0.0.1:PORT or ipc://PATH"

#: The name of a machine: what DNS takes, and no address of four numbers.
_NAME = re.compile(
    r"(?=.{1,253}\Z)(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*"
    r"[A-Za-z](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
)


class Tcp(NamedTuple):
    """An address, without brackets, or the name of a machine. Port 0 takes a free one."""

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
    def is_loopback(self) -> bool:
        """Nobody but this machine reaches it; a name is never taken to be."""
        return not _NAME.fullmatch(self.host) and ipaddress.ip_address(self.host).is_loopback


class Ipc(NamedTuple):
    """An absolute path."""

    path: str

    def __str__(self) -> str:
        return f"ipc://{self.path}"


def native_endpoint(state: Path) -> str:
    """The endpoint of a state directory's broker; its clients find it without asking.

    Where the path is too long for a socket, it is in a short private directory instead, made here
    so that nobody else can make it first.
    """
    path = state.resolve() / SOCKET_NAME
    if _fits(str(path)):
        return str(Ipc(str(path)))
    return str(Ipc(str(_short_directory(path.parent) / SOCKET_NAME)))


def listen_endpoint(endpoint: str) -> str:
    """The endpoint to listen at, in its one spelling. Port 0 or * takes a free one."""
    return str(parse(endpoint))


def peer_endpoint(endpoint: str) -> str:
    """The endpoint to connect to, in its one spelling."""
    return str(parse_peer(endpoint))


def is_remote(place: Tcp | Ipc) -> bool:
    """Whether it can be reached from other machines, or is on one."""
    return isinstance(place, Tcp) and not place.is_loopback


def parse_peer(endpoint: str) -> Tcp | Ipc:
    """What an endpoint to connect to says: it has a port, and may name a machine."""
    place = parse(endpoint, by_name=True)
    if isinstance(place, Ipc):
        return place
    if place.port == 0:
        raise UserError(f"endpoint {endpoint} has no port to connect to; {_FORMS_HINT}")
    if place.host in ("0.0.0.0", "::"):  # noqa: S104 - it is refused
        raise UserError(
            f"endpoint {endpoint} stands for all addresses of a machine, and nobody can be reached "
            "there; give one of them"
        )
    return place


def split_endpoints(given: str) -> list[str]:
    """The endpoints of a list with commas. A path may have a comma of its own."""
    return _COMMA.split(given)


def parse(endpoint: str, *, by_name: bool = False) -> Tcp | Ipc:
    """What an endpoint says. Raises UserError with what is wrong and what to do."""
    if endpoint.startswith("ipc://"):
        return _parse_ipc(endpoint)
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise UserError(f"endpoint {endpoint!r} is of no form that Taskyard knows; {_FORMS_HINT}")
    port = 0 if match["port"] == "*" else int(match["port"])
    if port > PORT_MAX:
        raise UserError(f"endpoint {endpoint} has a port over {PORT_MAX}; {_FORMS_HINT}")
    return Tcp(_host(match["host"], endpoint, by_name=by_name), port)


def _parse_ipc(endpoint: str) -> Ipc:
    given = endpoint.removeprefix("ipc://")
    if not given or given == "*" or given.endswith("/"):
        raise UserError(f"endpoint {endpoint!r} names no socket; {_FORMS_HINT}")
    if given.startswith("@"):
        raise UserError(
            f"endpoint {endpoint} is an abstract socket, which any user of this machine could "
            "open; give ipc://PATH"
        )
    path = os.path.abspath(given)  # noqa: PTH100 - Path.resolve would follow links, this only joins
    if not _fits(path):
        raise UserError(
            f"the path of {endpoint!r} does not fit a socket, which takes {IPC_PATH_BYTES_MAX} "
            "bytes of UTF-8; give a shorter one"
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
        # A name is never looked up for a listener: what it says may change.
        raise UserError(
            f"endpoint {endpoint} has no address that a socket can have; {_FORMS_HINT}, and "
            "beyond this machine an address of it, or tcp://0.0.0.0:PORT for all of them"
        ) from None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    if not host.startswith("["):
        return ipaddress.IPv4Address(host)
    address = ipaddress.IPv6Address(host[1:-1])
    if address.scope_id or address.ipv4_mapped:
        raise ValueError  # one has two spellings, the other means different things on each machine
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
        raise UserError(
            f"the path of {state} is too long for a socket, and {directory} can't be made instead: "
            f"{error.strerror}; give a --state with a shorter path"
        ) from error
    # Not followed if it is a link: where that leads could change under us.
    found = directory.lstat()
    private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == PRIVATE_DIRECTORY
    if not private or found.st_uid != os.getuid():
        raise UserError(
            f"{directory}, for the socket of {state}, is not a private directory of yours; "
            "remove it, or give a --state with a shorter path"
        )
    return directory


class SocketFile(NamedTuple):
    """A socket's file, as it was when it was made."""

    path: Path
    device: int
    inode: int

    def remove(self) -> None:
        """Remove it, unless another took its place."""
        with contextlib.suppress(FileNotFoundError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                self.path.unlink()


class ListeningDescriptor(NamedTuple):
    """A descriptor that listens; whoever takes it closes it."""

    descriptor: int
    #: With the real port.
    place: Tcp | Ipc
    file: SocketFile | None


def open_listener(place: Tcp | Ipc) -> ListeningDescriptor:
    """Raises UserError where nobody can listen, or somebody does already."""
    try:
        return _open_tcp(place) if isinstance(place, Tcp) else _open_ipc(place)
    except OSError as error:
        raise UserError(
            f"can't listen at {place}: {error.strerror}; see that nobody else does and that you "
            "may, or give another endpoint"
        ) from error


def _open_tcp(place: Tcp) -> ListeningDescriptor:
    family = socket.AF_INET6 if place.is_ipv6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # A port is free as soon as nobody listens, whatever old connections linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((place.host, place.port))
        _listen(listener)
        port: int = listener.getsockname()[1]
        return ListeningDescriptor(listener.detach(), Tcp(place.host, port), None)


def _open_ipc(place: Ipc) -> ListeningDescriptor:
    path = Path(place.path)
    make_private_directory(path.parent)
    _check_directory_private(path.parent)
    _remove_stale_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(place.path)
        # Nobody can connect before it listens, so it is never open to others.
        path.chmod(PRIVATE_FILE)
        _listen(listener)
        found = path.lstat()
        return ListeningDescriptor(
            listener.detach(), place, SocketFile(path, found.st_dev, found.st_ino)
        )


def _listen(listener: socket.socket) -> None:
    # Never blocking: a peer may be gone between the poll and the accept.
    listener.settimeout(0)
    listener.listen(BACKLOG)


def _check_directory_private(directory: Path) -> None:
    """Whoever may write there could put a socket of their own in place of ours."""
    mode = directory.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise UserError(
            f"others may write in {directory}, so a socket there could be replaced; "
            f"chmod 700 {directory}, or give another endpoint"
        )


def _remove_stale_socket(path: Path) -> None:
    """The file of a broker that ended without closing. A living one's is left alone."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"{path} is there and is no socket; remove it, or give another endpoint")
    if _is_alive(path):
        raise UserError(
            f"somebody listens at ipc://{path} already; stop it, or give another endpoint"
        )
    path.unlink(missing_ok=True)


def _is_alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A busy broker's queue may be full: that is a sign of life, not worth waiting for.
        probe.settimeout(0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            return True
        return True
