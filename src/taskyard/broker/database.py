"""Open the state of a broker on PostgreSQL: lease, journal, local copies, shared files.

Imports the extra `postgres` only when such a state is opened. The state directory keeps the lock,
the socket, the witness and copies of what the tables hold. Output and values are in a directory
that outlives this machine, and the state directory has links to it.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, Protocol

from taskyard.broker import output_store
from taskyard.errors import NotInstalled, UnusableState, UnusableStore
from taskyard.journal import schema, state_check, value_files
from taskyard.journal.compaction import DatabaseTerm
from taskyard.journal.files import link_directory, replace_private

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from taskyard.journal.postgres.lease import Lease
    from taskyard.journal.postgres.store import PostgresStore


class OpenDatabase(NamedTuple):
    """A journal in PostgreSQL that this broker leads."""

    store: PostgresStore
    lease: Lease
    #: For compactions.
    term: DatabaseTerm


class DatabaseSettings(Protocol):
    """The settings of a broker that concern its database."""

    @property
    def state(self) -> Path: ...
    @property
    def store(self) -> str: ...
    @property
    def files(self) -> Path | None: ...
    @property
    def store_lease_ns(self) -> int: ...


def open_database(settings: DatabaseSettings, stack: ExitStack) -> OpenDatabase:
    """Take over the journal, and make the state directory equal to the tables."""
    url, state, files = settings.store, settings.state, settings.files
    try:
        from taskyard.journal.postgres import database, exports, last_term  # noqa: PLC0415  # extra
        from taskyard.journal.postgres.lease import Lease  # noqa: PLC0415
        from taskyard.journal.postgres.store import PostgresStore  # noqa: PLC0415
    except ImportError as error:
        raise NotInstalled(
            f"store: needs {error.name} (`pip install 'taskyard[postgres]'`)"
        ) from error
    if files is None:
        raise UnusableStore(
            f"{database.describe(url)}: no directory for output and values (give one that "
            "outlives this machine with --files)"
        )
    if not schema.database_url(state) and state_check.has_journal(state):
        # Files that the tables do not have would be removed.
        raise UnusableState(
            f"state directory {state}: has files of a journal in SQLite (use another --state)"
        )
    for name in (output_store.FOLDER, value_files.FOLDER):
        link_directory(state / name, files.absolute() / name)
    last_term.end(state, url)
    lease = stack.enter_context(Lease(url, settings.store_lease_ns))
    last_term.write(state, lease.term)
    replace_private(state / schema.DATABASE_NAME, url.encode())
    store = stack.enter_context(closing(PostgresStore(url, state, lease.term)))
    store.reconnect_seconds_max = max(store.reconnect_seconds_max, settings.store_lease_ns / 1e9)
    lease.on_lost = store.interrupt
    with database.open_database(url) as connection:
        exports.fetch(connection, state, store.identity)
    return OpenDatabase(store, lease, DatabaseTerm(url, *lease.term))
