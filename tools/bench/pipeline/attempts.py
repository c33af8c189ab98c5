"""Events to attempts alone, on Spark: the part of `pipeline history` to compare with DuckDB."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.journal.history import FOLDER
from taskyard.pipeline.fold import schemas
from taskyard.pipeline.fold.share import fold_share
from taskyard.pipeline.history.inputs import SharedSteps, StepsSplit
from taskyard.pipeline.history.memory import Files, write_rows
from taskyard.pipeline.jobs.history import STEPS_PER_SHARE
from taskyard.pipeline.share_runner import run_shares
from taskyard.pipeline.store.location import Location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EVENTS_PER_FILE: Final = 1_600_000


class _Attempts(Struct, frozen=True):
    """The attempts of one partition."""

    steps: SharedSteps
    out: Location

    def __call__(self) -> int:
        _, events = self.steps.read()
        found = fold_share(events, "bench").attempts
        return sum(file.rows for file in write_rows(self.out, found, schemas.ATTEMPTS, "final"))


def write(spark: SparkSession, state: Path, out: Path) -> int:
    """Write the attempts of a history of Parquet files, and return their number."""
    folder = Location.parse(state / FOLDER)
    names = tuple(name for name in folder.names() if name.startswith("events-"))
    events = Files(folder, names)
    shares = -(-len(names) * _EVENTS_PER_FILE // STEPS_PER_SHARE)
    scratch = Location.parse(out / uuid.uuid4().hex)
    splits = [StepsSplit(events, name, scratch, shares) for name in names]
    divided = tuple(run_shares(spark, splits))
    inputs = [SharedSteps((), divided, share) for share in range(shares)]
    count = sum(run_shares(spark, [_Attempts(one, Location.parse(out)) for one in inputs]))
    scratch.remove()
    return count
