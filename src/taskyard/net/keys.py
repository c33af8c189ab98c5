"""Key files: the key of a peer, its invitation, the broker's entry of it, and the broker's key.

A key file must belong to the user, mode 0600: a file that other users can read is no
secret, and a file that they can write is no proof. No secret appears in a message, a log or a
`repr`. Which keys are valid is decided by `keyring.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
import sys
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import zmq
from msgspec import Struct
from zmq.utils import z85

from taskyard.errors import UnusableKey, UserError
from taskyard.journal.files import PRIVATE_FILE, sync_directory
from taskyard.net import endpoints
from taskyard.settings.files import parse_toml
from taskyard.settings.keys import INVITATION_PREFIX
from taskyard.wire.roles import Role, check_roles

#: Key names become prefixes of worker names, before a `/`, and appear in tables and messages.
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
NAME_RULE: Final = "1 to 64 letters, digits, dots, dashes and underscores, no sign at an end"

#: 32 bytes as ZeroMQ writes them (its RFC 32): no quote and no backslash among them.
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_KEY_BYTES: Final = 32

#: A key file has a few hundred bytes. A longer file is something else.
FILE_BYTES_MAX: Final = 16_384

#: Characters of the hash: enough to distinguish keys, and to compare by telephone.
_FINGERPRINT_CHARACTERS: Final = 16

_GROUP_AND_OTHERS: Final = 0o077

_T = TypeVar("_T", bound=Struct)


class Secret:
    """A secret key that its `repr` does not show."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        if not _Z85.fullmatch(text):
            raise ValueError
        self._text = text

    def reveal(self) -> bytes:
        """Return the secret. Only for a socket or a file."""
        return self._text.encode("ascii")

    def public(self) -> str:
        """Return the public key of this secret."""
        return zmq.curve_public(self.reveal()).decode("ascii")

    def __repr__(self) -> str:
        return "Secret(…)"


class PeerKey(Struct, frozen=True):
    """The key of a peer: its name, roles and secret, and the broker's public key."""

    name: str
    roles: tuple[Role, ...]
    secret: Secret
    #: The broker's public key.
    broker: str

    def invite(self, dialect: str, addresses: tuple[str, ...]) -> Invitation:
        """Return an invitation to use this key at the endpoints of a dialect."""
        return Invitation(self.name, self.roles, self.secret, self.broker, dialect, addresses)


class KeyEntry(Struct, frozen=True):
    """A key as the broker stores it."""

    name: str
    roles: tuple[Role, ...]
    public: str
    made_ns: int
    #: 0: valid.
    revoked_ns: int = 0

    @property
    def fingerprint(self) -> str:
        """Return a short hash of the public key. It is also the name of the entry's file."""
        digest = hashlib.sha256(self.public.encode("ascii")).hexdigest()
        return digest[:_FINGERPRINT_CHARACTERS]


def make_secret() -> Secret:
    """Create a secret key from the system's random source."""
    return Secret(zmq.curve_keypair()[1].decode("ascii"))


def public_text(raw: bytes) -> str:
    """Encode a public key from ZAP as key files do. Raise ValueError."""
    if len(raw) != _KEY_BYTES:
        raise ValueError("public key: must have 32 bytes")
    return z85.encode(raw).decode("ascii")


def check_name(name: str) -> str:
    """Return the name of a key if it is valid. Raise UserError."""
    if not NAME.fullmatch(name):
        raise UserError(f"key name {name!r}: must have {NAME_RULE}")
    return name


# File contents.


def format_peer_key(key: PeerKey) -> str:
    return (
        f"# A Taskyard key. The holder acts as {key.name} ({', '.join(key.roles)}) at the broker.\n"
        "# Keep it private, mode 0600. Use it with --key FILE, or TASKYARD_KEY=FILE.\n"
        f'name = "{key.name}"\n'
        f"roles = {_role_list(key.roles)}\n"
        f'secret = "{key.secret.reveal().decode("ascii")}"\n'
        f'broker = "{key.broker}"\n'
    )


def format_key_entry(entry: KeyEntry) -> str:
    return (
        "# A key that this broker accepts. Change it with `taskyard keys`, not by hand.\n"
        f'name = "{entry.name}"\n'
        f"roles = {_role_list(entry.roles)}\n"
        f'public = "{entry.public}"\n'
        f"made_ns = {entry.made_ns}\n"
        f"revoked_ns = {entry.revoked_ns}\n"
    )


