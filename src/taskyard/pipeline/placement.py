"""Linked campaigns' tasks with their places in the graph, from what the events of each alone tell.

The walk along the graph needs all names of these campaigns at once, but only some columns; the rest
goes by file, from one place to the other.
"""

from pathlib import Path
from typing import Final

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from taskyard.pipeline.datasets import PLACED_TASKS, TASKS
from taskyard.pipeline.layout import folder
from taskyard.pipeline.transforms.tasks import NODE, place

#: What the walk has to know of an edge.
_EDGE: Final = ("task", "after", "record")

_FOUND: Final = to_arrow_schema(
    StructType([TASKS.schema[name] for name in PLACED_TASKS]), timezone="UTC"
)


class GraphPlacement(msgspec.Struct, frozen=True):
    """Keys of linked campaigns, with the tables that are read and the one that is written."""

    keys: tuple[str, ...]
    without_graph: Path
    edges: Path
    tasks: Path

    def __call__(self) -> None:
        files = _files(self.without_graph, self.keys)
        if not files:
            return  # events without a submission make no task
        nodes = _read(files, NODE)
        edges = _read(_files(self.edges, self.keys), _EDGE)
        placed = place(nodes, edges)[_FOUND.names]
        found = pa.Table.from_pandas(placed, schema=_FOUND, preserve_index=False)
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
