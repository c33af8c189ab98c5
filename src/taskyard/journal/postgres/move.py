"""Move a state between a state directory with SQLite and a database.

Both sides are locked until the end, so no broker runs. The copy is one transaction of the database,
read back and compared with the chain before its commit. A state directory has the file `store`
while its journal is, or may be, in the database: SQLite does not open one then. So a move that is
killed at any point leaves at most one side that can be opened, and can be run again.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import psycopg

from taskyard.errors import JournalDamaged, StoreInUse, UnusableState, UnusableStore
from taskyard.journal import chain, schema, sqlite, state_check, witness
from taskyard.journal.archive import Archive
from taskyard.journal.chain import Head
from taskyard.journal.files import (
    link_directory,
    make_private_directory,
    replace_private,
    sync_directory,
)
from taskyard.journal.lock import StateLock
from taskyard.journal.postgres import (
    blobs,
    database,
    exports,
    key_table,
    leader,
    local_copy,
    outbox,
    shared_directory,
)
from taskyard.journal.postgres.blobs import BlobTables, StoredBlob
from taskyard.journal.postgres.database import Connection
from taskyard.journal.postgres.leader import Term
from taskyard.journal.readonly import ReadonlyStore
from taskyard.journal.store import LEASE_NS

#: Keeps every other broker out until the transaction ends.
_LOCK: Final = (
    "SELECT FROM taskyard.leader WHERE epoch = %(epoch)s AND holder = %(holder)s FOR UPDATE"
)
_CHAIN: Final = "SELECT chain FROM taskyard.journal WHERE sequence = %s"
_IS_EMPTY: Final = (
    "SELECT NOT EXISTS (SELECT FROM taskyard.journal) AND NOT EXISTS (SELECT FROM taskyard.claims)"
)
_COUNT: Final = "SELECT count(*) FROM taskyard.ended"
_COVER: Final = "INSERT INTO taskyard.meta VALUES ('covered', %b)"

_RUN_AGAIN: Final = "nothing was changed at the source"


class LocalBlob(NamedTuple):
    """A blob or a stream in a state directory."""

    kind: str
    name: bytes
    path: Path
    used_ns: int


class LocalFiles(Protocol):
    """Blobs in a state directory."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the names of their directories."""

    @property
    def keys_folder(self) -> str:
        """Return the name of the directory of keys."""

    def walk(self, state: Path) -> Iterator[LocalBlob]:
        """Yield all files."""

    def write(self, state: Path, kind: str, blob: StoredBlob, contents: Iterable[bytes]) -> None:
        """Write a file."""


class Files(NamedTuple):
    """Where a store in PostgreSQL has blobs, and how a state directory has them."""

    #: None: in the database.
    directory: Path | None
    local: LocalFiles

    @property
    def place(self) -> str:
        return blobs.DATABASE if self.directory is None else blobs.DIRECTORY

    def pairs(self, state: Path) -> Iterator[tuple[Path, Path]]:
        """Yield each directory in the state directory, and the one that it is moved to."""
        if self.directory is not None:
            for name in self.local.folders:
                yield state / name, self.directory.absolute() / name


def to_database(state: Path, url: str, files: Files) -> Head:
    """Move the journal of a state directory to an empty database. Return its newest row."""
    if not state.is_dir():
        raise UnusableState(f"state directory {state}: does not exist")
    if not (state / schema.FILE_NAME).exists():
        raise UnusableState(f"state directory {state}: has no journal in SQLite")
    with StateLock(state):
        known = _known(state, url)
        _check_sound(state)
        for own, shared in files.pairs(state):
            _check_free(own, shared)
        with closing(ReadonlyStore(state)) as source, _held(url) as (connection, term):
            head = source.head
            if not _is_copied(connection, url, source, known):
                replace_private(state / schema.DATABASE_NAME, url.encode())
                try:
                    _fill(connection, state, source, term)
                    blobs.note_place(connection, term, files.place)
                    key_table.adopt(connection, state / files.local.keys_folder)
                    if files.directory is None:
                        _fill_blobs(connection, state, files.local, term)
                    _verify(connection, state, source)
                    _relocate_all(state, files)
                except BaseException:
                    (state / schema.DATABASE_NAME).unlink()
                    raise
        _relocate_all(state, files)
        if files.directory is None:
            for name in files.local.folders:
                shutil.rmtree(state / name, ignore_errors=True)
        sqlite.remove(state)
    return head


def to_directory(url: str, state: Path, files: Files) -> Head:
    """Move the journal of a database to a new state directory, or to one that was its broker's.

    The database has an empty journal then. Returns the newest row.
    """
    with StateLock(state):
        known = _known(state, url)
        if not known and state_check.has_journal(state):
            raise UnusableState(f"state directory {state}: has a journal (use another one)")
        for own, shared in files.pairs(state):
            _check_free(shared, own)
        with _held(url) as (connection, _):
            if not _is_back(connection, state):
                _check_outbox(connection, url)
                _check_place(connection, files)
                _fetch(connection, url, state, files)
                if files.directory is None:
                    _fetch_blobs(connection, state, files.local)
                key_table.copy_to(connection, state / files.local.keys_folder)
                key_table.clear(connection)
                database.clear(connection)
        for own, shared in files.pairs(state):
            _relocate(shared, own)
        if files.directory is not None:
            shared_directory.clear(files.directory)
        _, _, head = sqlite.read_verified(state)
        (state / schema.DATABASE_NAME).unlink()
        sync_directory(state)
    return head


