"""Readiness and metrics of a page whose broker fails in every way, without a broker."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
from starlette.applications import Starlette

from taskyard.errors import NoBroker
from taskyard.web.views import broker
from tests.kit.processes import PATIENCE_SECONDS
from tests.web.asgi import Reply, send

if TYPE_CHECKING:
    from taskyard.web.views.site import Site


class FakeSite:
    """A follower and a broker, as far as these addresses use them."""

    def __init__(self) -> None:
        self.follower = self.broker = self
        self.error: str | None = None
        self.caught_up = threading.Event()
        self.caught_up.set()
        self.rows_behind = 1234
        self.is_live = True
        self.is_hanging = False

    async def ask(self, method: str) -> Any:
        if self.is_hanging:
            await asyncio.Event().wait()
        if not self.is_live:
            raise NoBroker("no broker is running")
        return {"services": [], "health": None} if method == "status" else []

    def get(self, path: str) -> Reply:
        routes = broker.routes(cast("Site", self))
        return send(Starlette(routes=routes), "GET", path, {"host": "page"})

    def ready(self) -> tuple[int, str]:
        found = self.get("/readyz")
        return found.status, found.body.decode()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    monkeypatch.setattr(broker, "_REPLY_SECONDS", 0.05)
    monkeypatch.setattr(broker, "_READY_SECONDS", 0.05)
    return FakeSite()


def test_page_is_ready_when_its_broker_answers(site: FakeSite) -> None:
    assert site.ready() == (200, "ok\n")


def test_page_that_reads_the_journal_is_not_ready(site: FakeSite) -> None:
    site.caught_up.clear()
    text = "not ready: the page reads the journal, 1,234 rows behind\n"
    assert site.ready() == (503, text)


def test_page_that_can_not_read_the_journal_is_not_ready(site: FakeSite) -> None:
    site.error = "/somewhere/.taskyard: the journal is damaged"
    assert site.ready() == (503, "not ready: the page can't read the journal (see its log)\n")


@pytest.mark.parametrize("how", ["gone", "hanging"])
def test_broker_that_does_not_answer_is_down(site: FakeSite, how: str) -> None:
    site.is_live = how == "hanging"
    site.is_hanging = how == "hanging"
    assert site.ready() == (503, "not ready: the broker does not answer\n")
    text = site.get("/metrics").body.decode()
    assert "taskyard_broker_up 0.0" in text
    assert "taskyard_slots" not in text


def test_probe_of_a_hanging_broker_is_answered_in_time(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics wait longer than a supervisor does."""
    monkeypatch.setattr(broker, "_REPLY_SECONDS", PATIENCE_SECONDS)
    site.is_hanging = True
    assert site.ready() == (503, "not ready: the broker does not answer\n")


def test_metrics_are_text_of_the_format_that_all_versions_read(site: FakeSite) -> None:
    found = site.get("/metrics")
    assert found.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "taskyard_broker_up 1.0" in found.body.decode()
