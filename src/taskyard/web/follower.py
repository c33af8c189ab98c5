"""A thread that keeps the view up to date.

Reads the feed at a low priority and with pauses, so that workers and the broker come first on a
busy machine. The view then lags behind, and every page shows by how much. The first reading has no
pauses. Requests take the lock for one answer.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from taskyard.errors import TaskyardError
from taskyard.journal import lock
from taskyard.web.event_feed import EventFeed
from taskyard.web.pace import Pace
from taskyard.web.view import View

if TYPE_CHECKING:
    from pathlib import Path

#: The time between two reads when there is nothing new.
POLL_SECONDS: Final = 0.25

#: The longest pause on a busy machine.
_PAUSE_SECONDS_MAX: Final = 2.0

#: After an error of the disk or the journal.
_RETRY_SECONDS: Final = 2.0

#: The time between two reads of the broker's restarts, which are rare.
_RESTARTS_SECONDS: Final = 3.0

logger = logging.getLogger("taskyard.web")


class TurnLock:
    """A lock that goes to the thread that waits longest.

    The follower would otherwise take it again before a request that waits for it wakes up.
    """

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Follower:
    """Owns the feed and the view of one state directory."""

    def __init__(self, state: Path) -> None:
        """Open a state directory. Raises UnusableState if it has no journal."""
        self._feed = EventFeed(state)
        self._state = state
        self._restarts: list[lock.Start] = []
        self._restarts_until = 0.0
        self.view = View()
        self.lock = TurnLock()
        self.pace = Pace()
        #: The last error while reading. Pages show it.
        self.error: str | None = None
        #: Set once the view has reached the end of the journal.
        self.caught_up = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def restarts(self) -> list[lock.Start]:
        """Return the restarts of the broker. The file is read every few seconds at most."""
        now = time.monotonic()
        if now >= self._restarts_until:
            self._restarts = lock.read_starts(self._state)
            self._restarts_until = now + _RESTARTS_SECONDS
        return self._restarts

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def rows_behind(self) -> int:
        """Return how many journal rows the view has not read yet."""
        return max(self._feed.head_sequence - self._feed.sequence, 0)

    @property
    def rows_missing(self) -> int:
        return self._feed.rows_missing

    def _run(self) -> None:
        while not self._stopped.is_set():
            pause = POLL_SECONDS
            try:
                self._read()
                self.error = None
            except (TaskyardError, OSError) as error:
                logger.warning("can't follow the journal: %s", error)
                self.error, pause = str(error), _RETRY_SECONDS
            self._stopped.wait(pause)

    def _read(self) -> None:
        used = time.thread_time()
        for batch in self._feed.read():
            for change in self.view.changes(batch):
                with self.lock:
                    change()
                pause = self.pace.pause_seconds(time.thread_time() - used)
                if self.caught_up.is_set() and pause:
                    self._stopped.wait(min(pause, _PAUSE_SECONDS_MAX))
                used = time.thread_time()
                if self._stopped.is_set():
                    return
        if not self.caught_up.is_set():
            with self.lock:
                self.view.prepare()
            self.caught_up.set()
