"""The directory of tables that `pipeline history` keeps: where each row lies, and who may write.

    OUT/TABLE/campaign_key=KEY/day=YYYY-MM-DD/*.parquet
    OUT/_work/...                                        not for readers: no tool looks into it

Owns marks and renames; `layout` has the names. Knows nothing of Spark but columns, and nothing of
what tables mean.
"""

import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from taskyard.errors import StateLocked, UserError
from taskyard.journal.history import HistoryPart
from taskyard.journal.lock import StateLock
from taskyard.pipeline.datasets import Dataset
from taskyard.pipeline.layout import (
    KEY,
    NO_CAMPAIGN,
    NO_DAY,
    campaign_key,
    folder,
    row_range,
    spark_read_path,
)

_WORK: Final = "_work"

#: What the tables hold, and how; others are not gone on with.
_VERSION: Final = 4

_MARK = re.compile(r"(\d{12,})-(\d{12,})")

#: Called with the name of each step that is taken, for tests that end it there.
StepCallback = Callable[[str], None]


def day_column(time: Column) -> Column:
    return f.coalesce(time.cast("date").cast("string"), f.lit(NO_DAY))


def read(
    spark: SparkSession, out: Path, dataset: Dataset, campaign: str | None = None
) -> DataFrame:
    """A table, or one campaign's rows of it. Raises UserError if there are no such tables."""
    if not (out / _WORK).is_dir():
        raise UserError(
            f"there are no tables in {out}: make them with `taskyard pipeline history --out {out}`"
        )
    keys = None if campaign is None else [campaign_key(campaign)]
    frame = read_keys(spark, out, dataset, keys)
    return frame if campaign is None else frame.where(f.col("campaign") == campaign)


def read_keys(
    spark: SparkSession, out: Path, dataset: Dataset, keys: Iterable[str] | None = None
) -> DataFrame:
    """The rows under these keys, or under all; none if there are none."""
    table = out / dataset.name
    found = [table] if keys is None else [table / folder(key) for key in keys]
    places = [spark_read_path(path) for path in found if path.is_dir()]
    if not places:
        return dataset.empty(spark)
    reading = spark.read.schema(dataset.schema).option("recursiveFileLookup", "true")
    return dataset.check(reading.parquet(*places))


class TablesOrigin(msgspec.Struct):
    """Whose history the tables hold."""

    version: int
    journal: str


