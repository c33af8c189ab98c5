"""Places of tasks in the graph as columns: the whole table of tasks, and the critical paths.

The critical path is the chain that decided how long a campaign really took. It goes back from the
task that ended last, each time to the dependency that ended last. `earliest_end` shows how short it
could have been with any number of workers. Owns the rows. `graph` walks.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.pipeline.fold import graph
from taskyard.pipeline.fold.columns import Ints, Number, Text, number, text
from taskyard.pipeline.fold.graph import Chains, Nodes, Placed
from taskyard.pipeline.fold.links import links
from taskyard.pipeline.fold.schemas import COUNTS, CRITICAL_PATH
from taskyard.pipeline.fold.steps import STATE_NAMES


class PlacedTasks(Struct, frozen=True):
    """Tasks of linked campaigns with all their columns, and the critical paths."""

    tasks: pa.Table
    critical_path: pa.Table
    #: The task's row and its place in the graph can't change any more.
    is_final: pa.Array


def placed_tasks(tasks: pa.Table, edges: pa.Table) -> PlacedTasks:
    """Place all tasks of linked campaigns. `tasks` has the columns of their own steps."""
    pairs = links(tasks, edges)
    submitted_ns = number(tasks["submitted"]).values * 1000
    nodes = Nodes(
        state=_state_codes(tasks["state"]),
        submitted_ns=submitted_ns,
        duration_ns=number(tasks["run_last_ns"]).filled(0),
        is_timed=number(tasks["due"]).is_known,
    )
    placed = graph.place(nodes, pairs)
    campaigns = text(tasks["campaign"])
    ended = number(tasks["ended"])
    # A task that was never leased was cancelled or has expired. It took no time.
    was_leased = number(tasks["attempts"]).values > 0
    ended_ns = Number(ended.values * 1000, ended.is_known & was_leased)
    ways = graph.chains(campaigns.codes, submitted_ns, ended_ns, pairs)
    whole = _with_places(tasks, placed, ways, campaigns)
    first_us = np.full(len(campaigns.values), np.iinfo(np.int64).max)
    np.minimum.at(first_us, campaigns.codes, submitted_ns // 1000)
    return PlacedTasks(
        whole, _critical_path(whole, ways, campaigns, first_us), pa.array(placed.is_final)
    )


def _state_codes(column: pa.ChunkedArray) -> Ints:
    states = text(column)
    places = pc.index_in(states.values, pa.array(STATE_NAMES, pa.string()))
    codes: Ints = places.to_numpy(zero_copy_only=False).astype(np.int64)[states.codes]
    return codes


def _with_places(tasks: pa.Table, placed: Placed, ways: Chains, campaigns: Text) -> pa.Table:
    is_own = campaigns.codes[ways.node] == ways.campaign
    position = np.zeros(len(tasks), np.int64)
    position[ways.node[is_own]] = ways.position[is_own]
    columns = {
        "state": Text(placed.state, pa.array(STATE_NAMES)).arrow,
        "is_behind_failure": pa.array(placed.is_behind_failure),
        "waits_for": pa.array(placed.waits_for),
        "level": placed.level.arrow,
        "path_ns": pa.array(placed.path_ns),
        "critical_position": Number(position, position > 0).arrow,
        "critical_elsewhere": _elsewhere(ways, ~is_own, campaigns, len(tasks)),
        "earliest_end": Number(placed.earliest_ns).times,
    }
    whole = tasks.drop_columns(["state"])
    for name, column in columns.items():
        whole = whole.append_column(name, column)
    return whole


def _elsewhere(
    ways: Chains, is_wanted: np.ndarray[tuple[int], np.dtype[np.bool_]], campaigns: Text, count: int
) -> pa.Array:
    """Return the positions of each task in the paths of other campaigns, null for most."""
    rows = np.flatnonzero(is_wanted)
    rows = rows[np.argsort(ways.node[rows], kind="stable")]
    lengths = np.bincount(ways.node[rows], minlength=count)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    keys = campaigns.values.take(pa.array(ways.campaign[rows]))
    maps = pa.MapArray.from_arrays(offsets, keys, pa.array(ways.position[rows])).cast(COUNTS)
    return pc.if_else(pa.array(lengths > 0), maps, pa.scalar(None, COUNTS))


def _critical_path(tasks: pa.Table, ways: Chains, campaigns: Text, first_us: Ints) -> pa.Table:
    """Split the time of each task in a path. The sum over a path is the makespan."""
    rows = tasks.take(pa.array(ways.node))
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
    return pa.table({name: columns[name] for name in CRITICAL_PATH.names})


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
