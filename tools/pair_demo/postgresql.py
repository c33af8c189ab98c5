"""A throw-away PostgreSQL cluster, made from installed programs.

The files and the only socket are in a directory of their own. No other user can connect,
so it has no password. PostgreSQL refuses to run as root: for root, it runs as another user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final, Self

import psycopg

from taskyard.errors import NotInstalled, ProcessEnded, TimedOut
from taskyard.process.child import status_text

#: Where packages for each version have their programs: Debian, Red Hat.
_FOLDERS: Final = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin")

#: The user that it runs as when root starts it: of its package, or the user without rights.
_USER: Final = "postgres"
_USER_ID_OF_NO_RIGHTS: Final = 65534

#: The user of the database.
ROLE: Final = "taskyard"

#: Settings of a small cluster.
_SETTINGS: Final = (
    "listen_addresses=",
    "port=5432",  # PGPORT may name another
    "shared_buffers=16MB",
    "max_connections=50",
    "jit=off",
)

#: Longer paths of sockets are refused by the kernel. TMPDIR may be longer.
_SOCKET_BYTES_MAX: Final = 107
_SOCKET: Final = ".s.PGSQL.5432"

#: To start or to stop, even on a busy machine.
_SECONDS_MAX: Final = 60.0
_POLL_SECONDS: Final = 0.02


def find_programs(named: Path | None = None) -> Path:
    """Return the directory with `initdb` and `postgres`: the named directory, or the first that is
    found.

    Looks in PATH, asks `pg_config`, and takes the newest version of a distribution.
    """
    if named is not None:
        for directory in (named, named / "bin"):
            if _has_programs(directory):
                return directory
        raise NotInstalled(f"{named}: has no initdb and postgres (give the directory with both)")
    for directory in _candidates():
        if _has_programs(directory):
            return directory
    raise NotInstalled(
        "PostgreSQL is not installed (`apt-get install postgresql`, or give the directory of its "
        "initdb with --postgresql)"
    )


def _has_programs(directory: Path) -> bool:
    return all(os.access(directory / name, os.X_OK) for name in ("initdb", "postgres"))


def _candidates() -> list[Path]:
    found = []
    if initdb := shutil.which("initdb"):
        found.append(Path(initdb).resolve().parent)  # it may be a link without neighbours
    if config := shutil.which("pg_config"):
        asked = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        found.append(Path(asked.stdout.strip()))
    for folder in _FOLDERS:
        found += sorted(Path("/").glob(folder), key=_version, reverse=True)
    return found


def _version(directory: Path) -> float:
    digits = directory.parent.name.removeprefix("pgsql-")
    return float(digits) if digits.replace(".", "", 1).isdigit() else 0


def _make_directory(parent: Path | None) -> Path:
    made = Path(tempfile.mkdtemp(prefix="taskyard-pg-", dir=parent))
    if len(os.fsencode(made / _SOCKET)) > _SOCKET_BYTES_MAX:
        made.rmdir()
        made = Path(tempfile.mkdtemp(prefix="taskyard-pg-", dir="/tmp"))  # short
    return made


def _give_away(directory: Path) -> pwd.struct_passwd | None:
    """Give root's directory to another user, and return that user. None without need."""
    if os.geteuid() != 0:
        return None
    try:
        owner = pwd.getpwnam(_USER)
    except KeyError:
        owner = pwd.getpwuid(_USER_ID_OF_NO_RIGHTS)
    os.chown(directory, owner.pw_uid, owner.pw_gid)
    return owner


class ThrowawayCluster:
    """A running cluster. As a context manager it ends, and its files are removed."""

    def __init__(
        self, programs: Path, parent: Path | None = None, settings: tuple[str, ...] = ()
    ) -> None:
        """Create it in a new directory below `parent`, or in a temporary directory. Start it."""
        self._programs = programs
        self._settings = (*_SETTINGS, *settings)
        self._server: subprocess.Popen[str] | None = None
        self.directory = _make_directory(parent)
        try:
            self._owner = _give_away(self.directory)
            self._create()
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def url(self, name: str = "postgres") -> str:
        """Return the URL of a database."""
        return f"postgresql://{ROLE}@/{name}?host={self.directory}&port=5432"

    def start(self) -> None:
        """Start the server and wait until it accepts connections. It ends with this thread."""
        sockets = f"unix_socket_directories={self.directory}"
        options = [part for one in (*self._settings, sockets) for part in ("-c", one)]
        self._server = self._run("postgres", "-D", str(self.data), *options)
        ends = time.monotonic() + _SECONDS_MAX
        while True:
            try:
                psycopg.connect(self.url()).close()
            except psycopg.OperationalError as error:
                self.check()
                if time.monotonic() > ends:
                    raise TimedOut(f"PostgreSQL: {' '.join(str(error).split())}") from error
                time.sleep(_POLL_SECONDS)
            else:
                return

    def check(self) -> None:
        """Raise `ProcessEnded` if the server has ended."""
        status = None if self._server is None else self._server.poll()
        if status is not None:
            raise self._failed("postgres", status)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop the server: by SIGINT at once, by SIGQUIT as in a crash."""
        if self._server is not None:
            self._server.send_signal(number)
            self._server.wait(_SECONDS_MAX)

    def close(self) -> None:
        """End the server and remove its files. A second call does nothing."""
        try:
            self.stop(signal.SIGQUIT)
        except subprocess.TimeoutExpired:
            self.stop(signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _create(self) -> None:
        options = ("-D", str(self.data), "-A", "trust", "-U", ROLE, "-E", "UTF8", "--no-locale")
        status = self._run("initdb", *options, "--no-sync").wait()
        if status:
            raise self._failed("initdb", status)

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a program, which ends with this thread. It does not receive Ctrl-C."""
        owner = self._owner
        guard = ("setpriv", "--pdeathsig=QUIT") if shutil.which("setpriv") else ()
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*guard, str(self._programs / program), *arguments],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                process_group=0,
                user=owner.pw_uid if owner else None,
                group=owner.pw_gid if owner else None,
                extra_groups=[] if owner else None,
            )

    def _failed(self, program: str, status: int) -> ProcessEnded:
        lines = self.log.read_text(errors="backslashreplace").strip().splitlines()
        return ProcessEnded(f"{program}: {status_text(status)}: {' '.join(lines[-3:])}")
