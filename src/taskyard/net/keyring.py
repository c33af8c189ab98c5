"""The keys of one broker: `STATE/keys/`, mode 0700, with its own pair and a file a guest.

Needs no running broker and no lock of the state: a change is a file that appears whole under its
name, and whoever has the directory open sees it at the next look, which is one `stat` while nothing
has changed. Whatever can't be read, or is open to others, makes nobody known: it fails closed.

A keyring is for one thread. Whoever asks from another one has a keyring of its own.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.journal.files import (
    PRIVATE_DIRECTORY,
    make_private_directory,
    replace_private,
)
from taskyard.net import keys
from taskyard.net.keys import KeyEntry, PeerKey, Secret
from taskyard.net.protocols import SystemClock
from taskyard.wire.roles import AuthenticatedPeer, Role

DIRECTORY_NAME: Final = "keys"
BROKER_FILE: Final = "broker.key"

#: How the names of guests' files end, after the fingerprints of their keys; others are not read.
_ENTRY: Final = ".guest"

#: Guests of one broker: all of their files are read when one has changed.
KEYS_MAX: Final = 10_000

#: File systems tell times in steps of up to 10 ms. A directory that has changed this lately may
#: change once more without showing it, so it is read again until it has aged.
_FRESH_NS: Final = SECOND_NS // 10


class Keyring:
    """Who is known to the broker of a state directory."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.directory = state / DIRECTORY_NAME
        #: The directory as it was when it was read; None: what is kept may be old.
        self._seen: tuple[int, ...] | None = None
        self._guests: dict[str, AuthenticatedPeer] = {}
        #: Rises when guests were read anew.
        self.load_count = 0

    # Looking.

    def find(self, public: str) -> AuthenticatedPeer | None:
        """Whose key it is, as it is now: without a role if it was revoked, None if nobody's.
        Raises UserError where nobody can say, which means no."""
        self.refresh()
        return self.get(public)

    def get(self, public: str) -> AuthenticatedPeer | None:
        """The same, as it was at the last look."""
        return self._guests.get(public)

    def refresh(self) -> None:
        """See whether something has changed. Raises UserError where nobody can say."""
        try:
            found = self.directory.stat()
        except OSError as error:
            self._seen = None
            raise self._unreadable(error) from error
        seen = (found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_ctime_ns)
        if seen != self._seen:
            self._seen = None
            self._guests = {one.public: _peer_of(one) for one in self.entries()}
            self.load_count += 1
            # The time of the change, not of the content: nobody can set it.
            is_aged = SystemClock.wall_ns() - found.st_ctime_ns > _FRESH_NS
            self._seen = seen if is_aged else None

    def entries(self) -> list[KeyEntry]:
        """All guests that there ever were, the oldest first. Raises UserError."""
        try:
            keys.check_private(self.directory, self.directory.stat(), PRIVATE_DIRECTORY)
            paths = [path for path in self.directory.iterdir() if path.suffix == _ENTRY]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(error) from error
        if len(paths) > KEYS_MAX:
            raise UserError(
                f"{self.directory} has {len(paths):,} guests, more than {KEYS_MAX:,}; remove "
                "files of revoked ones"
            )
        entries: list[KeyEntry] = []
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile: not known, then
                entries.append(keys.read_entry(path))
        return sorted(entries, key=_age)

    def _unreadable(self, error: OSError) -> UserError:
        return UserError(
            f"{self.directory} can't be read: {error.strerror}; see that it is a directory of "
            "yours, or make keys with `taskyard keys new`"
        )

    def has_keys(self) -> bool:
        """Whether anybody could come in. Raises UserError."""
        return any(not entry.revoked_ns for entry in self.entries())

    def secret(self) -> Secret:
        """The broker's own. Raises UserError."""
        try:
            return keys.read_broker(self.directory / BROKER_FILE)
        except FileNotFoundError:
            raise UserError(
                f"{self.directory} has no key of the broker; make it with `taskyard keys new`"
            ) from None

    # Changing.

    def create(self, name: str, role: Role, out: Path) -> KeyEntry:
        """Make a key, write the guest's half to `out`, and know it from now on. Raises UserError.

        The guest's file comes first: a key that is known has been handed out.
        """
        keys.check_name(name)
        with self._locked():
            entries = self.entries()
            if len(entries) >= KEYS_MAX:
                raise UserError(
                    f"{self.directory} has {len(entries):,} guests, and more can't be known; "
                    "remove files of revoked ones"
                )
            if any(one.name == name and not one.revoked_ns for one in entries):
                raise UserError(
                    f"there is a key {name} already; give another name, or revoke it first with "
                    f"`taskyard keys revoke {name}`"
                )
            broker = self._own_secret().public()
            secret = keys.make_secret()
            entry = KeyEntry(name, role, secret.public(), SystemClock.wall_ns())
            keys.create_key_file(out, keys.format_peer_key(PeerKey(name, role, secret, broker)))
            try:
                self._put(entry)
            except BaseException:
                out.unlink(missing_ok=True)
                raise
            return entry

    def revoke(self, name: str) -> KeyEntry:
        """A key is not good any more, from now on. Raises UserError."""
        with self._locked():
            entries = self.entries()
            for entry in entries:
                if entry.name == name and not entry.revoked_ns:
                    ended = KeyEntry(
                        *(entry.name, entry.role, entry.public, entry.made_ns),
                        revoked_ns=SystemClock.wall_ns(),
                    )
                    self._put(ended)
                    return ended
        if any(entry.name == name for entry in entries):
            raise UserError(f"the key {name} was revoked before; nothing is left to do")
        raise UserError(f"there is no key {name!r}; `taskyard keys list` has them all")

    def _own_secret(self) -> Secret:
        path = self.directory / BROKER_FILE
        with contextlib.suppress(FileNotFoundError):
            return keys.read_broker(path)
        secret = keys.make_secret()
        replace_private(path, keys.format_broker_key(secret).encode())
        return secret

    def _put(self, entry: KeyEntry) -> None:
        path = self.directory / f"{entry.fingerprint}{_ENTRY}"
        replace_private(path, keys.format_key_entry(entry).encode())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time. The kernel frees the lock when its holder ends."""
        try:
            make_private_directory(self.directory)
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(
                f"can't use {self.directory} for keys: {error.strerror}; see that it is a "
                "directory that you may write, or give another --state"
            ) from error
        try:
            keys.check_private(self.directory, os.fstat(descriptor), PRIVATE_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        except OSError as error:
            raise UserError(
                f"can't write in {self.directory}: {error.strerror}; make room, or give another "
                "--state"
            ) from error
        finally:
            os.close(descriptor)


def _peer_of(entry: KeyEntry) -> AuthenticatedPeer:
    return AuthenticatedPeer(entry.name, None if entry.revoked_ns else entry.role)


def _age(entry: KeyEntry) -> tuple[int, str]:
    return entry.made_ns, entry.name
