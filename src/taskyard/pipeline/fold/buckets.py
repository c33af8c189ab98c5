"""Buckets: the changes in each interval of a campaign, a service, a lane or a worker, added up.

A bucket holds changes only: counts of steps, the change of queue depth and of running attempts, and
the running time from each start to the end of the interval. So buckets of shares, of folds and of
neighbouring intervals are added up. `metrics` turns changes into levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.pipeline.fold.changes import Changes
from taskyard.pipeline.fold.columns import (
    INT_MIN,
    Ints,
    Number,
    Text,
    combined,
    constant,
    grouped,
    number,
    plain,
    text,
)
from taskyard.pipeline.fold.histograms import bins
from taskyard.pipeline.fold.schemas import BUCKETS

MINUTE_NS: Final = 60_000_000_000

EVENT_COUNTS: Final = ("submitted", "leased", "finished", "failed", "cancelled", "retries")

#: Columns that identify a scope.
SCOPE: Final = ("broker", "scope", "campaign", "service", "lane", "worker")

_SUMS: Final = (*EVENT_COUNTS, "depth_change", "running_change", "busy_ns")
_MAXIMA: Final = ("wait_max_ns", "run_max_ns")

#: The columns of maps, and the type of their keys.
_MAPS: Final = {"waits": pa.int32(), "runs": pa.int32(), "reasons": pa.string()}


class Entries(Struct, frozen=True):
    """Entries of maps: the row of each, its key, and its count."""

    rows: Ints
    keys: Ints
    counts: Ints

    def by_group(self, group_of_row: Ints) -> Entries:
        return Entries(group_of_row[self.rows], self.keys, self.counts)


def added(parts: Sequence[Entries]) -> Entries:
    """Add up entries with the same row and key. The result is sorted by both."""
    rows, keys, counts = (
        np.concatenate([getattr(one, name) for one in parts] or [np.empty(0, np.int64)])
        for name in ("rows", "keys", "counts")
    )
    width = int(keys.max()) + 1 if len(keys) else 1
    groups = grouped(rows * width + keys)
    return Entries(groups.keys // width, groups.keys % width, groups.sums(counts))


class _Sums:
    """Sums of a number of groups, to which rows are added."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._sums = {name: np.zeros(count, np.int64) for name in _SUMS}
        self._maxima = {name: np.full(count, INT_MIN) for name in _MAXIMA}
        self._entries: dict[str, list[Entries]] = {"waits": [], "runs": []}
        self._reasons: list[tuple[Ints, Text, Ints]] = []

    def add(self, name: str, groups: Ints, amounts: Ints) -> None:
        if amounts.dtype == np.bool_:
            self._sums[name] += np.bincount(groups[amounts], minlength=self._count)
        else:
            np.add.at(self._sums[name], groups, amounts)

    def add_times(self, name: str, groups: Ints, times_ns: Number) -> None:
        """Add durations to a histogram, and to its maximum."""
        known = np.flatnonzero(times_ns.is_known)
        values, rows = times_ns.values[known], groups[known]
        np.maximum.at(self._maxima[f"{name}_max_ns"], rows, values)
        self._entries[f"{name}s"].append(added([Entries(rows, bins(values), np.ones_like(rows))]))

    def add_maxima(self, name: str, groups: Ints, values: Number) -> None:
        known = values.is_known
        np.maximum.at(self._maxima[name], groups[known], values.values[known])

    def add_entries(self, name: str, entries: Entries) -> None:
        self._entries[name].append(entries)

    def add_reasons(self, groups: Ints, reasons: Text, counts: Ints) -> None:
        known = np.flatnonzero(reasons.codes >= 0)
        self._reasons.append((groups[known], reasons.at(known), counts[known]))

    def columns(self) -> dict[str, pa.Array]:
        found = {name: pa.array(values) for name, values in self._sums.items()}
        for name, values in self._maxima.items():
            found[name] = Number(values, values != INT_MIN).arrow
        for name, parts in self._entries.items():
            whole = added(parts)
            found[name] = _map_column(whole, pa.array(whole.keys, pa.int32()), self._count)
        found["reasons"] = self._reason_column()
        return found

    def _reason_column(self) -> pa.Array:
        chunks = [reasons.arrow for _, reasons, _ in self._reasons]
        empty = pa.array([], pa.dictionary(pa.int32(), pa.string()))
        whole = text(pa.chunked_array(chunks or [empty]))
        # Maps are in the order of their keys.
        order = pc.array_sort_indices(whole.values).to_numpy()
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        rows = np.concatenate([rows for rows, _, _ in self._reasons] or [np.empty(0, np.int64)])
        counts = np.concatenate([some for _, _, some in self._reasons] or [np.empty(0, np.int64)])
        found = added([Entries(rows, ranks[whole.codes], counts)])
        values = whole.values.take(pa.array(order[found.keys]))
        return _map_column(found, values, self._count)


def _map_column(entries: Entries, keys: pa.Array, count: int) -> pa.Array:
    lengths = np.bincount(entries.rows, minlength=count)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, pa.array(entries.counts))


