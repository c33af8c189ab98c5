"""Blobs, streams and files of compactions in tables.

Each counts while it has a row in `blobs`. The bytes are rows of `parts`, each with the offset of
its first byte. Rows of `blobs` are written and removed under the term, so a broker that lost its
term adds and removes nothing. All statements may be repeated, so a lost connection is made again.
The first of two may be executed later than statements that follow, and must not undo them. Knows
no tasks.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple

import psycopg

from taskyard.errors import LeaderLost, UnusableStore
from taskyard.journal.blobs import (
    FOLDER,
    BlobFile,
    BlobId,
    BlobStore,
    StreamKey,
    length_of,
)
from taskyard.postgresql import database, leader
from taskyard.postgresql.database import Connection
from taskyard.postgresql.leader import Term
from taskyard.postgresql.store import TermSession

if TYPE_CHECKING:
    from pathlib import Path


#: Bytes of a blob in one row. As much as a peer reads at once.
PART_BYTES: Final = 1024 * 1024

#: Rows of `blobs` that are read at once.
PAGE_ROWS: Final = 500

#: Kinds of rows: bytes that arrive, bytes that are named by their content, and files that replace
#: trimmed rows (`exports`), complete or not.
STREAM: Final = "stream"
SEALED: Final = "sealed"
FILE: Final = "file"
UNFINISHED: Final = "unfinished"

#: Streams whose length is in memory.
_LENGTHS_MAX: Final = 10_000

#: Where the blobs of a store are.
DATABASE: Final = "database"
DIRECTORY: Final = "directory"

_HELD_COUNT: Final = " SELECT (SELECT count(*) FROM held)"

_APPEND: Final = leader.HELD + (  # noqa: S608  # no input
    ", given AS (SELECT * FROM unnest(%(names)s::bytea[], %(uploads)s::text[], "
    "%(starts)s::bigint[], %(contents)s::bytea[]) AS given (name, new, start, content)), "
    "grown AS (INSERT INTO taskyard.blobs SELECT %(kind)s::text, name, min(new), "
    "max(start + octet_length(content)), %(used_ns)s FROM given, held GROUP BY name "
    "ON CONFLICT (kind, name) DO UPDATE SET used_ns = excluded.used_ns, "
    "bytes = greatest(blobs.bytes, excluded.bytes) RETURNING name, upload), "
    # A part that is sent again overwrites the first, which may be longer.
    "written AS (INSERT INTO taskyard.parts SELECT upload, start, content FROM given "
    "JOIN grown USING (name) ON CONFLICT (upload, start) DO UPDATE SET content = "
    "excluded.content || substr(parts.content, octet_length(excluded.content) + 1))" + _HELD_COUNT
)
#: The stream gets the name of its content, unless that is there: then it is removed.
_SEAL: Final = leader.HELD + (  # noqa: S608  # no input
    ", known AS (UPDATE taskyard.blobs SET used_ns = %(used_ns)s WHERE kind = %(as)s "
    "AND name = %(new)b AND EXISTS (SELECT FROM held) RETURNING name), "
    "moved AS (UPDATE taskyard.blobs SET kind = %(as)s, name = %(new)b, used_ns = %(used_ns)s, "
    "bytes = %(bytes)s "
    "WHERE kind = %(kind)s AND name = %(name)b AND EXISTS (SELECT FROM held) "
    "AND NOT EXISTS (SELECT FROM known) RETURNING name), "
    "gone AS (DELETE FROM taskyard.blobs WHERE kind = %(kind)s AND name = %(name)b "
    "AND EXISTS (SELECT FROM known) RETURNING upload), "
    "parts_gone AS (DELETE FROM taskyard.parts USING gone WHERE parts.upload = gone.upload)"
    + _HELD_COUNT
)
_TOUCH: Final = leader.HELD + (  # noqa: S608  # no input
    ", used AS (UPDATE taskyard.blobs SET used_ns = %(used_ns)s WHERE kind = 'sealed' "
    "AND name = %(name)b AND EXISTS (SELECT FROM held))" + _HELD_COUNT
)
_REMOVE: Final = leader.HELD + (  # noqa: S608  # no input
    ", gone AS (DELETE FROM taskyard.blobs WHERE kind = %(kind)s AND name = ANY(%(names)s) "
    "AND used_ns <= %(used_ns_max)s AND EXISTS (SELECT FROM held) "
    "RETURNING upload, bytes), "
    "parts_gone AS (DELETE FROM taskyard.parts USING gone WHERE parts.upload = gone.upload)"
    + _HELD_COUNT
    + ", coalesce(sum(bytes), 0)::bigint, count(*) FROM gone"
)
_READ: Final = (
    "SELECT bytes, start, content FROM taskyard.blobs "
    "LEFT JOIN taskyard.parts ON parts.upload = blobs.upload "
    "AND start > %(offset)s - %(part_bytes)s::bigint AND start < %(end)s "
    "WHERE kind = %(kind)s AND name = %(name)b ORDER BY start"
)
_PAGE: Final = (
    "SELECT name, bytes, used_ns FROM taskyard.blobs WHERE kind = %(kind)s AND name > %(after)b "
    "ORDER BY name LIMIT %(count)s"
)

_NOTE_LOCATION: Final = leader.HELD + (  # noqa: S608  # no input
    " INSERT INTO taskyard.meta SELECT 'files', %(location)b FROM held "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)

#: For removals without an age.
_ANY_NS: Final = (1 << 63) - 1


class Part(NamedTuple):
    """Some bytes of a blob."""

    name: bytes
    start: int
    content: bytes


class BlobTables:
    """The tables, over a connection of the caller, which may be in a transaction."""

    def __init__(self, connection: Connection, term: Term) -> None:
        self._connection = connection
        self._term = term

    def close(self) -> None:
        """Do nothing: the connection is the caller's."""

    # Writing, under the term.

    def append(self, parts: Iterable[Part], used_ns: int, kind: str = STREAM) -> None:
        """Write parts of streams, which are created if they are missing. A repeat is harmless."""
        longest: dict[tuple[bytes, int], bytes] = {}
        for name, start, content in _split(parts):
            if len(content) > len(longest.get((name, start), b"")):
                longest[name, start] = content
        if not longest:
            return
        values = {
            "names": [name for name, _ in longest],
            # Random: a repeated statement that is executed late violates a constraint.
            "uploads": [secrets.token_hex(8) for _ in longest],
            "starts": [start for _, start in longest],
            "contents": [*longest.values()],
            "used_ns": used_ns,
            "kind": kind,
        }
        self._write(_APPEND, values)

    def seal(
        self,
        name: bytes,
        new: bytes,
        bytes_total: int,
        used_ns: int,
        kinds: tuple[str, str] = (STREAM, SEALED),
    ) -> None:
        """Give a stream the name of its content, which has so many bytes."""
        values = {"name": name, "new": new, "bytes": bytes_total, "used_ns": used_ns}
        self._write(_SEAL, {**values, "kind": kinds[0], "as": kinds[1]})

    def put(self, name: bytes, contents: Iterable[bytes]) -> None:
        """Write a file. It counts when all of it is there."""
        upload, size = b"%b %b" % (name, secrets.token_hex(8).encode()), 0
        for content in contents:
            self.append([Part(upload, size, content)], time.time_ns(), UNFINISHED)
            size += len(content)
        self.seal(upload, name, size, time.time_ns(), (UNFINISHED, FILE))

    def touch(self, name: bytes, used_ns: int) -> None:
        """Note that a blob is used, if it is there."""
        self._write(_TOUCH, {"name": name, "used_ns": used_ns})

    def remove(
        self, kind: str, names: Sequence[bytes], used_ns_max: int = _ANY_NS
    ) -> tuple[int, int]:
        """Remove blobs that were not used later. Return their bytes and their number."""
        if not names:
            return 0, 0
        values = {"kind": kind, "names": [*names], "used_ns_max": used_ns_max}
        _, bytes_total, count = self._write(_REMOVE, values)
        return bytes_total, count

    def remove_unfinished(self) -> None:
        """Remove files that killed writers have not completed."""
        self.remove(UNFINISHED, [name for name, _, _ in self.walk(UNFINISHED)])

    # Reading.

    def read(self, kind: str, name: bytes, offset: int, count: int) -> tuple[bytes, int] | None:
        """Return some bytes of a blob and its size, if it is there."""
        values = {
            "kind": kind,
            "name": name,
            "offset": offset,
            "end": offset + count,
            "part_bytes": PART_BYTES,
        }
        rows = self._execute(_READ, values)
        if not rows:
            return None
        bytes_total, end, found = rows[0][0], offset, bytearray()
        for _, start, content in rows:
            if start is not None and start <= end < start + len(content):
                found += memoryview(content)[end - start :]
                end = offset + len(found)
        return bytes(found[: max(0, min(count, bytes_total - offset))]), bytes_total

    def walk(self, kind: str) -> Iterator[tuple[Any, ...]]:
        """Yield the name of each blob of a kind, its length, and when it was used last."""
        values = {"kind": kind, "after": b"", "count": PAGE_ROWS}
        while rows := self._execute(_PAGE, values):
            yield from rows
            values["after"] = rows[-1][0]

    def _write(self, statement: LiteralString, values: Mapping[str, object]) -> tuple[Any, ...]:
        """Run a statement under the term, and return its row."""
        (row,) = self._execute(statement, {**self._term._asdict(), **values})
        if row[0] != 1:
            raise LeaderLost(
                f"the term of epoch {self._term.epoch} has ended, so this broker answers nothing "
                "more and keeps no more blobs"
            )
        return row

    def _execute(
        self, statement: LiteralString, values: Mapping[str, object] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run a statement that may be repeated."""
        return database.select(self._connection, statement, values)


class Blobs(TermSession, BlobTables):
    """The tables, over one connection of one thread, which is made again when it is lost."""

    _purpose = "keeping blobs"

    def _write(self, statement: LiteralString, values: Mapping[str, object]) -> tuple[Any, ...]:
        """Write, and write again if the session ended: another server may not have it."""
        while True:
            self._warnings.clear()
            row = super()._write(statement, values)
            if not self._warnings:
                return row
            try:
                self._confirm()
            except psycopg.Error as error:
                self._check_in_doubt(error)
                self._reconnect(self._give_up_at(), error)
            else:
                return row


class BlobRows(BlobStore):
    """The blobs in a database. The chunks of a turn are written by one statement, in `flush`."""

    def __init__(self, tables: BlobTables) -> None:
        super().__init__()
        self._tables = tables
        self._parts: list[Part] = []
        self._dropped: list[bytes] = []
        #: Lengths of streams, with parts that are not written yet.
        self._lengths: OrderedDict[StreamKey, int] = OrderedDict()

    def flush(self) -> None:
        if self._dropped:  # first: a stream may have begun again
            self.bytes_used -= self._tables.remove(STREAM, self._dropped, time.time_ns())[0]
            self._dropped = []
        if self._parts:
            self._tables.append(self._parts, time.time_ns())
            self._parts = []

    def _extend(self, key: StreamKey, length: int, new: bytes) -> None:
        self._parts.append(Part(key.encode(), length, new))
        self._lengths[key] = length + len(new)

    def _seal(self, key: StreamKey, name: str) -> None:
        self.bytes_used -= self.length(key) - length_of(name)
        self._tables.seal(key.encode(), name.encode(), length_of(name), time.time_ns())
        self._forget(key)

    def length(self, key: StreamKey) -> int:
        length = self._lengths.pop(key, None)
        if length is None:
            found = self.read(key, 0, 0)
            length = 0 if found is None else found[1]
        self._lengths[key] = length
        if len(self._lengths) > _LENGTHS_MAX:
            self._lengths.popitem(last=False)
        return length

    def drop(self, key: StreamKey) -> None:
        self._forget(key)
        name = key.encode()
        self.bytes_used -= sum(len(part.content) for part in self._parts if part.name == name)
        self._parts = [part for part in self._parts if part.name != name]
        self._dropped.append(name)

    def read(self, blob: BlobId, offset: int, count: int) -> tuple[bytes, int] | None:
        return self._tables.read(*_row(blob), offset, count)

    def touch(self, name: str) -> bool:
        found = self.read(name, 0, 0)
        if found is not None:
            self._tables.touch(name.encode(), time.time_ns())
        return found is not None and found[1] == length_of(name)

    def remove(self, blob: BlobId, unused_since_ns: int) -> bool:
        kind, name = _row(blob)
        bytes_total, count = self._tables.remove(kind, [name], unused_since_ns)
        self.bytes_used -= bytes_total
        if count and isinstance(blob, StreamKey):  # it may begin again
            self._forget(blob)
        return count > 0

    def walk(self) -> Iterator[BlobFile]:
        for name, bytes_total, used_ns in self._tables.walk(SEALED):
            yield BlobFile(name.decode(), bytes_total, used_ns)
        for name, bytes_total, used_ns in self._tables.walk(STREAM):
            yield BlobFile(StreamKey.decode(name), bytes_total, used_ns)

    def close(self) -> None:
        self._tables.close()

    def _forget(self, key: StreamKey) -> None:
        self._lengths.pop(key, None)
        self._hashes.forget(key)


def _row(blob: BlobId) -> tuple[str, bytes]:
    """Return the kind and the name of a row."""
    return STREAM if isinstance(blob, StreamKey) else SEALED, blob.encode()


def known_location(connection: Connection) -> str:
    """Return `DATABASE` or `DIRECTORY`, as a broker noted it. Empty if it is not known."""
    return database.read_meta(connection, "files").decode()


def note_location(connection: Connection, term: Term, directory: Path | None) -> None:
    """Note where the blobs are: in a directory, or in the database."""
    location = DATABASE if directory is None else DIRECTORY
    connection.execute(_NOTE_LOCATION, {**term._asdict(), "location": location.encode()})


def _split(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts of at most `PART_BYTES`."""
    for name, start, content in parts:
        for at in range(0, len(content), PART_BYTES):
            yield Part(name, start + at, content[at : at + PART_BYTES])


def open_blobs(url: str, directory: Path | None, term: Term) -> Blobs | None:
    """Open the tables for a broker that leads. Return None if blobs are in a directory."""
    with database.open_database(url) as connection:
        note_location(connection, term, directory)
    return Blobs(url, term) if directory is None else None


def open_beside(url: str) -> BlobRows | None:
    """Open the tables with the term of the broker that runs now, if there is one.

    Return None if blobs are in a directory.
    """
    with database.open_store(url) as connection:
        if known_location(connection) != DATABASE:
            return None
        seen = leader.read(connection)
    return BlobRows(Blobs(url, Term(seen.epoch, seen.holder)))


def check_location(connection: Connection, state: Path, directory: Path | None) -> None:
    """Refuse a directory of blobs, or none, where the store has them elsewhere."""
    known = known_location(connection)
    if known == DATABASE and directory is not None:
        raise UnusableStore("blobs of the store are in the database (unset blobs.directory)")
    link = state / FOLDER
    if directory is None and (known == DIRECTORY or link.is_symlink()):
        where = f" {link.readlink()}" if link.is_symlink() else ""
        raise UnusableStore(f"blobs of the store are in a directory{where} (set blobs.directory)")
