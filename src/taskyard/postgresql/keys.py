"""The keys of a store: the secret of its brokers, and an entry for each peer.

Each file of `keys/` in a state directory is a row. The table counts, and the files are copies. All
brokers of a store have the same secret, so a peer's key fits each of them. Commands change the
table, and the broker that runs copies it within a second or two. A random version changes with each
row, so that brokers notice it. Keys belong to no term. Knows nothing about the content of files.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from taskyard.errors import UnusableKey, UserError
from taskyard.journal.files import make_private_directory, replace_private
from taskyard.net.keyring import DIRECTORY_NAME, Keyring
from taskyard.postgresql import database
from taskyard.postgresql.database import Connection

#: The file with the secret of the brokers, which tells keyrings apart.
OWN_FILE: Final = "broker.key"

_FILE: Final = re.compile(r"[0-9A-Za-z_-]+\.(key|guest)", re.ASCII)

#: A single change at a time. The lock ends with the session.
_LOCK: Final = "SELECT pg_advisory_lock(hashtext('taskyard keys'))"
_UNLOCK: Final = "SELECT pg_advisory_unlock(hashtext('taskyard keys'))"
_READ: Final = "SELECT name, content FROM taskyard.keys"
_PUT: Final = (
    "WITH changed AS (INSERT INTO taskyard.meta VALUES ('keys', %(version)b) "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value) "
    "INSERT INTO taskyard.keys VALUES (%(name)s, %(content)b) "
    "ON CONFLICT (name) DO UPDATE SET content = excluded.content"
)
_CLEAR: Final = (
    "WITH changed AS (DELETE FROM taskyard.meta WHERE key = 'keys') DELETE FROM taskyard.keys"
)


logger = logging.getLogger("taskyard.broker")


@contextmanager
def locked(connection: Connection) -> Iterator[None]:
    """Keep other changes out."""
    connection.execute(_LOCK)
    try:
        yield
    finally:
        if not connection.closed:
            connection.execute(_UNLOCK)


def version(connection: Connection) -> bytes:
    """Return what changes with each key, empty without keys."""
    return database.read_meta(connection, "keys")


def read(connection: Connection) -> dict[str, bytes]:
    """Return all files by name."""
    return {name: bytes(content) for name, content in connection.execute(_READ, binary=True)}


def put(connection: Connection, name: str, content: bytes) -> None:
    """Write a file."""
    values = {"version": secrets.token_bytes(16), "name": name, "content": content}
    connection.execute(_PUT, values)


def clear(connection: Connection) -> None:
    """Remove all keys."""
    connection.execute(_CLEAR)


def adopt(connection: Connection, directory: Path) -> None:
    """Add the keys of a directory that the table lacks. Raises `UnusableKey`.

    Keys of brokers with another secret are refused: their peers could not connect.
    """
    found, own = read(connection), _files(directory)
    if OWN_FILE in own and own[OWN_FILE] != found.get(OWN_FILE, own[OWN_FILE]):
        raise UnusableKey(
            f"{directory}: has other keys than the store, whose brokers share one secret (move "
            "the directory away)"
        )
    for name in own.keys() - found.keys():
        put(connection, name, own[name])


def copy_to(connection: Connection, directory: Path) -> bytes:
    """Make the files of a directory equal to the table. Return the version. Raises `OSError`.

    A file that can't be written is removed, so that a revoked key is refused.
    """
    seen = version(connection)
    wanted, own = read(connection), _files(directory)
    for name in own.keys() - wanted.keys():
        (directory / name).unlink(missing_ok=True)
    for name, content in wanted.items():
        if own.get(name) != content:
            make_private_directory(directory)
            try:
                replace_private(directory / name, content)
            except OSError:
                (directory / name).unlink(missing_ok=True)
                raise
    return seen


def _files(directory: Path) -> dict[str, bytes]:
    try:
        paths = [path for path in directory.iterdir() if _FILE.fullmatch(path.name)]
    except FileNotFoundError:
        return {}
    return {path.name: path.read_bytes() for path in paths}


class StoreKeyring(Keyring):
    """The keys of a store, for commands. Changes are in the table before they are in files."""

    def __init__(self, state: Path, url: str) -> None:
        """Copy the table to the state directory. Raises `UserError`."""
        super().__init__(state)
        self._url = url
        self._connection: Connection | None = None
        with database.open_store(self._url) as connection, locked(connection):
            _fetch(connection, self.directory)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with database.open_store(self._url) as connection, locked(connection):
            _fetch(connection, self.directory)
            self._connection = connection
            try:
                with super()._locked():
                    yield
            finally:
                self._connection = None

    def _write(self, path: Path, content: bytes) -> None:
        assert self._connection is not None  # noqa: S101 - called under the lock
        put(self._connection, path.name, content)
        super()._write(path, content)


def _fetch(connection: Connection, directory: Path) -> bytes:
    adopt(connection, directory)
    try:
        return copy_to(connection, directory)
    except OSError as error:
        raise UnusableKey(f"{directory}: can't write: {error.strerror}") from error


class KeyCopy:
    """Keeps the files of a state directory equal to the table."""

    def __init__(self, state: Path) -> None:
        self._directory = state / DIRECTORY_NAME
        self._version: bytes | None = None

    def poll(self, connection: Connection) -> None:
        """Copy the keys if they have changed. A failure is tried again with the next call."""
        if version(connection) == self._version:
            return
        try:
            self._version = copy_to(connection, self._directory)
        except (OSError, UserError) as error:
            logger.warning("%s: keys of the store not copied: %s", self._directory, error)
