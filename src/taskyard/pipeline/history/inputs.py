"""Inputs of a run: copies of history files, divided by task if they are many.

A share folds the events of some tasks. It would read every file whole to find them. So large files
are divided once: a scratch file with a part for each share.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.journal import history_arrow
from taskyard.journal.history import HistoryPart
from taskyard.pipeline.fold.share import GENERATIONS, share_numbers
from taskyard.pipeline.history.memory import STEPS, Files, Memory
from taskyard.pipeline.history.scratch import ScratchFile, write_scratch
from taskyard.pipeline.store.data_file import DataFile, write_batches
from taskyard.pipeline.store.location import Location

#: The columns that identify the generations of a name.
_NAME: Final = ("campaign", "task")


class CopiedPart(Struct, frozen=True):
    """The files of a part in the tables of events and edges."""

    events: DataFile
    edges: DataFile


class PartCopy(Struct, frozen=True):
    """Copies a history file to files of the tables."""

    state: Path
    part: HistoryPart
    out: Location

    def __call__(self) -> CopiedPart:
        return CopiedPart(*map(self._copy, CopiedPart.__struct_fields__))

    def _copy(self, table: str) -> DataFile:
        found = history_arrow.batches(self.part.path(self.state), table)
        prefix = f"{table}-{self.part.first:012}-{self.part.last:012}"
        return write_batches(self.out.child(table), history_arrow.TABLES[table], found, prefix)


class StepsSplit(Struct, frozen=True):
    """Divides the steps of one file by task: a part for each share."""

    files: Files
    name: str
    scratch: Location
    shares: int

    def __call__(self) -> ScratchFile:
        return write_scratch(self.scratch, self._divided(), STEPS)

    def _divided(self) -> Iterator[pa.Table]:
        steps = self.files.read_one(self.name, STEPS).combine_chunks()
        numbers = share_numbers(steps["task"], self.shares)
        order = np.argsort(numbers, kind="stable")
        ends = np.searchsorted(numbers[order], np.arange(self.shares + 1))
        for first, last in pairwise(ends):
            yield steps.take(pa.array(order[first:last]))


class WholeSteps(Struct, frozen=True):
    """All steps: those that an earlier run carried, and new ones."""

    carried: Files
    new: Files

    def read(self) -> tuple[pa.Table, pa.Table]:
        return self.carried.read(STEPS), self.new.read(STEPS)


class SharedSteps(Struct, frozen=True):
    """The steps of one share, from files that are divided."""

    carried: tuple[ScratchFile, ...]
    new: tuple[ScratchFile, ...]
    share: int

    def read(self) -> tuple[pa.Table, pa.Table]:
        return self._read(self.carried), self._read(self.new)

    def _read(self, files: tuple[ScratchFile, ...]) -> pa.Table:
        tables = [file.read(self.share) for file in files]
        return pa.concat_tables([STEPS.empty_table(), *tables]).unify_dictionaries()


def generations_before(new: pa.Table, memory: Memory) -> pa.Table:
    """Return how many generations came before those that are carried or submitted now."""
    listed = memory.read("_generations")
    names = new["task"].filter(pc.equal(new["kind"], "submitted"))
    if not len(names):
        return listed
    schema = pa.schema([GENERATIONS.field(name) for name in _NAME] + [("generation", pa.int64())])
    final = pa.concat_tables(memory[table].read(schema) for table in ("_places", "_unplaced"))
    is_again = pc.is_in(final["task"], value_set=pc.unique(names))
    again = final.filter(is_again).group_by([*_NAME]).aggregate([("generation", "max")])
    is_listed = pc.is_in(again["task"], value_set=pc.unique(listed["task"]))
    again = again.filter(pc.invert(is_listed)).rename_columns(GENERATIONS.names)
    return pa.concat_tables([listed, again.cast(GENERATIONS)])
