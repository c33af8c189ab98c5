"""Open the state of a broker on PostgreSQL: lease, journal, local copies, blobs.

The state directory keeps the lock, the socket, the witness and copies of what the tables hold.
Blobs are in the database, or in a directory that outlives this machine. The state directory has a
link to that. `journal.state_store` names the functions for states without a broker.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from taskyard.errors import JournalDamaged, LeaderLost, UnusableState, UnusableStore
from taskyard.journal import schema, state_check
from taskyard.journal.blobs import FOLDER
from taskyard.journal.compaction import DatabaseTerm
from taskyard.journal.ended_tasks import recover
from taskyard.journal.files import link_directory, replace_private
from taskyard.net import endpoints
from taskyard.postgresql import blobs, database, exports, leader
from taskyard.postgresql.blobs import BlobRows, open_beside
from taskyard.postgresql.exports import compact, compact_stopped, temporary_copy
from taskyard.postgresql.keys import KeyCopy, StoreKeyring
from taskyard.postgresql.lease import Lease
from taskyard.postgresql.outbox import OutboxFeed
from taskyard.postgresql.standby import Standby
from taskyard.postgresql.store import PostgresReader, PostgresStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from taskyard.journal.blobs import BlobStore
    from taskyard.journal.ended_tasks import EndedTasks
    from taskyard.journal.state_store import StoreSettings
    from taskyard.net.keyring import Keyring
    from taskyard.postgresql.standby import WarmState

__all__ = [
    "OpenDatabase",
    "compact",
    "compact_stopped",
    "keyring_of",
    "open_beside",
    "open_database",
    "open_reader",
    "open_standby",
    "outbox_feed",
    "temporary_copy",
]

#: See `journal.state_store.Driver`.
open_reader = PostgresReader


class OpenDatabase(NamedTuple):
    """A journal in PostgreSQL that this broker leads."""

    store: PostgresStore
    lease: Lease
    #: For compactions.
    term: DatabaseTerm
    #: Has the ledger, too.
    archive: EndedTasks
    #: None if they are in a directory.
    blobs: BlobStore | None = None


def keyring_of(state: Path, url: str) -> Keyring:
    """Return the keys of the store at a URL, with a copy in a state directory."""
    _check_state(state)
    return StoreKeyring(state, url)


def open_standby(settings: StoreSettings, announce: Callable[[str], None]) -> Standby:
    """Return a standby of the journal that is not started yet."""
    with database.usable(settings.store):
        _prepare(settings)
        leader.end_last_term(settings.state, settings.store)
        made = Standby(settings, announce)
    replace_private(settings.state / schema.DATABASE_NAME, settings.store.encode())
    return made


def open_database(
    settings: StoreSettings, stack: ExitStack, warm: WarmState | None = None
) -> OpenDatabase:
    """Take over the journal, and make the state directory equal to the tables.

    A `warm` state has done both. A connection that is lost then ends its term: `LeaderLost`.
    """
    try:
        with database.usable(settings.store):
            return _with_files(settings, stack, _take_over(settings, stack, warm))
    except UnusableStore as error:
        if warm is None or error.__cause__ is None:
            raise
        raise LeaderLost(f"{error}, so epoch {warm.lease.term.epoch} ends") from error


def _take_over(settings: StoreSettings, stack: ExitStack, warm: WarmState | None) -> OpenDatabase:
    url, state = settings.store, settings.state
    verified = None
    if warm is None:
        _prepare(settings)
        leader.end_last_term(state, url)
        lease = stack.enter_context(Lease(url, settings.store_lease_ns))
        replace_private(state / schema.DATABASE_NAME, url.encode())
    else:
        lease, verified = stack.enter_context(warm.lease), warm.head
    leader.write_last_term(state, lease.term)
    with lease.checked_on_damage():
        store = stack.enter_context(closing(PostgresStore(url, state, lease.term, verified)))
        reconnect_seconds_max = max(store.reconnect_seconds_max, settings.store_lease_ns / 1e9)
        store.reconnect_seconds_max = reconnect_seconds_max
        lease.on_lost = store.interrupt
        with database.open_database(url) as connection:
            if warm is None:
                exports.run(exports.fetch(connection, state, store.identity, history=False))
            lacks_files = bool(exports.remove_others(connection, state))
        if warm is None:
            archive = recover(state, store)
        elif store.head == warm.head:
            archive = warm.archive
        else:
            raise JournalDamaged(
                f"{database.describe(url)}: rows after row {warm.head.sequence} were written "
                "during the takeover",
                "stop all brokers of this store, and start one",
            )
    return OpenDatabase(store, lease, DatabaseTerm(url, *lease.term, lacks_files), archive)


def _with_files(settings: StoreSettings, stack: ExitStack, opened: OpenDatabase) -> OpenDatabase:
    """Copy the keys from now on, and open the blobs if they are in the database."""
    store, lease, url, state = opened.store, opened.lease, settings.store, settings.state
    copy = KeyCopy(state)
    with database.open_database(url) as connection:
        copy.poll(connection)
    lease.on_renewed = copy.poll
    tables = blobs.open_blobs(url, settings.blobs_directory, lease.term)
    if tables is None:
        return opened
    tables.reconnect_seconds_max = store.reconnect_seconds_max
    stack.enter_context(closing(tables))

    def interrupt() -> None:
        store.interrupt()
        tables.interrupt()

    lease.on_lost = interrupt
    return opened._replace(blobs=BlobRows(tables))


def _check_state(state: Path) -> None:
    """Refuse a state in SQLite. Files that the tables do not have would be removed."""
    if not schema.database_url(state) and state_check.has_journal(state):
        raise UnusableState(
            f"state directory {state}: has files of a journal in SQLite (use another --state)"
        )


def _prepare(settings: StoreSettings) -> None:
    """Check the directories, and link that of blobs."""
    state, directory = settings.state, settings.blobs_directory
    _check_state(state)
    with database.open_store(settings.store) as connection:
        blobs.check_location(connection, state, directory)
    if directory is not None:
        link_directory(state / FOLDER, directory.absolute())


def outbox_feed(settings: StoreSettings, lease: Lease) -> OutboxFeed:
    """Return the feed of a broker that leads and listens."""
    return OutboxFeed(settings.store, lease.term, endpoints.native_endpoint(settings.state))
