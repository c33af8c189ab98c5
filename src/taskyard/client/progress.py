"""Progress of tasks: a bar on a terminal or in a notebook, else a few lines.

Owns the rate and the time left, the bar of `rich` that commands draw too, and the bar of futures
and campaigns. Imports neither clients nor IPython, which a notebook has loaded.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self, TextIO, TypeVar

from taskyard.client import requests
from taskyard.core.durations import duration_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from rich.progress import Progress as RichProgress

    from taskyard.client.exchanges import Exchange
    from taskyard.client.requests import CampaignCounts

#: Window of the rate: short enough to follow a change, long enough not to jump.
RATE_SECONDS: Final = 20.0

#: Updates that a rate remembers: more than a bar draws in its window.
_SAMPLES_MAX: Final = 1000

#: Time between updates of a bar.
_SHOWN_SECONDS: Final = 0.1

#: Time between lines, if there is no bar. Work that ends sooner prints none.
LINE_SECONDS: Final = 5.0

_MINUTE_SECONDS: Final = 60


_S = TypeVar("_S", bound="Future[Any]")


class Rate:
    """The recent rate of ended tasks. The clock is an argument."""

    def __init__(self, window_seconds: float = RATE_SECONDS) -> None:
        self._window_seconds = window_seconds
        #: Times and counts of the last updates.
        self._seen: deque[tuple[float, int]] = deque(maxlen=_SAMPLES_MAX)

    def texts(self, now: float, ended: int, left: int | None) -> list[str]:
        """Note a count. Return the rate and the time left, or nothing until there is a rate.

        `left` is None if it is unknown.
        """
        self._seen.append((now, ended))
        while len(self._seen) > 1 and now - self._seen[1][0] > self._window_seconds:
            self._seen.popleft()  # keeps an update from before the window, as they may be rare
        then, before = self._seen[0]
        rate = (ended - before) / (now - then) if now - then >= 1 else 0.0
        if rate <= 0 or left == 0:
            return []
        words = f"{rate:,.0f}/s" if rate >= 1 else f"{_MINUTE_SECONDS * rate:,.1f}/min"
        return [words] if left is None else [words, f"about {duration_text(left / rate)} left"]


def rich_bars(file: TextIO | None = None, *, transient: bool = False) -> RichProgress:
    """Return bars that `rich` draws on a terminal. Each has a description and a `caption`.

    Printed lines go above the bars, unless stdout is a file.
    """
    from rich.console import Console  # noqa: PLC0415  # only a drawn bar needs it
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
        TextColumn("{task.fields[caption]}"),
        console=Console(file=file, stderr=True),
        redirect_stdout=sys.stdout.isatty(),
        transient=transient,
    )


def notebook_display() -> Callable[..., Any] | None:
    """Return IPython's `display` in a notebook, else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None  # a plain Python, or IPython on a terminal
    from IPython.display import display  # noqa: PLC0415  # only in a notebook

    displayed: Callable[..., Any] = display
    return displayed


class _Lines:
    """Lines on stderr, for a log. Work of a few seconds prints none."""

    def __init__(self) -> None:
        self._printed = time.monotonic()
        self._last = ""
        self._has_printed = False

    def show(self, ended: int, total: int, caption: str) -> None:
        self._last = _text(ended, total, caption)
        if time.monotonic() - self._printed >= LINE_SECONDS:
            self._print()

    def _print(self) -> None:
        self._printed, self._has_printed = time.monotonic(), True
        print(f"tasks {self._last}", file=sys.stderr, flush=True)  # noqa: T201  # the caller asked

    def close(self) -> None:
        if self._has_printed:
            self._print()


class DrawnBar:
    """A bar on stderr, or in the running cell of a notebook."""

    def __init__(self, display: Callable[..., Any] | None) -> None:
        self._display = display
        #: IPython's handle to update the bar in a cell.
        self._handle: Any = None
        self._bars = rich_bars()
        self._bar = self._bars.add_task("tasks", total=None, caption="")
        if display is None:
            self._bars.start()

    def show(self, ended: int, total: int, caption: str) -> None:
        self._bars.update(self._bar, completed=ended, total=total, caption=caption)
        if self._display is None:
            return
        bars: Any = self._bars  # its method for notebooks has the wrong type
        html = bars._repr_mimebundle_([], [])["text/html"]
        bundle = {"text/html": html, "text/plain": _text(ended, total, caption)}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def close(self) -> None:
        """End the bar. In a cell it stays."""
        if self._display is None:
            self._bars.stop()


def _screen() -> DrawnBar | _Lines:
    display = notebook_display()
    return _Lines() if display is None and not sys.stderr.isatty() else DrawnBar(display)


def _text(ended: int, total: int, caption: str) -> str:
    return f"{ended:,}/{total:,}{caption and ', '}{caption}"


class ProgressBar:
    """A context manager that counts settled futures and draws a bar."""

    def __init__(self, total: int, *, drawn: bool = True) -> None:
        self._total = total
        self._screen = _screen() if drawn else None
        self._ended = self._failed = self._cancelled = 0
        #: Tasks that can't run, because they depend on a failed task.
        self._behind = 0
        self._shown = 0.0
        self._rate = Rate()

    def __enter__(self) -> Self:
        if self._total:  # a campaign's is not known yet
            self._show(time.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._show(time.monotonic())
            self._screen.close()

    def count(self, future: Future[Any]) -> None:
        if self._screen is None:
            return
        self._ended += 1
        if future.cancelled():
            self._cancelled += 1
        elif future.exception() is not None:
            self._failed += 1
        now = time.monotonic()
        if now - self._shown >= _SHOWN_SECONDS:
            self._show(now)

    def show_counts(self, counts: CampaignCounts) -> None:
        """Draw the tasks of a campaign, by their states."""
        states = counts.by_state
        self._failed, self._cancelled = states["failed"], states["cancelled"]
        self._ended = counts.ended
        self._total = sum(states.values())
        self._behind = self._total - self._ended - counts.left
        self._show(time.monotonic())

    def _show(self, now: float) -> None:
        if self._screen is None:
            return
        self._shown = now
        notes = {
            "failed": self._failed,
            "cancelled": self._cancelled,
            "behind a failure": self._behind,
        }
        parts = [f"{number:,} {word}" for word, number in notes.items() if number]
        left = self._total - self._ended - self._behind
        caption = ", ".join([*parts, *self._rate.texts(now, self._ended, left)])
        self._screen.show(self._ended, self._total, caption)


def with_progress(settled: Iterable[_S], total: int) -> Iterator[_S]:
    """Yield these futures while a bar shows how many were yielded."""
    with ProgressBar(total) as bar:
        for future in settled:
            bar.count(future)
            yield future


def follow_campaign(campaign: str, timeout: float | None) -> Exchange[None]:
    """Wait until no task of a campaign can run any more, and draw a bar. Raises `TimedOut`."""
    with ProgressBar(0) as bar:
        yield from requests.follow_campaign(campaign, bar.show_counts, timeout)
