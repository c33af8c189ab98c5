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
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

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
from taskyard.journal.state_store import open_reader
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import EDGES, EVENTS, Dataset, of_broker
from taskyard.pipeline.share_runner import run_shares
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.tables import TableStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


class HistoryFiles(msgspec.Struct, frozen=True):
    """The files of one broker's history, found without Spark."""

    #: As in the column `broker`.
    broker: str
    directory: str
    #: History files of either kind, in order. None are needed beside `tables`.
    events: list[Path] = []
    edges: list[Path] = []
    #: The last journal row that is included. 0 if there is none.
    last: int = 0
    #: The tables of `pipeline history`, if the directory has them.
    tables: Path | None = None

    @property
    def size_bytes(self) -> int:
        """The approximate size of the files to read."""
        if self.tables is not None:
            return size_bytes(self.tables)
        return sum(path.stat().st_size for path in (*self.events, *self.edges))

    def read(self, table: str) -> pa.Table:
        """Read all rows of events or edges into memory."""
        paths = self.events if table == EVENTS.name else self.edges
        found = [parquet_file.read_table(path) for path in paths]
        return pa.concat_tables([parquet_file.TABLES[table].empty_table(), *found])

    def campaigns(self) -> list[str]:
        """List the campaigns, "" for tasks outside any."""
        found: set[str] = set()
        for batch in _submissions(self):
            submitted = batch.filter(pc.equal(batch["kind"], "submitted"))
            found.update(pc.unique(submitted["campaign"]).to_pylist())
        return sorted(found)


def _submissions(files: HistoryFiles) -> Iterator[pa.RecordBatch]:
    """Read two columns of all events."""
    names = ["kind", "campaign"]
    for path in files.events:
        yield from parquet_file.batches(path, names)
    if files.tables is not None:
        for uri in TableStore.open(Location.parse(files.tables)).uris(EVENTS.name):
            with pq.ParquetFile(uri) as file:
                yield from file.iter_batches(columns=names)


def find_all(directories: Sequence[Path], scratch: Path, *, are_states: bool) -> list[HistoryFiles]:
    """Find the histories of several brokers, each of a state or with `find_directory`."""
    finder = find if are_states else find_directory
    return [finder(one, scratch / str(number)) for number, one in enumerate(directories)]


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


def read(spark: SparkSession, state: Path, scratch: Path) -> HistoryFrames:
    """Read the events and edges of a state: its history files, and the rows after them."""
    return frames_of(spark, find(state, scratch), scratch)


def frames_of(spark: SparkSession, files: HistoryFiles, scratch: Path) -> HistoryFrames:
    """Read the events and edges of a history. Row files are first copied as Parquet."""
    if files.tables is not None:
        events, edges = (tables.read(spark, files.tables, one) for one in (EVENTS, EDGES))
    else:
        events, edges = _read_files(spark, files.events, files.edges, scratch)
    return HistoryFrames(
        of_broker(events, files.broker),
        of_broker(edges, files.broker),
        files.last,
        files.broker,
        files.directory,
    )


def find(state: Path, scratch: Path) -> HistoryFiles:
    """Find the files of a state. Rows after them are copied to `scratch`."""
    for attempt in range(1, _READ_TRIES_MAX + 1):
        try:
            whole = parts(state)
            copied = export_tail(state, whole, scratch)
        except JournalDamaged:
            if attempt == _READ_TRIES_MAX:
                raise
        else:
            places = [(state, whole), (scratch, [copied] if copied else [])]
            return _files(state, places)
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
    has_rows = (state / schema.FILE_NAME).exists() or schema.database_url(state)
    if witnessed is None or not has_rows:
        return None
    with open_reader(state, *witnessed) as reader:
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
    with open_reader(state, *witnessed) as reader:
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


def _files(directory: Path, places: list[tuple[Path, list[HistoryPart]]]) -> HistoryFiles:
    """Return the files of parts, which may be in several directories."""
    found: dict[str, list[Path]] = {"events": [], "edges": []}
    last = 0
    for place, whole in places:
        for part in whole:
            last = part.last
            for table, path in part.paths(place).items():
                found[table].append(path)
    return HistoryFiles(broker_of(directory), str(directory), found["events"], found["edges"], last)


def _read_files(
    spark: SparkSession, events: list[Path], edges: list[Path], scratch: Path
) -> tuple[DataFrame, DataFrame]:
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
    found = spark.read.schema(dataset.schema).parquet(*map(tables.spark_read_path, files))
    return dataset.check(found)


def read_directory(spark: SparkSession, directory: Path, scratch: Path) -> HistoryFrames:
    """Read the history in a directory, without later rows of a journal."""
    return frames_of(spark, find_directory(directory, scratch), scratch)


def find_directory(directory: Path, _scratch: Path) -> HistoryFiles:
    """Find the history in a directory, without later rows of a journal.

    It may be STATE, STATE/history, a copy of that, or the tables of `pipeline history`.
    """
    if tables.are_tables(directory):
        return HistoryFiles(broker_of(directory), str(directory), tables=directory)
    files = {table: _history_files(directory, table) for table in ("events", "edges")}
    if directory.name == history.FOLDER and files["events"]:
        return _files(directory, [(directory.parent, parts(directory.parent))])
    if (directory / history.FOLDER).is_dir():
        return _files(directory, [(directory, parts(directory))])
    if not files["events"]:
        raise UnusableFile(
            f"{directory}: no history found (use the folder {history.FOLDER} of a state "
            "directory, or the output of `taskyard pipeline history`)"
        )
    for path in (*files["events"], *files["edges"]):
        parquet_file.require_format(path)
    return HistoryFiles(broker_of(directory), str(directory), files["events"], files["edges"])


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
