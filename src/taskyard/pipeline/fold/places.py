"""Places of tasks in the graph as columns: the whole table of tasks, and the critical paths.

The critical path is the chain that decided how long a campaign really took. It goes back from the
task that ended last, each time to the dependency that ended last. `earliest_end` shows how short it
could have been with any number of workers. Owns the rows. `graph` walks.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.pipeline.fold import graph
from taskyard.pipeline.fold.columns import INT_MAX, Flags, Ints, Number, Text, number, text
from taskyard.pipeline.fold.graph import Chains, FirstOf, Nodes
from taskyard.pipeline.fold.links import links
from taskyard.pipeline.fold.schemas import COUNTS, CRITICAL_PATH
from taskyard.pipeline.fold.steps import STATE_NAMES

#: The columns of a task that the walk needs.
NODE: Final = (
    *("campaign", "task", "generation", "submitted", "submitted_record", "state", "due"),
    *("run_last_ns", "attempts", "ended"),
)


class PlacedTasks(Struct, frozen=True):
    """Tasks of linked campaigns with all their columns, and the critical paths."""

    tasks: pa.Table
    critical_path: pa.Table
    #: The task's row and its place in the graph can't change any more.
    is_final: pa.Array


class Places:
    """The places of all tasks of linked campaigns, found by one walk."""

    def __init__(self, nodes: pa.Table, edges: pa.Table) -> None:
        pairs = links(nodes, edges)
        submitted = number(nodes["submitted"])
        self._campaigns = text(nodes["campaign"])
        self._placed = graph.place(
            Nodes(
                state=_state_codes(nodes["state"]),
                submitted_ns=submitted.values * 1000,
                duration_ns=number(nodes["run_last_ns"]).filled(0),
                is_timed=number(nodes["due"]).is_known,
            ),
            pairs,
        )
        ended = number(nodes["ended"])
        # A task that was never leased was cancelled or has expired. It took no time.
        was_leased = number(nodes["attempts"]).values > 0
        ended_ns = Number(ended.values * 1000, ended.is_known & was_leased)
        codes = self._campaigns.codes
        self._ways = graph.chains(codes, submitted.values * 1000, ended_ns, pairs, _first_of(nodes))
        #: The first submission of each campaign.
        self._first_us = np.full(len(self._campaigns.values), INT_MAX)
        np.minimum.at(self._first_us, codes, submitted.values)

    @property
    def is_final(self) -> pa.Array:
        return pa.array(self._placed.is_final)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns that the walk adds to tasks. `state` replaces the one before."""
        placed, ways, campaigns = self._placed, self._ways, self._campaigns
        is_own = campaigns.codes[ways.node] == ways.campaign
        position = np.zeros(len(placed.state), np.int64)
        position[ways.node[is_own]] = ways.position[is_own]
        return {
            "state": Text(placed.state, pa.array(STATE_NAMES)).arrow,
            "is_behind_failure": pa.array(placed.is_behind_failure),
            "waits_for": pa.array(placed.waits_for),
            "level": placed.level.arrow,
            "path_ns": pa.array(placed.path_ns),
            "critical_position": Number(position, position > 0).arrow,
            "critical_elsewhere": _elsewhere(ways, ~is_own, campaigns, len(position)),
            "earliest_end": Number(placed.earliest_ns).times,
        }

    @property
    def chained(self) -> Ints:
        """The row of each task in a critical path, path by path. A task may be in several."""
        return self._ways.node

    def critical_path(self, chained: pa.Table) -> pa.Table:
        """Return the critical path of every campaign in which a task has ended.

        The rows are those of `chained`, with all their columns.
        """
        return _critical_path(chained, self._ways, self._campaigns, self._first_us)


def _first_of(nodes: pa.Table) -> FirstOf:
    """Return a function that chooses the task that was submitted first, then by name."""
    records, names = number(nodes["submitted_record"]).values, nodes["task"]

    def first_of(rows: Ints) -> int:
        tied = rows[records[rows] == records[rows].min()]
        texts = names.take(pa.array(tied)).to_pylist()
        return int(tied[texts.index(min(texts))])

    return first_of


