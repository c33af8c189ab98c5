"""A snapshot's file: every byte is verified, and an unfinished file never has its name."""

import os
from pathlib import Path

import pytest

from simulator import snapshots
from taskyard.core.apply import apply
from taskyard.core.ledger import Ledger
from taskyard.core.model import Submission
from taskyard.core.records import Submitted
from taskyard.core.snapshots.columns import CHUNK_TASKS
from taskyard.errors import JournalDamaged, JournalFailed, StateError, UnknownFormat
from taskyard.journal import snapshot
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.journal.store import Head, MemoryStore
from tests.journal.scenarios import WritingYard, rich_story, unfinished

IDENTITY = b"sixteen bytes .."


@pytest.fixture(scope="module")
def yard() -> WritingYard:
    return rich_story(MemoryStore())


@pytest.fixture(scope="module")
def ledger(yard: WritingYard) -> Ledger:
    return yard.scheduler.ledger


@pytest.fixture(scope="module")
def head(ledger: Ledger) -> Head:
    return Head(77, ledger.record, b"c" * 32)


def test_snapshot_comes_back_as_it_was(ledger: Ledger, head: Head, tmp_path: Path) -> None:
    path = snapshots.write(tmp_path, IDENTITY, head, ledger)
    assert path == tmp_path / "snapshots" / "000000000077.snapshot"
    with snapshot.read(tmp_path, 77) as taken:
        assert (taken.identity, taken.head) == (IDENTITY, head)
        taken.verify()
        restored = taken.restore()
    assert taken.rest.tasks == len(restored.tasks) > 0
    assert ledger_fingerprint(restored) == unfinished(ledger_fingerprint(ledger))


def test_snapshot_is_private(ledger: Ledger, head: Head, tmp_path: Path) -> None:
    path = snapshots.write(tmp_path, IDENTITY, head, ledger)
    assert [oct(one.stat().st_mode & 0o777) for one in (path.parent, path)] == ["0o700", "0o600"]


