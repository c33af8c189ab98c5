"""Metrics: a row for each minute of a scope, from buckets. Changes become levels.

The table is made day by day. A day needs its own buckets, and the levels at its beginning: the
queue depth and the running attempts of each scope. So later events change the days from their own
on, and nothing before.

A minute has a row if something happened in it, or if an attempt was running. So a queue that waits
for weeks takes no rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.pipeline.fold.buckets import EVENT_COUNTS, MINUTE_NS, SCOPE, add_up, bin_entries
from taskyard.pipeline.fold.columns import (
    Ints,
    Number,
    combined,
    distinct,
    is_first,
    is_last,
    kept,
    number,
    plain,
    running_sums,
    text,
)
from taskyard.pipeline.fold.histograms import percentile
from taskyard.pipeline.fold.schemas import BUCKETS, COUNTS, LEVELS, METRICS

_SECOND_NS: Final = 1_000_000_000
DAY_NS: Final = 86_400 * _SECOND_NS


class DayMetrics(Struct, frozen=True):
    """The metrics of a day, and the levels at its end."""

    metrics: pa.Table
    levels: pa.Table


def days_of(buckets: pa.Table) -> Ints:
    """Return the day of each bucket, as a number."""
    return number(buckets["bucket"]).values * 1000 // DAY_NS


def day_metrics(
    day: int, buckets: pa.Table, levels: pa.Table, workers: pa.Table, last_ns: int
) -> DayMetrics:
    """Return the metrics of one day.

    `buckets` are those of the day, `levels` those at its beginning. An attempt that is still open
    runs until the last event of the history. `workers` are stays, which have the slots: columns
    `worker`, `stay`, `joined` and `slots`.
    """
    end_ns = min((day + 1) * DAY_NS, last_ns // MINUTE_NS * MINUTE_NS + MINUTE_NS)
    is_running = (number(levels["running"]).values > 0) & (day * DAY_NS < end_ns)
    begun = _empty_rows(kept(levels, is_running), np.full(int(is_running.sum()), day * DAY_NS))
    rows = add_up([buckets, begun])
    rows = add_up([rows, _rows_between(rows, _Levels(rows, levels), end_ns)])
    found = _Levels(rows, levels)
    return DayMetrics(_metrics(rows, found, workers, last_ns), found.at_end())


class _Levels:
    """The queue depth and the running attempts at the end of each row's interval."""

    def __init__(self, rows: pa.Table, before: pa.Table) -> None:
        self._rows, self._before = rows, before
        both = pa.concat_tables([rows.select(SCOPE), before.select(SCOPE)])
        codes = combined(*(text(both[name]).codes for name in SCOPE))
        values, places = np.unique(codes, return_inverse=True)
        self.scope, self._scope_before = places[: len(rows)], places[len(rows) :]
        self._count = len(values)
        self.starts = is_first(self.scope)
        self.running_change = number(rows["running_change"]).values
        self.running = self._sums("running", self.running_change)
        self.depth = self._sums("depth", number(rows["depth_change"]).values)

    def _sums(self, name: str, changes: Ints) -> Ints:
        base = np.zeros(self._count, np.int64)
        base[self._scope_before] = number(self._before[name]).values
        return running_sums(changes, self.starts) + base[self.scope]

    def at_end(self) -> pa.Table:
        """Return the levels after the last row of each scope, without those that are 0."""
        ends = np.flatnonzero(is_last(self.scope))
        seen = np.zeros(self._count, bool)
        seen[self.scope] = True
        others = kept(self._before, ~seen[self._scope_before])
        columns = {name: self._rows[name].take(pa.array(ends)) for name in SCOPE}
        columns |= {"depth": self.depth[ends], "running": self.running[ends]}
        whole = pa.concat_tables([plain(pa.table(columns), LEVELS), others])
        is_some = (number(whole["depth"]).values != 0) | (number(whole["running"]).values != 0)
        return kept(whole, is_some)


def _rows_between(rows: pa.Table, levels: _Levels, end_ns: int) -> pa.Table:
    """Return an empty row for each minute without changes in which an attempt was running."""
    begins_ns = number(rows["bucket"]).values * 1000
    next_ns = np.append(begins_ns[1:], end_ns)
    next_ns[is_last(levels.scope)] = end_ns
    gaps = np.maximum(next_ns - begins_ns, MINUTE_NS) // MINUTE_NS - 1
    gaps[levels.running <= 0] = 0
    places = np.repeat(np.arange(len(rows)), gaps)
    offsets = np.arange(len(places)) - np.repeat(np.cumsum(gaps) - gaps, gaps)
    return _empty_rows(rows.take(pa.array(places)), begins_ns[places] + (offsets + 1) * MINUTE_NS)


def _empty_rows(scopes: pa.Table, begins_ns: Ints) -> pa.Table:
    """Return rows without changes."""
    columns = {name: scopes[name] for name in SCOPE}
    columns["bucket"] = Number(begins_ns).times
    columns["bucket_ns"] = pa.array(np.full(len(begins_ns), MINUTE_NS))
    return pa.table(
        {field.name: columns.get(field.name, _zeros(field, len(begins_ns))) for field in BUCKETS}
    )


