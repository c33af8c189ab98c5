"""One campaign's tasks with their place in the graph, from what the events of each alone tell.

The walk along the graph needs all of a campaign's names at once, but only some columns; the rest
goes by file, from one place to the other.
"""

from pathlib import Path
from typing import Final

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_schema

from taskyard.pipeline.datasets import PLACED, TASKS
from taskyard.pipeline.layout import folder
from taskyard.pipeline.transforms.campaigns import each_campaign
from taskyard.pipeline.transforms.tasks import NODE, place

#: What the walk has to know of an edge.
_EDGE: Final = ("campaign", "task", "after", "record")


class Placing(msgspec.Struct, frozen=True):
    """The campaigns of one key, with the tables that are read and the one that is written."""

    key: str
    alone: Path
    edges: Path
    tasks: Path

    def __call__(self) -> None:
        files = _files(self.alone / folder(self.key))
        if not files:
            return  # events without a submission make no task
        nodes = _read(files, NODE)
        edges = _read(_files(self.edges / folder(self.key)), _EDGE)
        # Names that share a key are walked one by one.
        placed = each_campaign(nodes, edges, place)[list(PLACED)]
        found = pa.Table.from_pandas(placed, preserve_index=False)
        done = 0
        for file in files:
            table = pq.read_table(file, partitioning=None)
            _write(
                table.drop_columns(["state"]),
                found.slice(done, len(table)),
                self.tasks / file.relative_to(self.alone),
            )
            done += len(table)


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.parquet"))


def _read(files: list[Path], names: tuple[str, ...]) -> pd.DataFrame:
    tables = [pq.read_table(file, columns=list(names), partitioning=None) for file in files]
    if not tables:
        return pd.DataFrame(columns=list(names))
    frame: pd.DataFrame = pa.concat_tables(tables).to_pandas()
    return frame


def _write(alone: pa.Table, placed: pa.Table, path: Path) -> None:
    schema = to_arrow_schema(TASKS.schema, timezone="UTC")
    columns = {name: table[name] for table in (alone, placed) for name in table.column_names}
    whole = pa.table({name: columns[name] for name in schema.names}).cast(schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(whole, path, compression="zstd")
