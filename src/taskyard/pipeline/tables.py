"""The output directory of `pipeline history`: its files, its lock and its marks.

    OUT/TABLE/campaign_key=KEY/day=YYYY-MM-DD/*.parquet
    OUT/_work/...

Readers never look into `_work`. Owns marks and renames. Knows Spark's columns, but not the meaning
of any table. `layout` has the names.
"""

import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from taskyard.errors import StateLocked, UnusableFile, UserError
from taskyard.journal.history import HistoryPart
from taskyard.journal.lock import StateLock
from taskyard.pipeline.datasets import Dataset, of_broker, united
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
_ORIGIN: Final = "origin.json"

#: Raised whenever the content or format of the tables changes. Other versions are refused.
_VERSION: Final = 4

_MARK = re.compile(r"(\d{12,})-(\d{12,})")

#: Called with the name of each step. Tests interrupt the job there.
StepCallback = Callable[[str], None]


def day_column(time: Column) -> Column:
    return f.coalesce(time.cast("date").cast("string"), f.lit(NO_DAY))


def read(
    spark: SparkSession,
    out: Path | Sequence[Path],
    dataset: Dataset,
    campaign: str | None = None,
) -> DataFrame:
    """Read a table, or the rows of one campaign, with the column `broker`.

    Several directories, one for each broker, are read as one table. Raises UserError if one has no
    tables.
    """
    directories = [out] if isinstance(out, Path) else out
    return united([_read_one(spark, one, dataset, campaign) for one in directories])


def _read_one(spark: SparkSession, out: Path, dataset: Dataset, campaign: str | None) -> DataFrame:
    if not (out / _WORK).is_dir():
        raise UnusableFile(
            f"{out}: no tables found (create them with `taskyard pipeline history --out {out}`)"
        )
    keys = None if campaign is None else [campaign_key(campaign)]
    frame = of_broker(read_keys(spark, out, dataset, keys), broker_of(out))
    return frame if campaign is None else frame.where(f.col("campaign") == campaign)


def broker_of(out: Path) -> str:
    """Return the id of the journal that tables were made from, or their path if it is unknown."""
    path = out / _WORK / _ORIGIN
    found = path.exists() and msgspec.json.decode(path.read_bytes(), type=TablesOrigin).journal
    return found or str(out.resolve())


def read_keys(
    spark: SparkSession, out: Path, dataset: Dataset, keys: Iterable[str] | None = None
) -> DataFrame:
    """Read the rows under these keys, or under all keys."""
    table = out / dataset.name
    found = [table] if keys is None else [table / folder(key) for key in keys]
    places = [spark_read_path(path) for path in found if path.is_dir()]
    if not places:
        return dataset.empty(spark)
    reading = spark.read.schema(dataset.schema).option("recursiveFileLookup", "true")
    return dataset.check(reading.parquet(*places))


class TablesOrigin(msgspec.Struct):
    """The journal that the tables were made from."""

    version: int
    journal: str


class Tables:
    """The directory, locked by the one process that writes to it."""

    def __init__(self, out: Path, journal: str, on_step: StepCallback) -> None:
        self.out = out
        self._work = out / _WORK
        self._on_step = on_step
        try:
            self._lock = StateLock(self._work)
        except StateLocked as error:
            raise StateLocked(f"{out}: another process is writing to it") from error
        try:
            self._check_origin(journal)
        except UserError:
            self._lock.release()
            raise
        for name in ("dirty", "keys", "parts"):
            (self._work / name).mkdir(exist_ok=True)
        self._clear()  # left by a killed process, whose executors may write on for a moment

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
        path = self._work / _ORIGIN
        if not path.exists():
            others = [one.name for one in self.out.iterdir() if one.name != _WORK]
            if others:
                raise UnusableFile(
                    f"{self.out}: not a directory of tables, it contains {others[0]!r} "
                    "(use another --out)"
                )
            self._write(path, msgspec.json.encode(TablesOrigin(_VERSION, journal)))
            return
        origin = msgspec.json.decode(path.read_bytes(), type=TablesOrigin)
        if origin.version != _VERSION:
            raise UnusableFile(
                f"{self.out}: tables of another version of Taskyard (remove the directory and "
                "run again)"
            )
        if journal and origin.journal and origin.journal != journal:
            raise UnusableFile(
                f"{self.out}: tables of another journal (use another --out, or remove the "
                "directory)"
            )

    def _write(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(content)
        temporary.rename(path)

    def new_staging(self) -> Path:
        """Create a directory that no other process writes to, not even a killed one's executors."""
        path = self._work / "staging" / uuid.uuid4().hex
        path.mkdir(parents=True)
        return path

    def parts(self) -> list[HistoryPart]:
        """List the parts whose rows are in the tables of events and edges."""
        named = [_MARK.fullmatch(path.name) for path in (self._work / "parts").iterdir()]
        return sorted(HistoryPart(int(one[1]), int(one[2])) for one in named if one)

    def check_parts(self, whole: list[HistoryPart]) -> None:
        """Raise UserError if a file holds rows that came from another file."""
        known = self.parts()
        for part in whole:
            for other in known:
                if other != part and other.first <= part.last and part.first <= other.last:
                    raise UnusableFile(
                        f"{self.out}: rows {part.first}..{part.last} came from other history files "
                        "(remove the directory and run again)"
                    )

    def mark_stale(self, campaigns: Iterable[str | None]) -> None:
        """Mark everything computed from these campaigns' rows as out of date."""
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
        """List the campaigns that have these keys."""
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
        """Move staged files of these parts to their places.

        First removes the files of an earlier try, which may have been split differently.
        """
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
        """Replace the rows of these keys by the staged ones.

        A key without staged rows ends up empty.
        """
        trash = self._work / "trash" / uuid.uuid4().hex
        trash.mkdir(parents=True)
        for key in keys:
            new, old = staged / table / folder(key), self.out / table / folder(key)
            if old.exists():
                old.rename(trash / key)
                self._on_step(f"old {table} removed")
            if new.exists():
                old.parent.mkdir(parents=True, exist_ok=True)
                new.rename(old)
                self._on_step(f"new {table} in place")
        shutil.rmtree(trash)
