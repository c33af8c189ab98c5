"""The files of a state directory that show its processes: locks, listeners, a standby, the page.

A lock lasts as long as its process, and the file holds that process's id. A killed process leaves
its files. So a file that names listeners, a leader or a page counts only while a process holds the
lock. The listeners' file has the endpoints at which a broker really listens. A standby answers no
peer before it leads, so its file names the leader. No secrets but the page's token, which is not
decoded here.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeVar

import msgspec
from msgspec import MsgspecError, Struct

from taskyard.errors import NoBroker, StateLocked, TaskyardError, UnusableFile
from taskyard.journal import lock
from taskyard.journal.files import (
    check_owner,
    make_private_directory,
    open_regular,
    read_json,
    replace_private,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


#: Locked by the process that has the journal open.
LOCK_FILE: Final = lock.FILE_NAME

#: Locked by `taskyard up`.
UP_FILE: Final = "up.pid"

#: Locked by a `map` or `run` that has started its own broker, or is about to.
LOCAL_FILE: Final = "local.pid"

#: In `LOCAL_FILE`: the broker was stopped on purpose, so no other command should start a broker.
_STOPPED: Final = b"stopped"

#: Ends the name of a file that a `map` locks, after the name of its campaign.
MAP_SUFFIX: Final = ".map"

_PID_BYTES_MAX: Final = 20


def lock_holder(path: Path) -> int | None:
    """Return the id of the process that holds a lock file; 0 if unreadable, None if it is free."""
    try:
        descriptor = lock.open_file(path)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.pread(descriptor, _PID_BYTES_MAX, 0).strip()
        return int(written) if written.isdigit() else 0
    finally:
        os.close(descriptor)
    return None


def live_writer(path: Path) -> int | None:
    """Return the process that wrote a lock file last, if it runs. Takes no lock, even for a moment.

    It may not be visible here, as that of another container.
    """
    try:
        written = path.read_bytes()[:_PID_BYTES_MAX].strip()
    except OSError:
        return None
    pid = int(written) if written.isdigit() else 0
    return pid if pid and is_running(pid) else None


def is_running(pid: int) -> bool:
    """Return whether a process runs. If it has ended and was not reaped, it does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # of another user, or a system without /proc
        return True
    return state not in (b"Z", b"X")  # ended, but its parent has not noticed


