"""SQL views of a state's history and of the tables of `pipeline history`: `taskyard.attempts`, ….

A temporary view can't be in a database, and a view of a database can't read a DataFrame. So the
files of each table are a table of Spark's catalog, in a database of its own, with the view upon it.
Spark's Parquet reader reads them, with its filters and only the columns that a query needs. Events
and edges of a state come from the data source, when a query runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import msgspec

from taskyard.errors import UserError
from taskyard.journal import state_check
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import (
    ATTEMPTS,
    BROKER,
    CRITICAL_PATH,
    EDGES,
    EVENTS,
    METRICS,
    TASKS,
    WORKERS,
    Dataset,
)
from taskyard.pipeline.sources import history as source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

#: The views of a state, and of the tables made from it.
HISTORY: Final = (EVENTS, EDGES)
DERIVED: Final = (ATTEMPTS, TASKS, WORKERS, METRICS, CRITICAL_PATH)

_NAME = re.compile("[A-Za-z][A-Za-z0-9_]*")

#: Characters that Hadoop reads as a pattern.
_SPECIAL = re.compile(r"[\\*?\[\]{},]")

_FILTERS: Final = "spark.sql.python.filterPushdown.enabled"


class Views(msgspec.Struct, frozen=True):
    """The databases that views are created in, by one session."""

    spark: SparkSession
    database: str

    @property
    def files(self) -> str:
        """The database of the tables that the views read."""
        return f"{self.database}_files"

    def create(self, states: Sequence[Path], outs: Sequence[Path]) -> list[str]:
        """Create the views and return their names. Views of an earlier call are replaced."""
        if not _NAME.fullmatch(self.database):
            raise UserError(f"database {self.database!r}: not a plain name (use letters and _)")
        for state in states:
            state_check.require_state(state)
        source.require_distinct(states)
        for out in outs:
            tables.read(self.spark, out, ATTEMPTS)  # raises if there are none
        for name in (self.database, self.files):
            self.spark.sql(f"create database if not exists {name}")
        queries = {one.name: self._derived(one, outs) for one in DERIVED if outs}
        for one in HISTORY:
            if states:
                queries[one.name] = self._live(one, states)
            elif outs and all((out / one.name).is_dir() for out in outs):
                queries[one.name] = self._derived(one, outs)
        for one in (*HISTORY, *DERIVED):
            self.spark.sql(f"drop view if exists {self.database}.{one.name}")
        for name, query in queries.items():
            self.spark.sql(f"create view {self.database}.{name} as {query}")
        return [
            f"{self.database}.{one.name}" for one in (*HISTORY, *DERIVED) if one.name in queries
        ]

    def _derived(self, dataset: Dataset, outs: Sequence[Path]) -> str:
        """Return the query of a table that `pipeline history` has made."""
        queries: list[str] = []
        for number, out in enumerate(outs):
            frame = tables.read(self.spark, out, dataset)
            files = frame.inputFiles()
            if not files:
                queries.append(_empty(frame.schema))
                continue
            table = self._file_table(f"{dataset.name}_{number}", frame.schema, files)
            known = BROKER.name
            if (
                known not in self.spark.read.parquet(_pattern(files[:1])).columns
            ):  # files of one broker
                first = frame.select(known).first()
                known = f"{_text(first[0] if first else '')} as {known}"
            queries.append(_select(dataset, known, table))
        return " union all ".join(queries)

    def _live(self, dataset: Dataset, states: Sequence[Path]) -> str:
        """Return the query of the histories of states."""
        table = f"{self.files}.{dataset.name}_live"
        self.spark.sql(f"drop table if exists {table}")
        self.spark.sql(f"create table {table} using taskyard options (table '{dataset.name}')")
        queries: list[str] = []
        for state in states:
            options = {
                "state": str(state.absolute()),
                "table": dataset.name,
                "filters": self.spark.conf.get(_FILTERS, "false") or "false",
            }
            given = ", ".join(f"{_text(key)} = {_text(value)}" for key, value in options.items())
            queries.append(_select(dataset, BROKER.name, f"{table} with ({given})"))
        return " union all ".join(queries)

    def _file_table(self, name: str, schema: StructType, files: Sequence[str]) -> str:
        """Create a table of Parquet files, and return its name."""
        table = f"{self.files}.{name}"
        columns = ", ".join(f"`{one.name}` {one.dataType.simpleString()}" for one in schema)
        self.spark.sql(f"drop table if exists {table}")
        self.spark.sql(
            f"create table {table} ({columns}) using parquet "
            f"options (path {_text(_pattern(files))})"
        )
        return table


def _pattern(uris: Sequence[str]) -> str:
    """Return one path for all files, as the pattern DIRECTORY/{FILE,FILE}.

    With a slash in the braces, Hadoop looks at each file instead of listing a directory.
    """
    places = [urlsplit(uri) for uri in uris]
    paths = [unquote(place.path) for place in places]
    base = os.path.dirname(os.path.commonpath([os.path.dirname(path) for path in paths]))  # noqa: PTH120  # also of S3
    names = [_escaped(os.path.relpath(path, base)) for path in paths]
    start = f"{places[0].scheme}://{places[0].netloc}{_escaped(base).rstrip('/')}"
    return f"{start}/{{{','.join(names)}}}"


def _escaped(path: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", path)


def _select(dataset: Dataset, broker: str, table: str) -> str:
    columns = ", ".join(f"`{name}`" for name in dataset.names if name != BROKER.name)
    return f"select {columns}, {broker} from {table}"  # noqa: S608  # values are literals by `_text`


def _empty(schema: StructType) -> str:
    columns = (f"cast(null as {one.dataType.simpleString()}) as `{one.name}`" for one in schema)
    return f"select {', '.join(columns)} where false"


def _text(value: str) -> str:
    """Return a literal of SQL."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