def test_snapshot_is_synced_before_it_has_its_name_and_the_name_after(
    ledger: Ledger, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshots").mkdir()
    story: list[str] = []
    sync, rename = os.fsync, os.rename

    def told_sync(descriptor: int) -> None:
        story.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        sync(descriptor)

    def told_rename(source: Path, target: Path) -> None:
        story.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", told_sync)
    monkeypatch.setattr(os, "rename", told_rename)
    snapshots.write(tmp_path, IDENTITY, head, ledger)
    name = "000000000077.snapshot"
    assert story == [f"sync {name}.new", f"rename {name}.new {name}", "sync snapshots"]


def test_ledger_of_another_record_is_not_written(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the row ends at 1"):
        snapshots.write(tmp_path, IDENTITY, Head(1, 1, bytes(32)), ledger)


def test_newest_comes_first_and_unfinished_ones_do_not_count(tmp_path: Path) -> None:
    assert snapshot.sequences(tmp_path) == []
    folder = tmp_path / snapshot.FOLDER
    folder.mkdir()
    names = ("000000000009.snapshot", "000000000010.snapshot", "000000000011.snapshot.new", "x")
    for name in (*names, "9.snapshot", "1000000000000.snapshot"):
        (folder / name).touch()
    assert snapshot.sequences(tmp_path) == [1_000_000_000_000, 10, 9]


def test_snapshot_replaces_those_that_a_killed_writer_left(
    ledger: Ledger, head: Head, tmp_path: Path
) -> None:
    folder = tmp_path / snapshot.FOLDER
    folder.mkdir()
    for name in ("000000000009.snapshot", "000000000011.snapshot.new", "000000000077.snapshot.new"):
        (folder / name).write_bytes(b"half")
    snapshots.write(tmp_path, IDENTITY, head, ledger)
    assert {path.name for path in folder.iterdir()} == {
        "000000000009.snapshot",
        "000000000077.snapshot",
    }


@pytest.mark.slow
@pytest.mark.no_cover
def test_every_flipped_byte_is_refused(ledger: Ledger, head: Head) -> None:
    content = snapshots.encode(IDENTITY, head, ledger)
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 0x10
        with pytest.raises(StateError, match=r"snapshot it(:| has| holds| can't be read)"):
            snapshots.decode(bytes(flipped), "it")


def test_every_other_length_is_refused(ledger: Ledger, head: Head) -> None:
    content = snapshots.encode(IDENTITY, head, ledger)
    for length in range(len(content)):
        with pytest.raises(JournalDamaged):
            snapshots.decode(content[:length], "it")
    with pytest.raises(JournalDamaged, match="can't be read"):
        snapshots.decode(content + b"\0", "it")


def test_unknown_format_is_refused_with_a_hint(ledger: Ledger, head: Head) -> None:
    content = bytearray(snapshots.encode(IDENTITY, head, ledger))
    content[len(snapshot.MAGIC) + 3] = 9
    with pytest.raises(UnknownFormat, match=r"has format 9, .* \(use the version that wrote it\)"):
        snapshots.decode(bytes(content), "it")


def test_invalid_format_number_is_damage(ledger: Ledger, head: Head) -> None:
    content = bytearray(snapshots.encode(IDENTITY, head, ledger))
    content[len(snapshot.MAGIC)] = 9
    with pytest.raises(JournalDamaged, match="it: the format number is damaged"):
        snapshots.decode(bytes(content), "it")


def test_block_that_can_not_be_decoded_is_refused(
    ledger: Ledger, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_encode", lambda _: b"\xc1")
    content = snapshots.encode(IDENTITY, head, ledger)
    with pytest.raises(JournalDamaged, match="has a block that can't be read"):
        snapshots.decode(content, "it")


def test_ledger_of_another_record_is_not_encoded(head: Head) -> None:
    with pytest.raises(ValueError, match="the ledger is at record 0"):
        snapshots.encode(IDENTITY, head, Ledger())


@pytest.mark.slow
@pytest.mark.parametrize("change", ["lost", "doubled", "swapped"])
def test_blocks_that_are_not_those_that_were_written_are_refused(change: str) -> None:
    """Each block alone is sound."""
    ledger = Ledger()
    names = [b"%d" % number for number in range(3 * CHUNK_TASKS)]
    for start in range(0, len(names), CHUNK_TASKS):
        apply(ledger, Submitted(1, Submission(names[start : start + CHUNK_TASKS])))
    content = snapshots.encode(IDENTITY, Head(3, 3, bytes(32)), ledger)
    assert len(snapshots.decode(content, "it").tasks) == len(names)
    blocks = blocks_of(content)
    first, second, third, *rest = blocks
    changed = {
        "lost": [first, third, *rest],
        "doubled": [first, second, second, third, *rest],
        "swapped": [second, first, third, *rest],
    }[change]
    end = content[snapshot.HEADER_BYTES + sum(map(len, blocks)) :]
    wrong = content[: snapshot.HEADER_BYTES] + b"".join(changed) + end
    with pytest.raises(JournalDamaged, match=r"snapshot it (has|can't be read)"):
        snapshots.decode(wrong, "it")


def blocks_of(content: bytes) -> list[bytes]:
    blocks: list[bytes] = []
    place, trailer_bytes = snapshot.HEADER_BYTES, 20
    while place < len(content) - trailer_bytes:
        length = int.from_bytes(content[place + 1 : place + 9], "big") + 13
        blocks.append(content[place : place + length])
        place += length
    return blocks


def test_snapshot_under_another_name_is_refused(ledger: Ledger, head: Head, tmp_path: Path) -> None:
    path = snapshots.write(tmp_path, IDENTITY, head, ledger)
    path.rename(snapshot.path_of(tmp_path, 78))
    with pytest.raises(JournalDamaged, match=r"000000000078\.snapshot belongs to row 77"):
        snapshot.read(tmp_path, 78)


def test_snapshot_that_can_not_be_opened_is_the_disks_failure(tmp_path: Path) -> None:
    with pytest.raises(JournalFailed, match=r"000000000005\.snapshot: No such file"):
        snapshot.read(tmp_path, 5)
