"""The broker: its health, workers, lanes, timeline, relays and forwarders, and metrics."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from taskyard.client import requests
from taskyard.client.requests import problems_of
from taskyard.errors import TaskyardError, UnknownName, UserError
from taskyard.web import metrics
from taskyard.web.charts import histogram_figure, timeline_figure, timeline_of
from taskyard.web.views import site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from taskyard.client.internal import InternalClient
    from taskyard.web.charts import Timeline
    from taskyard.web.views.site import Site


#: A broker that takes longer to answer counts as away. Programs that collect metrics wait for 10 s.
_REPLY_SECONDS: Final = 5.0
#: A supervisor waits for 5 s.
_READY_SECONDS: Final = 3.0

#: Forwarders, and services with charts of their own, on one page.
FORWARDERS_MAX: Final = 200
SERVICES_MAX: Final = 20

#: Charts by name: the bounds of the buckets, and the title of the axis.
_BROKER_CHARTS: Final = {"turns": ("turn_bounds", "turns"), "syncs": ("turn_bounds", "commits")}
_SERVICE_CHARTS: Final = {"run": ("task_bounds", "attempts"), "wait": ("task_bounds", "tasks")}


def routes(shown: Site) -> list[BaseRoute]:
    async def brokers(request: Request) -> Response:
        status, workers = await shown.broker.ask("status"), await shown.broker.ask("workers")
        forwarders = [one for one in workers if one["forwards"]]
        return shown.page(
            request,
            "brokers.html",
            broker=status,
            health=status["health"],
            forwarders=forwarders[:FORWARDERS_MAX],
            forwarders_more=max(len(forwarders) - FORWARDERS_MAX, 0),
        )

    async def health(request: Request) -> Response:
        status = await shown.broker.ask("status")
        found = status["health"]
        services = [] if found is None else sorted(found["services"], key=_by_attempts)
        return shown.page(
            request,
            "health.html",
            health=found,
            problems=[] if found is None else list(problems_of(status)),
            services=services[:SERVICES_MAX],
            services_more=max(len(services) - SERVICES_MAX, 0),
            behind=shown.follower.rows_behind,
        )

    async def chart(request: Request) -> Response:
        found = (await shown.broker.ask("status"))["health"]
        query = request.query_params
        return JSONResponse(_chart(found, query.get("of", ""), query.get("service")))

    return [
        Route("/brokers", brokers),
        Route("/health", health),
        Route("/charts/health", chart),
        *_program_routes(shown),
        *_worker_routes(shown),
        _action_route(shown),
        *_timeline_routes(shown),
    ]


def _by_attempts(service: Mapping[str, Any]) -> int:
    """Sort services with the most attempts first."""
    attempts: dict[str, int] = service["attempts"]
    return -sum(attempts.values())


def _chart(health: Mapping[str, Any] | None, name: str, service: str | None) -> dict[str, Any]:
    """Return the chart of a histogram. Without a broker it is empty."""
    charts = _BROKER_CHARTS if service is None else _SERVICE_CHARTS
    if name not in charts:
        raise UnknownName(f"unknown chart {name!r}")
    bounds, title = charts[name]
    if health is None:
        return histogram_figure([], [], title)
    if service is None:
        return histogram_figure(health[bounds], health[name]["counts"], title)
    for one in health["services"]:
        if one["name"] == service:
            return histogram_figure(health[bounds], one[name]["counts"], title)
    return histogram_figure([], [], title)


async def _live(shown: Site, method: str, seconds: float) -> Any:  # noqa: ANN401  # any reply
    """Return a reply of the running broker, or None if it does not answer in time."""
    with suppress(TaskyardError, TimeoutError):
        reply = await asyncio.wait_for(shown.broker.ask(method), seconds)
        return reply if shown.broker.is_live else None
    return None


async def _problem(shown: Site) -> str:
    """Return why the page is not ready. Empty: it is."""
    if shown.follower.error is not None:  # it names files, and this needs no token
        return "the page can't read the journal (see its log)"
    if not shown.follower.caught_up.is_set():
        return f"the page reads the journal, {shown.follower.rows_behind:,} rows behind"
    status = await _live(shown, "status", _READY_SECONDS)
    return "the broker does not answer" if status is None else ""


def _program_routes(shown: Site) -> list[BaseRoute]:
    """Return the addresses for programs: metrics, and whether the page is ready."""

    async def exposition(_: Request) -> Response:
        status = await _live(shown, "status", _REPLY_SECONDS)
        workers = None if status is None else await _live(shown, "workers", _REPLY_SECONDS)
        status = None if workers is None else status
        text = metrics.exposition(status, workers or (), shown.follower.rows_behind)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def readyz(_: Request) -> Response:
        if problem := await _problem(shown):
            return PlainTextResponse(f"not ready: {problem}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return PlainTextResponse("ok\n")

    return [Route("/metrics", exposition), Route("/readyz", readyz)]


#: Lanes and workers on one page.
LANES_MAX: Final = 200
WORKERS_MAX: Final = 200

#: Current tasks that are named beside a worker.
WORKER_TASKS_MAX: Final = 5


#: The range of the timeline is in milliseconds, as browsers count.
_MILLISECOND_NS: Final = 1_000_000


def _worker_routes(shown: Site) -> list[BaseRoute]:
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

    return [Route("/workers", workers), Route("/lanes", lanes)]


def _action_route(shown: Site) -> BaseRoute:
    async def act(request: Request) -> Response:
        """Pause or resume a lane, a service, or everything."""
        form = await site.form(request)
        action = form.get("action", "")
        service, lane = form.get("service"), form.get("lane")
        if action not in ("pause", "resume"):
            raise UserError(f"unknown action {action!r}")
        await shown.broker.act(lambda client: getattr(client, action)(service, lane))
        done = f"{'paused' if action == 'pause' else 'resumed'} {site.subject_name(service, lane)}"
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
