"""Counts over time in buckets of one width: what happened, and how many tasks were in a state.

The width doubles when there would be too many buckets, so that memory and charts are bounded for
any duration. An event before the first one, after a clock was set back, counts in the first bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from taskyard.core.states import TaskState
from taskyard.web.task_table import NO_STATE

if TYPE_CHECKING:
    from taskyard.web.event_columns import Ints
    from taskyard.web.task_table import Steps

SECOND_NS: Final = 1_000_000_000

#: A chart has fewer pixels.
BUCKETS_MAX: Final = 2048

#: Tasks that moved to a state, and changes of the number of tasks in it.
_STATES: Final = tuple(TaskState)


class TimeSeries:
    """Moves between states by bucket."""

    def __init__(self) -> None:
        self.width_ns = SECOND_NS
        self.begin_ns = 0
        self._moved = np.zeros((len(_STATES), 0), np.int64)
        self._change = self._moved.copy()

    @property
    def buckets(self) -> int:
        return self._moved.shape[1]

    def add(self, steps: Steps) -> None:
        """Count the moves of a block of events."""
        if not len(steps.row):
            return
        if not self.begin_ns:
            self.begin_ns = int(steps.time_ns.min()) // SECOND_NS * SECOND_NS
        self._make_room(int(steps.time_ns.max()))
        bucket = np.maximum(steps.time_ns - self.begin_ns, 0) // self.width_ns
        moved = steps.state != steps.last_state
        np.add.at(self._moved, (steps.state[moved], bucket[moved]), 1)
        np.add.at(self._change, (steps.state[moved], bucket[moved]), 1)
        left = moved & (steps.last_state != NO_STATE)
        np.add.at(self._change, (steps.last_state[left], bucket[left]), -1)

    def moved(self, state: TaskState) -> Ints:
        """Return how many tasks moved to a state in each bucket."""
        found: Ints = self._moved[state]
        return found

    def depth(self, state: TaskState) -> Ints:
        """Return how many tasks were in a state at the end of each bucket."""
        return np.cumsum(self._change[state])

    def _make_room(self, last_ns: int) -> None:
        while (last_ns - self.begin_ns) // self.width_ns >= BUCKETS_MAX:
            self._moved, self._change = _halved(self._moved), _halved(self._change)
            self.width_ns *= 2
        more = int((last_ns - self.begin_ns) // self.width_ns) + 1 - self.buckets
        if more > 0:
            empty = np.zeros((len(_STATES), more), np.int64)
            self._moved = np.hstack([self._moved, empty])
            self._change = np.hstack([self._change, empty])


def _halved(counts: np.ndarray) -> np.ndarray:
    """Add up pairs of buckets."""
    if counts.shape[1] % 2:
        counts = np.hstack([counts, np.zeros((len(counts), 1), np.int64)])
    found: np.ndarray = counts[:, 0::2] + counts[:, 1::2]
    return found
