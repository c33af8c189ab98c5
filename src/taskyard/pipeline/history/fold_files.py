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
from taskyard.pipeline.history.inputs import StepsInput, generations_before
from taskyard.pipeline.history.memory import Files, Memory, coded, write_rows
from taskyard.pipeline.store.data_file import DataFile
from taskyard.pipeline.store.location import Location

ATTEMPTS: Final = "attempts"

#: Tables of a share that later steps need, with their schemas.
_LATER: Final = {
    "tasks": coded(schemas.TASKS_WITHOUT_GRAPH),
    "tasks_open": coded(schemas.TASKS_WITHOUT_GRAPH),
    "attempts": coded(schemas.ATTEMPTS),
    "attempts_open": coded(schemas.ATTEMPTS),
    "buckets": schemas.BUCKETS,
    "buckets_open": schemas.BUCKETS,
}


class FoldedFiles(Struct):
    """The files of one share."""

    #: Attempts that ended, and those that are open.
    attempts: list[DataFile]
    attempts_open: list[DataFile]
    #: The memory of the share, by table.
    memory: dict[str, list[DataFile]]
    campaigns: list[str]
    #: Files that wait for later steps, by table. Empty if the tables are in memory.
    waiting: dict[str, Files]
    share: FoldedShare | None = None

    def table(self, name: str, columns: tuple[str, ...] | None = None) -> pa.Table:
        """Return one of the tables that later steps need, or some of its columns."""
        if self.share is not None:
            whole: pa.Table = getattr(self.share, name)
            return whole if columns is None else whole.select(columns)
        schema = _LATER[name]
        wanted = schema if columns is None else pa.schema([schema.field(one) for one in columns])
        return self.waiting[name].read(wanted)


class EventsFold(Struct, frozen=True):
    """Folds the events of one share. Writes its attempts, and the memory of its steps."""

    broker: str
    out: Location
    memory: Memory
    steps: StepsInput
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
            {},
            share,
        )
        return made if self.scratch is None else self._spilled(made, share, self.scratch)

    def _spilled(self, made: FoldedFiles, share: FoldedShare, scratch: Location) -> FoldedFiles:
        """Leave the tables in files. Attempts are there already."""
        waiting = {}
        for name, schema in _LATER.items():
            if name.startswith(ATTEMPTS):
                files: list[DataFile] = getattr(made, name)
                directory = self.out.child(ATTEMPTS)
            else:
                directory = scratch.child(name)
                files = write_rows(directory, getattr(share, name), schema, "share")
            waiting[name] = Files(directory, tuple(file.name for file in files))
        return structs.replace(made, waiting=waiting, share=None)
