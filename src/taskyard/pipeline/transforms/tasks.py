"""Events and edges to tasks: one row a generation of a name, with its place in the graph."""

from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from taskyard.pipeline.datasets import PLACED, TASKS
from taskyard.pipeline.transforms.campaigns import by_campaign
from taskyard.pipeline.transforms.graph import chain, walk
from taskyard.pipeline.transforms.links import links
from taskyard.pipeline.transforms.steps import ENDED, OUTCOMES, queued_ns, run_ns, steps

#: Reasons of a return by which the task lost its worker; for others the worker gave it back.
_LOSSES: Final = ("unlisted", "left", "restarted", "broker_restarted")

_KEY: Final = ("campaign", "task", "generation")

Names = pd.Series  # of strings
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

#: What the walk has to know of a task.
NODE: Final = (*_KEY, "submitted_record", "state", "due", "run_last_ns", "attempts", "ended")

_PLACED_SCHEMA: Final = StructType([TASKS.schema[name] for name in (*_KEY, *PLACED)])


def tasks(events: DataFrame, edges: DataFrame) -> DataFrame:
    """Every task there is in these events."""
    return tasks_of(steps(events), edges)


def tasks_of(moves: DataFrame, edges: DataFrame) -> DataFrame:
    """The same from steps."""
    alone = tasks_alone(moves)
    return placed_tasks(alone, links(alone, edges))


def placed_tasks(alone: DataFrame, between: DataFrame) -> DataFrame:
    """Tasks with their place in the graph, which is made of the links between them."""
    placed = _placed(alone, between)
    whole = alone.drop("state").join(placed, on=list(_KEY), how="inner")
    return whole.select(*TASKS.names)


def tasks_alone(moves: DataFrame) -> DataFrame:
    """What a task's own steps tell; what was never submitted is no task."""
    known = moves.where(f.col("generation") > 0)
    return known.groupBy(*_KEY).agg(*(column.alias(name) for name, column in _columns().items()))


def _columns() -> dict[str, Column]:
    kind, record, time_ns = f.col("kind"), f.col("record"), f.col("time_ns")
    is_submission, is_lease, is_ready = kind == "submitted", kind == "leased", kind == "ready"
    is_last = f.col("next_kind").isNull() | (f.col("next_kind") == "submitted")
    is_end = is_last & f.col("state").isin(*ENDED)
    is_settled = is_lease & f.col("next_kind").isin(*OUTCOMES)
    ran_ns = f.when(is_settled, run_ns())
    waited_ns = f.when(
        is_lease & (f.col("last_kind") == "ready"),
        f.greatest(time_ns - f.col("last_time_ns"), f.lit(0)),
    )
    first_ready_ns = f.min(f.when(is_ready, time_ns))
    submitted_ns = f.max(f.when(is_submission, time_ns))
    of_submission = {
        name: f.max(f.when(is_submission, f.col(name)))
        for name in ("service", "lane", "priority", "dialect", "slots", "due", "payload_bytes")
    }
    return of_submission | {
        "state": f.max(f.when(is_last, f.col("state"))),
        "last_kind": f.max(f.when(is_last, kind)),
        "attempts": f.count_if(is_lease),
        "failures": f.count_if(is_settled & _is_failure()),
        "losses": f.count_if(is_settled & _is_loss()),
        "submitted": f.max(f.when(is_submission, f.col("time"))),
        "submitted_record": f.max(f.when(is_submission, record)),
        "ready": f.min(f.when(is_ready, f.col("time"))),
        "leased": f.min(f.when(is_lease, f.col("time"))),
        "ended": f.max(f.when(is_end, f.col("time"))),
        "worker": f.max_by(f.col("worker"), f.when(is_lease, record)),
        "reason": f.max(f.when(is_last & (f.col("state") == "FAILED"), f.col("reason"))),
        "blocked_ns": f.when(
            first_ready_ns.isNotNull(), f.greatest(first_ready_ns - submitted_ns, f.lit(0))
        ),
        "wait_ns": f.coalesce(f.sum(waited_ns), f.lit(0)),
        "run_ns": f.coalesce(f.sum(ran_ns), f.lit(0)),
        "queued_ns": f.coalesce(f.sum(f.when(is_settled, queued_ns())), f.lit(0)),
        "run_last_ns": f.max_by(ran_ns, f.when(ran_ns.isNotNull(), record)),
        "result_bytes": f.max(f.when(kind == "finished", f.col("result_bytes"))),
    }


def _is_failure() -> Column:
    return f.col("next_kind").isin("failed", "postponed") & f.col("next_own_fault")


