"""History files of a journal in PostgreSQL that are moved to a shared directory."""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from taskyard.errors import JournalDamaged, LeaderLost, UnusableStore
from taskyard.journal import history
from taskyard.journal.files import PRIVATE_FILE
from taskyard.journal.postgres import database, exports, history_mover, shared_directory
from taskyard.journal.postgres.history_mover import HistoryMover
from taskyard.journal.postgres.leader import Term
from taskyard.journal.store import MemoryStore
from tests.journal.scenarios import rich_store
from tests.journal.test_exports import Machine
from tests.kit.postgres import Cluster
from tests.kit.processes import until


class Shared:
    """A directory of `--files`, for a store."""

    def __init__(self, files: Path, url: str) -> None:
        self.files = files
        self.url = url
        self.folder = files / history.FOLDER
        self.folder.mkdir(parents=True)

    def machine(self, directory: Path) -> Machine:
        """Take over on the machine with a state directory."""
        directory.mkdir(exist_ok=True)
        link = directory / "blobs"
        if not link.is_symlink():
            link.symlink_to(self.files / "blobs")
        return Machine(self.url, directory)

    def fetch(self, machine: Machine, directory: Path) -> None:
        """Fetch the files to another state directory."""
        directory.mkdir(exist_ok=True)
        exports.run(
            exports.fetch(machine.connection, directory, machine.store.identity, self.files)
        )

    def move(self, machine: Machine) -> int:
        """Run one round as the broker of a machine does. Return the number of files moved."""
        return exports.move_history(machine.connection, self.files, machine.term)

    def mover(self, term: Term) -> HistoryMover:
        return HistoryMover(self.url, term, self.files)

    def paths(self, machine: Machine) -> list[Path]:
        """Return the paths of files that are moved, as the tables name them."""
        claims = exports.claims(machine.connection)
        return [self.folder / claim.upload for claim in claims if claim.is_moved]


@pytest.fixture
def shared(cluster: Cluster, tmp_path: Path) -> Shared:
    return Shared(tmp_path / "files", cluster.database())


@pytest.fixture(scope="module")
def story() -> MemoryStore:
    return rich_store()


