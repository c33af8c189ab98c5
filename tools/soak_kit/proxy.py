"""A TCP proxy before a PostgreSQL server, whose connections can be cut.

A cut either closes all connections and refuses new connections, or forwards nothing and keeps
everything that was sent, as a network does that drops packets. Kept data arrives after the repair.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PORTION_BYTES: Final = 65536


class DatabaseProxy:
    """Forwards connections to the socket of a server on this machine."""

    def __init__(self, server: Path) -> None:
        self._server = str(server)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._is_refusing = False
        self._is_open = threading.Event()
        self._is_open.set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self, *, silently: bool) -> None:
        """Cut all connections, until `repair`."""
        if silently:
            self._is_open.clear()
            return
        self._is_refusing = True
        for one in [*self._sockets]:
            _shut_down(one)

    def repair(self) -> None:
        """Forward again."""
        self._is_refusing = False
        self._is_open.set()

    def close(self) -> None:
        """End all connections."""
        self.repair()
        for one in (self._listener, *self._sockets):
            _shut_down(one)
        for thread in [*self._threads]:
            thread.join()

    def _start(self, run: Callable[..., None], *arguments: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                below, _ = self._listener.accept()
                self._start(self._serve, below)

    def _serve(self, below: socket.socket) -> None:
        with below, socket.socket(socket.AF_UNIX) as above, suppress(OSError):
            if self._is_refusing:
                return
            above.connect(self._server)
            self._sockets |= {below, above}
            upward = self._start(self._forward, below, above)
            self._forward(above, below)
            upward.join()
            self._sockets -= {below, above}

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_PORTION_BYTES):
                self._is_open.wait()
                target.sendall(data)
        self._is_open.wait()
        for one in (source, target):
            _shut_down(one)


def _shut_down(one: socket.socket) -> None:
    with suppress(OSError):  # it has ended already
        one.shutdown(socket.SHUT_RDWR)
