"""`taskyard journal check|export|compact` as a user runs them, in separate processes."""

import contextlib
import io
import json
import logging
import os
import pty
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from simulator import snapshots
from taskyard.cli.entry import run, taskyard
from taskyard.errors import JournalDamaged
from taskyard.journal import archive, compaction, history, recovery, snapshot, state_check, witness
from taskyard.journal.history import HistoryPart
from taskyard.journal.lock import StateLock
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.state_check import StateReport
from tests.journal.scenarios import copied, rich_yard

#: The rows of the scenario.
ROWS = 71


def command(state: Path, *arguments: str) -> list[str]:
    program = "from taskyard.cli import main; main()"
    return [sys.executable, "-c", program, "journal", *arguments, "--state", str(state)]


def process(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(state, *arguments), capture_output=True, text=True, check=False)


class Shell:
    """The verbs in this process, which is faster."""

    def __init__(self, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state = state
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        given = [*arguments, *self.needed(*arguments), "--state", str(self.state)]
        code = run(taskyard, ["journal", *given])
        self.out, self.err = self._capsys.readouterr()
        return code

    def needed(self, *arguments: str) -> list[str]:
        """Return the options that a verb needs."""
        return ["--out", str(self.state / "out")] if "export" in arguments else []

    def write_history(self) -> None:
        """Compact, but trim nothing."""
        with closing(SqliteStore(self.state)) as store:
            compaction.export(self.state, store)

    def document(self, *arguments: str) -> dict[str, Any]:
        self(*arguments, "--json")
        document: dict[str, Any] = json.loads(self.out)
        return document


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("story") / "state"
    yard = rich_yard(directory)
    yard.store.close()
    assert yard.store.head.sequence == ROWS
    return directory


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    """Restore the journal's log, which `check` silences for its own process."""
    logger = logging.getLogger("taskyard.journal")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def shell(story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(Path(shutil.copytree(story, tmp_path / "state")), capsys)


@pytest.mark.slow
class TestAsProcesses:
    def test_a_life_of_care(self, shell: Shell) -> None:
        checked = process(shell.state, "check")
        assert (checked.returncode, checked.stderr) == (0, "")
        assert checked.stdout == (
            f"state directory {shell.state}\n"
            f"  journal    rows 1..{ROWS}, up to record 79\n"
            "  snapshots  none\n"
            "  history    none\n"
            "  finished   0 tasks, up to row 0\n"
            "sound (use --deep to read all files)\n"
        )
        assert shell("compact") == 0
        assert shell.err.startswith(f"exporting rows: {ROWS} of {ROWS}\n")
        assert re.fullmatch(
            rf"added {ROWS} rows to the history: \d+ events and \d+ edges in 1 new file\n"
            rf"covered up to row {ROWS}: \d+ tasks in the snapshot, \d+ more in the index "
            rf"of finished tasks\ntrimmed {ROWS} rows, removed 0 older snapshots\n",
            shell.out,
        )
        assert shell("compact") == 0
        assert shell.out == (
            f"nothing to add: covered up to row {ROWS}\ntrimmed 0 rows, removed 0 older snapshots\n"
        )
        assert shell("check", "--deep") == 0
        assert f"no rows, rows 1..{ROWS} removed" in shell.out
        assert shell.out.endswith("sound (all files were read)\n")

    def test_damage_exits_6_and_reports_the_loss(self, shell: Shell) -> None:
        flip(shell.state / "journal.sqlite", b"result of a")
        assert shell("check") == 6
        assert re.search(r"DAMAGED\n  wrong: in journal.sqlite row \d+ does not match", shell.out)
        assert re.search(rf"  lost: rows \d+\.\.{ROWS} can't be trusted\n", shell.out)
        assert shell("compact") == 6
        assert "does not match its chain" in shell.err

    def test_running_broker_refuses_a_compaction(self, shell: Shell) -> None:
        with StateLock(shell.state):
            assert shell("compact") == 2
            assert f"in use by process {os.getpid()} (stop it" in shell.err
            assert shell("check") == 0
            assert shell("export") == 0

    def test_bar_is_shown_on_a_terminal(self, shell: Shell) -> None:
        leader, follower = pty.openpty()
        with os.fdopen(leader, "rb", buffering=0) as terminal:
            done = subprocess.run(
                command(shell.state, "compact"),
                stdout=subprocess.PIPE,
                stderr=follower,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
                check=False,
            )
            os.close(follower)
            shown = read_to_end(terminal)
        assert done.returncode == 0
        assert b"trimmed %d rows" % ROWS in done.stdout
        assert b"rows" in shown
        assert b"\x1b[" in shown


def read_to_end(terminal: io.RawIOBase) -> bytes:
    """Read until the other end is closed. The kernel passes on a few lines at a time."""
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while part := terminal.read(100_000):
            shown += part
    return shown


def flip(path: Path, content: bytes) -> None:
    """Flip a byte in the middle of the last occurrence."""
    whole = bytearray(path.read_bytes())
    whole[whole.rindex(content) + 2] ^= 1  # earlier ones may be in unused pages of SQLite
    path.write_bytes(whole)


@pytest.mark.parametrize("verb", ["check", "export", "compact"])
class TestEveryVerb:
    def test_missing_state_directory_is_a_usage_error(
        self, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shell = Shell(tmp_path / "nowhere", capsys)
        assert shell(verb) == 2
        assert f"{shell.state}: not a state directory, it has no journal" in shell.err
        assert not shell.state.exists()

    def test_directory_without_a_journal_is_a_usage_error(
        self, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shell = Shell(tmp_path, capsys)
        assert shell(verb) == 2
        assert "not a state directory" in shell.err
        assert list(tmp_path.iterdir()) == []

    def test_state_that_lost_its_journal_is_damaged_and_no_new_one_is_made(
        self, verb: str, shell: Shell
    ) -> None:
        shell("compact")
        for name in ("journal.sqlite", witness.FILE_NAME):
            (shell.state / name).unlink()
        if verb == "export":  # its history is whole
            assert shell(verb) == 0
            return
        assert shell(verb) == 6
        assert "journal.sqlite is missing" in shell.out + shell.err
        assert not (shell.state / "journal.sqlite").exists()

    def test_directory_in_place_of_the_journal_is_damage(self, verb: str, shell: Shell) -> None:
        (shell.state / "journal.sqlite").unlink()
        (shell.state / "journal.sqlite").mkdir()
        assert shell(verb) == 6
        words = shell.out + shell.err
        assert ("journal.sqlite is a directory, not a file" in words) is (verb != "export")
        assert "Traceback" not in words

    @pytest.mark.slow
    def test_full_disk_under_the_answer_is_one_line_and_exit_2(
        self, verb: str, shell: Shell
    ) -> None:
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                command(shell.state, verb, "-q", *shell.needed(verb)),
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
            )
        words = "stdout: No space left on device"
        assert (done.returncode, done.stderr.decode()) == (2, f"taskyard: {words}\n")

    def test_help_has_an_example(self, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(taskyard, ["journal", verb, "--help"]) == 0
        assert f"Example:\n    taskyard journal {verb} --state" in capsys.readouterr().out

    def test_quiet_shows_no_progress(self, verb: str, shell: Shell) -> None:
        assert shell(verb, "-q") == 0
        assert shell.err == ""
        assert shell.out

    def test_document_is_versioned(self, verb: str, shell: Shell) -> None:
        document = shell.document(verb)
        opening = {"version": 1, "document": f"journal {verb}", "state": str(shell.state)}
        assert opening.items() <= document.items()


class TestDocuments:
    def test_fields_stay(self, shell: Shell) -> None:
        """Programs rely on these fields. More may be added."""
        assert set(shell.document("check")) == {
            "version",
            "document",
            "state",
            "sound",
            "row_first",
            "row_last",
            "rows",
            "record",
            "trimmed",
            "snapshots",
            "snapshot_tasks",
            "history_files",
            "history_first",
            "history_last",
            "events",
            "finished_tasks",
            "finished_covers",
            "deep",
            "wrong",
            "lost",
        }
        assert set(shell.document("compact")) == {
            "version",
            "document",
            "state",
            "sequence",
            "record",
            "rows",
            "events",
            "edges",
            "files",
            "ended",
            "unfinished",
            "rows_trimmed",
            "snapshots_removed",
        }

    def test_damage_is_in_the_document(self, shell: Shell) -> None:
        flip(shell.state / "journal.sqlite", b"result of a")
        document = shell.document("check")
        assert document["sound"] is False
        assert document["wrong"]
        assert document["lost"]


class TestCheck:
    """Every kind of damage is reported, as text and by the exit code."""

    def damaged(self, shell: Shell, *options: str) -> str:
        assert shell("check", *options) == 6
        return shell.out

    def test_check_changes_no_file(self, shell: Shell) -> None:
        shell.write_history()
        before = contents(shell.state)
        assert shell("check", "--deep") == 0
        assert contents(shell.state) == before

    def test_check_leaves_the_log_of_the_index_as_it_is(self, shell: Shell, tmp_path: Path) -> None:
        shell.write_history()
        with closing(sqlite3.connect(shell.state / archive.FILE_NAME)) as writer:
            for change in ("value + 1", "value - 1"):
                writer.execute(f"UPDATE meta SET value = {change} WHERE key = 'count'")  # noqa: S608
                writer.commit()
            killed = Path(shutil.copytree(shell.state, tmp_path / "killed"))
        shell.state = killed
        before = contents(killed)
        assert before[str(killed / f"{archive.FILE_NAME}-wal")]
        assert shell("check", "--deep") == 0
        assert contents(killed) == before

    def test_check_reads_the_log_of_the_index(self, shell: Shell, tmp_path: Path) -> None:
        shell.write_history()
        with closing(sqlite3.connect(shell.state / archive.FILE_NAME)) as writer:
            writer.execute("UPDATE meta SET value = 99 WHERE key = 'count'")
            writer.commit()
            shell.state = Path(shutil.copytree(shell.state, tmp_path / "killed"))
        assert "rows, but 99 were written" in self.damaged(shell, "--deep")

    def test_damaged_snapshot(self, shell: Shell) -> None:
        shell("compact")
        flip(snapshot.path_of(shell.state, ROWS), b"hopeful")
        words = self.damaged(shell)
        assert f"wrong: snapshot {ROWS:012}.snapshot can't be read (the block" in words
        assert f"the state up to row {ROWS} is lost" in words

    def test_snapshot_of_an_unknown_format(self, shell: Shell) -> None:
        shell("compact")
        path = snapshot.path_of(shell.state, ROWS)
        content = bytearray(path.read_bytes())
        content[len(snapshot.MAGIC) + 3] = 9
        path.write_bytes(content)
        assert shell("check") == 2
        assert "has format 9" in shell.err

    def test_snapshot_of_a_row_that_is_lost(self, shell: Shell) -> None:
        shell.write_history()
        path = snapshot.path_of(shell.state, ROWS)
        path.rename(snapshot.path_of(shell.state, 99))
        words = self.damaged(shell)
        assert f"the journal ends at row {ROWS}, a snapshot is of 99" in words
        assert f"lost: rows {ROWS + 1}..99 are lost" in words

    def test_snapshot_that_differs_from_a_replay(self, shell: Shell) -> None:
        shell.write_history()
        store = SqliteStore(shell.state)
        ledger = recovery.recover(store)
        ledger.archive(recovery.archivable(ledger, store.head.record))
        ledger.reasons[b"doomed"] = b"something else"
        snapshots.write(shell.state, store.identity, store.head, ledger)
        store.close()
        assert shell("check") == 0  # a plain check does not compare
        words = self.damaged(shell, "--deep")
        assert f"the snapshot of row {ROWS} differs from a replay of its rows" in words

    def test_rows_that_are_half_trimmed_are_no_damage(self, shell: Shell) -> None:
        """A broker that stops during a compaction leaves the older snapshot without its rows."""
        with closing(SqliteStore(shell.state)) as store:
            last = store.head.sequence
            ledger = recovery.recover(copied(store, 10))
            ledger.archive(recovery.archivable(ledger, ledger.record))
            snapshots.write(shell.state, store.identity, recovery.head_at(store, 10), ledger)
            compaction.export(shell.state, store)
            store.trim(15)
        assert snapshot.sequences(shell.state) == [last, 10]
        assert shell("check", "--deep") == 0

    def test_missing_index(self, shell: Shell) -> None:
        shell("compact")
        (shell.state / archive.FILE_NAME).unlink()
        words = self.damaged(shell)
        assert f"rows 1..{ROWS} are trimmed, and finished.sqlite is missing" in words

    def test_damaged_index(self, shell: Shell) -> None:
        shell("compact")
        flip(shell.state / archive.FILE_NAME, b"kept second/k1")
        assert shell("check") == 0  # found when read
        assert "the row of b'second/k1' in finished.sqlite does not match" in self.damaged(
            shell, "--deep"
        )

    def test_damaged_history(self, shell: Shell) -> None:
        shell("compact")
        path = HistoryPart(1, ROWS).path(shell.state)
        path.write_bytes(path.read_bytes()[:-1])
        words = self.damaged(shell)
        assert f"wrong: history/{path.name} can't be read" in words
        assert f"lost: the events of rows 1..{ROWS} are lost: restore the file" in words

    def test_damaged_history_of_kept_rows_can_be_rebuilt(self, shell: Shell) -> None:
        shell.write_history()
        path = HistoryPart(1, ROWS).path(shell.state)
        path.write_bytes(path.read_bytes()[:-1])
        assert (
            f"lost: nothing is lost, rows 1..{ROWS} are still in the journal: remove this file, "
            "then compact again\n"
        ) in self.damaged(shell)
        path.unlink()
        shell.write_history()
        assert shell("check", "--deep") == 0

    def test_rows_of_a_damaged_history_are_lost_if_the_journal_is_damaged_too(
        self, shell: Shell
    ) -> None:
        shell.write_history()
        path = HistoryPart(1, ROWS).path(shell.state)
        path.write_bytes(path.read_bytes()[:-1])
        flip(shell.state / "journal.sqlite", b"result of a")
        words = self.damaged(shell)
        assert f"lost: the events of rows 1..{ROWS} are lost: restore the file" in words

    def test_history_that_begins_after_trimmed_rows(self, shell: Shell) -> None:
        shell("compact")
        rename_part(shell.state, HistoryPart(1, ROWS), HistoryPart(11, ROWS))
        words = self.damaged(shell)
        assert "wrong: rows 1..10 are trimmed and in no history file\n" in words
        assert words.count("in no history file") == 1

    def test_history_that_begins_after_kept_rows(self, shell: Shell) -> None:
        shell.write_history()
        rename_part(shell.state, HistoryPart(1, ROWS), HistoryPart(11, ROWS))
        words = self.damaged(shell)
        assert "wrong: rows 1..10 are in no history file\n" in words
        assert "remove the files beyond row 0, then compact again" in words

    def test_missing_history_of_trimmed_rows(self, shell: Shell) -> None:
        shell("compact")
        for path in (shell.state / history.FOLDER).iterdir():
            path.unlink()
        words = self.damaged(shell)
        assert f"rows 1..{ROWS} are trimmed and in no history file" in words
        assert "lost: their events are lost" in words

    def test_damage_report_ends_with_the_remedy(self, shell: Shell) -> None:
        flip(shell.state / "journal.sqlite", b"result of a")
        words = self.damaged(shell)
        assert words.endswith("\nNothing was changed. Restore the directory from a backup.\n")
        assert words.count("Nothing was changed") == 1

    def test_gap_and_surplus_in_the_history(self, shell: Shell) -> None:
        shell.write_history()
        shutil.copy(HistoryPart(1, ROWS).path(shell.state), HistoryPart(80, 90).path(shell.state))
        words = self.damaged(shell)
        assert f"rows {ROWS + 1}..79 are in no history file" in words
        assert f"the journal ends at row {ROWS}, its history at row 90" in words

    def test_same_damage_is_reported_once(self) -> None:
        findings = StateReport()
        for _ in range(2):
            findings.note(JournalDamaged("it is wrong"))
        assert (findings.wrong, findings.lost) == (["it is wrong"], [])

    def test_look_beside_a_broker_is_taken_again_when_it_looks_bad(
        self, shell: Shell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = [StateReport(wrong=["torn"]), StateReport(), StateReport(wrong=["not looked at"])]
        monkeypatch.setattr(state_check, "check", lambda *_, **__: looks.pop(0))
        with StateLock(shell.state):
            assert shell("check") == 0
        assert len(looks) == 1

    def test_looks_beside_a_broker_end(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = [StateReport(wrong=[f"look {number}"]) for number in range(9)]
        monkeypatch.setattr(state_check, "check", lambda *_, **__: looks.pop(0))
        with StateLock(shell.state):
            assert shell("check") == 6
        assert len(looks) == 6
        assert shell("check") == 6
        assert len(looks) == 5


def rename_part(directory: Path, old: HistoryPart, new: HistoryPart) -> None:
    """Rename a history file, whose name is trusted."""
    old.path(directory).rename(new.path(directory))


class TestCompact:
    def test_flipped_byte_in_a_history_file_keeps_the_rows(self, shell: Shell) -> None:
        shell.write_history()
        path = HistoryPart(1, ROWS).path(shell.state)
        flip(path, path.read_bytes()[-200:-190])
        assert shell("compact") == 6
        assert f"history/{path.name} can't be read" in shell.err
        assert f"nothing is lost, rows 1..{ROWS} are still in the journal" in shell.err
        assert shell.err.count("\n") == 1
        assert shell.document("check")["trimmed"] == 0

    def test_history_that_begins_after_kept_rows_keeps_them(self, shell: Shell) -> None:
        shell.write_history()
        rename_part(shell.state, HistoryPart(1, ROWS), HistoryPart(11, ROWS))
        assert shell("compact") == 6
        assert "rows 1..10 are in no history file" in shell.err
        assert shell.document("check")["trimmed"] == 0

    def test_help_does_not_promise_a_smaller_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        run(taskyard, ["journal", "compact", "--help"])
        assert (
            "Frees space inside journal.sqlite for new rows (the file does not shrink) and makes "
            "the next start fast."
        ) in " ".join(capsys.readouterr().out.split())


def contents(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path): path.read_bytes() for path in paths}