def _is_loss() -> Column:
    kind = f.col("next_kind")
    is_given_back = (kind == "returned") & f.col("next_reason").isin(*_LOSSES)
    return (kind == "expired") | is_given_back | ((kind == "failed") & ~f.col("next_own_fault"))


def _placed(alone: DataFrame, between: DataFrame) -> DataFrame:
    """State and place in the graph, a campaign at a time."""
    known = between.where(f.col("campaign").isNotNull())
    return by_campaign(alone.select(*NODE), known, place, _PLACED_SCHEMA)


def place(nodes: pd.DataFrame, between: pd.DataFrame) -> pd.DataFrame:
    """One campaign's tasks with what the walk along its edges found. Those may be links, which know
    of what campaign both ends are; else what a task waits for is looked for in its own alone."""
    edges, strangers = numbered(nodes, between)
    states = nodes["state"].tolist()
    durations = nodes["run_last_ns"].fillna(0).astype("int64").tolist()
    found = walk(states, durations, edges, strangers)
    # A task that was never leased was called off: it took nobody's time.
    ends_ns = nodes["ended"].where(nodes["attempts"] > 0).astype("int64")
    ends = [end_ns if end_ns > 0 else None for end_ns in ends_ns.tolist()]
    positions: list[int | None] = [None] * len(nodes)
    for position, node in enumerate(chain(ends, edges), start=1):
        positions[node] = position
    waiting = np.array([node for node, _ in edges] + strangers, dtype=np.int64)
    columns = zip(states, nodes["due"].notna(), found.has_open, found.has_runnable, strict=True)
    judged = [_judged(*row) for row in columns]
    return pd.DataFrame(
        {
            "campaign": nodes["campaign"],
            "task": nodes["task"],
            "generation": nodes["generation"],
            "state": [state for state, _ in judged],
            "is_behind_failure": [is_behind for _, is_behind in judged],
            "waits_for": np.bincount(waiting, minlength=len(nodes)),
            "level": pd.array(found.levels, dtype="Int64"),
            "path_ns": found.paths_ns,
            "critical_position": pd.array(positions, dtype="Int64"),
        }
    )


def _judged(state: str, is_timed: bool, has_open: bool, has_runnable: bool) -> tuple[str, bool]:  # noqa: FBT001  # columns of a row
    """A waiting task's state, and whether it waits in vain."""
    if state != "BLOCKED":
        return state, False
    if is_timed and not has_open:
        return "DELAYED", False
    return state, has_open and not has_runnable


def numbered(nodes: pd.DataFrame, between: pd.DataFrame) -> tuple[list[tuple[int, int]], list[int]]:
    """The edges inside of a campaign as pairs of places, and the places of those tasks that wait
    for something outside of it, once for each."""
    named = Named(nodes["task"], nodes["submitted_record"].to_numpy())
    records = between["record"].to_numpy(dtype=np.int64)
    waiting = named.places(between["task"], records)
    before = named.places(between["after"], records)
    if "after_campaign" in between.columns:
        before[(between["after_campaign"] != between["campaign"]).to_numpy()] = -1
    is_inside = (before >= 0) & (before != waiting)
    is_outside = (waiting >= 0) & (before < 0)
    pairs = zip(waiting[is_inside].tolist(), before[is_inside].tolist(), strict=True)
    return list(pairs), waiting[is_outside].tolist()


class Named:
    """Where tasks stand in a table, by their names: the newest generation as of a record."""

    def __init__(self, names: Names, records: Numbers) -> None:
        self._names = pa.array(names, pa.string()).unique()
        self._records = np.unique(records)
        keys = self._keys(self._codes(names), records)
        self._order = np.argsort(keys)
        self._sorted = keys[self._order]

    def _codes(self, names: Names) -> Numbers:
        """A number for each name, -1 for a stranger."""
        found = pc.index_in(pa.array(names, pa.string()), value_set=self._names)
        codes: Numbers = found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return codes

    def _keys(self, codes: Numbers, records: Numbers) -> Numbers:
        """Numbers that are ordered as names and then records are."""
        ranks = np.searchsorted(self._records, records, side="right")
        return codes * (len(self._records) + 1) + ranks

    def places(self, names: Names, records: Numbers) -> Numbers:
        """The place of each of these, -1 where there is none."""
        codes = self._codes(names)
        if not len(self._order):
            return codes
        at = np.searchsorted(self._sorted, self._keys(codes, records), side="right") - 1
        begins = codes * (len(self._records) + 1)
        is_there = (codes >= 0) & (at >= 0) & (self._sorted[at] > begins)
        return np.where(is_there, self._order[at], -1)
