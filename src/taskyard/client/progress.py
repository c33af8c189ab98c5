"""Progress of futures and campaigns: a bar on a terminal or in a notebook, else a few lines.

Counts settled tasks and draws. Imports neither clients nor IPython, which a notebook has loaded.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from taskyard.client import requests
from taskyard.client.progress_rate import Progress, Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from taskyard.client.exchanges import Exchange
    from taskyard.client.requests import CampaignCounts

#: Time between updates of a bar.
_SHOWN_SECONDS: Final = 0.1

#: Time between lines, if there is no bar. Work that ends sooner prints none.
_LINE_SECONDS: Final = 5.0


_S = TypeVar("_S", bound="Future[Any]")


def with_progress(settled: Iterable[_S], total: int) -> Iterator[_S]:
    """Yield these futures while a bar shows how many were yielded."""
    with ProgressBar(total) as bar:
        for future in settled:
            bar.count(future)
            yield future


class ProgressBar:
    """A context manager that counts settled futures and draws a bar."""

    def __init__(self, total: int, *, drawn: bool = True) -> None:
        self._total = total
        self._screen = _screen() if drawn else None
        self._ended = self._failed = self._cancelled = 0
        #: Tasks that can't run, because they depend on a failed one.
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
        self._screen.show(Progress(self._ended, self._failed, self._total, caption))


def follow_campaign(campaign: str, timeout: float | None) -> Exchange[None]:
    """Wait until no task of a campaign can run any more, and draw a bar. Raises `TimedOut`."""
    with ProgressBar(0) as bar:
        yield from requests.follow_campaign(campaign, bar.show_counts, timeout)


def _screen() -> _NotebookDisplay | _TerminalDisplay | _LineDisplay:
    display = notebook_display()
    if display is not None:
        return _NotebookDisplay(display)
    return _TerminalDisplay() if sys.stderr.isatty() else _LineDisplay()


class _LineDisplay:
    """Lines on stderr, for a log. Work of a few seconds prints none."""

    def __init__(self) -> None:
        self._printed = time.monotonic()
        self._last = ""
        self._has_printed = False

    def show(self, progress: Progress) -> None:
        self._last = progress.text
        if time.monotonic() - self._printed >= _LINE_SECONDS:
            self._print()

    def _print(self) -> None:
        self._printed, self._has_printed = time.monotonic(), True
        print(f"tasks {self._last}", file=sys.stderr, flush=True)  # noqa: T201  # the caller asked

    def close(self) -> None:
        if self._has_printed:
            self._print()


class _TerminalDisplay:
    """A bar on stderr."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415  # only a drawn bar needs it
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._bars = Progress(
            TextColumn("tasks"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[caption]}", markup=False),
            console=Console(stderr=True),
            # Printed lines go above the bar, unless stdout is a file.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._bar = self._bars.add_task("", total=None, caption="")
        self._bars.start()

    def show(self, progress: Progress) -> None:
        self._bars.update(
            self._bar,
            completed=progress.ended,
            total=progress.total,
            caption=progress.caption,
        )

    def close(self) -> None:
        self._bars.stop()


def notebook_display() -> Callable[..., Any] | None:
    """Return IPython's `display` in a notebook, else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None  # a plain Python, or IPython on a terminal
    from IPython.display import display  # noqa: PLC0415  # only in a notebook

    displayed: Callable[..., Any] = display
    return displayed


class _NotebookDisplay:
    """A bar in the running cell."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        #: IPython's handle to update the bar.
        self._handle: Any = None

    def show(self, progress: Progress) -> None:
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        bundle = {"text/html": notebook.progress_html(progress), "text/plain": progress.text}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def close(self) -> None:
        """Leave the bar in the cell."""
