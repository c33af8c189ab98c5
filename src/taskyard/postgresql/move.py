"""Move a state between a state directory with SQLite and a database.

Both sides are locked until the end, so no broker runs. The copy is one transaction of the database,
read back and compared with the chain before its commit. Blobs are copied between stores of blobs,
each compared with its name, and removed at the source at the end, unless they have a directory of
their own. A state directory has the file `store` while its journal is, or may be, in the database:
SQLite does not open such a directory. So a move that is killed at any point leaves at most one side
that can be opened, and can be run again.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import psycopg

from taskyard.errors import JournalDamaged, StoreInUse, UnusableState, UnusableStore
from taskyard.journal import chain, schema, sqlite, state_check, witness
from taskyard.journal.archive import Archive
from taskyard.journal.blob_files import BlobFiles, StoreTerms
from taskyard.journal.blobs import FOLDER, BlobId, BlobStore, StreamKey, upload_of
from taskyard.journal.chain import Head
from taskyard.journal.files import link_directory, replace_private, sync_directory
from taskyard.journal.lock import StateLock
from taskyard.journal.sqlite import JournalReader
from taskyard.journal.store import LEASE_NS
from taskyard.net.keyring import DIRECTORY_NAME
from taskyard.postgresql import blobs, database, exports, keys, leader, outbox
from taskyard.postgresql.blobs import BlobRows, BlobTables
from taskyard.postgresql.database import Connection
from taskyard.postgresql.leader import Term
from taskyard.postgresql.store import read_rows

#: Keeps every other broker out until the transaction ends.
_LOCK: Final = (
    "SELECT FROM taskyard.leader WHERE epoch = %(epoch)s AND holder = %(holder)s FOR UPDATE"
)
_CHAIN: Final = "SELECT chain FROM taskyard.journal WHERE sequence = %s"
_IS_EMPTY: Final = (
    "SELECT NOT EXISTS (SELECT FROM taskyard.journal) "
    "AND NOT EXISTS (SELECT FROM taskyard.blobs WHERE kind = 'file')"
)
_COUNT: Final = "SELECT count(*) FROM taskyard.ended"
_COVER: Final = "INSERT INTO taskyard.meta VALUES ('covered', %b)"

_RUN_AGAIN: Final = "nothing was changed at the source"


def to_database(state: Path, url: str, directory: Path | None) -> Head:
    """Move the journal of a state directory to an empty database. Return its newest row.

    Blobs stay in a `directory` of their own. Without one, they move, too.
    """
    if not state.is_dir():
        raise UnusableState(f"state directory {state}: does not exist")
    if not (state / schema.FILE_NAME).exists():
        raise UnusableState(f"state directory {state}: has no journal in SQLite")
    own = state / FOLDER
    with StateLock(state):
        known = _known(state, url)
        _check_sound(state)
        with sqlite.open_stopped(state) as source, _held(url) as (connection, term):
            head = source.head
            is_copied = _is_copied(connection, url, source, known)
            if directory is not None:
                link_directory(own, directory.absolute())
            replace_private(state / schema.DATABASE_NAME, url.encode())
            try:
                if not is_copied:
                    _fill(connection, state, source, term)
                    blobs.note_location(connection, term, directory)
                    keys.adopt(connection, state / DIRECTORY_NAME)
                    if directory is None:
                        _copy_blobs(BlobFiles(own), BlobRows(BlobTables(connection, term)))
                    _verify(connection, state, source)
            except BaseException:
                if not is_copied:
                    (state / schema.DATABASE_NAME).unlink()
                raise
        if directory is None:
            shutil.rmtree(own, ignore_errors=True)
        sqlite.remove(state)
    return head


def to_directory(url: str, state: Path, directory: Path | None) -> Head:
    """Move the journal of a database to a new state directory, or to that of its broker.

    The database has an empty journal then. Returns the newest row.
    """
    own = state / FOLDER
    with StateLock(state):
        known = _known(state, url)
        if not known and state_check.has_journal(state):
            raise UnusableState(f"state directory {state}: has a journal (use another one)")
        with _held(url) as (connection, term):
            if not _is_back(connection, state):
                _check_outbox(connection, url)
                blobs.check_location(connection, state, directory)
                identity, _ = database.read_anchor(connection)
                _fetch(connection, url, state)
                if directory is None:
                    local = BlobFiles(own)
                    local.create(StoreTerms(identity.hex()))
                    _copy_blobs(BlobRows(BlobTables(connection, term)), local)
                else:
                    link_directory(own, directory.absolute())
                keys.copy_to(connection, state / DIRECTORY_NAME)
                keys.clear(connection)
                database.clear(connection)
        _, _, head = sqlite.read_verified(state)
        (state / schema.DATABASE_NAME).unlink()
        sync_directory(state)
    return head


def _copy_blobs(source: BlobStore, target: BlobStore) -> None:
    """Copy all blobs and streams, unless they are there. Equal names have equal contents.

    Raises `JournalDamaged` for a blob whose content is not that of its name.
    """
    for blob, bytes_total, _ in source.walk():
        if isinstance(blob, StreamKey):
            if target.length(blob) < bytes_total:
                _copy_stream(source, blob, target, blob)
        elif not target.touch(blob):
            _copy_stream(source, blob, target, upload_of(blob))
            if not target.seal(upload_of(blob), blob):
                raise JournalDamaged(f"blob {blob} is damaged", f"{_RUN_AGAIN} (remove it)")
    source.close()
    target.close()
    os.sync()  # streams are not durable yet


def _copy_stream(source: BlobStore, blob: BlobId, target: BlobStore, key: StreamKey) -> None:
    target.drop(key)
    target.flush()
    offset = 0
    while (found := source.read(blob, offset, blobs.PART_BYTES)) and found[0]:
        offset = target.append(key, offset, found[0])
        target.flush()


def _check_outbox(connection: Connection, url: str) -> None:
    """Refuse to leave tasks behind. SQLite has no outbox."""
    if any(outbox.count(connection)):
        raise UnusableStore(
            f"{database.describe(url)}: its outbox is not empty (start its broker to submit the "
            "tasks, and see `taskyard store init --outbox`)"
        )


def _known(state: Path, url: str) -> str:
    """Return the URL in a state directory, if any. Raises if it is another URL."""
    known = schema.database_url(state)
    if known not in ("", url):
        raise UnusableState(f"state directory {state}: its journal is in {known}")
    return known


def _check_sound(state: Path) -> None:
    found = state_check.check(state, deep=True)
    if found.wrong:
        raise JournalDamaged(
            f"the state in {state} is damaged: {'; '.join(found.wrong)}",
            f"{'; '.join(found.lost)} ({_RUN_AGAIN})",
        )


@contextmanager
def _held(url: str) -> Iterator[tuple[Connection, Term]]:
    """Take the journal as a broker does, and open a transaction that keeps other brokers out."""
    with database.open_store(url) as connection:
        term = leader.acquire(connection, LEASE_NS)
        try:
            with connection.transaction():
                if connection.execute(_LOCK, term._asdict()).rowcount != 1:
                    raise StoreInUse("the store is in use by a broker (stop it first)")
                yield connection, term
        finally:
            with suppress(psycopg.Error):  # it ends with its lease
                leader.release(connection, term)


def _is_empty(connection: Connection) -> bool:
    _, anchor = database.read_anchor(connection)
    return anchor.sequence == 0 and bool(connection.execute(_IS_EMPTY).fetchall()[0][0])


def _is_copied(connection: Connection, url: str, source: JournalReader, known: str) -> bool:
    """Return whether an earlier move has copied the source. Raises unless there is room for it."""
    identity, anchor = database.read_anchor(connection)
    if identity == source.identity and known:
        head = source.head
        found = connection.execute(_CHAIN, (head.sequence,), binary=True).fetchall()
        if found == [(head.chain,)] or anchor.sequence >= head.sequence:
            return True
    if identity == source.identity or not _is_empty(connection):
        which = "this" if identity == source.identity else "another"
        raise UnusableStore(
            f"{database.describe(url)}: has {which} journal already (use an empty database)"
        )
    return False


def _is_back(connection: Connection, state: Path) -> bool:
    """Return whether an earlier move has copied the journal here, and emptied the database."""
    witnessed = witness.read(state)
    identity, _ = database.read_anchor(connection)
    if witnessed is None or witnessed[0] == identity:
        return False
    if _is_empty(connection) and (state / schema.FILE_NAME).exists():
        return True
    raise UnusableState(f"state directory {state}: belongs to another journal (use another one)")


def _fill(connection: Connection, state: Path, source: JournalReader, term: Term) -> None:
    """Write all tables."""
    database.clear(connection, chain.seal(source.identity, source.anchor))
    rows = (
        (row.sequence, row.record_first, row.record_last, term.epoch, row.chain, row.body)
        for row in source.rows()
    )
    database.copy_rows(connection, "journal", rows)
    for path in exports.local_files(state):
        exports.upload(connection, state, path, term)
    with Archive(state) as index:
        covered = index.covered()
        if covered is not None:
            connection.execute(_COVER, (chain.seal(*covered),))
            database.copy_rows(connection, "ended", index.walk())


def _verify(connection: Connection, state: Path, source: JournalReader) -> None:
    """Read back what was written: the chain, the digests of files, the number of ended tasks."""
    _, anchor = database.read_anchor(connection)
    head = anchor
    rows = read_rows(partial(database.select, connection), anchor.sequence)
    for row in chain.verify(rows, anchor, source.head):
        head = row.head
    for claimed in exports.claims(connection).items():
        exports.run(exports.read(connection, *claimed))
    with Archive(state) as index:
        count = sum(1 for _ in index.walk())
    if (head, [(count,)]) != (source.head, connection.execute(_COUNT).fetchall()):
        raise JournalDamaged("the copy in the database differs from its source", _RUN_AGAIN)


def _fetch(connection: Connection, url: str, state: Path) -> None:
    """Make a whole state directory of the tables, and check it as SQLite's."""
    witnessed = witness.read(state)
    replace_private(state / schema.DATABASE_NAME, url.encode())
    exports.write_copy(connection, state, witnessed[1] if witnessed else None)
    _check_sound(state)
