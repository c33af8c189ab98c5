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
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from taskyard.pipeline.datasets import CRITICAL_PATH, EDGES, PLACED_TASKS, TASKS
from taskyard.pipeline.fold.columns import plain
from taskyard.pipeline.fold.places import NODE, Places
from taskyard.pipeline.layout import folder
from taskyard.pipeline.session import is_small
from taskyard.pipeline.shares import arrow_schema, write_rows
from taskyard.pipeline.transforms.links import linked_campaigns, links
from taskyard.pipeline.transforms.tasks import tasks_with_places, tasks_without_graph

_KEY: Final = ("campaign", "task", "generation")

_PLACED_SCHEMA: Final = StructType([TASKS.schema[name] for name in (*_KEY, *PLACED_TASKS)])

#: Takes nodes and links, and returns one row for each node, in the same order.
Function = Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]


_NODE_ARROW: Final = arrow_schema(TASKS, NODE)
_PLACED_ARROW: Final = arrow_schema(TASKS, PLACED_TASKS)

#: The columns of an edge that the walk needs.
_EDGE_ARROW: Final = arrow_schema(EDGES, ("task", "after", "record"))


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
    found = _places(_arrow(nodes, _NODE_ARROW), _arrow(edges, _EDGE_ARROW)).to_pandas(
        types_mapper={pa.int64(): pd.Int64Dtype()}.get, maps_as_pydicts="strict"
    )
    return pd.concat([nodes[[*_KEY]].reset_index(drop=True), found], axis="columns")


def _places(nodes: pa.Table, edges: pa.Table) -> pa.Table:
    """Return the columns that the walk computes, a row for each node."""
    return plain(pa.table(Places(nodes, edges).columns()), _PLACED_ARROW)


def _arrow(frame: pd.DataFrame, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pandas(frame[schema.names], schema=schema, preserve_index=False)


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
    number: int = 0

    def __call__(self) -> None:
        files = _files(self.without_graph, self.keys)
        if not files:
            return  # there are events, but no submission
        edges = _read(_files(self.edges, self.keys), _EDGE_ARROW)
        places = Places(_read(files, _NODE_ARROW), edges)
        found = plain(pa.table(places.columns()), _PLACED_ARROW)
        chained = np.sort(places.chained)
        done, parts = 0, []
        for file in files:
            table = pq.read_table(file, partitioning=None)
            part = found.slice(done, len(table))
            whole = _whole_tasks(table.drop_columns(["state"]), part)
            path = self.tasks / file.relative_to(self.without_graph)
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(whole, path, compression="zstd")
            mine = chained[(chained >= done) & (chained < done + len(table))]
            parts.append(whole.take(pa.array(mine - done)))
            done += len(table)
        self._write_paths(places, pa.concat_tables(parts))

    def _write_paths(self, places: Places, rows: pa.Table) -> None:
        """Write the critical paths. `rows` are their tasks in the order of the files."""
        order = np.argsort(np.argsort(places.chained, kind="stable"), kind="stable")
        made = places.critical_path(rows.take(pa.array(order)))
        write_rows(CRITICAL_PATH, [made], self.tasks.parent, self.number)


def _files(table: Path, keys: tuple[str, ...]) -> list[Path]:
    return [path for key in keys for path in sorted((table / folder(key)).glob("*/*.parquet"))]


def _read(files: list[Path], schema: pa.Schema) -> pa.Table:
    tables = [pq.read_table(file, columns=schema.names, partitioning=None) for file in files]
    return pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in tables)])


def _whole_tasks(without_graph: pa.Table, placed: pa.Table) -> pa.Table:
    schema = arrow_schema(TASKS)
    columns = {
        name: table[name] for table in (without_graph, placed) for name in table.column_names
    }
    return pa.table({name: columns[name] for name in schema.names}).cast(schema)
