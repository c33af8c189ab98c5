"""A Delta table, by the `deltalake` library: files are written elsewhere, commits are made here."""

import datetime as dt
import re
import time
from pathlib import Path
from typing import Final

from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from taskyard.errors import StateLocked, UnusableFile
from taskyard.pipeline.store.data_file import DataFile
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.manifest import TableVersion
from taskyard.pipeline.store.table_formats import Change

#: Characters that the library changes: it decodes twice, and takes \\ for a slash.
_UNUSABLE: Final = re.compile(r"[%\\\x00-\x1f]")


class DeltaFormat:
    """One Delta table. Other programs read it by its log."""

    def __init__(self, directory: Location) -> None:
        if directory.is_local and _UNUSABLE.search(directory.uri):
            raise UnusableFile(
                f"{directory}: a path with % or \\ can't have Delta tables (use another --out, or "
                "--format parquet)"
            )
        self._directory = directory
        self._uri = Path(directory.uri).as_uri() if directory.is_local else directory.uri
        self._options = directory.storage_options()

    def files(self, version: TableVersion) -> list[DataFile]:
        return _files(self._open(version.version))

    def commit(
        self, before: TableVersion | None, change: Change, properties: dict[str, str]
    ) -> TableVersion:
        """Commit the difference between the newest version and the wanted one."""
        commit = CommitProperties(custom_metadata=properties or None, max_commit_retries=0)
        try:
            newest = self._open()
        except TableNotFoundError:
            newest = self._create(change)
        kept = [] if before is None else self.files(before)
        wanted = {file.name: file for file in kept if file.name not in change.remove}
        wanted.update((file.name, file) for file in change.add)
        present = {file.name: file for file in _files(newest)}
        actions: list[AddAction | RemoveAction] = [
            *(_add(file, change.partition) for name, file in wanted.items() if name not in present),
            *(_remove(file) for name, file in present.items() if name not in wanted),
        ]
        _add_columns(newest, change)
        if actions:
            try:
                newest.create_write_transaction(
                    actions,
                    "append",
                    change.schema,
                    [*change.partition],
                    commit_properties=commit,
                )
            except CommitFailedError as error:
                raise StateLocked(f"{self._directory}: another process is writing to it") from error
            newest.update_incremental()
        return TableVersion(newest.version())

    def vacuum(
        self,
        used: frozenset[str],  # noqa: ARG002  # the log knows the versions
        retention: dt.timedelta,
    ) -> int:
        hours = int(retention.total_seconds() // 3600)
        removed = self._open().vacuum(
            hours, dry_run=False, enforce_retention_duration=False, full=True
        )
        return len(removed)

    def _open(self, version: int | None = None) -> DeltaTable:
        return DeltaTable(self._uri, version, storage_options=self._options)

    def _create(self, change: Change) -> DeltaTable:
        create_table_with_add_actions(
            self._uri,
            Schema.from_arrow(change.schema),
            [],
            partition_by=[*change.partition],
            name=self._directory.uri.rsplit("/", 1)[-1],
            storage_options=self._options,
        )
        return self._open()


def _add_columns(table: DeltaTable, change: Change) -> None:
    """Add columns that are new in this version of Taskyard. Old files have nulls there."""
    known = {field.name for field in table.schema().fields}
    wanted = Schema.from_arrow(change.schema).fields
    new = [field for field in wanted if field.name not in known]
    if new:
        table.alter.add_columns(new)
        table.update_incremental()


def _files(table: DeltaTable) -> list[DataFile]:
    found = table.get_add_actions(flatten=False)
    columns = (found.column(name).to_pylist() for name in ("path", "size_bytes", "num_records"))
    return [
        DataFile(name, size_bytes, rows, f'{{"numRecords":{rows}}}')
        for name, size_bytes, rows in zip(*columns, strict=True)
    ]


def _add(file: DataFile, partition: dict[str, str]) -> AddAction:
    return AddAction(
        file.name, file.size_bytes, {**partition}, _now_ms(), data_change=True, stats=file.stats
    )


def _remove(file: DataFile) -> RemoveAction:
    return RemoveAction(
        file.name, data_change=True, deletion_timestamp=_now_ms(), size=file.size_bytes
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
