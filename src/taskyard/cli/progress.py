"""How far it is: a bar on a terminal, a line now and then elsewhere. Always on stderr.

Knows counts and words, not where they come from. One thread at a time may tell it.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import click

from taskyard.cli.format import escape_line, format_count, format_duration
from taskyard.cli.terminal import escape_control, raw_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.progress import Progress as Bars

    from taskyard.cli.options import CliContext

#: Where no bar can be drawn, a line this often: a log should say that it goes on, not more.
LINE_SECONDS: Final = 5.0

#: The rate is that of so many seconds: it follows a change, and does not jump.
RATE_SECONDS: Final = 20.0

#: Nobody sees more than this, and to show it takes time from the work.
_SHOWN_SECONDS: Final = 0.1

#: The states of tasks, in the order in which a person asks for them.
_STATES_SHOWN: Final = ("done", "failed", "cancelled", "leased", "ready", "delayed", "blocked")

#: What is worth saying beside the number of done tasks.
_EXTRA_STATES: Final = (
    ("failed", "failed"),
    ("cancelled", "cancelled"),
    ("behind", "behind a failure"),
    ("leased", "running"),
    ("delayed", "waiting for their time"),
)


class ProgressBar:
    """Shows how far something is, how quick, and how long it still takes: a context manager."""

    def __init__(
        self,
        cli_context: CliContext,
        label: str = "",
        *,
        verb: str = "done",
        drawn: bool = True,
        prints_end: bool = False,
    ) -> None:
        """`verb` is what has become of those that are counted. Without `drawn` there is no bar: the
        terminal is used for something else. `prints_end` has a line at the end of it, too."""
        is_terminal = sys.stderr.isatty()
        self._verb = verb and f" {verb}"
        self._prints_end = prints_end
        self._has_lines = not (
            is_terminal or cli_context.quiet
        )  # none between bars, nor among answers
        self._bars = _bars() if is_terminal and drawn and not cli_context.quiet else None
        self._draw: Callable[..., None] | None = None
        self._printed_at = time.monotonic()
        self.set_label(label)

    def set_label(self, label: str) -> None:
        """From here on it is about this; "" is about nothing yet."""
        self.label = escape_line(label)
        self._shown = 0.0
        #: When how many there were.
        self._seen: deque[tuple[float, int]] = deque()
        if self._bars is not None and label:
            bar = self._bars.add_task(self.label, total=None, words="")
            self._draw = partial(self._bars.update, bar)

    def count(self, counts: Mapping[str, int], total: int | None, behind_failure: int = 0) -> None:
        """Show how many tasks are in which state; a total of None is not known yet."""
        told = {**counts, "behind": behind_failure}
        ended = sum(told.get(state, 0) for state in ("done", "failed", "cancelled", "behind"))
        extra_counts = [
            f"{told[state]:,} {word}" for state, word in _EXTRA_STATES if told.get(state)
        ]
        self.update(ended, total, extra_counts, done=told.get("done", 0))

    def update(
        self,
        ended: int,
        total: int | None,
        extra_counts: Sequence[str] = (),
        done: int | None = None,
    ) -> None:
        """Show that so many are over; `done` of them well, if not all."""
        now = time.monotonic()
        if now - self._shown < _SHOWN_SECONDS and ended != total:
            return
        self._shown = now
        words = ", ".join([*extra_counts, *self._rate_and_eta(now, ended, total)])
        if self._draw is not None:
            red = re.sub(r"[\d,]+ failed", r"[red]\g<0>[/]", words)
            self._draw(completed=ended, total=total, words=red)
        elif self._has_lines and self._is_line_due(now, is_end=ended == total):
            self._printed_at = now
            of = "" if total is None else f" of {total:,}"
            number = ended if done is None else done
            click.echo(f"{self.label}: {number:,}{of}{self._verb}{words and ', '}{words}", err=True)

    def print_above(self, text: str) -> None:
        """A line on stderr, above the bar."""
        if self._bars is None:
            click.echo(text, err=True)
        else:
            self._bars.console.print(
                escape_control(text), markup=False, highlight=False, soft_wrap=True
            )

    def _is_line_due(self, now: float, *, is_end: bool) -> bool:
        return (is_end and self._prints_end) or now - self._printed_at > LINE_SECONDS

    def _rate_and_eta(self, now: float, ended: int, total: int | None) -> list[str]:
        """How quick it is lately, and how long the rest takes; nothing while that is not known."""
        self._seen.append((now, ended))
        while now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        rate = (ended - before) / (now - then) if now - then >= 1 else 0.0
        if not rate or ended == total:
            return []
        words = f"{rate:,.0f}/s" if rate >= 1 else f"{60 * rate:,.1f}/min"
        return (
            [words]
            if total is None
            else [words, f"about {format_duration((total - ended) / rate)} left"]
        )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
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
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}"),
        console=Console(file=raw_stream(sys.stderr)),
        transient=True,
    )


def format_counts(counts: dict[str, int], behind_failure: int = 0) -> str:
    """`12 tasks: 10 done, 2 failed`; states that nobody is in are left out."""
    shown = dict(counts)
    if behind_failure:
        shown["blocked"] -= behind_failure
    parts = [f"{shown[state]:,} {state}" for state in _STATES_SHOWN if shown.get(state)]
    if behind_failure:
        parts.append(f"{behind_failure:,} behind a failure")
    return f"{format_count(sum(counts.values()), 'task')}: {', '.join(parts) or 'none'}"
