"""Dependencies between tasks, as pairs of rows. A name that was never submitted has a row too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from taskyard.journal.row_file import TABLES
from taskyard.web.event_columns import expanded

if TYPE_CHECKING:
    from taskyard.journal.row_file import Block
    from taskyard.web.event_columns import Ints
    from taskyard.web.task_table import TaskTable

_ROWS_MIN: Final = 1024
_TASK, _AFTER = (TABLES["edges"].index(name) for name in ("task", "after"))


class EdgeTable:
    """Pairs of a task and one that it waits for, in the order in which they were added."""

    def __init__(self) -> None:
        self.count = 0
        self._pairs = np.zeros((2, _ROWS_MIN), np.int64)

    def add(self, block: Block, tasks: TaskTable) -> None:
        """Add the edges of a block."""
        ends = (block.columns[_TASK], block.columns[_AFTER])
        task, after = (tasks.rows_of(expanded(runs, block.rows)) for runs in ends)
        size = self._pairs.shape[1]
        if self.count + block.rows > size:
            more = np.zeros((2, max(size, block.rows)), np.int64)
            self._pairs = np.hstack([self._pairs, more])
        self._pairs[:, self.count : self.count + block.rows] = task, after
        self.count += block.rows

    @property
    def task(self) -> Ints:
        found: Ints = self._pairs[0, : self.count]
        return found

    @property
    def after(self) -> Ints:
        found: Ints = self._pairs[1, : self.count]
        return found

    def befores(self, row: int) -> Ints:
        """Return the rows of the tasks that a task waits for, each once."""
        return np.unique(self.after[self.task == row])

    def dependents(self, row: int) -> Ints:
        """Return the rows of the tasks that wait for a task, each once."""
        return np.unique(self.task[self.after == row])
