"""The directory of tables that `pipeline history` keeps: where each row lies, and who may write.

    OUT/TABLE/campaign_key=KEY/day=YYYY-MM-DD/*.parquet
    OUT/_work/...                                        not for readers: no tool looks into it

A key is made of a campaign's name so that it is safe in a path, whatever bytes the name has; rows
that are of no campaign (workers, pauses) are under the key `yard`. The name itself is in the rows.
Owns paths, marks and renames. Knows nothing of Spark but columns, and nothing of what tables mean.
"""

import hashlib
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
from taskyard.journal.history import Part
from taskyard.journal.lock import StateLock
from taskyard.pipeline import paths
from taskyard.pipeline.datasets import Dataset

#: The key of rows that are of no campaign. No campaign has it: theirs end in a digest.
YARD: Final = "yard"

KEY: Final = "campaign_key"
DAY: Final = "day"

#: Enough of a name to recognise it, and of its digest to tell names apart. Should two names share a
#: key all the same, they share directories, and nothing is lost.
_SLUG_CHARACTERS_MAX: Final = 40
_DIGEST_CHARACTERS: Final = 12

_WORK: Final = "_work"
_MARK = re.compile(r"(\d{12,})-(\d{12,})")

#: Called with the name of each step that is taken, for tests that end it there.
Hook = Callable[[str], None]


def campaign_key(campaign: str | None) -> str:
    """The directory's name for a campaign."""
    if campaign is None:
        return YARD
    slug = re.sub("[^A-Za-z0-9]+", "-", campaign).lower()[:_SLUG_CHARACTERS_MAX].strip("-")
    digest = hashlib.sha256(campaign.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{slug or 'none'}-{digest}"


def key_column(campaign: Column) -> Column:
    """The same as a column."""
    plain = f.lower(f.regexp_replace(campaign, "[^A-Za-z0-9]+", "-"))
    slug = f.btrim(f.left(plain, f.lit(_SLUG_CHARACTERS_MAX)), f.lit("-"))
    digest = f.left(f.sha2(campaign, 256), f.lit(_DIGEST_CHARACTERS))
    named = f.concat(f.when(slug == "", "none").otherwise(slug), f.lit("-"), digest)
    return f.when(campaign.isNull(), f.lit(YARD)).otherwise(named)


def day_column(time: Column) -> Column:
    return f.coalesce(f.date_format(time, "yyyy-MM-dd"), f.lit("unknown"))


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
    found = [table] if keys is None else [table / f"{KEY}={key}" for key in keys]
    places = [paths.read(path) for path in found if path.is_dir()]
    if not places:
        return dataset.empty(spark)
    reading = spark.read.schema(dataset.schema).option("recursiveFileLookup", "true")
    return dataset.check(reading.parquet(*places))


class Origin(msgspec.Struct):
    """Whose history the tables hold."""

    version: int
    journal: str


class Tables:
    """The directory, held by the one process that writes it."""

    def __init__(self, out: Path, journal: str, hook: Hook) -> None:
        self.out = out
        self._work = out / _WORK
        self._hook = hook
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
        for folder in ("dirty", "parts"):
            (self._work / folder).mkdir(exist_ok=True)
        self._clear()  # what a process that was killed has left; it may write on for a moment

    def close(self) -> None:
        self._clear()
        self._lock.release()

    def _clear(self) -> None:
        for folder in ("staging", "trash"):
            shutil.rmtree(self._work / folder, ignore_errors=True)

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
            self._write(path, msgspec.json.encode(Origin(1, journal)))
            return
        origin = msgspec.json.decode(path.read_bytes(), type=Origin)
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

    def parts(self) -> list[Part]:
        """Whose rows are in the tables of events and edges."""
        named = [_MARK.fullmatch(path.name) for path in (self._work / "parts").iterdir()]
        return sorted(Part(int(one[1]), int(one[2])) for one in named if one)

    def check_parts(self, whole: list[Part]) -> None:
        """Refuse files that hold rows which came in by another file."""
        known = self.parts()
        for part in whole:
            for other in known:
                if other != part and other.first <= part.last and part.first <= other.last:
                    raise UserError(
                        f"rows {part.first}..{part.last} came into {self.out} by other files than "
                        "those that are there now: remove it, and make the tables anew"
                    )

    def mark(self, keys: Iterable[str]) -> None:
        """What is computed from these keys' rows is out of date."""
        for key in keys:
            (self._work / "dirty" / key).touch()

    def unmark(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self._work / "dirty" / key).unlink(missing_ok=True)

    def marked(self) -> list[str]:
        return sorted(path.name for path in (self._work / "dirty").iterdir())

    def add(self, staged: Path, tables: Iterable[str], parts: list[Part]) -> None:
        """Move staged files of these parts to their places. What an earlier try has moved is taken
        away first: it may have been cut into other files."""
        for table in tables:
            files = sorted((staged / table).glob(f"{KEY}=*/{DAY}=*/part=*/*.parquet"))
            places = {file: self._place(table, file) for file in files}
            for folder in sorted({place.parent for place in places.values()}):
                folder.mkdir(parents=True, exist_ok=True)
                for part in parts:
                    for old in folder.glob(f"{span(part)}-*.parquet"):
                        old.unlink()
                        self._hook(f"an older file of {table} removed")
            for file, place in _numbered(places).items():
                file.rename(place)
                self._hook(f"a file of {table} moved")
        for part in parts:
            (self._work / "parts" / span(part)).touch()
        self._hook("parts noted")

    def _place(self, table: str, file: Path) -> Path:
        part = file.parent.name.removeprefix("part=")
        day, key = file.parent.parent.name, file.parent.parent.parent.name
        return self.out / table / key / day / part

    def swap(self, staged: Path, table: str, keys: Iterable[str]) -> None:
        """Put what is staged of these keys in place of what is there, or in place of nothing; where
        nothing is staged, what is there is out of date."""
        trash = self._work / "trash" / uuid.uuid4().hex
        trash.mkdir(parents=True)
        for key in keys:
            new, old = staged / table / f"{KEY}={key}", self.out / table / f"{KEY}={key}"
            if old.exists():
                old.rename(trash / key)
                self._hook(f"old {table} away")
            if new.exists():
                old.parent.mkdir(parents=True, exist_ok=True)
                new.rename(old)
                self._hook(f"new {table} in place")
        shutil.rmtree(trash)


def span(part: Part) -> str:
    """A part's rows, as they are written in names of files."""
    return f"{part.first:012}-{part.last:012}"


def _numbered(places: dict[Path, Path]) -> dict[Path, Path]:
    """Files of one place are told apart by a number."""
    counts: dict[Path, int] = {}
    named: dict[Path, Path] = {}
    for file, place in places.items():
        counts[place] = number = counts.get(place, 0) + 1
        named[file] = place.with_name(f"{place.name}-{number:03}.parquet")
    return named
