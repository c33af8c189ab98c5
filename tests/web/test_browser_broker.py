"""The views of the broker itself in a real browser, beside a real broker and a relay."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import zmq

from tests.kit.processes import Broker, Running, Worker, run_here
from tests.web.test_browser import Site, Tab
from tests.wire.wmp.kit import frames

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext

ANY = "dwork=tcp://127.0.0.1:0"
ANY_WMP = "wmp=tcp://127.0.0.1:0"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory, window: BrowserContext) -> Iterator[Tab]:
    """Open a tab of an operator, beside a broker that has run a task."""
    directory: Path = tmp_path_factory.mktemp("broker")
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(directory, "--listen", ANY, "--listen", ANY_WMP))

        def start_relay(listen: str, upstream: str) -> str:
            words = ("relay", "--until-eof", "--listen", listen, "--to", upstream)
            relay = stack.enter_context(Running(directory, *words, stderr=subprocess.DEVNULL))
            return relay.line().split()[2]

        place = start_relay(ANY, f"dwork={broker.endpoints[1]}")
        stack.enter_context(Worker(directory, "--broker", place))
        place = start_relay(ANY_WMP, f"wmp={broker.endpoints[2]}")
        plain: zmq.Socket[bytes] = stack.enter_context(zmq.Context.instance().socket(zmq.DEALER))
        plain.connect(place)
        plain.send_multipart(frames("READY", {"worker": "plain", "slots": 1}))
        assert plain.poll(10_000), "the manager pings it"
        assert run_here(directory, "submit", "--wait", "--", "true")[0] == 0
        other = tmp_path_factory.mktemp("other")
        stack.enter_context(Broker(other))
        here, there = str(directory / ".taskyard"), str(other / ".taskyard")
        down = ("--forward-to", there, "--name", "down", "--service", "elsewhere")
        stack.enter_context(Worker(directory, "--state", here, *down))
        up = ("--forward-to", here, "--forward-as", "the-other")
        stack.enter_context(Worker(other, "--state", there, *up))
        forwarded = ("--wait", "--state", there, "--campaign", "c", "--", "true")
        assert run_here(other, "submit", *forwarded)[0] == 0
        own = ("--campaign", "a@nobody", "--name", "waits", "--service", "none", "--", "true")
        assert run_here(directory, "submit", *own)[0] == 0
        site = Site(directory)
        stack.enter_context(site.process)
        page = window.new_page()
        page.goto(site.quick_address)
        yield Tab(page, site)


def test_health_shows_times_and_charts(tab: Tab) -> None:
    open_in_both_widths(tab, "/health")
    tab.wait_for_text("#verdict", "Healthy: the broker accepts tasks")
    tab.wait_for_text("#services tbody tr", "exec")
    for chart in ("of=turns", "of=syncs", "of=run&service=exec", "of=wait&service=exec"):
        bars = f"[data-chart='/charts/health?{chart}'] .bars path"
        tab.page.wait_for_selector(bars, state="attached")  # the first bar may be empty


def open_in_both_widths(tab: Tab, address: str) -> None:
    """Open a view, and see that it fits into a wide window and a narrow one."""
    tab.open(address)
    for width in (390, 1280):
        tab.page.set_viewport_size({"width": width, "height": 800})
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.page.locator("h1").count() == 1
    assert not tab.complaints


def test_brokers_shows_that_it_runs(tab: Tab) -> None:
    open_in_both_widths(tab, "/brokers")
    tab.wait_for_text("#broker dd", "running")
    for dialect in ("native", "wmp"):
        row = tab.page.locator("#relays tbody tr").filter(has_text=dialect)
        address, _, connected_to, peers, *times = row.locator("td").all_inner_texts()
        assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
        assert (connected_to, peers) == ("this broker", "1")
        assert all(one.endswith(" ago") for one in times)


def test_brokers_shows_those_below(tab: Tab) -> None:
    tab.open("/brokers")
    row = tab.page.locator("#forwarders tbody tr")
    name, _, lower, service, *_ = row.locator("td").all_inner_texts()
    assert (name, service) == ("down", "elsewhere")
    assert lower.startswith("ipc://")
    assert lower.endswith("/other0/.taskyard/broker.sock")
