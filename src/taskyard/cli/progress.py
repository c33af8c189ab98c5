"""How far it is: a bar on a terminal, a line now and then elsewhere. Always on stderr.

Knows counts of tasks, not where they come from. May be updated by any thread.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final, Self

import click

from taskyard.cli.words import count

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from taskyard.cli.options import Talk

#: Where no bar can be drawn, a line this often: a log should say that it goes on, not more.
LINE_SECONDS: Final = 10.0


#: The states of tasks, in the order in which a person asks for them.
_STATES_TOLD: Final = ("done", "failed", "cancelled", "leased", "ready", "delayed", "blocked")


class Meter:
    """Shows how many of some tasks are settled. Use it as a context manager."""

    def __init__(
        self, talk: Talk, label: str, *, drawn: bool = True, done: str = "settled"
    ) -> None:
        """Without `drawn` there is no bar: the terminal is used for something else. `done` is what
        has become of those that are counted."""
        self._label = label
        self._done = done
        self._quiet = talk.quiet
        self._bars: Bars | None = None
        self._bar: TaskID | None = None
        self._said = time.monotonic()
        if sys.stderr.isatty() and not talk.quiet:
            self._quiet = True  # no lines between the bars, nor among answers
            self._bars = _bars() if drawn else None

    def update(self, settled: int, total: int | None, failed: int = 0) -> None:
        """Show so many; a total of None is not known yet."""
        if self._bars is not None and self._bar is not None:
            trouble = f"[red]{failed:,} failed" if failed else ""
            self._bars.update(self._bar, completed=settled, total=total, trouble=trouble)
        elif not self._quiet and time.monotonic() - self._said > LINE_SECONDS:
            self._said = time.monotonic()
            of = "" if total is None else f" of {total:,}"
            trouble = f", {failed:,} failed" if failed else ""
            click.echo(f"{self._label}: {settled:,}{of} {self._done}{trouble}", err=True)

    def say(self, text: str) -> None:
        """A line on stderr, above the bar."""
        if self._bars is None:
            click.echo(text, err=True)
        else:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
            self._bar = self._bars.add_task(self._label, total=None, trouble="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


def _bars() -> Bars:
    from rich.console import Console  # noqa: PLC0415  # it takes a while to import
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[trouble]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def summary_of(counts: dict[str, int], behind_failure: int = 0) -> str:
    """`12 tasks: 10 done, 2 failed`; states that nobody is in are left out."""
    shown = dict(counts)
    if behind_failure:
        shown["blocked"] -= behind_failure
    parts = [f"{shown[state]:,} {state}" for state in _STATES_TOLD if shown.get(state)]
    if behind_failure:
        parts.append(f"{behind_failure:,} behind a failure")
    return f"{count(sum(counts.values()), 'task')}: {', '.join(parts) or 'none'}"
