"""History files of a journal in PostgreSQL that are moved to a shared directory or to S3."""

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from taskyard.errors import JournalDamaged, LeaderLost, UnusableStore
from taskyard.journal import history
from taskyard.journal.files import PRIVATE_FILE
from taskyard.journal.postgres import exports, shared_directory
from taskyard.journal.postgres.blobs import DIRECTORY, Blobs
from taskyard.journal.postgres.leader import Term
from taskyard.journal.postgres.objects import Mover, Objects, ObjectStore
from taskyard.journal.postgres.shared_directory import SharedDirectory
from taskyard.journal.store import MemoryStore
from tests.journal.scenarios import rich_store
from tests.journal.test_exports import Machine
from tests.kit.postgres import Cluster
from tests.kit.processes import until
from tests.pipeline import s3_server


class Place:
    """A place of `--files`."""

    def __init__(self, name: str, store: ObjectStore, files: Path, url: str) -> None:
        self.name = name
        self.store = store
        self.files = files
        self.url = url

    def machine(self, directory: Path) -> Machine:
        """Take over on the machine with a state directory."""
        directory.mkdir(exist_ok=True)
        link = directory / "values"
        if self.name == DIRECTORY and not link.is_symlink():
            link.symlink_to(self.files.absolute() / "values")
        return Machine(self.url, directory)

    def fetch(self, machine: Machine, directory: Path) -> None:
        """Fetch the files to another state directory."""
        directory.mkdir(exist_ok=True)
        exports.fetch(machine.connection, directory, machine.store.identity, self.files)

    def move(self, term: Term) -> int:
        """Run one round as the broker with a term does. Return the number of files moved."""
        with Blobs(self.url, term) as tables:
            return Mover(tables, self.name, self.store).run_round()

    def urls(self, machine: Machine) -> list[str]:
        """Return the URLs of files that are here."""
        claims = exports.claims(machine.connection)
        return [f"{claim.place}/{claim.upload}" for claim in claims if claim.place == self.name]


@pytest.fixture(scope="module")
def s3_variables() -> Iterator[dict[str, str]]:
    with s3_server.served() as found:
        yield found