def map_entries(column: pa.ChunkedArray) -> tuple[Entries, pa.Array]:
    """Return the entries of a column of maps. A key is a place in the array beside them."""
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.chunk(0)
    offsets = whole.offsets.to_numpy().astype(np.int64)
    first, length = int(offsets[0]), int(offsets[-1] - offsets[0])
    rows = np.repeat(np.arange(len(whole)), np.diff(offsets))
    counts = whole.items.slice(first, length).to_numpy(zero_copy_only=False)
    return Entries(rows, np.arange(length), counts), whole.keys.slice(first, length)


def bin_entries(column: pa.ChunkedArray) -> Entries:
    """Return the entries of a column of histograms, with their bins as keys."""
    entries, numbers = map_entries(column)
    keys = numbers.to_numpy(zero_copy_only=False).astype(np.int64)
    return Entries(entries.rows, keys, entries.counts)


def buckets_of(changes: Sequence[Changes], places: pa.Table) -> pa.Table:
    """Add up changes by place and interval. `places` has the columns that identify each place."""
    at = np.concatenate([one.at_ns for one in changes]) // MINUTE_NS
    first = int(at.min()) if len(at) else 0
    span = int(at.max()) - first + 1 if len(at) else 1
    places_of = np.concatenate([one.place for one in changes]).astype(np.int64)
    groups = grouped(places_of * span + at - first)
    begins_ns = (groups.keys % span + first) * MINUTE_NS
    sums = _Sums(groups.count)
    done = 0
    for one in changes:
        mine = groups.of_row[done : done + len(one.at_ns)]
        done += len(one.at_ns)
        _add_changes(sums, one, mine, begins_ns[mine] + MINUTE_NS)
    columns = {name: places[name].take(pa.array(groups.keys // span)) for name in SCOPE}
    columns["bucket"] = Number(begins_ns).times
    columns["bucket_ns"] = pa.array(np.full(groups.count, MINUTE_NS))
    return plain(pa.table(columns | sums.columns()), BUCKETS)


def _add_changes(sums: _Sums, one: Changes, groups: Ints, ends_ns: Ints) -> None:
    for name, amounts in one.amounts.items():
        sums.add(name, groups, amounts)
    if one.running is not None:
        sums.add("running_change", groups, one.running)
        sums.add("busy_ns", groups, one.running * (ends_ns - one.at_ns))
    if one.reason is not None:
        sums.add_reasons(groups, one.reason, np.ones(len(groups), np.int64))
    for name, times_ns in (("wait", one.wait_ns), ("run", one.run_ns)):
        if times_ns is not None:
            sums.add_times(name, groups, times_ns)


def add_up(tables: Iterable[pa.Table]) -> pa.Table:
    """Add up buckets with the same scope and interval. All must be of one width.

    The result is sorted by scope and time.
    """
    whole = pa.concat_tables([BUCKETS.empty_table(), *tables])
    scope = combined(*(text(whole[name]).codes for name in SCOPE))
    begins_us = number(whole["bucket"]).values
    groups = grouped(combined(scope, _ranks(begins_us)))
    sums = _Sums(groups.count)
    for name in _SUMS:
        sums.add(name, groups.of_row, number(whole[name]).values)
    for name in _MAXIMA:
        sums.add_maxima(name, groups.of_row, number(whole[name]))
    for name in ("waits", "runs"):
        sums.add_entries(name, bin_entries(whole[name]).by_group(groups.of_row))
    entries, reasons = map_entries(whole["reasons"])
    sums.add_reasons(groups.of_row[entries.rows], text(reasons), entries.counts)
    firsts = np.zeros(groups.count, np.int64)
    firsts[groups.of_row[::-1]] = np.arange(len(whole))[::-1]
    keys = whole.select([*SCOPE, "bucket", "bucket_ns"]).take(pa.array(firsts))
    columns = {name: keys[name] for name in keys.column_names}
    return plain(pa.table(columns | sums.columns()), BUCKETS)


def _ranks(values: Ints) -> Ints:
    return np.unique(values, return_inverse=True)[1]


def scoped(buckets: pa.Table) -> pa.Table:
    """Return the buckets of campaigns and services too, from those of each queue.

    The input has a row for each campaign, service and lane. Only lanes with a name keep theirs.
    """
    count = len(buckets)
    none = pa.nulls(count, pa.string())
    of_campaign = _replaced(buckets, scope="campaign", service=none, lane=none)
    of_service = _replaced(buckets, scope="service", lane=none)
    is_named = pc.fill_null(pc.not_equal(buckets["lane"], ""), fill_value=False)
    return add_up([of_campaign, of_service, buckets.filter(is_named)])


def _replaced(buckets: pa.Table, scope: str, **columns: pa.Array) -> pa.Table:
    columns["scope"] = constant(scope, len(buckets)).cast(pa.string())
    for name, column in columns.items():
        buckets = buckets.set_column(buckets.schema.get_field_index(name), name, column)
    return buckets