class Tables:
    """The directory, held by the one process that writes it."""

    def __init__(self, out: Path, journal: str, on_step: StepCallback) -> None:
        self.out = out
        self._work = out / _WORK
        self._on_step = on_step
        try:
            self._lock = StateLock(self._work)
        except StateLocked as error:
            raise UserError(
                f"{out} is being written by another process: wait until it has ended"
            ) from error
        try:
            self._check_origin(journal)
        except UserError:
            self._lock.release()
            raise
        for name in ("dirty", "keys", "parts"):
            (self._work / name).mkdir(exist_ok=True)
        self._clear()  # what a process that was killed has left; it may write on for a moment

    def close(self) -> None:
        self._clear()
        self._lock.release()

    def _clear(self) -> None:
        for name in ("staging", "trash"):
            shutil.rmtree(self._work / name, ignore_errors=True)

    @property
    def checkpoint(self) -> Path:
        return self._work / "checkpoint"

    def _check_origin(self, journal: str) -> None:
        path = self._work / "origin.json"
        if not path.exists():
            strangers = [one.name for one in self.out.iterdir() if one.name != _WORK]
            if strangers:
                raise UserError(
                    f"{self.out} is not empty and holds no tables of ours ({strangers[0]} is in "
                    "it): give another --out"
                )
            self._write(path, msgspec.json.encode(TablesOrigin(_VERSION, journal)))
            return
        origin = msgspec.json.decode(path.read_bytes(), type=TablesOrigin)
        if origin.version != _VERSION:
            raise UserError(
                f"the tables in {self.out} were made by another version of Taskyard: remove it, "
                "and make them anew"
            )
        if journal and origin.journal and origin.journal != journal:
            raise UserError(
                f"the tables in {self.out} are of another state's journal: give another --out, or "
                "remove it"
            )

    def _write(self, path: Path, content: bytes) -> None:
        beside = path.with_name(f".{path.name}.new")
        beside.write_bytes(content)
        beside.rename(path)

    def new_staging(self) -> Path:
        """A directory that nobody else writes to, also no process that was killed."""
        path = self._work / "staging" / uuid.uuid4().hex
        path.mkdir(parents=True)
        return path

    def parts(self) -> list[HistoryPart]:
        """Whose rows are in the tables of events and edges."""
        named = [_MARK.fullmatch(path.name) for path in (self._work / "parts").iterdir()]
        return sorted(HistoryPart(int(one[1]), int(one[2])) for one in named if one)

    def check_parts(self, whole: list[HistoryPart]) -> None:
        """Refuse files that hold rows which came in by another file."""
        known = self.parts()
        for part in whole:
            for other in known:
                if other != part and other.first <= part.last and part.first <= other.last:
                    raise UserError(
                        f"rows {part.first}..{part.last} came into {self.out} by other files than "
                        "those that are there now: remove it, and make the tables anew"
                    )

    def mark_stale(self, campaigns: Iterable[str | None]) -> None:
        """What is computed from these campaigns' rows is out of date."""
        for campaign in campaigns:
            key = campaign_key(campaign)
            named = {campaign, *self.campaigns([key])}
            self._write(self._work / "keys" / key, msgspec.json.encode(list(named)))
            (self._work / "dirty" / key).touch()

    def keys(self) -> list[str]:
        """List the keys of all campaigns."""
        names = sorted(path.name for path in (self._work / "keys").iterdir())
        return [key for key in names if key != NO_CAMPAIGN and not key.startswith(".")]

    def campaigns(self, keys: Iterable[str]) -> list[str | None]:
        """The campaigns that have these keys."""
        found: list[str | None] = []
        for path in (self._work / "keys" / key for key in keys):
            if path.exists():
                found += msgspec.json.decode(path.read_bytes(), type=list[str | None])
        return found

    def clear_stale(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self._work / "dirty" / key).unlink(missing_ok=True)

    def stale_keys(self) -> list[str]:
        return sorted(path.name for path in (self._work / "dirty").iterdir())

    def add(self, staged: Path, tables: Iterable[str], parts: list[HistoryPart]) -> None:
        """Move staged files of these parts to their places. What an earlier try has moved is taken
        away first: it may have been cut into other files."""
        for table in tables:
            files = sorted((staged / table).glob(f"{KEY}=*/*/*.parquet"))
            places = {file: self.out / table / file.relative_to(staged / table) for file in files}
            for directory in sorted({place.parent for place in places.values()}):
                directory.mkdir(parents=True, exist_ok=True)
                for part in parts:
                    for old in directory.glob(f"{row_range(part)}-*.parquet"):
                        old.unlink()
                        self._on_step(f"an older file of {table} removed")
            for file, place in places.items():
                file.rename(place)
                self._on_step(f"a file of {table} moved")
        for part in parts:
            (self._work / "parts" / row_range(part)).touch()
        self._on_step("parts noted")

    def swap(self, staged: Path, table: str, keys: Iterable[str]) -> None:
        """Put what is staged of these keys in place of what is there, or in place of nothing; where
        nothing is staged, what is there is out of date."""
        trash = self._work / "trash" / uuid.uuid4().hex
        trash.mkdir(parents=True)
        for key in keys:
            new, old = staged / table / folder(key), self.out / table / folder(key)
            if old.exists():
                old.rename(trash / key)
                self._on_step(f"old {table} away")
            if new.exists():
                old.parent.mkdir(parents=True, exist_ok=True)
                new.rename(old)
                self._on_step(f"new {table} in place")
        shutil.rmtree(trash)
