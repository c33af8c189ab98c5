"""Ended tasks: which of them are in memory, and how to find those that are not.

The index on disk has what compactions have moved there. In front of it lies a filter in memory,
because most names that arrive are new. Whatever costs time that grows with the number of tasks is
given as steps, each a few milliseconds at most: whoever runs the turns takes them in between. It
must not know when a compaction runs, nor what it does to the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from taskyard.core.records import AnyRecord, Cancelled, Finished
from taskyard.journal.recovery import archivable, archivable_among

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from taskyard.core.ledger import Ledger
    from taskyard.core.model import EndedTask, Result
    from taskyard.journal.archive import Archive

#: Tasks forgotten, and names read, in one step: a millisecond or two.
NAMES_PER_STEP: Final = 1_000

#: Tasks that somebody spoke of again stay in memory until there are this many: some 20 MB.
RECALLED_MAX: Final = 100_000

_ENDING = (Finished, Cancelled)


#: With so many bits a name, one new name in sixteen is looked up in vain.
BITS_PER_NAME: Final = 16

#: For a million names, 2 MiB: smaller ones would only have to grow.
CAPACITY_MIN: Final = 1 << 20


class NameFilter:
    """Names that may be known. With more names than it is made for it says "may be" more often."""

    def __init__(self, names_expected: int = 0, capacity_min: int = CAPACITY_MIN) -> None:
        #: The next power of two, so that a byte's place is the low bits of a hash. The bit in it is
        #: said by the highest ones.
        self.capacity = 1 << (max(names_expected, capacity_min, 1) - 1).bit_length()
        self._bits = bytearray(self.capacity * BITS_PER_NAME // 8)
        self._mask = len(self._bits) - 1
        #: How many were added; some perhaps twice.
        self.count = 0

    @property
    def is_full(self) -> bool:
        return self.count > self.capacity

    def add(self, names: Iterable[bytes]) -> None:
        bits, mask, count = self._bits, self._mask, 0
        for place in map(hash, names):
            bits[place & mask] |= 1 << (place >> 61 & 7)
            count += 1
        self.count += count

    def may_contain(self, names: list[bytes]) -> list[bytes]:
        """Those of these names that may have been added; the others were not."""
        bits, mask = self._bits, self._mask
        return [
            name
            for name, place in zip(names, map(hash, names), strict=True)
            # Most bytes have no bit at all: to ask that first is quicker.
            if (byte := bits[place & mask]) and byte >> (place >> 61 & 7) & 1
        ]


class EndedTasks:
    """Keeps `recovery.EndedTaskIndex` for one ledger."""

    def __init__(self, index: Archive, ledger: Ledger, sequence: int) -> None:
        """`sequence` is the newest row: what has ended by now is in rows up to it."""
        self.index = index
        self.ledger = ledger
        #: Rows, and names that ended there; each is still in memory, or was forgotten meanwhile.
        self._ended: deque[tuple[int, list[bytes]]] = deque()
        self._recalled: deque[list[bytes]] = deque()
        self.ended_count = self.recalled_count = 0
        #: The last record that the index covers.
        covered = index.covered()
        self._record = 0 if covered is None else covered[1].record
        self.has_any = covered is not None
        #: Every name that is in the index and not in memory; None until it has been filled.
        self._filter: NameFilter | None = None
        names = archivable(ledger, ledger.record)
        for start in range(0, len(names), NAMES_PER_STEP):
            self._note(sequence, names[start : start + NAMES_PER_STEP])

    def on_commit(self, sequence: int, records: Sequence[AnyRecord]) -> None:
        """A row was written: remember what ended in it."""
        for record in records:
            if type(record) in _ENDING:
                self._note(sequence, record.names)  # type: ignore[union-attr]

    def _note(self, sequence: int, names: list[bytes]) -> None:
        self._ended.append((sequence, names))
        self.ended_count += len(names)

    def find(self, names: list[bytes]) -> list[EndedTask]:
        """Those of these names that have ended, in no order. They will be in memory again."""
        if self._filter is not None:
            names = self._filter.may_contain(names)
        if not names:
            return []
        found = self.index.find(names)
        if found:
            self._recalled.append([one.name for one in found])
            self.recalled_count += len(found)
        return found

    def result(self, name: bytes) -> Result | None:
        return self.index.result(name)

    def cause(self, name: bytes) -> bytes | None:
        return self.index.cause(name)

    def forget(self, sequence: int, record: int) -> Iterator[None]:
        """The index covers the rows up to this one: what ended there can leave memory."""
        self._record = record
        self.has_any = True
        while self._ended and self._ended[0][0] <= sequence:
            names: list[bytes] = []
            while self._ended and self._ended[0][0] <= sequence and len(names) < NAMES_PER_STEP:
                some = self._ended.popleft()[1]
                self.ended_count -= len(some)
                names += some
            for start in range(0, len(names), NAMES_PER_STEP):
                some = names[start : start + NAMES_PER_STEP]
                if self._filter is not None:
                    self._filter.add(some)  # before memory forgets them: never are they in neither
                self._forget(some)
                yield

    def forget_recalled(self) -> Iterator[None]:
        """What was looked up long ago can leave memory again, without more ado."""
        for _ in range(len(self._recalled)):
            names = self._recalled.popleft()
            self.recalled_count -= len(names)
            for start in range(0, len(names), NAMES_PER_STEP):
                self._forget(names[start : start + NAMES_PER_STEP])
                yield

    def _forget(self, names: list[bytes]) -> None:
        self.ledger.archive(archivable_among(self.ledger, names, self._record))

    @property
    def needs_filter(self) -> bool:
        """There is none yet, or it has become too small."""
        return self._filter is None or self._filter.is_full

    def fill_filter(self) -> Iterator[None]:
        """Make a filter of all names in the index, to which nobody must add meanwhile. Until it is
        there, names are looked up, or the old one is good."""
        made = NameFilter(self.index.count_stored() * 3 // 2)
        last: bytes | None = None
        while names := self.index.names(last, NAMES_PER_STEP):
            made.add(names)
            last = names[-1]
            yield
        self._filter = made
