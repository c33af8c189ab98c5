"""The events of each task in order, for its story.

Holds a few numbers for each event, in chunks that never move, so that a million tasks take about
75 MB and adding events copies nothing. Progress is left out, because a task may report it often.
Knows nothing of what the events mean. `task_story.py` turns them into sentences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from taskyard.web.event_columns import Catalog, Codes, EventColumns, Flags, Ints

#: Events in one chunk. A scan of one takes some microseconds.
_CHUNK_EVENTS: Final = 65_536

#: The latest events of one task that are returned. A task that is retried forever has more.
EVENTS_MAX: Final = 200

_COLUMNS: Final = {
    "task": np.int32,
    "kind": np.uint8,
    "own_fault": np.uint8,
    "attempt": np.int32,
    "worker": np.int32,
    "reason": np.int32,
    "time_ns": np.int64,
}


class TaskEvent(Struct, frozen=True):
    """One event of a task, with names instead of numbers."""

    kind: str
    time_ns: int
    attempt: int = 0
    #: A failure that counts as one of the task's.
    is_own_fault: bool = False
    worker: str = ""
    reason: str = ""


class EventLog:
    """The events of all tasks. Rows are those of the task table."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._chunks: list[dict[str, np.ndarray]] = []
        #: Events in the last chunk. The others are full.
        self._used = _CHUNK_EVENTS
        kinds, reasons = catalog["kind"], catalog["reason"]
        self._progressed = kinds.number(b"progressed")
        #: Most tasks are ready when they are submitted. Their submission stands for both.
        self._ready_at_once = (kinds.number(b"ready"), reasons.number(b"submitted"))

    def __len__(self) -> int:
        return max(len(self._chunks) - 1, 0) * _CHUNK_EVENTS + self._used * bool(self._chunks)

    def add(self, row: Ints, events: EventColumns) -> None:
        """Add a block of events. Those without a task have the row -1 and are left out."""
        chosen = np.flatnonzero((row >= 0) & self._is_kept(events))
        columns: dict[str, Ints | Codes] = {"task": row}
        columns |= {name: events.codes[name] for name in ("kind", "worker", "reason")}
        columns |= {name: events.numbers[name] for name in ("attempt", "own_fault", "time_ns")}
        first = 0
        while first < len(chosen):
            if self._used == _CHUNK_EVENTS:
                self._chunks.append({n: np.zeros(_CHUNK_EVENTS, k) for n, k in _COLUMNS.items()})
                self._used = 0
            part = chosen[first : first + _CHUNK_EVENTS - self._used]
            for name, values in self._chunks[-1].items():
                values[self._used : self._used + len(part)] = columns[name][part]
            self._used += len(part)
            first += len(part)

    def _is_kept(self, events: EventColumns) -> Flags:
        kind, reason = events.codes["kind"], events.codes["reason"]
        ready, submitted = self._ready_at_once
        is_repeat: Flags = (kind == ready) & (reason == submitted)
        is_kept: Flags = ~is_repeat & (kind != self._progressed)
        return is_kept

    def of_task(self, row: int) -> list[TaskEvent]:
        """Return the latest events of a task, the oldest first."""
        found: list[TaskEvent] = []
        for number in range(len(self._chunks) - 1, -1, -1):
            chunk = self._chunks[number]
            used = self._used if number == len(self._chunks) - 1 else _CHUNK_EVENTS
            for place in np.flatnonzero(chunk["task"][:used] == row)[::-1].tolist():
                found.append(self._event(chunk, place))
                if len(found) == EVENTS_MAX:
                    return found[::-1]
        return found[::-1]

    def _event(self, chunk: dict[str, np.ndarray], place: int) -> TaskEvent:
        kind, worker, reason = (
            self._catalog[name].names[chunk[name][place]].decode(errors="backslashreplace")
            for name in ("kind", "worker", "reason")
        )
        time_ns, attempt, fault = (
            int(chunk[name][place]) for name in ("time_ns", "attempt", "own_fault")
        )
        return TaskEvent(kind, time_ns, attempt, bool(fault), worker, reason)
