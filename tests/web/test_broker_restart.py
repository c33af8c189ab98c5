"""A broker that is killed under an open page of `up`."""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from taskyard.client.client import Client
from taskyard.process.state_files import LOCK_FILE, live_writer
from tests.kit.processes import until
from tests.web.test_browser import Site, Tab
from tests.web.test_up_page import UpWithPage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext

pytestmark = pytest.mark.slow

AWAY = re.compile("No broker (is running|answers here)")


class UpSite(Site):
    """The page of an `up`."""

    def __init__(self, up: UpWithPage) -> None:
        self.process, self.address = up, up.address
        self.root = self.address.partition("/?")[0]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_open_pages_outlive_a_killed_broker(
    tmp_path: Path, stack: ExitStack, window: BrowserContext
) -> None:
    """The page shows that the broker is away, finds the next one, and goes on by itself."""
    up = stack.enter_context(UpWithPage(tmp_path))
    state, site = tmp_path / ".taskyard", UpSite(up)
    client = stack.enter_context(Client(state=state))
    client.submit(["true"], name="before")
    window.new_page().goto(site.quick_address)
    tabs = [Tab(window.new_page(), site) for _ in range(2)]
    for tab, address in zip(tabs, ("/tasks", "/lanes"), strict=True):
        tab.open(address)
        tab.page.bring_to_front()
    tabs[0].wait_for_text("#rows", "before")
    tabs[0].page.wait_for_selector("#actions button")
    first = live_writer(state / LOCK_FILE)
    assert first is not None
    os.kill(up.pid, signal.SIGSTOP)  # the restart waits until the page has shown it
    os.kill(first, signal.SIGKILL)
    for tab in tabs:
        tab.wait_for_text("#notes", AWAY)
    assert not tabs[0].page.locator("#actions button").count()
    os.kill(up.pid, signal.SIGCONT)
    for tab in tabs:
        tab.page.wait_for_selector("#notes:not(:has(.note))", state="attached")
    assert live_writer(state / LOCK_FILE) not in (None, first)
    client.submit(["true"], name="after")
    tabs[0].wait_for_text("#rows", "after")
    tabs[0].page.wait_for_selector("#actions button")
    assert up.poll() is None
    until(lambda: client.status()["counts"]["ready"] == 2, "nothing is lost")
