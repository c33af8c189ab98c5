"""The fold of files: events of some tasks in, data files of attempts out.

The tasks are not complete yet: their places are missing, which depend on tasks of other shares. If
there is one share, its tables stay in memory for the next step. Otherwise they wait in files.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, structs

from taskyard.pipeline.fold import schemas
from taskyard.pipeline.fold.share import FoldedShare, fold_share
from taskyard.pipeline.fold.steps import Carried
from taskyard.pipeline.history.inputs import SharedSteps, WholeSteps, generations_before
from taskyard.pipeline.history.memory import (
    Files,
    Memory,
    coded,
    in_schema,
    selected,
    write_rows,
)
from taskyard.pipeline.history.scratch import ScratchFile, write_scratch
from taskyard.pipeline.store.data_file import DataFile
from taskyard.pipeline.store.location import Location

ATTEMPTS: Final = "attempts"

#: Tables of a share that later steps need, besides attempts, with their schemas.
_LATER: Final = {
    "tasks": coded(schemas.TASKS_WITHOUT_GRAPH),
    "tasks_open": coded(schemas.TASKS_WITHOUT_GRAPH),
    "buckets": schemas.BUCKETS,
    "buckets_open": schemas.BUCKETS,
}
_ATTEMPTS: Final = coded(schemas.ATTEMPTS)


class FoldedFiles(Struct):
    """The files of one share."""

    #: Attempts that ended, and those that are open.
    attempts: list[DataFile]
    attempts_open: list[DataFile]
    #: The memory of the share, by table.
    memory: dict[str, list[DataFile]]
    campaigns: list[str]
    #: Where the attempts are.
    directory: Location
    #: Files that wait for later steps, by table. Empty if the tables are in memory.
    waiting: dict[str, ScratchFile]
    share: FoldedShare | None = None

    def table(self, name: str, columns: tuple[str, ...] | None = None) -> pa.Table:
        """Return one of the tables that later steps need, or some of its columns."""
        if self.share is not None:
            whole: pa.Table = getattr(self.share, name)
            return whole if columns is None else whole.select(columns)
        if name in self.waiting:
            return self.waiting[name].read(columns=columns)
        found: list[DataFile] = getattr(self, name)
        files = Files(self.directory, tuple(file.name for file in found))
        return files.read(_ATTEMPTS if columns is None else selected(_ATTEMPTS, columns))


class EventsFold(Struct, frozen=True):
    """Folds the events of one share. Writes its attempts, and the memory of its steps."""

    broker: str
    out: Location
    memory: Memory
    steps: WholeSteps | SharedSteps
    #: The last record that was folded before.
    record: int
    #: Where the other tables wait. None keeps them in memory.
    scratch: Location | None = None

    def __call__(self) -> FoldedFiles:
        carried, new = self.steps.read()
        before = Carried(carried, generations_before(new, self.memory), self.record)
        share = fold_share(new, self.broker, before)
        attempts = self.out.child(ATTEMPTS)
        made = FoldedFiles(
            write_rows(attempts, share.attempts, schemas.ATTEMPTS, "final"),
            write_rows(attempts, share.attempts_open, schemas.ATTEMPTS, "open"),
            {
                "_steps": self.memory.write("_steps", share.carried.steps),
                "_generations": self.memory.write("_generations", share.carried.generations),
            },
            [name for name in pc.unique(new["campaign"]).to_pylist() if name is not None],
            attempts,
            {},
            share,
        )
        return made if self.scratch is None else self._spilled(made, share, self.scratch)

    def _spilled(self, made: FoldedFiles, share: FoldedShare, scratch: Location) -> FoldedFiles:
        """Leave the tables in files. Attempts are there already."""
        waiting = {}
        for name, schema in _LATER.items():
            rows = in_schema(getattr(share, name), schema).unify_dictionaries()
            waiting[name] = write_scratch(scratch, [rows], schema)
        return structs.replace(made, waiting=waiting, share=None)
