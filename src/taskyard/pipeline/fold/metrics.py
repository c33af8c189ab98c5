"""Metrics: the table of a chart from buckets. Changes become levels, histograms percentiles.

Empty intervals have a row too, except in lanes, of which there may be a million.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from taskyard.pipeline.fold.buckets import EVENT_COUNTS, SCOPE, add_up, bin_entries, resampled
from taskyard.pipeline.fold.columns import (
    Ints,
    Number,
    combined,
    is_first,
    number,
    plain,
    running_sums,
    text,
)
from taskyard.pipeline.fold.histograms import percentile
from taskyard.pipeline.fold.schemas import BUCKETS, COUNTS, METRICS

_SECOND_NS: Final = 1_000_000_000

#: Widths of an interval in seconds, all of them round.
WIDTHS_SECONDS: Final = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 21_600, 43_200, 86_400,
    604_800, 2_592_000,
)  # fmt: skip

#: A chart does not show more points than this.
BUCKETS_MAX: Final = 240


def chart_width_ns(span_ns: int) -> int:
    """Return the width of the intervals in a chart of a time span."""
    widths = (seconds * _SECOND_NS for seconds in WIDTHS_SECONDS)
    fitting = (width for width in widths if span_ns <= width * BUCKETS_MAX)
    return next(fitting, WIDTHS_SECONDS[-1] * _SECOND_NS)


def divisor_ns(width_ns: int) -> int:
    """Return the largest width that divides this one and all wider ones.

    Buckets of that width can be resampled for the whole, if only a part of a span is known.
    """
    wider = [one for one in WIDTHS_SECONDS if one * _SECOND_NS >= width_ns]
    fitting = [one for one in WIDTHS_SECONDS if not any(other % one for other in wider)]
    return max(fitting) * _SECOND_NS


def metrics(tables: list[pa.Table], workers: pa.Table, bucket_ns: int) -> pa.Table:
    """Return metrics from buckets: those that were added up, and those of open attempts.

    `workers` are stays, which have the slots. The width must be a multiple of the buckets'.
    """
    added = resampled(pa.concat_tables(tables), bucket_ns)
    whole = add_up([added, _empty_intervals(added, bucket_ns)])
    scope = combined(*(text(whole[name]).codes for name in SCOPE))
    starts = is_first(scope)
    running_change = number(whole["running_change"]).values
    running = running_sums(running_change, starts)
    busy_ns = number(whole["busy_ns"]).values + (running - running_change) * bucket_ns
    is_worker = text(whole["scope"]).is_any(("worker",))
    depth = running_sums(number(whole["depth_change"]).values, starts)
    columns = {name: whole[name] for name in (*SCOPE, "bucket", "bucket_ns", *EVENT_COUNTS)}
    columns |= {
        "throughput": pa.array(number(whole["finished"]).values / (bucket_ns / _SECOND_NS)),
        "depth": Number(depth, ~is_worker).arrow,
        "running": pa.array(running),
        "busy_ns": pa.array(busy_ns),
        "utilisation": _utilisation(busy_ns, _slots(whole, workers), bucket_ns),
        "reasons": _reasons(whole["reasons"]),
    }
    for name in ("wait", "run"):
        columns |= _percentiles(whole, name)
    return plain(pa.table(columns), METRICS)


def _empty_intervals(added: pa.Table, bucket_ns: int) -> pa.Table:
    """Return an empty row for each interval between the first and the last of a scope."""
    dense = added.filter(pc.not_equal(added["scope"], "lane"))
    scope = combined(*(text(dense[name]).codes for name in SCOPE))
    at = number(dense["bucket"]).values * 1000 // bucket_ns
    # Rows are sorted by scope and time, so the gap after each is the way to the next.
    gaps = np.zeros(len(dense), np.int64)
    gaps[:-1] = np.where(scope[1:] == scope[:-1], at[1:] - at[:-1] - 1, 0)
    rows = np.repeat(np.arange(len(dense)), gaps)
    offsets = np.arange(len(rows)) - np.repeat(np.cumsum(gaps) - gaps, gaps)
    columns = {name: dense[name].take(pa.array(rows)) for name in SCOPE}
    columns["bucket"] = Number((at[rows] + 1 + offsets) * bucket_ns).times
    columns["bucket_ns"] = pa.array(np.full(len(rows), bucket_ns))
    return pa.table({field.name: columns.get(field.name, _zeros(field, rows)) for field in BUCKETS})


def _zeros(field: pa.Field, rows: Ints) -> pa.Array:
    if pa.types.is_map(field.type):
        return (
            pa.array([], field.type)
            if not len(rows)
            else pa.array([[]], field.type).take(pa.array(np.zeros(len(rows), np.int64)))
        )
    if field.name.endswith("_max_ns"):
        return pa.nulls(len(rows), pa.int64())
    return pa.array(np.zeros(len(rows), np.int64))


def _slots(whole: pa.Table, workers: pa.Table) -> Ints:
    """Return the most slots that the worker of each row had, 0 if unknown."""
    names = text(whole["worker"])
    found = np.zeros(len(names.values) + 1, np.int64)
    worker = workers["worker"].cast(pa.string())
    places = pc.index_in(worker, value_set=names.values).fill_null(-1).to_numpy().astype(np.int64)
    np.maximum.at(found, places, np.where(places < 0, 0, number(workers["slots"]).filled(0)))
    return found[names.codes]


def _utilisation(busy_ns: Ints, slots: Ints, bucket_ns: int) -> pa.Array:
    room_ns = slots * bucket_ns
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
    is_some = np.diff(whole.offsets.to_numpy()) > 0
    return pc.if_else(pa.array(is_some), whole, pa.scalar(None, COUNTS))
