"""Workers, lanes and services, and the timeline."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from taskyard.client import requests
from taskyard.errors import UserError
from taskyard.web.charts import timeline_figure
from taskyard.web.timeline import timeline_of
from taskyard.web.views import site

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from taskyard.client.internal import InternalClient
    from taskyard.web.timeline import Timeline
    from taskyard.web.views.site import Site

#: Lanes and workers on one page.
LANES_MAX: Final = 200
WORKERS_MAX: Final = 200

#: Current tasks that are named beside a worker.
WORKER_TASKS_MAX: Final = 5


#: The range of the timeline is in milliseconds, as browsers count.
_MILLISECOND_NS: Final = 1_000_000


def routes(shown: Site) -> list[BaseRoute]:
    async def workers(request: Request) -> Response:
        every = await shown.broker.ask("workers")
        first = site.number(request, "first")
        workers = every[first : first + WORKERS_MAX]
        with shown.view() as view:
            tasks = view.current_tasks({one["name"] for one in workers}, WORKER_TASKS_MAX)
            joined_ns = {one["name"]: view.broker.joined_ns(one["name"]) for one in workers}
        now_ns = time.time_ns()
        return shown.page(
            request,
            "workers.html",
            workers=workers,
            tasks=tasks,
            ages_ns={name: now_ns - at_ns for name, at_ns in joined_ns.items() if at_ns},
            first=first,
            total=len(every),
            per_page=WORKERS_MAX,
        )

    async def lanes(request: Request) -> Response:
        pattern = request.query_params.get("lane", "")
        service = request.query_params.get("service", "")

        def read(client: InternalClient) -> tuple[list[dict[str, Any]], object]:
            # `client.lanes` asks for five times as many, and the broker explains each of them.
            page = requests.lanes_page(service or None, pattern or None, count=LANES_MAX)
            return client._run_query(page)  # noqa: SLF001  # no other part of the client does this

        found, more = await shown.broker.call(read)
        status = await shown.broker.ask("status")
        return shown.page(
            request,
            "lanes.html",
            lanes=found,
            has_more=more is not None,
            services=status["services"],
            paused={(one["service"], one["lane"]) for one in status["pauses"]},
            is_all_paused=status["paused"],
            pattern=pattern,
            service=service,
        )

    return [
        Route("/workers", workers),
        Route("/lanes", lanes),
        _action_route(shown),
        *_timeline_routes(shown),
    ]


def _action_route(shown: Site) -> BaseRoute:
    async def act(request: Request) -> Response:
        """Pause or resume a lane, a service, or everything."""
        form = await site.form(request)
        action = form.get("action", "")
        service, lane = form.get("service"), form.get("lane")
        if action not in ("pause", "resume"):
            raise UserError(f"unknown action {action!r}")
        await shown.broker.act(lambda client: getattr(client, action)(service, lane))
        done = f"{'paused' if action == 'pause' else 'resumed'} {site.place_name(service, lane)}"
        return RedirectResponse(site.link("/lanes", done=done), HTTPStatus.SEE_OTHER)

    return Route("/lanes/actions", act, methods=["POST"])


def _timeline_routes(shown: Site) -> list[BaseRoute]:
    def read(request: Request) -> Timeline:
        begin_ns, end_ns = (site.number(request, end) * _MILLISECOND_NS for end in ("from", "to"))
        with shown.view() as view:
            return timeline_of(view, begin_ns, end_ns)

    async def timeline(request: Request) -> Response:
        chart = f"/charts/timeline?{request.url.query}"
        return shown.page(request, "timeline.html", timeline=read(request), chart=chart)

    async def chart(request: Request) -> Response:
        return JSONResponse(timeline_figure(read(request)))

    return [Route("/timeline", timeline), Route("/charts/timeline", chart)]
