"""The bar of futures and campaigns: on a real terminal, in a notebook, and as lines in a pipe."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from concurrent.futures import Future as AnyFuture
from pty import openpty
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.client import progress
from taskyard.client.client import AsyncClient, Client
from taskyard.client.futures import Future, as_completed, wait
from taskyard.errors import TimedOut
from tests.cli.yard import Yard, running
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A service that no worker offers: its tasks wait.
UNSERVED = "unserved"

SCRIPT = """
import taskyard
with taskyard.Client() as client:
    futures = client.map("operator:neg", range(20)) + [client.submit(["false"])]
    for done in taskyard.as_completed(futures, progress=True):
        if done.exception() is None:
            print("got", -done.result())
"""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("yard") / "state", worker=False) as running_yard:
        yield running_yard.start_worker("--allow", "operator")


@pytest.fixture
def client(yard: Yard) -> Iterator[Client]:
    with Client(state=yard.state) as connected:
        yield connected


def run_script(yard: Yard, **streams: Any) -> str:
    """Run the script with these streams. Return its stdout if that is a pipe."""
    environment = {**os.environ, "TASKYARD_STATE": str(yard.state), "TERM": "xterm"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    environment["COLUMNS"] = "120"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        **streams,
        env=environment,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return done.stdout or ""


def on_terminal(yard: Yard, **streams: Any) -> tuple[str, str]:
    """Run the script with stderr on a terminal. Return its output there and to stdout."""
    reader, writer = openpty()
    try:
        written = run_script(yard, stderr=writer, **streams)
    finally:
        os.close(writer)
    drawn = b""
    while True:
        try:
            part = os.read(reader, 65_536)
        except OSError:  # the end of a terminal without writers
            break
        drawn += part
    os.close(reader)
    return drawn.decode(), written


def plain(drawn: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)


def test_terminal_gets_a_bar_and_a_pipe_what_is_printed(yard: Yard) -> None:
    drawn, printed = on_terminal(yard, stdout=subprocess.PIPE)
    assert "21/21" in plain(drawn)
    assert "1 failed" in plain(drawn)
    assert "got" not in drawn
    assert sorted(printed.split()) == sorted(["got"] * 20 + [str(n) for n in range(20)])


def test_in_a_pipe_no_bar_is_drawn(yard: Yard) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        env={**os.environ, "TASKYARD_STATE": str(yard.state)},
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert "\x1b" not in run.stderr
    assert all(line.startswith("tasks ") for line in run.stderr.splitlines())  # if it was slow
    assert len(run.stdout.splitlines()) == 20


class Cell:
    """The outputs of a notebook's `display`, and their updates."""

    def __init__(self) -> None:
        self.drawn: list[dict[str, str]] = []

    def __call__(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        assert raw
        assert display_id
        assert self.drawn == []
        self.drawn.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.drawn.append(bundle)

    def texts(self) -> list[str]:
        return [bundle["text/plain"] for bundle in self.drawn]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    monkeypatch.setattr(progress, "notebook_display", lambda: cell)
    return cell


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock that the test sets: its only item."""
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def settled(outcome: object) -> AnyFuture[Any]:
    future: AnyFuture[Any] = AnyFuture()
    if outcome is CancelledError:
        future.cancel()
    elif isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future


def test_notebook_gets_a_bar_that_is_drawn_again(cell: Cell, clock: list[float]) -> None:
    outcomes = [1, ValueError(), CancelledError, *range(96), 1]
    for _ in progress.with_progress([settled(one) for one in outcomes], 100):
        clock[0] += 0.0625
    texts = cell.texts()
    assert texts[0] == "0/100"
    assert texts[1:3] == ["3/100, 1 failed, 1 cancelled", "5/100, 1 failed, 1 cancelled"]
    assert "33/100, 1 failed, 1 cancelled, 16/s, about 4.1 s left" in texts
    assert texts[-1] == "100/100, 1 failed, 1 cancelled"
    assert len(texts) == 51
    assert all("<pre" in bundle["text/html"] for bundle in cell.drawn)
    assert "100/100" in cell.drawn[-1]["text/html"]


def test_slow_tasks_have_a_rate_a_minute(cell: Cell, clock: list[float]) -> None:
    for _ in progress.with_progress([settled(1), settled(1)], 4):
        clock[0] += 10
    assert "6.0/min" in cell.texts()[-1]


def test_pipe_gets_a_line_every_few_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in progress.with_progress([settled(1), settled(ValueError()), settled(1)], 3):
        clock[0] += 3
    assert capsys.readouterr().err.splitlines() == [
        "tasks 3/3, 1 failed",
        "tasks 3/3, 1 failed",
    ]
    for _ in progress.with_progress([settled(1)], 1):
        clock[0] += 3
    assert capsys.readouterr().err == "", "quick work prints nothing"


def test_wait_of_a_campaign_draws_its_counts(client: Client, cell: Cell) -> None:
    client.map("operator:neg", range(5), campaign="bar")
    client.submit(["false"], campaign="bar", name="bad")
    client.submit(["true"], campaign="bar", after=["bad"])
    client.campaign("bar").wait(PATIENCE_SECONDS, progress=True)
    assert cell.texts()[0].split(",")[0].endswith("/7")
    assert cell.texts()[-1] == "6/7, 1 failed, 1 behind a failure"


def test_wait_of_a_campaign_with_a_bar_ends_after_its_timeout(client: Client, cell: Cell) -> None:
    late = client.submit(b"", service=UNSERVED, campaign="late")
    with pytest.raises(TimedOut, match="campaign late: not settled after"):
        client.campaign("late").wait(0.05, progress=True)
    assert cell.texts()[-1] == "0/1"
    late.cancel()


def test_async_wait_of_a_campaign_draws_too(yard: Yard, cell: Cell) -> None:
    async def scenario() -> None:
        async with AsyncClient(state=yard.state) as client:
            await client.map("operator:neg", range(3), campaign="async")
            await client.campaign("async").wait(progress=True)

    asyncio.run(scenario())
    assert cell.texts()[-1] == "3/3"


def test_bar_stays_as_it_was_when_the_loop_is_left(client: Client, cell: Cell) -> None:
    for _ in as_completed(client.map("operator:neg", range(5)), progress=True):
        break
    assert cell.texts()[-1].startswith("1/5")


def test_wait_draws_and_returns_like_the_standard_one(client: Client, cell: Cell) -> None:
    futures = client.map("operator:neg", range(5))
    done, not_done = wait(futures, PATIENCE_SECONDS, progress=True)
    assert (done, not_done) == (set(futures), set())
    assert cell.texts()[-1] == "5/5"


@pytest.mark.parametrize(
    ("when", "argv"), [("FIRST_COMPLETED", ["true"]), ("FIRST_EXCEPTION", ["false"])]
)
def test_wait_with_a_bar_ends_when_its_condition_is_met(
    client: Client, cell: Cell, when: str, argv: list[str]
) -> None:
    late, soon = client.submit(b"", service=UNSERVED), client.submit(argv)
    assert wait([late, soon], None, when, progress=True) == ({soon}, {late})
    assert cell.texts()[-1].startswith("1/2")
    late.cancel()


def test_wait_with_a_bar_ends_after_its_timeout(client: Client, cell: Cell) -> None:
    late = client.submit(b"", service=UNSERVED)
    assert wait([late], 0.05, progress=True) == (set(), {late})
    assert cell.texts() == ["0/1", "0/1"]
    late.cancel()


def test_async_as_completed_draws_too(yard: Yard, cell: Cell) -> None:
    async def scenario() -> None:
        async with AsyncClient(state=yard.state) as client:
            futures = await client.map("operator:neg", range(5))
            found = [done.result() async for done in as_completed(futures, progress=True)]
            assert sorted(found) == [-4, -3, -2, -1, 0]

    asyncio.run(scenario())
    assert cell.texts()[-1] == "5/5"


def test_neither_plain_python_nor_ipython_on_a_terminal_is_a_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert progress.notebook_display() is None
    for shell in (None, object()):
        found = type("IPython", (), {"get_ipython": staticmethod(lambda shell=shell: shell)})
        monkeypatch.setitem(sys.modules, "IPython", found)
        assert progress.notebook_display() is None


def test_no_bar_is_drawn_by_default(client: Client, cell: Cell) -> None:
    futures: list[Future] = client.map("operator:neg", range(5))
    assert len(list(as_completed(futures))) == 5
    assert len(wait(futures).done) == 5
    assert cell.drawn == []
