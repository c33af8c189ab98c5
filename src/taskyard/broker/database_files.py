"""Long output and large values of a broker whose files are in its database.

Nothing of it is on this machine but values that are still arriving. So any broker of the store can
continue at once. Knows no SQL. Needs the extra `postgres`, so it is imported only by its users.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from taskyard.broker import output_store
from taskyard.broker.output_store import FOLDER, OutputFile, OutputFiles, StreamKey, key_of
from taskyard.broker.value_references import LOG_FILE, ReferenceFile
from taskyard.broker.values import ValuePlace
from taskyard.core.output import OutputChunk, Stream
from taskyard.core.output_paths import SUFFIXES, directory_of, file_name
from taskyard.errors import TaskyardError, UnusableStore
from taskyard.journal import value_files
from taskyard.journal.files import make_private_directory
from taskyard.journal.postgres import blobs, database, leader
from taskyard.journal.postgres.blobs import OUTPUT, PART_BYTES, VALUE, Blob, Blobs, Part
from taskyard.journal.postgres.leader import Term
from taskyard.journal.postgres.move import LocalBlob
from taskyard.journal.value_files import ValueFile, ValueFiles, length_of
from taskyard.net.keyring import DIRECTORY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


logger = logging.getLogger("taskyard.broker")

#: Streams whose length is in memory.
_LENGTHS_MAX: Final = 10_000

_STREAMS: Final = {suffix: stream for stream, suffix in SUFFIXES.items()}


class OutputRows:
    """Implements `OutputStore`. The chunks of a turn are written by one statement, in `flush`."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._parts: list[Part] = []
        self._dropped: list[bytes] = []
        #: Lengths of streams that grow, with parts that are not written yet.
        self._lengths: OrderedDict[StreamKey, int] = OrderedDict()
        #: Bytes of all streams. The owner sets it, and writes add to it.
        self.bytes_used = 0

    def write(self, chunk: OutputChunk) -> bool:
        key, end = key_of(chunk), chunk.offset + len(chunk.data)
        length = self._length(key)
        if chunk.offset > length:
            return False
        self._parts.append(Part(_encode(key), chunk.offset, chunk.data))
        self._lengths[key] = max(length, end)
        self.bytes_used += max(0, end - length)
        return True

    def flush(self) -> None:
        if self._parts:
            self._blobs.append(OUTPUT, self._parts, time.time_ns())
            self._parts = []
        if self._dropped:
            self.bytes_used -= self._blobs.remove(OUTPUT, self._dropped)[0]
            self._dropped = []

    def end(self, key: StreamKey, bytes_total: int) -> int:
        self.flush()
        self._lengths.pop(key, None)
        found = self._blobs.seal(OUTPUT, _encode(key), bytes_total)
        self.bytes_used -= max(0, found - bytes_total)  # left behind by another history
        return min(found, bytes_total)

    def drop(self, key: StreamKey) -> None:
        self._lengths.pop(key, None)
        self._dropped.append(_encode(key))

    def read(self, key: StreamKey, offset: int, count: int) -> tuple[bytes, int] | None:
        return self._blobs.read(OUTPUT, _encode(key), offset, count)

    def walk(self) -> Iterator[OutputFile]:
        """Yield all streams, with the paths of their files in a state directory."""
        for name, bytes_total, used_ns in self._blobs.walk(OUTPUT):
            key = _decode(name)
            yield OutputFile(path_of(key), key.campaign, key.name, bytes_total, used_ns)

    def remove(self, file: OutputFile) -> None:
        """Remove a stream, as a walk found it."""
        self._blobs.remove(OUTPUT, [_encode(_key(file))])

    def close(self) -> None:
        self._blobs.close()

    def _length(self, key: StreamKey) -> int:
        length = self._lengths.pop(key, None)
        if length is None:
            length = self._blobs.size(OUTPUT, _encode(key)) or 0
        self._lengths[key] = length
        if len(self._lengths) > _LENGTHS_MAX:
            self._lengths.popitem(last=False)
        return length


def path_of(key: StreamKey) -> Path:
    """Return the path of a stream's file in a state directory."""
    return Path(FOLDER, *directory_of(key.campaign, key.name), file_name(key.attempt, key.stream))


def _key(file: OutputFile) -> StreamKey:
    attempt, stream = int(file.path.stem), _STREAMS[file.path.suffix]
    return StreamKey(file.campaign, file.name, attempt, stream)


def _encode(key: StreamKey) -> bytes:
    """Return the name of a stream's blob."""
    numbers = (key.attempt, key.stream, len(key.campaign))
    return b"%d/%d/%d/" % numbers + key.campaign + key.name


def _decode(name: bytes) -> StreamKey:
    attempt, stream, length, names = name.split(b"/", 3)
    campaign_bytes = int(length)
    return StreamKey(
        names[:campaign_bytes], names[campaign_bytes:], int(attempt), Stream(int(stream))
    )