def placed_tasks(tasks: pa.Table, edges: pa.Table) -> PlacedTasks:
    """Place all tasks of linked campaigns. `tasks` has the columns of their own steps."""
    places = Places(tasks, edges)
    whole = tasks.drop_columns(["state"])
    for name, column in places.columns().items():
        whole = whole.append_column(name, column)
    chained = whole.take(pa.array(places.chained))
    return PlacedTasks(whole, places.critical_path(chained), places.is_final)


def _state_codes(column: pa.ChunkedArray) -> Ints:
    states = text(column)
    places = pc.index_in(states.values, pa.array(STATE_NAMES, pa.string()))
    codes: Ints = places.to_numpy(zero_copy_only=False).astype(np.int64)[states.codes]
    return codes


def _elsewhere(ways: Chains, is_wanted: Flags, campaigns: Text, count: int) -> pa.Array:
    """Return the positions of each task in the paths of other campaigns, null for most."""
    rows = np.flatnonzero(is_wanted)
    rows = rows[np.argsort(ways.node[rows], kind="stable")]
    lengths = np.bincount(ways.node[rows], minlength=count)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    keys = campaigns.values.take(pa.array(ways.campaign[rows]))
    maps = pa.MapArray.from_arrays(offsets, keys, pa.array(ways.position[rows])).cast(COUNTS)
    return pc.if_else(pa.array(lengths > 0), maps, pa.scalar(None, COUNTS))


def _critical_path(rows: pa.Table, ways: Chains, campaigns: Text, first_us: Ints) -> pa.Table:
    """Split the time of each task in a path. The sum over a path is the makespan."""
    is_begin = ways.position == 1
    ended_us = number(rows["ended"]).values
    started_us = np.where(is_begin, first_us[ways.campaign], np.roll(ended_us, 1))
    times = _times(rows, started_us, ended_us)
    previous = np.where(is_begin, -1, np.arange(len(rows)) - 1)
    columns = {name: rows[name] for name in rows.column_names if name in CRITICAL_PATH.names}
    columns |= {name: pa.array(values) for name, values in times.items()}
    columns |= {
        "campaign": campaigns.values.take(pa.array(ways.campaign)),
        "task_campaign": rows["campaign"],
        "position": pa.array(ways.position),
        "after": rows["task"].take(pa.array(previous, mask=previous < 0)),
        "started": Number(started_us).micros,
    }
    return pa.table({name: columns[name] for name in CRITICAL_PATH.names if name in columns})


def _times(rows: pa.Table, started_us: Ints, ended_us: Ints) -> dict[str, Ints]:
    """Return the parts of the time from the end of the task before to the end of each."""
    total_ns = np.maximum(ended_us - started_us, 0) * 1000
    ready = number(rows["ready"])
    held_ns = np.maximum(np.where(ready.is_known, ready.values, 0) - started_us, 0) * 1000
    held_ns = np.minimum(held_ns, total_ns)
    # After rounding to microseconds, the parts must not exceed the whole.
    run_ns = np.minimum(number(rows["run_last_ns"]).filled(0), total_ns - held_ns)
    wait_ns = np.minimum(number(rows["wait_ns"]).values, total_ns - held_ns - run_ns)
    rest_ns = total_ns - held_ns - wait_ns - run_ns
    # The rest of a single attempt is the wait before its start and for its report.
    is_single = number(rows["attempts"]).values == 1
    queued_ns = np.minimum(number(rows["queued_ns"]).values, rest_ns)
    queued_ns = np.where(is_single, rest_ns, queued_ns)
    return {
        "total_ns": total_ns,
        "held_ns": held_ns,
        "wait_ns": wait_ns,
        "run_ns": run_ns,
        "queued_ns": queued_ns,
        "retry_ns": rest_ns - queued_ns,
        "gain_ns": total_ns - run_ns,
    }
