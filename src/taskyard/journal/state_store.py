"""The store of a state directory: in SQLite, or in PostgreSQL, which is an extra."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from taskyard.errors import NotInstalled
from taskyard.journal import schema
from taskyard.journal.chain import Head
from taskyard.journal.compaction import CompactionResult, Progress, no_progress
from taskyard.journal.reader import JournalReader, VerifiedRows


def open_reader(directory: Path, identity: bytes, head: Head) -> VerifiedRows:
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


def export_stopped(
    directory: Path, progress: Progress = no_progress, *, trims: bool = False
) -> CompactionResult:
    """Export the journal of a state directory in PostgreSQL, and trim it if wanted.

    The caller has locked the directory. Raises `StoreInUse` if a broker elsewhere uses the store.
    """
    with _needs_extra(directory):
        from taskyard.journal.postgres import exports  # noqa: PLC0415  # an extra
    url = schema.database_url(directory)
    return exports.export_stopped(url, directory, progress, trims=trims)


@contextmanager
def _needs_extra(directory: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise NotInstalled(
            f"{directory}: its journal in PostgreSQL needs {error.name} "
            "(`pip install 'taskyard[postgres]'`)"
        ) from error
