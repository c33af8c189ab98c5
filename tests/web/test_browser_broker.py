"""The views of the broker itself in a real browser, beside a real broker and a relay."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.kit.processes import Broker, Running, Worker, run_here
from tests.pipeline.browser import launched
from tests.web.test_browser import Site, Tab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ANY = "dwork=tcp://127.0.0.1:0"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Open a tab of an operator, beside a broker that has run a task."""
    directory: Path = tmp_path_factory.mktemp("broker")
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(directory, "--listen", ANY))
        words = ("relay", "--until-eof", "--listen", ANY, "--to", f"dwork={broker.endpoints[1]}")
        relay = stack.enter_context(Running(directory, *words, stderr=subprocess.DEVNULL))
        stack.enter_context(Worker(directory, "--broker", relay.line().split()[2]))
        assert run_here(directory, "submit", "--wait", "--", "true")[0] == 0
        site = Site(directory)
        stack.enter_context(site.process)
        page = stack.enter_context(launched()).new_page()
        page.goto(site.address)
        yield Tab(page, site)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("address", ["/brokers", "/health"])
def test_view_opens_without_complaints(tab: Tab, address: str, width: int) -> None:
    tab.page.set_viewport_size({"width": width, "height": 800})
    tab.open(address)
    assert tab.page.locator("h1").count() == 1
    assert not tab.complaints
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width


def test_health_shows_times_and_charts(tab: Tab) -> None:
    tab.page.set_viewport_size({"width": 1280, "height": 800})
    tab.open("/health")
    tab.wait_for_text("#services tbody tr", "exec")
    for chart in ("of=turns", "of=syncs", "of=run&service=exec", "of=wait&service=exec"):
        bars = f"[data-chart='/charts/health?{chart}'] .bars path"
        tab.page.wait_for_selector(bars, state="attached")  # the first bar may be empty


def test_brokers_shows_that_it_runs(tab: Tab) -> None:
    tab.open("/brokers")
    tab.wait_for_text("#broker dd", "running")
    tab.wait_for_text("#relays tbody tr", "this broker")
    tab.wait_for_text("#forwarders", "No forwarder is connected.")