def format_broker_key(secret: Secret) -> str:
    return (
        "# The key of this broker. A holder can impersonate the broker: keep it private.\n"
        f'secret = "{secret.reveal().decode("ascii")}"\n'
    )


def _role_list(roles: tuple[Role, ...]) -> str:
    quoted = [f'"{role}"' for role in roles]
    return f"[{', '.join(quoted)}]"


class _BrokerKeyFile(Struct, frozen=True):
    secret: Secret


def read_peer_key(path: Path) -> PeerKey:
    """Read a peer's key file. Raise UserError."""
    try:
        key = _read(path, PeerKey)
    except FileNotFoundError:
        raise UnusableKey(
            f"{path}: key file not found (create one on the broker's machine with "
            "`taskyard keys new`)"
        ) from None
    if not is_valid(key):
        raise _no_key(path)
    return key


def is_valid(key: PeerKey) -> bool:
    """Return whether the parts of a key have the right form."""
    is_named = NAME.fullmatch(key.name) and _Z85.fullmatch(key.broker)
    return bool(is_named) and _has_valid_roles(key.roles)


def _has_valid_roles(roles: tuple[Role, ...]) -> bool:
    try:
        return check_roles(roles) == roles
    except ValueError:
        return False


def read_entry(path: Path) -> KeyEntry:
    """Read a broker's entry of a key. Raise UserError, or FileNotFoundError if it is gone."""
    entry = _read(path, KeyEntry)
    is_named = NAME.fullmatch(entry.name) and _Z85.fullmatch(entry.public)
    if not is_named or not _has_valid_roles(entry.roles):
        raise _no_key(path)
    return entry


def read_broker(path: Path) -> Secret:
    """Read the broker's secret. Raise UserError, or FileNotFoundError if there is none."""
    return _read(path, _BrokerKeyFile).secret


def _read(path: Path, kind: type[_T]) -> _T:
    content = read_private(path)
    try:
        text = content.decode()
        is_invitation = kind is PeerKey and INVITATION_PREFIX in text
        fields = _invitation_fields(text) if is_invitation else parse_toml(text)
        return msgspec.convert(fields, kind, dec_hook=decode_secret)
    except ValueError:
        # Without the cause, which could reveal the file's content.
        raise _no_key(path) from None


def decode_secret(kind: type, value: object) -> Any:  # noqa: ANN401  # msgspec's signature
    """Decode a secret, for msgspec. Raise ValueError."""
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    raise ValueError


def _no_key(path: Path) -> UserError:
    return UnusableKey(
        f"{path}: not a valid key file (restore it from a copy, or create a key with "
        "`taskyard keys new`)"
    )


# Private files.


def read_private(path: Path) -> bytes:
    """Read a file that only this user can access. Raise UserError or FileNotFoundError."""
    try:
        # Does not block if it is a pipe. The checks below apply to the opened file.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableKey(f"{path}: can't read key file: {error.strerror}") from error
    try:  # a directory can be opened, but not as a file object
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES_MAX:
            raise _no_key(path)
        check_private(path, found, PRIVATE_FILE)
        return os.read(descriptor, FILE_BYTES_MAX)
    finally:
        os.close(descriptor)


def check_private(path: Path, found: os.stat_result, mode: int) -> None:
    """Raise UserError if other users can access a file or directory of keys."""
    quoted = shlex.quote(str(path))
    if found.st_uid != os.geteuid():
        raise UnusableKey(
            f"{path}: belongs to user {found.st_uid}, not to you (use a copy of your own, or "
            f"chown {os.geteuid()} {quoted})"
        )
    if found.st_mode & _GROUP_AND_OTHERS:
        raise UnusableKey(
            f"{path}: accessible to other users, mode {stat.S_IMODE(found.st_mode):04o} (chmod "
            f"{mode:o} {quoted}, and create new keys unless you trust them all)"
        )


