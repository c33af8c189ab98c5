"""The files of the page: scripts, styles and Plotly, at an address that their content decides.

A browser keeps them, because another version has another address. Scripts import each other by
relative paths, so all of them have the same version.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from taskyard import design

if TYPE_CHECKING:
    import os

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import Scope

_STATIC: Final = Path(str(files("taskyard.web"))) / "static"

#: A year. Caches between browser and page keep nothing, as the page is not public.
_KEPT: Final = {"Cache-Control": "private, max-age=31536000, immutable"}

#: Of the hash in the address.
_DIGEST_BYTES: Final = 8


@cache
def root() -> str:
    """Return the address of the directory of all files."""
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(_STATIC.iterdir()):
        hashed.update(path.name.encode() + path.read_bytes())
    texts = (design.stylesheet(), design.module(), importlib.metadata.version("plotly"))
    hashed.update("".join(texts).encode())
    return f"/static/{hashed.hexdigest()}"


def routes() -> list[BaseRoute]:
    """Return the routes of all files."""
    return [
        Route(f"{root()}/plotly.js", _plotly),
        Route(f"{root()}/design.css", _design_css),
        Route(f"{root()}/design.js", _design_js),
        Mount(root(), _KeptFiles(directory=str(_STATIC))),
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
