"""The hash chain, which reveals a missing row, a flipped byte or a lost end of the journal.

    chain[0] = sha256(label + identity)          identity: 16 random bytes for each journal
    chain[n] = sha256(chain[n-1] + sequence + record_first + record_last + body)

Numbers are 8 bytes, big-endian. A head is a position in the chain. A sealed head adds the journal's
identity and a checksum, for places without neighbouring rows: the witness, and the anchor of a
trimmed journal. Pure: every store, the simulator's included, verifies with this code.
"""

import contextlib
import hashlib
import struct
from collections.abc import Iterable, Iterator

import msgspec

from taskyard.errors import JournalDamaged, UnknownFormat

#: Changes with the format, so that a row of one format is invalid in another.
LABEL = b"TASKYARD journal 1"
IDENTITY_BYTES = 16
CHAIN_BYTES = 32

_NUMBERS = struct.Struct(">QQQ")
_HEAD = struct.Struct(f">{len(LABEL)}s{IDENTITY_BYTES}sQQ{CHAIN_BYTES}s")
_CHECKSUM_BYTES = 32
SEALED_BYTES = _HEAD.size + _CHECKSUM_BYTES


class Head(msgspec.Struct, frozen=True, gc=False):
    """A position in the chain: at a row, or before the first."""

    sequence: int
    #: The last record up to here.
    record: int
    chain: bytes


class Row(msgspec.Struct, frozen=True, gc=False):
    """The records of one turn, encoded."""

    sequence: int
    record_first: int
    record_last: int
    chain: bytes
    body: bytes

    @property
    def head(self) -> Head:
        return Head(self.sequence, self.record_last, self.chain)

    def holds(self, record: int) -> bool:
        return self.record_first <= record <= self.record_last


def origin(identity: bytes) -> bytes:
    """Return the chain before the first row. It differs between any two journals."""
    return hashlib.sha256(LABEL + identity).digest()


def link(before: bytes, sequence: int, record_first: int, record_last: int, body: bytes) -> bytes:
    digest = hashlib.sha256(before + _NUMBERS.pack(sequence, record_first, record_last))
    digest.update(body)
    return digest.digest()


def next_row(head: Head, body: bytes, records: int) -> Row:
    """Build the row that follows `head` and holds `records` records."""
    sequence, first, last = head.sequence + 1, head.record + 1, head.record + records
    return Row(sequence, first, last, link(head.chain, sequence, first, last, body), body)


def follows(row: Row, head: Head) -> bool:
    """Return whether this is exactly the row that was written after `head`."""
    if row.sequence != head.sequence + 1 or row.record_last <= head.record:
        return False
    return row == next_row(head, row.body, row.record_last - head.record)


def seal(identity: bytes, head: Head) -> bytes:
    """Return the identity and the head with a checksum. Later heads of a journal are greater."""
    packed = _HEAD.pack(LABEL, identity, head.sequence, head.record, head.chain)
    return packed + hashlib.sha256(packed).digest()


def unseal(sealed: bytes) -> tuple[bytes, Head] | None:
    """Return the identity and the head, or None if `seal` did not make these bytes."""
    packed, checksum = sealed[: _HEAD.size], sealed[_HEAD.size :]
    if len(packed) != _HEAD.size or hashlib.sha256(packed).digest() != checksum:
        return None
    label, identity, sequence, record, chain = _HEAD.unpack(packed)
    return (identity, Head(sequence, record, chain)) if label == LABEL else None


def unknown_format(what: str, found: int, known: int) -> UnknownFormat:
    """Return the error for a format number of a newer version."""
    return UnknownFormat(
        f"{what} has format {found}, but this version of Taskyard reads format {known} (use the "
        "version that wrote it)"
    )


def verify(rows: Iterable[Row], start: Head, witness: Head | None = None) -> Iterator[Row]:
    """Yield the rows after `start` while each is the row that was written there.

    Raises JournalDamaged at the first row that is not, or when the rows end before the witnessed
    head. A witness from before `start` proves nothing: its row is trimmed.
    """
    head, rest = start, iter(rows)
    _compare(head, witness)
    for row in rest:
        if not follows(row, head):
            raise _damage(row, head, _newest(row, rest, witness))
        head = row.head
        _compare(head, witness)
        yield row
    if witness is not None and head.sequence < witness.sequence:
        raise JournalDamaged(
            f"the journal ends at row {head.sequence}, its witness at row {witness.sequence}",
            _rows_text(head.sequence + 1, witness.sequence, "acknowledged, {are} lost", ","),
        )


def _compare(head: Head, witness: Head | None) -> None:
    """Compare a head with the witness: a sound copy may still be another journal."""
    if witness is not None and head.sequence == witness.sequence and head != witness:
        raise JournalDamaged(
            f"row {head.sequence} differs from row {head.sequence} of the witness",
            "the journal and its witness do not belong together",
        )


def _damage(row: Row, head: Head, newest: int) -> JournalDamaged:
    expected = head.sequence + 1
    if row.sequence <= expected:
        return JournalDamaged(
            f"row {row.sequence} does not match its chain",
            _rows_text(row.sequence, newest, "can't be trusted"),
        )
    return JournalDamaged(
        _rows_text(expected, row.sequence - 1, "{are} missing"),
        _rows_text(expected, row.sequence - 1, "{are} lost")
        + "; "
        + _rows_text(row.sequence, newest, "can't be trusted"),
    )


def _newest(row: Row, rest: Iterator[Row], witness: Head | None) -> int:
    """Return the last row of the damaged journal that can still be read."""
    newest = max(row.sequence, witness.sequence if witness else 0)
    with contextlib.suppress(JournalDamaged):
        for later in rest:
            newest = max(newest, later.sequence)
    return newest


def _rows_text(first: int, last: int, verb: str, comma: str = "") -> str:
    if first == last:
        return f"row {first}{comma} {verb.format(are='is')}"
    return f"rows {first}..{last}{comma} {verb.format(are='are')}"