def create_key_file(path: Path, text: str) -> None:
    """Create a key file. Raise UserError if it exists."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, PRIVATE_FILE)
    except FileExistsError:
        raise UnusableKey(f"{path}: exists already (give another --out)") from None
    except OSError as error:
        raise UnusableKey(f"{path}: can't write: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, PRIVATE_FILE)  # whatever the umask is
        file.write(text.encode())
        file.flush()
        os.fsync(descriptor)
    sync_directory(path.parent)


# Invitations: the key of a peer and where to use it, as one line of JSON in Base64. A file of it
# can replace a key file.

#: Endpoints in one invitation.
ENDPOINTS_MAX: Final = 16

#: Stands for stdin.
STDIN: Final = "-"


class Invitation(Struct, frozen=True):
    """A key, and where to use it."""

    name: str
    roles: tuple[Role, ...]
    secret: Secret
    #: The broker's public key.
    broker: str
    #: The dialect of the endpoints.
    dialect: str
    endpoints: tuple[str, ...]

    @property
    def key(self) -> PeerKey:
        return PeerKey(self.name, self.roles, self.secret, self.broker)


def format_invitation(invitation: Invitation) -> str:
    """Return the line of an invitation. It contains the secret."""
    body = msgspec.json.encode(invitation, enc_hook=_reveal)
    return INVITATION_PREFIX + urlsafe_b64encode(body).decode("ascii")


def format_invitation_file(invitation: Invitation) -> str:
    """Return the content of an invitation file."""
    return (
        f"# An invitation to a Taskyard broker as {invitation.name} "
        f"({', '.join(invitation.roles)}).\n"
        "# Keep it private, mode 0600. Use it with `taskyard join FILE`, --invite FILE of\n"
        "# other commands, or TASKYARD_INVITE=FILE.\n"
        f"{format_invitation(invitation)}\n"
    )


def _reveal(value: object) -> str:
    if isinstance(value, Secret):
        return value.reveal().decode("ascii")
    raise NotImplementedError


def read_invitation(source: str) -> Invitation:
    """Read an invitation from a file, or a line of stdin if `source` is `-`. Raise UserError."""
    if source.startswith(INVITATION_PREFIX):
        raise UnusableKey(
            "--invite: other users can see the options of a process (give a file, or set "
            "TASKYARD_INVITE to the line)"
        )
    shown = "stdin" if source == STDIN else source
    try:
        content = _line_of_stdin() if source == STDIN else read_private(Path(source))
    except FileNotFoundError:
        raise UnusableKey(
            f"{source}: invitation not found (create one on the broker's machine with "
            "`taskyard keys invite`)"
        ) from None
    return _parse_from(shown, content)


def read_invitation_line(origin: str, line: str) -> Invitation:
    """Read an invitation from its line. `origin` is named in errors. Raise UserError."""
    return _parse_from(origin, line.encode(errors="replace"))


def _parse_from(origin: str, content: bytes) -> Invitation:
    try:
        return _parse(content.decode())
    except ValueError:
        # Without the cause, which could reveal the content.
        raise UnusableKey(
            f"{origin}: not a valid invitation (create one with `taskyard keys invite`)"
        ) from None
    except UserError as error:
        raise UnusableKey(f"{origin}: {error}") from error


def _parse(text: str) -> Invitation:
    """Parse an invitation. Raise ValueError, or UserError for an invalid endpoint."""
    fields = _invitation_fields(text)
    found = msgspec.convert(fields, Invitation, dec_hook=decode_secret)
    if not is_valid(found.key) or not 0 < len(found.endpoints) <= ENDPOINTS_MAX:
        raise ValueError
    for one in found.endpoints:
        endpoints.peer_endpoint(one)
    return found


def _line_of_stdin() -> bytes:
    """Read up to the first line that is no comment, so that a supervisor can keep stdin open."""
    left = FILE_BYTES_MAX
    while left > 0 and (line := sys.stdin.buffer.readline(left)):
        if not line.startswith(b"#"):
            return line
        left -= len(line)
    return b""


def _invitation_fields(text: str) -> dict[str, Any]:
    """Return the fields in the line of an invitation. Comments are skipped. Raise ValueError."""
    lines = [line.strip() for line in text.splitlines()]
    (line,) = [one for one in lines if one and not one.startswith("#")]
    if not line.startswith(INVITATION_PREFIX):
        raise ValueError
    body = urlsafe_b64decode(line.removeprefix(INVITATION_PREFIX))
    return msgspec.json.decode(body, type=dict[str, Any])
