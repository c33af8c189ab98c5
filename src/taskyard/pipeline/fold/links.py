"""Links: edges between names, resolved to the numbers of tasks.

Edges connect names, and a name can be submitted again. Both ends of an edge resolve to the newest
generation of the name when the edge was added. If the name was only submitted later, its first
generation counts. The two ends may be of different campaigns.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.pipeline.fold.columns import Ints, distinct, number


class Links(Struct, frozen=True):
    """Distinct pairs of numbers of tasks, sorted: the waiting task, and the task before it."""

    waiting: Ints
    before: Ints
    #: Tasks that wait for a name that was never submitted, once for each such edge.
    unknown: Ints


class NameIndex:
    """Places of names that occur again: the newest one as of a record."""

    def __init__(self, names: pa.ChunkedArray, records: Ints) -> None:
        self._names = pc.unique(names)
        self._records = distinct(records)
        keys = self._keys(self._codes(names), records)
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    def _codes(self, names: pa.ChunkedArray) -> Ints:
        """Return a number for each name, -1 for an unknown one."""
        found = pc.index_in(names, value_set=self._names)
        codes: Ints = found.fill_null(-1).to_numpy().astype(np.int64)
        return codes

    def _keys(self, codes: Ints, records: Ints) -> Ints:
        """Combine name and record into numbers that sort by name, then by record."""
        ranks = np.searchsorted(self._records, records, side="right")
        return codes * (len(self._records) + 1) + ranks

    def places(self, names: pa.ChunkedArray, records: Ints, *, or_first: bool = False) -> Ints:
        """Find the place of each name, the newest as of the record. -1 if there is none.

        With `or_first`, a name that only occurs later resolves to its first place.
        """
        codes = self._codes(names)
        if not len(self._order):
            return codes
        at = np.searchsorted(self._sorted, self._keys(codes, records), side="right") - 1
        begins = codes * (len(self._records) + 1)
        is_known = codes >= 0
        is_there = is_known & (at >= 0) & (self._sorted[at] > begins)
        if or_first:
            at, is_there = np.where(is_there | ~is_known, at, at + 1), is_known
        return np.where(is_there, self._order[at], -1)


def links(tasks: pa.Table, edges: pa.Table) -> Links:
    """Resolve edges between tasks. Needs `task` and `submitted_record`, and the edges' columns."""
    index = NameIndex(tasks["task"], number(tasks["submitted_record"]).values)
    records = number(edges["record"]).values
    waiting = index.places(edges["task"], records)
    before = index.places(edges["after"], records, or_first=True)
    is_known = (waiting >= 0) & (before >= 0) & (before != waiting)
    keys = distinct(waiting[is_known] * len(tasks) + before[is_known])
    unknown = waiting[(waiting >= 0) & (before < 0)]
    count = max(len(tasks), 1)
    return Links(keys // count, keys % count, unknown)
