"""The keys of one broker: `STATE/keys/`, mode 0700, with its own key pair and a file per peer.

Works without a running broker or the state's lock. Every change is an atomic file replacement. A
process with the directory open sees it at the next refresh, which is one `stat` while nothing has
changed. It fails closed: if anything is unreadable or open to other users, no key is accepted.

A keyring belongs to one thread. Another thread creates its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final

from msgspec import structs

from taskyard.core.limits import SECOND_NS
from taskyard.errors import UnknownName, UnusableKey, UserError
from taskyard.journal.files import PRIVATE_DIRECTORY, make_private_directory, replace_private
from taskyard.net import keys
from taskyard.net.keys import KeyEntry, PeerKey, Secret
from taskyard.net.protocols import SystemClock
from taskyard.wire.roles import AuthenticatedPeer, Role, check_roles

logger = logging.getLogger("taskyard.net")

DIRECTORY_NAME: Final = "keys"
BROKER_FILE: Final = "broker.key"

#: The suffix of key entries, after the fingerprint of the key. Other files are ignored.
_ENTRY: Final = ".guest"

#: Keys of one broker. All files are read after any change.
KEYS_MAX: Final = 10_000

#: File systems record times in steps of up to 10 ms. A directory that changed this recently may
#: change again with the same time, so it is read again until it is older.
_FRESH_NS: Final = SECOND_NS // 10


class Keyring:
    """The keys that the broker of a state directory accepts."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.directory = state / DIRECTORY_NAME
        #: The directory's status when it was read. None: the kept entries may be outdated.
        self._seen: tuple[int, ...] | None = None
        self._peers: dict[str, AuthenticatedPeer] = {}
        #: Rises each time the entries are read.
        self.load_count = 0

    # Lookup.

    def find(self, public: str) -> AuthenticatedPeer | None:
        """Return the peer with this key, or None. A revoked key has no roles.

        Reads changed files first. Raise UserError if the keys can't be read, which means no.
        """
        self.refresh()
        return self.get(public)

    def get(self, public: str) -> AuthenticatedPeer | None:
        """Return the peer with this key as of the last refresh, or None."""
        return self._peers.get(public)

    def refresh(self) -> None:
        """Read the entries if the directory has changed. Raise UserError if that fails."""
        try:
            found = self.directory.stat()
        except OSError as error:
            self._seen = None
            raise self._unreadable(error) from error
        seen = (found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_ctime_ns)
        if seen != self._seen:
            self._seen = None
            self._peers = {one.public: _peer_of(one) for one in self.entries()}
            self.load_count += 1
            # The ctime, because users can't set it.
            is_aged = SystemClock.wall_ns() - found.st_ctime_ns > _FRESH_NS
            self._seen = seen if is_aged else None

    def entries(self) -> list[KeyEntry]:
        """Return all entries, with revoked entries, oldest first. Raise UserError."""
        try:
            keys.check_private(self.directory, self.directory.stat(), PRIVATE_DIRECTORY)
            paths = [path for path in self.directory.iterdir() if path.suffix == _ENTRY]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(error) from error
        if len(paths) > KEYS_MAX:
            raise UnusableKey(
                f"{self.directory}: {len(paths):,} keys, limit {KEYS_MAX:,} (remove files of "
                "revoked keys)"
            )
        entries: list[KeyEntry] = []
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                entries.append(keys.read_entry(path))
        return sorted(entries, key=attrgetter("made_ns", "name"))

    def _unreadable(self, error: OSError) -> UserError:
        return UnusableKey(
            f"{self.directory}: can't read: {error.strerror} (create keys with `taskyard keys new`)"
        )

    def has_keys(self) -> bool:
        """Return whether any key is valid. Raise UserError."""
        return any(not entry.revoked_ns for entry in self.entries())

    def secret(self) -> Secret:
        """Return the broker's own secret. Raise UserError."""
        try:
            return keys.read_broker(self.directory / BROKER_FILE)
        except FileNotFoundError:
            raise UnusableKey(
                f"{self.directory}: no broker key (create one with `taskyard keys new`)"
            ) from None

    # Changes.

    def create(self, name: str, roles: Role | Iterable[Role], out: Path) -> KeyEntry:
        """Create a key, write the peer's half to `out`, and accept it from now on.

        The peer's file is written first, so that every accepted key exists. Raise UserError.
        """

        def deliver(key: PeerKey) -> None:
            keys.create_key_file(out, keys.format_peer_key(key))

        return self.issue(name, roles, deliver, lambda: out.unlink(missing_ok=True))

    def issue(
        self,
        name: str,
        roles: Role | Iterable[Role],
        deliver: Callable[[PeerKey], None],
        withdraw: Callable[[], None] = lambda: None,
    ) -> KeyEntry:
        """Create a key, pass the peer's half to `deliver`, and accept it from now on.

        If the entry can't be written, `withdraw` is called. Raise UserError.
        """
        keys.check_name(name)
        allowed = _allowed((roles,) if isinstance(roles, Role) else roles)
        with self._locked():
            entries = self.entries()
            if len(entries) >= KEYS_MAX:
                raise UnusableKey(
                    f"{self.directory}: limit of {KEYS_MAX:,} keys reached (remove files of "
                    "revoked keys)"
                )
            if any(one.name == name and not one.revoked_ns for one in entries):
                raise UnusableKey(
                    f"key {name!r} exists already (see `taskyard keys revoke {name}`)"
                )
            broker = self._own_secret().public()
            secret = keys.make_secret()
            entry = KeyEntry(name, allowed, secret.public(), SystemClock.wall_ns())
            deliver(PeerKey(name, allowed, secret, broker))
            try:
                self._put(entry)
            except BaseException:
                withdraw()
                raise
            return entry

    def revoke(self, name: str) -> KeyEntry:
        """Revoke a key. Raise UserError if it does not exist or is revoked already."""
        with self._locked():
            entries = self.entries()
            for entry in entries:
                if entry.name == name and not entry.revoked_ns:
                    ended = structs.replace(entry, revoked_ns=SystemClock.wall_ns())
                    self._put(ended)
                    return ended
        if any(entry.name == name for entry in entries):
            raise UnusableKey(f"key {name!r} is revoked already")
        raise UnknownName(f"unknown key {name!r} (see `taskyard keys list`)", name)

    def _own_secret(self) -> Secret:
        path = self.directory / BROKER_FILE
        with contextlib.suppress(FileNotFoundError):
            return keys.read_broker(path)
        secret = keys.make_secret()
        self._write(path, keys.format_broker_key(secret).encode())
        return secret

    def _put(self, entry: KeyEntry) -> None:
        path = self.directory / f"{entry.fingerprint}{_ENTRY}"
        self._write(path, keys.format_key_entry(entry).encode())

    def _write(self, path: Path, content: bytes) -> None:
        """Replace a file, under the lock."""
        replace_private(path, content)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the directory's lock. The kernel releases it when the process ends."""
        try:
            make_private_directory(self.directory)
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UnusableKey(
                f"{self.directory}: can't be used for keys: {error.strerror}"
            ) from error
        try:
            keys.check_private(self.directory, os.fstat(descriptor), PRIVATE_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        except OSError as error:
            raise UnusableKey(f"{self.directory}: can't write: {error.strerror}") from error
        finally:
            os.close(descriptor)


def _peer_of(entry: KeyEntry) -> AuthenticatedPeer:
    return AuthenticatedPeer(entry.name, () if entry.revoked_ns else entry.roles)


def _allowed(roles: Iterable[Role]) -> tuple[Role, ...]:
    try:
        return check_roles(roles)
    except ValueError as error:
        raise UserError(str(error)) from error


#: Peers whose key is remembered: the latest senders. Other peers get a message only after they have
#: sent something.
PEERS_MAX: Final = 100_000

#: A descriptor and the inode of its socket.
Connection = tuple[int, int]

_UNKNOWN: Final = (-1, 0)


class PeerKeys:
    """The connection of each route, and the public key of each connection, for a relay.

    A key may be revoked while its peer is connected. So the directory of keys is checked with every
    message, in both directions, and for idle peers whenever the relay checks its connections.
    """

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._connections: dict[bytes, Connection] = {}
        self._users: dict[Connection, str] = {}
        #: Why all keys are refused. Empty if the keys were read.
        self._problem = ""
        #: Revoked keys that were logged.
        self._reported: set[str] = set()

    def accept(self, route: bytes, connection: Connection, user: str) -> bool:
        """Return whether a peer may send, and remember its key if so."""
        if not self._is_valid(user):
            return False
        if self._connections.get(route) != connection:
            self._forget(route)
        self._connections.pop(route, None)  # reinserted as the newest
        self._connections[route] = connection
        self._users[connection] = user
        if len(self._connections) > PEERS_MAX:
            self._forget(next(iter(self._connections)))
        return True

    def connection(self, route: bytes) -> Connection:
        """Return the connection of a peer. Without an inode it is closed or unknown."""
        return self._connections.get(route, _UNKNOWN)

    def is_accepted(self, connection: Connection) -> bool:
        """Return whether the key of a connection is known and valid."""
        user = self._users.get(connection)
        return user is not None and self._is_valid(user)

    def _forget(self, route: bytes) -> None:
        connection = self._connections.pop(route, None)
        if connection is not None:
            self._users.pop(connection, None)

    def _is_valid(self, user: str) -> bool:
        """Return whether a key is valid, after a look at the directory."""
        try:
            peer = self._keyring.find(user)
        except UserError as error:
            if str(error) != self._problem:
                logger.warning("all keys are refused: %s", error)
            self._problem = str(error)
            return False
        self._problem = ""
        if peer is not None and peer.roles:
            return True
        if user not in self._reported:
            self._reported.add(user)
            name = "a removed key" if peer is None else f"the revoked key {peer.name}"
            logger.warning("peers with %s are disconnected", name)
        return False
