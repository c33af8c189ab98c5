"""Screenshots of `taskyard top`: one SVG for each screen, at 100 by 30 characters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from taskyard.cli.offline import OfflineClient
from taskyard.client.internal import BrokerLink, InternalClient
from taskyard.client.task_filters import Filter
from taskyard.tui.app import Top

if TYPE_CHECKING:
    from pathlib import Path

    from textual.pilot import Pilot

_SIZE: Final = (100, 30)

#: The name of each picture, and the keys that lead to it from the picture before.
_STEPS: Final = (
    ("lanes", ()),
    ("workers", ("2",)),
    ("tasks", ("3",)),
    ("task", ("enter",)),
)

#: Fail if a screen takes longer.
_DRAWN_SECONDS: Final = 60.0


def capture(state: Path, directory: Path, wanted: Filter | None = None) -> list[Path]:
    """Write a picture of every screen of the broker on a state directory. Return the files."""

    def connect(*, is_live: bool) -> InternalClient:
        return InternalClient(state=state) if is_live else OfflineClient(state)

    link = BrokerLink(connect)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return asyncio.run(_capture(link, str(state), directory, wanted))
    finally:
        link.close()


async def _capture(
    link: BrokerLink, name: str, directory: Path, wanted: Filter | None
) -> list[Path]:
    files = []
    app = Top(link, name, wanted or Filter())
    async with app.run_test(size=_SIZE) as pilot:
        await pilot.press("1")
        await _drawn(app, pilot)
        for title, keys in _STEPS:
            await pilot.press(*keys)
            await _drawn(app, pilot)
            file = directory / f"top-{title}.svg"
            file.write_text(app.export_screenshot(title=f"taskyard top: {title}"))
            files.append(file)
    return files


async def _drawn(app: Top, pilot: Pilot[None]) -> None:
    """Wait until everything was requested and drawn twice."""
    goal = app.drawings + 2
    async with asyncio.timeout(_DRAWN_SECONDS):
        while app.drawings < goal:
            await pilot.pause(0.05)
    await pilot.pause(0.2)
