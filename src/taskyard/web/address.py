"""Where the page of a state directory is: its socket, its secret, and the file that names both.

The process that owns the page (`taskyard up` or `taskyard web`) holds a lock on the file as long as
the address and its tokens are good. A killed owner leaves the file, but not the lock.

Imports nothing of the web server, so that other commands find the page quickly.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import secrets
import socket
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from msgspec import MsgspecError, Struct, json

from taskyard.errors import UnusableEndpoint, UserError
from taskyard.journal.files import open_regular, replace_private
from taskyard.net.keys import read_private
from taskyard.process.state_files import PAGE_FILE, is_owned, page_address, read_page_file
from taskyard.settings.keys import PAGE_ADDRESS
from taskyard.settings.values import InvalidValue, read_host_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Names of the module below that callers look for here.
__all__ = ["PAGE_FILE", "page_address"]

#: Where the page is by default.
DEFAULT_ADDRESS: Final = PAGE_ADDRESS

#: The token for programs that collect metrics. It outlives the page, so that they keep it.
METRICS_TOKEN_FILE: Final = "metrics.token"  # noqa: S105  # its name

_SECRET_BYTES: Final = 32

#: Addresses that stand for all of a machine, with the address that a browser can open.
WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # only if it is asked for

#: A reader holds the lock for a moment. An owner tries again.
_LOCK_TRIES: Final = 100


class Role(StrEnum):
    """The permission of a token: to act, or only to look."""

    OPERATOR = "operator"
    VIEWER = "viewer"


def metrics_token(state: Path) -> str:
    """Return the token for metrics of a state directory. It is made at the first call."""
    path = state / METRICS_TOKEN_FILE
    try:
        return read_private(path).decode("ascii").strip()
    except FileNotFoundError:
        pass
    try:
        replace_private(path, secrets.token_hex(_SECRET_BYTES).encode() + b"\n")
        return read_private(path).decode("ascii").strip()  # another process may have made it too
    except OSError as error:
        raise UserError(f"{path}: can't write: {error.strerror}") from error


class Secret:
    """Derives tokens and cookies. Equal secrets have equal tokens."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def token(self, role: Role) -> str:
        """Return the token in the address for a role."""
        return self._derived(f"token {role}")

    def cookie(self, role: Role) -> str:
        """Return the value of the cookie for a role."""
        return self._derived(f"cookie {role}")

    def role_of_token(self, token: str) -> Role | None:
        return self._match(token, self.token)

    def role_of_cookie(self, value: str) -> Role | None:
        return self._match(value, self.cookie)

    def _derived(self, purpose: str) -> str:
        return hmac.digest(self._secret, purpose.encode(), "sha256").hex()

    def _match(self, given: str, derive: Callable[[Role], str]) -> Role | None:
        """Compare with all roles, so that the time reveals nothing."""
        equal = [
            role for role in Role if hmac.compare_digest(given.encode(), derive(role).encode())
        ]
        return equal[0] if equal else None


class PageAddress(Struct, frozen=True):
    """A page: the content of its file in the state directory."""

    #: Without a token.
    address: str
    secret: bytes
    #: The process that owns the page.
    pid: int = 0

    def with_token(self, role: Role) -> str:
        """Return the address with a token of a role."""
        return f"{self.address}/?token={Secret(self.secret).token(role)}"


class PageRunning(UserError):
    """A page of this state directory is running already."""

    def __init__(self, page: PageAddress) -> None:
        super().__init__(f"a page is running at {page.address}, process {page.pid}")
        self.page = page


def split_address(text: str) -> tuple[str, int]:
    """Split `HOST:PORT`. Raises UserError."""
    try:
        host, _, port = read_host_port(text).rpartition(":")
    except InvalidValue as error:
        raise UserError(f"page address: {error}") from error
    return host.removeprefix("[").removesuffix("]"), int(port)


def bind(text: str) -> socket.socket:
    """Bind an address of a page and listen. If the port is taken, use a free port.

    Browsers that connect before the server runs wait in the socket's queue. Raises UserError.
    """
    host, port = split_address(text)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind_near(found, host, port)
        found.listen()
    except OSError as error:
        found.close()
        raise UnusableEndpoint(f"page address {text!r}: {error.strerror or error}") from error
    return found


def _bind_near(bound: socket.socket, host: str, port: int) -> None:
    try:
        bound.bind((host, port))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        bound.bind((host, 0))


def address_of(bound: socket.socket) -> str:
    """Return the address of a bound socket for browsers on this machine."""
    host, port = bound.getsockname()[:2]
    host = WILDCARDS.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def published(state: Path, bound: socket.socket) -> Iterator[PageAddress]:
    """Make a secret, and name the page in its file during the `with` block.

    Without a file, as in a directory that can't be written, no other process finds the page.
    Raises PageRunning if the state directory has a page.
    """
    page = PageAddress(address_of(bound), secrets.token_bytes(_SECRET_BYTES), os.getpid())
    path = state / PAGE_FILE
    try:
        descriptor = _locked(path)
    except OSError:
        yield page
        return
    if descriptor is None:
        raise PageRunning(find_page(state) or PageAddress("an unknown address", b""))
    try:
        content = json.encode(page)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)
        yield page
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """Open and lock the file of a page. None if the owner of another page holds it."""
    for _ in range(_LOCK_TRIES):
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(path, descriptor):
                return descriptor
        except BlockingIOError:
            if is_owned(descriptor):
                os.close(descriptor)
                return None
        os.close(descriptor)  # a reader had it, or its owner has just removed it
    return None


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def find_page(state: Path) -> PageAddress | None:
    """Return the running page of a state directory. None if there is none, or not for this user."""
    content = read_page_file(state)
    try:
        return None if content is None else json.decode(content, type=PageAddress)
    except MsgspecError:
        return None


def invitation(state: Path, role: Role) -> str:
    """Return the address of the running page with a token. Raises UserError."""
    found = find_page(state)
    if found is None:
        raise UserError(
            f"no page is running on {state} (start one with `taskyard web --state {state}`)"
        )
    return found.with_token(role)
