"""The interface of table formats, and plain Parquet. `delta_table` has the other one."""

import datetime as dt
from typing import Protocol

import msgspec
import pyarrow as pa
from pyarrow import fs

from taskyard.pipeline.store.data_file import DataFile
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.manifest import TableVersion


class Change(msgspec.Struct, frozen=True):
    """The next version of a table: files to add, and names of files to remove."""

    schema: pa.Schema
    add: list[DataFile] = []
    remove: frozenset[str] = frozenset()
    #: Columns that no file has, with the value that they have in the files to add.
    partition: dict[str, str] = {}


class TableFormat(Protocol):
    """Commits versions of one table and lists their files."""

    def files(self, version: TableVersion) -> list[DataFile]: ...

    def commit(
        self, before: TableVersion | None, change: Change, properties: dict[str, str]
    ) -> TableVersion: ...

    def vacuum(self, used: frozenset[str], retention: dt.timedelta) -> int: ...


class ParquetTable:
    """A directory of Parquet files. Only the manifest tells which of them are the table."""

    def __init__(self, directory: Location) -> None:
        self._directory = directory

    def files(self, version: TableVersion) -> list[DataFile]:
        return version.files

    def commit(
        self,
        before: TableVersion | None,
        change: Change,
        properties: dict[str, str],  # noqa: ARG002  # a plain file has no place for them
    ) -> TableVersion:
        kept = [file for file in before.files if file.name not in change.remove] if before else []
        return TableVersion(before.version + 1 if before else 0, [*kept, *change.add])

    def vacuum(self, used: frozenset[str], retention: dt.timedelta) -> int:
        """Remove files that no kept manifest lists. A new one may be of a run that goes on."""
        oldest = dt.datetime.now(dt.UTC) - retention
        system, _ = self._directory.open()
        old = [
            entry
            for entry in self._directory.entries()
            if entry.type == fs.FileType.File
            and entry.base_name not in used
            and entry.mtime is not None
            and entry.mtime < oldest
        ]
        for entry in old:
            system.delete_file(entry.path)
        return len(old)
