"""`pipeline history`: turn the exported history into tables, incrementally.

A run takes the history files after the last one that the tables include, and the memory of the last
run: whatever may still change. It appends rows that no later event can change, and replaces all
others. So its cost depends on what is new or open, not on the whole history.

Steps write new files. The job commits them with the last journal row that they include, and
replaces the manifest last. A run that is killed at any point leaves files that nobody reads. The
next run starts again from the manifest, and gives the same tables.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from taskyard.errors import StateLocked, UnusableFile, UserError
from taskyard.journal import (
    history_arrow,
    history_reader,
    schema,
    state_check,
    state_store,
)
from taskyard.journal.history import HistoryPart, check_part
from taskyard.journal.lock import StateLock
from taskyard.pipeline.fold import schemas
from taskyard.pipeline.history.finish import Finish, FinishedFiles
from taskyard.pipeline.history.fold_files import EventsFold, FoldedFiles
from taskyard.pipeline.history.inputs import (
    CopiedPart,
    PartCopy,
    SharedSteps,
    StepsSplit,
    WholeSteps,
)
from taskyard.pipeline.history.memory import MEMORY, Files, FilesMerge, Memory, small_tail
from taskyard.pipeline.share_progress import ShareFiles, StageCallback, shown_shares
from taskyard.pipeline.share_runner import run_shares
from taskyard.pipeline.sources import history as source
from taskyard.pipeline.store.data_file import DataFile, new_name
from taskyard.pipeline.store.location import Location
from taskyard.pipeline.store.manifest import BrokerMark
from taskyard.pipeline.store.table_formats import Change
from taskyard.pipeline.store.tables import WORK, TableStore

#: Steps that one share folds. Each takes up to a kilobyte of memory.
STEPS_PER_SHARE: Final = 2_000_000

#: A run with fewer is one share. Spark would only add the start of its session.
STEPS_OF_ONE_SHARE: Final = 5_000_000

#: How long files of earlier runs are kept, and after how many runs they are looked for.
KEEP: Final = dt.timedelta(days=7)
RUNS_PER_VACUUM: Final = 10

#: Called with the name of each step. Tests interrupt the job there.
StepCallback = Callable[[str], None]

_BROKER: Final = pa.field("broker", pa.string())

#: Tables of the history files, with their schemas. Their files have no column `broker`.
_COPIED: Final = {
    name: pa.schema([_BROKER, *(field.with_nullable(nullable=True) for field in table)])
    for name, table in history_arrow.TABLES.items()
}
_DERIVED: Final = {
    "attempts": schemas.ATTEMPTS,
    "tasks": schemas.TASKS,
    "workers": schemas.WORKERS,
    "metrics": schemas.METRICS,
    "critical_path": schemas.CRITICAL_PATH,
}

#: Prefixes of the names of files: replaced by every run, and never.
_OPEN: Final = "open"
_FINAL: Final = "final"

#: The table that each share of the fold writes to.
_FOLDED: Final = "attempts"


class HistoryResult(msgspec.Struct):
    """The result of one run. Without parts, nothing was new."""

    #: The last journal row in the tables.
    last: int
    #: History files that were new.
    parts: int
    #: Campaigns with new events.
    campaigns: int


class HistoryPlan(msgspec.Struct):
    """The work of one run."""

    whole: list[HistoryPart]
    new: list[HistoryPart]
    #: New events and steps of earlier runs, about.
    steps: int

    @property
    def is_empty(self) -> bool:
        return not self.new

    @property
    def needs_spark(self) -> bool:
        return self.shares > 1

    @property
    def shares(self) -> int:
        return 1 if self.steps <= STEPS_OF_ONE_SHARE else -(-self.steps // STEPS_PER_SHARE)


def export(state: Path) -> bool:
    """Export the journal to history files.

    Returns False if a broker runs on the state: it exports by its own schedule.
    """
    state_check.require_state(state)
    if not schema.database_url(state) and not (state / schema.FILE_NAME).exists():
        return True
    try:
        with StateLock(state):
            state_store.compact_stopped(state, trims=False)
    except StateLocked:
        return False
    return True


class HistoryJob:
    """One run. Holds the lock of the tables, if they are on a local disk."""

    def __init__(
        self,
        state: Path,
        out: Path | str,
        on_step: StepCallback = lambda _step: None,
        table_format: str | None = None,
        keep: dt.timedelta = KEEP,
    ) -> None:
        # Executors have other working directories.
        self._state, self._on_step, self._keep = state.absolute(), on_step, keep
        self._on_stage: StageCallback | None = None
        self._out = Location.parse(out)
        self._whole = history_reader.parts(state)
        self._broker = source.broker_of(state)
        self._lock = _lock(self._out)
        try:
            self._store = TableStore.create_or_open(self._out, table_format)
            self._mark = self._find_mark()
        except UserError:
            self.close()
            raise
        #: Files that no later run needs. Executors of a killed run may still write to another.
        self._scratch = self._out.child(WORK).child(uuid.uuid4().hex)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _find_mark(self) -> BrokerMark:
        """Return the end of the last run. Raises UserError if it was of another journal."""
        known, journal = self._store.manifest.brokers, source.identity(self._state)
        for mark in known.values():
            if mark.journal and journal and mark.journal != journal:
                raise UnusableFile(f"{self._out}: tables of another journal (use another --out)")
            return mark
        return BrokerMark(journal, 0)

    def plan(self) -> HistoryPlan:
        last = self._mark.last
        for part in self._whole:
            if part.first <= last < part.last:
                raise UnusableFile(
                    f"{self._out}: rows {part.first}..{last} are of another state "
                    "(use another --out)"
                )
        new = [part for part in self._whole if part.first > last]
        if new and last and new[0].first > last + 1:
            raise UnusableFile(
                f"{self._out}: rows {last + 1}..{new[0].first - 1} are in no history file"
            )
        steps = sum(check_part(self._state, part) for part in new)
        steps += sum(file.rows for file in self._store.files("_steps"))
        return HistoryPlan(self._whole, new, steps)

    def outcome(self, plan: HistoryPlan, campaigns: int = 0) -> HistoryResult:
        last = max(self._mark.last, plan.whole[-1].last if plan.whole else 0)
        return HistoryResult(last, len(plan.new), campaigns)

    def run(
        self, spark: SparkSession | None = None, on_stage: StageCallback | None = None
    ) -> HistoryResult:
        """Add new history files to the tables. Without a session, all runs in this process.

        `on_stage` is called with each stage and its rows, also by other threads.
        """
        plan = self.plan()
        self._on_stage = on_stage
        if plan.is_empty:
            return self.outcome(plan)
        self._store.begin()
        try:
            copies = [PartCopy(self._state, part, self._out) for part in plan.new]
            with self._shown("copying the history", plan, len(copies), self._out.child("events")):
                parts = run_shares(spark, copies, self._on_step)
            self._on_step("history copied")
            memory = self._memory()
            finish = Finish(
                self._broker,
                memory,
                self._files("tasks", _FINAL),
                self._files("workers", _FINAL),
                self._files("metrics"),
                self._files("critical_path"),
                _names(self._out.child("events"), [part.events for part in parts]),
                _names(self._out.child("edges"), [part.edges for part in parts]),
                self._mark.time_ns,
            )
            done = self._fold(spark, plan, memory, finish)
            self._on_step("files written")
            self._merge(spark, done)
            self._commit(plan, parts, done)
        finally:
            self._scratch.remove()
        self._on_step("committed")
        if self._store.manifest.run % RUNS_PER_VACUUM == 0:
            self._store.vacuum(self._keep)
        return self.outcome(plan, len(done.campaigns))

    def _fold(
        self, spark: SparkSession | None, plan: HistoryPlan, memory: Memory, finish: Finish
    ) -> FinishedFiles:
        """Fold all shares, and make the tables that depend on several of them."""
        folds = self._folds(spark, plan, memory, finish.events)
        folding = self._shown("folding events", plan, len(folds), self._out.child(_FOLDED), _FINAL)
        if len(folds) == 1:
            # Its tables stay in memory.
            with folding:
                return run_shares(spark, [_WholeRun(folds[0], finish)], self._on_step)[0]
        with folding:
            folded = run_shares(spark, folds, self._on_step)
        self._on_step("events folded")
        if self._on_stage is not None:
            self._on_stage("placing tasks", 0, None)
        return run_shares(spark, [_Rest(folded, finish)], self._on_step)[0]

    def _shown(
        self, stage: str, plan: HistoryPlan, shares: int, directory: Location, prefix: str = ""
    ) -> contextlib.AbstractContextManager[None]:
        """Show the events of the shares that have left a file in a directory."""
        return shown_shares(
            self._on_stage, stage, ShareFiles(directory, shares, plan.steps, prefix)
        )

    def _memory(self) -> Memory:
        names = {table: tuple(self._store.names(table)) for table in MEMORY}
        return Memory(self._out, names)

    def _files(self, table: str, prefix: str = "") -> Files:
        """Return the files of a table whose names begin with a prefix."""
        names = self._store.names(table)
        return Files(
            self._store.directory(table), tuple(name for name in names if name.startswith(prefix))
        )

    def _folds(
        self, spark: SparkSession | None, plan: HistoryPlan, memory: Memory, events: Files
    ) -> list[EventsFold]:
        """Return the shares of the fold. If there are several, their input is divided first."""
        carried, record = memory["_steps"], self._mark.record
        whole = EventsFold(self._broker, self._out, memory, WholeSteps(carried, events), record)
        if plan.shares == 1:
            return [whole]
        splits = [
            StepsSplit(files, name, self._scratch.child("steps"), plan.shares)
            for files in (carried, events)
            for name in files.names
        ]
        with self._shown("dividing events", plan, len(splits), self._scratch.child("steps")):
            files = run_shares(spark, splits, self._on_step)
        self._on_step("steps divided")
        count = len(carried.names)
        divided = tuple(files[:count]), tuple(files[count:])
        return [
            msgspec.structs.replace(
                whole, steps=SharedSteps(*divided, share), scratch=self._scratch.child("folded")
            )
            for share in range(plan.shares)
        ]

    def _merge(self, spark: SparkSession | None, done: FinishedFiles) -> None:
        """Merge small files of rows that never change again, if there are many.

        Places and tasks are merged alike, because their rows belong together.
        """
        merges: list[FilesMerge] = []
        tables: list[str] = []
        for together in (("_places", "tasks"), ("attempts",), ("workers",)):
            found = [*self._store.files(together[0]), *done.files[together[0]]]
            small = small_tail([file for file in found if file.prefix == _FINAL])
            names = tuple(file.name for file in small)
            name = new_name(_FINAL)
            for table in together if names else ():
                files = Files(self._store.directory(table), names)
                merges.append(FilesMerge(files, {**_DERIVED, **MEMORY}[table], name))
                tables.append(table)
        merged = run_shares(spark, merges, self._on_step)
        for table, merge, file in zip(tables, merges, merged, strict=True):
            old = {*merge.files.names}
            kept = [one for one in done.files[table] if one.name not in old]
            done.files[table] = [*kept, file]
            done.merged[table] = old

    def _commit(self, plan: HistoryPlan, parts: Sequence[CopiedPart], done: FinishedFiles) -> None:
        """Commit all files with the rows that they include."""
        copied = {
            "events": [part.events for part in parts],
            "edges": [part.edges for part in parts],
        }
        changes = {
            name: Change(table, copied[name], partition={_BROKER.name: self._broker})
            for name, table in _COPIED.items()
        }
        for name, table in {**_DERIVED, **MEMORY}.items():
            add, replaced = done.files.get(name, []), done.replaced.get(name)
            if replaced is None:
                replaced = {one for one in self._store.names(name) if one.startswith(_OPEN)}
            replaced |= done.merged.get(name, set())
            changes[name] = Change(table, add, frozenset(replaced))
        mark = BrokerMark(
            self._mark.journal, plan.new[-1].last, max(self._mark.record, done.record), done.time_ns
        )
        self._store.commit(changes, {self._broker: mark}, self._on_step)
        self._mark = mark


class _WholeRun(msgspec.Struct, frozen=True):
    """All steps of a run in one process."""

    fold: EventsFold
    finish: Finish

    def __call__(self) -> FinishedFiles:
        return self.finish([self.fold()])


class _Rest(msgspec.Struct, frozen=True):
    """The steps after the fold."""

    folded: list[FoldedFiles]
    finish: Finish

    def __call__(self) -> FinishedFiles:
        return self.finish(self.folded)


def _lock(out: Location) -> StateLock | None:
    if not out.is_local:
        return None
    try:
        return StateLock(Path(out.uri) / WORK)
    except StateLocked as error:
        raise StateLocked(f"{out}: another process is writing to it") from error


def _names(directory: Location, files: Iterable[DataFile]) -> Files:
    return Files(directory, tuple(file.name for file in files))
