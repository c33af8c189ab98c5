"""A throw-away PostgreSQL cluster for tests, and a proxy that cuts its connections."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from taskyard.demo.postgresql import ROLE, ThrowawayCluster, find_programs
from taskyard.errors import NotInstalled
from taskyard.journal.postgres import database

if TYPE_CHECKING:
    from collections.abc import Callable

_numbers = itertools.count(1)


def programs() -> Path:
    """Return the directory of PostgreSQL's programs. Fail in CI without one, skip elsewhere."""
    try:
        return find_programs()
    except NotInstalled as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


class Cluster(ThrowawayCluster):
    """A cluster with its files in memory, which makes databases."""

    def __init__(self, *settings: str) -> None:
        memory = os.environ.get("PYTEST_DEBUG_TEMPROOT")
        super().__init__(programs(), Path(memory) if memory else None, settings)

    def database(self, *, with_store: bool = True) -> str:
        """Create a database and return its URL."""
        name = f"test{next(_numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
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
