"""The progress of tasks as numbers: how many have ended, how fast, and the time left."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from taskyard.core.model import duration_text

#: Window of the rate: short enough to follow a change, long enough not to jump.
_RATE_SECONDS: Final = 20.0

#: Updates that a rate remembers: more than a bar draws in its window.
_SAMPLES_MAX: Final = 1000

_MINUTE_SECONDS: Final = 60


class Progress(NamedTuple):
    """How many tasks have ended, with a caption."""

    ended: int
    failed: int
    total: int
    caption: str

    @property
    def text(self) -> str:
        return f"{self.ended:,}/{self.total:,}{self.caption and ', '}{self.caption}"


class Rate:
    """The recent rate of ended tasks. The clock is an argument."""

    def __init__(self, window_seconds: float = _RATE_SECONDS) -> None:
        self._window_seconds = window_seconds
        #: Times and counts of the last updates.
        self._seen: deque[tuple[float, int]] = deque(maxlen=_SAMPLES_MAX)

    def texts(self, now: float, ended: int, left: int | None) -> list[str]:
        """Note a count. Return the rate and the time left, or nothing until there is a rate.

        `left` is None if it is unknown.
        """
        self._seen.append((now, ended))
        while len(self._seen) > 1 and now - self._seen[1][0] > self._window_seconds:
            self._seen.popleft()  # keeps one from before the window, as updates may be rare
        then, before = self._seen[0]
        rate = (ended - before) / (now - then) if now - then >= 1 else 0.0
        if rate <= 0 or left == 0:
            return []
        words = f"{rate:,.0f}/s" if rate >= 1 else f"{_MINUTE_SECONDS * rate:,.1f}/min"
        return [words] if left is None else [words, f"about {duration_text(left / rate)} left"]
