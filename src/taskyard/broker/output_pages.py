"""Parts of streams for replies: from the journal's records, the index, or the files.

A stream of an ended attempt is in a record as a whole, or as head and tail, and then in a file.
That of a running attempt, and of one that was lost with its worker, is in a file alone. Records of
one task are linked: each names the one with the output of the attempt before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.broker.output_store import FOLDER, StreamKey
from taskyard.core.identity import split
from taskyard.core.model import Result
from taskyard.core.output import Stream
from taskyard.core.output_paths import directory_of, file_name
from taskyard.core.records import Progressed
from taskyard.journal.recovery import stream_in

if TYPE_CHECKING:
    from taskyard.broker.output_store import OutputStore
    from taskyard.broker.results import ResultLoader
    from taskyard.broker.rows import Budget
    from taskyard.core.effects import TaskOutput

#: Records followed for one reply. The task's attempts before are found in the index.
LINKS_MAX: Final = 100

#: Why a file may be missing. The journal has no record of removals.
_MISSING_HINT: Final = "`taskyard clean` and output.keep remove files"


class OutputPages:
    """Completes replies with output: a part of a stream, or the latest text of both streams."""

    def __init__(self, records: ResultLoader, store: OutputStore) -> None:
        self._records = records
        self._store = store

    def fill(self, reply: TaskOutput, budget: Budget) -> None:
        """Insert the requested part."""
        if reply.stream is not None:
            self._fill_part(reply, budget)
        elif reply.record:
            found = self._records.text(reply.record, reply.name, budget)
            reply.text, reply.text_bytes_total = found.text, found.bytes_total

    def _fill_part(self, reply: TaskOutput, budget: Budget) -> None:
        found = self._read(reply) if reply.live else None
        kept = self._kept(reply, budget) if found is None else None
        if kept is None:
            found = found or self._read(reply)
            reply.text, reply.text_bytes_total = found or (b"", 0)
        elif kept.in_file:
            found = self._read(reply)
            if found is None:
                reply.problem = self._missing_text(reply, kept.bytes_total)
            else:
                reply.text, reply.text_bytes_total = found[0], max(found[1], kept.bytes_total)
        else:
            reply.text = kept.text[reply.offset : reply.offset + reply.count]
            reply.text_bytes_total = kept.bytes_total or len(kept.text)

    def _read(self, reply: TaskOutput) -> tuple[bytes, int] | None:
        return self._store.read(self._key(reply), reply.offset, reply.count)

    def _key(self, reply: TaskOutput) -> StreamKey:
        assert reply.stream is not None  # noqa: S101  # see `fill`
        name = split(reply.name, reply.campaign)
        return StreamKey(reply.campaign, name, reply.attempt, reply.stream)

    def _missing_text(self, reply: TaskOutput, bytes_total: int) -> str:
        """Return the error for a stream whose file is missing."""
        key = self._key(reply)
        parts = (FOLDER, *directory_of(key.campaign, key.name), file_name(key.attempt, key.stream))
        about = f"task {reply.name.decode(errors='backslashreplace')}, attempt {reply.attempt}"
        file = f"file {'/'.join(parts)} of {bytes_total:,} bytes is missing"
        return f"{about}: output {file} ({_MISSING_HINT})"

    def _kept(self, reply: TaskOutput, budget: Budget) -> Result | None:
        """Return what the journal keeps of a stream. None: nothing, a file may have it."""
        assert reply.stream is not None  # noqa: S101  # see `fill`
        found = self._printed(reply, budget)
        printed, is_mixed = (None, False) if found is None else found
        if printed is None:
            printed = self._records.archived(reply.name, reply.attempt, reply.stream)
        if reply.finished_record and reply.stream is Stream.STDOUT and not is_mixed:
            return self._records.finished(reply.finished_record, reply.name, budget)
        if printed is None and reply.finished_record:
            return Result(b"")  # done without any stderr
        return printed

    def _printed(self, reply: TaskOutput, budget: Budget) -> tuple[Result, bool] | None:
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
