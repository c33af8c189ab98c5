"""A throw-away PostgreSQL cluster for tests, and a proxy that cuts its connections.

The cluster has its files in memory, and listens on a socket in its directory only. It runs as
another user than root, as PostgreSQL demands, and ends with the tests.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from taskyard.journal.postgres import database

if TYPE_CHECKING:
    from collections.abc import Callable

#: Where Debian has the programs of each version. Others have them in PATH.
DEBIAN: Final = Path("/usr/lib/postgresql")

#: Settings of a small cluster.
SETTINGS: Final = ("listen_addresses=", "shared_buffers=16MB", "max_connections=50", "jit=off")

_PATIENCE_SECONDS: Final = 60
_numbers = itertools.count(1)


def programs() -> Path:
    """Return the directory of the newest `initdb`. Fail in CI without one, skip elsewhere."""
    found = sorted(DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    plain = shutil.which("initdb")
    if found or plain:
        return found[-1].parent if found else Path(str(plain)).parent
    text = "PostgreSQL is not installed (apt-get install postgresql)"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


class Cluster:
    """A running cluster. Commands start as the user that owns its files."""

    def __init__(self) -> None:
        self._programs = programs()
        disk = os.environ.get("PYTEST_DEBUG_TEMPROOT")
        self.directory = Path(tempfile.mkdtemp(prefix="pg-", dir=disk))
        self._prefix = self._as_owner()
        options = ("-D", self._data, "-A", "trust", "-U", "test", "-E", "UTF8", "--no-locale")
        made = self._run("initdb", *options, "--no-sync", "--no-instructions")
        _, errors = made.communicate()
        assert made.returncode == 0, errors
        self.start()

    @property
    def _data(self) -> str:
        return str(self.directory / "data")

    def _as_owner(self) -> list[str]:
        """Give the directory to a user that is not root. Return how to run commands as that one."""
        if os.geteuid() != 0:
            return []
        names = {user.pw_name: user for user in pwd.getpwall()}
        user = names.get("postgres") or names["nobody"]
        os.chown(self.directory, user.pw_uid, user.pw_gid)
        ids = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
        return ["setpriv", *ids, "--pdeathsig=QUIT"]

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._prefix, str(self._programs / program), *arguments],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if program == "initdb" else subprocess.DEVNULL,
            text=True,
        )

    def start(self) -> None:
        """Start the server and wait until it accepts connections. It ends with this thread."""
        sockets = f"unix_socket_directories={self.directory}"
        options = [part for one in (*SETTINGS, sockets) for part in ("-c", one)]
        self._server = self._run("postgres", "-D", self._data, *options)
        ends = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
            except psycopg.OperationalError:
                assert self._server.poll() is None
                assert time.monotonic() < ends
                time.sleep(0.02)
            else:
                return

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop the server: by SIGINT at once, by SIGQUIT as in a crash."""
        self._server.send_signal(number)
        self._server.wait(_PATIENCE_SECONDS)

    def close(self) -> None:
        if self._server.poll() is None:
            self.stop(signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, name: str) -> str:
        return f"postgresql://test@/{name}?host={self.directory}"

    def database(self, *, with_store: bool = True) -> str:
        """Create a database and return its URL."""
        name = f"test{next(_numbers)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        if with_store:
            with database.connect(self.url(name)) as connection:
                database.init(connection)
        return self.url(name)


class Proxy:
    """A TCP proxy before a cluster, which can cut its connections.

    `cut` is called with each portion that the client sends, or with None for one of the server. It
    returns whether both sides are cut: after the client's portion is forwarded, or before the
    server's.
    """

    def __init__(self, cluster: Cluster, cut: Callable[[bytes | None], bool]) -> None:
        self._to = str(cluster.directory / ".s.PGSQL.5432")
        self.cut = cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, name: str) -> str:
        """Return the URL of a database behind this proxy."""
        return f"postgresql://test@127.0.0.1:{self.port}/{name}?sslmode=disable"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                below, _ = self._listener.accept()
                above = socket.socket(socket.AF_UNIX)
                above.connect(self._to)
                self._sockets += [below, above]
                for pair in ((below, above, True), (above, below, False)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, of_client: bool) -> None:  # noqa: FBT001
        with suppress(OSError):
            while data := source.recv(65536):
                is_cut = self.cut(data if of_client else None)
                if is_cut:
                    self.cuts += 1
                    _shut_down(source if of_client else target)  # no reply may pass it
                if of_client or not is_cut:
                    target.sendall(data)
                if is_cut:
                    break
        for one in (source, target):
            _shut_down(one)

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            _shut_down(one)
            one.close()


def _shut_down(one: socket.socket) -> None:
    with suppress(OSError):  # it has ended already
        one.shutdown(socket.SHUT_RDWR)
