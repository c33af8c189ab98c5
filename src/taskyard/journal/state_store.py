"""The store of a state directory: in SQLite, or in PostgreSQL, which is an extra."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from taskyard.errors import JournalDamaged, NotInstalled
from taskyard.journal import compaction, schema
from taskyard.journal.chain import Head
from taskyard.journal.compaction import CompactionResult, Progress, no_progress
from taskyard.journal.reader import JournalReader
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import StoreReader


def open_reader(directory: Path, identity: bytes, head: Head) -> StoreReader:
    """Open the journal of a state directory that another process writes, as of one of its rows."""
    url = schema.database_url(directory)
    if not url:
        return JournalReader(directory, identity, head)
    with _needs_extra(directory):
        from taskyard.journal.postgres.store import PostgresReader  # noqa: PLC0415  # an extra
    return PostgresReader(url, identity, head)


@contextmanager
def in_sqlite(directory: Path) -> Iterator[Path]:
    """Return a state directory with its journal in SQLite: this one, or a temporary copy.

    Raises `JournalDamaged` if a store in PostgreSQL is damaged, or lacks a row that the witness of
    this directory has.
    """
    url = schema.database_url(directory)
    if not url:
        yield directory
        return
    with _needs_extra(directory):
        from taskyard.journal.postgres import local_copy  # noqa: PLC0415  # an extra
    with local_copy.temporary(url, directory) as copy:
        yield copy


def compact_stopped(
    directory: Path, progress: Progress = no_progress, *, trims: bool = True
) -> CompactionResult:
    """Compact the journal of a state directory without a broker. Without `trims`, keep all rows.

    The caller has locked the directory. Raises `StoreInUse` if a broker elsewhere uses the store.
    """
    url = schema.database_url(directory)
    if url:
        with _needs_extra(directory):
            from taskyard.journal.postgres import exports  # noqa: PLC0415  # an extra
        return exports.compact_stopped(url, directory, progress, trims=trims)
    if not (directory / schema.FILE_NAME).exists():  # a new one would make the state look empty
        raise JournalDamaged(
            f"{schema.FILE_NAME} is missing in {directory}",
            "rows that no snapshot covers are lost (restore the file from a backup)",
        )
    with closing(SqliteStore(directory)) as store:
        return (compaction.compact if trims else compaction.export)(directory, store, progress)


@contextmanager
def _needs_extra(directory: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise NotInstalled(
            f"{directory}: its journal in PostgreSQL needs {error.name} "
            "(`pip install 'taskyard[postgres]'`)"
        ) from error
