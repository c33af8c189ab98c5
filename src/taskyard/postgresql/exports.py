"""The tables that replace trimmed rows: snapshots, history files, the index of ended tasks.

A compaction writes them to the state directory of its broker first, as it does for SQLite, and
`publish` copies them. Then rows may be trimmed. `fetch` makes the state directory of another broker
equal to the tables. So the local files are a cache. A broker that leads needs the index up to the
last trimmed row, a start needs a snapshot, too, and a compaction needs all files.

A broker that lost its term may still be writing. A file counts when it has a row in `blobs`, which
is inserted under the term. Rows of the index follow from committed rows of the journal, so a stale
broker adds only what is true. The row up to which the index is complete is written under the term.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import psycopg
from psycopg.errors import UniqueViolation

from taskyard.errors import JournalDamaged, LeaderLost
from taskyard.journal import chain, compaction, history, snapshot, sqlite
from taskyard.journal.archive import Archive, ArchiveWriter, IndexRow
from taskyard.journal.chain import Head
from taskyard.journal.compaction import CompactionResult, DatabaseTerm
from taskyard.journal.files import make_private_directory, replacing
from taskyard.postgresql import blobs, database, leader
from taskyard.postgresql.blobs import FILE, BlobTables
from taskyard.postgresql.database import Connection
from taskyard.postgresql.leader import Term
from taskyard.postgresql.lease import Lease
from taskyard.postgresql.store import PostgresReader, PostgresStore, read_rows

#: Rows of the index that are read at once: some milliseconds, or 64 MB of output at the worst.
_ROWS: Final = 1_000

#: The covered row never goes back: as with the anchor, a statement may be executed late.
_COVER: Final = leader.HELD + (  # noqa: S608  # no input
    " INSERT INTO taskyard.meta SELECT 'covered', %(covered)b FROM held "
    "ON CONFLICT (key) DO UPDATE SET value = greatest(meta.value, excluded.value)"
)

#: As in finished.sqlite: an older end never replaces a newer end.
_UPSERT: Final = (
    "INSERT INTO taskyard.ended VALUES (%b, %s, %s, %b, %b) ON CONFLICT (name, attempt) DO UPDATE "
    "SET record = excluded.record, head = excluded.head, content = excluded.content "
    "WHERE excluded.record >= ended.record"
)

#: The SHA-256 of a file follows its bytes.
_DIGEST_BYTES: Final = 32

#: For readers.
_NO_TERM: Final = Term(0, "")


class PublishedIndex(ArchiveWriter):
    """The index of finished tasks, written to its tables and then to its file.

    So the file never covers more than the tables.
    """

    def __init__(
        self, directory: Path, identity: bytes, connection: Connection, term: Term
    ) -> None:
        super().__init__(directory, identity)
        self._database = connection
        self._term = term

    def write(self, rows: Sequence[IndexRow]) -> None:
        """Add rows by COPY, or row by row if a name is there, which takes several times as long.

        That is rare: a name ended before, or a run was killed.
        """
        try:
            database.copy_rows(self._database, "ended", rows)
        except UniqueViolation:
            with self._database.transaction(), self._database.cursor() as cursor:
                cursor.executemany(_UPSERT, rows)
        super().write(rows)

    def commit(self, head: Head) -> None:
        values = {**self._term._asdict(), "covered": chain.seal(self._identity, head)}
        if self._database.execute(_COVER, values).rowcount != 1:
            raise LeaderLost(
                f"another broker has taken over since epoch {self._term.epoch}, so a compaction "
                "stops"
            )
        super().commit(head)


def publish(
    connection: Connection, directory: Path, identity: bytes, head: Head, term: Term
) -> None:
    """Copy what a compaction up to `head` wrote, and check that it covers all rows up to there."""
    BlobTables(connection, term).remove_unfinished()
    claimed = claims(connection)
    whole = history.parts(directory)
    newest = snapshot.path_of(directory, head.sequence)
    for path in (*(part.path(directory) for part in whole), newest):
        if _name_of(directory, path) not in claimed:
            upload(connection, directory, path, term)
    covered = read_covered(connection)
    is_covered = covered is not None and covered == (identity, head)
    if not is_covered or not whole or whole[-1].last < head.sequence:
        raise JournalDamaged(
            f"the tables do not cover row {head.sequence}", "no row was trimmed: compact again"
        )


def drop_snapshots(connection: Connection, before: int, term: Term) -> None:
    """Remove snapshots of rows before `before`, which are trimmed."""
    older = [
        name.encode()
        for name in claims(connection)
        if (sequence := snapshot.sequence_of(Path(name))) is not None and sequence < before
    ]
    BlobTables(connection, term).remove(FILE, older)


def fetch(
    connection: Connection, directory: Path, identity: bytes, *, history: bool = True
) -> Iterator[None]:
    """Make the files of a state directory equal to the tables, with a pause after each part.

    Without `history`, only what a broker needs to start: index and snapshots. No compaction may
    change the tables meanwhile: the caller has the term, or is in a transaction.
    """
    for name, bytes_total in remove_others(connection, directory).items():
        if history or snapshot.sequence_of(Path(name)) is not None:
            path = directory / name
            make_private_directory(path.parent)
            with replacing(path) as file:
                for content in read(connection, name, bytes_total):
                    file.write(content)
                    yield
    yield from index_parts(connection, directory, identity)


def remove_others(connection: Connection, directory: Path) -> dict[str, int]:
    """Remove files of a state directory that do not count, and return the missing files."""
    wanted = claims(connection)
    for path in local_files(directory):
        name = _name_of(directory, path)
        if path.stat().st_size == wanted.get(name):
            del wanted[name]
        else:
            path.unlink()
    return wanted


def index_parts(connection: Connection, directory: Path, identity: bytes) -> Iterator[None]:
    """Add the rows that the local index lacks, with a pause after each part.

    The row up to which it is complete comes last.
    """
    covered = read_covered(connection)
    if covered is None:
        return
    if covered[0] != identity:
        raise JournalDamaged(
            "the index in the database belongs to another journal", database.RESTORE_HINT
        )
    with Archive(directory) as index:
        local = index.covered()
    after = 0 if local is None else local[1].record
    if after < covered[1].record:
        with closing(ArchiveWriter(directory, identity)) as writer:
            for rows in _portions(connection, after):
                writer.write(rows)
                yield
            writer.commit(covered[1])


def compact(
    described: DatabaseTerm,
    directory: Path,
    found: tuple[bytes, Head],
    progress: compaction.Progress,
) -> CompactionResult:
    """Export the rows up to a head and publish the result. Trims nothing.

    Fetches files first that the directory lacks: ranges of history must not overlap.
    """
    url, term, (identity, head) = described.url, Term(described.epoch, described.holder), found
    try:
        with (
            PostgresReader(url, identity, head) as reader,
            database.open_database(url) as connection,
        ):
            if described.lacks_files:
                for _ in fetch(connection, directory, identity):
                    progress("fetching files", 0, 1)
            index = partial(PublishedIndex, connection=connection, term=term)
            outcome = compaction.export(directory, reader, progress, index)
            compaction.verify_covered(directory, reader, head)
            publish(connection, directory, identity, head, term)
            drop_snapshots(connection, reader.anchor.sequence, term)
    except psycopg.Error as error:
        raise database.failed(url, "compacting the journal", error) from error
    return outcome


def compact_stopped(
    url: str, directory: Path, progress: compaction.Progress, *, trims: bool
) -> CompactionResult:
    """Compact a store without a broker. It is in use meanwhile, as by a broker.

    Raises `StoreInUse` if a broker uses it.
    """
    with (
        Lease(url) as lease,
        closing(PostgresStore(url, directory, lease.term)) as store,
        database.open_database(url) as connection,
    ):
        lease.on_lost = store.interrupt
        run(fetch(connection, directory, store.identity))
        term = DatabaseTerm(url, *lease.term)
        outcome = compact(term, directory, (store.identity, store.head), progress)
        if trims:
            compaction.trim_covered(directory, store, outcome, progress)
            drop_snapshots(connection, outcome.sequence, lease.term)
    return outcome


def claims(connection: Connection) -> dict[str, int]:
    """Return all files that count, as paths in a state directory, and how long they are."""
    found = BlobTables(connection, _NO_TERM).walk(FILE)
    return {name.decode(): bytes_total - _DIGEST_BYTES for name, bytes_total, _ in found}


def read_covered(connection: Connection) -> tuple[bytes, Head] | None:
    """Return the journal's identity and the row up to which the index is complete."""
    sealed = database.read_meta(connection, "covered")
    return database.unseal(sealed, "the covered row") if sealed else None


