"""`taskyard top` without a terminal, beside a real broker: each screen, the filter, each action."""

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
from textual.widgets import Input, OptionList, RichLog, Sparkline, Static

from taskyard.cli.options import CliContext
from taskyard.cli.web import BrokerConnector
from taskyard.client import task_filters
from taskyard.client.broker_link import BrokerLink
from taskyard.client.client import Client
from taskyard.errors import NoBroker
from taskyard.tui.app import Top, key_table
from taskyard.tui.dialogs import Confirmation
from taskyard.tui.output_pane import OutputPane
from taskyard.tui.table import RowTable
from tests.kit.processes import Broker, Worker, run_here

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
def client(directory: Path) -> Iterator[Client]:
    """Return a client of a broker with done and failed tasks, and some without a worker."""
    with ExitStack() as stack:
        running = stack.enter_context(Broker(directory))
        stack.callback(running.kill)
        stack.enter_context(Worker(directory, "--name", "wolf", "--slots", "2"))
        client = stack.enter_context(Client(state=directory / ".taskyard"))
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

    async def shows(self, name: str, key: str) -> None:
        """Wait until a table has a row."""
        await self.until(lambda: key in self.keys(name))

    async def moved_to(self, name: str, key: str) -> None:
        """Move the cursor of a table to a row."""
        await self.shows(name, key)
        self.table(name).move_cursor(row=self.keys(name).index(key))
        await self._pilot.pause()

    async def choices(self) -> list[str]:
        """Wait for a confirmation, and return its lines."""
        await self.until(lambda: isinstance(self.app.screen, Confirmation))
        await self.until(lambda: bool(self.app.screen.query(OptionList)))
        return [str(one.prompt) for one in self.app.screen.query_one(OptionList).options]

    async def notes(self, words: str) -> None:
        """Wait until a message appears."""
        await self.until(lambda: any(words in one.message for one in self._messages()))

    def _messages(self) -> list[Notification]:
        return [*self.app._notifications]  # noqa: SLF001  # the toasts that are shown

    def widget(self, selector: str, kind: type[Any]) -> Any:
        return self.app.screen_stack[0].query_one(selector, kind)

    def table(self, name: str) -> RowTable:
        found: RowTable = self.widget(f"#{name}", RowTable)
        return found

    def keys(self, name: str) -> list[str]:
        return [str(key.value) for key in self.table(name).rows]

    def row(self, name: str, key: str) -> list[str]:
        return [str(cell) for cell in self.table(name).get_row(key)]

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
    link = BrokerLink(BrokerConnector(context))
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
        await seat.shows("campaigns-table", "b")
        assert seat.row("campaigns-table", "a")[1:5] == [
            "━━━━━━──── 66 %".replace(" 66", "  66"),
            "2",
            "3",
            "1",
        ]
        assert "1 failed" in seat.words("#counters")
        assert "oldest ready" in seat.words("#facts")
        assert len(seat.widget("#rates", Sparkline).data) == 78

        await seat.press("2")
        await seat.shows("lanes-table", "mail\0l1")
        assert seat.row("lanes-table", "mail\0l1")[:4] == ["mail", "l1", "50", "0"]
        assert seat.row("services-table", "fax")[:3] == ["fax", "0", "1"]

        await seat.press("w")
        await seat.shows("workers-table", "wolf")
        assert seat.row("workers-table", "wolf")[1:4] == ["idle", "0 of 2", "0"]

        await seat.press("t")
        await seat.shows("tasks-table", "b/wait-000")
        assert len(seat.keys("tasks-table")) == 100
        assert seat.row("tasks-table", "a/bad")[1:3] == ["failed", "1"]
        await seat.press("n")
        await seat.shows("tasks-table", "c/other")
        assert len(seat.keys("tasks-table")) == 54
        await seat.press("b")
        await seat.shows("tasks-table", "a/good")

    run(directory, play)


