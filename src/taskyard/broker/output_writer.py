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


_KINDS: Final = frozenset((OutputWritten, OutputEnded))


class OutputWriter:
    """Writes the output of a turn."""

    def __init__(self, store: OutputStore) -> None:
        self._store = store
        #: The turn has output.
        self._has_any = False
        #: Why the last chunk could not be written. Empty if it could.
        self._problem = ""

    def sync(self, effects: list[Effect]) -> None:
        """Make the files of ended attempts durable. Raises `JournalFailed` if that fails.

        Call it before `write`, with the effects of the same turn.
        """
        self._has_any = any(type(effect) in _KINDS for effect in effects)
        if not self._has_any:
            return
        for effect in effects:
            if type(effect) is OutputEnded:
                for stream, bytes_total in effect.kept:
                    key = StreamKey(effect.campaign, effect.name, effect.attempt, stream)
                    self._end(key, bytes_total)

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

    def write(self, effects: list[Effect], *, has_room: bool = True) -> int:
        """Write chunks, and remove the files of streams that the journal has as a whole.

        A reply to chunks that can't be written becomes a refusal. Without room, none are: the rest
        of the disk is for the journal. Return the bytes written.
        """
        if not self._has_any:
            return 0
        written = 0
        for index, effect in enumerate(effects):
            if type(effect) is OutputWritten:
                size = sum(len(chunk.data) for chunk in effect.chunks)
                effects[index] = answer = self._write(effect, has_room=has_room)
                written += size if answer is effect else 0
            elif type(effect) is OutputEnded:
                for stream in effect.dropped:
                    key = StreamKey(effect.campaign, effect.name, effect.attempt, stream)
                    self._store.drop(key)
        self._store.flush()
        return written

    def _write(self, effect: OutputWritten, *, has_room: bool) -> Effect:
        if effect.chunks and not has_room:
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
