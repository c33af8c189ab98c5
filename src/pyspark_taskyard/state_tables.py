"""Tables read from a state directory without its lock, so a broker may run there.

History files never change. Journal rows after them are converted as an export would. Tasks and
results come from the ledger, recovered as a broker would, and from the index of ended tasks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_taskyard.tables import View, results_batch, tasks_batch
from taskyard.broker.results import ResultLoader
from taskyard.broker.rows import Budget, DecodedRows
from taskyard.core import effects
from taskyard.core.blobs import Blob, Content, blob_name
from taskyard.core.events import ListRequested, Scope
from taskyard.core.model import shown
from taskyard.core.records import Finished
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.errors import UserError
from taskyard.journal import blobs, history_arrow, history_reader, recovery, state_check, witness
from taskyard.journal.archive import Archive
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.state_store import open_reader
from taskyard.pipeline.sources import history
from taskyard.wire import views as wire_views

#: The tables that history files have.
HISTORY: Final = ("events", "edges")

#: Tasks in one batch.
_PAGE: Final = 1000

_ENDED: Final = (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)


def broker_of(state: Path) -> str:
    """Return the id of a state's broker."""
    return history.broker_of(state)


def require_distinct(states: Sequence[Path]) -> None:
    """Raise UserError if one is no state, or if two are of the same broker."""
    for state in states:
        state_check.require_state(state)
    history.require_distinct(states)


def files(state: Path) -> tuple[list[Path], int]:
    """Return the history files, and the last row in them."""
    whole = history_reader.parts(state)
    return [part.path(state) for part in whole], whole[-1].last if whole else 0


def read_tail(state: Path, table: str, after: int) -> Iterator[pa.RecordBatch]:
    """Read the state's content after a journal row. Tasks and results are read whole."""
    if table not in HISTORY:
        return _READERS[table](state)
    return _read_rows(state, table, after)


def _read_rows(state: Path, table: str, after: int) -> Iterator[pa.RecordBatch]:
    """Read history files that were added since, and the rows after them."""
    with tempfile.TemporaryDirectory(prefix="taskyard-rows-") as scratch:
        for part, path in history_reader.find(state, Path(scratch)).items():
            if part.first > after:
                yield from history_arrow.batches(path, table)


def last_record(state: Path) -> int:
    """Return the number of the newest record of a state's journal."""
    state_check.require_state(state)
    witnessed = witness.read(state)
    return 0 if witnessed is None else witnessed[1].record


def only_campaign(
    batches: Iterable[pa.RecordBatch], campaign: str | None
) -> Iterator[pa.RecordBatch]:
    """Filter the rows of one campaign, or return all."""
    for batch in batches:
        if campaign is None:
            yield batch
        elif "campaign" not in batch.schema.names:
            raise UserError("edges have no campaign (join them with the events instead)")
        else:
            yield batch.filter(pc.equal(batch["campaign"], campaign))


# Tasks and results.


def _read_tasks(state: Path) -> Iterator[pa.RecordBatch]:
    with _StateReader(state) as reader:
        for views in reader.pages():
            yield tasks_batch(views)


def _read_results(state: Path) -> Iterator[pa.RecordBatch]:
    with _StateReader(state) as reader:
        for views in reader.pages():
            ended = [view for view in views if TaskState[view["state"].upper()] in _ENDED]
            yield results_batch(ended, [reader.result(view) for view in ended])


_READERS: Final[dict[str, Callable[[Path], Iterator[pa.RecordBatch]]]] = {
    "tasks": _read_tasks,
    "results": _read_results,
}


class _StateReader:
    """A state as a broker has it in memory."""

    def __init__(self, state: Path) -> None:
        state_check.require_state(state)
        witnessed = witness.read(state)
        if witnessed is None:
            raise UserError(f"{state}: no journal, only its history (read the table events)")
        self._reader = open_reader(state, *witnessed)
        self._index = Archive(state)
        self._blobs = BlobFiles(state / blobs.FOLDER)
        self._ledger = recovery.open_ledger(state, self._reader)
        self._scheduler = Scheduler(self._ledger)
        rows = DecodedRows(self._reader)
        self._results = ResultLoader(rows, self._index, self._ledger, self._blobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._index.close()
        self._reader.close()

    def pages(self) -> Iterator[list[View]]:
        """Yield all tasks: those in memory, then those that a compaction has archived."""
        in_memory = list(self._ledger.tasks)
        for first in range(0, len(in_memory), _PAGE):
            yield self._views(in_memory[first : first + _PAGE])
        known = dict.fromkeys(in_memory)
        names = self._index.names(None, _PAGE)
        while names:
            archived = [name for name in names if name not in known]
            recovery.recall_for(self._ledger, self._index, archived)
            yield self._views(archived)
            self._ledger.archive(archived)
            names = self._index.names(names[-1], _PAGE)

    def _views(self, names: list[bytes]) -> list[View]:
        request = ListRequested(time.monotonic_ns(), b"", Scope(names=tuple(names)), count=_PAGE)
        (page,) = self._scheduler.handle(request)
        assert isinstance(page, effects.TaskPage)  # noqa: S101  # the reply to this request
        return [{"key": view.name, **_fields(wire_views.task(view))} for view in page.views]

    def result(self, view: View) -> Content | None:
        return whole(self._blobs, self._results.result_of(view["key"], Budget()))


def whole(files: BlobFiles, kept: Content | None) -> Content | None:
    """Return a result with all of its bytes, if the directory has them."""
    if not isinstance(kept, Blob) or not kept.digest:
        return kept
    found = files.read(blob_name(kept), 0, kept.length)
    return kept if found is None else found[0]


class StateResults:
    """Looks up results by the records that hold them, without a ledger. Implements `ResultLookup`.

    They are in the journal's row, or in the index if a compaction has trimmed the row.
    """

    def __init__(self, state: Path) -> None:
        state_check.require_state(state)
        witnessed = witness.read(state)
        self._reader = None if witnessed is None else open_reader(state, *witnessed)
        self._index = Archive(state)
        self._blobs = BlobFiles(state / blobs.FOLDER)

    def close(self) -> None:
        self._index.close()
        if self._reader is not None:
            self._reader.close()

    def find(self, ended: list[View]) -> list[Content | None]:
        """Return the result of each task that is done and has not run again since."""
        done = [view for view in ended if view["state"] == "done"]
        found: dict[tuple[int, str], Content] = {}
        for number in dict.fromkeys(view["record"] for view in done):
            names = [view["task"] for view in done if view["record"] == number]
            found |= {(number, name): result for name, result in self._results_at(number, names)}
        results: list[Content | None] = []
        for view in ended:
            kept = found.get((view["record"], view["task"]))
            results.append(whole(self._blobs, kept))
        return results

    def _results_at(self, number: int, names: list[str]) -> Iterator[tuple[str, Content]]:
        """Yield the results that a record holds of these tasks."""
        row = None if self._reader is None else self._reader.row_of(number)
        if row is not None:
            record = recovery.records_of(row, row.record_first - 1)[number - row.record_first]
            keys = record.names if isinstance(record, Finished) else []
            yield from zip(map(shown, keys), recovery.results_in(record, number, keys), strict=True)
            return
        for ended in self._index.find([name.encode() for name in names]):
            kept = self._index.streams(ended.name) if ended.record == number else None
            if kept is not None:
                yield shown(ended.name), kept[0]


def _fields(task: wire_views.Task) -> View:
    return {name: getattr(task, name) for name in task.__struct_fields__}
