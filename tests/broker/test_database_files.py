"""Blobs in the tables of a broker's database: terms, lost connections, and late statements."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from taskyard.core.model import OutputChunk, Stream
from taskyard.errors import LeaderLost, UnusableStore
from taskyard.journal.blobs import StreamKey, name_of
from taskyard.postgresql import database, leader
from taskyard.postgresql.blobs import (
    FILE,
    PART_BYTES,
    SEALED,
    STREAM,
    BlobRows,
    Blobs,
    Part,
    check_location,
    note_location,
)
from tests.kit.postgres import Proxy, terminate_backends, warn_after_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kit.postgres import Cluster

#: A name with any bytes, and a campaign with a separator in it.
NAME = name_of(b"x").encode()
KEY = StreamKey(b"1/2", b"\xff/\0", 3, Stream.STDERR)

CONTENT = bytes(range(256)) * 4096 * 2 + b"end"


@contextlib.contextmanager
def open_blobs(url: str) -> Iterator[Blobs]:
    """Begin a term, and open the tables with it."""
    with database.connect(url) as connection:
        term = leader.acquire(connection, 0)
    with contextlib.closing(Blobs(url, term)) as blobs:
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
    warn_after_each(url, "blobs")
    warn_after_each(url, "leader", "WHEN (NEW.renewal % 2 = 0)")
    confirm = Blobs._confirm  # noqa: SLF001
    confirmed: list[bool] = []

    def end_first(self: Blobs) -> None:
        if not confirmed:
            terminate_backends(url)
        confirmed.append(False)
        confirm(self)
        confirmed[-1] = True

    monkeypatch.setattr(Blobs, "_confirm", end_first)
    for offset, content in enumerate((b"1", b"2")):
        blobs.append([Part(b"o", offset, content)], 1)
    assert confirmed.count(False) >= 2
    assert confirmed.count(True) == 2
    assert blobs.read(STREAM, b"o", 0, 9) == (b"12", 2)


def test_long_chunk_is_split(blobs: Blobs) -> None:
    store = BlobRows(blobs)
    store.append(KEY, 0, b"ab")
    store.append(KEY, 2, CONTENT)
    store.flush()
    assert parts_count(blobs) == 1 + -(-len(CONTENT) // PART_BYTES)


def test_pages_of_a_walk_cover_everything(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskyard.postgresql.blobs.PAGE_ROWS", 3)
    names = [b"%d" % number for number in range(10)]
    blobs.append([Part(name, 0, b"x") for name in names], 1)
    assert [name for name, _, _ in blobs.walk(STREAM)] == names
    assert [*blobs.walk(SEALED)] == []


def test_file_that_a_killed_writer_has_begun_does_not_count_and_is_removed(blobs: Blobs) -> None:
    with pytest.raises(ZeroDivisionError):
        blobs.put(NAME, _failing())
    assert blobs.read(FILE, NAME, 0, 0) is None
    assert parts_count(blobs) == 1
    blobs.remove_unfinished()
    assert parts_count(blobs) == 0
    blobs.put(NAME, [b"abc", b"def"])
    assert blobs.read(FILE, NAME, 0, 9) == (b"abcdef", 6)


def _failing() -> Iterator[bytes]:
    yield b"abc"
    raise ZeroDivisionError


def test_stale_broker_changes_nothing(url: str, blobs: Blobs) -> None:
    name = NAME
    blobs.append([Part(b"o", 0, b"abc")], 1)
    blobs.append([Part(b"s", 0, b"x")], 1)
    blobs.seal(b"s", name, 1, 1)
    with open_blobs(url) as newer:
        attempts = (
            lambda: blobs.append([Part(b"o", 3, b"d"), Part(b"new", 0, b"e")], 2),
            lambda: blobs.seal(b"o", b"new", 1, 2),
            lambda: blobs.put(b"other", [b"y"]),
            lambda: blobs.touch(name, 2),
            lambda: blobs.remove(SEALED, [name]),
        )
        for attempt in attempts:
            with pytest.raises(LeaderLost, match="has ended"):
                attempt()
        assert [*newer.walk(STREAM)] == [(b"o", 3, 1)]
        assert [*newer.walk(SEALED)] == [(name, 1, 1)]
        assert newer.read(STREAM, b"o", 0, 9) == (b"abc", 3)
        assert parts_count(newer) == 2


def test_statement_that_is_executed_late_undoes_nothing(url: str, blobs: Blobs) -> None:
    """Its connection was lost, and it was repeated over another one."""
    late: list[tuple[Any, ...]] = []

    def executed_late(write: Callable[[], object]) -> None:
        with patch.object(blobs, "_execute", wraps=blobs._execute) as execute:  # noqa: SLF001
            write()
        late.append(execute.call_args.args)

    executed_late(lambda: blobs.append([Part(b"o", 0, b"abcdef")], 1))
    executed_late(lambda: blobs.seal(b"o", NAME, 3, 2))
    blobs.remove(SEALED, [NAME])
    with database.connect(url) as connection:
        for statement, values in reversed(late):
            connection.execute(statement, values)
    assert blobs.read(SEALED, NAME, 0, 0) is None
    blobs.seal(b"o", NAME, 3, 3)
    assert blobs.read(SEALED, NAME, 0, 9) == (b"abc", 3)


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
            blobs.append([Part(b"o", offset, b"%d" % offset)], 1)
        assert proxy.cuts == 3
        assert blobs.read(STREAM, b"o", 0, 9) == (b"012", 3)
        blobs.interrupt()
        with pytest.raises(LeaderLost):
            blobs.read(STREAM, b"o", 0, 9)


def test_place_of_the_files_does_not_change_unnoticed(url: str, tmp_path: Path) -> None:
    with database.connect(url) as connection:
        term = leader.acquire(connection, 0)
        for files in (tmp_path, None):
            check_location(connection, tmp_path, files)
        note_location(connection, term, tmp_path)
        check_location(connection, tmp_path, tmp_path)
        with pytest.raises(UnusableStore, match=r"set blobs\.directory"):
            check_location(connection, tmp_path, None)
        database.clear(connection)
        note_location(connection, term, None)
        check_location(connection, tmp_path, None)
        with pytest.raises(UnusableStore, match="in the database"):
            check_location(connection, tmp_path, tmp_path)
        database.clear(connection)
        (tmp_path / "blobs").symlink_to(tmp_path)
        with pytest.raises(UnusableStore, match=str(tmp_path)):
            check_location(connection, tmp_path, None)
