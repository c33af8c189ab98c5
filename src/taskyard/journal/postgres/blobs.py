"""Blobs and streams in tables, for brokers without a directory that outlives them.

Either counts while it has a row in `blobs`. Its bytes are rows of `parts`, each with the offset of
its first byte. Rows of `blobs` are written and removed under the term, so a broker that lost its
term adds and removes nothing. All statements may be repeated, so a lost connection is made again.
The first of two may be executed later than statements that follow, and must not undo them. Knows
neither tasks nor where files are.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, LiteralString, NamedTuple, Self

import psycopg
from psycopg.errors import Diagnostic

from taskyard.errors import JournalFailed, LeaderLost
from taskyard.journal.postgres import database, leader
from taskyard.journal.postgres.database import Connection
from taskyard.journal.postgres.leader import Term
from taskyard.journal.postgres.store import RECONNECT_SECONDS, RECONNECT_SECONDS_MAX

#: Bytes of a blob in one row. As much as a peer reads at once.
PART_BYTES: Final = 1024 * 1024

#: Rows of `blobs` that are read at once.
PAGE_ROWS: Final = 500

#: Kinds of rows: bytes that arrive, and those that are named by their content.
STREAM: Final = "stream"
SEALED: Final = "sealed"
KINDS: Final = (STREAM, SEALED)

#: Where the blobs of a store are.
DATABASE: Final = "database"
DIRECTORY: Final = "directory"

_HELD_COUNT: Final = " SELECT (SELECT count(*) FROM held)"

_APPEND: Final = leader.HELD + (  # noqa: S608  # no input
    ", given AS (SELECT * FROM unnest(%(names)s::bytea[], %(uploads)s::text[], "
    "%(starts)s::bigint[], %(contents)s::bytea[]) AS given (name, new, start, content)), "
    "grown AS (INSERT INTO taskyard.blobs SELECT %(kind)s::text, name, min(new), "
    "max(start + octet_length(content)), %(used_ns)s, min(epoch) FROM given, held GROUP BY name "
    "ON CONFLICT (kind, name) DO UPDATE SET used_ns = excluded.used_ns, "
    "bytes = greatest(blobs.bytes, excluded.bytes) RETURNING name, upload), "
    # A part that is sent again overwrites the first one, which may be longer.
    "written AS (INSERT INTO taskyard.parts SELECT upload, start, content FROM given "
    "JOIN grown USING (name) ON CONFLICT (upload, start) DO UPDATE SET content = "
    "excluded.content || substr(parts.content, octet_length(excluded.content) + 1))" + _HELD_COUNT
)
#: The stream gets the name of its content, unless that is there: then it is removed.
_SEAL: Final = leader.HELD + (  # noqa: S608  # no input
    ", known AS (UPDATE taskyard.blobs SET used_ns = %(used_ns)s WHERE kind = 'sealed' "
    "AND name = %(new)b AND EXISTS (SELECT FROM held) RETURNING name), "
    "moved AS (UPDATE taskyard.blobs SET kind = 'sealed', name = %(new)b, used_ns = %(used_ns)s, "
    "bytes = %(bytes)s "
    "WHERE kind = 'stream' AND name = %(name)b AND EXISTS (SELECT FROM held) "
    "AND NOT EXISTS (SELECT FROM known) RETURNING name), "
    "gone AS (DELETE FROM taskyard.blobs WHERE kind = 'stream' AND name = %(name)b "
    "AND EXISTS (SELECT FROM known) RETURNING upload), "
    "parts_gone AS (DELETE FROM taskyard.parts USING gone WHERE parts.upload = gone.upload)"
    + _HELD_COUNT
)
_CLAIM: Final = leader.HELD + (  # noqa: S608  # no input
    ", claimed AS (INSERT INTO taskyard.blobs SELECT %(kind)s::text, %(name)b::bytea, "
    "%(upload)s::text, %(bytes)s, %(used_ns)s, epoch FROM held "
    "ON CONFLICT (kind, name) DO UPDATE SET used_ns = excluded.used_ns)" + _HELD_COUNT
)
_TOUCH: Final = leader.HELD + (  # noqa: S608  # no input
    ", used AS (UPDATE taskyard.blobs SET used_ns = %(used_ns)s WHERE kind = %(kind)s "
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
_REMOVE_UNCLAIMED: Final = leader.HELD + (  # noqa: S608  # no input
    ", gone AS (DELETE FROM taskyard.parts WHERE EXISTS (SELECT FROM held) "
    "AND split_part(upload, '-', 1)::bigint < %(epoch)s "
    "AND NOT EXISTS (SELECT FROM taskyard.blobs WHERE blobs.upload = parts.upload))" + _HELD_COUNT
)
_INSERT_PART: Final = (
    "INSERT INTO taskyard.parts VALUES (%(upload)s, %(start)s, %(content)b) "
    "ON CONFLICT (upload, start) DO NOTHING"
)
_SIZE: Final = "SELECT bytes FROM taskyard.blobs WHERE kind = %(kind)s AND name = %(name)b"
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

_NOTE_PLACE: Final = leader.HELD + (  # noqa: S608  # no input
    " INSERT INTO taskyard.meta SELECT 'files', %(place)b FROM held "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)
_PLACE: Final = "SELECT value FROM taskyard.meta WHERE key = 'files'"

#: For removals without an age.
_ANY_NS: Final = (1 << 63) - 1


class Part(NamedTuple):
    """Some bytes of a blob."""

    name: bytes
    start: int
    content: bytes


class StoredBlob(NamedTuple):
    """A row of `blobs`."""

    name: bytes
    bytes_total: int
    #: When it was written, or touched.
    used_ns: int


class BlobTables:
    """The tables, over a connection of the caller, which may be in a transaction."""

    def __init__(self, connection: Connection, term: Term) -> None:
        self._connection = connection
        self._term = term

    # Writing, under the term.

    def append(self, kind: str, parts: Iterable[Part], used_ns: int) -> None:
        """Write parts of blobs, which are created if they are missing. A repeat is harmless."""
        longest: dict[tuple[bytes, int], bytes] = {}
        for name, start, content in _split(parts):
            if len(content) > len(longest.get((name, start), b"")):
                longest[name, start] = content
        if not longest:
            return
        values = {
            "kind": kind,
            "names": [name for name, _ in longest],
            "uploads": [self._new_upload() for _ in longest],
            "starts": [start for _, start in longest],
            "contents": [*longest.values()],
            "used_ns": used_ns,
        }
        self._write(_APPEND, values)

    def seal(self, name: bytes, new: bytes, bytes_total: int, used_ns: int) -> None:
        """Give a stream the name of its content, which has so many bytes."""
        values = {"name": name, "new": new, "bytes": bytes_total, "used_ns": used_ns}
        self._write(_SEAL, values)

    def put(self, kind: str, name: bytes, contents: Iterable[bytes], used_ns: int) -> None:
        """Write a blob as a whole, in parts. It counts when all of it is there."""
        upload, size = self._new_upload(), 0
        for given in contents:
            for _, start, content in _split([Part(name, size, given)]):
                self._execute(_INSERT_PART, {"upload": upload, "start": start, "content": content})
            size += len(given)
        values = {"kind": kind, "name": name, "upload": upload, "bytes": size, "used_ns": used_ns}
        self._write(_CLAIM, values)

    def touch(self, kind: str, name: bytes, used_ns: int) -> int | None:
        """Note that a blob is used, and return its size. None: it is not there."""
        size = self.size(kind, name)
        if size is not None:
            self._write(_TOUCH, {"kind": kind, "name": name, "used_ns": used_ns})
        return size

    def remove(
        self, kind: str, names: Sequence[bytes], used_ns_max: int = _ANY_NS
    ) -> tuple[int, int]:
        """Remove blobs that were not used later. Return their bytes and their number."""
        if not names:
            return 0, 0
        values = {"kind": kind, "names": [*names], "used_ns_max": used_ns_max}
        _, bytes_total, count = self._write(_REMOVE, values)
        return bytes_total, count

    def remove_unclaimed(self) -> None:
        """Remove parts that brokers of earlier terms left behind."""
        self._write(_REMOVE_UNCLAIMED, {})

    def _new_upload(self) -> str:
        """Return a new name for parts, which begins with the epoch."""
        return f"{self._term.epoch}-{secrets.token_hex(8)}"

    # Reading.

    def size(self, kind: str, name: bytes) -> int | None:
        """Return the bytes of a blob. None: it is not there."""
        for (bytes_total,) in self._execute(_SIZE, {"kind": kind, "name": name}):
            return int(bytes_total)
        return None

    def read(self, kind: str, name: bytes, offset: int, count: int) -> tuple[bytes, int] | None:
        """Return some bytes of a blob and its size. None: it is not there."""
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

    def contents(self, kind: str, name: bytes) -> Iterator[bytes]:
        """Yield all bytes of a blob."""
        offset = 0
        while found := self.read(kind, name, offset, PART_BYTES):
            if not found[0]:
                return
            yield found[0]
            offset += len(found[0])

    def walk(self, kind: str) -> Iterator[StoredBlob]:
        """Yield all blobs of a kind. Reads some rows at a time."""
        after = b""
        while True:
            values = {"kind": kind, "after": after, "count": PAGE_ROWS}
            rows = [StoredBlob(*columns) for columns in self._execute(_PAGE, values)]
            if not rows:
                return
            yield from rows
            after = rows[-1].name

    def _write(self, statement: LiteralString, values: Mapping[str, object]) -> tuple[Any, ...]:
        """Run a statement under the term, and return its row."""
        (row,) = self._execute(statement, {**self._term._asdict(), **values})
        if row[0] != 1:
            raise self._lost()
        return row

    def _execute(
        self, statement: LiteralString, values: Mapping[str, object] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run a statement that may be repeated."""
        found = self._connection.execute(statement, values, prepare=True, binary=True)
        return found.fetchall() if found.description else []

    def _lost(self) -> LeaderLost:
        return LeaderLost(
            f"the term of epoch {self._term.epoch} has ended, so this broker answers nothing more "
            "and keeps no more blobs"
        )


