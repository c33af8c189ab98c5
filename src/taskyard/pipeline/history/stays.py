"""Stays of workers, from files to files: joins, exits and attempts in, workers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from msgspec import Struct

from taskyard.pipeline.fold import schemas
from taskyard.pipeline.fold.stays import CarriedStays, fold_stays, member_rows
from taskyard.pipeline.history.fold_files import FoldedFiles
from taskyard.pipeline.history.memory import (
    MEMBERS,
    Files,
    Memory,
    coded,
    in_schema,
    selected,
    write_rows,
)
from taskyard.pipeline.store.data_file import DataFile

#: Columns of attempts that stays need.
_WORKED: Final = (
    *("worker", "leased_record", "leased_ns", "queued_ns", "run_ns", "wait_ns", "settled"),
    *("outcome", "own_fault", "reason"),
)
_WORKED_SCHEMA: Final = coded(selected(schemas.ATTEMPTS, _WORKED))


class StayFiles(Struct):
    """The files of workers: stays that are over, and those that may change."""

    workers: list[DataFile]
    workers_open: list[DataFile]
    memory: dict[str, list[DataFile]]
    #: See `FoldedStays`.
    slots_since_ns: int | None


def write_stays(
    broker: str, memory: Memory, workers: Files, events: Files, folded: Sequence[FoldedFiles]
) -> StayFiles:
    """Fold new events of workers, and the attempts of this run."""
    members = [_members(events, name) for name in events.names]
    found = fold_stays(
        pa.concat_tables([MEMBERS.empty_table(), *members]).unify_dictionaries(),
        _worked(folded, "attempts"),
        _worked(folded, "attempts_open"),
        broker,
        CarriedStays(memory.read("_members"), memory.read("_work"), memory.read("_stays")),
    )
    carried = found.carried
    return StayFiles(
        write_rows(workers.directory, found.workers, schemas.WORKERS, "final"),
        write_rows(workers.directory, found.workers_open, schemas.WORKERS, "open"),
        {
            "_members": memory.write("_members", carried.members),
            "_work": memory.write("_work", carried.work),
            "_stays": memory.write("_stays", carried.before),
        },
        found.slots_since_ns,
    )


def _members(events: Files, name: str) -> pa.Table:
    """Read joins, exits and last events of workers. They are few."""
    rows = member_rows(events.read_one(name, selected(MEMBERS, ("worker", "kind"))))
    return events.read_rows(name, rows, MEMBERS)


def _worked(folded: Sequence[FoldedFiles], name: str) -> pa.Table:
    tables = [in_schema(one.table(name, _WORKED), _WORKED_SCHEMA) for one in folded]
    return pa.concat_tables([_WORKED_SCHEMA.empty_table(), *tables]).unify_dictionaries()
