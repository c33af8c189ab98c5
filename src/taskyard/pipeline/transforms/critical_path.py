"""Tasks and edges to the critical path: the chain that decided how long a campaign took.

It is the chain that was, not one that could have been: from the task that ended last back, each
time to the task that ended last among those it waited for. `path_ns` in `tasks` tells how short it
could have been with workers without end.
"""

from typing import Final

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from taskyard.pipeline.datasets import CRITICAL_PATH
from taskyard.pipeline.transforms.campaigns import by_campaign
from taskyard.pipeline.transforms.graph import chain
from taskyard.pipeline.transforms.links import links
from taskyard.pipeline.transforms.tasks import numbered

_NODE: Final = ("campaign", "task", "generation")

_CHAIN_SCHEMA: Final = (
    "campaign string, task string, generation long, position long, after string, started_us long"
)


def critical_path(tasks: DataFrame, edges: DataFrame) -> DataFrame:
    """The chain of every campaign of which something has ended."""
    return critical_path_of(tasks, links(tasks, edges))


def critical_path_of(tasks: DataFrame, between: DataFrame) -> DataFrame:
    """The same from links that somebody has already."""
    nodes = tasks.select(
        *_NODE,
        f.unix_micros("submitted").alias("submitted_us"),
        # A task that was never leased was called off: it took nobody's time.
        f.when(f.col("attempts") > 0, f.unix_micros("ended")).alias("ended_us"),
    )
    inside = between.where(f.col("campaign") == f.col("after_campaign"))
    chained = by_campaign(nodes, inside, chained_tasks, _CHAIN_SCHEMA)
    return _with_times(chained.join(tasks, on=list(_NODE), how="inner"))


def chained_tasks(nodes: pd.DataFrame, between: pd.DataFrame) -> pd.DataFrame:
    """One campaign's chain, each task with when its turn began."""
    index = pd.MultiIndex.from_frame(nodes[["task", "generation"]])
    edges, _ = numbered(index, between)
    ends = [None if pd.isna(end) else int(end) for end in nodes["ended_us"]]
    way = chain(ends, edges)
    found = nodes.iloc[way][["campaign", "task", "generation"]].reset_index(drop=True)
    found["position"] = range(1, len(way) + 1)
    names = found["task"].tolist()
    found["after"] = pd.Series([None, *names[:-1]][: len(way)], dtype="object")
    first = int(nodes["submitted_us"].min())
    found["started_us"] = [first, *(ends[node] or 0 for node in way[:-1])][: len(way)]
    return found


def _with_times(joined: DataFrame) -> DataFrame:
    started, ended = f.col("started_us"), f.unix_micros("ended")
    total_ns = f.greatest(ended - started, f.lit(0)) * 1000
    held_ns = f.least(f.greatest(f.unix_micros("ready") - started, f.lit(0)) * 1000, total_ns)
    # Rounded to microseconds, the parts must not be more than the whole.
    run_ns = f.least(f.coalesce(f.col("run_last_ns"), f.lit(0)), total_ns - held_ns)
    wait_ns = f.least(f.col("wait_ns"), total_ns - held_ns - run_ns)
    made = {
        "started": f.timestamp_micros(started),
        "total_ns": total_ns,
        "held_ns": held_ns,
        "wait_ns": wait_ns,
        "run_ns": run_ns,
        "retry_ns": total_ns - held_ns - wait_ns - run_ns,
        "gain_ns": total_ns - run_ns,
    }
    return joined.select(*(made.get(name, f.col(name)).alias(name) for name in CRITICAL_PATH.names))
