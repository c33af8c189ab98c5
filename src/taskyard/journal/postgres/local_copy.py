"""A copy of a store as a state directory in SQLite, which everything can read that reads one.

Rows are verified by their chain while they are copied, files by their digests. Output and values
are not copied.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from taskyard.journal import chain, sqlite, witness
from taskyard.journal.chain import Head, Row
from taskyard.journal.postgres import database, exports
from taskyard.journal.postgres.database import Connection
from taskyard.journal.reader import READ_ROWS_MAX

_ROWS: Final = (
    "SELECT sequence, record_first, record_last, chain, body FROM taskyard.journal "
    "WHERE sequence > %s ORDER BY sequence"
)
_ONE_MOMENT: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"


def rows(connection: Connection, anchor: Head) -> Iterator[Row]:
    """Yield all rows, not verified. The connection is in a transaction.

    A row up to the anchor is one that a late statement has added again, see `PostgresRows`.
    """
    with connection.cursor("journal", binary=True) as cursor:
        cursor.itersize = READ_ROWS_MAX
        for columns in cursor.execute(_ROWS, (anchor.sequence,)):
            yield Row(*columns)


def write(connection: Connection, directory: Path, seen: Head | None = None) -> None:
    """Make a state directory of the tables, in a transaction. It must have the row `seen`."""
    identity, anchor = database.read_anchor(connection)
    exports.run(exports.fetch(connection, directory, identity))
    sqlite.write_copy(
        directory, identity, anchor, chain.verify(rows(connection, anchor), anchor, seen)
    )


@contextmanager
def temporary(url: str, state: Path) -> Iterator[Path]:
    """Copy the store of a state directory as of one moment, also beside its broker.

    The copy ends with the context. Raises `UnusableStore` if the witness of the directory is of
    another journal, and `JournalDamaged` if its row is missing.
    """
    witnessed = witness.read(state)
    with tempfile.TemporaryDirectory(prefix="taskyard-copy-") as directory:
        copy = Path(directory)
        with database.open_database(url) as connection, database.usable(url):
            database.check_tables(connection)
            with connection.transaction():
                connection.execute(_ONE_MOMENT)
                if witnessed is not None and witnessed[0] != database.read_anchor(connection)[0]:
                    raise database.other_journal(url, state)
                seen = None if witnessed is None else witnessed[1]
                write(connection, copy, seen)
        yield copy
