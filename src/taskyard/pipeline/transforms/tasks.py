"""Events and edges to tasks: one row a generation of a name, with its place in the graph."""

from collections.abc import Iterator
from typing import Final

import pandas as pd
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from taskyard.pipeline.datasets import TASKS
from taskyard.pipeline.transforms.campaigns import by_campaign
from taskyard.pipeline.transforms.graph import walk
from taskyard.pipeline.transforms.links import links
from taskyard.pipeline.transforms.steps import ENDED, OUTCOMES, steps

#: Reasons of a return by which the task lost its worker; for others the worker gave it back.
_LOSSES: Final = ("unlisted", "left", "restarted")

_KEY: Final = ("campaign", "task", "generation")

_PLACED_SCHEMA: Final = (
    "campaign string, task string, generation long, state string, is_behind_failure boolean, "
    "waits_for long, level long, path_ns long"
)


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
    ran_ns = f.when(is_settled, f.greatest(f.col("next_time_ns") - time_ns, f.lit(0)))
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
        "run_last_ns": f.max_by(ran_ns, f.when(is_settled, record)),
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
    nodes = alone.select(*_KEY, "state", f.col("due").isNotNull().alias("is_timed"), "run_last_ns")
    known = between.where(f.col("campaign").isNotNull())
    return by_campaign(nodes, known, place, _PLACED_SCHEMA)


def place(nodes: pd.DataFrame, between: pd.DataFrame) -> pd.DataFrame:
    """One campaign's tasks with what the walk along its edges found."""
    index = pd.MultiIndex.from_frame(nodes[["task", "generation"]])
    edges, strangers = numbered(index, between)
    states = nodes["state"].tolist()
    durations = nodes["run_last_ns"].fillna(0).astype("int64").tolist()
    found = walk(states, durations, edges, strangers)
    waits_for = pd.Series([node for node, _ in edges] + strangers, dtype="int64").value_counts()
    columns = zip(states, nodes["is_timed"], found.has_open, found.has_runnable, strict=True)
    judged = [_judged(*row) for row in columns]
    return pd.DataFrame(
        {
            "campaign": nodes["campaign"],
            "task": nodes["task"],
            "generation": nodes["generation"],
            "state": [state for state, _ in judged],
            "is_behind_failure": [is_behind for _, is_behind in judged],
            "waits_for": waits_for.reindex(range(len(nodes)), fill_value=0).to_numpy(),
            "level": pd.array(found.levels, dtype="Int64"),
            "path_ns": found.paths_ns,
        }
    )


def _judged(state: str, is_timed: bool, has_open: bool, has_runnable: bool) -> tuple[str, bool]:  # noqa: FBT001  # columns of a row
    """A waiting task's state, and whether it waits in vain."""
    if state != "BLOCKED":
        return state, False
    if is_timed and not has_open:
        return "DELAYED", False
    return state, has_open and not has_runnable


def numbered(
    index: pd.MultiIndex, between: pd.DataFrame
) -> tuple[list[tuple[int, int]], list[int]]:
    """The edges inside of a campaign as pairs of places, and the places of those tasks that wait
    for something outside of it, once for each."""
    is_inside = (between["after_campaign"] == between["campaign"]).to_numpy()
    waiting = _places(index, between["task"], between["generation"])
    before = _places(index, between["after"], between["after_generation"])
    rows = zip(waiting, before, is_inside, strict=True)
    edges: list[tuple[int, int]] = []
    strangers: list[int] = []
    for node, other, inside in rows:
        if inside and other >= 0 and other != node:
            edges.append((node, other))
        elif not inside:
            strangers.append(node)
    return edges, strangers


def _places(
    index: pd.MultiIndex, names: "pd.Series[str]", generations: "pd.Series[int]"
) -> Iterator[int]:
    wanted = pd.MultiIndex.from_arrays([names, generations.fillna(0).astype("int64")])
    return iter(index.get_indexer(wanted).tolist())
