"""The process of the page: binds its address, starts the follower, and serves until stopped."""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import uvicorn

from taskyard.client.broker_link import BrokerLink
from taskyard.web.access import Guard, Role, create_secret, remove_secret
from taskyard.web.app import make_app
from taskyard.web.follower import Follower
from taskyard.web.views.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from taskyard.client.broker_link import Connector

#: Workers and the broker come first on a busy machine.
_NICENESS: Final = 10

_LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "::1")


def bind(host: str, port: int) -> socket.socket:
    """Bind the address of the page and listen. If the port is taken, a free one is used.

    Browsers that connect before the server runs wait in the socket's queue.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError:
        found.bind((host, 0))
    found.listen()
    return found


def serve(  # noqa: PLR0913  # all but four are named
    state: Path,
    connect: Connector,
    bound: socket.socket,
    on_ready: Callable[[str], None],
    *,
    names: Sequence[str] = (),
    until_eof: bool = False,
) -> None:
    """Serve the page of a state directory until a signal. `on_ready` gets its address with a token.

    With `until_eof`, the end of stdin ends it too, because its parent has ended.
    """
    follower = Follower(state)
    with suppress(OSError):
        os.nice(_NICENESS)
    host, port = bound.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    secret = create_secret(state, address)
    link = BrokerLink(connect)
    app = make_app(Site(follower, link, str(state)))
    guarded = Guard(app, secret, {*_LOOPBACK_NAMES, host, *names}, port)
    config = uvicorn.Config(guarded, log_level="warning", access_log=False, server_header=False)
    server = uvicorn.Server(config)
    if until_eof:
        threading.Thread(target=_stop_at_eof, args=[server], daemon=True).start()
    follower.start()
    try:
        on_ready(f"{address}/?token={secret.token(Role.OPERATOR)}")
        server.run([bound])
    finally:
        follower.stop()
        link.close()
        remove_secret(state)


def _stop_at_eof(server: uvicorn.Server) -> None:
    while sys.stdin.buffer.read(1):
        pass
    server.should_exit = True
