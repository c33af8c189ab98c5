"""The history of a state as DataFrames: its files, and journal rows after them.

Only reads, and takes no lock, so a broker may run. Spark reads Parquet files in place. Row files
and later rows of the journal are copied as Parquet to a scratch directory of the caller, which
keeps it while the frames are used and removes it then. Damage and gaps are refused with the
journal's own errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import DataFrame, SparkSession

from taskyard.core.apply import apply
from taskyard.errors import JournalDamaged, UnusableFile, UnusableState
from taskyard.journal import (
    history,
    history_rows,
    parquet_file,
    recovery,
    schema,
    state_check,
    witness,
)
from taskyard.journal.history import HistoryPart, PartWriter
from taskyard.journal.reader import JournalReader
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import EDGES, EVENTS, Dataset
from taskyard.pipeline.files import run_shares
from taskyard.pipeline.layout import spark_read_path

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

#: A broker that compacts removes rows under a reader. The next try finds them in files.
_READ_TRIES_MAX: Final = 3


class HistoryFrames(msgspec.Struct, frozen=True):
    """The events and edges of a history."""

    events: DataFrame
    edges: DataFrame
    #: The last journal row that is included. 0 if there is none.
    last: int


def read(spark: SparkSession, state: Path, scratch: Path) -> HistoryFrames:
    """Read the events and edges of a state: its history files, and the rows after them."""
    for attempt in range(1, _READ_TRIES_MAX + 1):
        try:
            whole = parts(state)
            copied = export_tail(state, whole, scratch)
        except JournalDamaged:
            if attempt == _READ_TRIES_MAX:
                raise
        else:
            places = [(state, whole), (scratch, [copied] if copied else [])]
            return _frames(spark, places, scratch)
    raise AssertionError  # the last try raises


def parts(state: Path) -> list[HistoryPart]:
    """List the pairs of history files of a state. Raises JournalDamaged for gaps or damage."""
    require_state(state)
    trimmed = _trimmed_row(state)
    whole, _ = history.parts(state)
    folder = state / history.FOLDER
    gaps = history.gaps(whole, trimmed)
    if gaps:
        raise JournalDamaged(f"{folder}: {'; '.join(gaps)}", history.gap_hint(whole, trimmed or 0))
    if trimmed and (not whole or whole[-1].last < trimmed):
        first = whole[-1].last + 1 if whole else 1
        raise JournalDamaged(
            f"{folder}: rows {first}..{trimmed} are trimmed and in no history file",
            "restore the files from a backup",
        )
    for part in whole:
        history.check_part(state, part, trimmed or 0)
    return whole


def require_state(state: Path) -> None:
    if not state.is_dir() or not state_check.has_journal(state):
        raise UnusableState(
            f"{state}: not a state directory, it has no journal (use --state DIR, the broker's)"
        )


def identity(state: Path) -> str:
    """Return the random name of a state's journal. Empty for a history without its journal."""
    witnessed = witness.read(state)
    return witnessed[0].hex() if witnessed else ""


def _trimmed_row(state: Path) -> int | None:
    """Return the last row that was trimmed from the journal. None if there is no journal."""
    witnessed = witness.read(state)
    if witnessed is None or not (state / schema.FILE_NAME).exists():
        return None
    with JournalReader(state, *witnessed) as reader:
        return reader.anchor.sequence


def export_tail(state: Path, whole: list[HistoryPart], scratch: Path) -> HistoryPart | None:
    """Write the rows after all history files to a pair of row files under `scratch`.

    None if there are no such rows. Raises JournalDamaged, also if a broker trims the journal
    meanwhile.
    """
    witnessed = witness.read(state)
    reached = whole[-1].last if whole else 0
    if witnessed is None or witnessed[1].sequence <= reached:
        return None
    with JournalReader(state, *witnessed) as reader:
        ledger, recovery_base = recovery.recovery_base(state, reader, reached)
        writer = PartWriter(scratch)
        for row in reader.rows(recovery_base):
            for record in recovery.records_of(row, ledger.record):
                if row.sequence <= reached:
                    apply(ledger, record)
                else:
                    history_rows.write_rows(
                        ledger, row.sequence, record, writer.events, writer.edges
                    )
                    writer.flush_if_full()
        copied = HistoryPart(reached + 1, reader.head.sequence)
        writer.finish(copied)
    return copied


