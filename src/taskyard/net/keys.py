"""Keys as they lie in files: what a guest holds, what a broker keeps of it, and the broker's own.

A key file is ours alone, mode 0600, or it is refused: what others can read is no secret, and what
others can write is no proof. Nothing here puts a secret into a message, a log or a representation.
Knows files and texts; which keys are good is `keyring.py`'s business.
"""

import hashlib
import os
import re
import shlex
import stat
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import zmq
from msgspec import Struct
from zmq.utils import z85

from taskyard.errors import UserError
from taskyard.journal.files import PRIVATE_FILE, sync_directory
from taskyard.settings import toml
from taskyard.wire.roles import Role

#: Names become parts of workers' names, before a `/`, and stand in tables and messages.
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
NAME_RULE: Final = "1 to 64 letters, digits, dots, dashes and underscores, no sign at an end"

#: 32 bytes as ZeroMQ writes them (its RFC 32): no quote and no backslash among them.
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_KEY_BYTES: Final = 32

#: A key file has a few hundred bytes; whatever is longer is something else.
FILE_BYTES_MAX: Final = 16_384

#: Of a hash: enough to tell keys apart, and to compare over the telephone.
_FINGERPRINT_CHARACTERS: Final = 16

_GROUP_AND_OTHERS: Final = 0o077

_T = TypeVar("_T", bound=Struct)


class Secret:
    """A secret key, which does not show itself."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        if not _Z85.fullmatch(text):
            raise ValueError
        self._text = text

    def reveal(self) -> bytes:
        """For a socket or a file, and nothing else."""
        return self._text.encode("ascii")

    def public(self) -> str:
        """The other half."""
        return zmq.curve_public(self.reveal()).decode("ascii")

    def __repr__(self) -> str:
        return "Secret(…)"


class PeerKey(Struct, frozen=True):
    """What a guest holds: who it is, and how it knows the broker."""

    name: str
    role: Role
    secret: Secret
    #: The broker's public key.
    broker: str


class KeyEntry(Struct, frozen=True):
    """What a broker keeps of a guest."""

    name: str
    role: Role
    public: str
    made_ns: int
    #: 0: it is good.
    revoked_ns: int = 0

    @property
    def fingerprint(self) -> str:
        """Short enough to compare; also the name of its file."""
        digest = hashlib.sha256(self.public.encode("ascii")).hexdigest()
        return digest[:_FINGERPRINT_CHARACTERS]


def make_secret() -> Secret:
    """A new one, of the system's best randomness."""
    return Secret(zmq.curve_keypair()[1].decode("ascii"))


def public_text(raw: bytes) -> str:
    """A public key of ZAP, as files have it. Raises ValueError."""
    if len(raw) != _KEY_BYTES:
        raise ValueError("a public key has 32 bytes")
    return z85.encode(raw).decode("ascii")


def check_name(name: str) -> str:
    """The name of a key, if it can be one."""
    if not NAME.fullmatch(name):
        raise UserError(f"a key can't be named {name!r}: a name has {NAME_RULE}; give another")
    return name


# What is in the files.


def format_peer_key(key: PeerKey) -> str:
    return (
        f"# A key of Taskyard: to its broker, whoever has this file is {key.name} ({key.role}).\n"
        "# Keep it private, mode 0600. Use it with --key FILE, or TASKYARD_KEY=FILE.\n"
        f'name = "{key.name}"\n'
        f'role = "{key.role}"\n'
        f'secret = "{key.secret.reveal().decode("ascii")}"\n'
        f'broker = "{key.broker}"\n'
    )


def format_key_entry(entry: KeyEntry) -> str:
    return (
        "# What a broker knows of a guest. Change it with `taskyard keys`, not by hand.\n"
        f'name = "{entry.name}"\n'
        f'role = "{entry.role}"\n'
        f'public = "{entry.public}"\n'
        f"made_ns = {entry.made_ns}\n"
        f"revoked_ns = {entry.revoked_ns}\n"
    )


def format_broker_key(secret: Secret) -> str:
    return (
        "# The key of this broker. Whoever has it can pass for the broker: keep it private.\n"
        f'secret = "{secret.reveal().decode("ascii")}"\n'
    )


class _BrokerKeyFile(Struct, frozen=True):
    secret: Secret


def read_peer_key(path: Path) -> PeerKey:
    """The key that a guest was handed. Raises UserError."""
    try:
        key = _read(path, PeerKey)
    except FileNotFoundError:
        raise UserError(
            f"there is no key file {path}; give the one that you were handed, or make one where "
            "the broker is with `taskyard keys new`"
        ) from None
    if not NAME.fullmatch(key.name) or not _Z85.fullmatch(key.broker):
        raise _no_key(path)
    return key


def read_entry(path: Path) -> KeyEntry:
    """Raises UserError; FileNotFoundError where it is gone."""
    entry = _read(path, KeyEntry)
    if not NAME.fullmatch(entry.name) or not _Z85.fullmatch(entry.public):
        raise _no_key(path)
    return entry


def read_broker(path: Path) -> Secret:
    """Raises UserError; FileNotFoundError where there is none."""
    return _read(path, _BrokerKeyFile).secret


def _read(path: Path, kind: type[_T]) -> _T:
    content = read_private(path)
    try:
        return msgspec.convert(toml.loads(content.decode()), kind, dec_hook=_hidden)
    except ValueError:
        # Without the cause: it could tell what was in the file.
        raise _no_key(path) from None


def _hidden(kind: type, value: object) -> Any:  # noqa: ANN401  # msgspec's signature
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    raise ValueError


def _no_key(path: Path) -> UserError:
    return UserError(
        f"{path} is not the key file that it should be, or is damaged; put it back from a copy, or "
        "make a key with `taskyard keys new`"
    )


# Private files.


def read_private(path: Path) -> bytes:
    """The content of a file that is this user's alone. Raises UserError; FileNotFoundError."""
    try:
        # Never waits, should it be a pipe. What is looked at is what was opened.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(
            f"the key file {path} can't be read: {error.strerror}; see that it is yours"
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES_MAX:
            raise _no_key(path)
        check_private(path, found, PRIVATE_FILE)
        return file.read(FILE_BYTES_MAX)


def check_private(path: Path, found: os.stat_result, mode: int) -> None:
    """Raises UserError if others may do anything with a file or directory of keys."""
    quoted = shlex.quote(str(path))
    if found.st_uid != os.geteuid():
        raise UserError(
            f"{path} belongs to user {found.st_uid}, not to you, so others could have changed it; "
            f"use a copy of your own, or chown {os.geteuid()} {quoted}"
        )
    if found.st_mode & _GROUP_AND_OTHERS:
        raise UserError(
            f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}), so they may know "
            f"or have changed what is in it; chmod {mode:o} {quoted}, and make new keys if you "
            "don't trust all users of this machine"
        )


def create_key_file(path: Path, text: str) -> None:
    """Write a new file; never over one that is there."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, PRIVATE_FILE)
    except FileExistsError:
        raise UserError(
            f"{path} is there already, and a key is never written over; give another --out"
        ) from None
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror}; give another --out") from error
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, PRIVATE_FILE)  # whatever the umask took away from it
        file.write(text.encode())
        file.flush()
        os.fsync(descriptor)
    sync_directory(path.parent)
