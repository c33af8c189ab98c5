"""The hash chain: what makes a hole, a flipped byte or a lost end of a journal impossible to miss.

    chain[0] = sha256(label + identity)          identity: 16 random bytes, one a journal
    chain[n] = sha256(chain[n-1] + sequence + record_first + record_last + body)

Numbers are 8 bytes, big-endian. A head is a place in the chain; a sealed head is one with its
journal's identity and a checksum, for where no neighbour could vouch for it (the witness, the
anchor of a trimmed journal). Pure: every store, also the simulator's, verifies with this code.
"""

import contextlib
import hashlib
import struct
from collections.abc import Iterable, Iterator

import msgspec

from taskyard.errors import JournalDamaged

#: Changes with the format, so that no row of one format can pass as one of another.
LABEL = b"taskyard journal 1"
IDENTITY_BYTES = 16
CHAIN_BYTES = 32

_NUMBERS = struct.Struct(">QQQ")
_HEAD = struct.Struct(f">{len(LABEL)}s{IDENTITY_BYTES}sQQ{CHAIN_BYTES}s")
_CHECKSUM_BYTES = 32
SEALED_BYTES = _HEAD.size + _CHECKSUM_BYTES


class Head(msgspec.Struct, frozen=True, gc=False):
    """A place in the chain: that of a row, or before the first."""

    sequence: int
    #: The last record up to here.
    record: int
    chain: bytes


class Row(msgspec.Struct, frozen=True, gc=False):
    """One turn's records, encoded by somebody else."""

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
    """The chain before the first row: two journals never share a row's chain."""
    return hashlib.sha256(LABEL + identity).digest()


def link(before: bytes, sequence: int, record_first: int, record_last: int, body: bytes) -> bytes:
    digest = hashlib.sha256(before + _NUMBERS.pack(sequence, record_first, record_last))
    digest.update(body)
    return digest.digest()


def next_row(head: Head, body: bytes, records: int) -> Row:
    """The row that follows `head` and holds `records` records."""
    sequence, first, last = head.sequence + 1, head.record + 1, head.record + records
    return Row(sequence, first, last, link(head.chain, sequence, first, last, body), body)


def follows(row: Row, head: Head) -> bool:
    """Whether this is exactly the row that was written after `head`."""
    if row.sequence != head.sequence + 1 or row.record_last <= head.record:
        return False
    return row == next_row(head, row.body, row.record_last - head.record)


def seal(identity: bytes, head: Head) -> bytes:
    packed = _HEAD.pack(LABEL, identity, head.sequence, head.record, head.chain)
    return packed + hashlib.sha256(packed).digest()


def unseal(sealed: bytes) -> tuple[bytes, Head] | None:
    """The identity and the head, or None if these are not the bytes that `seal` made."""
    packed, checksum = sealed[: _HEAD.size], sealed[_HEAD.size :]
    if len(packed) != _HEAD.size or hashlib.sha256(packed).digest() != checksum:
        return None
    label, identity, sequence, record, chain = _HEAD.unpack(packed)
    return (identity, Head(sequence, record, chain)) if label == LABEL else None


def verify(rows: Iterable[Row], start: Head, witness: Head | None = None) -> Iterator[Row]:
    """Hand on the rows after `start` for as long as each is the one that was written there.

    Raises JournalDamaged at the first that is not, or when the rows end before what the witness
    saw. A witness from before `start` says nothing: what it saw is trimmed.
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
            f"the journal ends at row {head.sequence}, its witness saw row {witness.sequence}",
            _rows_text(head.sequence + 1, witness.sequence, "acknowledged, {are} lost", ","),
        )


def _compare(head: Head, witness: Head | None) -> None:
    """A journal put back from a copy can be sound in itself and yet not be what was witnessed."""
    if witness is not None and head.sequence == witness.sequence and head != witness:
        raise JournalDamaged(
            f"row {head.sequence} is not the row {head.sequence} that the witness saw",
            "the journal and its witness are of different stories",
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
    """How far the damaged journal reaches, as far as it can still be read."""
    newest = max(row.sequence, witness.sequence if witness else 0)
    with contextlib.suppress(JournalDamaged):
        for later in rest:
            newest = max(newest, later.sequence)
    return newest


def _rows_text(first: int, last: int, verb: str, comma: str = "") -> str:
    if first == last:
        return f"row {first}{comma} {verb.format(are='is')}"
    return f"rows {first}..{last}{comma} {verb.format(are='are')}"