def _check_outbox(connection: Connection, url: str) -> None:
    """Refuse to leave tasks behind. SQLite has no outbox."""
    if any(outbox.count(connection)):
        raise UnusableStore(
            f"{database.describe(url)}: its outbox is not empty (start its broker to submit the "
            "tasks, and see `taskyard store outbox`)"
        )


def _known(state: Path, url: str) -> str:
    """Return the URL in a state directory, if any. Raises if it is another one."""
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
    """Take the journal as a broker does, and open a transaction that keeps others out."""
    with database.open_database(url) as connection, database.usable(url):
        database.check_tables(connection)
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


def _is_copied(connection: Connection, url: str, source: ReadonlyStore, known: str) -> bool:
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


def _fill(connection: Connection, state: Path, source: ReadonlyStore, term: Term) -> None:
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


def _verify(connection: Connection, state: Path, source: ReadonlyStore) -> None:
    """Read back what was written: the chain, the digests of files, the number of ended tasks."""
    _, anchor = database.read_anchor(connection)
    head = anchor
    for row in chain.verify(local_copy.rows(connection, anchor), anchor, source.head):
        head = row.head
    for claim in exports.claims(connection):
        for _ in exports.read(connection, claim):
            pass
    with Archive(state) as index:
        count = sum(1 for _ in index.walk())
    if (head, [(count,)]) != (source.head, connection.execute(_COUNT).fetchall()):
        raise JournalDamaged("the copy in the database differs from its source", _RUN_AGAIN)


def _fetch(connection: Connection, url: str, state: Path, files: Files) -> None:
    """Make a whole state directory of the tables, and check it as SQLite's."""
    witnessed = witness.read(state)
    replace_private(state / schema.DATABASE_NAME, url.encode())
    local_copy.write(connection, state, witnessed[1] if witnessed else None, files.directory)
    _check_sound(state)


def _check_place(connection: Connection, files: Files) -> None:
    """Refuse another place of blobs than that of the store."""
    if blobs.known_place(connection) not in ("", files.place):
        hint = "give their directory with" if files.directory is None else "leave out"
        raise UnusableStore(f"blobs of the store are elsewhere ({hint} --files)")


def _fill_blobs(connection: Connection, state: Path, local: LocalFiles, term: Term) -> None:
    """Copy blobs, and compare the copies."""
    tables = BlobTables(connection, term)
    for kind, name, path, used_ns in local.walk(state):
        written, found = hashlib.sha256(), hashlib.sha256()
        with path.open("rb") as file:
            parts = iter(partial(file.read, blobs.PART_BYTES), b"")
            tables.put(kind, name, _digested(parts, written), used_ns)
        for content in tables.contents(kind, name):
            found.update(content)
        if found.digest() != written.digest():
            raise JournalDamaged(f"{path}: its copy in the database differs", _RUN_AGAIN)


def _digested(contents: Iterable[bytes], digest: "hashlib._Hash") -> Iterator[bytes]:
    for content in contents:
        digest.update(content)
        yield content


def _fetch_blobs(connection: Connection, state: Path, local: LocalFiles) -> None:
    """Write blobs to a state directory."""
    tables = BlobTables(connection, Term(0, ""))
    for kind in blobs.KINDS:
        for blob in tables.walk(kind):
            local.write(state, kind, blob, tables.contents(kind, blob.name))


def _check_free(source: Path, target: Path) -> None:
    """Refuse a directory in the way of another one."""
    is_own = source.is_dir() and not source.is_symlink()
    if is_own and not target.is_symlink() and target.is_dir() and any(target.iterdir()):
        raise UnusableState(f"{target}: in the way of {source} (move it away)")


def _relocate_all(state: Path, files: Files) -> None:
    for own, shared in files.pairs(state):
        _relocate(own, shared)
        link_directory(own, shared)


def _relocate(source: Path, target: Path) -> None:
    """Move a directory, also to another disk. A link or an empty directory is replaced."""
    done = source.with_name(f"{source.name}.moved")
    if done.exists() and not target.exists():
        done.rename(source)
    if source.is_dir() and not source.is_symlink():
        make_private_directory(target.parent)
        if target.is_symlink():
            target.unlink()
        elif target.exists():
            target.rmdir()
        try:
            source.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy_directory(source, target, done)
        sync_directory(source.parent)
        sync_directory(target.parent)
    if done.exists():
        shutil.rmtree(done)


def _copy_directory(source: Path, target: Path, done: Path) -> None:
    """Copy a directory to another disk, and give the source the name `done`."""
    unfinished = target.with_name(f"{target.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, symlinks=True)
    os.sync()
    source.rename(done)
    unfinished.rename(target)
