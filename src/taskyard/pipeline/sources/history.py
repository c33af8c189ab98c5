"""The history of one or several brokers as rows: files of states, and journal rows after them.

Only reads, and takes no lock, so a broker may run. Journal rows that are in no file yet are written
to a file in a scratch directory of the caller, which keeps it while the rows are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from taskyard.errors import UnusableFile, UserError
from taskyard.journal import history, history_arrow, history_reader, witness
from taskyard.journal.row_file import RowFile
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import EVENTS
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.tables import TableStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Files with rows of a history.
_SUFFIXES: Final = (".rows", ".parquet", ".sqlite")


class HistoryFiles(msgspec.Struct, frozen=True):
    """The files of one broker's history, found without Spark."""

    #: As in the column `broker`.
    broker: str
    directory: str
    #: Row files, in order. None are needed beside `tables`.
    paths: list[Path] = []
    #: The tables of `pipeline history`, if the directory has them.
    tables: Path | None = None

    @property
    def size_bytes(self) -> int:
        """The approximate size of the files to read."""
        if self.tables is not None:
            return size_bytes(self.tables)
        return sum(path.stat().st_size for path in self.paths)

    def read(self, table: str) -> pa.Table:
        """Read all rows of events or edges into memory."""
        return history_arrow.read_table(self.paths, table)

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
    for path in files.paths:
        yield from history_arrow.batches(path, EVENTS.name, names)
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


def find(state: Path, scratch: Path) -> HistoryFiles:
    """Find the files of a state. Rows after them are put in `scratch`."""
    return _files(state, [*history_reader.find(state, scratch).values()])


def _files(directory: Path, paths: list[Path]) -> HistoryFiles:
    return HistoryFiles(broker_of(directory), str(directory), paths)


def identity(state: Path) -> str:
    """Return the random name of a state's journal. Empty for a history without its journal."""
    witnessed = witness.read(state)
    return witnessed[0].hex() if witnessed else ""


def find_directory(directory: Path, _scratch: Path) -> HistoryFiles:
    """Find the history in a directory, without later rows of a journal.

    It may be STATE, STATE/history, a copy of that, or the tables of `pipeline history`.
    """
    if tables.are_tables(directory):
        return HistoryFiles(broker_of(directory), str(directory), tables=directory)
    is_folder = directory.name == history.FOLDER and history.parts(directory.parent)
    state = directory.parent if is_folder else directory
    if (state / history.FOLDER).is_dir():
        return _files(directory, [part.path(state) for part in history_reader.parts(state)])
    paths = sorted(directory.glob("*.rows"))
    if not paths:
        raise UnusableFile(
            f"{directory}: no history found (use the folder {history.FOLDER} of a state "
            "directory, or the output of `taskyard pipeline history`)"
        )
    for path in paths:
        RowFile(path).close()
    return _files(directory, paths)


def size_bytes(directory: Path) -> int:
    """Return the approximate size of the files to read."""
    found = [directory] if directory.is_file() else directory.rglob("*")
    return sum(path.stat().st_size for path in found if path.suffix in _SUFFIXES)
