"""Private, durable files: mode 0600 from the first byte, with data and directory entry synced.

Also owns the checks of a state directory's owner and file types: a symbolic link in it could make a
broker write elsewhere. Independent of the files' contents.
"""

import errno
import logging
import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from taskyard.errors import UnusableState, UserError

_T = TypeVar("_T")

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600

#: Bytes written between two syncs. The disk does one sync after another, so a large sync delays
#: the small sync of a broker's turn.
SYNC_BYTES: Final = 4 * 1024 * 1024

#: A longer JSON file was written by something else.
JSON_BYTES_MAX: Final = 1024 * 1024

#: The last resort in a message about damage.
RESTORE_HINT = "restore the state directory from a backup, or use another --state"


#: A user id or `any`: accept a state directory that belongs to that user, or to any user.
OWNER_VARIABLE: Final = "TASKYARD_STATE_OWNER"
_ANY_OWNER: Final = "any"
_ROOT: Final = 0

logger = logging.getLogger("taskyard.journal")


def check_owner(directory: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a state directory of another user, and warn if other users may write it.

    Its owner could replace any file at any time. Root's is accepted: root can do that anyway.
    """
    found = directory.stat()
    accepted = environment.get(OWNER_VARIABLE, "")
    if found.st_uid not in (os.geteuid(), _ROOT) and accepted not in (
        str(found.st_uid),
        _ANY_OWNER,
    ):
        raise UnusableState(
            f"state directory {directory}: belongs to user {found.st_uid}, not to user "
            f"{os.geteuid()} (chown {os.geteuid()} {shlex.quote(str(directory))}, or set "
            f"{OWNER_VARIABLE}={found.st_uid} to trust that user)"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        logger.warning(
            "state directory %s: other users may write in it (mode %04o); chmod 700 %s",
            directory,
            stat.S_IMODE(found.st_mode),
            shlex.quote(str(directory)),
        )


def open_regular(path: Path, flags: int) -> int:
    """Open a file of a state directory. Raises `UserError` for a link, a pipe or a device."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, PRIVATE_FILE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and path.is_symlink():
            raise _not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def check_regular(*paths: Path) -> None:
    """Refuse links, pipes and devices among files that SQLite opens. Missing files are fine.

    Directories pass: reading them later fails as damage.
    """
    for path in paths:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise _not_regular(path)


def _not_regular(path: Path) -> UserError:
    kind = "a symbolic link" if path.is_symlink() else "not a regular file"
    return UnusableState(f"{path}: {kind}, which a state directory must not contain (remove it)")


def make_private_directory(directory: Path) -> None:
    """Create a directory and its parents, and sync their names."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        sync_directory(path.parent)


def link_directory(link: Path, directory: Path) -> None:
    """Let a name in a state directory lead to a directory elsewhere, which may be created."""
    make_private_directory(directory)
    if link.is_symlink() and link.readlink() == directory:
        return
    if link.is_symlink() or link.exists():
        raise UnusableState(f"{link}: not a link to {directory} (move it there, or remove it)")
    link.symlink_to(directory)
    sync_directory(link.parent)


def create_private(path: Path, content: bytes) -> None:
    """Write and sync a new file, replacing what an earlier attempt left behind."""
    with _creating(path) as file:
        file.write(content)


@contextmanager
def _creating(path: Path) -> Iterator[BinaryIO]:
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path, unfinished: str = "{}.new") -> Iterator[BinaryIO]:
    """Open a new file, which replaces that of a path at the end, and is durable then.

    `unfinished` is a pattern of its name until then.
    """
    new = path.with_name(unfinished.format(path.name))
    with _creating(new) as file:
        yield file
    new.rename(path)
    sync_directory(path.parent)


def replace_private(path: Path, content: bytes) -> None:
    """Replace a file atomically with synced content."""
    with replacing(path) as file:
        file.write(content)


def read_json(path: Path, kind: type[_T]) -> _T | None:
    """Return the content of a small file. None if it is missing, unreadable or something else."""
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            return msgspec.json.decode(file.read(JSON_BYTES_MAX), type=kind)
    except (OSError, UserError, msgspec.MsgspecError):
        return None


def sync_directory(directory: Path) -> None:
    """Sync a directory, which makes new names in it durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(directory: Path) -> int:
    """Return the free bytes of a directory's disk that an ordinary user may fill."""
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize
