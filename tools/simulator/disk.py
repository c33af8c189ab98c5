"""The simulated disk: a journal that implements `Store` and fails as a real one does.

It hashes and verifies with `journal.chain`, as every store does, and reports each row to the
checkers when it is durable. A crash loses or tears rows that were not synced. The witness is
written after the commit and not synced, so a power cut may leave an older witness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random

import msgspec

from simulator.outputs import named_by
from simulator.plan import Faults, chance
from taskyard.core.ledger import Ledger, to_ended_task
from taskyard.core.model import EndedTask
from taskyard.core.records import Cancelled, Finished, Progressed
from taskyard.errors import JournalFailed
from taskyard.journal import chain
from taskyard.journal.archive import END, Streams
from taskyard.journal.chain import Head, Row
from taskyard.journal.recovery import archivable, causes_in, decode, outputs_in, results_in
from taskyard.journal.store import DISK_RESERVE_BYTES, MemoryStore, check_row


class Crashed(Exception):
    """The broker's process ends here."""


class SimStore(MemoryStore):
    """The journal of one simulated broker. It outlives the broker's crashes: see `reopen`."""

    def __init__(self, rng: Random, faults: Faults, durable: Callable[[Row], None]) -> None:
        super().__init__(rng.randbytes(chain.IDENTITY_BYTES))
        self._rng = rng
        self._faults = faults
        #: Called with each row when no crash can lose it any more.
        self._durable = durable
        self._witness = self._anchor
        self._witness_synced = self._anchor
        self._broken = False
        #: The duration of the latest commit. The host lets that time pass.
        self.commit_ns = 0
        #: Called in a commit, when its row is durable.
        self.on_kept: Callable[[], None] = lambda: None
        #: The disk is nearly full: only completions may be written.
        self.full = False

    def commit(self, body: bytes, records: int) -> Head:
        check_row(body, records)
        if self._broken:
            raise JournalFailed("the simulated disk failed before: nothing more is taken")
        row = chain.next_row(self.head, body, records)
        rng, faults = self._rng, self._faults
        if rng.random() < faults.crash_before_commit:
            raise Crashed("before the commit: the row was not synced and is lost, or torn")
        if rng.random() < faults.commit_fails:
            self._broken = True
            if chance(rng, 0.5):  # a failed sync may still have synced
                self._keep(row)
            raise JournalFailed("the simulated sync failed")
        self._keep(row)
        self.on_kept()
        if rng.random() < faults.crash_in_commit:
            raise Crashed("in the commit: the row is durable, its witness is not")
        self._witness = row.head
        if rng.random() < faults.witness_synced:
            self._witness_synced = row.head
        self.commit_ns = 0
        if rng.random() < faults.disk_slow:
            self.commit_ns = rng.randrange(faults.disk_slow_ns_max)
        return row.head

    def _keep(self, row: Row) -> None:
        super()._keep(row)
        self._durable(row)

    def rows(self, after: int = 0) -> Iterator[Row]:
        start = self._head_at(min(max(after, self._anchor.sequence), self._head.sequence))
        kept = self._rows[start.sequence - self._anchor.sequence :]
        return chain.verify(kept, start, self._witness)

    def disk_free_bytes(self) -> int:
        return DISK_RESERVE_BYTES // 2 if self.full else 2 * DISK_RESERVE_BYTES

    def close(self) -> None:
        self._broken = True

    # Faults of the disk while the broker is down.

    def reopen(self, *, power_cut: bool) -> None:
        """Reopen the journal for the next broker. After a power cut the witness may be older."""
        self._broken = False
        self.commit_ns = 0
        if power_cut:
            self._witness = self._witness_synced

    def damaged(self, covered: int) -> SimStore | None:
        """Return a copy of this disk with its end lost or a byte flipped, in rows that its
        witness covers and no snapshot does. Recovery must refuse it. None if there is nothing to
        damage."""
        seen = self._witness.sequence - self._anchor.sequence
        if seen < 1:
            return None
        copy = SimStore(self._rng, self._faults, self._durable)
        copy._anchor, copy._witness = self._anchor, self._witness
        copy._rows = [*self._rows]
        if chance(self._rng, 0.5):  # lose the end or flip a byte
            del copy._rows[self._rng.randrange(seen) :]
        else:
            first = max(0, covered - self._anchor.sequence)
            if first >= len(self._rows):
                return None
            place = self._rng.randrange(first, len(self._rows))
            copy._rows[place] = _flipped(copy._rows[place], self._rng)
        copy._head = copy._rows[-1].head if copy._rows else copy._anchor
        return copy


class SimIndex:
    """The index of ended tasks, on the same disk. Implements `journal.recovery.EndedTaskIndex`."""

    has_any = True

    def __init__(self) -> None:
        self._ended: dict[bytes, EndedTask] = {}
        #: The journal, and the last row that was read.
        self._covered: tuple[bytes, Head] | None = None
        #: stdout and stderr of attempts, results and causes, up to that row.
        self._streams: dict[tuple[bytes, int], Streams] = {}

    def find(self, names: list[bytes]) -> list[EndedTask]:
        return [self._ended[name] for name in names if name in self._ended]

    def streams(self, name: bytes, attempt: int = END) -> Streams | None:
        return self._streams.get((name, attempt))

    def covered(self) -> tuple[bytes, Head] | None:
        return self._covered

    def blobs_named(self, names: Iterable[str]) -> set[str]:
        """Return the blobs among these that a result or an output names."""
        contents = (content for both in self._streams.values() for content in both)
        named = {name for content in contents for name in named_by(content)}
        return named.intersection(names)

    def keep_streams(self, store: SimStore) -> None:
        """Keep the results and outputs in rows that may be trimmed."""
        self._covered = store.identity, store.head
        for row in store.rows():
            for record in decode(row.body):
                if isinstance(record, Progressed):
                    for name, attempt, *streams in outputs_in(record):
                        self._streams[name, attempt] = (streams[0], streams[1])
                elif isinstance(record, Finished | Cancelled):
                    kept = (
                        results_in(record, 0, record.names)
                        if isinstance(record, Finished)
                        else causes_in(record)
                    )
                    for name, result in zip(record.names, kept, strict=True):
                        self._streams[name, END] = (result, b"")

    def archive(self, ledger: Ledger) -> None:
        """Move all ended tasks from the broker's ledger to this index."""
        names = archivable(ledger, ledger.record)
        for task in ledger.named(names):
            if task.ending is not None:
                self._ended[task.name] = to_ended_task(task, task.ending)
        ledger.archive(names)


def _flipped(row: Row, rng: Random) -> Row:
    body = bytearray(row.body)
    body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    return msgspec.structs.replace(row, body=bytes(body))