class Blobs(BlobTables):
    """The tables, over one connection of one thread, which is made again when it is lost."""

    def __init__(
        self, url: str, term: Term, reconnect_seconds_max: float = RECONNECT_SECONDS_MAX
    ) -> None:
        """`reconnect_seconds_max` is how long a lost connection is tried again."""
        super().__init__(database.open_database(url), term)
        self._url = url
        self._reconnect_seconds_max = reconnect_seconds_max
        self._is_interrupted = False
        #: The SQLSTATE of each warning during the last statement.
        self._warnings: list[str] = []
        self._connection.add_notice_handler(self._note_warning)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def copy(self) -> "Blobs":
        """Return the same tables over another connection, for another thread."""
        return Blobs(self._url, self._term, self._reconnect_seconds_max)

    def interrupt(self) -> None:
        """End a call that waits for the server in another thread, because the lease has ended."""
        self._is_interrupted = True
        database.interrupt(self._connection)

    def _write(self, statement: LiteralString, values: Mapping[str, object]) -> tuple[Any, ...]:
        """Write, and write again if the session ended: another server may not have it."""
        while True:
            self._warnings.clear()
            row = super()._write(statement, values)
            if not self._warnings or self._is_confirmed():
                return row

    def _is_confirmed(self) -> bool:
        """Commit once more, after a warning: a standby may not have confirmed.

        Return False if the session has ended.
        """
        self._warnings.clear()
        try:
            is_held = leader.renew(self._connection, self._term)
        except psycopg.Error as error:
            if self._is_interrupted:
                raise self._lost() from error
            if not database.is_in_doubt(self._connection, error):
                raise database.failed(self._url, "keeping blobs", error) from error
            self._connection.close()
            return False
        if not is_held:
            raise self._lost()
        if database.ends_session(self._warnings):
            return False
        if self._warnings:
            raise JournalFailed(
                f"{database.describe(self._url)}: a standby did not confirm the last "
                "bytes, nothing more is acknowledged (see the log of PostgreSQL)"
            )
        return True

    def _execute(
        self, statement: LiteralString, values: Mapping[str, object] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run a statement over as many connections as that takes."""
        give_up = time.monotonic() + self._reconnect_seconds_max
        while True:
            try:
                if self._connection.closed:
                    self._connection = self._connect()
                return super()._execute(statement, values)
            except psycopg.Error as error:
                if self._is_interrupted:
                    raise self._lost() from error
                is_over = time.monotonic() > give_up
                if is_over or not database.is_in_doubt(self._connection, error):
                    raise database.failed(self._url, "keeping blobs", error) from error
                self._connection.close()
                time.sleep(RECONNECT_SECONDS)

    def _connect(self) -> Connection:
        connection = database.connect(self._url)
        connection.add_notice_handler(self._note_warning)
        return connection

    def _note_warning(self, notice: Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            self._warnings.append(notice.sqlstate or "")


def known_place(connection: Connection) -> str:
    """Return where the blobs of a store are, as a broker noted it. Empty: not known."""
    for (place,) in connection.execute(_PLACE, binary=True):
        return bytes(place).decode()
    return ""


def note_place(connection: Connection, term: Term, place: str) -> None:
    """Note where the blobs are."""
    connection.execute(_NOTE_PLACE, {**term._asdict(), "place": place.encode()})


def _split(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts of at most `PART_BYTES`."""
    for name, start, content in parts:
        for place in range(0, len(content), PART_BYTES):
            yield Part(name, start + place, content[place : place + PART_BYTES])
