"""The list of tasks, a task with its story, its output, and actions on tasks."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from codecs import getincrementaldecoder
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from taskyard.client import task_filters
from taskyard.client.task_filters import Filter
from taskyard.core.identity import spelling
from taskyard.errors import TaskyardError, UnknownName, UserError
from taskyard.web import view
from taskyard.web.view import TaskPage
from taskyard.web.views import site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from taskyard.client.internal import InternalClient
    from taskyard.core.events import Scope
    from taskyard.web.events import TaskEvent
    from taskyard.web.views.site import Site
    from taskyard.wire.native.task_contents import Part


class StoryLine(Struct, frozen=True):
    """A sentence of a story."""

    time_ns: int
    text: str
    #: Good, bad, or neither, for its colour.
    tone: str = ""
    #: The reason in the words of the worker.
    detail: str = ""


#: Why a task became ready, by the reason of its event.
_READY: Final = {
    "submitted": "became ready",
    "released": "became ready: every task that it waits for is done",
    "returned": "became ready again",
    "expired": "became ready again",
    "due": "became ready",
    "retried": "became ready again",
}

#: Why a worker returned a task, by the name of the reason.
_RETURNED: Final = {
    "refused": "had no room for it after all",
    "transferred": "returned it to the queue",
    "deferred_back": "returned it to the end of its lane",
    "unlisted": "never received it",
    "left": "left",
    "restarted": "restarted",
    "broker_restarted": "can't list its tasks after the broker restarted",
}

#: What happened, by the kind of the event. Some kinds have further sentences in `_sentence`.
_SENTENCES: Final = {
    "leased": "attempt {attempt}: leased to {worker}{host}",
    "finished": "attempt {attempt} finished{ran}",
    "failed": "attempt {attempt} failed{ran}",
    "postponed": "attempt {attempt} failed{ran}, to be tried again",
    "expired": "attempt {attempt} lost: no heartbeat from {worker} in time",
    "stale": "a late report of {worker} on attempt {attempt} was refused",
    "worker_replaced": "{worker} was replaced by another process",
    "due": "due, became ready",
    "aged": "expired before it ran",
    "extended": "has to wait for more tasks",
    "cancelled": "cancelled",
    "retried": "retried with all its attempts",
    "moved": "moved to another lane",
    "reported": "reported as late",
    "released": "released from a held lane",
    "edited": "its terms were changed",
    "refunded": "the replaced worker came back, so its loss is not counted",
}

#: Kinds that a client requests. Their reason is the key of the client.
_COMMANDS: Final = ("submitted", "cancelled", "retried", "moved", "released", "edited")

_TONES: Final = {"finished": "good", "failed": "bad", "aged": "bad", "expired": "bad"}


def story_of(events: Sequence[TaskEvent], attempts: Sequence[Mapping[str, Any]]) -> list[StoryLine]:
    """Return the story of a task: a sentence for each event, the oldest first.

    `attempts` are from the task's document. They add hosts and run times.
    """
    by_number = {one["attempt"]: one for one in attempts}
    lines: list[StoryLine] = []
    for index, event in enumerate(events):
        last = events[index - 1] if index else None
        if event.kind == "ready" and last is not None and last.time_ns == event.time_ns:
            if last.kind != "due":
                lines[-1] = _joined(lines[-1], _READY.get(event.reason, "became ready"))
            continue
        is_again = event.kind == "submitted" and index > 0
        lines.append(_line(event, by_number.get(event.attempt), is_again=is_again))
    return lines


def _joined(line: StoryLine, more: str) -> StoryLine:
    return StoryLine(line.time_ns, f"{line.text}, {more}", line.tone, line.detail)


def _line(event: TaskEvent, attempt: Mapping[str, Any] | None, *, is_again: bool) -> StoryLine:
    text = _sentence(event, is_again=is_again).format(
        attempt=event.attempt,
        worker=f"worker {event.worker}" if event.worker else "its worker",
        host=_host(attempt or {}),
        ran=_ran(attempt or {}),
    )
    # Commands by a local socket have no key.
    if event.reason and event.kind in _COMMANDS:
        text = f"{text} {event.reason}"
    detail = event.reason if event.kind in ("failed", "postponed", "aged") else ""
    return StoryLine(event.time_ns, text, _TONES.get(event.kind, ""), detail)


def _sentence(event: TaskEvent, *, is_again: bool) -> str:
    """Return what happened, with names in braces for what differs."""
    found = _SENTENCES.get(event.kind, event.kind.replace("_", " "))
    match event.kind:
        case "submitted" if is_again:
            found = "submitted again under the same name"
        case "ready":
            found = _READY.get(event.reason, "became ready")
        case "failed" if not event.attempt:
            found = "failed"
        case "postponed" if not event.worker:
            found = "postponed by request"
        case "postponed" if not event.is_own_fault:
            found = "attempt {attempt} postponed by {worker}"
        case "returned":
            why = _RETURNED.get(event.reason, "returned it")
            found = f"attempt {{attempt}} ended: {{worker}} {why}"
    return found


def _host(attempt: Mapping[str, Any]) -> str:
    return f" on {attempt['host']}" if attempt.get("host") else ""


def _ran(attempt: Mapping[str, Any]) -> str:
    """Return how long an attempt ran, if it was measured."""
    started, ended = attempt.get("started"), attempt.get("ended")
    if started is None or ended is None:
        return ""
    return f" after {view.duration(view.seconds(ended - started)) or '0 s'}"


#: Tasks on one page of the list.
PAGE_TASKS: Final = 100

#: Bytes of output in an event, and bytes at the end of a long output that a page shows.
_OUTPUT_BYTES_MAX: Final = 64 * 1024
_OUTPUT_BYTES_SHOWN_MAX: Final = 512 * 1024

#: The time between two questions for more output of a running task.
_OUTPUT_SECONDS: Final = 1.0

#: Tasks that an action by names takes, if no scope describes the filter.
_NAMES_MAX: Final = 10_000

_PRIORITY: Final = re.compile("-?[0-9]{1,7}")
_PRIORITY_MAX: Final = 1_000_000


def routes(shown: Site) -> list[BaseRoute]:
    async def tasks(request: Request) -> Response:
        error, code = "", HTTPStatus.OK
        try:
            chosen = site.wanted(request)
        except UserError as problem:
            error, code, chosen = str(problem), HTTPStatus.BAD_REQUEST, Filter()
        first = site.number(request, "first")
        with shown.view() as view:
            page = TaskPage([], 0, 0) if error else view.page(chosen, first, PAGE_TASKS)
        return shown.page(
            request,
            "tasks.html",
            code,
            filter=chosen,
            text=request.query_params["filter"] if error else chosen.text,
            error=error,
            page=page,
            per_page=PAGE_TASKS,
        )

    async def task(request: Request) -> Response:
        wanted = request.query_params.get("name", "")
        document, line = await shown.broker.call(lambda client: _shown_task(client, wanted))
        name = spelling(document["campaign"], document["name"])
        why = await shown.broker.ask("explain", name)
        with shown.view() as view:
            befores, dependents = view.neighbours(name)
            events = view.events_of(name)
        return shown.page(
            request,
            "task.html",
            name=name,
            line=line,
            task=document,
            why=why,
            command=shlex.join(document["argv"] or ()),
            story=story_of(events, document["attempts"]),
            befores=befores,
            dependents=dependents,
        )

    return [
        Route("/tasks", tasks),
        Route("/task", task),
        Route("/task/output", _output(shown)),
        _action_route(shown),
    ]


def _shown_task(client: InternalClient, wanted: str) -> tuple[dict[str, Any], str]:
    """Return a task by its name or by the line of a file, and that line if it is one."""
    try:
        document = client.show(wanted)
    except UnknownName:
        if (found := client.find_line(wanted)) is None:
            raise
        document = client.show(found.full_name)
    name = spelling(document["campaign"], document["name"])
    return document, client.line_labels([document]).get(name, "")


def _output(shown: Site) -> Callable[[Request], Awaitable[Response]]:
    async def output(request: Request) -> Response:
        """Send a task's output as events, and what it prints while it runs.

        Without a stream in the address it is stdout, or the event `stderr` if only that has text.
        """
        query = request.query_params
        attempt = site.number(request, "attempt") or None
        wanted = _Output(query.get("name", ""), query.get("stream", ""), attempt)
        # A browser that connects again goes on where it stopped.
        offset = site.number_in(request.headers.get("last-event-id", ""), -1)
        total = (await shown.broker.call(wanted.page(0, 1))).bytes_total
        if offset < 0:  # only the end of a long output, so that the page stays small
            offset = max(total - _OUTPUT_BYTES_SHOWN_MAX, 0)
        events = _output_events(shown, request, wanted, offset)
        return StreamingResponse(events, media_type="text/event-stream")

    return output


class _Output(Struct):
    """The output that a browser asks for."""

    name: str
    #: Empty: the stream that has text.
    stream: str
    attempt: int | None

    def page(
        self, offset: int, count: int = _OUTPUT_BYTES_MAX, stream: str = ""
    ) -> Callable[[InternalClient], Part]:
        """Return a request for a part of it."""
        wanted = stream or self.stream or "stdout"
        return lambda client: client.output_page(
            self.name, offset, wanted, attempt=self.attempt, count=count
        )


async def _output_events(
    shown: Site, request: Request, wanted: _Output, offset: int
) -> AsyncIterator[str]:
    decoder = getincrementaldecoder("utf-8")("replace")
    if offset and "last-event-id" not in request.headers:
        yield _sent({"skipped": offset}, offset)
    # The answer has begun. A browser asks again, and the error is the answer to that.
    with suppress(TaskyardError):
        while not (shown.stopping.is_set() or await request.is_disconnected()):
            page = await shown.broker.call(wanted.page(offset))
            if not (wanted.stream or page.bytes_total):
                other = await shown.broker.call(wanted.page(0, 1, "stderr"))
                if other.bytes_total:
                    yield "event: stderr\ndata: {}\n\n"
                    return
            offset += len(page.data)
            if page.data:
                yield _sent({"text": decoder.decode(page.data)}, offset)
            if offset >= page.bytes_total or not page.data:
                if not page.live:
                    break
                await asyncio.sleep(_OUTPUT_SECONDS)
        yield "event: end\ndata: {}\n\n"


def _sent(document: dict[str, object], offset: int) -> str:
    """Return an event for the browser. JSON has no line breaks."""
    return f"id: {offset}\ndata: {json.dumps(document)}\n\n"


def _action_route(shown: Site) -> BaseRoute:
    async def act(request: Request) -> Response:
        """Carry out an action on the tasks of a filter, or on one task."""
        form = await site.form(request)
        action, text, name = (form.get(field, "") for field in ("action", "filter", "name"))
        if action in ("pause", "resume"):
            done = await _pause(shown, action, task_filters.parse(text))
            return RedirectResponse(
                site.link("/tasks", filter=text, done=done), HTTPStatus.SEE_OTHER
            )
        target = [name] if name else _target(shown, text)
        count = await shown.broker.act(_change(action, target, form))
        done = f"{_DONE[action]} {count:,} {'task' if count == 1 else 'tasks'}"
        back = site.link("/task", name=name, done=done)
        if not name:
            back = site.link("/tasks", filter=text, done=done)
        return RedirectResponse(back, HTTPStatus.SEE_OTHER)

    return Route("/tasks/actions", act, methods=["POST"])


async def _pause(shown: Site, action: str, chosen: Filter) -> str:
    """Pause or resume the service or lane of a filter. Return what was done.

    Raises UserError if the filter selects anything else: tasks of a campaign can't be paused.
    """
    if chosen.service is None or chosen != Filter(
        service=chosen.service, lane=chosen.lane, sort=chosen.sort, reverse=chosen.reverse
    ):
        raise UserError(
            f"{action}: a service or a lane can be paused, but not other selections (use a filter "
            "with --service, or --service and --lane, alone)"
        )
    with shown.view() as view:
        count = view.page(chosen, 0, 1).total
    if action == "pause" and not count:
        raise UserError("pause: no task matches the filter")
    await shown.broker.act(lambda client: getattr(client, action)(chosen.service, chosen.lane))
    where = site.subject_name(chosen.service, chosen.lane)
    return f"{_DONE[action]} {where} with {count:,} {'task' if count == 1 else 'tasks'}"


#: Actions, with the words of their result.
_DONE: Final = {
    "retry": "retried",
    "cancel": "cancelled",
    "expire": "expired",
    "priority": "changed the priority of",
    "pause": "paused",
    "resume": "resumed",
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
) -> Callable[[InternalClient], int]:
    if action in ("retry", "cancel", "expire"):
        return lambda client: getattr(client, action)(target)
    if action == "priority":
        text = form.get("priority", "")
        if not _PRIORITY.fullmatch(text) or abs(int(text)) > _PRIORITY_MAX:
            raise UserError(f"priority: not a whole number: {text!r}")
        return lambda client: client.edit(target, priority=int(text))
    raise UserError(f"unknown action {action!r}")
