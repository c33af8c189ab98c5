"""One Chromium for all tests of the page. To start it, and to draw a first page, takes six seconds
of CPU. Each file of tests has a window of its own, which takes more than one.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.kit.processes import until
from tests.kit.requirements import need

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, BrowserContext

#: The first two are for containers. The others are those of Playwright: no other traffic, no
#: scroll bars, and tabs in the background that are as fast as others.
SWITCHES = (
    *("--no-sandbox", "--disable-gpu"),
    *("--headless", "--remote-debugging-port=0", "--hide-scrollbars", "--mute-audio"),
    *("--no-first-run", "--no-default-browser-check", "--password-store=basic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
    *("--disable-extensions", "--disable-sync", "--disable-background-timer-throttling"),
    *("--disable-backgrounding-occluded-windows", "--disable-renderer-backgrounding"),
)


@pytest.fixture(scope="session")
def browser_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the browser, and return the address by which it is controlled."""
    directory = tmp_path_factory.mktemp("chromium")
    words = [need("chromium"), *SWITCHES, f"--user-data-dir={directory}"]
    port = directory / "DevToolsActivePort"
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as running:
        until(lambda: port.exists() and port.read_text().count("\n"), "the browser listens")
        yield "ws://127.0.0.1:{}{}".format(*port.read_text().split())
        running.terminate()


@pytest.fixture(scope="module")
def browser(browser_address: str) -> Iterator[Browser]:
    """Connect to the browser. Its driver has an event loop, so no other file keeps it."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # few tests need it

    with sync_playwright() as driver:
        found = driver.chromium.connect_over_cdp(browser_address)
        yield found
        found.close()


@pytest.fixture(scope="module")
def window(browser: Browser) -> Iterator[BrowserContext]:
    """Open a window for the tests of a file. Tabs that it leaves behind would hide later ones."""
    with browser.new_context() as found:
        yield found