@pytest.fixture
def first(shared: Shared, tmp_path: Path, story: MemoryStore) -> Iterator[Machine]:
    """Return a machine that has trimmed all of its rows."""
    machine = shared.machine(tmp_path / "first")
    machine.write(story, story.head.sequence // 2)
    machine.compact()
    machine.write(story, story.head.sequence)
    machine.compact()
    yield machine
    machine.close()


def in_tables(machine: Machine) -> int:
    """Return the number of history files in the database."""
    found = machine.connection.execute(
        "SELECT count(DISTINCT name) FROM taskyard.claims JOIN taskyard.files USING (upload) "
        "WHERE starts_with(name, 'history/')"
    )
    return int(found.fetchall()[0][0])


def test_another_machine_has_the_history_from_the_directory(
    shared: Shared, first: Machine, tmp_path: Path
) -> None:
    count = in_tables(first)
    assert count == 2
    assert shared.move(first) == count
    assert shared.move(first) == 0
    assert in_tables(first) == 0
    assert sorted(shared.folder.iterdir()) == sorted(shared.paths(first))
    assert len(shared.paths(first)) == count
    second = shared.machine(tmp_path / "second")
    assert second.files() == first.files()
    assert second.fingerprint() == first.fingerprint()
    second.close()


def test_stale_broker_moves_nothing(shared: Shared, first: Machine, tmp_path: Path) -> None:
    """It may write a file, which the next broker writes again."""
    count = in_tables(first)
    second = shared.machine(tmp_path / "second")
    with pytest.raises(LeaderLost):
        shared.move(first)
    assert (in_tables(first), shared.paths(first)) == (count, [])
    assert shared.move(second) == count
    third = shared.machine(tmp_path / "third")
    assert third.files() == first.files()
    second.close()
    third.close()


def test_file_that_another_broker_moves_meanwhile_is_left_to_it(
    shared: Shared, first: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stale broker was stopped after it read which files are in the tables."""
    second, write = shared.machine(tmp_path / "second"), shared_directory.write
    moved: list[int] = []

    def write_late(*arguments: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shared_directory, "write", write)
            moved.append(shared.move(second))
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(shared_directory, "write", write_late)
    assert shared.move(first) == 0
    assert moved == [2, 0]
    third = shared.machine(tmp_path / "third")
    assert third.files() == first.files()
    second.close()
    third.close()


def killed_in_the_middle(contents: Iterable[bytes]) -> Iterator[bytes]:
    for content in contents:
        yield content[: len(content) // 2]
        raise KeyboardInterrupt


def killed_at_the_end(contents: Iterable[bytes]) -> Iterator[bytes]:
    yield from contents
    raise KeyboardInterrupt


@pytest.mark.parametrize("kill", [killed_in_the_middle, killed_at_the_end])
def test_broker_killed_in_a_write_is_continued(
    shared: Shared,
    first: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kill: Callable[[Iterable[bytes]], Iterator[bytes]],
) -> None:
    count, write = in_tables(first), shared_directory.write

    def write_and_die(files: Path, upload: str, contents: Iterable[bytes], size: int) -> None:
        write(files, upload, kill(contents), size)

    with monkeypatch.context() as patch:
        patch.setattr(shared_directory, "write", write_and_die)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a kill leaves the file behind
        with pytest.raises(KeyboardInterrupt):
            shared.move(first)
    assert in_tables(first) == count
    assert [path.suffix for path in shared.folder.iterdir()] == [".new"]
    second = shared.machine(tmp_path / "second")
    assert shared.move(second) == count
    assert sorted(shared.folder.iterdir()) == sorted(shared.paths(second))
    third = shared.machine(tmp_path / "third")
    assert third.files() == first.files()
    second.close()
    third.close()


def test_content_that_is_damaged_in_the_tables_is_not_moved(shared: Shared, first: Machine) -> None:
    count = in_tables(first)
    first.connection.execute("UPDATE taskyard.files SET content = content || '?'")
    with pytest.raises(JournalDamaged, match="in the database does not match its digest"):
        shared.move(first)
    assert (in_tables(first), shared.paths(first)) == (count, [])
    assert list(shared.folder.iterdir()) == []


def test_write_that_fails_replaces_nothing(shared: Shared) -> None:
    def failing() -> Iterator[bytes]:
        yield b"ab"
        raise OSError("the connection is lost")

    shared_directory.write(shared.files, "1-ab", [b"abc", b"def"], 6)
    with pytest.raises(OSError, match="connection is lost"):
        shared_directory.write(shared.files, "1-ab", failing(), 6)
    assert [(path.name, path.read_bytes()) for path in shared.folder.iterdir()] == [
        ("1-ab", b"abcdef")
    ]


def test_missing_file_is_named_and_nothing_changes(
    shared: Shared, first: Machine, tmp_path: Path
) -> None:
    shared.move(first)
    path = shared.paths(first)[-1]
    path.unlink()
    with pytest.raises(JournalDamaged, match="is missing") as refused:
        shared.fetch(first, tmp_path / "second")
    assert str(path) in str(refused.value)
    assert "restore the file from a backup" in str(refused.value)
    again = shared.machine(tmp_path / "first")  # it has a copy
    assert len(shared.paths(again)) == 2
    again.close()


def test_changed_file_is_refused(shared: Shared, first: Machine, tmp_path: Path) -> None:
    shared.move(first)
    path = shared.paths(first)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(JournalDamaged, match="does not match its digest"):
        shared.fetch(first, tmp_path / "second")
    folder = tmp_path / "second" / history.FOLDER
    assert [path for path in folder.iterdir() if path.suffix != ".new"] == []


def test_file_that_can_not_be_read_is_no_damage(
    shared: Shared, first: Machine, tmp_path: Path
) -> None:
    shared.move(first)
    path = shared.paths(first)[0]
    content = path.read_bytes()
    path.unlink()
    path.mkdir()
    with pytest.raises(UnusableStore, match="Is a directory"):
        shared.fetch(first, tmp_path / "second")
    path.rmdir()
    path.write_bytes(content)
    second = shared.machine(tmp_path / "second")
    assert second.files() == first.files()
    second.close()


def test_history_stays_in_the_database_while_the_directory_is_not_mounted(
    shared: Shared,
    first: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(history_mover, "PAUSE_SECONDS", 0.01)
    count = in_tables(first)
    shared.folder.rmdir()
    with caplog.at_level(logging.WARNING), shared.mover(first.term):
        until(lambda: "history stays in the database for now: [Errno 2]" in caplog.text, "a line")
        assert (in_tables(first), list(shared.files.iterdir())) == (count, [])
        shared.folder.mkdir()
        until(lambda: in_tables(first) == 0, "the move")
    assert len(caplog.records) == 1


def test_mover_connects_again(
    shared: Shared, first: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_mover, "PAUSE_SECONDS", 0.01)
    with shared.mover(first.term) as mover:
        until(lambda: in_tables(first) == 0, "the move")
        connection = mover._connection  # noqa: SLF001
        assert connection is not None
        database.interrupt(connection)
        until(lambda: mover._connection is not connection, "another connection")  # noqa: SLF001


def test_directory_keeps_room_for_output(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    files = shared.files
    with monkeypatch.context() as patch:
        patch.setattr(shared_directory, "free_bytes", lambda _: 1 << 20)
        with pytest.raises(OSError, match="No space left"):
            shared_directory.write(files, "1-ab", [b"abc"], 3)
    shared_directory.write(files, "1-ab", [b"abc"], 3)
    path = shared_directory.path_of(files, "1-ab")
    assert path.stat().st_mode & 0o777 == PRIVATE_FILE
    (shared.folder / "notes.txt").write_text("not ours")
    shared_directory.clear(files)
    assert [one.name for one in shared.folder.iterdir()] == ["notes.txt"]


def test_directory_that_is_not_known_here_is_asked_for(shared: Shared, first: Machine) -> None:
    shared.move(first)
    claim = next(one for one in exports.claims(first.connection) if one.is_moved)
    with pytest.raises(UnusableStore, match="give it with --files"):
        next(exports.read(first.connection, claim))
