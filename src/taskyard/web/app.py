"""The addresses of the page, each with the function that answers it.

Every view has an address that shows it again: names and filters are in the query, because a name
may contain any character. GET changes nothing. Views are HTML, charts are JSON for Plotly, and
`/live` sends a line when something has changed, after which a page asks for its own view again.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from taskyard.errors import TaskyardError
from taskyard.web import assets
from taskyard.web.views import broker, overview, places, tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from taskyard.web.views.site import Site

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
        *places.routes(shown),
        *broker.routes(shown),
        Route("/live", live),
        Route("/healthz", healthz),
        *assets.routes(),
    ]
    return Starlette(routes=routes, exception_handlers={TaskyardError: shown.error})
