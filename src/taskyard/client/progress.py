"""How far futures are: a bar on a terminal or in a notebook, nothing in a pipe.

Knows counts and screens, not where futures come from. IPython is not imported unless it is there
already: who runs in a notebook has it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Nobody sees more than this, and to show it takes time from the work.
_SHOWN_SECONDS: Final = 0.1

#: The rate is that of so many seconds: it follows a change, and does not jump.
_RATE_SECONDS: Final = 20.0

_MINUTE_SECONDS: Final = 60
_HOUR_SECONDS: Final = 3600


class SettledFuture(Protocol):
    """A future that is settled."""

    def cancelled(self) -> bool: ...

    def exception(self) -> BaseException | None: ...


class ProgressDisplay(Protocol):
    """Where a bar is drawn."""

    def show(self, ended: int, failed: int, caption: str) -> None: ...

    def close(self) -> None: ...


_S = TypeVar("_S", bound=SettledFuture)


def with_progress(settled: Iterable[_S], total: int) -> Iterator[_S]:
    """The same futures, with a bar that shows how many of them there were."""
    with ProgressBar(total) as meter:
        for future in settled:
            meter.count(future)
            yield future


class ProgressBar:
    """Counts what is settled, and shows it where there is a screen: a context manager."""

    def __init__(self, total: int, *, drawn: bool = True) -> None:
        self._total = total
        self._screen = _screen(total) if drawn else None
        self._ended = self._failed = self._cancelled = 0
        self._shown = 0.0
        #: When how many there were.
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
        beside = ((self._failed, "failed"), (self._cancelled, "cancelled"))
        told = [f"{number:,} {word}" for number, word in beside if number]
        self._screen.show(self._ended, self._failed, ", ".join([*told, *self._rate_and_eta(now)]))

    def _rate_and_eta(self, now: float) -> list[str]:
        """How quick it is lately, and how long the rest takes; nothing while that is not known."""
        self._seen.append((now, self._ended))
        while now - self._seen[0][0] > _RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        rate = (self._ended - before) / (now - then) if now - then >= 1 else 0.0
        left = self._total - self._ended
        if not rate or not left:
            return []
        caption = f"{rate:,.0f}/s" if rate >= 1 else f"{_MINUTE_SECONDS * rate:,.1f}/min"
        return [caption, f"about {format_duration(left / rate)} left"]


def format_duration(seconds: float) -> str:
    """How long something takes, in two units at most."""
    whole = round(seconds)
    if whole < _MINUTE_SECONDS:
        return f"{whole} s"
    if whole < _HOUR_SECONDS:
        return f"{whole // _MINUTE_SECONDS} min {whole % _MINUTE_SECONDS} s"
    return f"{whole // _HOUR_SECONDS:,} h {whole % _HOUR_SECONDS // _MINUTE_SECONDS} min"


def _screen(total: int) -> ProgressDisplay | None:
    display = notebook_display()
    if display is not None:
        return _NotebookDisplay(display, total)
    return _TerminalDisplay(total) if sys.stderr.isatty() else None


class _TerminalDisplay:
    """A bar on stderr."""

    def __init__(self, total: int) -> None:
        from rich.console import Console  # noqa: PLC0415  # only who wants a bar pays for it
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
            # What is printed meanwhile stands above the bar; but what goes to a file goes there.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._bar = self._bars.add_task("", total=total, caption="")
        self._bars.start()

    def show(self, ended: int, failed: int, caption: str) -> None:  # noqa: ARG002  # it is in words
        self._bars.update(self._bar, completed=ended, caption=caption)

    def close(self) -> None:
        self._bars.stop()


def notebook_display() -> Callable[..., Any] | None:
    """What displays something in this notebook's cell; None: this is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None  # a plain Python, or IPython on a terminal
    from IPython.display import display  # type: ignore[import-not-found]  # noqa: PLC0415

    displayed: Callable[..., Any] = display
    return displayed


class _NotebookDisplay:
    """A bar in the cell that is run."""

    def __init__(self, display: Callable[..., Any], total: int) -> None:
        self._display = display
        self._total = total
        #: What the notebook gave to go on drawing at the same place.
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
        """The bar stays where it is."""
