"""Tables in their formats: list the files of a version, commit the next version, remove old files.

A commit is computed from the manifest, not from the newest version of a table: a killed run may
have committed some tables, and its files are removed again by the next commit.
"""

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from taskyard.errors import NotInstalled, UnusableFile
from taskyard.pipeline.store.data_file import DataFile
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.manifest import (
    DELTA,
    PARQUET,
    VERSION,
    BrokerMark,
    Manifest,
    earlier_runs,
    read_manifest,
    remove_manifest,
    write_manifest,
)
from taskyard.pipeline.store.table_formats import Change, ParquetTable, TableFormat

#: Tables that only Taskyard reads are plain Parquet. Their names begin so.
PRIVATE: Final = "_"

#: Where a run keeps its lock on a local disk, and files until its end.
WORK: Final = "_work"


class TableStore:
    """The tables under one location, as one run left them."""

    def __init__(self, out: Location, manifest: Manifest) -> None:
        self.out, self.manifest = out, manifest

    @classmethod
    def open(cls, out: Location, run: int | None = None) -> "TableStore":
        """Open tables to read them, as they are or as they were after an earlier run."""
        manifest = read_manifest(out, run)
        if manifest is None or not manifest.tables:
            past = "" if run is None else f" of run {run}"
            raise UnusableFile(
                f"{out}: no tables{past} found (create them with `taskyard pipeline history "
                f"--out {out}`)"
            )
        return cls(out, manifest)

    @classmethod
    def create_or_open(cls, out: Location, table_format: str | None = None) -> "TableStore":
        """Open tables to write them. The format is chosen by the first run."""
        manifest = read_manifest(out)
        if manifest is None:
            _check_empty(out)
            return cls(out, Manifest(table_format or DELTA, VERSION))
        if table_format not in (None, manifest.format):
            raise UnusableFile(
                f"{out}: its tables are {manifest.format}, not {table_format} (use another --out)"
            )
        return cls(out, manifest)

    def begin(self) -> None:
        """Mark the directory as one of tables, before its first files are written."""
        if not self.manifest.run:
            write_manifest(self.out, self.manifest)

    def directory(self, table: str) -> Location:
        return self.out.child(table)

    def files(self, table: str) -> list[DataFile]:
        """List the files of a table. Empty if the table does not exist."""
        version = self.manifest.tables.get(table)
        return [] if version is None else self._format(table).files(version)

    def names(self, table: str) -> list[str]:
        """List the names of the files of a table. Those of private tables keep their order."""
        return [file.name for file in self.files(table)]

    def uris(self, table: str) -> list[str]:
        directory = self.directory(table)
        return [f"{directory}/{file.name}" for file in self.files(table)]

    def commit(
        self,
        changes: Mapping[str, Change],
        brokers: Mapping[str, BrokerMark],
        on_step: Callable[[str], None] = lambda _step: None,
    ) -> None:
        """Commit the next version of the tables, then replace the manifest.

        A table without changes keeps its version.
        """
        marks = {name: f"{mark.journal} {mark.last}" for name, mark in sorted(brokers.items())}
        tables = dict(self.manifest.tables)
        for name, change in changes.items():
            if name in tables and not change.add and not change.remove:
                continue
            tables[name] = self._format(name).commit(tables.get(name), change, marks)
            on_step(f"{name} committed")
        manifest = msgspec.structs.replace(
            self.manifest,
            run=self.manifest.run + 1,
            brokers={**self.manifest.brokers, **brokers},
            tables=tables,
        )
        write_manifest(self.out, manifest)
        self.manifest = manifest

    def vacuum(self, retention: dt.timedelta) -> int:
        """Remove files that no run within the retention time used. Returns their number.

        Earlier runs can't be read any more.
        """
        kept, dropped = earlier_runs(self.out, retention)
        manifests = [self.manifest, *(read_manifest(self.out, run) for run in kept)]
        removed = 0
        for name in self.manifest.tables:
            versions = [one.tables.get(name) for one in manifests if one is not None]
            used = frozenset(file.name for one in versions if one for file in one.files)
            removed += self._format(name).vacuum(used, retention)
        for run in dropped:
            remove_manifest(self.out, run)
        return removed

    def _format(self, table: str) -> TableFormat:
        if self.manifest.format == PARQUET or table.startswith(PRIVATE):
            return ParquetTable(self.directory(table))
        return _delta_table(self.directory(table))


def _delta_table(directory: Location) -> TableFormat:
    try:
        from taskyard.pipeline.store.delta_table import DeltaFormat  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise NotInstalled(
            "Delta tables: the package deltalake is missing (install taskyard[spark], or use "
            "--format parquet)"
        ) from error
    return DeltaFormat(directory)


def _check_empty(out: Location) -> None:
    others = [name for name in out.names() if name != WORK]
    if others:
        raise UnusableFile(
            f"{out}: not a directory of tables, it contains {others[0]!r} (use another --out)"
        )
