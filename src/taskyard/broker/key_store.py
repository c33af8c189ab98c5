"""The keys of a broker on PostgreSQL: in a table, with a copy in each state directory.

All brokers of a store have the same secret, so a peer's key fits each of them. Commands change the
table, and the broker that runs copies it within a second or two. Needs the extra `postgres`, so it
is imported only by its users.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import psycopg

from taskyard.errors import UnusableKey, UserError
from taskyard.journal.postgres import database, key_table
from taskyard.net.keyring import DIRECTORY_NAME, Keyring

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.journal.postgres.database import Connection

logger = logging.getLogger("taskyard.broker")


class StoreKeyring(Keyring):
    """The keys of a store, for commands. Changes are in the table before they are in files."""

    def __init__(self, state: Path, url: str) -> None:
        """Copy the table to the state directory. Raises `UserError`."""
        super().__init__(state)
        self._url = url
        self._connection: Connection | None = None
        with self._opened() as connection, key_table.locked(connection):
            _fetch(connection, self.directory)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._opened() as connection, key_table.locked(connection):
            _fetch(connection, self.directory)
            self._connection = connection
            try:
                with super()._locked():
                    yield
            finally:
                self._connection = None

    def _write(self, path: Path, content: bytes) -> None:
        assert self._connection is not None  # noqa: S101 - called under the lock
        key_table.put(self._connection, path.name, content)
        super()._write(path, content)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Connection]:
        try:
            with database.open_database(self._url) as connection:
                database.check_tables(connection)
                yield connection
        except psycopg.Error as error:
            text = f"{database.describe(self._url)}: {database.text_of(error)}"
            raise UnusableKey(text) from error


def _fetch(connection: Connection, directory: Path) -> bytes:
    key_table.adopt(connection, directory)
    try:
        return key_table.copy_to(connection, directory)
    except OSError as error:
        raise UnusableKey(f"{directory}: can't write: {error.strerror}") from error


class KeyCopy:
    """Keeps the files of a state directory equal to the table."""

    def __init__(self, state: Path) -> None:
        self._directory = state / DIRECTORY_NAME
        self._version: bytes | None = None

    def poll(self, connection: Connection) -> None:
        """Copy the keys if they have changed. A failure is tried again with the next call."""
        if key_table.version(connection) == self._version:
            return
        try:
            self._version = key_table.copy_to(connection, self._directory)
        except (OSError, UserError) as error:
            logger.warning("%s: keys of the store not copied: %s", self._directory, error)
