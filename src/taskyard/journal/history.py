"""The history: row files with the events and edges of the journal's rows, which are never changed.

`history/FIRST-LAST.rows` holds rows FIRST to LAST. A file is written under another name,
synced and renamed. The ranges follow one another without a gap. An existing file is trusted by its
name. `docs/journal.md` documents the files and their columns, and tests compare the two.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from taskyard.errors import JournalDamaged
from taskyard.journal.files import RESTORE_HINT, make_private_directory
from taskyard.journal.row_file import RowFile, RowFileWriter

FOLDER: Final = "history"

#: A file ends with the journal row that fills it: about 50 MB, some seconds of a busy broker.
EVENTS_PER_FILE_MAX: Final = 4_000_000

_NAME = re.compile(r"(\d{12,})-(\d{12,})\.rows")
#: The leading dot hides an unfinished file from Spark.
_UNFINISHED: Final = ".rows.new"


class HistoryPart(msgspec.Struct, frozen=True, order=True):
    """A file, by its journal rows."""

    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.first:012}-{self.last:012}.rows"

    def path(self, directory: Path) -> Path:
        return directory / FOLDER / self.name


def parts(directory: Path) -> list[HistoryPart]:
    """Return all files, in order."""
    folder = directory / FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = filter(None, map(_NAME.fullmatch, names))
    return sorted(HistoryPart(int(named[1]), int(named[2])) for named in found)


def problems(whole: list[HistoryPart], trimmed: int | None, head: int) -> Iterator[JournalDamaged]:
    """Yield gaps, overlaps, and rows beyond the newest row of the journal.

    A gap may follow the last trimmed row, too, which is None if it is not known.
    """
    wrong: list[str] = []
    if trimmed is not None and whole and whole[0].first > trimmed + 1:
        wrong.append(_missing(trimmed + 1, whole[0].first - 1))
    for before, after in pairwise(whole):
        if after.first > before.last + 1:
            wrong.append(_missing(before.last + 1, after.first - 1))
        elif after.first <= before.last:
            wrong.append(f"rows {after.first}..{before.last} are in two history files")
    if wrong:
        only_here = whole[-1].last if trimmed is None else trimmed
        yield JournalDamaged("; ".join(wrong), _gap_hint(whole, only_here))
    last = whole[-1].last if whole else 0
    if trimmed is not None and last > head:
        yield JournalDamaged(
            f"the journal ends at row {head}, its history at row {last}",
            f"rows {head + 1}..{last} are lost: {RESTORE_HINT}",
        )


def losses(whole: list[HistoryPart], trimmed: int, first: int = 1) -> Iterator[JournalDamaged]:
    """Yield trimmed rows from `first` on before the first file, and after the last file."""
    begin, end = (whole[0].first, whole[-1].last) if whole else (trimmed + 1, first - 1)
    for lost in ((first, min(begin - 1, trimmed)), (max(end + 1, begin), trimmed)):
        if lost[0] <= lost[1]:
            yield JournalDamaged(
                f"rows {lost[0]}..{lost[1]} are trimmed and in no history file",
                "their events are lost, the state of the tasks is not: restore the files from a "
                "backup",
            )


def _missing(first: int, last: int) -> str:
    return f"rows {first}..{last} are in no history file"


def _gap_hint(whole: list[HistoryPart], trimmed: int) -> str:
    """Return what to do about a gap. Files of kept rows can be written again."""
    reached = min(whole[0].first - 1, trimmed)
    for part in whole:
        if part.first != reached + 1:
            break
        reached = part.last
    if reached < trimmed:
        return "restore the files from a backup, or move files before the gap away"
    return (
        "nothing is lost, the journal still has these rows: remove the files beyond "
        f"row {reached}, then compact again"
    )


def check_part(directory: Path, part: HistoryPart, trimmed: int = 0, *, deep: bool = False) -> int:
    """Return the number of events in a file. `deep` reads every block.

    Raises JournalDamaged if it can't be read. The loss depends on the last trimmed row.
    """
    try:
        with RowFile(part.path(directory)) as file:
            file.check_rows(part.first, part.last)
            if deep:
                file.verify()
            return file.trailer.events
    except JournalDamaged as error:
        raise JournalDamaged(error.wrong, _lost(part, trimmed)) from error


def _lost(part: HistoryPart, trimmed: int) -> str:
    """Describe the loss by a damaged file, and what to do."""
    if part.first > trimmed:
        return (
            f"nothing is lost, rows {part.first}..{part.last} are still in the journal: remove "
            "this file, then compact again"
        )
    rows = f"{part.first}..{min(part.last, trimmed)}"
    return f"the events of rows {rows} are lost: restore the file from a backup"


def new_file(directory: Path) -> RowFileWriter:
    """Begin the next file."""
    make_private_directory(directory / FOLDER)
    return RowFileWriter(directory / FOLDER / _UNFINISHED)
