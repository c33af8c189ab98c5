"""Blobs in a directory: of a state, or a directory that several machines mount.

Owns the layout of the directory. A blob appears under its name when all of it is on disk, and never
changes. So any number of processes may store and read blobs at once: the broker, and its clients
and workers of the same user. Every process that maps a blob checks its content once. Streams belong
to the broker alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import re
import secrets
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec
from msgspec import Struct

from taskyard.errors import BytesDamaged, BytesMissing, BytesNotStored
from taskyard.journal.blobs import (
    BlobFile,
    BlobId,
    BlobStore,
    StreamKey,
    is_name,
    length_of,
    name_of,
    short_name,
)
from taskyard.journal.files import (
    PRIVATE_DIRECTORY,
    create_private,
    free_bytes,
    make_private_directory,
    open_regular,
    read_json,
    sync_directory,
)
from taskyard.journal.store import DISK_RESERVE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The same for a broker without a journal. It is removed with the broker.
VOLATILE_FOLDER: Final = "blobs-in-memory"

#: The file that describes a directory of blobs.
TERMS_FILE: Final = "store.json"

#: Streams that arrive: a file for each, whose encoded id is its path, in parts of this length.
STREAMS_FOLDER: Final = "streams"
_PART_CHARACTERS: Final = 200

#: Ends the last part.
_STREAM_SUFFIX: Final = ".stream"

#: Unfinished files of local processes. A process that died leaves some behind.
UNFINISHED_FOLDER: Final = "unfinished"

#: Streams kept open. Opening a stream costs as much as writing a chunk.
OPEN_STREAMS_MAX: Final = 64

#: Bytes written between two syncs. A broker's own sync waits for the sync that is under way, and a
#: stream has little left to sync when it is sealed.
SYNC_BYTES: Final = 16 << 20

_FOLDER_NAME: Final = re.compile(r"[0-9a-f]{2}", re.ASCII)
_FOLDER_CHARACTERS: Final = 2

#: A sweep may hide a file for a moment, until it has seen that the file is in use.
_HIDDEN_SECONDS: Final = 0.05
_HIDDEN_SUFFIX: Final = ".removed"

REMOVED_HINT: Final = "`taskyard clean` and blobs.keep remove them"


class StoreTerms(Struct, frozen=True):
    """How a directory of blobs is used. The broker writes this."""

    #: Identifies the directory, which may be mounted by several machines.
    identity: str
    #: Blobs outlive the broker's process.
    durable: bool = True
    #: Why nothing can be stored. Empty: it can.
    problem: str = ""
    #: Bytes that may be stored, as of the last count. None: no limit.
    bytes_left: int | None = None


class _OpenStream:
    """An open stream."""

    def __init__(self, path: Path) -> None:
        self.descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        self.bytes_total = os.fstat(self.descriptor).st_size
        self.bytes_unsynced = 0

    def close(self) -> None:
        os.close(self.descriptor)


#: Files whose content this process has checked: device, inode, length and time of writing.
_checked: set[tuple[int, int, int, int]] = set()


class BlobFiles(BlobStore):
    """The blobs in a directory, which is created with the first bytes."""

    def __init__(self, directory: Path, *, durable: bool = True) -> None:
        super().__init__()
        self.directory = directory
        self._durable = durable
        self._open: OrderedDict[StreamKey, _OpenStream] = OrderedDict()
        #: Folders that this process has synced. A killed process may have left names in other
        #: folders.
        self._synced: set[str] = set()
        #: This process has created it. If it is gone, it is not mounted, and not created again.
        self._is_created = False

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def path(self, blob: BlobId) -> Path:
        """Return the path of a blob or stream. Raise ValueError for what is no name."""
        if isinstance(blob, StreamKey):
            text = quote_from_bytes(blob.encode(), safe="")
            starts = range(0, len(text), _PART_CHARACTERS)
            *folders, name = (text[start : start + _PART_CHARACTERS] for start in starts)
            return self.directory.joinpath(STREAMS_FOLDER, *folders, name + _STREAM_SUFFIX)
        if not is_name(blob):
            raise ValueError(f"not the name of a blob: {blob!r}")
        return self.directory / blob[:_FOLDER_CHARACTERS] / blob

    # The terms.

    def create(self, terms: StoreTerms) -> None:
        """Create the directory, or write other terms. Raise OSError."""
        self._check_mounted()
        make_private_directory(self.directory)
        unfinished = self._unfinished_path(f"{TERMS_FILE}.{secrets.token_hex(8)}")
        create_private(unfinished, msgspec.json.encode(terms))
        unfinished.rename(self.directory / TERMS_FILE)
        self._is_created = True

    def _check_mounted(self) -> None:
        """Raise OSError if the directory was there and is not any more.

        Files below the mount point of a directory that is not mounted would be lost.
        """
        if self._is_created and not (self.directory / TERMS_FILE).exists():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.directory))

    def terms(self) -> StoreTerms | None:
        """Return the terms. None: the directory is not there, or is none of blobs."""
        return read_json(self.directory / TERMS_FILE, StoreTerms)

    # Streams, of the broker.

    def seal(self, key: StreamKey, name: str) -> bool:
        if self.path(key).exists():
            return super().seal(key, name)
        self._check_mounted()
        return False

    def _extend(self, key: StreamKey, length: int, new: bytes) -> None:
        stream, left = self._stream(key), memoryview(new)
        while left:
            count = os.pwrite(stream.descriptor, left, length)
            stream.bytes_unsynced += count
            stream.bytes_total = length = length + count
            left = left[count:]
        if stream.bytes_unsynced >= SYNC_BYTES:
            self._sync(key, stream)

    def _cut(self, key: StreamKey, length: int) -> None:
        stream = self._stream(key)
        os.ftruncate(stream.descriptor, length)
        self.bytes_used -= stream.bytes_total - length
        stream.bytes_total = length

    def _seal(self, key: StreamKey, name: str) -> None:
        self._sync(key, self._stream(key))
        if self.touch(name):
            self.drop(key)
            return
        source = self.path(key)
        self.publish(source, name)
        self._forget(key)
        self._remove_empty(source.parent)

    def _sync(self, key: StreamKey, stream: _OpenStream) -> None:
        """Sync a stream, or drop it: after a failure the next sync would miss its bytes."""
        if self._durable:
            try:
                os.fsync(stream.descriptor)
            except OSError:
                self.drop(key)
                raise
        stream.bytes_unsynced = 0

    def length(self, key: StreamKey) -> int:
        stream = self._open.get(key)
        if stream is not None:
            return stream.bytes_total
        try:
            return self.path(key).stat().st_size
        except FileNotFoundError:
            return 0

    def drop(self, key: StreamKey) -> None:
        self._forget(key)
        path = self.path(key)
        with contextlib.suppress(OSError):  # a file that is left is harmless
            self.bytes_used -= path.stat().st_size
            path.unlink()
            self._remove_empty(path.parent)

    def _remove_empty(self, directory: Path) -> None:
        """Remove the directories of a long id that has ended."""
        with contextlib.suppress(OSError):  # there are other streams
            while directory.name != STREAMS_FOLDER:
                directory.rmdir()
                directory = directory.parent

    def _stream(self, key: StreamKey) -> _OpenStream:
        """Return an open stream, created with its directories if it is missing."""
        stream = self._open.get(key)
        if stream is not None:
            self._open.move_to_end(key)
            return stream
        path = self.path(key)
        if not path.parent.is_dir():
            self._check_mounted()
            make_private_directory(path.parent)
        stream = self._open[key] = _OpenStream(path)
        if len(self._open) > OPEN_STREAMS_MAX:
            self._open.popitem(last=False)[1].close()
        return stream

    def _forget(self, key: StreamKey) -> None:
        self._hashes.forget(key)
        stream = self._open.pop(key, None)
        if stream is not None:
            stream.close()

    # Storing and mapping, of any process.

    def put(self, content: bytes | bytearray | memoryview, *, has_quota: bool = True) -> str:
        """Store a content unless it is there, and return its name. Raise BytesNotStored."""
        name = name_of(content)
        if self.touch(name):
            return name
        terms = self.terms()
        self.check_room(length_of(name), terms, has_quota=has_quota)
        with self.unfinished(name) as (path, descriptor):
            for start in range(0, length_of(name), SYNC_BYTES):
                piece = memoryview(content).cast("B")[start : start + SYNC_BYTES]
                while piece:
                    piece = piece[os.write(descriptor, piece) :]
                if terms is None or terms.durable:
                    os.fdatasync(descriptor)
            self.publish(path, name)
        return name

    @contextlib.contextmanager
    def unfinished(self, name: str) -> Iterator[tuple[Path, int]]:
        """Open a new file, whose content will be that of a name. Raise BytesNotStored.

        The file is removed at the end unless it was published.
        """
        path = self._unfinished_path(f"{name}.{secrets.token_hex(8)}")
        try:
            descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                yield path, descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            text = f"{length_of(name):,} bytes in {self.directory}: {error.strerror}"
            raise BytesNotStored(f"{text} (free some space, or see `taskyard clean`)") from error
        finally:
            path.unlink(missing_ok=True)

    def disk_free_bytes(self) -> int | None:
        """Return the free bytes of its disk. None: it is not mounted."""
        try:
            self._check_mounted()
            return free_bytes(self.directory)
        except OSError:
            return None

    def check_room(
        self, bytes_more: int, terms: StoreTerms | None, *, has_quota: bool = True
    ) -> None:
        """Raise BytesNotStored if there is no room for so many bytes.

        The quota stops no results of running tasks.
        """
        about = f"{bytes_more:,} bytes"
        if terms is None:
            raise BytesNotStored(f"{self.directory}: no directory of blobs")
        if has_quota and terms.problem:
            raise BytesNotStored(f"{about}: {terms.problem}")
        if has_quota and terms.bytes_left is not None and bytes_more > terms.bytes_left:
            text = f"{about}: blobs.quota leaves {terms.bytes_left:,}"
            raise BytesNotStored(f"{text} (raise it, or remove some with `taskyard clean`)")
        if free_bytes(self.directory) - bytes_more < DISK_RESERVE_BYTES:
            text = f"{about}: the disk of {self.directory} is nearly full"
            raise BytesNotStored(f"{text} (free some space, or see `taskyard clean`)")

    def load(self, name: str) -> memoryview:
        """Map a blob into memory, without a copy. Raise BytesMissing or BytesDamaged.

        Writing to the memory changes this process's pages alone, never the file.
        """
        path = self.path(name)
        descriptor = self._open_blob(path)
        try:
            _check(descriptor, path)
            return memoryview(mmap.mmap(descriptor, length_of(name), access=mmap.ACCESS_COPY))
        finally:
            os.close(descriptor)

    @staticmethod
    def _open_blob(path: Path) -> int:
        with contextlib.suppress(FileNotFoundError):
            return open_regular(path, os.O_RDONLY)
        time.sleep(_HIDDEN_SECONDS)
        try:
            return open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            text = f"{short_name(path.name)}: not in {path.parent.parent}"
            raise BytesMissing(f"{text} ({REMOVED_HINT})") from None

    def read(self, blob: BlobId, offset: int, count: int) -> tuple[bytes, int] | None:
        try:
            descriptor = open_regular(self.path(blob), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            if isinstance(blob, str) and size != length_of(blob):
                raise OSError(errno.EIO, f"{size:,} bytes are left", str(self.path(blob)))
            return os.pread(descriptor, count, offset), size
        finally:
            os.close(descriptor)

    def touch(self, name: str) -> bool:
        """Note that a blob is used. The time of writing stays, which tells changed files."""
        path = self.path(name)
        try:
            found = path.stat()
            os.utime(path, ns=(time.time_ns(), found.st_mtime_ns))
            if self._durable and path.parent.name not in self._synced:
                self._sync_folder(path.parent)
        except OSError:
            return False
        return found.st_size == length_of(name)

    def publish(self, source: Path, name: str) -> None:
        """Give a complete file the name of its content. Raise OSError."""
        path = self.path(name)
        if not path.parent.is_dir():
            path.parent.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
            if self._durable:
                sync_directory(self.directory)
        os.utime(source)
        source.rename(path)
        if self._durable:
            self._sync_folder(path.parent)

    def _sync_folder(self, folder: Path) -> None:
        sync_directory(folder)
        self._synced.add(folder.name)

    def _unfinished_path(self, name: str) -> Path:
        folder = self.directory / UNFINISHED_FOLDER
        make_private_directory(folder)
        return folder / name

    # Removing.

    def walk(self) -> Iterator[BlobFile]:
        for folder in _entries(self.directory):
            if _FOLDER_NAME.fullmatch(folder.name):
                for path in _entries(folder):
                    if is_name(path.name):
                        yield from _found(path.name, path)
        streams = self.directory / STREAMS_FOLDER
        for parent, _, names in os.walk(streams):
            for path in (Path(parent, name) for name in sorted(names)):
                text = "".join(path.relative_to(streams).parts).removesuffix(_STREAM_SUFFIX)
                with contextlib.suppress(ValueError):  # not a stream
                    yield from _found(StreamKey.decode(unquote_to_bytes(text)), path)

    def remove(self, blob: BlobId, unused_since_ns: int) -> bool:
        """Remove a blob or stream unless it was used since then.

        A blob is hidden first. A process that would have stored it stores it again then, and one
        that touched it before is seen here.
        """
        if isinstance(blob, StreamKey):
            self.drop(blob)
            return True
        path, hidden = self.path(blob), self._unfinished_path(f"{blob}{_HIDDEN_SUFFIX}")
        try:
            path.rename(hidden)
            found = hidden.stat()
            if _used_ns(found) > unused_since_ns:
                hidden.rename(path)
                return False
            hidden.unlink()
        except FileNotFoundError:
            return False
        self.bytes_used -= found.st_size
        return True

    def show_hidden(self) -> None:
        """Give blobs their names again that a killed process has hidden: a task may name them.

        A process that is about to remove a blob finds it gone, and leaves it to the next sweep.
        """
        for hidden in _entries(self.directory / UNFINISHED_FOLDER):
            if hidden.suffix == _HIDDEN_SUFFIX and is_name(hidden.stem):
                path = self.path(hidden.stem)
                with contextlib.suppress(FileNotFoundError):
                    if path.exists():  # it was stored again
                        hidden.unlink()
                    else:
                        hidden.rename(path)

    def remove_unfinished(self, unused_since_ns: int) -> int:
        """Remove what processes left behind that died. Return the bytes that stay."""
        bytes_left = 0
        self.show_hidden()
        for path in _entries(self.directory / UNFINISHED_FOLDER):
            with contextlib.suppress(OSError):
                found = path.stat()
                if _used_ns(found) > unused_since_ns:
                    bytes_left += found.st_size
                else:
                    path.unlink()
        return bytes_left


def _check(descriptor: int, path: Path) -> None:
    """Compare a file with its name, once. Remove a damaged file."""
    found, name = os.fstat(descriptor), path.name
    key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    if key in _checked:
        return
    with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if found.st_size == length_of(name) and name.startswith(digest):
        _checked.add(key)
        return
    with contextlib.suppress(OSError):  # it can be stored again then
        path.unlink()
    text = f"{short_name(name)}: its file {path} is damaged"
    raise BytesDamaged(f"{text} (it was removed: submit the task again)")


def _found(blob: BlobId, path: Path) -> Iterator[BlobFile]:
    with contextlib.suppress(OSError):
        found = path.stat()
        is_stream = isinstance(blob, StreamKey)  # reading it is no use
        yield BlobFile(blob, found.st_size, found.st_mtime_ns if is_stream else _used_ns(found))


def _used_ns(found: os.stat_result) -> int:
    return max(found.st_atime_ns, found.st_mtime_ns)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
