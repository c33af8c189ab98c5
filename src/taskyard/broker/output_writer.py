"""Carries out the scheduler's decisions on output: write chunks, end files, reply to workers.

A file is durable before the record that refers to it. Chunks that can't be written are refused: the
worker stops programs with long output, and returns their tasks uncharged.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from taskyard.core.blobs import blob_name
from taskyard.core.effects import OutputEnded, OutputWritten, Refused
from taskyard.core.identity import spelling
from taskyard.core.model import Refusal, shown
from taskyard.errors import JournalFailed
from taskyard.journal.blobs import BytesDiffer, StreamKey

if TYPE_CHECKING:
    from taskyard.core.effects import Effect
    from taskyard.core.output import OutputChunk
    from taskyard.journal.blobs import BlobStore

logger = logging.getLogger("taskyard.broker")

_HINT: Final = "free some space, or see `taskyard clean`"


class OutputWriter:
    """Writes the output of a turn."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        #: Without room no chunks are written: the rest of the disk is for the journal.
        self.has_room = True
        #: Bytes written, and whether the store has writes or removals to complete.
        self.bytes_written = 0
        self.is_dirty = False
        #: Streams that ended in this turn. A chunk of one was sent twice.
        self._ended: set[StreamKey] = set()
        #: Why the last chunk could not be written. Empty if it could.
        self._problem = ""

    def end(self, effect: OutputEnded) -> None:
        """Seal the streams of an ended attempt, before the commit of its record.

        Raises `JournalFailed` if that fails.
        """
        for stream, blob in effect.kept:
            key = StreamKey(effect.campaign, effect.name, effect.attempt, stream)
            about, name = shown(spelling(key.campaign, key.name)), blob_name(blob)
            self._ended.add(key)
            try:
                is_there = self._store.seal(key, name) or self._store.touch(name)
            except OSError as error:
                text = f"output of task {about}: {error.strerror} ({_HINT})"
                raise JournalFailed(text) from error
            if not is_there:
                text = "task %s, attempt %d: its %s is lost, but for head and tail"
                logger.warning(text, about, key.attempt, stream.name.lower())

    def drop(self, effect: OutputEnded) -> None:
        """Remove the files of streams that the journal needs no more."""
        for stream in effect.dropped:
            self._store.drop(StreamKey(effect.campaign, effect.name, effect.attempt, stream))
            self.is_dirty = True

    def flush(self) -> None:
        """Complete the writes and removals of a turn, before any reply."""
        self._ended.clear()
        if self.is_dirty:
            self._store.flush()
            self.is_dirty = False

    def write(self, effect: OutputWritten) -> Effect:
        """Write chunks. Return the reply, which is a refusal if they can't be written."""
        size = sum(len(chunk.data) for chunk in effect.chunks)
        self.is_dirty = True
        reply = self._write(effect)
        self.bytes_written += size if reply is effect else 0
        return reply

    def _write(self, effect: OutputWritten) -> Effect:
        if effect.chunks and not self.has_room:
            return self._refused(effect, "the disk is nearly full")
        try:
            for chunk in effect.chunks:
                if not self._append(chunk):
                    name = spelling(chunk.campaign, chunk.name)
                    effect.missing.append((name, chunk.attempt))
                    text = "task %s, attempt %d: its output from byte %d on does not fit"
                    logger.warning(text, shown(name), chunk.attempt, chunk.offset)
        except OSError as error:
            return self._refused(effect, error.strerror or str(error))
        self._problem = ""
        effect.chunks = []
        return effect

    def _append(self, chunk: OutputChunk) -> bool:
        """Write a chunk. Return False if bytes before it are missing, or others are there."""
        key = StreamKey(chunk.campaign, chunk.name, chunk.attempt, chunk.stream)
        if key in self._ended:
            return True
        try:
            return self._store.append(key, chunk.offset, chunk.data) >= chunk.offset
        except BytesDiffer:
            if chunk.offset:
                return False
        self._store.drop(key)  # of another history of this state: a backup was restored
        self._store.flush()
        return self._store.append(key, 0, chunk.data) >= 0

    def _refused(self, effect: OutputWritten, why: str) -> Refused:
        """Refuse chunks. Log a new problem."""
        if why != self._problem:
            text = (
                "output of tasks can't be written: %s (%s). Workers stop programs with long output."
            )
            logger.warning(text, why, _HINT)
        self._problem = why
        text = f"the broker can't write its output: {why}"
        return Refused(effect.worker, effect.request, Refusal.FULL, text)
