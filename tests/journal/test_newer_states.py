"""States of a newer version are refused by every command, and nothing in them changes."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from taskyard.cli.entry import run, taskyard
from taskyard.journal import schema

GOLDEN = Path(__file__).parent / "golden" / "format-1" / "state"
MESSAGE = "the journal has format 2, but this version of Taskyard reads format 1"

COMMANDS = (
    ["up"],
    ["broker"],
    ["journal", "check"],
    ["journal", "check", "--deep"],
    ["journal", "export", "--out", "{out}"],
    ["journal", "compact"],
    ["list"],
    ["show", "first/a"],
    ["status"],
    ["log", "first/a"],
    ["report"],
    ["pipeline", "history", "--out", "{out}"],
    ["clean", "--every-file"],
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(GOLDEN, tmp_path / "state"))
    copy.chmod(0o700)
    with closing(sqlite3.connect(copy / schema.FILE_NAME)) as connection:
        connection.execute("UPDATE meta SET value = X'32' WHERE key = 'format'")
        connection.commit()
    return copy


def contents(directory: Path) -> dict[str, bytes]:
    """Return the files of a state with their content, without those of locks and of SQLite."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "lock" and not path.name.endswith(("-shm", "-wal"))
    }


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_refuses_the_state_and_changes_nothing(
    state: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    before = contents(state)
    words = [word.format(out=tmp_path / "out") for word in command]
    assert run(taskyard, [*words, "--state", str(state)]) == 2
    assert MESSAGE in capfd.readouterr().err
    assert contents(state) == before


def test_code_of_the_refusal(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(taskyard, ["journal", "check", "--json", "--state", str(state)]) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert (error["code"], MESSAGE in error["text"]) == ("state-format", True)
