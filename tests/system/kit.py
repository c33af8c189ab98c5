"""What the system tests share: a broker of its own, a slow disk, and the journal to count."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from taskyard.journal.audit import AuditCounts, Auditor
from taskyard.journal.lock import StateLock
from taskyard.journal.recovery import records_of
from taskyard.journal.sqlite import SqliteStore
from tests.kit import processes

SLOW_DISK = (sys.executable, str(Path(__file__).with_name("slow_disk.py")))


class Broker(processes.Broker):
    """What it says goes to our stderr: it may be much, and nobody reads it."""

    def __init__(self, directory: Path, *options: str, **how: Any) -> None:
        super().__init__(directory, *options, stderr=None, **how)


def count(directory: Path) -> tuple[AuditCounts, set[bytes]]:
    """What the journal of a stopped broker proves, and the names that were submitted."""
    state = directory / ".taskyard"
    counting = Auditor()
    names: set[bytes] = set()
    with StateLock(state), closing(SqliteStore(state)) as store:
        for row in store.rows():
            told = records_of(row, row.record_first - 1)
            counting.add(told)
            for record in told:
                if type(record).__name__ == "Submitted":
                    names.update(record.submission.names)  # type: ignore[union-attr]
    return counting.tally(), names
