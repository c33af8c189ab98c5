"""A throw-away PostgreSQL cluster for tests, and a proxy that cuts its connections."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from pair_demo.postgresql import ROLE, ThrowawayCluster
from taskyard.postgresql import database
from tests.kit.requirements import need

if TYPE_CHECKING:
    from collections.abc import Callable

_numbers = itertools.count(1)

#: The files of a new cluster, after this process has created one.
_FILES: list[Path] = []


def _memory() -> Path | None:
    """Return the directory in memory for temporary files. None: there is none."""
    named = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    return Path(named) if named else None


class Cluster(ThrowawayCluster):
    """A cluster with its files in memory, which makes databases."""

    def __init__(self, *settings: str, parent: Path | None = None) -> None:
        #: A given disk may be small, and a test may need to know what is on it.
        self._has_template = parent is None
        super().__init__(Path(need("PostgreSQL")), parent or _memory(), settings)

    def database(self, options: str = "", *, with_store: bool = True) -> str:
        """Create a database and return its URL."""
        name = f"test{next(_numbers)}"
        is_copy = with_store and self._has_template
        source = f"TEMPLATE {self._template} STRATEGY FILE_COPY" if is_copy else ""
        self.execute(f"CREATE DATABASE {name} {source} {options}")
        if with_store:
            with database.connect(self.url(name)) as connection:
                if not database.init(connection):
                    database.clear(connection)  # else all copies had one identity
        return self.url(name)

    @cached_property
    def _template(self) -> str:
        """The database with an empty store, which is copied in half the time of a new store."""
        name = "template_of_tests"
        self.execute(f"CREATE DATABASE {name}")
        with database.connect(self.url(name)) as connection:
            database.init(connection)
        return name

    def _create(self) -> None:
        """Copy the files of a cluster that was created before, in a tenth of the time."""
        if _FILES:
            _copy(_FILES[0], self.data)
            return
        super()._create()
        kept = Path(tempfile.mkdtemp(prefix="taskyard-pg-", dir=_memory()))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
        _copy(self.data, kept / "data")
        _FILES.append(kept / "data")

    def is_running(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def execute(self, statement: str) -> None:
        """Run a statement that concerns the whole cluster."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement)


def _copy(source: Path, target: Path) -> None:
    """Copy a directory with the owners of its files, which may be another user than this one."""
    subprocess.run(["/bin/cp", "-a", str(source), str(target)], check=True)


def name_in(url: str) -> str:
    """Return the name of a cluster's database."""
    return url.partition("@/")[2].partition("?")[0]


class Standby(Cluster):
    """A synchronous standby of a cluster, which can be promoted."""

    def __init__(self, primary: Cluster) -> None:
        self._primary = primary
        super().__init__()
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("SELECT pg_reload_conf()")

    def _create(self) -> None:
        source = ("-h", str(self._primary.directory), "-U", ROLE, "--checkpoint=fast")
        options = ("-D", str(self.data), "--write-recovery-conf", "--no-sync", *source)
        assert self._run("pg_basebackup", *options).wait() == 0, self.log.read_text()

    def receiver(self) -> int:
        """Return the process that receives rows. While it is stopped, commits wait."""
        with psycopg.connect(self.url()) as connection:
            found = connection.execute("SELECT pid FROM pg_stat_wal_receiver").fetchall()
            return int(found[0][0])

    def promote(self) -> None:
        """Accept writes from now on, without the primary."""
        self.execute("SELECT pg_promote()")

    def url_of_both(self, url: str) -> str:
        """Return the URL of a database on the server that accepts writes."""
        name = name_in(url)
        return f"postgresql://{ROLE}@/{name}?host={self._primary.directory},{self.directory}"


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
        return f"postgresql://{ROLE}@127.0.0.1:{self.port}/{name}?sslmode=disable"

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


def run(url: str, statement: str) -> None:
    """Run a statement over a session of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def terminate_backends(url: str) -> None:
    """End all other sessions of a database, as an administrator does."""
    run(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid != pg_backend_pid()",
    )


def warn_after_each(url: str, table: str, condition: str = "") -> None:
    """Let the server warn, with each new row, that the session ends."""
    run(
        url,
        "CREATE OR REPLACE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE WARNING 'terminating' USING ERRCODE = '57P02'; RETURN NULL; END $$",
    )
    run(
        url,
        f"CREATE TRIGGER warn AFTER INSERT OR UPDATE ON taskyard.{table} "
        f"FOR EACH ROW {condition} EXECUTE FUNCTION warn()",
    )
