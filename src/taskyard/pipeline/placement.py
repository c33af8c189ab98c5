"""Placement of tasks in the graph: level, state, paths, critical path.

The walk needs all tasks of linked campaigns at once, but only some of their columns. Campaigns are
linked if a task of one waits for a task of the other, directly or through others. Owns where the
walk runs: on the driver, in the executors, or file by file.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from taskyard.pipeline.datasets import PLACED_TASKS, TASKS
from taskyard.pipeline.layout import folder
from taskyard.pipeline.session import is_small
from taskyard.pipeline.transforms.graph import chains, walk
from taskyard.pipeline.transforms.links import linked_campaigns, links
from taskyard.pipeline.transforms.tasks import tasks_with_places, tasks_without_graph

_KEY: Final = ("campaign", "task", "generation")

Names = pd.Series  # of strings

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

#: The columns of a task that the walk needs.
NODE: Final = (
    *_KEY,
    *("submitted", "submitted_record", "state", "due", "run_last_ns", "attempts", "ended"),
)

_PLACED_SCHEMA: Final = StructType([TASKS.schema[name] for name in (*_KEY, *PLACED_TASKS)])

#: Takes nodes and links, and returns one row for each node, in the same order.
Function = Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]

#: The columns of an edge that the walk needs.
_EDGE: Final = ("task", "after", "record")

_PLACED_ARROW: Final = to_arrow_schema(
    StructType([TASKS.schema[name] for name in PLACED_TASKS]), timezone="UTC"
)


def tasks_from_steps(task_steps: DataFrame, edges: DataFrame) -> DataFrame:
    """Compute the table of tasks from steps and edges."""
    without_graph = tasks_without_graph(task_steps)
    return placed_tasks(without_graph, links(without_graph, edges))


def placed_tasks(without_graph: DataFrame, link_rows: DataFrame) -> DataFrame:
    """Compute the table of tasks from their own columns and the links between them."""
    known = link_rows.where(f.col("campaign").isNotNull())
    placed = by_linked_campaigns(without_graph.select(*NODE), known, place, _PLACED_SCHEMA)
    return tasks_with_places(without_graph, placed)


def place(nodes: pd.DataFrame, edges: pd.DataFrame) -> pd.DataFrame:
    """Find the place of every task by a walk along the edges.

    `nodes` must hold all tasks of all linked campaigns.
    """
    pairs, waiting_for_unknown = numbered(nodes, edges)
    states = nodes["state"].tolist()
    submitted_ns = _times_ns(nodes["submitted"])
    durations_ns = nodes["run_last_ns"].fillna(0).astype("int64").tolist()
    found = walk(states, submitted_ns, durations_ns, pairs, waiting_for_unknown)
    waiting = np.array([node for node, _ in pairs] + waiting_for_unknown, dtype=np.int64)
    columns = zip(states, nodes["due"].notna(), found.has_open, found.has_runnable, strict=True)
    waiting_states = [_waiting_state(*row) for row in columns]
    positions, elsewhere = _positions(nodes, submitted_ns, pairs)
    return pd.DataFrame(
        {
            "campaign": nodes["campaign"],
            "task": nodes["task"],
            "generation": nodes["generation"],
            "state": [state for state, _ in waiting_states],
            "is_behind_failure": [is_behind for _, is_behind in waiting_states],
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
    """Find each task's position in the critical paths of its own and of other campaigns."""
    campaigns = nodes["campaign"].tolist()
    # A task that was never leased was cancelled or has expired. It took no time.
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
    """Convert times to nanoseconds. A missing time becomes negative."""
    numbers: list[int] = pd.to_datetime(times, utc=True).dt.as_unit("ns").astype("int64").tolist()
    return numbers


def _waiting_state(
    state: str,
    is_timed: bool,  # noqa: FBT001  # columns of a row
    has_open: bool,  # noqa: FBT001
    has_runnable: bool,  # noqa: FBT001
) -> tuple[str, bool]:
    """Return the state of a waiting task, and whether it is blocked for good."""
    if state != "BLOCKED":
        return state, False
    if is_timed and not has_open:
        return "DELAYED", False
    return state, has_open and not has_runnable


def numbered(nodes: pd.DataFrame, edges: pd.DataFrame) -> tuple[list[tuple[int, int]], list[int]]:
    """Convert edges to distinct pairs of row numbers: waiting task, task before it.

    The second list has the row of each task that waits for a name never submitted, once for each
    such name.
    """
    named = TaskIndex(nodes["task"], nodes["submitted_record"].to_numpy())
    records = edges["record"].to_numpy(dtype=np.int64)
    waiting = named.places(edges["task"], records)
    before = named.places(edges["after"], records, or_first=True)
    is_known = (waiting >= 0) & (before >= 0) & (before != waiting)
    pairs = np.unique(np.stack([waiting[is_known], before[is_known]]), axis=1)
    unknown: list[int] = waiting[(waiting >= 0) & (before < 0)].tolist()
    return list(zip(*pairs.tolist(), strict=True)), unknown


