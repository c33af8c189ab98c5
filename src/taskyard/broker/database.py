"""Open the state of a broker on PostgreSQL: lease, journal, local copies, blobs.

Imports the extra `postgres` only when such a state is opened. The state directory keeps the lock,
the socket, the witness and copies of what the tables hold. Blobs are in the database, or in a
directory that outlives this machine. The state directory has a link to that.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from taskyard.broker.archive import recover
from taskyard.errors import (
    JournalDamaged,
    LeaderLost,
    NotInstalled,
    UnusableState,
    UnusableStore,
)
from taskyard.journal import blobs, schema, state_check
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.compaction import DatabaseTerm
from taskyard.journal.files import link_directory, replace_private
from taskyard.net import endpoints
from taskyard.net.keyring import Keyring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack

    from taskyard.broker.archive import EndedTasks
    from taskyard.broker.broker_settings import BrokerSettings
    from taskyard.broker.outbox_feed import OutboxFeed
    from taskyard.broker.standby import Standby, WarmState
    from taskyard.journal.blobs import BlobStore
    from taskyard.journal.postgres.lease import Lease
    from taskyard.journal.postgres.store import PostgresStore


class OpenDatabase(NamedTuple):
    """A journal in PostgreSQL that this broker leads."""

    store: PostgresStore
    lease: Lease
    #: For compactions.
    term: DatabaseTerm
    #: Has the ledger, too.
    archive: EndedTasks
    #: None: they are in a directory.
    blobs: BlobStore | None = None


def keyring_of(state: Path, url: str) -> Keyring:
    """Return the keys of a state directory, or of the store at a URL."""
    if not url:
        return Keyring(state)
    _check_state(state)
    with _needs_extra():
        from taskyard.broker.key_store import StoreKeyring  # noqa: PLC0415  # an extra
    return StoreKeyring(state, url)


def open_standby(settings: BrokerSettings, announce: Callable[[str], None]) -> Standby:
    """Return a standby of the journal that is not started yet."""
    with _needs_extra():
        from taskyard.broker.standby import Standby  # noqa: PLC0415  # an extra
        from taskyard.journal.postgres import last_term  # noqa: PLC0415
    with _opening(settings.store):
        _prepare(settings)
        last_term.end(settings.state, settings.store)
        made = Standby(settings, announce)
    replace_private(settings.state / schema.DATABASE_NAME, settings.store.encode())
    return made


def open_database(
    settings: BrokerSettings, stack: ExitStack, warm: WarmState | None = None
) -> OpenDatabase:
    """Take over the journal, and make the state directory equal to the tables.

    A `warm` state has done both. A connection that is lost then ends its term: `LeaderLost`.
    """
    try:
        with _opening(settings.store):
            return _with_files(settings, stack, _take_over(settings, stack, warm))
    except UnusableStore as error:
        if warm is None or error.__cause__ is None:
            raise
        raise LeaderLost(f"{error}, so epoch {warm.lease.term.epoch} ends") from error


def _take_over(settings: BrokerSettings, stack: ExitStack, warm: WarmState | None) -> OpenDatabase:
    with _needs_extra():
        from taskyard.journal.postgres import database, exports, last_term  # noqa: PLC0415  # extra
        from taskyard.journal.postgres.lease import Lease  # noqa: PLC0415
        from taskyard.journal.postgres.store import PostgresStore  # noqa: PLC0415
    url, state = settings.store, settings.state
    verified = None
    if warm is None:
        _prepare(settings)
        last_term.end(state, url)
        lease = stack.enter_context(Lease(url, settings.store_lease_ns))
        replace_private(state / schema.DATABASE_NAME, url.encode())
    else:
        lease, verified = stack.enter_context(warm.lease), warm.head
    last_term.write(state, lease.term)
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


def _with_files(settings: BrokerSettings, stack: ExitStack, opened: OpenDatabase) -> OpenDatabase:
    """Copy the keys from now on, and open the blobs if they are in the database."""
    from taskyard.broker import database_files, key_store  # noqa: PLC0415  # an extra
    from taskyard.journal.postgres import database  # noqa: PLC0415
    from taskyard.journal.postgres.blobs import BlobRows  # noqa: PLC0415

    store, lease, url, state = opened.store, opened.lease, settings.store, settings.state
    copy = key_store.KeyCopy(state)
    with database.open_database(url) as connection:
        copy.poll(connection)
    lease.on_renewed = copy.poll
    tables = database_files.open_blobs(url, settings.blobs_directory, lease.term)
    if tables is None:
        return opened
    tables.reconnect_seconds_max = store.reconnect_seconds_max
    stack.enter_context(closing(tables))

    def interrupt() -> None:
        store.interrupt()
        tables.interrupt()

    lease.on_lost = interrupt
    return opened._replace(blobs=BlobRows(tables))


@contextmanager
def _opening(url: str) -> Iterator[None]:
    """Raise `UnusableStore` if the connection is lost while a broker starts."""
    with _needs_extra():
        from taskyard.journal.postgres import database  # noqa: PLC0415  # an extra
    with database.usable(url):
        yield


@contextmanager
def _needs_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise NotInstalled(
            f"store: needs {error.name} (`pip install 'taskyard[postgres]'`)"
        ) from error


def _check_state(state: Path) -> None:
    """Refuse a state in SQLite. Files that the tables do not have would be removed."""
    if not schema.database_url(state) and state_check.has_journal(state):
        raise UnusableState(
            f"state directory {state}: has files of a journal in SQLite (use another --state)"
        )


def _prepare(settings: BrokerSettings) -> None:
    """Check the directories, and link that of blobs."""
    state, directory = settings.state, settings.blobs_directory
    _check_state(state)
    with _needs_extra():
        from taskyard.broker import database_files  # noqa: PLC0415  # an extra
    database_files.check_place(settings.store, state, directory)
    if directory is not None:
        link_directory(state / blobs.FOLDER, directory.absolute())


def outbox_feed(settings: BrokerSettings, lease: Lease) -> OutboxFeed:
    """Return the feed of a broker that leads and listens."""
    from taskyard.broker.outbox_feed import OutboxFeed  # noqa: PLC0415  # an extra

    return OutboxFeed(settings.store, lease.term, endpoints.native_endpoint(settings.state))


def open_blobs(state: Path, directory: Path | None = None) -> BlobStore:
    """Open the blobs of a state beside its broker, or without one.

    `directory` is that of the settings. Removals in a database count only while the broker that
    runs now has its term.
    """
    url = schema.database_url(state)
    if url and directory is None:
        with _needs_extra():
            from taskyard.broker import database_files  # noqa: PLC0415  # an extra
        rows = database_files.open_beside(url)
        if rows is not None:
            return rows
    return BlobFiles(directory or state / blobs.FOLDER)
