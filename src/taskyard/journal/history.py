"""The history: two tables of events and edges, in pairs of files that are never changed.

`history/events-FIRST-LAST.rows` and `edges-FIRST-LAST.rows` hold the events of the journal's rows
FIRST to LAST. A pair is written under other names, synced and renamed, the edges first. The ranges
follow one another without a gap. An existing file is trusted by its name and never changed.

`convert` replaces the row files of a pair by Parquet files, which any tool reads. Earlier versions
wrote Parquet at once. So both kinds occur in one history, and readers take both. Only
`parquet_file` needs pyarrow, from the extra `history`, and it is imported on use.
`docs/journal.md` documents the files and their columns, and tests compare the two.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Final

import msgspec

from taskyard.errors import JournalDamaged, NotInstalled
from taskyard.journal.files import make_private_directory, sync_directory
from taskyard.journal.row_file import ROWS_PER_BLOCK, TABLES, RowFile, RowFileWriter

FOLDER: Final = "history"

#: Suffixes of files with all rows of a table.
ROWS: Final = "rows"
PARQUET: Final = "parquet"

#: A file ends with the journal row that fills it: about 50 MB, some seconds of a busy broker.
EVENTS_PER_FILE_MAX: Final = 4_000_000

_NAME = re.compile(rf"(events|edges)-(\d{{12,}})-(\d{{12,}})\.({ROWS}|{PARQUET})")
#: The leading dot hides an unfinished file from Spark.
_UNFINISHED = ".{table}.{suffix}.new"


class HistoryPart(msgspec.Struct, frozen=True, order=True):
    """One pair of files, by its journal rows."""

    first: int
    last: int

    def paths(self, directory: Path, suffix: str | None = None) -> dict[str, Path]:
        """Return the files by table, the edges first. The suffix is that of existing files."""
        span = f"{self.first:012}-{self.last:012}"
        found = suffix or self.suffix(directory)
        return {table: directory / FOLDER / f"{table}-{span}.{found}" for table in TABLES}

    def suffix(self, directory: Path) -> str:
        """Return the suffix of the existing files. A complete Parquet pair replaces row files."""
        counts = {one: self.count(directory, one) for one in (ROWS, PARQUET)}
        return PARQUET if 0 < counts[PARQUET] >= counts[ROWS] else ROWS

    def count(self, directory: Path, suffix: str) -> int:
        """Return the number of existing files with a suffix."""
        return sum(path.exists() for path in self.paths(directory, suffix).values())


def parts(directory: Path) -> tuple[list[HistoryPart], list[HistoryPart]]:
    """Return the complete pairs, in order, and those with a missing file."""
    found: dict[HistoryPart, list[str]] = {}
    folder = directory / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        part = part_of(path.name)
        if part is not None:
            found.setdefault(part, []).append(path.suffix)
    whole = {
        part
        for part, suffixes in found.items()
        if any(suffixes.count(one) == len(TABLES) for one in suffixes)
    }
    return sorted(whole), sorted(found.keys() - whole)


def part_of(name: str) -> HistoryPart | None:
    """Return the part of a file with this name, or None."""
    named = _NAME.fullmatch(name)
    return HistoryPart(int(named[2]), int(named[3])) if named else None


def gaps(whole: list[HistoryPart], trimmed: int | None = None) -> list[str]:
    """Describe gaps and overlaps between the pairs, and a gap after the last trimmed row."""
    wrong: list[str] = []
    if trimmed is not None and whole and whole[0].first > trimmed + 1:
        wrong.append(f"rows {trimmed + 1}..{whole[0].first - 1} are in no history file")
    for before, after in pairwise(whole):
        if after.first > before.last + 1:
            wrong.append(f"rows {before.last + 1}..{after.first - 1} are in no history file")
        elif after.first <= before.last:
            wrong.append(f"rows {after.first}..{before.last} are in two history files")
    return wrong


def missing_file(directory: Path, part: HistoryPart) -> str:
    """Return the name of the file that a pair lacks."""
    return next(path.name for path in part.paths(directory).values() if not path.exists())


def contiguous_end(whole: list[HistoryPart], trimmed: int) -> int:
    """Return the last row before the first gap. The gap may follow the last trimmed row."""
    reached = min(whole[0].first - 1, trimmed) if whole else 0
    for part in whole:
        if part.first != reached + 1:
            break
        reached = part.last
    return reached


def gap_hint(whole: list[HistoryPart], trimmed: int) -> str:
    """Return what to do about a gap. Files of kept rows can be written again."""
    reached = contiguous_end(whole, trimmed)
    if reached < trimmed:
        return "restore the files from a backup, or move those before the gap away"
    return (
        f"nothing is lost, the journal still has these rows: remove the files beyond "
        f"row {reached}, then export again"
    )


def check_part(directory: Path, part: HistoryPart, trimmed: int = 0, *, deep: bool = False) -> int:
    """Return the number of events in a pair of files.

    Raises JournalDamaged if they can't be read. The loss depends on the last trimmed row.
    """
    counts: dict[str, int] = {}
    for table, path in part.paths(directory).items():
        try:
            if path.suffix == f".{PARQUET}":
                counts[table] = parquet_support().check(path, table, deep=deep)
            else:
                counts[table] = _check_row_file(path, table, part, deep=deep)
        except JournalDamaged as error:
            raise JournalDamaged(error.wrong, _lost(table, part, trimmed)) from error
    return counts["events"]


def _check_row_file(path: Path, table: str, part: HistoryPart, *, deep: bool) -> int:
    """Return the number of rows of a row file. `deep` reads every block."""
    with RowFile(path) as file:
        trailer = file.trailer
        if file.table != table or tuple(file.columns) != TABLES[table]:
            raise JournalDamaged(f"{FOLDER}/{path.name}: unexpected columns")
        if (trailer.first, trailer.last) != (part.first, part.last):
            raise JournalDamaged(f"{FOLDER}/{path.name} holds rows {trailer.first}..{trailer.last}")
        if deep:
            file.verify()
        return trailer.rows


def _lost(table: str, part: HistoryPart, trimmed: int) -> str:
    """Describe the loss by a damaged file, and what to do."""
    if part.first > trimmed:
        return (
            f"nothing is lost, rows {part.first}..{part.last} are still in the journal: remove "
            "this file and its partner, then export again"
        )
    rows = f"{part.first}..{min(part.last, trimmed)}"
    return f"the {table} of rows {rows} are lost: restore the file from a backup"


class PartWriter:
    """An unfinished pair of row files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        folder = directory / FOLDER
        make_private_directory(folder)
        self._files = {
            table: RowFileWriter(folder / _UNFINISHED.format(table=table, suffix=ROWS), table)
            for table in TABLES
        }
        self.events = self._files["events"].columns
        self.edges = self._files["edges"].columns

    @property
    def events_total(self) -> int:
        return self._files["events"].rows

    @property
    def edges_total(self) -> int:
        return self._files["edges"].rows

    def flush_if_full(self) -> None:
        """Write a block if enough rows are collected."""
        for file in self._files.values():
            if file.columns.rows >= ROWS_PER_BLOCK:
                file.write()

    def finish(self, part: HistoryPart) -> None:
        """Sync and rename the files. They are durable on return."""
        paths = part.paths(self._directory, ROWS)
        for file in self._files.values():
            file.finish(part.first, part.last)
        for table, file in self._files.items():
            file.path.rename(paths[table])
        sync_directory(self._directory / FOLDER)

    def abandon(self) -> None:
        for file in self._files.values():
            file.close()


