"""The descriptor that a listener accepts on: opened, guarded and removed here, not by ZeroMQ.

ZeroMQ would remove whatever lies at an ipc path before it binds, a living broker's socket or
somebody's file, would make the socket for everybody to open, and would remove it some time after
the close, when it may be the next broker's. Knows nothing of ZeroMQ.
"""

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from taskyard.errors import UserError
from taskyard.journal.files import PRIVATE_FILE, make_private_directory
from taskyard.net.endpoints import Ipc, Tcp
from taskyard.net.options import BACKLOG


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
