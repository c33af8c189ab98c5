"""The page in a real browser, beside a real broker that is killed and started again."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import pytest

from tests.kit.processes import Broker, Running, Worker, run_here, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.slow

_TIMEOUT_MS = 30_000

#: A name that would run a script, if it were not text everywhere.
HOSTILE = "<img src=x onerror=alert(1)>'\"&--{{7*7}}"

VIEWS = ("/", "/campaigns", "/tasks", "/workers", "/lanes", "/timeline")


class Site:
    """A page with its address."""

    def __init__(self, directory: Path) -> None:
        state = str(directory / ".taskyard")
        self.process = Running(
            directory, "web", "--state", state, "--page", "127.0.0.1:0", stderr=subprocess.DEVNULL
        )
        word, _, self.address = self.process.line().partition(" ")
        assert word == "page"
        self.root = self.address.partition("/?")[0]

    @property
    def quick_address(self) -> str:
        return without_charts(self.address)


def without_charts(address: str) -> str:
    """Return the address of another view with the token. Charts take four seconds of CPU."""
    return address.replace("/?", "/lanes?")


class Tab:
    """A tab of the browser, with all complaints of its console."""

    def __init__(self, page: Page, site: Site) -> None:
        self.page, self.root = page, site.root
        self.complaints: list[str] = []
        self._listeners: list[tuple[str, Callable[[Any], object]]] = []
        page.set_default_timeout(_TIMEOUT_MS)
        self.on("console", lambda one: self._note(one.type, one.text))
        self.on("pageerror", lambda error: self.complaints.append(str(error)))

    def on(self, event: str, listener: Callable[[Any], object]) -> None:
        """Call a function at each event of the page, until `leave`."""
        page: Any = self.page  # its overloads list every event
        page.on(event, listener)
        self._listeners.append((event, listener))

    def leave(self) -> None:
        """Leave the page to another test."""
        for event, listener in self._listeners:
            self.page.remove_listener(event, listener)

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def open(self, address: str) -> None:
        self.page.goto(self.root + address)
        self.page.wait_for_selector("body[data-drawn]")

    def wait_for_text(self, selector: str, text: str | re.Pattern[str]) -> None:
        self.page.locator(selector).filter(has_text=text).wait_for()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="module")
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def site(directory: Path, processes: ExitStack) -> Site:
    """Start a broker, a worker and the page, with a campaign that has run."""
    processes.enter_context(Broker(directory))
    processes.enter_context(Worker(directory, "--slots", "2"))
    tasks = [
        {"name": "first", "argv": ["echo", "hello from first"]},
        {"name": "second", "argv": ["sh", "-c", "echo oops >&2; exit 3"], "after": ["first"]},
        {"name": "third", "argv": ["true"], "after": ["second"]},
        {"name": HOSTILE, "argv": ["echo", HOSTILE]},
    ]
    file = directory / "trial.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    assert run_here(directory, "load", str(file))[0] == 0

    def has_run() -> bool:
        _, out, _ = run_here(directory, "status", "--json")
        counts = json.loads(out)["counts"]
        return bool(counts["failed"] == 1 and counts["done"] == 2)

    until(has_run, "the campaign has run")
    found = Site(directory)
    processes.enter_context(found.process)
    return found


@pytest.fixture(scope="module")
def operator(window: BrowserContext, site: Site) -> Page:
    """Return a page of the operator, who has opened the printed address.

    All tests open their views in it, because a new one has a process of its own, which compiles
    all scripts again.
    """
    page = window.new_page()
    page.goto(site.quick_address)
    return page


@pytest.fixture
def tab(operator: Page, site: Site) -> Iterator[Tab]:
    found = Tab(operator, site)
    found.page.set_viewport_size({"width": 1280, "height": 800})
    yield found
    found.leave()


def task_address(name: str) -> str:
    return f"/task?{urlencode({'name': f'trial/{name}'})}"


#: Elements that are wider than the window, except inside boxes that scroll by themselves.
_TOO_WIDE = """() => [...document.querySelectorAll("body *")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
  .filter((one) => !one.closest(".wide, pre, .hidden, .skip, .chart, dialog"))
  .map((one) => one.outerHTML.slice(0, 80))"""

#: Texts that are smaller than 14 pixels, except in drawings.
_TOO_SMALL = """() => [...document.querySelectorAll("body *")]
  .filter((one) => !one.closest("svg, .chart, .hidden") && one.checkVisibility())
  .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .filter((one) => parseFloat(getComputedStyle(one).fontSize) < 14)
  .map((one) => one.outerHTML.slice(0, 80))"""

#: Presses keys without a pause between them, which a busy machine makes long.
_PRESS = """(keys) => keys.forEach((key) => document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true})))"""

TRIAL_VIEWS = (
    "/campaign?name=trial",
    "/task?name=trial%2Fsecond",
    "/tasks?filter=--campaign+trial",
)


@pytest.mark.parametrize("address", [*VIEWS, *TRIAL_VIEWS])
def test_every_view_opens_wide_and_narrow_without_complaints(tab: Tab, address: str) -> None:
    tab.open(address)
    assert tab.page.title()
    assert tab.page.locator("h1").count() == 1
    headers = tab.page.locator("th:not([scope])").count() + tab.page.locator("table").count()
    assert headers == tab.page.locator("table > caption").count()
    tab.page.set_viewport_size({"width": 390, "height": 800})
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not tab.page.evaluate(_TOO_WIDE)
    assert not tab.page.evaluate(_TOO_SMALL)
    assert not tab.complaints


def test_keys_open_views_and_move_in_lists(tab: Tab, site: Site) -> None:
    tab.open("/lanes")
    tab.page.keyboard.press("?")
    assert tab.page.locator("dialog[open]").count() == 1
    tab.page.keyboard.press("Escape")
    # Slowly pressed keys are two commands, so both are pressed at once.
    tab.page.evaluate(_PRESS, ["g", "t"])
    tab.page.wait_for_url(f"{site.root}/tasks")
    tab.page.wait_for_selector("body[data-drawn]")
    for key in ("j", "j", "j", "k"):
        tab.page.keyboard.press(key)
    second = tab.page.locator("tbody tr a").nth(1).inner_text()
    assert tab.page.evaluate("document.activeElement.textContent") == second
    tab.page.keyboard.press("/")
    assert tab.page.evaluate("document.activeElement.id") == "filter"
    tab.page.keyboard.type("g")  # a letter like any other
    assert tab.page.input_value("#filter") == "g"
    tab.page.locator("tbody tr a").nth(1).focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(".story")
    assert tab.page.inner_text("h1") == second


def test_live_update_keeps_focus_selection_and_scroll(tab: Tab, directory: Path) -> None:
    tab.page.set_viewport_size({"width": 1280, "height": 400})
    tab.open(f"/tasks?filter={quote('--campaign trial --sort name --reverse')}")
    tab.page.evaluate("document.querySelector('tbody tr a').focus()")
    tab.page.evaluate("window.kept = document.querySelector('tbody tr')")
    tab.page.evaluate("getSelection().selectAllChildren(document.querySelector('tbody tr td'))")
    focused = "document.activeElement.textContent"
    before = tab.page.evaluate(f"[{focused}, getSelection().toString(), scrollY]")
    assert before[0] == "trial/third"
    assert (
        run_here(directory, "submit", "--name", "zz", "--campaign", "trial", "sleep", "0")[0] == 0
    )
    tab.wait_for_text("#rows", "trial/zz")
    assert tab.page.locator("tbody tr a").first.inner_text() == "trial/zz"
    assert tab.page.evaluate(f"[{focused}, getSelection().toString(), scrollY]") == before
    assert tab.page.evaluate("window.kept.isConnected && window.kept.innerText.includes('third')")
    assert not tab.complaints


def test_failures_of_one_form_are_one_group(tab: Tab, directory: Path) -> None:
    argv = ["sh", "-c", "echo no row $1 >&2; exit 4"]
    tasks = [{"name": f"row{row}", "argv": [*argv, "-", str(row)]} for row in (17, 18)]
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    assert run_here(directory, "load", str(file))[0] == 0
    tab.open("/campaigns")
    tab.wait_for_text("#campaigns", "rows")
    tab.open("/campaign?name=rows")
    tab.wait_for_text("#failures td.number", "2")
    tab.page.click("#failures td.main a")
    tab.wait_for_text("#total", "2 tasks match.")
    assert tab.page.input_value("#filter").endswith("--only failed")
    assert "--reason-like 'exit status 4: no row #'" in tab.page.input_value("#filter")


def test_output_of_a_running_task_arrives_live(tab: Tab, directory: Path) -> None:
    go = directory / "go"
    script = f"echo before; until [ -e {go} ]; do sleep 0.05; done; echo after"
    words = ("submit", "--name", "talks", "--campaign", "trial", "sh", "-c", script)
    assert run_here(directory, *words)[0] == 0
    tab.open(task_address("talks"))
    tab.wait_for_text(".output", "before")
    assert "after" not in tab.page.inner_text(".output")
    go.touch()
    tab.wait_for_text(".output", "after")
    tab.wait_for_text("#output-status", "Ended")
    tab.wait_for_text(".story", "attempt 1 finished")
    assert tab.page.inner_text(".output") == "before\nafter\n"
    assert not tab.complaints


def test_malformed_filter_is_explained_beside_the_box(tab: Tab) -> None:
    tab.page.goto(tab.root + "/tasks?filter=--bogus")
    tab.wait_for_text("#error", "unknown option --bogus")
    assert tab.page.input_value("#filter") == "--bogus"


def test_overview_shows_campaigns_before_a_chart_that_comes_late(tab: Tab) -> None:
    tab.page.route("**/charts/throughput", lambda _: None)  # no answer
    tab.page.goto(tab.root + "/")
    headings = tab.page.locator("main h2").all_inner_texts()
    assert headings[:2] == ["Campaigns", "Throughput and depth"]
    began = tab.page.inner_text("#campaigns time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", began)
    script = "getComputedStyle(document.querySelector('.chart'), '::before').content"
    assert tab.page.evaluate(script) == '"Loading the chart"'
    tab.page.unroute("**/charts/throughput")


def test_task_shows_its_story_its_output_and_its_neighbours(tab: Tab) -> None:
    tab.open(task_address("second"))
    text = tab.page.inner_text("main")
    assert "it failed after 1 attempt" in text
    told = tab.page.locator(".story li").all_inner_texts()
    assert len(told) == 4
    assert "submitted" in told[0]
    assert "every task that it waits for is done" in told[1]
    assert "leased to worker" in told[2]
    assert "exit status 3" in told[3]
    assert tab.page.locator("a", has_text="trial/first").count() == 1
    assert tab.page.locator("a", has_text="trial/third").count() == 1
    # Its stdout is empty, so the other one is open.
    tab.wait_for_text(".output", "oops")
    assert tab.page.get_attribute("[data-stream=stderr]", "aria-pressed") == "true"
    tab.page.click("[data-stream=stdout]")
    tab.wait_for_text("#output-status", "No output")
    assert not tab.complaints


def test_output_is_text(tab: Tab) -> None:
    dialogs: list[str] = []
    tab.on("dialog", lambda dialog: dialogs.append(dialog.message))
    tab.open(task_address(HOSTILE))
    assert tab.page.inner_text("h1") == f"trial/{HOSTILE}"
    tab.wait_for_text(".output", HOSTILE)
    assert tab.page.locator("img").count() == 0
    assert not dialogs
    assert not tab.complaints


def test_filter_box_selects_and_keeps_its_text(tab: Tab) -> None:
    tab.open("/tasks")
    tab.page.fill("#filter", "--campaign trial --failed")
    tab.page.press("#filter", "Enter")
    tab.page.wait_for_selector("body[data-drawn]")
    assert tab.page.inner_text("#total") == "1 task matches."
    assert tab.page.input_value("#filter") == "--campaign trial --only failed"


def test_actions_change_tasks_and_open_pages_follow(tab: Tab, directory: Path) -> None:
    tab.open(f"/tasks?filter={quote('--match extra')}")
    assert "No task matches." in tab.page.inner_text("#rows")
    assert (
        run_here(directory, "submit", "--name", "extra", "--campaign", "trial", "sleep", "0")[0]
        == 0
    )
    tab.wait_for_text("#rows", "trial/extra")
    tab.on("dialog", lambda dialog: dialog.accept())
    tab.open(task_address("second"))
    tab.page.click("button[value=retry]")
    tab.page.wait_for_selector(".flash")
    assert tab.page.inner_text(".flash") == "retried 1 task"
    tab.open("/lanes")
    tab.page.click("#services button[value=pause]")
    tab.page.wait_for_selector(".flash")
    assert tab.page.inner_text(".flash").startswith("paused service")
    tab.page.click("#services button[value=resume]")
    tab.wait_for_text(".flash", "resumed")


def test_viewer_sees_no_actions(browser: Browser, site: Site, directory: Path) -> None:
    state = str(directory / ".taskyard")
    status, out, _ = run_here(directory, "web", "--state", state, "--share", "viewer")
    assert status == 0
    context = browser.new_context()
    page = context.new_page()
    page.goto(without_charts(out.strip()))
    page.goto(site.root + task_address("second"))
    assert page.locator("button[value=retry]").count() == 0
    script = """fetch("/tasks/actions", {method: "POST", body: "action=retry&name=trial/second"})
      .then((one) => one.status)"""
    assert page.evaluate(script) == 403
    context.close()


def test_page_outlives_its_broker(tab: Tab, directory: Path, processes: ExitStack) -> None:
    """Ends the broker of the other tests, so it is the last one."""
    tab.open("/lanes")
    assert run_here(directory, "down")[0] == 0
    tab.wait_for_text("#notes", "No broker is running")
    tab.open(task_address("first"))
    tab.wait_for_text(".output", "hello")
    assert not tab.page.locator("button[value=retry]").count()
    processes.enter_context(Broker(directory))
    tab.page.wait_for_selector("#notes:not(:has(.note))", state="attached")
    assert not tab.complaints
