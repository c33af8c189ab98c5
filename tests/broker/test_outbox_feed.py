"""The thread that submits the outbox ends with its broker, whatever the database does."""

import socket
import time
from pathlib import Path

from taskyard.postgresql.leader import Term
from taskyard.postgresql.outbox import OutboxFeed

CONNECT_SECONDS = 100


def test_feed_of_a_silent_server_ends_before_its_connection_times_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/x?sslmode=disable"
        url += f"&connect_timeout={CONNECT_SECONDS}"
        began = time.monotonic()
        with OutboxFeed(url, Term(1, "x"), f"ipc://{tmp_path}/broker.sock"):
            silent.accept()[0].detach()
        assert time.monotonic() - began < CONNECT_SECONDS
