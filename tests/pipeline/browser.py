"""Pages in a real browser: the system's Chromium, without a network."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tests.kit.requirements import need

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page, Route

#: Time limit for a busy machine to draw a page of five megabytes.
_TIMEOUT_MS = 60_000


class Opened:
    """An opened page with its console messages and requests."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        page.route("**/*", self._answer)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _answer(self, route: Route) -> None:
        url = route.request.url
        if url.startswith("file://"):
            route.continue_()
        else:
            self.requests.append(url)
            route.abort()

    def figures(self) -> dict[str, tuple[float, float, int]]:
        """Return width, height and number of drawn marks of each chart."""
        script = """() => [...document.querySelectorAll(".figure")].map((one) => {
          const box = one.getBoundingClientRect();
          const drawn = one.querySelectorAll(".overplot path, .overplot image").length;
          return [one.id, box.width, box.height, drawn]; })"""
        return {name: (wide, high, drawn) for name, wide, high, drawn in self.page.evaluate(script)}


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    """Start a browser and close it at the end."""
    program = need("chromium")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # few tests need it

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


def opened(browser: Browser, path: Path, *, dark: bool = False) -> Opened:
    """Open a file and wait until it is drawn."""
    context = browser.new_context(
        color_scheme="dark" if dark else "light",
        viewport={"width": 1100, "height": 900},
        offline=True,
    )
    seen = Opened(context.new_page())
    seen.page.goto(path.absolute().as_uri(), timeout=_TIMEOUT_MS)
    seen.page.wait_for_selector("body[data-drawn]", timeout=_TIMEOUT_MS)
    return seen
