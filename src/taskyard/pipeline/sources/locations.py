"""Where a user says that a history is: a state, a copy of its files, or the tables made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.errors import UserError
from taskyard.journal.history import FOLDER
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import EDGES, EVENTS
from taskyard.pipeline.sources import history
from taskyard.pipeline.sources.history import HistoryFrames

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


def from_state(spark: SparkSession, state: Path, scratch: Path) -> HistoryFrames:
    """All that a state tells, up to now, also while a broker runs on it."""
    return history.read(spark, state, scratch)


def from_history(spark: SparkSession, directory: Path) -> HistoryFrames:
    """What the files in a directory tell: STATE/history, a copy of it, a directory that holds it,
    or the tables of `pipeline history`."""
    if (directory / EVENTS.name).is_dir():
        events, edges = (tables.read(spark, directory, one) for one in (EVENTS, EDGES))
        return HistoryFrames(events, edges, 0)
    if directory.name == FOLDER and any(directory.glob("events-*.parquet")):
        return history.read(spark, directory.parent)
    if (directory / FOLDER).is_dir():
        return history.read(spark, directory)
    files = sorted(directory.glob("events-*.parquet"))
    if not files:
        raise UserError(
            f"there is no history in {directory}: give the folder {FOLDER} of a state directory, "
            "or the tables that `taskyard pipeline history` makes"
        )
    events = history.frame(spark, EVENTS, files)
    edges = history.frame(spark, EDGES, sorted(directory.glob("edges-*.parquet")))
    return HistoryFrames(events, edges, 0)


def size_bytes(directory: Path) -> int:
    """About how much there is to read."""
    found = [directory] if directory.is_file() else directory.rglob("*")
    return sum(path.stat().st_size for path in found if path.suffix in (".parquet", ".sqlite"))
