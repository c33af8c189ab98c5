"""The journal of a state directory that a broker writes, in SQLite or in PostgreSQL."""

from pathlib import Path

from taskyard.errors import NotInstalled
from taskyard.journal import schema
from taskyard.journal.chain import Head
from taskyard.journal.reader import JournalReader, VerifiedRows


def open_reader(directory: Path, identity: bytes, head: Head) -> VerifiedRows:
    """Open the journal of a state directory that another process writes, as of one of its rows."""
    url = schema.database_url(directory)
    if not url:
        return JournalReader(directory, identity, head)
    try:
        from taskyard.journal.postgres.store import PostgresReader  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise NotInstalled(
            f"{directory}: its journal in PostgreSQL needs {error.name} "
            "(`pip install 'taskyard[postgres]'`)"
        ) from error
    return PostgresReader(url, identity, head)
