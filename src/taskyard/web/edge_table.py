"""Dependencies between tasks, as pairs of rows. A name that was never submitted has a row too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from taskyard.journal.row_file import TABLES
from taskyard.web.event_columns import expanded

if TYPE_CHECKING:
    from taskyard.journal.row_file import Block
    from taskyard.web.event_columns import Ints

_ROWS_MIN: Final = 1024
_TASK, _AFTER = (TABLES["edges"].index(name) for name in ("task", "after"))


class EdgeTable:
    """Pairs of a task and one that it waits for, in the order in which they were added."""

    def __init__(self) -> None:
        self.count = 0
        self._pairs = np.zeros((2, _ROWS_MIN), np.int64)

    def add(self, task: Ints, after: Ints) -> None:
        """Add edges by the rows of their ends."""
        end = self.count + len(task)
        size = self._pairs.shape[1]
        if end > size:
            more = np.zeros((2, max(size, len(task))), np.int64)
            self._pairs = np.hstack([self._pairs, more])
        self._pairs[:, self.count : end] = task, after
        self.count = end

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


def edge_names(block: Block) -> tuple[list[bytes], list[bytes]]:
    """Return the names of tasks, and of those that they wait for."""
    task, after = (expanded(block.columns[place], block.rows) for place in (_TASK, _AFTER))
    return task, after
