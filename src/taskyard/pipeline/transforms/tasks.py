"""Events and edges to tasks: one row a generation of a name, with its place in the graph."""

from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from taskyard.pipeline.datasets import CRITICAL_PATH, PLACED_TASKS, TASKS
from taskyard.pipeline.transforms.campaigns import by_linked_campaigns
from taskyard.pipeline.transforms.graph import chains, walk
from taskyard.pipeline.transforms.links import links
from taskyard.pipeline.transforms.steps import ENDED, OUTCOMES, name_in, queued_ns, run_ns, steps

#: Reasons of a return by which the task lost its worker; for others the worker gave it back.
_LOSSES: Final = ("unlisted", "left", "restarted", "broker_restarted")

_KEY: Final = ("campaign", "task", "generation")

Names = pd.Series  # of strings
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

#: What the walk has to know of a task.
NODE: Final = (
    *_KEY,
    *("submitted", "submitted_record", "state", "due", "run_last_ns", "attempts", "ended"),
)

_PLACED_SCHEMA: Final = StructType([TASKS.schema[name] for name in (*_KEY, *PLACED_TASKS)])


def tasks(events: DataFrame, edges: DataFrame) -> DataFrame:
    """Every task there is in these events."""
    return tasks_from_steps(steps(events), edges)


def tasks_from_steps(task_steps: DataFrame, edges: DataFrame) -> DataFrame:
    """The same from steps."""
    without_graph = tasks_without_graph(task_steps)
    return placed_tasks(without_graph, links(without_graph, edges))


def placed_tasks(without_graph: DataFrame, link_rows: DataFrame) -> DataFrame:
    """Tasks with their place in the graph, which is made of the links between them."""
    placed = _placed(without_graph, link_rows)
    whole = without_graph.drop("state").join(placed, on=list(_KEY), how="inner")
    return whole.select(*TASKS.names)


def tasks_without_graph(task_steps: DataFrame) -> DataFrame:
    """What a task's own steps tell; what was never submitted is no task."""
    known = task_steps.where(f.col("generation") > 0)
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
        "name": f.max(name_in(f.col("campaign"), f.col("task"))),
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


def _placed(without_graph: DataFrame, link_rows: DataFrame) -> DataFrame:
    """Find state and place in the graph, over linked campaigns."""
    known = link_rows.where(f.col("campaign").isNotNull())
    return by_linked_campaigns(without_graph.select(*NODE), known, place, _PLACED_SCHEMA)


def place(nodes: pd.DataFrame, edges: pd.DataFrame) -> pd.DataFrame:
    """Add to tasks what a walk along their edges finds. All linked campaigns must be there."""
    pairs, strangers = numbered(nodes, edges)
    states = nodes["state"].tolist()
    submitted_ns = _times_ns(nodes["submitted"])
    durations_ns = nodes["run_last_ns"].fillna(0).astype("int64").tolist()
    found = walk(states, submitted_ns, durations_ns, pairs, strangers)
    waiting = np.array([node for node, _ in pairs] + strangers, dtype=np.int64)
    columns = zip(states, nodes["due"].notna(), found.has_open, found.has_runnable, strict=True)
    judged = [_waiting_state(*row) for row in columns]
    positions, elsewhere = _positions(nodes, submitted_ns, pairs)
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
            "critical_elsewhere": pd.Series(elsewhere, index=nodes.index, dtype=object),
            "earliest_end": pd.to_datetime(found.earliest_ns, unit="ns", utc=True).floor("us"),
        }
    )


def _positions(
    nodes: pd.DataFrame, submitted_ns: list[int], pairs: list[tuple[int, int]]
) -> tuple[list[int | None], list[dict[str, int] | None]]:
    """Find each task's place in its campaign's critical path, and in those of other campaigns."""
    campaigns = nodes["campaign"].tolist()
    # A task that was never leased was cancelled or grew too old: it took no time.
    ends_ns = [
        end_ns if end_ns > 0 else None
        for end_ns in _times_ns(nodes["ended"].where(nodes["attempts"] > 0))
    ]
    positions: list[int | None] = [None] * len(nodes)
    elsewhere: list[dict[str, int] | None] = [None] * len(nodes)
    for campaign, way in chains(campaigns, submitted_ns, ends_ns, pairs).items():
        for position, node in enumerate(way, start=1):
            if campaigns[node] == campaign:
                positions[node] = position
            else:
                elsewhere[node] = {**(elsewhere[node] or {}), campaign: position}
    return positions, elsewhere


