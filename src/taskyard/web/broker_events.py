"""Events without a task: pauses with their begin and end, and when workers joined.

Kept apart from the tables of tasks, because there are few of them. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from taskyard.web.event_columns import Catalog, EventColumns

#: Pauses that are kept, the latest. A chart has no room for more.
PAUSES_MAX: Final = 200

_KINDS: Final = (b"paused", b"resumed", b"worker_joined", b"worker_left")


class Pause(Struct):
    """A time in which tasks of a lane, of a service or of all services were not leased."""

    #: `service`, `service/lane`, or empty for everything. An open lane has its service's name.
    subject: str
    begin_ns: int
    #: 0: it has not ended.
    end_ns: int = 0


class BrokerEvents:
    """The pauses and the workers that the events of a broker show."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._kinds = {catalog["kind"].number(kind): kind for kind in _KINDS}
        self.pauses: list[Pause] = []
        self._open: dict[str, Pause] = {}
        #: The process of each worker and when it joined.
        self._joined: dict[str, tuple[int, int]] = {}

    def add(self, events: EventColumns) -> None:
        """Add the events of a block that have no task."""
        kind = events.codes["kind"]
        for place in np.flatnonzero(np.isin(kind, [*self._kinds])).tolist():
            time_ns = int(events.numbers["time_ns"][place])
            match self._kinds[int(kind[place])]:
                case b"paused":
                    self._pause(self._subject(events, place), time_ns)
                case b"resumed":
                    self._resume(self._subject(events, place), time_ns)
                case b"worker_joined":
                    incarnation = int(events.numbers["incarnation"][place])
                    self._join(self._name(events, "worker", place), incarnation, time_ns)
                case _:
                    self._joined.pop(self._name(events, "worker", place), None)

    def joined_ns(self, worker: str) -> int:
        """Return when the process of a worker joined. 0: unknown."""
        return self._joined.get(worker, (0, 0))[1]

    def _pause(self, subject: str, time_ns: int) -> None:
        if subject not in self._open:
            pause = self._open[subject] = Pause(subject, time_ns)
            self.pauses = [*self.pauses, pause][-PAUSES_MAX:]

    def _resume(self, subject: str, time_ns: int) -> None:
        pause = self._open.pop(subject, None)
        if pause is not None:
            pause.end_ns = time_ns

    def _join(self, worker: str, incarnation: int, time_ns: int) -> None:
        """Note a process. One that only changes its facts has joined before."""
        if self._joined.get(worker, (None, 0))[0] != incarnation:
            self._joined[worker] = (incarnation, time_ns)

    def _subject(self, events: EventColumns, place: int) -> str:
        parts = (self._name(events, column, place) for column in ("service", "lane"))
        return "/".join(part for part in parts if part)

    def _name(self, events: EventColumns, column: str, place: int) -> str:
        name: bytes = self._catalog[column].names[events.codes[column][place]]
        return name.decode(errors="backslashreplace")
