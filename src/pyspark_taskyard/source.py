"""The data source: creates the readers and the writer for `format("taskyard")`.

Imports them when they are needed, because they take long to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from pyspark_taskyard.options import STREAMS, SourceOptions, parse_options
from taskyard.errors import UserError

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class TaskyardSource(DataSource):
    """The data source behind `format("taskyard")`."""

    @classmethod
    def name(cls) -> str:
        return "taskyard"

    def schema(self) -> StructType:
        from pyspark_taskyard import tables  # noqa: PLC0415  # slow

        return tables.SCHEMAS[self._options().table]

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002  # Spark's signature
        from pyspark_taskyard.reader import FilteringReader, TableReader  # noqa: PLC0415

        options = self._options()
        return FilteringReader(options) if options.filters else TableReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001  # Spark's signature
        from pyspark_taskyard.writer import TaskWriter  # noqa: PLC0415

        return TaskWriter(self._write_options("save", overwrite=overwrite), schema.names)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802, FBT001  # Spark's
        from pyspark_taskyard.writer import TaskStreamWriter  # noqa: PLC0415

        return TaskStreamWriter(self._write_options("start", overwrite=overwrite), schema.names)

    def _write_options(self, use: str, *, overwrite: bool) -> SourceOptions:
        if overwrite:
            raise UserError(
                "format('taskyard'): tasks can't be overwritten (use the mode append, which skips "
                "existing tasks)"
            )
        options = self._options()
        options.require_one_state(use)
        return options

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802, ARG002  # Spark's
        from pyspark_taskyard.streams import RecordStream  # noqa: PLC0415

        options = self._options()
        if options.table not in STREAMS:
            raise UserError(
                f"table {options.table!r}: can't be streamed, only {' and '.join(STREAMS)} can"
            )
        options.require_one_state("stream")
        return RecordStream(options)

    def _options(self) -> SourceOptions:
        return parse_options(self.options)
