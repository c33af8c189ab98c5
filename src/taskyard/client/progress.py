"""Progress bars of futures: on a terminal or in a notebook, nothing in a pipe.

Counts settled futures and draws. Imports neither clients nor IPython, which a notebook has loaded.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

from taskyard.core.durations import rough_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Time between updates of a bar.
_SHOWN_SECONDS: Final = 0.1

#: Window of the rate: short enough to follow a change, long enough not to jump.
_RATE_SECONDS: Final = 20.0

_MINUTE_SECONDS: Final = 60


class SettledFuture(Protocol):
    """A settled future of either client."""

    def cancelled(self) -> bool: ...

    def exception(self) -> BaseException | None: ...


class ProgressDisplay(Protocol):
    """A place to draw a bar."""

    def show(self, ended: int, failed: int, caption: str) -> None: ...

    def close(self) -> None: ...


_S = TypeVar("_S", bound=SettledFuture)


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
        self._screen = _screen(total) if drawn else None
        self._ended = self._failed = self._cancelled = 0
        self._shown = 0.0
        #: Times and counts of the last updates, for the rate.
        self._seen: deque[tuple[float, int]] = deque()

    def __enter__(self) -> Self:
        self._show(time.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._show(time.monotonic())
            self._screen.close()

    def count(self, future: SettledFuture) -> None:
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

    def _show(self, now: float) -> None:
        if self._screen is None:
            return
        self._shown = now
        notes = ((self._failed, "failed"), (self._cancelled, "cancelled"))
        parts = [f"{number:,} {word}" for number, word in notes if number]
        self._screen.show(self._ended, self._failed, ", ".join([*parts, *self._rate_and_eta(now)]))

    def _rate_and_eta(self, now: float) -> list[str]:
        """Return the recent rate and the time left, as texts. Empty until there is a rate."""
        self._seen.append((now, self._ended))
        while now - self._seen[0][0] > _RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        rate = (self._ended - before) / (now - then) if now - then >= 1 else 0.0
        left = self._total - self._ended
        if not rate or not left:
            return []
        caption = f"{rate:,.0f}/s" if rate >= 1 else f"{_MINUTE_SECONDS * rate:,.1f}/min"
        return [caption, f"about {rough_duration(left / rate)} left"]


def _screen(total: int) -> ProgressDisplay | None:
    display = notebook_display()
    if display is not None:
        return _NotebookDisplay(display, total)
    return _TerminalDisplay(total) if sys.stderr.isatty() else None


class _TerminalDisplay:
    """A bar on stderr."""

    def __init__(self, total: int) -> None:
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
        self._bar = self._bars.add_task("", total=total, caption="")
        self._bars.start()

    def show(self, ended: int, failed: int, caption: str) -> None:  # noqa: ARG002  # in the caption
        self._bars.update(self._bar, completed=ended, caption=caption)

    def close(self) -> None:
        self._bars.stop()


def notebook_display() -> Callable[..., Any] | None:
    """Return IPython's `display` in a notebook, else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None  # a plain Python, or IPython on a terminal
    from IPython.display import display  # type: ignore[import-not-found]  # noqa: PLC0415

    displayed: Callable[..., Any] = display
    return displayed


class _NotebookDisplay:
    """A bar in the running cell."""

    def __init__(self, display: Callable[..., Any], total: int) -> None:
        self._display = display
        self._total = total
        #: IPython's handle to update the bar.
        self._handle: Any = None

    def show(self, ended: int, failed: int, caption: str) -> None:
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        text = f"{ended:,}/{self._total:,}{caption and ', '}{caption}"
        bundle = {
            "text/html": notebook.progress_html(ended, failed, self._total, text),
            "text/plain": text,
        }
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def close(self) -> None:
        """Leave the bar in the cell."""
