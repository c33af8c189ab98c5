"""Parts of streams for replies: from the journal's records, the index, or the blobs.

A stream of an ended attempt is in a record as a whole, or as a reference to a blob. That of a
running attempt, and of one that was lost with its worker, is a stream alone. Records of one task
are linked: each names the one with the output of the attempt before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core.blobs import Blob, Content, blob_name, length_of, text_of
from taskyard.core.identity import split
from taskyard.core.model import shown
from taskyard.core.output import Stream
from taskyard.core.records import Progressed
from taskyard.errors import UserError
from taskyard.journal.blob_files import REMOVED_HINT
from taskyard.journal.blobs import StreamKey
from taskyard.journal.recovery import stream_in

if TYPE_CHECKING:
    from taskyard.broker.results import ResultLoader
    from taskyard.broker.rows import Budget
    from taskyard.core.effects import TaskOutput
    from taskyard.journal.blobs import BlobStore

#: Records followed for one reply. The task's attempts before are found in the index.
LINKS_MAX: Final = 100


class OutputPages:
    """Completes replies with output: a part of a stream, or the latest text of both streams."""

    def __init__(self, records: ResultLoader, store: BlobStore) -> None:
        self._records = records
        self._store = store

    def fill(self, reply: TaskOutput, budget: Budget) -> None:
        """Insert the requested part."""
        if reply.stream is not None:
            self._fill_part(reply, budget)
        elif reply.record:
            found = self._records.text(reply.record, reply.name, budget)
            reply.text = text_of(found)
            reply.text_bytes_total = length_of(found) if isinstance(found, Blob) else 0

    def _fill_part(self, reply: TaskOutput, budget: Budget) -> None:
        found = self._read(reply) if reply.live else None
        kept = self._kept(reply, budget) if found is None else None
        if kept is None:
            found = found or self._read(reply)
            reply.text, reply.text_bytes_total = found or (b"", 0)
        elif isinstance(kept, Blob) and kept.digest:
            self._fill_blob(reply, kept)
        else:
            reply.text = text_of(kept)[reply.offset : reply.offset + reply.count]
            reply.text_bytes_total = length_of(kept)

    def _fill_blob(self, reply: TaskOutput, blob: Blob) -> None:
        reply.text_bytes_total, reply.digest = blob.length, blob.digest
        about = (
            f"task {shown(reply.name)}, attempt {reply.attempt}: {blob.length:,} bytes of output"
        )
        try:
            found = self._store.read(blob_name(blob), reply.offset, reply.count)
        except (OSError, UserError) as error:  # a bad disk, a link
            reply.problem = f"{about}: {getattr(error, 'strerror', None) or error}"
            return
        if found is None:
            reply.problem = f"{about} are missing ({REMOVED_HINT})"
        else:
            reply.text = found[0]

    def _read(self, reply: TaskOutput) -> tuple[bytes, int] | None:
        assert reply.stream is not None  # noqa: S101  # see `fill`
        name = split(reply.name, reply.campaign)
        key = StreamKey(reply.campaign, name, reply.attempt, reply.stream)
        return self._store.read(key, reply.offset, reply.count)

    def _kept(self, reply: TaskOutput, budget: Budget) -> Content | None:
        """Return what the journal keeps of a stream. None: nothing, a file may have it."""
        assert reply.stream is not None  # noqa: S101  # see `fill`
        found = self._printed(reply, budget)
        printed, is_mixed = (None, False) if found is None else found
        if printed is None:
            printed = self._records.archived(reply.name, reply.attempt, reply.stream)
        if reply.finished_record and reply.stream is Stream.STDOUT and not is_mixed:
            return self._records.finished(reply.finished_record, reply.name, budget)
        if printed is None and reply.finished_record:
            return b""  # done without any stderr
        return printed

    def _printed(self, reply: TaskOutput, budget: Budget) -> tuple[Content, bool] | None:
        """Return a stream from the task's records, and whether it is both streams together."""
        number = reply.record
        for _ in range(LINKS_MAX):
            record = self._records.record(number, budget) if number else None
            if not isinstance(record, Progressed):
                return None
            index = record.names.index(reply.name)
            if record.attempts[index] == reply.attempt:
                assert reply.stream is not None  # noqa: S101  # see `fill`
                return stream_in(record, index, reply.stream), record.stderrs is None
            number = record.previous[index] if record.previous else 0
        return None
