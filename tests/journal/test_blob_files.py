"""Blobs in a directory, as local processes use it: stored whole, once, and checked."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from taskyard.core.model import Stream
from taskyard.errors import BytesDamaged, BytesMissing, BytesNotStored
from taskyard.journal import blob_files
from taskyard.journal.blob_files import BlobFiles, StoreTerms
from taskyard.journal.blobs import StreamKey, length_of, name_of
from taskyard.journal.store import DISK_RESERVE_BYTES

CONTENT = bytes(range(256)) * 40
NAME = name_of(CONTENT)


@pytest.fixture
def store(tmp_path: Path) -> BlobFiles:
    files = BlobFiles(tmp_path / "blobs")
    files.create(StoreTerms("a"))
    return files


def names(store: BlobFiles) -> list[str]:
    return [str(file.id) for file in store.walk()]


def unfinished(store: BlobFiles) -> list[Path]:
    return [*(store.directory / "unfinished").iterdir()]


def test_blob_is_stored_under_its_hash_and_length(store: BlobFiles) -> None:
    assert store.put(CONTENT) == NAME
    assert NAME.endswith("-10240")
    assert length_of(NAME) == len(CONTENT)
    assert bytes(store.load(NAME)) == CONTENT
    assert store.read(NAME, 250, 10) == (CONTENT[250:260], len(CONTENT))
    assert names(store) == [NAME]
    assert not unfinished(store)
    assert store.path(NAME).stat().st_mode & 0o777 == 0o600


def test_mapped_memory_is_writable_and_the_file_stays(store: BlobFiles) -> None:
    store.put(CONTENT)
    view = store.load(NAME)
    view[0] = 77
    assert store.read(NAME, 0, 1) == (b"\0", len(CONTENT))
    assert bytes(store.load(NAME)) == CONTENT


def test_second_put_of_a_blob_writes_nothing(store: BlobFiles) -> None:
    store.put(CONTENT)
    inode = store.path(NAME).stat().st_ino
    assert store.put(bytearray(CONTENT)) == NAME
    assert store.path(NAME).stat().st_ino == inode


@pytest.mark.parametrize(
    "content", [CONTENT[:-1], CONTENT + b"x", b"\1" + CONTENT[1:]], ids=["short", "long", "altered"]
)
def test_damaged_file_is_refused_and_can_be_stored_again(store: BlobFiles, content: bytes) -> None:
    store.put(CONTENT)
    store.path(NAME).write_bytes(content)
    with pytest.raises(BytesDamaged, match=r"is damaged \(it was removed"):
        store.load(NAME)
    with pytest.raises(BytesMissing):
        store.load(NAME)
    store.put(CONTENT)
    assert bytes(store.load(NAME)) == CONTENT


def test_file_that_is_altered_later_is_checked_again(store: BlobFiles) -> None:
    store.put(CONTENT)
    store.load(NAME)
    store.path(NAME).write_bytes(b"\1" + CONTENT[1:])
    with pytest.raises(BytesDamaged):
        store.load(NAME)


def test_file_of_another_length_is_not_read_as_a_part(store: BlobFiles) -> None:
    store.put(CONTENT)
    os.truncate(store.path(NAME), 100)
    with pytest.raises(OSError, match="100 bytes are left"):
        store.read(NAME, 0, 10)
    assert not store.touch(NAME)
    store.put(CONTENT)
    assert store.read(NAME, 0, 10) == (CONTENT[:10], len(CONTENT))


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "a" * 64, f"{'g' * 64}-1", f"{NAME}/x"])
def test_other_names_are_refused(store: BlobFiles, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a blob"):
        store.path(name)


def test_link_in_place_of_a_blob_is_refused(store: BlobFiles, tmp_path: Path) -> None:
    store.put(CONTENT)
    (tmp_path / "other").write_bytes(CONTENT)
    store.path(NAME).unlink()
    store.path(NAME).symlink_to(tmp_path / "other")
    with pytest.raises(Exception, match="symbolic link"):
        store.load(NAME)


def test_failed_write_leaves_nothing(store: BlobFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(BytesNotStored, match=r"10,240 bytes in .*: No space left on device \(free"):
        store.put(CONTENT)
    assert not names(store)
    assert not unfinished(store)


def test_full_disk_and_a_full_store_are_refused(
    store: BlobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create(StoreTerms("a", problem="blobs: over the quota (…)"))
    with pytest.raises(BytesNotStored, match="over the quota"):
        store.put(CONTENT)
    store.create(StoreTerms("a"))
    monkeypatch.setattr(blob_files, "free_bytes", lambda _: DISK_RESERVE_BYTES)
    with pytest.raises(BytesNotStored, match="nearly full"):
        store.put(CONTENT)
    with pytest.raises(BytesNotStored, match="no directory of blobs"):
        BlobFiles(store.directory / "other").put(CONTENT)


def test_killed_writer_leaves_no_visible_value(store: BlobFiles) -> None:
    program = """
