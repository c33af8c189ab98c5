"""The store of a state directory: in SQLite, or in PostgreSQL, as its options or its files say.

`taskyard.postgresql` is above the journal, and needs an extra. It is imported here by its name, and
only for a state that is in PostgreSQL.
"""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Protocol, cast

import msgspec

from taskyard.errors import JournalDamaged
from taskyard.journal import blobs, compaction, schema
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import BlobStore
from taskyard.journal.chain import Head
from taskyard.journal.compaction import CompactionResult, DatabaseTerm, Progress, no_progress
from taskyard.journal.sqlite import JournalReader, SqliteStore
from taskyard.journal.store import LEASE_NS, StoreReader


class StoreSettings(msgspec.Struct, frozen=True):
    """The options of a broker that its store needs."""

    state: Path
    #: Endpoints besides the native socket: (listener, endpoint). A listener without a table has the
    #: name of its dialect.
    listen: tuple[tuple[str, str], ...] = ()
    #: Where blobs are, if neither in the state directory nor in PostgreSQL.
    blobs_directory: Path | None = None
    #: The URL of a journal in PostgreSQL. It is empty for SQLite, in the state directory.
    store: str = ""
    #: How long a broker of that journal may be silent before another takes over.
    store_lease_ns: int = LEASE_NS
    #: Follow the broker that has the journal, and take over when it ends.
    standby: bool = False
    #: Let another broker take over first: this broker has led in a term that is over.
    yields: bool = False


class Driver(Protocol):
    """The functions of `taskyard.postgresql.driver` for states without a broker."""

    def open_reader(self, url: str, identity: bytes, head: Head) -> StoreReader: ...

    def temporary_copy(self, url: str, state: Path) -> AbstractContextManager[Path]: ...

    def compact(
        self,
        described: DatabaseTerm,
        directory: Path,
        found: tuple[bytes, Head],
        progress: Progress,
    ) -> CompactionResult: ...

    def compact_stopped(
        self, url: str, directory: Path, progress: Progress, *, trims: bool
    ) -> CompactionResult: ...

    def open_beside(self, url: str) -> BlobStore | None: ...


def driver() -> Driver:
    """Return the module for stores in PostgreSQL. Raises `NotInstalled` without its extra."""
    return cast("Driver", importlib.import_module("taskyard.postgresql.driver"))


def open_reader(directory: Path, identity: bytes, head: Head) -> StoreReader:
    """Open the journal of a state directory that another process writes, as of one of its rows."""
    url = schema.database_url(directory)
    if url:
        return driver().open_reader(url, identity, head)
    return JournalReader(directory, identity, head)


@contextmanager
def in_sqlite(directory: Path) -> Iterator[Path]:
    """Return a state directory with its journal in SQLite: itself, or a temporary copy.

    Raises `JournalDamaged` if a store in PostgreSQL is damaged, or lacks a row that the witness of
    this directory has.
    """
    url = schema.database_url(directory)
    if not url:
        yield directory
        return
    with driver().temporary_copy(url, directory) as copy:
        yield copy


def open_blobs(state: Path, directory: Path | None = None) -> BlobStore:
    """Open the blobs of a state with or without its broker.

    `directory` is that of the settings. Removals in a database count only while the broker that
    runs now has its term.
    """
    url = schema.database_url(state)
    rows = driver().open_beside(url) if url and directory is None else None
    return rows or BlobFiles(directory or state / blobs.FOLDER)


def compact_stopped(
    directory: Path, progress: Progress = no_progress, *, trims: bool = True
) -> CompactionResult:
    """Compact the journal of a state directory without a broker. Without `trims`, keep all rows.

    The caller has locked the directory. Raises `StoreInUse` if a broker elsewhere uses the store.
    """
    url = schema.database_url(directory)
    if url:
        return driver().compact_stopped(url, directory, progress, trims=trims)
    if not (directory / schema.FILE_NAME).exists():  # a new file would make the state look empty
        raise JournalDamaged(
            f"{schema.FILE_NAME} is missing in {directory}",
            "rows that no snapshot covers are lost (restore the file from a backup)",
        )
    with closing(SqliteStore(directory)) as store:
        return (compaction.compact if trims else compaction.export)(directory, store, progress)
