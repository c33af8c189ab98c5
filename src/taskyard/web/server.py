"""The process of the page: its connections, its addresses, and serving until it is stopped.

A peer needs no token to connect, so connections have limits before a request is checked. Every view
has an address that shows it again: names and filters are in the query, because a name may contain
any character. Views are HTML, charts are JSON for Plotly. `/live` sends a line when something has
changed, after which a page asks for its own view again. The socket and the secret belong to the
owner of the page, which may be another process: see `address`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import resource
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from taskyard.errors import TaskyardError, UserError
from taskyard.net.event_log import EventLog
from taskyard.web.access import Guard
from taskyard.web.address import WILDCARDS, metrics_token
from taskyard.web.follower import Follower
from taskyard.web.views import broker, overview, site, tasks
from taskyard.web.views.site import Site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from starlette.requests import Request
    from starlette.types import ASGIApp
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    from taskyard.client.internal import BrokerLink
    from taskyard.web.address import Secret

logger = logging.getLogger("taskyard.web")

#: A browser sends a header at once. This is enough for a lost packet or two.
HEADER_SECONDS_MAX: Final = 10.0
#: A browser sends cookies of all ports, and the address of a view has a filter or a name.
HEADER_BYTES_MAX: Final = 16 * 1024
#: Bytes after a whole request that is not answered yet. A browser sends none.
NEXT_BYTES_MAX: Final = 64 * 1024
#: With its body, of at most 64 KiB.
REQUEST_SECONDS_MAX: Final = 30.0
#: A reader takes a part of an answer within this. A part is at most a view or 64 KiB of a file.
PART_SECONDS_MAX: Final = 30.0
#: The whole answer. Live updates end then too, because their readers can't be told from peers that
#: never read. A browser connects again by itself.
ANSWER_SECONDS_MAX: Final = 900.0

#: A browser opens up to six. More than this many people don't look at one page.
CONNECTIONS_MAX: Final = 512
#: Connections take this part of the descriptors. All others are for files and the broker.
DESCRIPTORS_SHARE: Final = 2
#: An address takes at most this part of the connections. A proxy has a single address.
ADDRESS_SHARE: Final = 2

#: While connections without a whole request are at most this part, older ones are closed for them.
NEW_SHARE: Final = 4

#: Connections that are accepted before older ones are closed. They need descriptors meanwhile.
ACCEPTS_MAX: Final = 8
#: Connections that the kernel completes before they are accepted. A probe must not be dropped.
BACKLOG: Final = 2048
#: What the kernel keeps of an answer that is not read.
SEND_BUFFER_BYTES: Final = 256 * 1024

#: An empty line, as h11 finds it.
_HEADER_END: Final = re.compile(rb"\n\r?\n")

_UNREQUESTED: Final = (h11.IDLE, h11.SEND_BODY)
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

#: A browser opens connections in advance, and a computer sleeps.
_slow = EventLog(logger, "connection closed", logging.INFO)
_crowded = EventLog(logger, "connection closed", logging.WARNING)
_refused = EventLog(logger, "connection refused", logging.WARNING)


class LimitedConnection(H11Protocol):
    """Closes itself when a peer is too slow, and another connection when there are too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        # The next part of an answer waits until the kernel has taken this part.
        transport.set_write_buffer_limits(0)
        self._part_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle
        self._state: object = None
        self._follow_state()
        _make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._end_part()
        super().connection_lost(exc)

    # The request.

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # A stream reads on, to notice the end of its peer.
        is_whole = self.conn.their_state not in _UNREQUESTED
        if is_whole and len(self.conn.trailing_data[0]) > NEXT_BYTES_MAX:
            self._drop("too many bytes after a request")

    def handle_events(self) -> None:
        if self._has_long_header():
            self.send_400_response("The header is longer than 16 KiB.\n")
            return
        super().handle_events()
        self._follow_state()

    def _has_long_header(self) -> bool:
        """Return whether a header has no end within its limit. It must not be parsed."""
        if self.conn.their_state is not h11.IDLE:
            return False
        sent = self.conn.trailing_data[0]
        return len(sent) > HEADER_BYTES_MAX and not _HEADER_END.search(sent, 0, HEADER_BYTES_MAX)

    def has_request(self) -> bool:
        """Return whether a whole request with a role has arrived that is not answered yet."""
        scope = cast("dict[str, Any] | None", self.scope)
        if scope is None or "role" not in scope:  # quick, for many that never send a request
            return False
        return self.conn.their_state not in _UNREQUESTED or self.flow.write_paused

    def _follow_state(self) -> None:
        """Start the time of the next request, or of the answer to a whole request."""
        state, before = self.conn.their_state, self._state
        if state is before:
            return
        self._state = state
        if before is h11.IDLE and state is h11.SEND_BODY:
            return
        if before is not None:
            self._timer.cancel()
        if state in _UNREQUESTED:
            #: When the peer could begin its request.
            self.began = self.loop.time()
            self._timer = self.loop.call_later(HEADER_SECONDS_MAX, self._check_header)
        else:
            self._timer = self.loop.call_later(ANSWER_SECONDS_MAX, self.transport.abort)

    def _check_header(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._end("no header")
        else:
            more = REQUEST_SECONDS_MAX - HEADER_SECONDS_MAX
            self._timer = self.loop.call_later(more, self._end, "no whole request")

    def _end(self, why: str) -> None:
        """Close it. An answer that is on its way is sent."""
        _log(_slow, self, why)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete:
            # The app sends nothing more, and its next event is the end of the connection.
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # it has an answer already
            self.transport.close()

    # The answer.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._part_timer = self.loop.call_later(PART_SECONDS_MAX, self._drop, "answer not read")

    def resume_writing(self) -> None:
        self._end_part()
        super().resume_writing()

    def _end_part(self) -> None:
        if self._part_timer is not None:
            self._part_timer.cancel()
            self._part_timer = None

    def _drop(self, why: str) -> None:
        """Close it at once. Nothing that is on its way is sent."""
        _log(_slow, self, why)
        self.transport.abort()

    def make_way(self) -> None:
        """Close it at once, for a newer connection."""
        _log(_crowded, self, "too many connections")
        self.connections.discard(self)
        self.transport.abort()


def _log(log: EventLog, connection: LimitedConnection, why: str) -> None:
    log.log(time.monotonic_ns(), lambda: {"address": connection.address, "reason": why})


def connections_max() -> int:
    """Return how many connections there may be."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if soft < 0 else min(CONNECTIONS_MAX, soft // DESCRIPTORS_SHARE)


def _make_room(newest: LimitedConnection) -> None:
    """Close an older connection if there are too many of its address, or in all.

    A peer that sends its request at once is served, however many peers send none.
    """
    # uvicorn names the types of all its protocols.
    every = cast("set[LimitedConnection]", newest.connections)
    most, address = connections_max(), newest.address
    of_address = [one for one in every if one.address == address and one is not newest]
    if len(of_address) >= most // ADDRESS_SHARE:
        _oldest(of_address).make_way()
    elif len(every) > most:
        _oldest([one for one in every if one is not newest]).make_way()


def _oldest(connections: list[LimitedConnection]) -> LimitedConnection:
    """Return the oldest connection without a whole request with a role, or else the oldest.

    If few have none, they are new: theirs is on its way, and is not read yet.
    """
    waiting = [one for one in connections if not one.has_request()]
    is_crowded = len(waiting) > len(connections) // NEW_SHARE
    return min(waiting if is_crowded else connections, key=lambda one: one.began)


def accept_many(bound: socket.socket) -> None:
    """Let the kernel complete connections in advance, and limit what it keeps of their answers.

    The server has made the queue as short as what it accepts at once, which is `ACCEPTS_MAX`.
    """
    bound.listen(BACKLOG)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log a connection that can't be accepted in a line. The loop tries again after a second."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        text = error.strerror
        _refused.log(time.monotonic_ns(), lambda: {"reason": text})
    else:
        loop.default_exception_handler(context)


#: Without a change, a line after so many intervals keeps the connection open.
_QUIET_INTERVALS_MAX: Final = 15


#: How soon a browser connects again when the server has ended its live updates.
_RETRY_MS: Final = 500


def make_app(shown: Site) -> Starlette:
    """Make the app, without its guard."""

    async def live(request: Request) -> Response:
        async def lines() -> AsyncIterator[str]:
            last, quiet = (-1, False), 0
            yield f"retry: {_RETRY_MS}\n\n"
            while not (shown.stopping.is_set() or await request.is_disconnected()):
                now = (shown.follower.view.version, await shown.broker.find_broker())
                if now != last:
                    yield f"data: {now[0]}\n\n"
                    last, quiet = now, 0
                elif quiet >= _QUIET_INTERVALS_MAX:
                    yield ":\n\n"
                    quiet = 0
                quiet += 1
                pause = shown.follower.pace.round_seconds(time.thread_time())
                with suppress(TimeoutError):
                    await asyncio.wait_for(shown.stopping.wait(), pause)

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    routes = [
        *overview.routes(shown),
        *tasks.routes(shown),
        *broker.routes(shown),
        Route("/live", live),
        Route("/healthz", healthz),
        *site.static_routes(),
    ]
    return Starlette(routes=routes, exception_handlers={TaskyardError: shown.error})


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
            http=LimitedConnection,
            ws="none",  # a WebSocket would leave these limits
            backlog=ACCEPTS_MAX,
            log_config=None,  # the log of this process has its lines
            log_level="error",  # a warning is about a malformed request, which has its answer
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        super().__init__(config)
        self._stopping = stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        await super().startup(sockets)
        for bound in sockets or ():
            accept_many(bound)

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