def _name_of(directory: Path, path: Path) -> str:
    return path.relative_to(directory).as_posix()


def local_files(directory: Path) -> Iterator[Path]:
    """Yield the snapshots and history files."""
    yield from (part.path(directory) for part in history.parts(directory))
    for sequence in snapshot.sequences(directory):
        yield snapshot.path_of(directory, sequence)


def upload(connection: Connection, directory: Path, path: Path, term: Term) -> None:
    """Copy a file of a state directory. It counts when all of it is there."""
    name = _name_of(directory, path).encode()
    BlobTables(connection, term).put(name, _with_digest(path))


def _with_digest(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in parts, and then its digest."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while content := file.read(blobs.PART_BYTES):
            digest.update(content)
            yield content
    yield digest.digest()


def read(connection: Connection, file: str, end: int) -> Iterator[bytes]:
    """Yield the content of a file in parts. Raises at its end if it is not what was written."""
    tables, name = BlobTables(connection, _NO_TERM), file.encode()
    digest = hashlib.sha256()
    for offset in range(0, end, blobs.PART_BYTES):
        found = tables.read(FILE, name, offset, min(blobs.PART_BYTES, end - offset))
        if found is not None:
            digest.update(found[0])
            yield found[0]
    if tables.read(FILE, name, end, _DIGEST_BYTES) != (digest.digest(), end + _DIGEST_BYTES):
        wrong = f"{file} in the database does not match its digest"
        raise JournalDamaged(wrong, database.RESTORE_HINT)


def _portions(connection: Connection, after: int) -> Iterator[list[IndexRow]]:
    """Yield the index rows of later records, as of one moment.

    Other statements may use the connection in between. Without a transaction the server keeps a
    copy of the rows, and no old rows of other tables.
    """
    made = connection.cursor("index", withhold=True, binary=True)
    with closing(made), made as cursor:  # twice, because a lost connection fails the first
        cursor.execute("SELECT * FROM taskyard.ended WHERE record > %s", (after,))
        while rows := cursor.fetchmany(_ROWS):
            yield list(map(IndexRow._make, rows))


def run(parts: Iterator[object]) -> None:
    """Run all parts without a pause."""
    for _ in parts:
        pass


def write_copy(connection: Connection, directory: Path, seen: Head | None = None) -> None:
    """Make a state directory of the tables, in a transaction. It must have the row `seen`."""
    identity, anchor = database.read_anchor(connection)
    run(fetch(connection, directory, identity))
    rows = read_rows(partial(database.select, connection), anchor.sequence)
    sqlite.write_copy(directory, identity, anchor, chain.verify(rows, anchor, seen))


@contextmanager
def temporary_copy(url: str, state: Path) -> Iterator[Path]:
    """Copy the store of a state directory as of one moment, also beside its broker.

    The copy ends with the context. Raises `UnusableStore` if the witness of the directory is of
    another journal, and `JournalDamaged` if its row is missing.
    """
    with tempfile.TemporaryDirectory(prefix="taskyard-copy-") as directory:
        copy = Path(directory)
        with database.open_store(url) as connection, database.one_moment(connection):
            identity, _ = database.read_anchor(connection)
            write_copy(connection, copy, database.witnessed_head(url, state, identity))
        yield copy
