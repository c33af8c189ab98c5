"""The whole history of a state: its files, and the rows of the journal after them.

Only reads, and takes no lock, so a broker may run. Rows that are in no file yet are written to a
file in a directory of the caller. Damage and gaps are refused with the journal's own errors.
"""

from pathlib import Path
from typing import Final

from taskyard.errors import JournalDamaged
from taskyard.journal import history, schema, state_check, witness
from taskyard.journal.history import HistoryPart
from taskyard.journal.history_rows import RowFollower
from taskyard.journal.state_store import open_reader

#: A broker that compacts removes rows under a reader. The next try finds them in files.
READ_TRIES_MAX: Final = 3


def find(state: Path, scratch: Path) -> dict[HistoryPart, Path]:
    """Return the files with all rows of a state, in order. The newest rows are put in `scratch`."""
    for _ in range(READ_TRIES_MAX - 1):
        try:
            return _find(state, scratch)
        except JournalDamaged:
            continue
    return _find(state, scratch)


def _find(state: Path, scratch: Path) -> dict[HistoryPart, Path]:
    whole = parts(state)
    found = {part: part.path(state) for part in whole}
    tail = write_tail(state, whole[-1].last if whole else 0, scratch)
    return found if tail is None else found | {tail: tail.path(scratch)}


def parts(state: Path) -> list[HistoryPart]:
    """List the history files of a state. Raises JournalDamaged for gaps or damage."""
    state_check.require_state(state)
    trimmed = _trimmed_row(state)
    whole = history.parts(state)
    first, last = (whole[0].first, whole[-1].last) if whole else (1, 0)
    for problem in (
        *history.problems(whole, trimmed, last),
        *history.losses(whole, trimmed or 0, first),  # older files may be gone
    ):
        raise JournalDamaged(f"{state / history.FOLDER}: {problem.wrong}", problem.lost)
    for part in whole:
        history.check_part(state, part, trimmed or 0)
    return whole


def _trimmed_row(state: Path) -> int | None:
    """Return the last row that was trimmed from the journal. None if there is no journal."""
    witnessed = witness.read(state)
    has_rows = (state / schema.FILE_NAME).exists() or schema.database_url(state)
    if witnessed is None or not has_rows:
        return None
    with open_reader(state, *witnessed) as reader:
        return reader.anchor.sequence


def write_tail(state: Path, after: int, scratch: Path) -> HistoryPart | None:
    """Write the rows after a row to a history file in `scratch`.

    None if there are no such rows. Raises JournalDamaged, also if a broker trims the journal
    meanwhile.
    """
    witnessed = witness.read(state)
    if witnessed is None or witnessed[1].sequence <= after:
        return None
    with open_reader(state, *witnessed) as reader:
        follower = RowFollower(state, reader, after)
        writer = history.new_file(scratch)
        for _ in follower.follow(reader, writer.events, writer.edges):
            writer.flush_if_full()
        tail = HistoryPart(after + 1, reader.head.sequence)
        writer.finish(tail.path(scratch), tail.first, tail.last)
    return tail
