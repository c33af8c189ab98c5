"""Stays of workers with the work of one campaign only. A worker may serve several at once."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from taskyard.pipeline.fold.columns import number
from taskyard.pipeline.fold.stays import fold_stays

#: Columns that follow from the attempts in a stay.
_WORK: Final = ("attempts", "finished", "failed", "lost", "busy_ns", "run_ns")

#: Columns of attempts that stays need.
ATTEMPT_COLUMNS: Final = (
    *("worker", "leased_record", "leased_ns", "queued_ns", "run_ns", "settled", "outcome"),
)


def with_work_of(stays: pa.Table, members: pa.Table, attempts: pa.Table) -> pa.Table:
    """Replace the numbers of each stay by those of some attempts.

    `members` are the events about workers that join and leave. Stays without such an attempt get 0.
    Times of the stay itself remain.
    """
    made = fold_stays(members, attempts, attempts.slice(0, 0), "")
    worked = pa.concat_tables([made.workers, made.workers_open]).unify_dictionaries()
    keys = list(zip(worked["worker"].to_pylist(), worked["stay"].to_pylist(), strict=True))
    row_of = {key: row for row, key in enumerate(keys)}
    names = zip(stays["worker"].to_pylist(), stays["stay"].to_pylist(), strict=True)
    rows = pa.array([row_of.get(key) for key in names], pa.int64())
    for name in _WORK:
        values = pc.fill_null(worked[name].take(rows), 0)
        stays = _replaced(stays, name, values)
    room_ns = number(stays["slots"]).filled(0) * number(stays["stay_ns"]).values
    used = number(stays["run_ns"]).values / np.maximum(room_ns, 1)
    return _replaced(stays, "utilisation", pa.array(used, pa.float64(), mask=room_ns <= 0))


def _replaced(table: pa.Table, name: str, values: pa.ChunkedArray | pa.Array) -> pa.Table:
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(name), values.cast(table[name].type))
