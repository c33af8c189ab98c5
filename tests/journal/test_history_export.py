"""The history as Parquet in a directory of the user: whole, only what is new, and of one state."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from taskyard.errors import UnusableFile
from taskyard.journal import compaction, history, history_arrow
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import MemoryStore
from tests.journal.scenarios import rich_story

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.journal.chain import Row


class Growing:
    """A state that gets the rows of a story, some at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._rows: list[Row] = [*rich_story(MemoryStore()).store.rows()]

    def grow(self, rows: int, *, compacts: bool = True) -> None:
        some, self._rows = self._rows[:rows], self._rows[rows:]
        with closing(SqliteStore(self.directory)) as store:
            for row in some:
                store.commit(row.body, row.record_last - row.record_first + 1)
            if compacts:
                compaction.compact(self.directory, store)


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("*/*"))}


def test_export_has_the_rows_of_the_state_once(tmp_path: Path) -> None:
    state, out = Growing(tmp_path / "state"), tmp_path / "out"
    state.grow(20)
    first = history_arrow.export(state.directory, out)
    assert (first.sequence, len(first.files)) == (20, 2)
    before = files(out)
    again = history_arrow.export(state.directory, out)
    assert (again.sequence, again.files) == (20, [])
    assert files(out) == before
    state.grow(15)
    state.grow(5, compacts=False)  # rows that are in the journal alone
    more = history_arrow.export(state.directory, out)
    assert more.sequence == 40
    assert before.items() <= files(out).items()
    with closing(SqliteStore(state.directory)) as store:
        compaction.compact(state.directory, store)
    assert history_arrow.export(state.directory, out).files == []
    paths = [part.path(state.directory) for part in history.parts(state.directory)]
    for table in ("events", "edges"):
        exported = pq.read_table(out / table).sort_by([("record", "ascending")])
        expected = history_arrow.read_table(paths, table).sort_by([("record", "ascending")])
        assert exported.num_rows == expected.num_rows > 0
        assert exported.select(["sequence", "record", "task"]).equals(
            expected.select(["sequence", "record", "task"])
        )


def test_export_that_was_killed_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, out = Growing(tmp_path / "state"), tmp_path / "out"
    state.grow(30)
    write = history_arrow._write  # noqa: SLF001  # a step of the export

    def killed(source: Path, table: str, first: int, target: Path, journal: bytes) -> int:
        if table == "events":
            raise ZeroDivisionError
        return write(source, table, first, target, journal)

    with monkeypatch.context() as patch:
        patch.setattr(history_arrow, "_write", killed)
        with pytest.raises(ZeroDivisionError):
            history_arrow.export(state.directory, out)
    result = history_arrow.export(state.directory, out)
    assert result.sequence == 30
    assert len(files(out)) == 2


def test_directory_of_another_state_is_refused(tmp_path: Path) -> None:
    for name in ("state", "other"):
        Growing(tmp_path / name).grow(20)
    history_arrow.export(tmp_path / "state", tmp_path / "out")
    before = files(tmp_path / "out")
    with pytest.raises(UnusableFile, match=r"of another state \(use another --out\)"):
        history_arrow.export(tmp_path / "other", tmp_path / "out")
    assert files(tmp_path / "out") == before
