"""The file `starts`: restarts with and without a stop before them, and its limits."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from taskyard.journal import lock
from taskyard.journal.lock import Start, StartWord
from tests.kit.processes import Broker, run_here


def test_start_without_a_stop_before_it_follows_a_kill(tmp_path: Path) -> None:
    assert lock.read_starts(tmp_path) == []
    words = ("started", "stopped", "started", "started", "stopped")
    for time_ns, word in enumerate(words, 1):
        lock.note_start(tmp_path, StartWord(word), time_ns)
    lock.note_start(tmp_path, StartWord.STARTED, 7, recorded_ns=4)  # it was stopped in order
    lock.note_start(tmp_path, StartWord.STARTED, 9, recorded_ns=8)
    lock.note_start(tmp_path, StartWord.STARTED, 12, recorded_ns=8)  # nothing recorded
    found = lock.read_starts(tmp_path)
    assert found == [Start(3, 2), Start(4), Start(7, 5), Start(9, None, 8), Start(12)]
    assert [one.since_ns for one in found] == [2, 4, 5, 8, 12]
    assert (tmp_path / "starts").stat().st_mode & 0o777 == 0o600


def test_only_the_last_lines_are_kept(tmp_path: Path) -> None:
    lines = [[time_ns, "started"] for time_ns in range(1, lock.START_LINES_MAX + 1)]
    (tmp_path / "starts").write_text(json.dumps(lines))
    lock.note_start(tmp_path, StartWord.STARTED, 2000)
    kept = json.loads((tmp_path / "starts").read_bytes())
    assert len(kept) == lock.START_LINES_MAX
    assert (kept[0], kept[-1]) == ([2, "started"], [2000, "started"])


@pytest.mark.parametrize(
    "damaged", [b"", b"\xff", b"1 started", b'[[1,"went"]]', b'[[1,"started"]']
)
def test_damaged_file_begins_again(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "starts").write_bytes(damaged)
    lock.note_start(tmp_path, StartWord.STARTED, 8)
    lock.note_start(tmp_path, StartWord.STARTED, 9)
    assert lock.read_starts(tmp_path) == [Start(9)]


def test_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('[[1,"started"]]')
    (tmp_path / "starts").symlink_to("elsewhere")
    lock.note_start(tmp_path, StartWord.STARTED, 2)
    assert json.loads((tmp_path / "starts").read_bytes()) == [[2, "started"]]
    assert (tmp_path / "elsewhere").read_text() == '[[1,"started"]]'


@pytest.mark.parametrize("kind", ["directory", "read-only"])
def test_file_that_can_not_be_written_fails_nothing(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, place = tmp_path / "state", tmp_path / "state" / "starts"
    state.mkdir()
    if kind == "directory":
        place.mkdir()
    elif os.geteuid() == 0:
        state.rmdir()  # root may write anywhere
    else:
        state.chmod(0o500)
    lock.note_start(state, StartWord.STARTED, 1)
    assert "not written" in caplog.text
    assert lock.read_starts(state) == []


def test_broker_notes_its_starts_and_its_orderly_stop(tmp_path: Path) -> None:
    begun_ns = time.time_ns()
    with Broker(tmp_path) as broker:
        broker.terminate()
    with Broker(tmp_path) as broker:
        assert run_here(tmp_path, "submit", "--", "true")[0] == 0
        broker.kill()
    with Broker(tmp_path) as broker:
        after_stop, after_kill = lock.read_starts(tmp_path / ".taskyard")
        assert after_stop.stopped_ns is not None
        assert after_kill.stopped_ns is None
        assert after_kill.recorded_ns is not None
        times = (
            *(begun_ns, after_stop.stopped_ns, after_stop.time_ns),
            *(after_kill.recorded_ns, after_kill.time_ns),
        )
        assert sorted(times) == list(times)
        broker.terminate()
    assert run_here(tmp_path, "journal", "check")[0] == 0