@pytest.fixture(params=["directory", "s3"])
def place(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    url, files = cluster.database(), tmp_path / "files"
    if request.param == "directory":
        return Place(DIRECTORY, SharedDirectory(files), files, url)
    for name, value in request.getfixturevalue("s3_variables").items():
        monkeypatch.setenv(name, value)
    return Place(f"s3://{s3_server.BUCKET}/{tmp_path.name}", Objects(), files, url)


@pytest.fixture(scope="module")
def story() -> MemoryStore:
    return rich_store()


@pytest.fixture
def first(place: Place, tmp_path: Path, story: MemoryStore) -> Iterator[Machine]:
    """Return a machine that has trimmed all of its rows."""
    machine = place.machine(tmp_path / "first")
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


def test_another_machine_has_the_history_from_its_place(
    place: Place, first: Machine, tmp_path: Path
) -> None:
    count = in_tables(first)
    assert count == 4
    assert place.move(first.term) == count
    assert place.move(first.term) == 0
    assert (in_tables(first), len(place.urls(first))) == (0, count)
    second = place.machine(tmp_path / "second")
    assert second.files() == first.files()
    assert second.fingerprint() == first.fingerprint()
    second.close()


def test_stale_broker_moves_nothing(place: Place, first: Machine, tmp_path: Path) -> None:
    """It may write a file, which the next broker writes again."""
    count = in_tables(first)
    second = place.machine(tmp_path / "second")
    with pytest.raises(LeaderLost):
        place.move(first.term)
    assert (in_tables(first), place.urls(first)) == (count, [])
    assert place.move(second.term) == count
    third = place.machine(tmp_path / "third")
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
def test_broker_killed_in_an_upload_is_continued(
    place: Place,
    first: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kill: Callable[[Iterable[bytes]], Iterator[bytes]],
) -> None:
    count, put = in_tables(first), type(place.store).put

    def put_and_die(store: ObjectStore, url: str, contents: Iterable[bytes], size: int) -> None:
        put(store, url, kill(contents), size)

    with monkeypatch.context() as patch:
        patch.setattr(type(place.store), "put", put_and_die)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a kill leaves the file behind
        with pytest.raises(KeyboardInterrupt):
            place.move(first.term)
    assert in_tables(first) == count
    second = place.machine(tmp_path / "second")
    assert place.move(second.term) == count
    if place.name == DIRECTORY:
        found = {path.name for path in (place.files / history.FOLDER).iterdir()}
        assert found == {url.rpartition("/")[2] for url in place.urls(second)}
    third = place.machine(tmp_path / "third")
    assert third.files() == first.files()
    second.close()
    third.close()


def test_content_that_differs_at_the_place_is_not_taken_for_moved(
    place: Place, first: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, read = in_tables(first), type(place.store).read

    def damaged(store: ObjectStore, url: str, offset: int, size: int) -> bytes:
        return read(store, url, offset, size)[:-1] + b"?"

    with monkeypatch.context() as patch:
        patch.setattr(type(place.store), "read", damaged)
        with pytest.raises(OSError, match="does not match its digest"):
            place.move(first.term)
    assert (in_tables(first), place.urls(first)) == (count, [])


def raising() -> Iterator[bytes]:
    yield b"ab"
    raise OSError("the connection is lost")


@pytest.mark.parametrize("contents", [lambda: [b"ab"], raising])
def test_upload_that_ends_early_replaces_nothing(
    place: Place, contents: Callable[[], Iterable[bytes]]
) -> None:
    """The parts may be gone: another broker has moved the file meanwhile."""
    url = f"{place.name}/1-{place.url[-8:].encode().hex()}"
    place.store.put(url, [b"abc", b"def"], 6)
    with pytest.raises(OSError, match=r"2 of 6 bytes|connection is lost"):
        place.store.put(url, contents(), 6)
    assert place.store.read(url, 0, 9) == b"abcdef"


def test_missing_file_is_named_and_nothing_changes(
    place: Place, first: Machine, tmp_path: Path
) -> None:
    place.move(first.term)
    url = place.urls(first)[-1]
    place.store.remove(url)
    where = str(place.files / history.FOLDER) if place.name == DIRECTORY else place.name
    with pytest.raises(JournalDamaged, match="is missing") as refused:
        place.fetch(first, tmp_path / "second")
    assert where in str(refused.value)
    assert "restore the file from a backup" in str(refused.value)
    again = place.machine(tmp_path / "first")  # it has a copy
    assert len(place.urls(again)) == 4
    again.close()


def test_changed_file_is_refused(place: Place, first: Machine, tmp_path: Path) -> None:
    place.move(first.term)
    url = place.urls(first)[0]
    content = place.store.read(url, 0, 1 << 20)
    place.store.put(url, [content[:-1], b"?"], len(content))
    with pytest.raises(JournalDamaged, match="does not match its digest"):
        place.fetch(first, tmp_path / "second")
    folder = tmp_path / "second" / history.FOLDER
    assert [path for path in folder.iterdir() if path.suffix != ".new"] == []


def test_place_that_can_not_be_read_is_no_damage(
    place: Place, first: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.move(first.term)

    def fail(*_: object) -> bytes:
        raise OSError("it is down")

    with monkeypatch.context() as patch:
        patch.setattr(type(place.store), "read", fail)
        with pytest.raises(UnusableStore, match="it is down"):
            place.fetch(first, tmp_path / "second")
    second = place.machine(tmp_path / "second")
    assert second.files() == first.files()
    second.close()


def test_history_stays_in_the_database_while_the_place_is_down(
    place: Place, first: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = in_tables(first)

    def fail(*_: object) -> None:
        raise OSError("it is down")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(type(place.store), "put", fail)
        with Mover(Blobs(place.url, first.term), place.name, place.store):
            until(lambda: "stay in the database for now: it is down" in caplog.text, "a warning")
    assert in_tables(first) == count
    with Mover(Blobs(place.url, first.term), place.name, place.store):
        until(lambda: in_tables(first) == 0, "the move")


def test_directory_keeps_room_for_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedDirectory(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shared_directory, "free_bytes", lambda _: 1 << 20)
        with pytest.raises(OSError, match="No space left"):
            shared.put("directory/1-ab", [b"abc"], 3)
    shared.put("directory/1-ab", [b"abc"], 3)
    path = tmp_path / history.FOLDER / "1-ab"
    assert path.stat().st_mode & 0o777 == PRIVATE_FILE
    (path.parent / "notes.txt").write_text("not ours")
    shared.clear()
    assert [one.name for one in path.parent.iterdir()] == ["notes.txt"]


def test_directory_that_is_not_known_here_is_asked_for(first: Machine, place: Place) -> None:
    place.move(first.term)
    claim = next(one for one in exports.claims(first.connection) if one.place)
    if place.name == DIRECTORY:
        with pytest.raises(UnusableStore, match="give it with --files"):
            next(exports.read(first.connection, claim))
    else:
        assert next(exports.read(first.connection, claim))