class ValueRows(ValueFiles):
    """Values in the database. Those that are arriving are in unfinished files of a directory."""

    def __init__(self, directory: Path, blobs: Blobs) -> None:
        super().__init__(directory)
        self._blobs = blobs

    def has(self, name: str) -> bool:
        return self._blobs.size(VALUE, name.encode()) == length_of(name)

    def touch(self, name: str) -> bool:
        return self._blobs.touch(VALUE, name.encode(), time.time_ns()) == length_of(name)

    def finish(self, unfinished: Path, name: str) -> None:
        """Copy a file that is complete. It is called in a thread."""
        with self._blobs.copy() as own, unfinished.open("rb") as file:
            parts = iter(lambda: file.read(PART_BYTES), b"")
            own.put(VALUE, name.encode(), parts, time.time_ns())
        unfinished.unlink()

    def read(self, name: str, offset: int, count: int) -> bytes | None:
        found = self._blobs.read(VALUE, name.encode(), offset, count)
        return None if found is None or found[1] != length_of(name) else found[0]

    def walk(self) -> Iterator[ValueFile]:
        for blob, bytes_total, used_ns in self._blobs.walk(VALUE):
            name = blob.decode()
            yield ValueFile(name, self.path(name), bytes_total, used_ns)

    def remove(self, name: str, unused_since_ns: int) -> bool:
        return self._blobs.remove(VALUE, [name.encode()], unused_since_ns)[1] > 0


def value_place(directory: Path, blobs: Blobs) -> ValuePlace:
    """Return values and references in the database."""
    return ValuePlace(ValueRows(directory, blobs), ReferenceRows(blobs))


class ReferenceRows:
    """Implements `ReferenceLog` in the database."""

    name = "taskyard.value_references"

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def load(self) -> list[bytes]:
        return self._blobs.lines()

    def append(self, lines: list[bytes]) -> None:
        self._blobs.add_lines(lines)

    def replace(self, lines: Iterable[bytes]) -> None:
        self._blobs.replace_lines(lines)


def open_blobs(
    url: str, files: Path | None, term: Term, reconnect_seconds_max: float
) -> Blobs | None:
    """Open the tables for a broker that leads. None: output and values are in a directory."""
    place = blobs.DATABASE if files is None else blobs.DIRECTORY
    with database.open_database(url) as connection:
        blobs.note_place(connection, term, place)
    if files is not None:
        return None
    threading.Thread(
        target=_remove_unclaimed, args=(url, term), name="taskyard-blobs", daemon=True
    ).start()
    return Blobs(url, term, reconnect_seconds_max)


def _remove_unclaimed(url: str, term: Term) -> None:
    """Remove what killed brokers left behind, in a thread: there may be many rows."""
    try:
        with Blobs(url, term) as own:
            own.remove_unclaimed()
    except TaskyardError as error:  # the next broker tries again
        logger.warning("unfinished values of earlier brokers: not removed: %s", error)


def open_beside(url: str) -> Blobs | None:
    """Open the tables with the term of the broker that runs now, if there is one.

    None: output and values are in a directory.
    """
    with database.open_database(url) as connection:
        database.check_tables(connection)
        if blobs.known_place(connection) != blobs.DATABASE:
            return None
        seen = leader.read(connection)
    return Blobs(url, Term(seen.epoch, seen.holder))


def check_place(url: str, state: Path, files: Path | None) -> None:
    """Refuse a place of output and values that is not the one of the store."""
    with database.open_database(url) as connection:
        database.check_tables(connection)
        known = blobs.known_place(connection)
    if known == blobs.DATABASE and files is not None:
        raise UnusableStore(
            "output and values of the store are in the database (start without --files)"
        )
    link = state / FOLDER
    if files is None and (known == blobs.DIRECTORY or link.is_symlink()):
        where = f" {link.readlink().parent}" if link.is_symlink() else ""
        raise UnusableStore(
            f"output and values of the store are in a directory{where} (give it with --files)"
        )


class StateFiles:
    """Output and values in a state directory, for `store move`."""

    folders = (FOLDER, value_files.FOLDER)
    keys_folder = DIRECTORY_NAME

    @staticmethod
    def walk(state: Path) -> Iterator[LocalBlob]:
        for file in output_store.walk(state / FOLDER):
            yield LocalBlob(OUTPUT, _encode(_key(file)), file.path, file.written_ns)
        for value in ValueFiles(state / value_files.FOLDER).walk():
            yield LocalBlob(VALUE, value.name.encode(), value.path, value.used_ns)

    @staticmethod
    def write(state: Path, kind: str, blob: Blob, contents: Iterable[bytes]) -> None:
        if kind == OUTPUT:
            path = _write_output(OutputFiles(state / FOLDER), _decode(blob.name), contents)
        else:
            values, name = ValueFiles(state / value_files.FOLDER), blob.name.decode()
            unfinished = values.unfinished_path(name)
            with unfinished.open("wb") as file:
                file.writelines(contents)
                file.flush()
                os.fsync(file.fileno())
            values.finish(unfinished, name)
            path = values.path(name)
        os.utime(path, ns=(blob.used_ns, blob.used_ns))

    @staticmethod
    def read_lines(state: Path) -> list[bytes]:
        return _log(state).load()

    @staticmethod
    def write_lines(state: Path, lines: list[bytes]) -> None:
        make_private_directory(state / value_files.FOLDER)
        _log(state).replace(lines)


def _log(state: Path) -> ReferenceFile:
    return ReferenceFile(state / value_files.FOLDER / LOG_FILE)


def _write_output(files: OutputFiles, key: StreamKey, contents: Iterable[bytes]) -> Path:
    offset = 0
    for content in contents:
        files.write(OutputChunk(*key, offset, content))
        offset += len(content)
    files.end(key, offset)
    return files.path(key)
