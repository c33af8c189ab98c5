"""Numbers over time: how fast tasks end, how long the rest takes, and how often to ask.

Pure: times are arguments.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Final

#: Samples that are kept: one for each column of a wide terminal.
_SAMPLES_MAX: Final = 240

#: The rate is that of the last minute, so that a pause of one task does not stop the clock.
_RATE_SECONDS: Final = 60.0

#: A search that took a second is repeated after this many. So it takes 2 % of a broker's time.
_REST_FACTOR: Final = 50.0

#: The longest time between two requests, for brokers that are far away.
_REST_SECONDS_MAX: Final = 30.0

_OPEN: Final = ("blocked", "delayed", "ready", "leased")


class Throughput:
    """Counts of ended tasks over time."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES_MAX)
        self._open = 0

    def add(self, now: float, counts: dict[str, int]) -> None:
        """Add the counts of a moment. A broker with fewer tasks than before starts anew."""
        ended = sum(counts.values()) - sum(counts[state] for state in _OPEN)
        if self._samples and ended < self._samples[-1][1]:
            self._samples.clear()
        if not self._samples or now > self._samples[-1][0]:
            self._samples.append((now, ended))
        self._open = sum(counts[state] for state in _OPEN)

    def rates(self) -> list[float]:
        """Return tasks per second between each two samples."""
        return [
            (after[1] - before[1]) / (after[0] - before[0])
            for before, after in pairwise(self._samples)
        ]

    def rate(self) -> float:
        """Return tasks per second of the last minute. 0 if it is unknown."""
        if not self._samples:
            return 0.0
        last_at, last = self._samples[-1]
        recent = [one for one in self._samples if last_at - one[0] <= _RATE_SECONDS]
        at, ended = recent[0]
        return (last - ended) / (last_at - at) if last_at > at else 0.0

    def seconds_left(self) -> float | None:
        """Return how long the open tasks take at the recent rate. None if it is unknown."""
        rate = self.rate()
        return self._open / rate if rate and self._open else None


class Pace:
    """Spaces requests out by what they cost."""

    def __init__(self, interval_seconds_min: float = 0.0) -> None:
        self._interval_min = interval_seconds_min
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        return now >= self._next

    def took(self, began: float, now: float) -> None:
        """Note a request that was answered."""
        rest = min((now - began) * _REST_FACTOR, _REST_SECONDS_MAX)
        self._next = now + max(self._interval_min, rest)

    def reset(self) -> None:
        """Make the next request due."""
        self._next = 0.0
