"""Ended tasks: drop them from memory once the index has them, and find them again.

Compactions move ended tasks to the index on disk. A filter in memory answers most lookups, because
most names that arrive are new. Work that grows with the number of tasks is split into steps of a
few milliseconds, which the server runs between turns. Independent of when a compaction runs, and of
how it changes the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from taskyard.core.records import AnyRecord, Cancelled, Finished
from taskyard.journal.archive import END, Archive
from taskyard.journal.recovery import archivable, open_ledger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from taskyard.core.ledger import Ledger
    from taskyard.core.model import EndedTask
    from taskyard.journal.archive import Streams
    from taskyard.journal.store import StoreReader

#: Tasks dropped, or names read, in one step: a millisecond or two.
NAMES_PER_STEP: Final = 1_000

#: Recalled tasks stay in memory up to this number: some 20 MB.
RECALLED_MAX: Final = 100_000

#: The records that end tasks.
ENDING: Final[frozenset[type]] = frozenset((Finished, Cancelled))


#: At this size one new name in sixteen is looked up needlessly.
BITS_PER_NAME: Final = 16

#: A million names in 2 MiB. A smaller filter would soon have to grow.
CAPACITY_MIN: Final = 1 << 20


class NameFilter:
    """A Bloom filter with one hash: proves that a name is new, or answers that it may exist.

    A lookup in the index costs ten times as much as a test here. A name that was added is never
    reported as new. With more names than its capacity, false positives become more frequent. The
    hashes are of this process.
    """

    def __init__(self, names_expected: int = 0, capacity_min: int = CAPACITY_MIN) -> None:
        #: A power of two, so that the low bits of a hash select a byte. The highest bits select the
        #: bit in it.
        self.capacity = 1 << (max(names_expected, capacity_min, 1) - 1).bit_length()
        self._bits = bytearray(self.capacity * BITS_PER_NAME // 8)
        self._mask = len(self._bits) - 1
        #: Names added. A repeated name counts again.
        self.count = 0

    @property
    def is_full(self) -> bool:
        return self.count > self.capacity

    def add(self, names: Iterable[bytes]) -> None:
        bits, mask, count = self._bits, self._mask, 0
        for hashed in map(hash, names):
            bits[hashed & mask] |= 1 << (hashed >> 61 & 7)
            count += 1
        self.count += count

    def may_contain(self, names: list[bytes]) -> list[bytes]:
        """Return the names that may have been added. All other names are new."""
        bits, mask = self._bits, self._mask
        return [
            name
            for name, hashed in zip(names, map(hash, names), strict=True)
            # Most bytes are zero, so test that first.
            if (byte := bits[hashed & mask]) and byte >> (hashed >> 61 & 7) & 1
        ]


class EndedTasks:
    """Implements `recovery.EndedTaskIndex` for one ledger."""

    def __init__(self, index: Archive, ledger: Ledger, sequence: int) -> None:
        """Start with the tasks that ended up to `sequence`, the newest row."""
        self.index = index
        self.ledger = ledger
        #: Rows and the names that ended there. A name may have left memory meanwhile.
        self._ended: deque[tuple[int, list[bytes]]] = deque()
        self._recalled: deque[list[bytes]] = deque()
        self.ended_count = self.recalled_count = 0
        #: The last record that the index covers.
        covered = index.covered()
        self._record = 0 if covered is None else covered[1].record
        self.has_any = covered is not None
        #: Every name in the index. None until the filter is built.
        self._filter: NameFilter | None = None
        names = archivable(ledger, ledger.record)
        for start in range(0, len(names), NAMES_PER_STEP):
            self._note(sequence, names[start : start + NAMES_PER_STEP])

    def on_commit(self, sequence: int, records: Sequence[AnyRecord]) -> None:
        """Note the tasks that ended in a new row."""
        for record in records:
            if type(record) in ENDING:
                self._note(sequence, record.names)  # type: ignore[union-attr]

    def _note(self, sequence: int, names: list[bytes]) -> None:
        self._ended.append((sequence, names))
        self.ended_count += len(names)

    def find(self, names: list[bytes]) -> list[EndedTask]:
        """Return the ended tasks among these names, in no order, and count them as recalled."""
        if self._filter is not None:
            names = self._filter.may_contain(names)
        if not names:
            return []
        found = self.index.find(names)
        if found:
            self._recalled.append([one.name for one in found])
            self.recalled_count += len(found)
        return found

    def streams(self, name: bytes, attempt: int = END) -> Streams | None:
        return self.index.streams(name, attempt)

    def forget(self, sequence: int, record: int) -> Iterator[None]:
        """Drop the tasks that ended up to row `sequence`, which the index covers, in steps."""
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
                    self._filter.add(some)  # first, so that a name is always in one of both
                self._forget(some)
                yield

    def forget_recalled(self) -> Iterator[None]:
        """Drop recalled tasks from memory again, in steps."""
        for _ in range(len(self._recalled)):
            names = self._recalled.popleft()
            self.recalled_count -= len(names)
            for start in range(0, len(names), NAMES_PER_STEP):
                self._forget(names[start : start + NAMES_PER_STEP])
                yield

    def _forget(self, names: list[bytes]) -> None:
        self.ledger.archive(archivable(self.ledger, self._record, names))

    @property
    def needs_filter(self) -> bool:
        """The filter is missing, or it is full."""
        return self._filter is None or self._filter.is_full

    def fill_filter(self) -> Iterator[None]:
        """Build a filter of all names in the index, in steps. The index must not grow meanwhile.

        Until it is complete, the old filter stays, or every name is looked up.
        """
        made = NameFilter(self.index.count_stored() * 3 // 2)
        last: bytes | None = None
        while names := self.index.names(last, NAMES_PER_STEP):
            made.add(names)
            last = names[-1]
            yield
        self._filter = made


def recover(state: Path, store: StoreReader) -> EndedTasks:
    """Recover the ledger of a journal, and find the ended tasks in it."""
    ledger = open_ledger(state, store)
    return EndedTasks(Archive(state), ledger, store.head.sequence)
