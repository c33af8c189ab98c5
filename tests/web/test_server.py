"""The page's socket, before the server runs."""

from __future__ import annotations

import socket

from taskyard.web.server import bind


def test_bound_address_accepts_connections_before_the_server_runs() -> None:
    with bind("127.0.0.1", 0) as bound, socket.create_connection(bound.getsockname()):
        pass


def test_taken_port_gives_a_free_one() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            assert second.getsockname()[1] != port
