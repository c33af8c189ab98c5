"""The list of tasks, one task, its output, and actions on tasks."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from taskyard.client import task_filters
from taskyard.errors import UserError
from taskyard.web.views import site

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from taskyard.client.client import Client
    from taskyard.core.events import Scope
    from taskyard.web.views.site import Site

#: Tasks on one page of the list.
PAGE_TASKS: Final = 100

#: Bytes of output in one reply.
_OUTPUT_BYTES_MAX: Final = 64 * 1024

#: Tasks that an action by names takes: those of a filter that no scope describes.
_NAMES_MAX: Final = 10_000

_PRIORITY_MAX: Final = 1_000_000


def routes(shown: Site) -> list[BaseRoute]:
    async def tasks(request: Request) -> Response:
        chosen, first = site.wanted(request), site.number(request, "first")
        with shown.view() as view:
            page = view.page(chosen, first, PAGE_TASKS)
        return shown.page(request, "tasks.html", filter=chosen, page=page, per_page=PAGE_TASKS)

    async def task(request: Request) -> Response:
        name = request.query_params.get("name", "")
        document = await shown.broker.ask("show", name)
        why = await shown.broker.ask("explain", name)
        with shown.view() as view:
            befores, dependents = view.neighbours(name)
        return shown.page(
            request,
            "task.html",
            name=name,
            task=document,
            why=why,
            befores=befores,
            dependents=dependents,
        )

    async def output(request: Request) -> Response:
        """Return a part of a task's output, and whether more may follow."""
        query = request.query_params
        offset, stderr = site.number(request, "offset"), query.get("stream") == "stderr"

        def read(client: Client) -> Any:  # noqa: ANN401  # a page of output
            return client.output_page(
                query.get("name", ""), offset, stderr=stderr, count=_OUTPUT_BYTES_MAX
            )

        page = await shown.broker.call(read)
        return JSONResponse(
            {
                "text": page.data.decode(errors="replace"),
                "next": offset + len(page.data),
                "total": page.bytes_total,
                "live": page.live,
            }
        )

    return [
        Route("/tasks", tasks),
        Route("/task", task),
        Route("/task/output", output),
        _action_route(shown),
    ]


def _action_route(shown: Site) -> BaseRoute:
    async def act(request: Request) -> Response:
        """Carry out an action on the tasks of a filter, or on one task."""
        form = await site.form(request)
        action, text, name = (form.get(field, "") for field in ("action", "filter", "name"))
        target = [name] if name else _target(shown, text)
        count = await shown.broker.act(_change(action, target, form))
        done = f"{_DONE[action]} {count:,} {'task' if count == 1 else 'tasks'}"
        back = site.link("/task", name=name, done=done)
        if not name:
            back = site.link("/tasks", filter=text, done=done)
        return RedirectResponse(back, HTTPStatus.SEE_OTHER)

    return Route("/tasks/actions", act, methods=["POST"])


#: Actions, with the words of their result.
_DONE: Final = {
    "retry": "retried",
    "cancel": "cancelled",
    "expire": "expired",
    "priority": "changed the priority of",
}


def _target(shown: Site, text: str) -> Scope | list[str]:
    """Return what an action is for: a scope, or names if a scope can't say it."""
    chosen = task_filters.parse(text)
    if chosen.scope is not None:
        return chosen.scope
    with shown.view() as view:
        rows = view.select(chosen)
        if len(rows) > _NAMES_MAX:
            raise UserError(
                f"filter: {len(rows):,} tasks match, and an action with --reason or --worker "
                f"takes {_NAMES_MAX:,} (add --campaign, --service, --lane or --only)"
            )
        return view.full_names(rows)


def _change(
    action: str, target: Scope | list[str], form: dict[str, str]
) -> Callable[[Client], int]:
    if action in ("retry", "cancel", "expire"):
        return lambda client: getattr(client, action)(target)
    if action == "priority":
        text = form.get("priority", "")
        if not text.lstrip("-").isdecimal() or abs(int(text)) > _PRIORITY_MAX:
            raise UserError(f"priority: not a whole number: {text!r}")
        return lambda client: client.edit(target, priority=int(text))
    raise UserError(f"unknown action {action!r}")
