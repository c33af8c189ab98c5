"""Requests for tasks that no page sends, and output whose broker ends, without a broker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

from taskyard import testing
from taskyard.campaign.reader import read_campaign
from taskyard.campaign.shell_lines import line_name
from taskyard.campaign.submitter import submit_campaign
from taskyard.errors import NoBroker, TaskyardError, UnknownName
from taskyard.web.views import tasks
from tests.kit.clients import internal
from tests.web.asgi import Reply, send

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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


def test_task_is_found_by_its_line_and_shown_with_it(tmp_path: Path) -> None:
    (tmp_path / "cmds.txt").write_text("echo a\n")
    with testing.broker() as running, internal(running.client()) as client:
        loaded = read_campaign(tmp_path / "cmds.txt")
        submit_campaign(client, loaded, "cmds", on_rejected=lambda *_: None)
        for wanted in ("cmds.txt:1", "cmds/1", f"cmds/{line_name('echo a')}"):
            document, line = tasks._shown_task(client, wanted)  # noqa: SLF001  # needs no page
            assert (document["name"], line) == (line_name("echo a"), "cmds.txt:1")
        with pytest.raises(UnknownName):
            tasks._shown_task(client, "none.txt:1")  # noqa: SLF001
