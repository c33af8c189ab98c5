"""The memory of a run: tables that only the next run reads. Their names begin with `_`.

_steps         steps of generations that may still change
_generations   how many generations came before those
_places        places of final tasks, in the order of the files: row numbers are their names
_unplaced      tasks that are final but whose place is not
_edges         edges of tasks whose place is not final
_members       joins, exits and last events of stays that may still change
_work          the work done in them
_stays         how many stays each worker had before
_buckets       changes in each minute, a file for each day
_levels        queue depth and running attempts at the end of each day
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

import pyarrow as pa
from msgspec import Struct

from taskyard.journal.history_arrow import EDGES, EVENTS
from taskyard.pipeline.fold import schemas
from taskyard.pipeline.fold.columns import CODED_TYPE, Ints
from taskyard.pipeline.fold.places import EDGE
from taskyard.pipeline.fold.share import GENERATIONS
from taskyard.pipeline.fold.stays import BEFORE, MEMBER_COLUMNS, WORK
from taskyard.pipeline.fold.steps import CODED, COLUMNS
from taskyard.pipeline.store.data_file import DataFile, write_data_file
from taskyard.pipeline.store.location import Location

#: Columns of few strings, in any table. Read as codes, they take a tenth of the time.
_CODED: Final = {*CODED, "outcome", "state", "broker", "scope"}


def coded(schema: pa.Schema) -> pa.Schema:
    """Return a schema in which columns of few strings are codes, and all are nullable."""
    fields = [
        field.with_type(CODED_TYPE) if field.name in _CODED else field.with_nullable(nullable=True)
        for field in schema
    ]
    return pa.schema(fields)


def selected(schema: pa.Schema, names: tuple[str, ...]) -> pa.Schema:
    """Return some columns of a schema."""
    return pa.schema([schema.field(name) for name in names])


STEPS: Final = coded(selected(EVENTS, COLUMNS))
MEMBERS: Final = coded(selected(EVENTS, MEMBER_COLUMNS))

#: A file with fewer rows is small. Small files are merged when there are this many.
ROWS_SMALL: Final = 100_000
FILES_SMALL_MAX: Final = 24

#: The schema of every table of the memory.
MEMORY: Final = {
    "_steps": STEPS,
    "_generations": GENERATIONS,
    "_places": coded(schemas.PLACES),
    "_unplaced": coded(schemas.TASKS_WITHOUT_GRAPH),
    "_edges": selected(EDGES, EDGE),
    "_members": MEMBERS,
    "_work": WORK,
    "_stays": BEFORE,
    "_buckets": schemas.BUCKETS,
    "_levels": schemas.LEVELS,
}


class Files(Struct, frozen=True):
    """Files of one table, in their order."""

    directory: Location
    names: tuple[str, ...] = ()

    def read(self, schema: pa.Schema) -> pa.Table:
        """Read the columns of a schema. A column that a file lacks is null."""
        tables = [self.read_one(name, schema) for name in self.names]
        return pa.concat_tables([schema.empty_table(), *tables]).unify_dictionaries()

    def read_one(self, name: str, schema: pa.Schema) -> pa.Table:
        coded = [field.name for field in schema if pa.types.is_dictionary(field.type)]
        with self.directory.open_parquet(name, coded) as file:
            present = [one for one in schema.names if one in file.schema_arrow.names]
            table = file.read(columns=present, use_threads=False)
        return in_schema(table, schema)

    def row_count(self, name: str) -> int:
        with self.directory.open_parquet(name) as file:
            return int(file.metadata.num_rows)

    def read_rows(self, name: str, rows: Ints, schema: pa.Schema) -> pa.Table:
        """Read some rows of a file, by their sorted numbers. Only their row groups are read."""
        parts, begin = [schema.empty_table()], 0
        with self.directory.open_parquet(name) as file:
            for group in range(file.num_row_groups):
                end = begin + file.metadata.row_group(group).num_rows
                mine = rows[(rows >= begin) & (rows < end)]
                if len(mine):
                    found = file.read_row_group(group, columns=schema.names, use_threads=False)
                    parts.append(in_schema(found.take(pa.array(mine - begin)), schema))
                begin = end
        return pa.concat_tables(parts)


class Memory(Struct, frozen=True):
    """The memory of the last run, and where this one leaves its own."""

    out: Location
    names: dict[str, tuple[str, ...]] = {}

    def __getitem__(self, table: str) -> Files:
        return Files(self.out.child(table), self.names.get(table, ()))

    def read(self, table: str) -> pa.Table:
        return self[table].read(MEMORY[table])

    def write(self, table: str, rows: pa.Table, prefix: str = "open") -> list[DataFile]:
        """Write rows to a new file, none if there are no rows."""
        return write_rows(self.out.child(table), rows, MEMORY[table], prefix)

    def write_always(self, table: str, rows: pa.Table, prefix: str) -> list[DataFile]:
        """Write rows to a new file, even if there are none."""
        return [write_data_file(self.out.child(table), in_schema(rows, MEMORY[table]), prefix)]


def write_rows(
    directory: Location, rows: pa.Table, schema: pa.Schema, prefix: str
) -> list[DataFile]:
    """Write rows of a schema to a new file, none if there are no rows."""
    if not len(rows):
        return []
    return [write_data_file(directory, in_schema(rows, coded(schema)), prefix)]


def in_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema, with their exact types. A missing column is null."""
    columns = [
        _cast(table[field.name], field.type)
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.type == kind:
        return column
    if pa.types.is_dictionary(kind) and not pa.types.is_dictionary(column.type):
        return column.dictionary_encode().cast(kind)
    return column.cast(kind)


class FilesMerge(Struct, frozen=True):
    """Merges files of a table, in their order."""

    files: Files
    schema: pa.Schema
    name: str

    def __call__(self) -> DataFile:
        rows = self.files.read(coded(self.schema))
        return write_data_file(self.files.directory, rows, "", self.name)


def small_tail(files: Sequence[DataFile]) -> list[DataFile]:
    """Return the small files at the end, if there are many."""
    small = [*takewhile(lambda file: file.rows < ROWS_SMALL, reversed(files))][::-1]
    return small if len(small) >= FILES_SMALL_MAX else []
