"""The process of the page: starts the follower, and serves on a socket until stopped.

The socket and the secret belong to the owner of the page, which may be another process: see
`address`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from typing import TYPE_CHECKING, Final

import uvicorn

from taskyard.errors import UserError
from taskyard.web import connections
from taskyard.web.access import Guard
from taskyard.web.address import WILDCARDS, metrics_token
from taskyard.web.app import make_app
from taskyard.web.follower import Follower
from taskyard.web.views.site import Site

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from starlette.types import ASGIApp

    from taskyard.client.internal import BrokerLink
    from taskyard.web.address import Secret

logger = logging.getLogger("taskyard.web")

#: Requests that are being answered when the page ends are cut off after this.
_CLOSE_SECONDS: Final = 1

_LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "::1")


def serve(  # noqa: PLR0913  # two are named
    state: Path,
    link: BrokerLink,
    bound: socket.socket,
    secret: Secret,
    *,
    names: Sequence[str] = (),
    until_eof: bool = False,
) -> None:
    """Serve the page of a state directory until a signal. Closes the link then.

    With `until_eof`, the end of stdin ends it too, because its parent has ended. Raises
    UnusableState if the directory has no journal.
    """
    follower = Follower(state)
    host, port = bound.getsockname()[:2]
    site = Site(follower, link, str(state))
    hosts = {*_LOOPBACK_NAMES, *_names_of(host), *names}
    token = _metrics_token(state)
    guarded = Guard(make_app(site), secret, hosts, port, metrics_token=token)
    server = PageServer(guarded, site.stopping)
    if until_eof:
        threading.Thread(target=_stop_at_eof, args=[server], daemon=True).start()
    follower.start()
    try:
        site.load_templates()
        server.run([bound])
    finally:
        follower.stop()
        link.close()


def _metrics_token(state: Path) -> str:
    """Return the token for metrics. Empty if the state directory is read-only."""
    try:
        return metrics_token(state)
    except UserError as error:
        logger.warning("no token for metrics: %s", error)
        return ""


class PageServer(uvicorn.Server):
    """Limits connections, and ends live updates first: otherwise it would wait for open pages."""

    def __init__(self, app: ASGIApp, stopping: asyncio.Event) -> None:
        """Serve an app, whose live updates end when `stopping` is set."""
        config = uvicorn.Config(
            app,
            http=connections.LimitedConnection,
            ws="none",  # a WebSocket would leave these limits
            backlog=connections.ACCEPTS_MAX,
            log_config=None,  # the log of this process has its lines
            log_level="error",  # a warning is about a malformed request, which has its answer
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        super().__init__(config)
        self._stopping = stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(connections.on_loop_error)
        await super().startup(sockets)
        for bound in sockets or ():
            connections.accept_many(bound)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)


def _names_of(host: str) -> tuple[str, ...]:
    """Return the names by which a bound address is reached."""
    return (socket.gethostname(),) if host in WILDCARDS else (host,)


def _stop_at_eof(server: uvicorn.Server) -> None:
    while sys.stdin.buffer.read(1):
        pass
    server.should_exit = True