def _zeros(field: pa.Field, count: int) -> pa.Array:
    if pa.types.is_map(field.type):
        empty = pa.array([[]], field.type)
        return empty.take(pa.array(np.zeros(count, np.int64)))
    if field.name.endswith("_max_ns"):
        return pa.nulls(count, pa.int64())
    return pa.array(np.zeros(count, np.int64))


def _metrics(rows: pa.Table, levels: _Levels, workers: pa.Table, last_ns: int) -> pa.Table:
    running = levels.running
    busy_ns = number(rows["busy_ns"]).values + (running - levels.running_change) * MINUTE_NS
    # Nothing is known of the rest of the last minute.
    ends_ns = number(rows["bucket"]).values * 1000 + MINUTE_NS
    busy_ns -= running * np.clip(ends_ns - last_ns, 0, MINUTE_NS)
    is_worker = text(rows["scope"]).is_any(("worker",))
    columns = {name: rows[name] for name in (*SCOPE, "bucket", "bucket_ns", *EVENT_COUNTS)}
    columns |= {
        "throughput": pa.array(number(rows["finished"]).values / (MINUTE_NS / _SECOND_NS)),
        "depth": Number(levels.depth, ~is_worker).arrow,
        "running": pa.array(running),
        "busy_ns": pa.array(busy_ns),
        "utilisation": _utilisation(busy_ns, _slots(rows, workers)),
        "reasons": _reasons(rows["reasons"]),
    }
    for name in ("wait", "run"):
        columns |= _percentiles(rows, name)
    return plain(pa.table(columns), METRICS)


def _slots(rows: pa.Table, workers: pa.Table) -> Ints:
    """Return the slots that the worker of each row had, 0 if unknown.

    They are those of its last stay that began before the interval ended. If the clock was set back,
    there may be none. Then those of its first stay count.
    """
    names = text(rows["worker"])
    worker = pc.index_in(workers["worker"].cast(pa.string()), value_set=names.values)
    joined_us = number(workers["joined"])
    is_known = worker.is_valid().to_numpy() & joined_us.is_known
    stays = kept(workers, is_known)
    codes = worker.filter(pa.array(is_known)).to_numpy().astype(np.int64)
    found = np.zeros(len(rows), np.int64)
    if len(stays):
        mine = np.flatnonzero(names.codes >= 0)
        ends_us = (number(rows["bucket"]).values[mine] * 1000 + MINUTE_NS) // 1000
        lasts = _LastStays(codes, joined_us.values[is_known], number(stays["stay"]).values)
        chosen = lasts.before(names.codes[mine].astype(np.int64), ends_us)
        found[mine] = np.append(number(stays["slots"]).filled(0), 0)[chosen]
    return found


class _LastStays:
    """The stays of workers by the time at which they began."""

    def __init__(self, worker: Ints, joined_us: Ints, stay: Ints) -> None:
        self._width = int(stay.max()) + 1
        keys = worker * self._width + stay
        self._stays = np.argsort(keys, kind="stable")
        self._keys = keys[self._stays]
        order = np.lexsort((joined_us, worker))
        self._times_us = distinct(joined_us)
        self._worker, self._begins = worker[order], self._moments(worker, joined_us)[order]
        #: The last stay of the worker that began until each of these, by number.
        self._best = np.maximum.accumulate(keys[order])

    def _moments(self, worker: Ints, at_us: Ints) -> Ints:
        """Combine worker and time into numbers that sort by worker, then by time."""
        ranks = np.searchsorted(self._times_us, at_us, side="right")
        return worker * (len(self._times_us) + 1) + ranks

    def before(self, worker: Ints, end_us: Ints) -> Ints:
        """Return the last stay of each worker that began before a time, its first, or -1."""
        at = np.searchsorted(self._begins, self._moments(worker, end_us - 1), side="right") - 1
        has_begun = (at >= 0) & (self._worker[at] == worker)
        keys = np.where(has_begun, self._best[at], worker * self._width)
        places = np.searchsorted(self._keys, keys)
        is_mine = np.append(self._keys // self._width, -1)[places] == worker
        return np.where(is_mine, np.append(self._stays, -1)[places], -1)


def _utilisation(busy_ns: Ints, slots: Ints) -> pa.Array:
    room_ns = slots * MINUTE_NS
    return pa.array(busy_ns / np.maximum(room_ns, 1), pa.float64(), mask=room_ns <= 0)


def _percentiles(whole: pa.Table, name: str) -> dict[str, pa.Array]:
    """Return the columns of a distribution. No percentile is above the maximum."""
    found = bin_entries(whole[f"{name}s"])
    largest = number(whole[f"{name}_max_ns"])
    columns = {f"{name}_max_ns": largest.arrow}
    for part, share in (("p50", 0.5), ("p95", 0.95)):
        values = percentile(found.rows, found.keys, found.counts, len(whole), share)
        capped = np.minimum(values.values, largest.filled(0))
        columns[f"{name}_{part}_ns"] = Number(capped, values.known).arrow
    return columns


def _reasons(column: pa.ChunkedArray) -> pa.Array:
    """Return null in place of an empty map."""
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.chunk(0)
    is_some = np.diff(whole.offsets.to_numpy()) > 0
    return pc.if_else(pa.array(is_some), whole, pa.scalar(None, COUNTS))
