"""Long output and large values in the tables of a broker's database."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from taskyard.broker.database_files import OutputRows, check_place, value_place
from taskyard.broker.output_store import StreamKey
from taskyard.broker.value_references import ValueReferences
from taskyard.core.output import OutputChunk, Stream
from taskyard.errors import LeaderLost, UnusableStore
from taskyard.journal.postgres import database, leader
from taskyard.journal.postgres.blobs import (
    DATABASE,
    DIRECTORY,
    OUTPUT,
    PART_BYTES,
    VALUE,
    Blobs,
    Part,
    note_place,
)
from taskyard.journal.value_files import name_of
from tests.kit.postgres import Proxy, terminate_backends, warn_after_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kit.postgres import Cluster

#: A name with any bytes, and a campaign with a separator in it.
KEY = StreamKey(b"1/2", b"\xff/\0", 3, Stream.STDERR)

CONTENT = bytes(range(256)) * 4096 * 2 + b"end"


@contextlib.contextmanager
def open_blobs(url: str) -> Iterator[Blobs]:
    """Begin a term, and open the tables with it."""
    with database.connect(url) as connection:
        term = leader.acquire(connection, 0)
    with Blobs(url, term) as blobs:
        yield blobs


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def blobs(url: str) -> Iterator[Blobs]:
    with open_blobs(url) as found:
        yield found


def chunk(offset: int, data: bytes) -> OutputChunk:
    return OutputChunk(KEY.campaign, KEY.name, KEY.attempt, KEY.stream, offset, data)


def parts_count(blobs: Blobs) -> int:
    return int(blobs._execute("SELECT count(*) FROM taskyard.parts")[0][0])  # noqa: SLF001


def test_session_that_ends_after_a_write_is_made_again(
    blobs: Blobs, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the server has crashed: a warning comes with the reply."""
    warn_after_each(url, "value_references")
    warn_after_each(url, "leader", "WHEN (NEW.renewal % 2 = 0)")
    confirm = Blobs._is_confirmed  # noqa: SLF001
    confirmed: list[bool] = []

    def end_first(self: Blobs) -> bool:
        if not confirmed:
            terminate_backends(url)
        confirmed.append(confirm(self))
        return confirmed[-1]

    monkeypatch.setattr(Blobs, "_is_confirmed", end_first)
    for line in (b"first", b"second"):
        blobs.add_lines([line])
    assert confirmed.count(False) >= 2
    assert confirmed.count(True) == 2
    assert {*blobs.lines()} == {b"first", b"second"}


