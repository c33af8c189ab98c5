"""The fold of a whole history at once: events and edges in, all tables out.

For histories that fit into memory, about a kilobyte for each event. `pipeline history` folds the
same way in shares.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from msgspec import Struct

from taskyard.pipeline.fold.places import Places
from taskyard.pipeline.fold.schemas import INTERNAL, PLACES
from taskyard.pipeline.fold.share import fold_share
from taskyard.pipeline.fold.stays import fold_stays


class FoldedHistory(Struct, frozen=True):
    """The tables of one broker's history, without metrics."""

    attempts: pa.Table
    tasks: pa.Table
    workers: pa.Table
    critical_path: pa.Table


def fold_whole(events: pa.Table, edges: pa.Table, broker: str) -> FoldedHistory:
    """Fold all events and edges of a broker."""
    folded = fold_share(events, broker)
    stays = fold_stays(events, folded.attempts, folded.attempts_open, broker)
    tasks, critical_path = placed_tasks(folded.tasks, folded.tasks_open, edges)
    return FoldedHistory(
        attempts=_joined(folded.attempts, folded.attempts_open),
        tasks=tasks,
        workers=_joined(stays.workers, stays.workers_open),
        critical_path=critical_path,
    )


def placed_tasks(
    settled: pa.Table, still_open: pa.Table, edges: pa.Table
) -> tuple[pa.Table, pa.Table]:
    """Return tasks with their places, and the critical paths."""
    nodes = _joined(settled, still_open)
    is_settled = np.arange(len(nodes)) < len(settled)
    places = Places(PLACES.empty_table(), nodes, is_settled, edges)
    whole = nodes.drop_columns(["state", *INTERNAL.names])
    for name, column in places.columns().items():
        whole = whole.append_column(name, column)
    ways = places.chains()
    return whole, places.critical_path(ways, whole.take(pa.array(ways.node)))


def _joined(final: pa.Table, still_open: pa.Table) -> pa.Table:
    return pa.concat_tables([final, still_open]).unify_dictionaries()
