"""Values: large arguments and results of calls, in files that are named by their content.

Owns the layout of a directory of values. A file appears under its name when all of it is on disk,
and its content never changes. So any number of processes may store and read values at once: the
broker, its clients and its workers. Every process that reads a value checks its content once.
Knows neither tasks nor messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import secrets
import time
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.errors import ValueDamaged, ValueMissing, ValueNotStored
from taskyard.journal.files import (
    PRIVATE_DIRECTORY,
    create_private,
    free_bytes,
    make_private_directory,
    open_regular,
    sync_directory,
)
from taskyard.journal.store import DISK_RESERVE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The directory in a state directory.
FOLDER: Final = "values"

#: The same for a broker without a journal. It is removed with the broker.
VOLATILE_FOLDER: Final = "values-in-memory"

#: The file that describes a directory of values.
STORE_FILE: Final = "store.json"

#: Unfinished files. A process that died leaves some behind.
UNFINISHED_FOLDER: Final = "unfinished"

#: Buffers of this size and above become values. Below it the journal is quicker than a file.
BYTES_MIN: Final = 1 << 20

#: A value is named by its SHA-256 and its length.
_NAME: Final = re.compile(r"[0-9a-f]{64}-[1-9][0-9]{0,15}", re.ASCII)
_FOLDER_NAME: Final = re.compile(r"[0-9a-f]{2}", re.ASCII)
_FOLDER_CHARACTERS: Final = 2

#: Bytes written between two syncs. A broker's own sync waits for the one that is under way.
_SYNC_BYTES: Final = 16 << 20

#: A sweep may hide a file for a moment, until it has seen that the file is in use.
_HIDDEN_SECONDS: Final = 0.05

#: Characters of a name in errors.
_SHOWN_CHARACTERS: Final = 12

_REMOVED_HINT: Final = "`taskyard clean` and values.keep remove values"


class StoreTerms(Struct, frozen=True):
    """How a directory of values is used. Its broker writes them."""

    #: Identifies the directory, which may be mounted by several machines.
    identity: str
    #: Buffers of this size and above become values.
    bytes_min: int = BYTES_MIN
    #: Values outlive the broker's process.
    durable: bool = True
    #: Why no value can be stored. Empty: they can.
    problem: str = ""
    #: Bytes that may be stored, as of the last count. None: no limit.
    bytes_left: int | None = None


def is_name(text: str) -> bool:
    """Return whether a text is the name of a value."""
    return _NAME.fullmatch(text) is not None


def name_of(content: bytes | bytearray | memoryview) -> str:
    """Return the name of a content."""
    return f"{hashlib.sha256(content).hexdigest()}-{memoryview(content).nbytes}"


def length_of(name: str) -> int:
    """Return the length of a value, which its name contains."""
    return int(name.rpartition("-")[2])


def short_name(name: str) -> str:
    """Return a name for errors and logs."""
    return f"{name[:_SHOWN_CHARACTERS]}… of {length_of(name):,} bytes"


class ValueFile(Struct, frozen=True):
    """A file as a walk finds it."""

    name: str
    path: Path
    bytes_total: int
    #: When it was stored, or found again by a process that would have stored it.
    used_ns: int


#: Files whose content this process has checked: device, inode, length and time of writing.
_checked: set[tuple[int, int, int, int]] = set()


class ValueFiles:
    """A directory of values."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, name: str) -> Path:
        """Return the path of a value. Raise ValueError if the name is none."""
        if not is_name(name):
            raise ValueError(f"not the name of a value: {name!r}")
        return self.directory / name[:_FOLDER_CHARACTERS] / name

    def unfinished_path(self, file_name: str) -> Path:
        """Return the path of an unfinished file. Create the directory."""
        folder = self.directory / UNFINISHED_FOLDER
        make_private_directory(folder)
        return folder / file_name

    # The terms.

    def create(self, terms: StoreTerms) -> None:
        """Create the directory, or write other terms."""
        make_private_directory(self.directory)
        file = self.directory / STORE_FILE
        unfinished = self.unfinished_path(f"{STORE_FILE}.{secrets.token_hex(8)}")
        create_private(unfinished, msgspec.json.encode(terms))
        unfinished.rename(file)

    def terms(self) -> StoreTerms | None:
        """Return the terms. None: the directory is not there, or is none of values."""
        try:
            content = (self.directory / STORE_FILE).read_bytes()
            return msgspec.json.decode(content, type=StoreTerms)
        except (OSError, msgspec.MsgspecError):
            return None

    # Storing.

    def has(self, name: str) -> bool:
        """Return whether a value is there, by its name and length."""
        try:
            return self.path(name).stat().st_size == length_of(name)
        except OSError:
            return False

    def touch(self, name: str) -> bool:
        """Note that a value is used, so that no sweep removes it for some time.

        Return whether it is there. The time of writing stays, which tells changed files.
        """
        path = self.path(name)
        try:
            found = path.stat()
            os.utime(path, ns=(time.time_ns(), found.st_mtime_ns))
        except OSError:
            return False
        return found.st_size == length_of(name)

    def put(self, content: bytes | bytearray | memoryview) -> str:
        """Store a value unless it is there, and return its name. Raise ValueNotStored."""
        name = name_of(content)
        if self.touch(name):
            return name
        terms = self.terms()
        self.check_room(length_of(name), terms)
        unfinished = self.unfinished_path(f"{name}.{secrets.token_hex(8)}")
        try:
            self._write(unfinished, memoryview(content).cast("B"), terms)
            self.finish(unfinished, name)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            text = f"value of {length_of(name):,} bytes: {error.strerror}"
            raise ValueNotStored(f"{text} (free some space, or see `taskyard clean`)") from error
        except BaseException:  # an interrupt
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return name

    def check_room(self, bytes_more: int, terms: StoreTerms | None) -> None:
        """Raise ValueNotStored if there is no room for so many bytes."""
        if terms is None:
            raise ValueNotStored(f"{self.directory}: no directory of values")
        if terms.problem:
            raise ValueNotStored(f"value of {bytes_more:,} bytes: {terms.problem}")
        if terms.bytes_left is not None and bytes_more > terms.bytes_left:
            text = f"value of {bytes_more:,} bytes: values.quota leaves {terms.bytes_left:,}"
            raise ValueNotStored(f"{text} (raise it, or remove some with `taskyard clean`)")
        if free_bytes(self.directory) - bytes_more < DISK_RESERVE_BYTES:
            text = f"value of {bytes_more:,} bytes: the disk of {self.directory} is nearly full"
            raise ValueNotStored(f"{text} (free some space, or see `taskyard clean`)")

    def finish(self, unfinished: Path, name: str) -> None:
        """Give a file that is on disk the name of its content. Raise OSError."""
        path = self.path(name)
        if not path.parent.is_dir():
            path.parent.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
            sync_directory(self.directory)
        unfinished.rename(path)
        sync_directory(path.parent)

    @staticmethod
    def _write(path: Path, content: memoryview, terms: StoreTerms | None) -> None:
        is_durable = terms is None or terms.durable
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for start in range(0, len(content), _SYNC_BYTES):
                piece = content[start : start + _SYNC_BYTES]
                while piece:
                    piece = piece[os.write(descriptor, piece) :]
                if is_durable:
                    os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    # Reading.

    def load(self, name: str) -> memoryview:
        """Map a value into memory, without a copy. Raise ValueMissing or ValueDamaged.

        Writing to the memory changes this process's pages alone, never the file.
        """
        descriptor = self._open_checked(name)
        try:
            return memoryview(mmap.mmap(descriptor, length_of(name), access=mmap.ACCESS_COPY))
        finally:
            os.close(descriptor)

    def read(self, name: str, offset: int, count: int) -> bytes | None:
        """Return a part of a value, unchecked. None: it is not there, or has another length."""
        try:
            descriptor = open_regular(self.path(name), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(descriptor).st_size != length_of(name):
                return None
            return os.pread(descriptor, count, offset)
        finally:
            os.close(descriptor)

    def _open_checked(self, name: str) -> int:
        """Open a file whose content is that of the name."""
        path = self.path(name)
        descriptor = self._open(path, name)
        try:
            self._check(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @staticmethod
    def _check(descriptor: int, path: Path) -> None:
        """Compare a file with its name, once. Remove one that is damaged."""
        found, name = os.fstat(descriptor), path.name
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if key in _checked:
            return
        if found.st_size == length_of(name) and name.startswith(digest_of(descriptor)):
            _checked.add(key)
            return
        with contextlib.suppress(OSError):  # it can be stored again then
            path.unlink()
        text = f"value {short_name(name)}: its file {path} is damaged"
        raise ValueDamaged(f"{text} (it was removed: submit the task again)")

    @staticmethod
    def _open(path: Path, name: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return open_regular(path, os.O_RDONLY)
        time.sleep(_HIDDEN_SECONDS)
        try:
            return open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            text = f"value {short_name(name)}: not in {path.parent.parent}"
            raise ValueMissing(f"{text} ({_REMOVED_HINT})") from None

    # Removing.

    def walk(self) -> Iterator[ValueFile]:
        """Yield all values. Those that disappear meanwhile are skipped."""
        for folder in _entries(self.directory):
            if _FOLDER_NAME.fullmatch(folder.name):
                for path in _entries(folder):
                    with contextlib.suppress(OSError):
                        if is_name(path.name):
                            yield _value_file(path)

    def unfinished(self) -> Iterator[ValueFile]:
        """Yield unfinished files. The name is that of the file."""
        for path in _entries(self.directory / UNFINISHED_FOLDER):
            with contextlib.suppress(OSError):
                yield _value_file(path)

    def remove(self, name: str, unused_since_ns: int) -> bool:
        """Remove a value unless it was used since then. Return whether it was removed.

        The file is hidden first. A process that would have stored it stores it again then, and one
        that touched it before is seen here.
        """
        path, hidden = self.path(name), self.unfinished_path(f"{name}.removed")
        try:
            path.rename(hidden)
            if _value_file(hidden).used_ns > unused_since_ns:
                hidden.rename(path)
                return False
            hidden.unlink()
        except FileNotFoundError:
            return False
        return True


def digest_of(descriptor: int) -> str:
    """Return the SHA-256 of a file. Leaves the mapped memory of this process as it is."""
    with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _value_file(path: Path) -> ValueFile:
    found = path.stat()
    return ValueFile(path.name, path, found.st_size, max(found.st_atime_ns, found.st_mtime_ns))


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
