"""The witness: a torn write leaves the older slot, and one of another journal is detected."""

import os
from pathlib import Path

import pytest

from taskyard.errors import JournalDamaged
from taskyard.journal import witness
from taskyard.journal.chain import SEALED_BYTES, Head, origin
from taskyard.journal.witness import FILE_NAME, SLOT_SPACING_BYTES, Witness

IDENTITY = bytes(range(16))


def head(sequence: int) -> Head:
    return Head(sequence, 2 * sequence, origin(bytes([sequence] * 16)))


@pytest.fixture
def seen(tmp_path: Path) -> Witness:
    witness.create(tmp_path, IDENTITY, head(0))
    return Witness(tmp_path, IDENTITY)


def spoil(directory: Path, offset: int) -> None:
    with (directory / FILE_NAME).open("r+b") as file:
        file.seek(offset)
        file.write(b"torn")


def test_no_file_is_no_witness(tmp_path: Path) -> None:
    assert witness.read(tmp_path) is None


def test_new_witness_is_private_and_saw_the_origin(tmp_path: Path) -> None:
    witness.create(tmp_path, IDENTITY, head(0))
    assert witness.read(tmp_path) == (IDENTITY, head(0))
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_newest_head_is_remembered(tmp_path: Path, seen: Witness, count: int) -> None:
    for sequence in range(1, count + 1):
        seen.update(head(sequence))
    assert witness.read(tmp_path) == (IDENTITY, head(count))
    seen.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_torn_write_leaves_the_older_head(tmp_path: Path, seen: Witness, count: int) -> None:
    for sequence in range(1, count + 1):
        seen.update(head(sequence))
    seen.close()
    newest = SLOT_SPACING_BYTES if count % 2 else 0
    spoil(tmp_path, newest)
    assert witness.read(tmp_path) == (IDENTITY, head(count - 1))


def test_reopened_witness_never_overwrites_its_newest_head(tmp_path: Path, seen: Witness) -> None:
    seen.update(head(1))
    seen.close()
    for sequence in (2, 3):
        again = Witness(tmp_path, IDENTITY)
        before = (tmp_path / FILE_NAME).read_bytes()
        again.update(head(sequence))
        after = (tmp_path / FILE_NAME).read_bytes()
        again.close()
        kept = slice(SLOT_SPACING_BYTES, None) if sequence == 2 else slice(0, SEALED_BYTES)
        assert before[kept] == after[kept]
        assert witness.read(tmp_path) == (IDENTITY, head(sequence))


def test_torn_slot_is_the_one_written_next(tmp_path: Path, seen: Witness) -> None:
    seen.update(head(1))
    seen.update(head(2))
    seen.close()
    spoil(tmp_path, 0)
    again = Witness(tmp_path, IDENTITY)
    again.update(head(3))
    again.close()
    spoil(tmp_path, 0)
    assert witness.read(tmp_path) == (IDENTITY, head(1))


def test_two_torn_slots_are_damage(tmp_path: Path, seen: Witness) -> None:
    seen.close()
    spoil(tmp_path, 0)
    spoil(tmp_path, SLOT_SPACING_BYTES)
    with pytest.raises(JournalDamaged, match="the witness is unreadable"):
        witness.read(tmp_path)


def test_short_write_is_a_full_disk(
    tmp_path: Path, seen: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 7)
    with pytest.raises(OSError, match="No space left"):
        seen.update(head(1))
    monkeypatch.undo()
    seen.close()
    assert witness.read(tmp_path) == (IDENTITY, head(0))