@pytest.mark.usefixtures("client")
def test_rows_open_and_escape_goes_back(directory: Path) -> None:
    async def play(seat: Seat) -> None:
        await seat.moved_to("campaigns-table", "a")
        await seat.press("enter")
        await seat.until(lambda: seat.keys("tasks-table")[:2] == ["a/good", "a/bad"])
        assert "--campaign a" in seat.words("#filter-line")

        await seat.press("enter")
        await seat.until(lambda: seat.output() == ["one     two", "\\x1b[31mred"])
        assert "it is done" in seat.words("#details-text")

        await seat.press("escape")
        await seat.moved_to("tasks-table", "a/bad")
        await seat.press("5")
        await seat.until(lambda: seat.output() == ["oops"])
        assert "exit 3" in seat.words("#details-text")

        await seat.press("escape", "escape")
        assert seat.app.pane_name == "overview"

    run(directory, play)


@pytest.mark.usefixtures("client")
def test_filter_has_the_grammar_of_list(directory: Path) -> None:
    async def play(seat: Seat) -> None:
        await seat.until(lambda: seat.keys("tasks-table") == ["a/bad"])
        await seat.type_filter("--campaign b --lane l1 wait-00")
        await seat.until(lambda: len(seat.keys("tasks-table")) == 3)
        await seat.type_filter("--only nonsense")
        await seat.notes("unknown state 'nonsense'")
        await seat.press("escape")
        await seat.type_filter("nothing-of-this-name")
        await seat.until(lambda: not seat.keys("tasks-table"))
        assert "no task matches" in seat.words("#tasks .note")
        await seat.press("escape")
        await seat.until(lambda: len(seat.keys("tasks-table")) == 3)

    run(directory, play, "--failed")


@pytest.mark.usefixtures("client")
def test_names_are_shown_as_text(directory: Path) -> None:
    async def play(seat: Seat) -> None:
        await seat.shows("tasks-table", f"a/{HOSTILE}")
        shown = seat.row("tasks-table", f"a/{HOSTILE}")[0]
        assert shown == "a/[red]x[/] \\x1b[31m\\x07"
        await seat.press("c")
        assert await seat.choices() == [
            f"1 task: {shown} (done): nothing to change",
            "0 unfinished or failed tasks matching --match '[red]'",
        ]

    run(directory, play, "--match [red]")


def test_action_states_its_number_and_is_confirmed(directory: Path, client: Client) -> None:
    async def play(seat: Seat) -> None:
        await seat.moved_to("tasks-table", "b/wait-004")
        await seat.press("plus")
        assert await seat.choices() == [
            "1 task: b/wait-004 (ready)",
            "50 waiting tasks matching --campaign b --lane l1",
        ]
        seat.app.screen.query_one("#priority", Input).value = "7"
        await seat.press("enter", "enter")
        await seat.notes("changed the priority of 1 task to 7")
        assert client.show("b/wait-004")["priority"] == 7

        await seat.press("c")
        await seat.choices()
        await seat.press("escape")
        await seat.press("c")
        await seat.choices()
        await seat.press("down", "enter")
        await seat.notes("cancelled 50 tasks")

    run(directory, play, "--campaign b --lane l1")
    counts = client.counts("b")
    assert (counts["cancelled"], counts["ready"]) == (50, 100)


def test_many_tasks_are_not_changed_by_enter_alone(directory: Path, client: Client) -> None:
    async def play(seat: Seat) -> None:
        await seat.moved_to("campaigns-table", "a")
        await seat.press("r")
        assert await seat.choices() == ["1 failed or delayed task matching --campaign a"]
        await seat.press("enter")
        assert isinstance(seat.app.screen, Confirmation)
        await seat.press("down", "enter")
        await seat.notes("retried 1 task")

    run(directory, play)
    client.wait_campaign("a", _PATIENCE_SECONDS)
    assert client.show("a/bad")["attempt"] == 2


