"""States and stores of versions before the first release are refused, and nothing in them changes.

`development` has a state directory and the tables of a store, as the last of these versions wrote
them.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from taskyard.cli.entry import run, taskyard
from taskyard.errors import UnknownFormat
from taskyard.journal import history_arrow, schema, snapshot, sqlite, witness
from taskyard.journal.archive import Archive, ArchiveWriter
from taskyard.journal.lock import StateLock
from taskyard.journal.row_file import RowFile
from taskyard.journal.sqlite import SqliteStore
from taskyard.postgresql import database
from tests.kit.postgres import Cluster

DEVELOPMENT = Path(__file__).parent / "development"
MESSAGE = "has a development format, from before the first release, but this version of Taskyard"

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

#: A reader for each file of a state directory.
READERS: dict[str, Callable[[Path], object]] = {
    "witness": witness.read,
    "the journal": SqliteStore,
    "the journal, without writing": sqlite.open_stopped,
    "a snapshot": lambda state: snapshot.read(state, snapshot.sequences(state)[0]),
    "the index": lambda state: covered(Archive(state)),
    "the index, without writing": lambda state: covered(Archive(state, sqlite.connect_readonly)),
    "the index, to add tasks": lambda state: ArchiveWriter(state, bytes(16)),
    "a row file": lambda state: RowFile(row_files(state)[0]),
    "a row file, as Arrow": lambda state: history_arrow.read_table(row_files(state), "events"),
    "the lock": StateLock,
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(DEVELOPMENT / "state", tmp_path / "state"))
    copy.chmod(0o700)
    return copy


def covered(index: Archive) -> object:
    with index:
        return index.covered()


def row_files(state: Path) -> list[Path]:
    return sorted((state / "history").iterdir())


def contents(directory: Path) -> dict[str, bytes | None]:
    """Return the files and folders of a directory with their content."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
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


@pytest.mark.parametrize("name", READERS)
def test_every_reader_recognises_its_file(state: Path, name: str) -> None:
    if "lock" not in name and name != "witness":
        (state / witness.FILE_NAME).unlink()
    with pytest.raises(UnknownFormat, match=MESSAGE):
        READERS[name](state)


def test_history_alone_is_refused(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(state / "history", tmp_path / "copy"))
    assert run(taskyard, ["report", "--history", str(copy), "--out", str(tmp_path / "out")]) == 2
    assert MESSAGE in capsys.readouterr().err


@pytest.fixture
def url(cluster: Cluster) -> Iterator[str]:
    """Return a database with a store, and check that no row changes."""
    url = cluster.database(with_store=False)
    with database.connect(url) as connection:
        connection.execute((DEVELOPMENT / "store.sql").read_text())
    before = tables(url)
    yield url
    assert tables(url) == before


def tables(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of all tables."""
    with closing(database.connect(url)) as connection:
        names = connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'taskyard'"
        ).fetchall()
        return {
            name: sorted(connection.execute(f"SELECT * FROM taskyard.{name}").fetchall())  # noqa: S608
            for (name,) in names
        }


@pytest.mark.parametrize(
    "command",
    [
        ["store", "init", "{url}"],
        ["store", "init", "--outbox", "{url}"],
        ["store", "move", "{new}", "{url}"],
        ["store", "move", "{url}", "{new}"],
        ["broker", "--store", "{url}", "--state", "{new}"],
        ["journal", "check", "--state", "{used}"],
        ["journal", "compact", "--state", "{used}"],
        ["list", "--state", "{used}"],
    ],
    ids=" ".join,
)
def test_command_refuses_the_store_and_changes_nothing(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    new, used = tmp_path / "new", tmp_path / "used"
    if command[2] == "{new}":
        SqliteStore(new).close()
    used.mkdir(mode=0o700)
    (used / schema.DATABASE_NAME).write_text(url)
    words = [word.format(url=url, new=new, used=used) for word in command]
    assert run(taskyard, words) == 2
    assert MESSAGE in capsys.readouterr().err
