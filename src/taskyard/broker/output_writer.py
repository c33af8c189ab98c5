"""Carries out the scheduler's decisions on output: write chunks, end files, reply to workers.

A file is durable before the record that refers to it. A chunk that can't be written is refused for
now: the worker sends it again, and its program waits meanwhile as behind a slow pipe.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from taskyard.broker.output_store import StreamKey
from taskyard.core.effects import OutputEnded, OutputWritten, Refused
from taskyard.core.identity import spelling
from taskyard.core.model import Refusal, shown
from taskyard.errors import JournalFailed

if TYPE_CHECKING:
    from taskyard.broker.output_store import OutputStore
    from taskyard.core.effects import Effect

logger = logging.getLogger("taskyard.broker")

_HINT: Final = "free some space, or see `taskyard clean`"


class OutputWriter:
    """Writes the output of a turn."""

    def __init__(self, store: OutputStore) -> None:
        self._store = store
        #: Without room no chunks are written: the rest of the disk is for the journal.
        self.has_room = True
        #: Bytes written, and whether the store has writes or removals to complete.
        self.bytes_written = 0
        self._is_dirty = False
        #: Why the last chunk could not be written. Empty if it could.
        self._problem = ""

    def end(self, effect: OutputEnded) -> None:
        """Make the files of an ended attempt durable, before the commit of its record.

        Raises `JournalFailed` if that fails.
        """
        for stream, bytes_total in effect.kept:
            self._end(StreamKey(effect.campaign, effect.name, effect.attempt, stream), bytes_total)

    def _end(self, key: StreamKey, bytes_total: int) -> None:
        about = shown(spelling(key.campaign, key.name))
        try:
            found = self._store.end(key, bytes_total)
        except OSError as error:
            raise JournalFailed(f"output of task {about}: {error.strerror} ({_HINT})") from error
        if found < bytes_total:
            logger.warning(
                "task %s, attempt %d: %d bytes of its %s are lost",
                *(about, key.attempt, bytes_total - found, key.stream.name.lower()),
            )

    def drop(self, effect: OutputEnded) -> None:
        """Remove the files of streams that the journal has as a whole."""
        for stream in effect.dropped:
            self._store.drop(StreamKey(effect.campaign, effect.name, effect.attempt, stream))
            self._is_dirty = True

    def flush(self) -> None:
        """Complete the writes and removals of a turn, before any reply."""
        if self._is_dirty:
            self._store.flush()
            self._is_dirty = False

    def write(self, effect: OutputWritten) -> Effect:
        """Write chunks. Return the reply, which is a refusal if they can't be written."""
        size = sum(len(chunk.data) for chunk in effect.chunks)
        self._is_dirty = True
        reply = self._write(effect)
        self.bytes_written += size if reply is effect else 0
        return reply

    def _write(self, effect: OutputWritten) -> Effect:
        if effect.chunks and not self.has_room:
            return self._refused(effect, "the disk is nearly full")
        try:
            for chunk in effect.chunks:
                if not self._store.write(chunk):
                    name = spelling(chunk.campaign, chunk.name)
                    effect.missing.append((name, chunk.attempt))
                    text = "task %s, attempt %d: bytes of its output before byte %d are lost"
                    logger.warning(text, shown(name), chunk.attempt, chunk.offset)
        except OSError as error:
            return self._refused(effect, error.strerror or str(error))
        self._problem = ""
        effect.chunks = []
        return effect

    def _refused(self, effect: OutputWritten, why: str) -> Refused:
        """Refuse chunks for now. Log a new problem."""
        problem = f"output of tasks can't be written: {why}"
        if problem != self._problem:
            logger.warning("%s (%s). Workers try again.", problem, _HINT)
        self._problem = problem
        return Refused(effect.worker, effect.request, Refusal.RETRY_LATER, problem)