class TaskIndex:
    """Row numbers of tasks by name: the newest generation as of a record."""

    def __init__(self, names: Names, records: Numbers) -> None:
        self._names = pa.array(names, pa.string()).unique()
        self._records = np.unique(records)
        keys = self._keys(self._codes(names), records)
        self._order = np.argsort(keys)
        self._sorted = keys[self._order]

    def _codes(self, names: Names) -> Numbers:
        """Return a number for each name, -1 for an unknown one."""
        found = pc.index_in(pa.array(names, pa.string()), value_set=self._names)
        codes: Numbers = found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return codes

    def _keys(self, codes: Numbers, records: Numbers) -> Numbers:
        """Combine name and record into numbers that sort by name, then by record."""
        ranks = np.searchsorted(self._records, records, side="right")
        return codes * (len(self._records) + 1) + ranks

    def places(self, names: Names, records: Numbers, *, or_first: bool = False) -> Numbers:
        """Find the row of each name, the newest as of the record. -1 if there is none.

        With `or_first`, a name that was only submitted later resolves to its first row.
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


def by_linked_campaigns(
    nodes: DataFrame, links: DataFrame, function: Function, schema: StructType
) -> DataFrame:
    """Apply a function to the nodes of linked campaigns and the links between them.

    Runs in the executors. In a session for small histories it runs here, because starting a Python
    process takes longer.
    """
    spark = nodes.sparkSession
    if is_small(spark):
        made = function(nodes.toPandas(), links.toPandas())
        return spark.createDataFrame(made[schema.names] if len(made) else [], schema)
    groups = [group for group in linked(_pairs(links)) if len(group) > 1]
    members = [(name, group[0]) for group in groups for name in group]
    named = spark.createDataFrame(members, "campaign string, linked string")

    def grouped(frame: DataFrame) -> DataFrame:
        joined = frame.join(f.broadcast(named), on="campaign", how="left")
        return joined.withColumn("linked", f.coalesce("linked", "campaign"))

    both = grouped(nodes).groupBy("linked").cogroup(grouped(links).groupBy("linked"))
    return both.applyInPandas(function, schema=schema)


def _pairs(links: DataFrame) -> list[tuple[str, str]]:
    """Collect the pairs of campaigns that have links between them."""
    return [(row[0], row[1]) for row in linked_campaigns(links).collect()]


def linked(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Group names that are connected by pairs, directly or through others."""
    group_of: dict[str, list[str]] = {}
    for pair in pairs:
        one, other = sorted((group_of.setdefault(name, [name]) for name in pair), key=len)
        if one is not other:
            other += one
            group_of |= dict.fromkeys(one, other)
    return sorted({id(group): sorted(group) for group in group_of.values()}.values())


class GraphPlacement(msgspec.Struct, frozen=True):
    """Adds places to the tasks of linked campaigns, from one directory of files to another."""

    keys: tuple[str, ...]
    without_graph: Path
    edges: Path
    tasks: Path

    def __call__(self) -> None:
        files = _files(self.without_graph, self.keys)
        if not files:
            return  # there are events, but no submission
        nodes = _read(files, NODE)
        edges = _read(_files(self.edges, self.keys), _EDGE)
        placed = place(nodes, edges)[_PLACED_ARROW.names]
        found = pa.Table.from_pandas(placed, schema=_PLACED_ARROW, preserve_index=False)
        done = 0
        for file in files:
            table = pq.read_table(file, partitioning=None)
            _write(
                table.drop_columns(["state"]),
                found.slice(done, len(table)),
                self.tasks / file.relative_to(self.without_graph),
            )
            done += len(table)


def _files(table: Path, keys: tuple[str, ...]) -> list[Path]:
    return [path for key in keys for path in sorted((table / folder(key)).glob("*/*.parquet"))]


def _read(files: list[Path], names: tuple[str, ...]) -> pd.DataFrame:
    tables = [pq.read_table(file, columns=list(names), partitioning=None) for file in files]
    if not tables:
        return pd.DataFrame(columns=list(names))
    frame: pd.DataFrame = pa.concat_tables(tables).to_pandas()
    return frame


def _write(without_graph: pa.Table, placed: pa.Table, path: Path) -> None:
    schema = to_arrow_schema(TASKS.schema, timezone="UTC")
    columns = {
        name: table[name] for table in (without_graph, placed) for name in table.column_names
    }
    whole = pa.table({name: columns[name] for name in schema.names}).cast(schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(whole, path, compression="zstd")