def remove(directory: Path, part: HistoryPart) -> None:
    """Remove what is left of a pair."""
    for suffix in (ROWS, PARQUET):
        for path in part.paths(directory, suffix).values():
            path.unlink(missing_ok=True)
    sync_directory(directory / FOLDER)


# Parquet.


def parquet_support() -> ModuleType:
    """Return the module `parquet_file`. Raises `NotInstalled` without pyarrow."""
    try:
        from taskyard.journal import parquet_file  # noqa: PLC0415  # pyarrow is in an extra
    except ModuleNotFoundError as error:
        raise NotInstalled(
            f"Parquet files need {error.name} (pip install 'taskyard[history]')"
        ) from error
    return parquet_file


#: Called with the number of pairs done and in total.
ConversionProgress = Callable[[int, int], None]


def convert(directory: Path, progress: ConversionProgress = lambda *_: None) -> list[Path]:
    """Replace all pairs of row files by Parquet files, and return those.

    The caller holds the state lock. Row files are removed when their replacement is on disk and was
    read back. A conversion that is killed at any point can be repeated.
    """
    whole, _ = parts(directory)
    rows = [part for part in whole if part.count(directory, ROWS)]
    written: list[Path] = []
    for number, part in enumerate(rows, start=1):
        if part.suffix(directory) == ROWS:
            written += _convert_part(directory, part)
        for path in part.paths(directory, ROWS).values():
            path.unlink(missing_ok=True)
        sync_directory(directory / FOLDER)
        progress(number, len(rows))
    return written


def _convert_part(directory: Path, part: HistoryPart) -> list[Path]:
    parquet = parquet_support()
    sources, targets = part.paths(directory, ROWS), part.paths(directory, PARQUET)
    unfinished = {
        table: directory / FOLDER / _UNFINISHED.format(table=table, suffix=PARQUET)
        for table in TABLES
    }
    for table, path in unfinished.items():
        parquet.write(sources[table], path)
        parquet.check(path, table, deep=True)
    for table, path in unfinished.items():
        path.rename(targets[table])
    sync_directory(directory / FOLDER)
    return list(targets.values())