def _times_ns(times: pd.Series) -> list[int]:
    """Turn times into nanoseconds; a missing one is negative."""
    numbers: list[int] = pd.to_datetime(times, utc=True).dt.as_unit("ns").astype("int64").tolist()
    return numbers


def _waiting_state(
    state: str,
    is_timed: bool,  # noqa: FBT001  # columns of a row
    has_open: bool,  # noqa: FBT001
    has_runnable: bool,  # noqa: FBT001
) -> tuple[str, bool]:
    """A waiting task's state, and whether it waits in vain."""
    if state != "BLOCKED":
        return state, False
    if is_timed and not has_open:
        return "DELAYED", False
    return state, has_open and not has_runnable


def numbered(nodes: pd.DataFrame, edges: pd.DataFrame) -> tuple[list[tuple[int, int]], list[int]]:
    """Turn edges into pairs of places, each once. Places of tasks that wait for a name that was
    never submitted come apart, once for each such name."""
    named = TaskIndex(nodes["task"], nodes["submitted_record"].to_numpy())
    records = edges["record"].to_numpy(dtype=np.int64)
    waiting = named.places(edges["task"], records)
    before = named.places(edges["after"], records, or_first=True)
    is_known = (waiting >= 0) & (before >= 0) & (before != waiting)
    pairs = np.unique(np.stack([waiting[is_known], before[is_known]]), axis=1)
    strangers: list[int] = waiting[(waiting >= 0) & (before < 0)].tolist()
    return list(zip(*pairs.tolist(), strict=True)), strangers


class TaskIndex:
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

    def places(self, names: Names, records: Numbers, *, or_first: bool = False) -> Numbers:
        """Find the place of each name, -1 where there is none; the newest as of the record, or,
        if wanted and all came later, the first of them."""
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


def critical_path(tasks: DataFrame) -> DataFrame:
    """Lay out the chain of every campaign of which something has ended."""
    begins = tasks.groupBy("campaign").agg(f.min(f.unix_micros("submitted")).alias("first_us"))
    way = Window.partitionBy("campaign").orderBy("position")
    chained = (
        _members(tasks)
        .join(begins, on="campaign", how="inner")
        .withColumns(
            {
                "after": f.lag("task").over(way),
                "started_us": f.coalesce(
                    f.lag(f.unix_micros("ended")).over(way), f.col("first_us")
                ),
            }
        )
    )
    return _with_times(chained)


def _members(tasks: DataFrame) -> DataFrame:
    """List tasks by the chains that they are in: a row for each campaign that has it in its own."""
    renamed = tasks.withColumnRenamed("campaign", "task_campaign")
    own = renamed.where(f.col("critical_position").isNotNull()).withColumns(
        {"campaign": f.col("task_campaign"), "position": f.col("critical_position")}
    )
    elsewhere = renamed.select("*", f.explode("critical_elsewhere").alias("campaign", "position"))
    return own.unionByName(elsewhere)


def _with_times(joined: DataFrame) -> DataFrame:
    started, ended = f.col("started_us"), f.unix_micros("ended")
    total_ns = f.greatest(ended - started, f.lit(0)) * 1000
    held_ns = f.least(f.greatest(f.unix_micros("ready") - started, f.lit(0)) * 1000, total_ns)
    # Rounded to microseconds, the parts must not be more than the whole.
    run_ns = f.least(f.coalesce(f.col("run_last_ns"), f.lit(0)), total_ns - held_ns)
    wait_ns = f.least(f.col("wait_ns"), total_ns - held_ns - run_ns)
    rest_ns = total_ns - held_ns - wait_ns - run_ns
    # What is left of a single attempt passed before it started, or until its report had come.
    is_single = f.col("attempts") == 1
    queued_ns = f.when(is_single, rest_ns).otherwise(f.least(f.col("queued_ns"), rest_ns))
    made = {
        "started": f.timestamp_micros(started),
        "total_ns": total_ns,
        "held_ns": held_ns,
        "wait_ns": wait_ns,
        "run_ns": run_ns,
        "queued_ns": queued_ns,
        "retry_ns": rest_ns - queued_ns,
        "gain_ns": total_ns - run_ns,
    }
    return joined.select(*(made.get(name, f.col(name)).alias(name) for name in CRITICAL_PATH.names))
