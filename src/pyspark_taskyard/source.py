"""The data source itself: which options there are, and who reads and writes by them.

Owns the options and their defaults. `writing` submits, `reading` reads, `streaming` follows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from pyspark.sql.datasource import DataSource

from taskyard.errors import UserError

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

#: What can be read.
TABLES: Final = ("events", "edges", "tasks", "results")

#: Every option, with what it says.
OPTIONS: Final = {
    "broker": "the broker's endpoint, as the executors reach it",
    "state": "the state directory: of a broker on this machine, or to read from",
    "key": "the key to come with, a file on the executors",
    "campaign": "the campaign to write to, or to read alone",
    "service": "the service of tasks that name none",
    "unknown": "what a name means that nobody submitted yet: wait or refuse",
    "table": "what to read: " + ", ".join(TABLES),
}

#: Options of Spark's own that may come along.
_SPARK_OPTIONS: Final = ("path",)


class SourceOptions(Struct, frozen=True):
    """What was asked for."""

    broker: str | None = None
    state: str | None = None
    key: str | None = None
    campaign: str | None = None
    service: str | None = None
    unknown: str | None = None
    table: str = "events"

    def endpoint(self) -> str:
        """The broker's, by the rules that every client has."""
        from taskyard.client import discovery  # noqa: PLC0415  # only who talks to a broker

        return discovery.endpoint(self.broker, self.state)

    @property
    def directory(self) -> Path | None:
        """The state directory to read from; None: ask the broker."""
        return None if self.broker or not self.state else Path(self.state)


class TaskyardSource(DataSource):
    """`format("taskyard")`."""

    @classmethod
    def name(cls) -> str:
        return "taskyard"

    def schema(self) -> StructType:
        from pyspark_taskyard import tables  # noqa: PLC0415  # see above

        return tables.SCHEMAS[self._options().table]

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002  # Spark's signature
        from pyspark_taskyard.reader import TableReader  # noqa: PLC0415

        return TableReader(self._options())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001  # Spark's signature
        from pyspark_taskyard.writer import TaskWriter  # noqa: PLC0415

        if overwrite:
            raise UserError(
                "tasks can't be overwritten: write with mode('append'); what is known already is "
                "left as it is"
            )
        return TaskWriter(self._options(), schema.names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, ARG002  # Spark's
        from pyspark_taskyard.stream_reader import EventStream  # noqa: PLC0415

        options = self._options()
        if options.table != "events":
            raise UserError(f"only events can be followed, not {options.table}; leave `table` out")
        return EventStream(options)

    def _options(self) -> SourceOptions:
        """Raises UserError for an option that is not known."""
        given = {name.lower(): value for name, value in self.options.items()}
        unknown = [name for name in given if name not in OPTIONS and name not in _SPARK_OPTIONS]
        if unknown:
            raise UserError(
                f"format('taskyard') has no option {unknown[0]!r}; it has {', '.join(OPTIONS)}"
            )
        if given.get("table", "events") not in TABLES:
            raise UserError(
                f"there is no table {given['table']!r}; read one of {', '.join(TABLES)}"
            )
        return SourceOptions(**{name: given[name] for name in OPTIONS if name in given})
