"""`taskyard` whose broker is killed at a step of its compaction, the first argument.

The broker starts this program as its compaction process too. A step in that process kills the
broker and waits for its own end. A step in the broker kills the broker as well. Compaction
processes append their ids to the file `children`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from taskyard.cli.entry import main
from taskyard.journal import compaction, compaction_process, snapshot
from taskyard.journal.archive import ArchiveWriter
from taskyard.journal.ended_tasks import EndedTasks
from taskyard.journal.row_file import RowFileWriter
from taskyard.journal.sqlite import SqliteStore

CHILD = "beside"

#: Steps of the compaction process and of the broker: killed before the function of that name.
STEPS_BESIDE = {
    "begin": "export",
    "history": "finish",
    "index": "write",
    "covered": "commit",
    "snapshot": "finish",
    "look": "verify_covered",
    "report": "write",
}
STEPS_WITHIN: dict[str, tuple[Any, str]] = {
    "trim": (SqliteStore, "_delete_rows"),
    "drop": (snapshot, "remove"),
    "forget": (EndedTasks, "_forget"),
}


def compact_beside(step: str, words: list[str]) -> None:
    with Path("children").open("a") as file:
        file.write(f"{os.getpid()}\n")
    owners: dict[str, Any] = {
        "begin": compaction,
        "history": RowFileWriter,
        "index": ArchiveWriter,
        "covered": ArchiveWriter,
        "snapshot": snapshot.SnapshotFile,
        "look": compaction,
        "report": os,
    }
    if step in owners:
        setattr(owners[step], STEPS_BESIDE[step], kill_broker_beside)
    compaction_process.NICENESS = 0  # type: ignore[misc]  # other tests run beside this one
    compaction_process.main(words)


def kill_broker_beside(*_: Any, **__: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    while True:
        signal.pause()


def kill_broker(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    step, *words = sys.argv[1:]
    if words[0] == CHILD:
        compact_beside(step, words[1:])
    compaction_process.COMPACTION_COMMAND = (sys.executable, __file__, step, CHILD)
    if step in STEPS_WITHIN:
        setattr(*STEPS_WITHIN[step], kill_broker)
    main(words)
