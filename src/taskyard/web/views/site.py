"""The base of all views: the follower, the broker, templates, and the static files of the page.

A browser keeps static files, because another version has another address. Scripts import each other
by relative paths, so all of them have the same version.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from taskyard import __version__, design
from taskyard.client import task_filters
from taskyard.errors import NoBroker, TaskyardError, UnknownName, UserError
from taskyard.web import view
from taskyard.web.address import Role

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import Scope

    from taskyard.client.internal import BrokerLink
    from taskyard.client.task_filters import Filter
    from taskyard.web.follower import Follower
    from taskyard.web.view import View


#: The views in the bar at the top.
NAVIGATION: Final = (
    ("/", "Overview"),
    ("/campaigns", "Campaigns"),
    ("/tasks", "Tasks"),
    ("/workers", "Workers"),
    ("/lanes", "Lanes"),
    ("/timeline", "Timeline"),
    ("/brokers", "Brokers"),
    ("/health", "Health"),
)

_NUMBER_DIGITS_MAX: Final = 12

#: A form has a filter or a name, and an action.
_FORM_BYTES_MAX: Final = 64 * 1024


class Site:
    """The follower and the broker of a state, and its templates."""

    def __init__(self, follower: Follower, broker: BrokerLink, title: str) -> None:
        self.follower, self.broker = follower, broker
        #: Set when the server ends, so that live updates end too.
        self.stopping = asyncio.Event()
        self._title = title
        self._templates = Environment(
            loader=PackageLoader("taskyard.web"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=view.visible,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "count": view.count,
            "counted": view.counted,
            "duration": view.duration,
            "size": view.size,
            "moment": view.moment,
            "seconds": view.seconds,
            "shares": view.shares,
        }
        self._templates.globals |= {
            "version": __version__,
            "static": static_root(),
            "navigation": NAVIGATION,
            "link": link,
            "target": target,
            "tasks_link": tasks_link,
        }

    def load_templates(self) -> None:
        """Compile all templates, so that the first request of a view does not wait for its own."""
        for name in self._templates.list_templates():
            self._templates.get_template(name)

    @contextmanager
    def view(self) -> Iterator[View]:
        """Hold the view still for one answer."""
        with self.follower.lock:
            yield self.follower.view

    def page(
        self,
        request: Request,
        template: str,
        code: HTTPStatus = HTTPStatus.OK,
        **values: Any,  # noqa: ANN401  # of the template
    ) -> Response:
        """Render a template."""
        shown = {
            "title": self._title,
            "path": request.url.path,
            "is_operator": request.scope.get("role") is Role.OPERATOR,
            "is_live": self.broker.is_live,
            "rows_behind": self.follower.rows_behind,
            "rows_missing": self.follower.rows_missing,
            "problem": self.follower.error,
            "done": request.query_params.get("done", ""),
        }
        text = self._templates.get_template(template).render(**shown, **values)
        return HTMLResponse(text, code)

    async def error(self, request: Request, error: Exception) -> Response:
        """Show what went wrong, in the words of the command line."""
        code = HTTPStatus.BAD_GATEWAY
        if isinstance(error, UnknownName):
            code = HTTPStatus.NOT_FOUND
        elif isinstance(error, UserError):
            code = HTTPStatus.BAD_REQUEST
        elif isinstance(error, NoBroker):
            code = HTTPStatus.SERVICE_UNAVAILABLE
        assert isinstance(error, TaskyardError)  # noqa: S101  # registered for no other
        return self.page(request, "error.html", code, message=str(error))


def wanted(request: Request) -> Filter:
    """Return the filter in the address of a request. Raises UserError."""
    return task_filters.parse(request.query_params.get("filter", ""))


def number(request: Request, name: str, default: int = 0) -> int:
    """Return a number in the address of a request, or the default if it is none."""
    return number_in(request.query_params.get(name, ""), default)


def number_in(text: str, default: int) -> int:
    """Return the number that a peer sent, or the default if it is no number, or too long."""
    return int(text) if text.isdecimal() and len(text) <= _NUMBER_DIGITS_MAX else default


async def form(request: Request) -> dict[str, str]:
    """Return the fields of a form and of its address. Raises UserError if it is not whole."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _FORM_BYTES_MAX:
                raise UserError(f"form: longer than {_FORM_BYTES_MAX:,} bytes")
    except ClientDisconnect as error:
        raise UserError("form: the connection was closed before its end") from error
    sent = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
    return {**request.query_params, **sent}


def subject_name(service: str | None, lane: str | None) -> str:
    """Return the words for a lane, a service, or everything."""
    where = "everything" if service is None else f"service {service}"
    return where if lane is None else f"lane {lane or '(open)'} of {where}"


def link(path: str, **query: object) -> str:
    """Return an address with a query. Empty values are left out."""
    pairs = {name: value for name, value in query.items() if value not in ("", None)}
    return f"{path}?{urlencode(pairs)}" if pairs else path


def target(path: str, **fields: str | None) -> str:
    """Return the address of a form, with fields that are sent exactly. None is left out.

    A browser changes the value of a hidden input: a NUL, and the end of a line.
    """
    pairs = {name: value for name, value in fields.items() if value is not None}
    return f"{path}?{urlencode(pairs)}" if pairs else path


def tasks_link(**fields: object) -> str:
    """Return the address of the tasks that match a filter's fields."""
    return link("/tasks", filter=task_filters.Filter(**fields).text)  # type: ignore[arg-type]


# Static files.

_STATIC: Final = Path(str(files("taskyard.web"))) / "static"

#: A year. Caches between browser and page keep nothing, as the page is not public.
_KEPT: Final = {"Cache-Control": "private, max-age=31536000, immutable"}

#: Of the hash in the address.
_DIGEST_BYTES: Final = 8


@cache
def static_root() -> str:
    """Return the address of the directory of all files."""
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(_STATIC.iterdir()):
        hashed.update(path.name.encode() + path.read_bytes())
    texts = (design.stylesheet(), design.module(), importlib.metadata.version("plotly"))
    hashed.update("".join(texts).encode())
    return f"/static/{hashed.hexdigest()}"


def static_routes() -> list[BaseRoute]:
    """Return the routes of all files."""
    return [
        Route(f"{static_root()}/plotly.js", _plotly),
        Route(f"{static_root()}/design.css", _design_css),
        Route(f"{static_root()}/design.js", _design_js),
        Mount(static_root(), _KeptFiles(directory=str(_STATIC))),
    ]


class _KeptFiles(StaticFiles):
    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_KEPT)
        return response


async def _plotly(_: Request) -> Response:
    """Send Plotly's script from its wheel."""
    path = Path(str(files("plotly") / "package_data" / "plotly.min.js"))
    return FileResponse(path, headers=_KEPT)


async def _design_css(_: Request) -> Response:
    return Response(design.stylesheet(), headers=_KEPT, media_type="text/css")


async def _design_js(_: Request) -> Response:
    return Response(design.module(), headers=_KEPT, media_type="text/javascript")
