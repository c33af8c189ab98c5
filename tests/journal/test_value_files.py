"""Values in files: stored once, whole or not at all, and checked when they are read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from taskyard.errors import ValueDamaged, ValueMissing, ValueNotStored
from taskyard.journal import value_files
from taskyard.journal.store import DISK_RESERVE_BYTES
from taskyard.journal.value_files import StoreTerms, ValueFiles, length_of, name_of

CONTENT = bytes(range(256)) * 40
NAME = name_of(CONTENT)


@pytest.fixture
def store(tmp_path: Path) -> ValueFiles:
    files = ValueFiles(tmp_path / "values")
    files.create(StoreTerms("a"))
    return files


def names(store: ValueFiles) -> list[str]:
    return [file.name for file in store.walk()]


def test_value_is_stored_under_its_hash_and_length(store: ValueFiles) -> None:
    assert store.put(CONTENT) == NAME
    assert NAME.endswith("-10240")
    assert length_of(NAME) == len(CONTENT)
    assert bytes(store.load(NAME)) == CONTENT
    assert store.read(NAME, 250, 10) == CONTENT[250:260]
    assert names(store) == [NAME]
    assert not [*store.unfinished()]
    assert store.path(NAME).stat().st_mode & 0o777 == 0o600


def test_mapped_memory_is_writable_and_the_file_stays(store: ValueFiles) -> None:
    store.put(CONTENT)
    view = store.load(NAME)
    view[0] = 77
    assert store.read(NAME, 0, 1) == b"\0"
    assert bytes(store.load(NAME)) == CONTENT


def test_second_put_of_a_value_writes_nothing(store: ValueFiles) -> None:
    store.put(CONTENT)
    inode = store.path(NAME).stat().st_ino
    assert store.put(bytearray(CONTENT)) == NAME
    assert store.path(NAME).stat().st_ino == inode


@pytest.mark.parametrize(
    "content", [CONTENT[:-1], CONTENT + b"x", b"\1" + CONTENT[1:]], ids=["short", "long", "altered"]
)
def test_damaged_file_is_refused_and_can_be_stored_again(store: ValueFiles, content: bytes) -> None:
    store.put(CONTENT)
    store.path(NAME).write_bytes(content)
    with pytest.raises(ValueDamaged, match=r"is damaged \(it was removed"):
        store.load(NAME)
    with pytest.raises(ValueMissing):
        store.load(NAME)
    store.put(CONTENT)
    assert bytes(store.load(NAME)) == CONTENT


def test_file_that_is_altered_later_is_checked_again(store: ValueFiles) -> None:
    store.put(CONTENT)
    store.load(NAME)
    store.path(NAME).write_bytes(b"\1" + CONTENT[1:])
    with pytest.raises(ValueDamaged):
        store.load(NAME)


def test_file_of_another_length_is_not_read_as_a_part(store: ValueFiles) -> None:
    store.put(CONTENT)
    os.truncate(store.path(NAME), 100)
    assert store.read(NAME, 0, 10) is None
    assert not store.has(NAME)
    store.put(CONTENT)
    assert store.read(NAME, 0, 10) == CONTENT[:10]


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "a" * 64, f"{'g' * 64}-1", f"{NAME}/x"])
def test_other_names_are_refused(store: ValueFiles, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a value"):
        store.path(name)


def test_link_in_place_of_a_value_is_refused(store: ValueFiles, tmp_path: Path) -> None:
    store.put(CONTENT)
    (tmp_path / "other").write_bytes(CONTENT)
    store.path(NAME).unlink()
    store.path(NAME).symlink_to(tmp_path / "other")
    with pytest.raises(Exception, match="symbolic link"):
        store.load(NAME)


def test_failed_write_leaves_nothing(store: ValueFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(ValueNotStored, match=r"10,240 bytes: No space left on device \(free"):
        store.put(CONTENT)
    assert not names(store)
    assert not [*store.unfinished()]


def test_full_disk_and_a_full_store_are_refused(
    store: ValueFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create(StoreTerms("a", problem="values: over the quota (…)"))
    with pytest.raises(ValueNotStored, match="over the quota"):
        store.put(CONTENT)
    store.create(StoreTerms("a"))
    monkeypatch.setattr(value_files, "free_bytes", lambda _: DISK_RESERVE_BYTES)
    with pytest.raises(ValueNotStored, match="nearly full"):
        store.put(CONTENT)
    with pytest.raises(ValueNotStored, match="no directory of values"):
        ValueFiles(store.directory / "other").put(CONTENT)


def test_killed_writer_leaves_no_visible_value(store: ValueFiles) -> None:
    program = """
import os, sys
from pathlib import Path
from taskyard.journal.value_files import ValueFiles
os.fdatasync = lambda _: os.kill(os.getpid(), 9)
ValueFiles(Path(sys.argv[1])).put(bytes(1 << 20))
"""
    ended = subprocess.run([sys.executable, "-c", program, store.directory], check=False)
    assert ended.returncode == -9
    assert not names(store)
    assert len([*store.unfinished()]) == 1


def test_many_writers_of_one_value_store_it_once(store: ValueFiles) -> None:
    stored: list[str] = []
    threads = [threading.Thread(target=lambda: stored.append(store.put(CONTENT))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored == [NAME] * 8
    assert names(store) == [NAME]
    assert not [*store.unfinished()]
    assert bytes(store.load(NAME)) == CONTENT


def test_removal_spares_a_value_that_was_used_meanwhile(store: ValueFiles) -> None:
    store.put(CONTENT)
    before_ns = time.time_ns()
    assert store.touch(NAME)
    assert not store.remove(NAME, before_ns)
    assert names(store) == [NAME]
    assert store.remove(NAME, time.time_ns())
    assert not names(store)
    assert not store.touch(NAME)
    assert not store.remove(NAME, time.time_ns())


def test_terms_are_read_by_other_processes(store: ValueFiles) -> None:
    assert ValueFiles(store.directory).terms() == StoreTerms("a")
    assert ValueFiles(store.directory / "x").terms() is None
    (store.directory / value_files.STORE_FILE).write_bytes(b"{")
    assert store.terms() is None
