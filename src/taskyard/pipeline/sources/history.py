"""The history of one or several states as DataFrames: files, and journal rows after them.

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
from pyspark.sql import functions as f

from taskyard.core.apply import apply
from taskyard.errors import JournalDamaged, UnusableFile, UnusableState, UserError
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
from taskyard.pipeline.datasets import EDGES, EVENTS, Dataset, of_broker
from taskyard.pipeline.layout import spark_read_path
from taskyard.pipeline.share_runner import run_shares
from taskyard.pipeline.store.location import Location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

#: A broker that compacts removes rows under a reader. The next try finds them in files.
_READ_TRIES_MAX: Final = 3


class HistoryFrames(msgspec.Struct, frozen=True):
    """The events and edges of one broker's history, both with the column `broker`."""

    events: DataFrame
    edges: DataFrame
    #: The last journal row that is included. 0 if there is none.
    last: int = 0
    #: As in the column `broker`.
    broker: str = ""
    directory: str = ""

    def campaigns(self) -> list[str]:
        """List the campaigns, "" for tasks outside any."""
        submitted = self.events.where(f.col("kind") == "submitted")
        named = submitted.select("campaign").distinct().toArrow()
        return sorted(named.column("campaign").to_pylist())


def read_all(
    spark: SparkSession, directories: Sequence[Path], scratch: Path, *, are_states: bool
) -> list[HistoryFrames]:
    """Read the histories of several brokers, each from a state or with `read_directory`."""
    reader = read if are_states else read_directory
    return [
        reader(spark, directory, scratch / str(number))
        for number, directory in enumerate(directories)
    ]


def require_distinct(directories: Sequence[Path]) -> None:
    """Raise UserError if two directories have the history of the same broker."""
    known: dict[str, Path] = {}
    for directory in directories:
        broker = broker_of(directory)
        if broker in known:
            raise UserError(
                f"{known[broker]}, {directory}: histories of the same broker (give one of them)"
            )
        known[broker] = directory


def broker_of(directory: Path) -> str:
    """Return the id of the broker whose history is in a directory.

    That is the id of its journal, or the path of a history without its journal.
    """
    if tables.are_tables(directory):
        return tables.broker_of(Location.parse(directory))
    state = directory.parent if directory.name == history.FOLDER else directory
    return identity(state) or str(directory.resolve())


def labels(directories: Sequence[str]) -> list[str]:
    """Return a short name for each broker: the part of its path that differs from others."""
    parts = [Path(one).absolute().parts for one in directories]
    while len({one[-1] for one in parts}) == 1 and len(parts) > 1 and min(map(len, parts)) > 1:
        parts = [one[:-1] for one in parts]
    for count in range(1, max(map(len, parts), default=0)):
        if len({one[-count:] for one in parts}) == len(parts):
            return ["/".join(one[-count:]) for one in parts]
    return [str(Path(*one)) for one in parts]


def _of_broker(
    directory: Path, events: DataFrame, edges: DataFrame, last: int = 0
) -> HistoryFrames:
    broker = broker_of(directory)
    return HistoryFrames(
        of_broker(events, broker), of_broker(edges, broker), last, broker, str(directory)
    )


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
            return _of_broker(state, *_frames(spark, places, scratch))
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


#: Events, edges, and the last journal row in them.
_Frames = tuple[DataFrame, DataFrame, int]


def _frames(
    spark: SparkSession, places: list[tuple[Path, list[HistoryPart]]], scratch: Path
) -> _Frames:
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
) -> _Frames:
    """Read history files of either kind. Row files are first copied as Parquet."""
    copies = {
        path: scratch / f"{path.stem}.{history.PARQUET}"
        for path in (*events, *edges)
        if path.suffix == f".{history.ROWS}"
    }
    if copies:
        scratch.mkdir(parents=True, exist_ok=True)
    run_shares(spark, [RowFileCopy(path, copy) for path, copy in copies.items()])
    return (
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
    if tables.are_tables(directory):
        events, edges = (tables.read(spark, directory, one) for one in (EVENTS, EDGES))
        return HistoryFrames(
            events, edges, 0, tables.broker_of(Location.parse(directory)), str(directory)
        )
    files = {table: _history_files(directory, table) for table in ("events", "edges")}
    if directory.name == history.FOLDER and files["events"]:
        places = [(directory.parent, parts(directory.parent))]
        return _of_broker(directory, *_frames(spark, places, scratch))
    if (directory / history.FOLDER).is_dir():
        return _of_broker(directory, *_frames(spark, [(directory, parts(directory))], scratch))
    if not files["events"]:
        raise UnusableFile(
            f"{directory}: no history found (use the folder {history.FOLDER} of a state "
            "directory, or the output of `taskyard pipeline history`)"
        )
    return _of_broker(directory, *_read_files(spark, files["events"], files["edges"], scratch))


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
