"""Metrics, from files to files, a file for each day.

Changes of this run are added to the buckets of their days. All days from the first change on are
made again, because levels are carried from day to day. So are those in which a worker has other
slots than before. Buckets of open attempts are not kept: the next run finds those attempts again.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from msgspec import Struct

from taskyard.pipeline.fold import schemas
from taskyard.pipeline.fold.buckets import add_up
from taskyard.pipeline.fold.columns import INT_MAX, kept, number
from taskyard.pipeline.fold.metrics import DAY_NS, day_metrics, days_of
from taskyard.pipeline.history.fold_files import FoldedFiles
from taskyard.pipeline.history.memory import Files, Memory, selected, write_rows
from taskyard.pipeline.store.data_file import DataFile

_EPOCH: Final = dt.date(1970, 1, 1)
_SLOTS: Final = selected(schemas.WORKERS, ("worker", "stay", "joined", "slots"))


class DayFiles(Struct):
    """The files of days, and the names of those that they replace, by table."""

    metrics: list[DataFile]
    memory: dict[str, list[DataFile]]
    replaced: dict[str, set[str]]


class MetricDays:
    """The days of one run."""

    def __init__(self, memory: Memory, metrics: Files, workers: Files, last_ns: int) -> None:
        """Take the tables as they were, except workers, which are complete."""
        self._memory, self._metrics, self._last_ns = memory, metrics, last_ns
        self._slots = workers.read(_SLOTS)
        self._made = DayFiles([], {"_buckets": [], "_levels": []}, {})
        #: The present file of each day, by table.
        self._files = {
            table: {_day(name): name for name in files.names}
            for table, files in (
                ("_buckets", memory["_buckets"]),
                ("_levels", memory["_levels"]),
                ("metrics", metrics),
            )
        }

    def write(self, folded: Sequence[FoldedFiles], slots_since_ns: int | None) -> DayFiles:
        """Add the buckets of all shares, and write the days that changed.

        From `slots_since_ns` on, workers have other slots than before. None: nowhere.
        """
        changed = add_up(one.table("buckets") for one in folded)
        still_open = add_up(one.table("buckets_open") for one in folded)
        # An attempt that was open and has ended is among the changes, with the same minute.
        touched = np.append(days_of(changed), days_of(still_open))
        known = {*self._files["_buckets"], *self._files["metrics"], *touched.tolist()}
        first = min(touched.tolist(), default=INT_MAX)
        if slots_since_ns is not None:
            first = min([first, *(day for day in known if day >= slots_since_ns // DAY_NS)])
        if first == INT_MAX:
            return self._made
        changed_days, open_days = days_of(changed), days_of(still_open)
        levels = self._levels_before(first)
        last = max(*known, self._last_ns // DAY_NS)
        for day in range(first, last + 1):
            if day not in known and not (number(levels["running"]).values > 0).any():
                continue
            buckets = self._add(day, kept(changed, changed_days == day))
            of_open = kept(still_open, open_days == day)
            levels = self._make(day, pa.concat_tables([buckets, of_open]), levels)
        return self._made

    def _levels_before(self, day: int) -> pa.Table:
        """Return the levels at the beginning of a day: at the end of the last one with a file."""
        before = [one for one in self._files["_levels"] if one < day]
        return self._read("_levels", max(before), schemas.LEVELS) if before else _NO_LEVELS

    def _read(self, table: str, day: int, schema: pa.Schema) -> pa.Table:
        name = self._files[table].get(day)
        files = self._memory[table]
        return schema.empty_table() if name is None else files.read_one(name, schema)

    def _add(self, day: int, changed: pa.Table) -> pa.Table:
        """Add changes to the buckets of a day."""
        before = self._read("_buckets", day, schemas.BUCKETS)
        if not len(changed):
            return before
        whole = add_up([before, changed])
        self._made.memory["_buckets"] += self._memory.write("_buckets", whole, _date(day))
        self._drop("_buckets", day)
        return whole

    def _make(self, day: int, buckets: pa.Table, levels: pa.Table) -> pa.Table:
        """Write the metrics of a day, and return the levels at its end."""
        found = day_metrics(day, buckets, levels, self._slots, self._last_ns)
        directory = self._metrics.directory
        self._made.metrics += write_rows(directory, found.metrics, schemas.METRICS, _date(day))
        # A file without rows has a meaning: all levels are 0.
        self._made.memory["_levels"] += self._memory.write_always(
            "_levels", found.levels, _date(day)
        )
        for table in ("_levels", "metrics"):
            self._drop(table, day)
        return found.levels

    def _drop(self, table: str, day: int) -> None:
        name = self._files[table].get(day)
        if name is not None:
            self._made.replaced.setdefault(table, set()).add(name)


_NO_LEVELS: Final = schemas.LEVELS.empty_table()


def _date(day: int) -> str:
    return (_EPOCH + dt.timedelta(day)).isoformat()


def _day(name: str) -> int:
    """Return the number of the day that a file is named after."""
    return (dt.date.fromisoformat(name.rsplit("-", 1)[0]) - _EPOCH).days
