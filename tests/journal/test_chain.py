"""The chain: every kind of damaged rows is reported with its consequence."""

from collections.abc import Iterable, Iterator

import msgspec
import pytest

from taskyard.errors import JournalDamaged
from taskyard.journal.chain import (
    SEALED_BYTES,
    Head,
    Row,
    link,
    next_row,
    origin,
    seal,
    unseal,
    verify,
)
from tests.kit.cases import each_case

IDENTITY = bytes(range(16))
START = Head(0, 0, origin(IDENTITY))


def written(count: int) -> list[Row]:
    rows: list[Row] = []
    for number in range(count):
        head = rows[-1].head if rows else START
        rows.append(next_row(head, b"body %d" % number, records=1 + number % 3))
    return rows


def changed(rows: list[Row], sequence: int, **fields: object) -> list[Row]:
    return [
        msgspec.structs.replace(row, **fields) if row.sequence == sequence else row for row in rows
    ]


def damage(rows: Iterable[Row], start: Head = START, witness: Head | None = None) -> str:
    with pytest.raises(JournalDamaged) as caught:
        list(verify(rows, start, witness))
    return str(caught.value)


def test_chain_matches_its_documented_format() -> None:
    assert origin(IDENTITY).hex() == (
        "2c592c387a1824164f44e796981257e87e401796bac1a2a7bdb25d5f82678000"
    )
    assert link(origin(IDENTITY), 1, 1, 3, b"body").hex() == (
        "f62f0c78172e59a939942935b2991763996ddbcfe68046355afff0884b40ccf9"
    )


def test_rows_number_their_records_without_gaps() -> None:
    assert [(row.sequence, row.record_first, row.record_last) for row in written(4)] == [
        (1, 1, 1),
        (2, 2, 3),
        (3, 4, 6),
        (4, 7, 7),
    ]


def test_sound_rows_are_handed_on_as_they_are() -> None:
    rows = written(9)
    assert list(verify(rows, START, rows[-1].head)) == rows


def test_verification_starts_at_any_row() -> None:
    rows = written(9)
    assert list(verify(rows[4:], rows[3].head, rows[-1].head)) == rows[4:]


def test_rows_before_the_damage_are_handed_on() -> None:
    rows = verify(changed(written(9), 3, body=b"other"), START)
    assert [next(rows).sequence, next(rows).sequence] == [1, 2]
    with pytest.raises(JournalDamaged):
        next(rows)


def test_hole_is_reported_with_the_lost_rows() -> None:
    rows = [row for row in written(9) if row.sequence not in (5, 6, 7)]
    assert damage(rows) == ("rows 5..7 are missing: rows 5..7 are lost; rows 8..9 can't be trusted")


def test_hole_of_one_row_at_the_beginning_is_named() -> None:
    assert damage(written(2)[1:]) == ("row 1 is missing: row 1 is lost; row 2 can't be trusted")


@pytest.mark.parametrize(
    "fields",
    [
        {"body": b"other"},
        {"chain": bytes(32)},
        {"record_first": 9},
        {"record_first": -9},
        {"record_last": 99},
        {"record_last": 9},
        {"record_last": -9},
        {"record_first": -9, "record_last": -9},
    ],
)
def test_flipped_byte_is_reported_with_the_lost_rows(fields: dict[str, object]) -> None:
    assert damage(changed(written(9), 6, **fields)) == (
        "row 6 does not match its chain: rows 6..9 can't be trusted"
    )


def test_witnessed_rows_after_the_damage_are_not_trusted() -> None:
    rows = written(12)
    assert damage(changed(rows[:9], 6, body=b""), witness=rows[11].head) == (
        "row 6 does not match its chain: rows 6..12 can't be trusted"
    )


def test_row_out_of_order_does_not_match() -> None:
    rows = written(3)
    assert damage([rows[0], rows[0]]) == ("row 1 does not match its chain: row 1 can't be trusted")


def test_rows_of_another_journal_do_not_match() -> None:
    other = Head(0, 0, origin(bytes(16)))
    assert "row 1 does not match its chain" in damage(written(2), start=other)


def test_shorter_journal_than_its_witness_is_refused() -> None:
    rows = written(12)
    assert damage(rows[:9], witness=rows[11].head) == (
        "the journal ends at row 9, its witness at row 12: rows 10..12, acknowledged, are lost"
    )


def test_one_row_shorter_is_refused() -> None:
    rows = written(2)
    assert damage(rows[:1], witness=rows[1].head).endswith("row 2, acknowledged, is lost")


def test_journal_may_be_longer_than_its_witness() -> None:
    rows = written(5)
    assert list(verify(rows, START, rows[2].head)) == rows


def test_other_rows_of_the_same_length_are_refused() -> None:
    other = next_row(written(2)[-1].head, b"another third row", records=1)
    assert "row 3 differs from row 3 of the witness" in damage(written(4), witness=other.head)


def test_witness_is_compared_with_the_last_trimmed_row() -> None:
    rows = written(4)
    other = Head(2, 3, bytes(32))
    assert "row 2 differs from row 2" in damage(rows[2:], rows[1].head, other)
    assert list(verify([], rows[3].head, rows[3].head)) == []


def test_witness_from_before_the_trimmed_rows_proves_nothing() -> None:
    rows = written(4)
    assert list(verify(rows[2:], rows[1].head, rows[0].head)) == rows[2:]


def test_unreadable_end_does_not_hide_the_first_damage() -> None:
    def rows() -> Iterator[Row]:
        yield from changed(written(4), 2, body=b"other")
        raise JournalDamaged("what follows can't be read")

    assert damage(rows()) == "row 2 does not match its chain: rows 2..4 can't be trusted"


def test_sealed_head_comes_back() -> None:
    head = Head(7, 12, origin(IDENTITY))
    assert unseal(seal(IDENTITY, head)) == (IDENTITY, head)


@each_case("position", range(SEALED_BYTES))
def test_seal_does_not_survive_a_flipped_byte(position: int) -> None:
    sealed = bytearray(seal(IDENTITY, START))
    sealed[position] ^= 0x10
    assert unseal(bytes(sealed)) is None


@pytest.mark.parametrize("size", [0, 1, SEALED_BYTES - 1])
def test_seal_does_not_survive_a_cut(size: int) -> None:
    assert unseal(seal(IDENTITY, START)[:size]) is None


def test_seal_of_another_format_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskyard.journal.chain.LABEL", b"TASKYARD journal 2")
    sealed = seal(IDENTITY, START)
    monkeypatch.undo()
    assert unseal(sealed) is None
