"""Progress on stderr: a bar on a terminal, a line every few seconds elsewhere.

Formats counts and does not depend on their source. Not thread-safe.
"""

from __future__ import annotations

import re
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import click

from taskyard.cli.format import escape_control, escape_line, format_count, raw_stream
from taskyard.client.progress import LINE_SECONDS, Rate, rich_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from taskyard.cli.options import CliContext

#: The shortest interval between two updates.
_SHOWN_SECONDS: Final = 0.1

#: The order of states in a summary.
_STATES_SHOWN: Final = (
    *("done", "failed", "cancelled", "leased", "ready", "delayed", "blocked", "unfinished"),
)

#: States that are shown beside the number of done tasks.
_EXTRA_STATES: Final = (
    ("failed", "failed"),
    ("cancelled", "cancelled"),
    ("behind", "behind a failure"),
    ("leased", "running"),
    ("delayed", "delayed"),
)


class ProgressBar:
    """A context manager that shows progress, rate and remaining time."""

    def __init__(
        self,
        cli_context: CliContext,
        label: str = "",
        *,
        participle: str = "done",
        drawn: bool = True,
        prints_end: bool = False,
    ) -> None:
        """Prepare a progress display.

        `participle` describes the counted items. Without `drawn` no bar is shown, because the
        terminal is used otherwise. With `prints_end` a line is printed at the end too. The option
        --progress does that as well, and has lines in place of a bar that is not drawn.
        """
        is_terminal, is_forced = sys.stderr.isatty(), cli_context.shows_progress is True
        is_on = is_forced or not (cli_context.quiet or cli_context.shows_progress is False)
        self._participle = participle and f" {participle}"
        self._prints_end = prints_end or is_forced
        self._has_lines = is_on and (is_forced or not is_terminal)
        is_drawn = is_on and is_terminal and drawn
        self._bars = rich_bars(raw_stream(sys.stderr), transient=True) if is_drawn else None
        self._draw: Callable[..., None] | None = None
        self._printed_at = time.monotonic()
        self.set_label(label)

    def set_label(self, label: str, *, replaces: bool = False) -> None:
        """Start a new bar, below the others or in their place. With an empty label, draw none."""
        self.label = escape_line(label)
        if self._bars is not None and replaces:
            for bar in self._bars.task_ids:
                self._bars.remove_task(bar)
        self._shown = 0.0
        self._is_end_printed = False
        self._rate = Rate()
        if self._bars is not None and label:
            bar = self._bars.add_task(self.label, total=None, caption="")
            self._draw = partial(self._bars.update, bar)

    def count(self, counts: Mapping[str, int], total: int | None, behind_failure: int = 0) -> None:
        """Show the number of tasks in each state. A total of None is unknown."""
        all_counts = {**counts, "behind": behind_failure}
        ended = sum(all_counts.get(state, 0) for state in ("done", "failed", "cancelled", "behind"))
        extra_counts = [
            f"{all_counts[state]:,} {word}"
            for state, word in _EXTRA_STATES
            if all_counts.get(state)
        ]
        self.update(ended, total, extra_counts, done=all_counts.get("done", 0))

    def update(
        self,
        ended: int,
        total: int | None,
        extra_counts: Sequence[str] = (),
        done: int | None = None,
    ) -> None:
        """Show the number of ended items. `done` is the number of those that succeeded."""
        now = time.monotonic()
        if now - self._shown < _SHOWN_SECONDS and ended != total:
            return
        self._shown = now
        estimate = self._rate.texts(now, ended, None if total is None else total - ended)
        if self._draw is not None:
            words = ", ".join([*extra_counts, *estimate])
            red = re.sub(r"[\d,]+ failed", r"[red]\g<0>[/]", words)
            self._draw(completed=ended, total=total, caption=red)
        elif self._has_lines and self._is_line_due(now, is_end=ended == total):
            self._printed_at = now
            number = ended if done is None else done
            left = [] if total in (None, ended) else [f"{total - ended:,} left"]
            of = "" if total is None else f" of {total:,}"
            first = f"{self.label}: {number:,}{of}{self._participle}"
            click.echo(", ".join([first, *extra_counts, *left, *estimate]), err=True)

    @property
    def is_shown(self) -> bool:
        """Whether anything is drawn or printed."""
        return self._bars is not None or self._has_lines

    @property
    def is_drawn(self) -> bool:
        """Whether a bar is drawn."""
        return self._bars is not None

    def print_above(self, text: str) -> None:
        """Print a line on stderr above the bar."""
        if self._bars is None:
            click.echo(text, err=True)
        else:
            self._bars.console.print(
                escape_control(text), markup=False, highlight=False, soft_wrap=True
            )

    def _is_line_due(self, now: float, *, is_end: bool) -> bool:
        if is_end and self._prints_end and not self._is_end_printed:
            self._is_end_printed = True
            return True
        return now - self._printed_at > LINE_SECONDS

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()


def format_counts(counts: dict[str, int], behind_failure: int = 0) -> str:
    """Format counts as `12 tasks: 10 done, 2 failed`. Empty states are left out."""
    shown = dict(counts)
    if behind_failure:
        shown["blocked"] -= behind_failure
    parts = [f"{shown[state]:,} {state}" for state in _STATES_SHOWN if shown.get(state)]
    if behind_failure:
        parts.append(f"{behind_failure:,} behind a failure")
    return f"{format_count(sum(counts.values()), 'task')}: {', '.join(parts) or 'none'}"
