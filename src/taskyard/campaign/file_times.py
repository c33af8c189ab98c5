"""Compares the input and output files of a task by their times, as `make` does.

A worker decides by it whether to run a task, and `run` whether a task that is done must run again.
Paths are relative to a directory. Changes nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence


class TaskFiles(Struct, frozen=True):
    """The files that a task reads and writes."""

    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    #: The directory that paths begin in. "": the current one.
    directory: str = ""

    def missing_input(self) -> str:
        """Return an input that does not exist, or an empty text."""
        return self._first_missing(self.inputs)

    def missing_output(self) -> str:
        """Return an output that does not exist, or an empty text."""
        return self._first_missing(self.outputs)

    def why_stale(self) -> str:
        """Return why the outputs are not up to date, or an empty text if they are.

        They are if all exist and are newer than all inputs. Inputs that do not exist are ignored.
        """
        if not self.outputs:
            return "it has no outputs"
        if missing := self.missing_output():
            return f"{missing} is missing"
        oldest = min(self.outputs, key=self._time_ns)
        newest = max(self.inputs, key=self._time_ns, default=None)
        if newest is None or self._time_ns(newest) < self._time_ns(oldest):
            return ""
        # Coarse clocks of file systems give equal times to files of one moment.
        is_equal = self._time_ns(newest) == self._time_ns(oldest)
        return f"{newest} is {'as new as' if is_equal else 'newer than'} {oldest}"

    def input_since(self, when_ns: int) -> str:
        """Return an input that was changed after this time, or an empty text."""
        return next((path for path in self.inputs if self._time_ns(path) > when_ns), "")

    def _first_missing(self, paths: Sequence[str]) -> str:
        return next((path for path in paths if not self._time_ns(path)), "")

    def _time_ns(self, path: str) -> int:
        """Return when a file was changed. 0: there is none."""
        try:
            return os.stat(os.path.join(self.directory, path)).st_mtime_ns  # noqa: PTH116, PTH118 - faster
        except (OSError, ValueError):
            return 0
