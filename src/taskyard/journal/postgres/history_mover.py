"""The thread of a broker that moves history files from the tables to the directory of `--files`.

A compaction publishes them in the tables. So a directory that is full, down or slow delays neither
a compaction nor the producers, and history stays in the tables meanwhile.
"""

import logging
import threading
from pathlib import Path
from typing import Final, Self

from taskyard.errors import LeaderLost, TaskyardError
from taskyard.journal.postgres import database, exports
from taskyard.journal.postgres.database import Connection
from taskyard.journal.postgres.leader import Term

#: The pause between two rounds, also after a failure.
PAUSE_SECONDS: Final = 5.0

logger = logging.getLogger("taskyard.journal")


class HistoryMover:
    """Moves files until it is closed or the term ends."""

    def __init__(self, url: str, term: Term, files: Path) -> None:
        self._url = url
        self._term = term
        self._files = files
        self._stopping = threading.Event()
        self._connection: Connection | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="taskyard-history", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._connection is not None:
            database.interrupt(self._connection)
        self._thread.join(PAUSE_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with database.usable(self._url), database.connect(self._url) as self._connection:
                    self._run_rounds(self._connection)
            except LeaderLost:
                return
            except (OSError, TaskyardError) as error:
                self._note(database.text_of(error))
            self._stopping.wait(PAUSE_SECONDS)

    def _run_rounds(self, connection: Connection) -> None:
        while not self._stopping.is_set():
            exports.move_history(connection, self._files, self._term)
            self._problem = ""
            self._stopping.wait(PAUSE_SECONDS)

    def _note(self, problem: str) -> None:
        if problem != self._problem and not self._stopping.is_set():
            logger.warning("--files: history stays in the database for now: %s", problem)
        self._problem = problem
