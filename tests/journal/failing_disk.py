"""Run one scenario on a failing disk, once for one of every few calls: the test's child process.

Started with the shim of failing_disk.c loaded. Each run is a fork with its own directory: open,
five commits, close. Prints a line of JSON for each run: the acknowledged rows, and how it ended.
"""

import ctypes
import json
import os
import random
import sys
from pathlib import Path

from taskyard.errors import TaskyardError
from taskyard.journal import sqlite
from taskyard.journal.sqlite import SqliteStore

COMMITS = 5

shim = ctypes.CDLL(None)


def story(directory: Path, acknowledged: list[int]) -> str:
    """Return the error's message, empty without an error."""
    try:
        store = SqliteStore(directory)
        for number in range(COMMITS):
            head = store.commit(b"body %d " % number * 900, 1)
            acknowledged.append(head.sequence)
        store.close()
    except TaskyardError as error:
        return f"{int(error.exit_code)} {error}"
    return ""


def run(directory: Path, nth: int, error: int) -> bool:
    """Return whether there was an Nth call, so that there may be one more."""
    child = os.fork()
    if child == 0:
        acknowledged: list[int] = []
        shim.disk_fail_at(os.fsencode(directory), ctypes.c_long(nth), error)
        ended = story(directory, acknowledged)
        calls = shim.disk_calls()
        shim.disk_fail_at(b"", ctypes.c_long(0), 0)
        result = {"directory": str(directory), "acknowledged": acknowledged, "ended": ended}
        print(json.dumps(result), flush=True)  # noqa: T201 - to the test
        os._exit(0 if calls < nth else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, 1):
        sys.exit(f"the story ended with {status} when call {nth} failed")
    return status == 1


def main(parent: Path, error: int, group: int, seed: int) -> None:
    """Let one call of every group fail, until a run ends before its call."""
    sqlite.LOG_BYTES_MERGE = 20_000  # so that the scenario includes a checkpoint
    chance, first, more = random.Random(seed), 1, True
    while more:
        nth = chance.randrange(first, first + group)
        more = run(parent / f"{nth:04}", nth, error)
        first += group


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
