"""Parts of streams and blobs for replies: from the journal's records, the index, or the blobs.

A stream of an ended attempt is in a record as a whole, or as a reference to a blob. That of a
running attempt, and of one that was lost with its worker, is a stream alone. Records of one task
are linked: each names the one with the output of the attempt before. A blob is read only in the
name of a task that names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.calls.payloads import CALL
from taskyard.calls.pickled import PICKLE
from taskyard.core.blobs import Blob, Content, blob_name, blobs_of, length_of, text_of
from taskyard.core.identity import split
from taskyard.core.model import shown
from taskyard.core.output import Stream
from taskyard.core.records import Progressed
from taskyard.errors import UserError
from taskyard.journal.blob_files import REMOVED_HINT
from taskyard.journal.blob_names import blobs_needed
from taskyard.journal.blobs import StreamKey, is_name, short_name
from taskyard.journal.blobs import length_of as length_in
from taskyard.journal.recovery import stream_in

if TYPE_CHECKING:
    from taskyard.broker.results import ResultLoader
    from taskyard.broker.rows import Budget
    from taskyard.core.effects import Part
    from taskyard.core.ledger import Ledger
    from taskyard.journal.blobs import BlobStore

#: Records followed for one reply. The task's attempts before are found in the index.
LINKS_MAX: Final = 100


class Parts:
    """Completes replies with parts of streams and blobs."""

    def __init__(self, records: ResultLoader, store: BlobStore, ledger: Ledger) -> None:
        self._records = records
        self._store = store
        self._ledger = ledger

    def fill(self, part: Part, budget: Budget) -> None:
        """Insert the requested bytes."""
        if part.blob:
            name = part.blob.decode(errors="replace")
            if not is_name(name):
                part.problem = "not the name of a blob"
            elif part.found and self._is_named(name, part, budget):
                part.bytes_total = length_in(name)
                self._read_blob(part, name, short_name(name))
            else:
                part.problem = f"{short_name(name)}: not of task {shown(part.name)}"
        elif part.found and part.stream is not None:
            self._fill_stream(part, budget)
        elif part.found and not part.problem:
            result = self._records.finished(part.finished_record, part.name, budget)
            self._insert(part, result, "result")

    def _is_named(self, name: str, part: Part, budget: Budget) -> bool:
        """Return whether a task needs a blob or, for a client, has a result that names it."""
        task = self._ledger.tasks[part.name]
        if name in blobs_needed(task, lambda key: self._records.result_of(key, budget)):
            return True
        result = None if part.held else self._records.result_of(part.name, budget)
        return result is not None and name in blobs_of(result)

    def _read_blob(self, part: Part, name: str, about: str) -> None:
        try:
            found = self._store.read(name, part.offset, part.count)
        except (OSError, UserError) as error:  # a bad disk, a link
            part.problem = f"{about}: {getattr(error, 'strerror', None) or error}"
            return
        if found is None:
            part.problem = f"{about} are missing ({REMOVED_HINT})"
        else:
            part.data = found[0]

    def _fill_stream(self, part: Part, budget: Budget) -> None:
        found = self._read_stream(part) if part.live else None
        kept = self._kept(part, budget) if found is None else None
        if kept is None:
            part.data, part.bytes_total = found or self._read_stream(part) or (b"", 0)
        else:
            self._insert(part, kept, "output")

    def _insert(self, part: Part, kept: Content, noun: str) -> None:
        if isinstance(kept, Blob) and kept.digest:
            part.bytes_total, part.digest = kept.length, kept.digest
            about = f"task {shown(part.name)}, attempt {part.attempt}"
            self._read_blob(part, blob_name(kept), f"{about}: {kept.length:,} bytes of {noun}")
        else:
            part.data = text_of(kept)[part.offset : part.offset + part.count]
            part.bytes_total = length_of(kept)

    def _read_stream(self, part: Part) -> tuple[bytes, int] | None:
        assert part.stream is not None  # noqa: S101  # see `fill`
        name = split(part.name, part.campaign)
        key = StreamKey(part.campaign, name, part.attempt, part.stream)
        return self._store.read(key, part.offset, part.count)

    def _kept(self, part: Part, budget: Budget) -> Content | None:
        """Return what the journal keeps of a stream. None: nothing, a file may have it."""
        assert part.stream is not None  # noqa: S101  # see `fill`
        found = self._printed(part, part.stream, budget)
        printed, is_mixed = (None, False) if found is None else found
        if printed is None and part.attempt:  # before the first attempt nothing was printed
            printed = self._records.archived(part.name, part.attempt, part.stream)
        is_result = part.stream is Stream.STDOUT and not is_mixed and not self._is_call(part.name)
        if part.finished_record and is_result:
            return self._records.finished(part.finished_record, part.name, budget)
        if printed is None and part.finished_record:
            return b""  # done without any output
        return printed

    def _is_call(self, name: bytes) -> bool:
        """Return whether a task is a call, whose result is not what it prints."""
        return self._ledger.tasks[name].terms.service in {CALL, PICKLE}

    def _printed(self, part: Part, stream: Stream, budget: Budget) -> tuple[Content, bool] | None:
        """Return a stream from the task's records, and whether it is both streams together."""
        number = part.record
        for _ in range(LINKS_MAX):
            record = self._records.record(number, budget) if number else None
            if not isinstance(record, Progressed):
                return None
            index = record.names.index(part.name)
            if record.attempts[index] == part.attempt:
                return stream_in(record, index, stream), record.stderrs is None
            number = record.previous[index] if record.previous else 0
        return None