import os, sys
from collections.abc import Callable
from pathlib import Path
from taskyard.journal.blob_files import BlobFiles
os.fdatasync = lambda _: os.kill(os.getpid(), 9)
BlobFiles(Path(sys.argv[1])).put(bytes(1 << 20))
"""
    ended = subprocess.run([sys.executable, "-c", program, store.directory], check=False)
    assert ended.returncode == -9
    assert not names(store)
    assert len(unfinished(store)) == 1


def test_many_writers_of_one_blob_store_it_once(store: BlobFiles) -> None:
    stored: list[str] = []
    threads = [threading.Thread(target=lambda: stored.append(store.put(CONTENT))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored == [NAME] * 8
    assert names(store) == [NAME]
    assert not unfinished(store)
    assert bytes(store.load(NAME)) == CONTENT


def test_removal_spares_a_blob_that_was_used_meanwhile(store: BlobFiles) -> None:
    store.put(CONTENT)
    before_ns = time.time_ns()
    assert store.touch(NAME)
    assert not store.remove(NAME, before_ns)
    assert names(store) == [NAME]
    assert store.remove(NAME, time.time_ns())
    assert not names(store)
    assert not store.touch(NAME)
    assert not store.remove(NAME, time.time_ns())


def test_terms_are_read_by_other_processes(store: BlobFiles) -> None:
    assert BlobFiles(store.directory).terms() == StoreTerms("a")
    assert BlobFiles(store.directory / "x").terms() is None
    (store.directory / blob_files.TERMS_FILE).write_bytes(b"{")
    assert store.terms() is None


def test_sealed_stream_leaves_no_directory(store: BlobFiles) -> None:
    key = StreamKey(b"c" * 300, b"~" * 300, 1, Stream.STDOUT)
    store.append(key, 0, CONTENT)
    assert store.seal(key, NAME)
    assert not [*(store.directory / "streams").iterdir()]


@pytest.mark.parametrize("characters", [*range(188, 200), 1000])
def test_stream_with_a_name_of_any_length_is_found(store: BlobFiles, characters: int) -> None:
    keys = [StreamKey(b"", name * characters, 1, Stream.STDOUT) for name in (b".", b"t", b"/")]
    for key in keys:
        store.append(key, 0, CONTENT)
    assert {file.id for file in store.walk()} == {*keys}


def test_other_file_among_the_streams_is_left_alone(store: BlobFiles) -> None:
    (store.directory / "streams" / "a").mkdir(parents=True)
    (store.directory / "streams" / "a" / "b").touch()
    assert not [*store.walk()]


@pytest.mark.parametrize("is_stored_again", [True, False])
def test_blob_that_a_killed_process_has_hidden_is_there_again(
    store: BlobFiles, *, is_stored_again: bool
) -> None:
    store.put(CONTENT)
    hidden = store.directory / "unfinished" / f"{NAME}.removed"
    store.path(NAME).rename(hidden)
    if is_stored_again:
        store.put(CONTENT)
    store.remove_unfinished(time.time_ns())
    assert bytes(store.load(NAME)) == CONTENT
    assert not unfinished(store)


def test_many_streams_are_open_in_turn(store: BlobFiles) -> None:
    keys = [StreamKey(b"", b"a", number, Stream.STDOUT) for number in range(1, 100)]
    for start, end in ((0, 10), (10, len(CONTENT))):
        for key in keys:
            store.append(key, start, CONTENT[start:end])
    for key in keys:
        assert store.seal(key, NAME)
    assert names(store) == [NAME]
    store.close()


def test_stream_whose_sync_failed_is_dropped(
    store: BlobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = StreamKey(b"", b"a", 1, Stream.STDOUT)
    store.append(key, 0, CONTENT)

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "bad disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="bad disk"):
            store.seal(key, NAME)
    assert store.length(key) == 0
    assert not store.seal(key, NAME)


def test_name_that_a_killed_process_left_is_synced_once(
    store: BlobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(CONTENT)
    synced: list[Path] = []
    monkeypatch.setattr(blob_files, "sync_directory", synced.append)
    assert store.touch(NAME)
    assert synced == []
    other = BlobFiles(store.directory)
    assert other.touch(NAME)
    assert other.touch(NAME)
    assert synced == [store.path(NAME).parent]


class _Killed(BaseException):
    """The end of the process in the middle of a call."""


#: Calls of the system that change something.
_CALLS = ("open", "pwrite", "fdatasync", "fsync", "utime", "rename", "mkdir", "chmod", "unlink")


@pytest.mark.parametrize("error", [_Killed(), OSError(errno.EIO, "Input/output error")])
def test_every_call_may_be_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """What was acknowledged is there, and the sender goes on with what is missing."""
    key = StreamKey(b"c", b"t" * 300, 1, Stream.STDOUT)
    monkeypatch.setattr(blob_files, "SYNC_BYTES", 1000)
    for calls in range(200):
        directory = tmp_path / str(calls)
        acknowledged = {"length": 0, "sealed": 0}
        with monkeypatch.context() as patch, contextlib.suppress(type(error)):
            _fail_after(patch, calls, error)
            _send(BlobFiles(directory), key, acknowledged)
        if acknowledged["sealed"]:
            again = BlobFiles(directory)
            assert again.touch(NAME)
        else:
            again = BlobFiles(directory)
            assert again.touch(NAME) or again.length(key) >= acknowledged["length"]
            _send(again, key, {"length": 0, "sealed": 0})
        assert again.read(NAME, 0, len(CONTENT)) == (CONTENT, len(CONTENT))
        assert names(again) == [NAME]
        again.close()
        if acknowledged["sealed"]:
            return
    pytest.fail("the calls never came to an end")


def _fail_after(patch: pytest.MonkeyPatch, calls: int, error: BaseException) -> None:
    """Let every call after so many fail, as if the process were gone."""
    left = [calls]

    def failing(call: Callable[..., object]) -> Callable[..., object]:
        def failing_call(*args: object, **more: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise error
            return call(*args, **more)

        return failing_call

    for name in _CALLS:
        patch.setattr(os, name, failing(getattr(os, name)))


def _send(store: BlobFiles, key: StreamKey, acknowledged: dict[str, int]) -> None:
    """Send a stream from where the store's part of it ends, and seal it."""
    if not store.touch(NAME):
        while (at := store.length(key)) < len(CONTENT):
            acknowledged["length"] = store.append(key, at, CONTENT[at : at + 1500])
        assert store.seal(key, NAME)
    acknowledged["sealed"] = 1