def _lock(path: Path) -> int | None:
    """Lock a file, and create it if it is missing. None: another process has it."""
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _replace_content(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


@contextmanager
def hold_up_lock(state: Path) -> Iterator[None]:
    """Hold the lock of `taskyard up`. Raises `StateLocked` if another process holds it."""
    make_private_directory(state)
    check_owner(state)
    descriptor = _lock(state / UP_FILE)
    if descriptor is None:
        raise StateLocked(
            f"{state}: `taskyard up` is already running (stop it with `taskyard down --state "
            f"{state}`)"
        )
    try:
        _replace_content(descriptor, b"%d\n" % os.getpid())
        yield
    finally:
        with suppress(OSError):
            (state / UP_FILE).unlink()
        os.close(descriptor)


def is_orphaned(state: Path) -> bool:
    """Return whether the last command with its own broker was killed. The broker ends as well."""
    try:
        return (state / LOCAL_FILE).read_bytes().strip().isdigit()
    except OSError:
        return False


class LocalLock:
    """The lock of a command that starts its own broker, held until `release`.

    The file stays. It is empty after a normal end, and keeps the process id of a killed command.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        #: The broker of the command before was stopped on purpose.
        self.was_stopped = os.pread(descriptor, _PID_BYTES_MAX, 0) == _STOPPED

    @classmethod
    def take(cls, state: Path) -> Self | None:
        """Lock a state directory, and create it if it is missing. None: another process has it."""
        try:
            make_private_directory(state)
            check_owner(state)
            descriptor = _lock(state / LOCAL_FILE)
        except OSError as error:
            raise UnusableFile(
                f"state directory {state}: {error.strerror} (use a directory that you may write)"
            ) from error
        return None if descriptor is None else cls(descriptor)

    def write_holder(self) -> None:
        """Write the id of this process, before its broker is started."""
        self._write(b"%d\n" % os.getpid())

    def release(self, *, stopped: bool = False) -> None:
        """Release the lock. `stopped`: other commands should not start a broker in its place."""
        self._write(_STOPPED if stopped else b"")
        self.close()

    def close(self) -> None:
        """Release the lock, and leave the file as it is."""
        os.close(self._descriptor)

    def _write(self, content: bytes) -> None:
        with suppress(OSError):  # a full disk
            _replace_content(self._descriptor, content)


class MapLock:
    """The lock of a `map` whose tasks must not outlast it. The file of a killed one stays."""

    def __init__(self, state: Path, campaign: str) -> None:
        self._path = _map_file(state, campaign)
        self._descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the lock, and remove the file: no task is left."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Release the lock, and leave the file, as if the process was killed."""
        os.close(self._descriptor)


def killed_maps(state: Path) -> list[str]:
    """Return the campaigns of `MapLock` files whose process was killed."""
    files = sorted(state.glob(f"*{MAP_SUFFIX}"))
    return [file.name.removesuffix(MAP_SUFFIX) for file in files if lock_holder(file) is None]


def forget_map(state: Path, campaign: str) -> None:
    """Remove the file of a killed map."""
    _map_file(state, campaign).unlink(missing_ok=True)


def _map_file(state: Path, campaign: str) -> Path:
    return state / f"{campaign}{MAP_SUFFIX}"


class BrokerWatch:
    """Watches the broker of a state directory, for programs that show its state.

    The lock is tested only if its last writer runs. The last state is not read while a restart is
    due: a broker that starts meanwhile would find the state in use, and end.
    """

    def __init__(self, state: Path, restart_seconds: float = 0.0) -> None:
        """Give a broker that was seen `restart_seconds` to return, and under `up` any time."""
        self._state, self._restart_seconds = state, restart_seconds
        #: The broker that ran here last. 0 if none was seen.
        self._pid = 0
        #: When it was missed first.
        self._missed: float | None = None

    def is_away(self) -> bool:
        """Return whether the broker that was seen last has ended, and no other broker runs."""
        pid = live_writer(self._state / LOCK_FILE)
        self._pid = pid or self._pid
        return pid is None and self._pid != 0

    def check_running(self) -> None:
        """Raise `NoBroker` unless a broker runs."""
        if self.is_away() or lock_holder(self._state / LOCK_FILE) is None:
            raise NoBroker(f"no broker is running on {self._state}")
        self._missed = None

    def check_last_state(self) -> None:
        """Raise `NoBroker` while a restart is due."""
        up = live_writer(self._state / UP_FILE)
        if up is not None and lock_holder(self._state / UP_FILE) is not None:
            raise NoBroker(f"the broker is away: `taskyard up`, process {up}, is restarting it")
        self._missed = self._missed or time.monotonic()
        if self._pid and time.monotonic() - self._missed < self._restart_seconds:
            raise NoBroker(f"no broker is running on {self._state}: waiting for its restart")


logger = logging.getLogger("taskyard.broker")

ENDPOINT_FILE: Final = "endpoints.json"
STANDBY_FILE: Final = "standby.json"

_T = TypeVar("_T")


class OpenListener(Struct, frozen=True):
    """A listener of a running broker."""

    dialect: str
    #: With their real ports. For ping-pong the backend and the frontend.
    endpoints: tuple[str, ...]
    #: The address of the broker for round-robin peers. Empty: its endpoint.
    identity: str = ""


class Standby(Struct, frozen=True):
    """A standby, and the leader that it follows."""

    #: Of the leader.
    epoch: int
    host: str = ""
    endpoints: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f" on {self.host}" if self.host else ""
        places = f" at {', '.join(self.endpoints)}" if self.endpoints else ""
        return f"a standby that follows the broker of epoch {self.epoch}{at}{places}"


@contextmanager
def listed(state: Path, listeners: Sequence[OpenListener]) -> Iterator[None]:
    """List the listeners in their file during the `with` block. A failure is logged."""
    _remove(state / ENDPOINT_FILE)
    if listeners:
        _write(state / ENDPOINT_FILE, listeners)
    try:
        yield
    finally:
        _remove(state / ENDPOINT_FILE)


def open_listeners(state: Path) -> list[OpenListener]:
    """Return the listeners of the running broker. Empty: none runs, or it has none."""
    return _of_running(state, ENDPOINT_FILE, list[OpenListener]) or []


def write_standby(state: Path, standby: Standby) -> None:
    """Write the file of a standby. A failure is logged."""
    _write(state / STANDBY_FILE, standby)


def remove_standby(state: Path) -> None:
    """Remove the file of a standby, if it is there. A failure is logged."""
    _remove(state / STANDBY_FILE)


def running_standby(state: Path) -> Standby | None:
    """Return the standby that runs on a state directory. None: there is none."""
    return _of_running(state, STANDBY_FILE, Standby)


def _write(path: Path, content: object) -> None:
    try:
        replace_private(path, msgspec.json.encode(content))
    except OSError as error:
        logger.warning("%s: can't write: %s", path, error.strerror)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: can't remove: %s", path, error.strerror)


def _of_running(state: Path, name: str, kind: type[_T]) -> _T | None:
    """Return the content of a file, if its process runs."""
    found = read_json(state / name, kind)
    with suppress(OSError):
        return found if found and lock_holder(state / LOCK_FILE) is not None else None
    return None


#: Private to the user, like the keys.
PAGE_FILE: Final = "page.json"
_PAGE_BYTES_MAX: Final = 16_384
_GROUP_AND_OTHERS: Final = 0o077


class _Address(Struct):
    """The part of the file that is no secret."""

    address: str


def page_address(state: Path) -> str | None:
    """Return the address of the running page without a token, as a link in reports and status."""
    content = read_page_file(state)
    try:
        return None if content is None else msgspec.json.decode(content, type=_Address).address
    except MsgspecError:
        return None


def read_page_file(state: Path) -> bytes | None:
    """Return the file of the running page. None if there is none, or not for this user."""
    try:
        descriptor = open_regular(state / PAGE_FILE, os.O_RDONLY)
    except (OSError, TaskyardError):
        return None
    try:
        found = os.fstat(descriptor)
        is_private = found.st_uid == os.geteuid() and not found.st_mode & _GROUP_AND_OTHERS
        if is_private and is_owned(descriptor):
            return os.read(descriptor, _PAGE_BYTES_MAX)
        return None
    finally:
        os.close(descriptor)


def is_owned(descriptor: int) -> bool:
    """Return whether an owner holds the lock. Readers share it, so they don't see each other."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
