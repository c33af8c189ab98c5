"""`taskyard top` without a terminal beside a broker with a million tasks: every screen, drawn again
and again, with what a refresh takes of the broker."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from bench.processes import Broker
from bench.table import TableLine, table_line
from bench.targets import TOP_REFRESH_MS
from taskyard.cli.options import CliContext
from taskyard.cli.web import top_connector
from taskyard.client import task_filters
from taskyard.client.internal import BrokerLink
from taskyard.tui.app import Top

#: Refreshes of each screen after the first.
REFRESHES: Final = 5

#: The terminal of the benchmark: larger than most, so that more is drawn.
_SIZE: Final = (160, 50)

#: Seconds until a screen must be drawn.
_DRAWN_S_MAX: Final = 120.0

_MS: Final = 1e6


class Screen(Struct, frozen=True):
    """A screen by the keys that show it, and the filter that is set before."""

    keys: tuple[str, ...]
    words: str = ""


#: Every screen by the name of its line.
SCREENS: Final = {
    "lanes": Screen(("1",)),
    "workers": Screen(("2",)),
    "tasks": Screen(("3",)),
    "a task": Screen(("3", "enter")),
    "tasks with a rare text": Screen(("3",), "photo-0001234"),
    "failed tasks": Screen(("3",), "--failed"),
}


class Refresh(Struct):
    """The time of one refresh by the clock, and the CPU time of the broker for it."""

    pane: str
    took_ns: int
    broker_ns: int


class TimedTop(Top):
    """Notes every refresh, and requests everything for each of them."""

    def __init__(self, link: BrokerLink, words: str, broker_cpu_ns: Callable[[], int]) -> None:
        super().__init__(link, "bench", task_filters.parse(words))
        self._broker_cpu_ns = broker_cpu_ns
        self.refreshes: list[Refresh] = []
        self._drawn = asyncio.Event()

    async def _draw(self) -> None:
        self.reload()  # a search is due now, even if the last one took long
        name, cpu_ns, start_ns = self.shown, self._broker_cpu_ns(), time.perf_counter_ns()
        await super()._draw()
        took_ns = time.perf_counter_ns() - start_ns
        self.refreshes.append(Refresh(name, took_ns, self._broker_cpu_ns() - cpu_ns))
        self._drawn.set()

    async def refreshed(self, times: int) -> list[Refresh]:
        """Wait until the screen that is shown was drawn so often. Return these refreshes."""
        async with asyncio.timeout(_DRAWN_S_MAX):
            while len(found := self._of_pane()) < times:
                self._drawn.clear()
                await self._drawn.wait()
        return found

    def _of_pane(self) -> list[Refresh]:
        return [one for one in self.refreshes if one.pane == self.shown]


def run(state: Path, say: Callable[[str], None]) -> list[TableLine]:
    """Show every screen to a broker on this state."""
    broker = Broker(state, "durable")
    try:
        lines = []
        for name, screen in SCREENS.items():
            say(f"top: {name}")
            lines += _lines(name, asyncio.run(_show(state, screen, broker)))
    finally:
        broker.terminate()
    return lines


async def _show(state: Path, screen: Screen, broker: Broker) -> list[Refresh]:
    """Show a screen. Return its refreshes, the first of which is that of a new screen."""
    context = CliContext()
    context.state = state
    link = BrokerLink(top_connector(context))
    app = TimedTop(link, screen.words, broker.cpu_ns)
    try:
        async with app.run_test(size=_SIZE) as pilot:
            for key in screen.keys:
                await app.refreshed(1)
                await pilot.press(key)
                app.refreshes.clear()
            return await app.refreshed(1 + REFRESHES)
    finally:
        link.close()


def _lines(name: str, seen: list[Refresh]) -> list[TableLine]:
    first, *others = seen
    took = [one.took_ns / _MS for one in others]
    cpu = [one.broker_ns / _MS for one in others]
    return [
        table_line(f"top, {name}", "ms", took, TOP_REFRESH_MS),
        table_line(f"top, {name}: first", "ms", [first.took_ns / _MS]),
        table_line(f"top, {name}: CPU of the broker", "ms", cpu),
    ]