def test_lane_is_paused_and_resumed(directory: Path, client: Client) -> None:
    async def play(seat: Seat) -> None:
        await seat.press("l")
        await seat.moved_to("lanes-table", "mail\0l2")
        await seat.press("p")
        assert (await seat.choices())[0] == "Pause lane l2 of service mail: 50 waiting tasks"
        await seat.press("enter")
        await seat.notes("paused lane l2 of service mail")
        assert client.status()["pauses"] == [{"service": "mail", "lane": "l2"}]
        await seat.until(lambda: seat.row("services-table", "mail")[-1] == "1 lane")
        await seat.press("p")
        assert (await seat.choices())[0] == "Resume lane l2 of service mail: 50 waiting tasks"
        await seat.press("enter")
        await seat.notes("resumed lane l2")
        assert client.status()["pauses"] == []

    run(directory, play)


def test_refusal_of_a_viewer_is_shown(tmp_path: Path) -> None:
    assert run_here(tmp_path, "keys", "new", "eye", "--role", "viewer")[0] == 0

    async def scene(endpoint: str) -> None:
        context = CliContext()
        context.brokers, context.keys = (endpoint,), (tmp_path / "eye.key",)
        async with seated(context, "--campaign e") as seat:
            await seat.shows("tasks-table", "e/early")
            await seat.press("c")
            await seat.choices()
            await seat.press("enter")
            await seat.notes("viewer")

    with Broker(tmp_path, "--secure", "--listen", "dwork=tcp://127.0.0.1:0") as broker:
        with Client(state=tmp_path / ".taskyard") as client:
            client.submit(b"", name="early", campaign="e", service="fax")
        asyncio.run(scene(broker.endpoints[1]))


def test_output_is_followed_while_the_task_runs(directory: Path, client: Client) -> None:
    gate = directory / "gate"
    script = f"echo begins; until [ -e {gate} ]; do sleep 0.05; done; echo ends >&2"

    async def play(seat: Seat) -> None:
        await seat.moved_to("tasks-table", "d/slow")
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

    async def load(pane: OutputPane) -> None:
        is_loading.set()
        while pane.query("#output"):  # noqa: ASYNC110  # textual has no event for it
            await asyncio.sleep(0)
        pane.query_one("#output")

    async def play(seat: Seat) -> None:
        await seat.press("5")
        await is_loading.wait()

    monkeypatch.setattr(OutputPane, "load", load)
    run(directory, play)


def test_broker_that_has_not_replied_yet_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    may_reply = threading.Event()

    def connect(*, is_live: bool) -> Client:
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
        async with seated(local(tmp_path)) as seat:
            await seat.shows("campaigns-table", "e")
            banner = seat.widget("#banner", Static)
            assert not banner.display
            broker.kill()
            await seat.until(lambda: bool(banner.display))
            assert "broker" in seat.words("#banner")
            assert seat.keys("campaigns-table") == ["e"]
            with Broker(tmp_path):
                await seat.until(lambda: not banner.display)
                with Client(state=tmp_path / ".taskyard") as client:
                    client.submit(b"", name="late", campaign="f", service="fax")
                await seat.shows("campaigns-table", "f")

    with Broker(tmp_path) as broker:
        with Client(state=tmp_path / ".taskyard") as client:
            client.submit(b"", name="early", campaign="e", service="fax")
        asyncio.run(scene(broker))


def test_last_state_is_shown_without_a_broker(tmp_path: Path) -> None:
    with Broker(tmp_path), Client(state=tmp_path / ".taskyard") as client:
        client.submit(b"", name="early", campaign="e", service="fax")

    async def play(seat: Seat) -> None:
        await seat.shows("campaigns-table", "e")
        await seat.until(lambda: "this is the last state" in seat.words("#banner"))
        await seat.press("4")
        await seat.shows("tasks-table", "e/early")
        await seat.press("c")
        await seat.choices()
        await seat.press("enter")
        await seat.notes("no broker is running on")

    run(tmp_path, play)


def test_page_lists_the_keys() -> None:
    page = (Path(__file__).parents[2] / "docs" / "top.md").read_text()
    table = page.partition("## Keys")[2].partition("##")[0]
    assert re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)[1:] == [*key_table()]
