"""The first view, and the views of campaigns: counters, charts over time, failures, the graph."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from taskyard.web.charts import durations_figure, throughput_figure
from taskyard.web.graph import Shape, draw
from taskyard.web.views import site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from taskyard.web.views.site import Site

#: Campaigns and groups of failures on the overview. Other views have all of them.
CAMPAIGNS_MAX: Final = 10
FAILURES_MAX: Final = 5


def routes(shown: Site) -> list[BaseRoute]:
    async def overview(request: Request) -> Response:
        status = await shown.broker.ask("status")
        with shown.view() as view:
            campaigns = view.campaigns()
            oldest_ns, left_ns = view.oldest_ready_ns(), view.time_left_ns()
            failures = view.failures_now()[:FAILURES_MAX]
        return shown.page(
            request,
            "overview.html",
            broker=status,
            oldest_ns=oldest_ns,
            left_ns=left_ns,
            failures=failures,
            campaigns=campaigns[:CAMPAIGNS_MAX],
            campaigns_total=len(campaigns),
        )

    async def campaigns(request: Request) -> Response:
        with shown.view() as view:
            found = view.campaigns()
        return shown.page(request, "campaigns.html", campaigns=found)

    async def campaign(request: Request) -> Response:
        name = request.query_params.get("name", "")
        with shown.view() as view:
            found = view.campaign(name)
        return shown.page(request, "campaign.html", **found)

    async def throughput(_: Request) -> Response:
        with shown.view() as view:
            until_ns = time.time_ns() if shown.broker.is_live else 0
            restarts = shown.follower.restarts()
            pauses = view.broker.pauses
            return JSONResponse(throughput_figure(view.series, until_ns, restarts, pauses))

    async def durations(request: Request) -> Response:
        chosen = site.wanted(request)
        with shown.view() as view:
            return JSONResponse(durations_figure(view.durations(view.select(chosen))))

    return [
        Route("/", overview),
        Route("/campaigns", campaigns),
        Route("/campaign", campaign),
        _graph_route(shown),
        Route("/charts/throughput", throughput),
        Route("/charts/durations", durations),
    ]


def _graph_route(shown: Site) -> BaseRoute:
    shapes: dict[str, Shape] = {}

    async def graph(request: Request) -> Response:
        query = request.query_params
        name, focus = query.get("campaign", ""), query.get("task", "")
        first = site.number(request, "level")
        with shown.view() as view:
            drawing = draw(view, name, query.getlist("open"), first, focus, shapes=shapes)

        def address(opened: Sequence[str], level: int = first) -> str:
            """Return the address of this graph with other open groups, or from another level on."""
            pairs = [("campaign", name), ("task", focus), ("level", level or "")]
            pairs += [("open", one) for one in opened]
            return f"/graph?{urlencode([pair for pair in pairs if pair[1]])}"

        return shown.page(
            request, "graph.html", drawing=drawing, campaign=name, focus=focus, address=address
        )

    return Route("/graph", graph)
