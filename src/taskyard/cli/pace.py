"""How a campaign goes: done, failed and running, how quick, how long still. On stderr.

A bar on a terminal, a line now and then elsewhere. Knows counts by state, not where they come from.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Self

import click

from taskyard.cli.words import span

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from taskyard.cli.options import Talk

#: In a pipe, a line this often.
LINE_SECONDS: Final = 5.0

#: The rate is that of so many seconds: it follows a change, and does not jump.
RATE_SECONDS: Final = 20.0


class Pace:
    """Shows the counts of a campaign. Use it as a context manager."""

    def __init__(self, talk: Talk, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._quiet = talk.quiet
        self._said = time.monotonic()
        #: When how many were settled.
        self._seen: deque[tuple[float, int]] = deque()
        self._bars: Bars | None = None
        self._bar: TaskID | None = None
        if sys.stderr.isatty() and not talk.quiet:
            self._bars = _bars()

    def update(self, counts: dict[str, int], behind_failure: int = 0) -> None:
        """Show these counts of tasks by state."""
        settled = counts["done"] + counts["failed"] + counts["cancelled"] + behind_failure
        words = self._words(counts, settled)
        now = time.monotonic()
        if self._bars is not None and self._bar is not None:
            self._bars.update(self._bar, completed=settled, words=words.removeprefix(", "))
        elif not self._quiet and now - self._said > LINE_SECONDS:
            self._said = now
            click.echo(
                f"{self._label}: {counts['done']:,} of {self._total:,} done{words}", err=True
            )

    def _words(self, counts: dict[str, int], settled: int) -> str:
        """What is worth saying beside the number of done tasks."""
        said = [f"{counts[state]:,} {word}" for state, word in _WORDS if counts[state]]
        rate = self._rate(settled)
        if rate:
            said.append(f"{rate:,.0f}/s" if rate >= 1 else f"{60 * rate:,.1f}/min")
            left = self._total - settled
            if left:
                said.append(f"about {span(left / rate)} left")
        return "".join(f", {one}" for one in said)

    def _rate(self, settled: int) -> float:
        """Tasks a second, lately; 0 while that is not known."""
        now = time.monotonic()
        self._seen.append((now, settled))
        while now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        return (settled - before) / (now - then) if now - then >= 1 else 0.0

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
            self._bar = self._bars.add_task(self._label, total=self._total, words="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


_WORDS: Final = (
    ("failed", "failed"),
    ("cancelled", "cancelled"),
    ("leased", "running"),
    ("delayed", "waiting for their time"),
)


def _bars() -> Bars:
    from rich.console import Console  # noqa: PLC0415  # it takes a while to import
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
