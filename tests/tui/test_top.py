"""`taskyard top` without a terminal, beside a real broker: each screen, the filter, output."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from textual.widgets import Input, RichLog, Static

from taskyard.cli.options import CliContext
from taskyard.cli.web import top_connector
from taskyard.client import task_filters
from taskyard.client.internal import BrokerLink, InternalClient
from taskyard.errors import NoBroker
from taskyard.tui.app import RowTable, TaskPane, Top, key_table
from taskyard.tui.screens import Pace
from tests.kit.processes import Broker, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from textual.notifications import Notification
    from textual.pilot import Pilot

#: A name that a terminal or a markup language would obey.
HOSTILE = "[red]x[/] \x1b[31m\a"

_PATIENCE_SECONDS = 100.0

#: What a user does and sees.
Scene = Callable[["Seat"], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("top")


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[InternalClient]:
    """Return a client of a broker with done and failed tasks, and some without a worker."""
    with ExitStack() as stack:
        running = stack.enter_context(Broker(directory))
        stack.callback(running.kill)
        stack.enter_context(Worker(directory, "--name", "wolf", "--slots", "2"))
        client = stack.enter_context(InternalClient(state=directory / ".taskyard"))
        script = "printf 'one\\ttwo\\n\\033[31mred\\n'"
        first = client.submit(["sh", "-c", script], name="good", campaign="a")
        client.submit(["sh", "-c", "echo oops; exit 3"], name="bad", campaign="a", retries=0)
        client.submit(["true"], name=HOSTILE, campaign="a").result(_PATIENCE_SECONDS)
        first.result(_PATIENCE_SECONDS)
        client.wait_campaign("a", _PATIENCE_SECONDS)
        for number in range(150):
            lane = f"l{number % 3}"
            client.submit(b"", name=f"wait-{number:03}", campaign="b", lane=lane, service="mail")
        client.submit(b"", name="other", campaign="c", service="fax")
        client.status()
        yield client


class Seat:
    """A user in front of the screen."""

    def __init__(self, app: Top, pilot: Pilot[None]) -> None:
        self.app, self._pilot = app, pilot

    async def press(self, *keys: str) -> None:
        await self._pilot.press(*keys)

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until the screen shows something."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while not is_true():
            assert time.monotonic() < end, "the screen does not show it"
            await asyncio.sleep(0.05)  # the screen has no event for it

    async def type_filter(self, words: str) -> None:
        await self.press("slash")
        self.widget("#filter", Input).value = words
        await self.press("enter")

    async def shows(self, key: str) -> None:
        """Wait until the table has a row."""
        await self.until(lambda: key in self.keys())

    async def moved_to(self, key: str) -> None:
        """Move the cursor of the table to a row."""
        await self.shows(key)
        self.table().move_cursor(row=self.keys().index(key))
        await self._pilot.pause()

    async def notes(self, words: str) -> None:
        """Wait until a message appears."""
        await self.until(lambda: any(words in one.message for one in self._messages()))

    def _messages(self) -> list[Notification]:
        return [*self.app._notifications]  # noqa: SLF001  # the toasts that are shown

    def widget(self, selector: str, kind: type[Any]) -> Any:
        return self.app.screen_stack[0].query_one(selector, kind)

    def table(self) -> RowTable:
        found: RowTable = self.widget("#rows", RowTable)
        return found

    def keys(self) -> list[str]:
        return [str(key.value) for key in self.table().rows]

    def row(self, key: str) -> list[str]:
        return [str(cell) for cell in self.table().get_row(key)]

    def words(self, selector: str) -> str:
        return str(self.widget(selector, Static).render())

    def output(self) -> list[str]:
        return [line.text.rstrip() for line in self.widget("#output", RichLog).lines]


def local(directory: Path) -> CliContext:
    """Return the context of a command with --state."""
    context = CliContext()
    context.state = directory / ".taskyard"
    return context


@asynccontextmanager
async def seated(
    context: CliContext, words: str = "", size: tuple[int, int] = (80, 24)
) -> AsyncIterator[Seat]:
    link = BrokerLink(top_connector(context))
    app = Top(link, "here", task_filters.parse(words))
    try:
        async with app.run_test(size=size) as pilot:
            yield Seat(app, pilot)
    finally:
        link.close()


def run(
    directory: Path,
    play: Callable[[Seat], Coroutine[Any, Any, None]],
    words: str = "",
) -> None:
    """Play a scene in front of a broker."""

    async def scene() -> None:
        async with seated(local(directory), words) as seat:
            await play(seat)

    asyncio.run(scene())


@pytest.mark.usefixtures("client")
def test_screens_show_the_broker(directory: Path) -> None:
    async def play(seat: Seat) -> None:
        await seat.shows("mail\0l1")
        assert seat.row("mail\0l1")[:4] == ["mail", "l1", "50", "0"]
        assert "1 failed" in seat.words("#counters")
        assert "1 worker" in seat.words("#counters")
        assert seat.words("#note").endswith(" lanes")

        await seat.press("w")
        await seat.shows("wolf")
        assert seat.row("wolf")[1:4] == ["idle", "0 of 2", "0"]

        await seat.press("3")
        await seat.shows("b/wait-000")
        assert len(seat.keys()) == 100
        assert seat.row("a/bad")[1:3] == ["failed", "1"]
        assert seat.words("#note") == "the first 100 tasks (/ filters them)"

    run(directory, play)


@pytest.mark.usefixtures("client")
def test_rows_open_and_escape_goes_back(directory: Path) -> None:
    async def play(seat: Seat) -> None:
        await seat.moved_to("mail\0l1")
        await seat.press("enter")
        await seat.shows("b/wait-001")
        assert seat.words("#note") == "50 tasks   filter --service mail --lane l1"

        await seat.type_filter("--campaign a")
        await seat.until(lambda: seat.keys()[:2] == ["a/good", "a/bad"])
        await seat.press("enter")
        await seat.until(lambda: seat.output() == ["one     two", "\\x1b[31mred"])
        assert "it is done" in seat.words("#details-text")
        assert "taskyard log a/good" in seat.words("#note")

        await seat.press("escape")
        await seat.moved_to("a/bad")
        await seat.press("enter")
        await seat.until(lambda: seat.output() == ["oops"])
        assert "exit 3" in seat.words("#details-text")

        await seat.press("escape", "escape", "escape")
        await seat.shows("mail\0l1")
        assert seat.app.shown == "lanes"

    run(directory, play)


@pytest.mark.usefixtures("client")
def test_filter_has_the_grammar_of_list(directory: Path) -> None:
    async def play(seat: Seat) -> None:
        await seat.until(lambda: seat.keys() == ["a/bad"])
        await seat.type_filter("--campaign b --lane l1 wait-00")
        await seat.until(lambda: len(seat.keys()) == 3)
        await seat.type_filter("--only nonsense")
        await seat.notes("unknown state 'nonsense'")
        await seat.press("escape")
        await seat.type_filter("nothing-of-this-name")
        await seat.until(lambda: not seat.keys())
        assert seat.words("#note").startswith("no task matches")
        await seat.press("escape")
        await seat.until(lambda: len(seat.keys()) == 3)

    run(directory, play, "--failed")


@pytest.mark.usefixtures("client")
def test_names_are_shown_as_text(directory: Path) -> None:
    async def play(seat: Seat) -> None:
        await seat.shows(f"a/{HOSTILE}")
        assert seat.row(f"a/{HOSTILE}")[0] == "a/[red]x[/] \\x1b[31m\\x07"

    run(directory, play, "--match [red]")


def test_pause_is_in_the_head(directory: Path, client: InternalClient) -> None:
    async def play(seat: Seat) -> None:
        await seat.until(lambda: "paused: lane l2 of service mail" in seat.words("#counters"))

    client.pause("mail", "l2")
    try:
        run(directory, play)
    finally:
        client.resume("mail", "l2")


def test_request_that_took_long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace()
    assert pace.is_due()
    now[0] = 100.2
    pace.done()
    now[0] = 110.1
    assert not pace.is_due()
    now[0] = 110.3
    assert pace.is_due()
    pace.done()
    pace.reset()
    assert pace.is_due()


def test_output_is_followed_while_the_task_runs(directory: Path, client: InternalClient) -> None:
    gate = directory / "gate"
    script = f"echo begins; until [ -e {gate} ]; do sleep 0.05; done; echo ends >&2"

    async def play(seat: Seat) -> None:
        await seat.moved_to("d/slow")
        await seat.press("enter")
        await seat.until(lambda: seat.output() == ["begins"])
        assert "running on wolf" in seat.words("#details-text")
        gate.touch()
        await seat.until(lambda: seat.output() == ["begins", "ends"])
        await seat.until(lambda: "it is done" in seat.words("#details-text"))

    client.submit(["sh", "-c", script], name="slow", campaign="d")
    run(directory, play, "--campaign d")


@pytest.mark.usefixtures("client")
def test_drawing_while_it_closes_is_no_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loading = asyncio.Event()

    async def load(pane: TaskPane) -> None:
        is_loading.set()
        while pane.query("#output"):  # noqa: ASYNC110  # textual has no event for it
            await asyncio.sleep(0)
        pane.query_one("#output")

    async def play(seat: Seat) -> None:
        await seat.shows("a/good")
        await seat.press("enter")
        await is_loading.wait()

    monkeypatch.setattr(TaskPane, "load", load)
    run(directory, play, "--campaign a")


def test_broker_that_has_not_replied_yet_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    may_reply = threading.Event()

    def connect(*, is_live: bool) -> InternalClient:
        may_reply.wait(_PATIENCE_SECONDS)
        raise NoBroker(f"none, {is_live}")

    async def scene() -> None:
        app = Top(BrokerLink(connect), "here", task_filters.parse(""))
        async with app.run_test() as pilot:
            seat = Seat(app, pilot)
            await seat.until(lambda: "loading" in seat.words("#banner"))
            may_reply.set()
            await seat.until(lambda: "none, False" in seat.words("#banner"))

    monkeypatch.setattr("taskyard.tui.app._SILENT_SECONDS", _PATIENCE_SECONDS)
    asyncio.run(scene())


def test_broker_that_goes_away_is_reported_until_it_is_back(tmp_path: Path) -> None:
    async def scene(broker: Broker) -> None:
        async with seated(local(tmp_path), "--campaign e") as seat:
            await seat.shows("e/early")
            banner = seat.widget("#banner", Static)
            await seat.until(lambda: not banner.display)
            broker.kill()
            await seat.until(lambda: bool(banner.display))
            assert "broker" in seat.words("#banner")
            assert seat.keys() == ["e/early"]
            with Broker(tmp_path):
                await seat.until(lambda: not banner.display)
                with InternalClient(state=tmp_path / ".taskyard") as client:
                    client.submit(b"", name="late", campaign="e", service="fax")
                await seat.shows("e/late")

    with Broker(tmp_path) as broker:
        with InternalClient(state=tmp_path / ".taskyard") as client:
            client.submit(b"", name="early", campaign="e", service="fax")
        asyncio.run(scene(broker))


def test_last_state_is_shown_without_a_broker(tmp_path: Path) -> None:
    with Broker(tmp_path), InternalClient(state=tmp_path / ".taskyard") as client:
        client.submit(b"", name="early", campaign="e", service="fax")

    async def play(seat: Seat) -> None:
        await seat.until(lambda: "this is the last state" in seat.words("#banner"))
        await seat.press("3")
        await seat.shows("e/early")

    run(tmp_path, play)


def test_page_lists_the_keys() -> None:
    page = (Path(__file__).parents[2] / "docs" / "top.md").read_text()
    table = page.partition("## Keys")[2].partition("##")[0]
    assert re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)[1:] == [*key_table()]
