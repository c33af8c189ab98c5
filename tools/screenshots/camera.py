"""Opens addresses in Chromium and writes pictures of them, in three looks.

Owns the browser. Views are found by following links, beginning at the page's navigation,
so a new view can't be forgotten. Knows no broker.
"""

from __future__ import annotations

import base64
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from playwright.sync_api import TimeoutError, sync_playwright  # noqa: A004  # its own

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

#: Names of the browser's program.
_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")

#: Limit for a busy machine to draw a page of some megabytes.
_TIMEOUT_MS: Final = 90_000

#: A longer view is cut.
_HEIGHT_MAX: Final = 2400

#: Pictures in the docs are smaller than this. The quality falls until they are.
PICTURE_BYTES_MAX: Final = 150_000

#: A drawing has any size. It gets this width.
_DRAWING_WIDTH: Final = 1000

_QUALITIES: Final = (85, 75, 60, 45, 30)


#: Addresses of links. The property `href` of a link in an SVG is no text.
_ADDRESSES: Final = "all => all.map(a => new URL(a.getAttribute('href'), location).href)"


class Window(NamedTuple):
    """A kind of window."""

    name: str
    width: int
    height: int
    is_dark: bool = False


WINDOWS: Final = (
    Window("light", 1280, 800),
    Window("dark", 1280, 800, is_dark=True),
    Window("390", 390, 844),
)


class Shot(NamedTuple):
    """A view to take pictures of: the name of its files, and its address."""

    name: str
    address: str


class Camera:
    """A browser with a window for each window. Notes what it could not show."""

    def __init__(self, browser: Browser, directory: Path) -> None:
        self._directory = directory
        #: A single page for each window: a new one would read the script of the charts again.
        self._pages = {window: self._open_window(browser, window) for window in WINDOWS}
        self._shown = ""
        #: Errors of the browser's console, and views that don't fit their window.
        self.complaints: list[str] = []

    def _open_window(self, browser: Browser, window: Window) -> Page:
        context = browser.new_context(
            viewport={"width": window.width, "height": window.height},
            color_scheme="dark" if window.is_dark else "light",
            locale="en-GB",
            timezone_id="UTC",
        )
        context.set_default_timeout(_TIMEOUT_MS)
        page = context.new_page()
        page.on("console", lambda line: self._note(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: self._note(str(error)))
        return page

    def _note(self, text: str) -> None:
        self.complaints.append(f"{self._shown}: {text}")

    def open_page(self, address: str) -> None:
        """Exchange the token in the page's address for a cookie, in every window."""
        for page in self._pages.values():
            page.goto(address)

    def take(self, shot: Shot) -> list[str]:
        """Take a picture in each window. Return the links of the view."""
        links: list[str] = []
        for window, page in self._pages.items():
            self._shown = f"{shot.name}-{window.name}"
            try:
                page.goto(shot.address)
                page.wait_for_selector("body[data-drawn]")
            except TimeoutError:
                self._note(f"not drawn after {_TIMEOUT_MS // 1000} s")
                continue
            links = links or page.eval_on_selector_all("a[href]", _ADDRESSES)
            self._save(page, window)
        return links

    def _save(self, page: Page, window: Window) -> None:
        wide, high = page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        if wide > window.width:
            self._note(f"{wide} pixels wide")
        height = min(max(high, window.height), _HEIGHT_MAX)
        page.set_viewport_size({"width": window.width, "height": height})
        page.wait_for_timeout(_SETTLE_MS)
        page.screenshot(path=self._directory / f"{self._shown}.png", animations="disabled")
        page.set_viewport_size({"width": window.width, "height": window.height})


#: Charts follow the size of their window after a moment.
_SETTLE_MS: Final = 400


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the system's browser and close it at the end. Raises `FileNotFoundError`."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        raise FileNotFoundError("chromium: not installed (`apt-get install chromium`)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


def view_name(path: str) -> str:
    """Return the name of a view's pictures: `overview` for `/`, `task` for `/task`."""
    return path.strip("/").replace("/", "-") or "overview"


def new_views(links: Iterable[str], root: str, known: Iterable[str], best: str) -> dict[str, str]:
    """Return the views that links lead to, by their paths, without `known` paths.

    Of several links to a view, the first that contains `best` counts, else the first. Files with a
    suffix, as in `tasks.csv`, are no views.
    """
    seen = set(known)
    found: dict[str, str] = {}
    for link in links:
        path = urlsplit(link).path or "/"
        if not link.startswith(root) or path in seen or "." in path.rpartition("/")[2]:
            continue
        if path not in found or (best in link and best not in found[path]):
            found[path] = link
    return found


def compress(browser: Browser, source: Path, target: Path, height_max: int) -> int:
    """Write a picture as WebP, cut at a height, within `PICTURE_BYTES_MAX`. Return its bytes."""
    kind = "svg+xml" if source.suffix == ".svg" else "png"
    data = base64.b64encode(source.read_bytes()).decode()
    page = browser.new_page()
    page.set_content("<style>body{margin:0}img{display:block}</style>")
    width, height = page.evaluate(
        "async ([url, width]) => { const drawn = new Image(); drawn.src = url;"
        " await drawn.decode(); drawn.style.width = `${width ?? drawn.naturalWidth}px`;"
        " document.body.append(drawn); const box = drawn.getBoundingClientRect();"
        " return [box.width, box.height]; }",
        [f"data:image/{kind};base64,{data}", _DRAWING_WIDTH if kind == "svg+xml" else None],
    )
    page.set_viewport_size({"width": int(width), "height": min(int(height), height_max)})
    session = page.context.new_cdp_session(page)
    picture = b""
    for quality in _QUALITIES:
        answer = session.send("Page.captureScreenshot", {"format": "webp", "quality": quality})
        picture = base64.b64decode(answer["data"])
        if len(picture) <= PICTURE_BYTES_MAX:
            break
    page.close()
    target.write_bytes(picture)
    return len(picture)
