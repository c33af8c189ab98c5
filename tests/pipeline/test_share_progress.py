"""Progress of shares, by the files that they leave."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from taskyard.pipeline import share_progress
from taskyard.pipeline.share_progress import ShareFiles, shown_shares
from taskyard.pipeline.store.location import Location

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

Seen = list[tuple[str, int, int | None]]


def wait_for(seen: Seen, rows: int) -> None:
    deadline = time.monotonic() + 10
    while seen[-1][1] != rows:
        assert time.monotonic() < deadline, seen
        time.sleep(0.001)


def test_rows_of_shares_are_counted_by_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_progress, "COUNT_SECONDS", 0.001)
    (tmp_path / "final-of-an-earlier-run").touch()
    seen: Seen = []
    files = ShareFiles(Location.parse(tmp_path), shares=4, rows=100, prefix="final")
    with shown_shares(lambda *one: seen.append(one), "folding", files):
        assert seen[0] == ("folding", 0, 100)
        (tmp_path / "open-1").touch()
        (tmp_path / "final-1").touch()
        wait_for(seen, 25)
        # A share that runs twice leaves two files.
        for number in range(2, 8):
            (tmp_path / f"final-{number}").touch()
        wait_for(seen, 100)
    assert seen[-1] == ("folding", 100, 100)
    assert {rows for _, rows, _ in seen} <= {0, 25, 50, 75, 100}


def test_directory_that_is_not_there_yet_counts_as_empty(tmp_path: Path) -> None:
    seen: Seen = []
    files = ShareFiles(Location.parse(tmp_path / "none"), shares=1, rows=7)
    with shown_shares(lambda *one: seen.append(one), "copying", files):
        pass
    assert seen == [("copying", 0, 7), ("copying", 7, 7)]