def _frames(
    spark: SparkSession, places: list[tuple[Path, list[HistoryPart]]], scratch: Path
) -> HistoryFrames:
    files: dict[str, list[Path]] = {"events": [], "edges": []}
    last = 0
    for directory, found in places:
        for part in found:
            last = part.last
            for table, path in part.paths(directory).items():
                files[table].append(path)
    return _read_files(spark, files["events"], files["edges"], scratch, last)


def _read_files(
    spark: SparkSession, events: list[Path], edges: list[Path], scratch: Path, last: int = 0
) -> HistoryFrames:
    """Read history files of either kind. Row files are first copied as Parquet."""
    copies = {
        path: scratch / f"{path.stem}.{history.PARQUET}"
        for path in (*events, *edges)
        if path.suffix == f".{history.ROWS}"
    }
    if copies:
        scratch.mkdir(parents=True, exist_ok=True)
    run_shares(spark, [RowFileCopy(path, copy) for path, copy in copies.items()])
    return HistoryFrames(
        frame(spark, EVENTS, [copies.get(path, path) for path in events]),
        frame(spark, EDGES, [copies.get(path, path) for path in edges]),
        last,
    )


class RowFileCopy(msgspec.Struct, frozen=True):
    """A row file to copy to a Parquet file."""

    source: Path
    target: Path

    def __call__(self) -> None:
        """Write the Parquet file. A second try by Spark writes the same file."""
        parquet_file.write(self.source, self.target)


def frame(spark: SparkSession, dataset: Dataset, files: list[Path]) -> DataFrame:
    """Read a dataset from Parquet files. Without files it is empty."""
    if not files:
        return dataset.empty(spark)
    found = spark.read.schema(dataset.schema).parquet(*map(spark_read_path, files))
    return dataset.check(found)


def read_directory(spark: SparkSession, directory: Path, scratch: Path) -> HistoryFrames:
    """Read the history in a directory, without later rows of a journal.

    It may be STATE, STATE/history, a copy of that, or the tables of `pipeline history`.
    """
    if (directory / EVENTS.name).is_dir():
        events, edges = (tables.read(spark, directory, one) for one in (EVENTS, EDGES))
        return HistoryFrames(events, edges, 0)
    files = {table: _history_files(directory, table) for table in ("events", "edges")}
    if directory.name == history.FOLDER and files["events"]:
        return _frames(spark, [(directory.parent, parts(directory.parent))], scratch)
    if (directory / history.FOLDER).is_dir():
        return _frames(spark, [(directory, parts(directory))], scratch)
    if not files["events"]:
        raise UnusableFile(
            f"{directory}: no history found (use the folder {history.FOLDER} of a state "
            "directory, or the output of `taskyard pipeline history`)"
        )
    return _read_files(spark, files["events"], files["edges"], scratch)


def _history_files(folder: Path, table: str) -> list[Path]:
    """List the history files of a table. A Parquet file replaces a row file of the same rows."""
    found: dict[HistoryPart, Path] = {}
    for path in sorted(folder.glob(f"{table}-*"), key=lambda path: path.suffix, reverse=True):
        part = history.part_of(path.name)
        if part is not None:
            found[part] = path
    return [found[part] for part in sorted(found)]


def size_bytes(directory: Path) -> int:
    """Return the approximate size of the files to read."""
    found = [directory] if directory.is_file() else directory.rglob("*")
    suffixes = (f".{history.PARQUET}", f".{history.ROWS}", ".sqlite")
    return sum(path.stat().st_size for path in found if path.suffix in suffixes)
