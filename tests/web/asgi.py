"""Send a request to an app without a socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from msgspec import Struct
from starlette.datastructures import Headers

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message


class Reply(Struct):
    """The whole response."""

    status: int
    headers: Headers
    body: bytes = b""


def send(
    app: ASGIApp, method: str, address: str, headers: dict[str, str], body: bytes = b""
) -> Reply:
    """Send one request and return the response."""
    path, _, query = address.partition("?")
    given = [(name.encode(), text.encode()) for name, text in headers.items()]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},  # else a file waits for a disconnect
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": given,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
    }
    found: list[Reply] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def on_message(message: Message) -> None:
        if message["type"] == "http.response.start":
            found.append(Reply(message["status"], Headers(raw=message["headers"])))
        else:
            found[0].body += message.get("body", b"")

    async def run() -> None:
        await app(scope, receive, on_message)

    asyncio.run(run())
    return found[0]
