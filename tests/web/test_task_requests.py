"""Requests for tasks that no page sends, and output whose broker ends, without a broker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

from taskyard.errors import NoBroker, TaskyardError
from taskyard.web.views import tasks
from tests.web.asgi import Reply, send

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from taskyard.web.views.site import Site


class FakeSite:
    """A broker that answers some questions for output, as far as these addresses use it."""

    def __init__(self, answers: int) -> None:
        self.broker, self.stopping = self, asyncio.Event()
        self._answers = answers

    async def call(self, _: Callable[..., Any]) -> Any:
        if not self._answers:
            raise NoBroker("no broker is running")
        self._answers -= 1
        return SimpleNamespace(bytes_total=1 << 20, data=b"printed", live=True)

    act = call

    async def error(self, _: Request, error: Exception) -> PlainTextResponse:
        return PlainTextResponse(str(error), 400)

    def send(self, method: str, address: str, **headers: str) -> Reply:
        handlers = {TaskyardError: self.error}
        app = Starlette(
            routes=tasks.routes(cast("Site", self)), exception_handlers=cast("Any", handlers)
        )
        return send(app, method, address, headers)


@pytest.mark.parametrize("last", ["5", "9" * 5000, "x"])
def test_output_of_a_broker_that_is_gone_is_an_error(last: str) -> None:
    headers = {"last-event-id": last}
    assert FakeSite(0).send("GET", "/task/output?name=a", **headers).status == 400


def test_output_ends_with_its_broker() -> None:
    found = FakeSite(2).send("GET", "/task/output?name=a", **{"last-event-id": "5"})
    assert found.status == 200
    assert found.body == b'id: 12\ndata: {"text": "printed"}\n\n'


@pytest.mark.parametrize("text", ["", "-", "--5", "5-", "1000001", "9" * 5000, "\u00b2", "\u0665"])
def test_priority_that_is_no_number_is_refused(text: str) -> None:
    found = FakeSite(0).send(
        "POST", f"/tasks/actions?action=priority&name=a&priority={quote(text)}"
    )
    assert found.body.decode() == f"priority: not a whole number: {text!r}"
