"""Compact a journal and be killed, at one of every few steps: the test's child process.

Each run is a fork with its own copy of the state. A step is a sync, a rename, a removal or a commit
of SQLite: instead of the Nth one the process ends by SIGKILL. Then the compaction is run again
to its end. Prints a line of JSON for each run: how it ended, and the final state as digests of the
files and the rows of the index. The last run was not killed.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from taskyard.journal import archive, compaction, history
from taskyard.journal.sqlite import SqliteStore

#: So that the scenario makes several files.
EVENTS_A_FILE = 60

#: So that the rows are split into several segments.
TOUCHED = 15


class Killer:
    """Counts steps, and kills the process at one of them."""

    def __init__(self, nth: int) -> None:
        self.steps = 0
        self.nth = nth

    def step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **named: Any) -> Any:
            self.steps += 1
            if self.steps == self.nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return stepped


def arm(killer: Killer) -> None:
    os.fsync = killer.step(os.fsync)
    os.rename = killer.step(os.rename)
    os.unlink = killer.step(os.unlink)
    archive.ArchiveWriter.commit = killer.step(archive.ArchiveWriter.commit)  # type: ignore[method-assign]
    archive.ArchiveWriter.write = killer.step(archive.ArchiveWriter.write)  # type: ignore[method-assign]
    SqliteStore.trim = killer.step(SqliteStore.trim)  # type: ignore[method-assign]


def compact(directory: Path) -> None:
    with closing(SqliteStore(directory)) as store:
        compaction.compact(directory, store)


def contents(directory: Path) -> dict[str, object]:
    """Return the final state: names and digests of files, rows of the index and of the journal."""
    files = {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("history", "snapshots")
        for path in sorted((directory / folder).iterdir())
    }
    rows: list[str] = []
    for name, table in (("finished.sqlite", "ended"), ("journal.sqlite", "journal")):
        with closing(sqlite3.connect(directory / name)) as connection:
            rows += map(repr, connection.execute(f"SELECT * FROM {table}"))  # noqa: S608
    return {"files": files, "rows": rows}


def in_child(work: Callable[[], None]) -> int:
    """Run a function in a fork and return its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test has to see it
            print(json.dumps({"error": repr(error)}), flush=True)  # noqa: T201 - to the test
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(directory: Path, nth: int) -> bool:
    """Return whether there was an Nth step."""
    killer = Killer(nth)

    def work() -> None:
        arm(killer)
        compact(directory)

    return in_child(work) == -signal.SIGKILL


def main(state: Path, parent: Path, group: int, seed: int) -> None:
    """Kill a run at one step of every group, until a run ends before its step."""
    chance = random.Random(seed)
    compaction.TRIM_ROWS_PER_STEP = 20  # type: ignore[misc]  # final for everybody else
    compaction.TOUCHED_MAX = TOUCHED  # type: ignore[misc]
    history.EVENTS_PER_FILE_MAX = EVENTS_A_FILE  # type: ignore[misc]
    archive.ROWS_PER_TRANSACTION = 2
    first, killed = 1, True
    while killed:
        nth = chance.randrange(first, first + group)
        directory = parent / f"{nth:03}"
        shutil.copytree(state, directory)
        killed = killed_at(directory, nth)
        ended = in_child(lambda: compact(directory))  # noqa: B023 - called at once
        report = {"killed": killed, "ended": ended, **contents(directory)}
        print(json.dumps(report), flush=True)  # noqa: T201 - to the test
        first += group


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