class TestOutput:
    def test_another_broker_continues_a_stream(self, url: str) -> None:
        with open_blobs(url) as blobs:
            store = OutputRows(blobs)
            assert store.write(chunk(0, b"abc"))
            assert store.write(chunk(3, b"def"))
            store.flush()
            assert store.write(chunk(6, b"lost"))  # its sender got no reply
        with open_blobs(url) as blobs:
            store = OutputRows(blobs)
            assert not store.write(chunk(10, b"behind a gap"))
            assert store.write(chunk(3, b"defgh"))
            store.flush()
            assert store.end(KEY, 8) == 8
            assert store.read(KEY, 0, 100) == (b"abcdefgh", 8)
            assert store.read(KEY, 2, 3) == (b"cde", 8)
            assert store.read(KEY, 8, 3) == (b"", 8)

    def test_long_chunk_is_split_and_read_across_rows(self, blobs: Blobs) -> None:
        store = OutputRows(blobs)
        assert store.write(chunk(0, b"ab"))
        assert store.write(chunk(2, CONTENT))
        store.flush()
        whole = b"ab" + CONTENT
        assert parts_count(blobs) == 1 + -(-len(CONTENT) // PART_BYTES)
        assert store.read(KEY, 0, len(whole) + 1) == (whole, len(whole))
        for offset in (1, 2, PART_BYTES - 1, PART_BYTES + 1, 2 * PART_BYTES + 2):
            assert store.read(KEY, offset, 9) == (whole[offset : offset + 9], len(whole))

    def test_shorter_repeat_removes_nothing(self, blobs: Blobs) -> None:
        store = OutputRows(blobs)
        for data in (b"abcdef", b"abc"):
            assert store.write(chunk(0, data))
            store.flush()
        assert store.read(KEY, 0, 9) == (b"abcdef", 6)

    def test_streams_are_counted_and_removed_as_files_are(self, blobs: Blobs) -> None:
        store, since_ns = OutputRows(blobs), time.time_ns()
        store.write(chunk(0, b"abc"))
        store.flush()
        store.write(chunk(1, b"bcde"))
        store.flush()
        assert store.bytes_used == 5
        (file,) = store.walk()
        assert (file.campaign, file.name, file.bytes_total) == (KEY.campaign, KEY.name, 5)
        assert str(file.path) == "outputs/1%2F2/%FF%2F%00/3.err"
        assert since_ns < file.written_ns < time.time_ns()
        store.remove(file)
        assert [*store.walk()] == []
        assert parts_count(blobs) == 0

    def test_pages_of_a_walk_cover_everything(
        self, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("taskyard.journal.postgres.blobs.PAGE_ROWS", 3)
        names = [b"%d" % number for number in range(10)]
        blobs.append(OUTPUT, [Part(name, 0, b"x") for name in names], 1)
        assert [blob.name for blob in blobs.walk(OUTPUT)] == names
        assert [*blobs.walk(VALUE)] == []


class TestValues:
    def test_value_counts_when_all_of_it_is_there(
        self, url: str, blobs: Blobs, tmp_path: Path
    ) -> None:
        files, name = value_place(tmp_path, blobs).files, name_of(CONTENT)
        assert not files.touch(name)
        assert files.read(name, 0, 10) is None
        with pytest.raises(ZeroDivisionError):
            blobs.put(VALUE, name.encode(), _failing(), 1)
        assert not files.has(name)
        unfinished = files.unfinished_path("x")
        unfinished.write_bytes(CONTENT)
        thread = threading.Thread(target=files.finish, args=(unfinished, name))
        thread.start()
        thread.join()
        assert not unfinished.exists()
        assert files.has(name)
        assert files.read(name, PART_BYTES - 5, 10) == CONTENT[PART_BYTES - 5 : PART_BYTES + 5]
        blobs.remove_unclaimed()
        assert parts_count(blobs) == 1 + -(-len(CONTENT) // PART_BYTES)
        with open_blobs(url) as newer:
            newer.remove_unclaimed()
            assert parts_count(newer) == -(-len(CONTENT) // PART_BYTES)

    def test_used_value_is_not_removed(self, blobs: Blobs, tmp_path: Path) -> None:
        files, name = value_place(tmp_path, blobs).files, name_of(b"x")
        blobs.put(VALUE, name.encode(), [b"x"], 1000)
        assert [file.used_ns for file in files.walk()] == [1000]
        assert not files.remove(name, 999)
        since_ns = time.time_ns()
        assert files.touch(name)
        assert not files.remove(name, since_ns)
        assert files.remove(name, time.time_ns())
        assert not files.touch(name)
        assert parts_count(blobs) == 0

    def test_references_survive(self, blobs: Blobs, tmp_path: Path) -> None:
        log, name = value_place(tmp_path, blobs).log, name_of(b"x")
        lines = [b'[true,"%s","t%d"]\n' % (name.encode(), number) for number in range(3)]
        log.append(lines[:2])
        log.append(lines[2:])
        assert ValueReferences(log).tasks(name) == {b"t0", b"t1", b"t2"}
        log.replace(lines[:1])
        assert ValueReferences(log).tasks(name) == {b"t0"}


def _failing() -> Iterator[bytes]:
    yield b"abc"
    raise ZeroDivisionError


def test_stale_broker_changes_nothing(url: str, blobs: Blobs) -> None:
    name = name_of(b"x").encode()
    blobs.append(OUTPUT, [Part(b"o", 0, b"abc")], 1)
    blobs.put(VALUE, name, [b"x"], 1)
    blobs.add_lines([b"line"])
    with open_blobs(url) as newer:
        attempts = (
            lambda: blobs.append(OUTPUT, [Part(b"o", 3, b"d"), Part(b"new", 0, b"e")], 2),
            lambda: blobs.seal(OUTPUT, b"o", 1),
            lambda: blobs.put(VALUE, b"other", [b"y"], 2),
            lambda: blobs.touch(VALUE, name, 2),
            lambda: blobs.remove(VALUE, [name]),
            lambda: blobs.add_lines([b"more"]),
            lambda: blobs.replace_lines([]),
            blobs.remove_unclaimed,
        )
        for attempt in attempts:
            with pytest.raises(LeaderLost, match="has ended"):
                attempt()
        assert [*newer.walk(OUTPUT)] == [(b"o", 3, 1)]
        assert [*newer.walk(VALUE)] == [(name, 1, 1)]
        assert newer.lines() == [b"line"]
        assert newer.read(OUTPUT, b"o", 0, 9) == (b"abc", 3)
        newer.remove_unclaimed()
        assert parts_count(newer) == 2


def test_statement_that_is_executed_late_undoes_nothing(url: str, blobs: Blobs) -> None:
    """Its connection was lost, and it was repeated over another one."""
    late: list[tuple[Any, ...]] = []

    def executed_late(write: Callable[[], object]) -> None:
        with patch.object(blobs, "_execute", wraps=blobs._execute) as execute:  # noqa: SLF001
            write()
        late.append(execute.call_args.args)

    executed_late(lambda: blobs.append(OUTPUT, [Part(b"o", 0, b"abcdef")], 1))
    blobs.seal(OUTPUT, b"o", 3)
    executed_late(lambda: blobs.replace_lines([b"one"]))
    blobs.add_lines([b"two"])
    with database.connect(url) as connection:
        for statement, values in late:
            connection.execute(statement, values)
    assert blobs.read(OUTPUT, b"o", 0, 9) == (b"abc", 3)
    assert blobs.lines() == [b"one", b"two"]
    blobs.replace_lines([b"three"])
    assert blobs.lines() == [b"three"]


def test_statement_whose_connection_is_cut_is_repeated(cluster: Cluster, url: str) -> None:
    """The first time before it is executed or after, its reply is lost."""
    sent: list[bytes] = []

    def cut(data: bytes | None) -> bool:
        return data is None and bool(sent) and sent.pop() is not None

    name = url.partition("@/")[2].partition("?")[0]
    proxy = Proxy(cluster, cut)
    with contextlib.closing(proxy), open_blobs(proxy.url(name)) as blobs:
        for offset in range(3):
            sent.append(b"cut the next reply")
            blobs.append(OUTPUT, [Part(b"o", offset, b"%d" % offset)], 1)
        assert proxy.cuts == 3
        assert blobs.read(OUTPUT, b"o", 0, 9) == (b"012", 3)
        blobs.interrupt()
        with pytest.raises(LeaderLost):
            blobs.read(OUTPUT, b"o", 0, 9)


def test_place_of_the_files_does_not_change_unnoticed(url: str, tmp_path: Path) -> None:
    with database.connect(url) as connection:
        term = leader.acquire(connection, 0)
        for files in (tmp_path, None):
            check_place(url, tmp_path, files)
        note_place(connection, term, DIRECTORY)
        check_place(url, tmp_path, tmp_path)
        with pytest.raises(UnusableStore, match="give it with --files"):
            check_place(url, tmp_path, None)
        database.clear(connection)
        note_place(connection, term, DATABASE)
        check_place(url, tmp_path, None)
        with pytest.raises(UnusableStore, match="in the database"):
            check_place(url, tmp_path, tmp_path)
        database.clear(connection)
        (tmp_path / "outputs").symlink_to(tmp_path)
        with pytest.raises(UnusableStore, match=str(tmp_path.parent)):
            check_place(url, tmp_path, None)
