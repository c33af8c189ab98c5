"""A broker with quiet pipes, a slow disk, and the audit of a journal."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from taskyard.demo.campaign import AuditCounts, Auditor
from taskyard.journal.lock import StateLock
from taskyard.journal.recovery import records_of
from taskyard.journal.sqlite import SqliteStore
from tests.kit import processes

SLOW_DISK = (sys.executable, str(Path(__file__).with_name("slow_disk.py")))


class Broker(processes.Broker):
    """A broker whose stderr is the test's: it may be long, and no test reads it."""

    def __init__(self, directory: Path, *options: str, **how: Any) -> None:
        super().__init__(directory, *options, stderr=None, **how)


def count(directory: Path) -> tuple[AuditCounts, set[bytes]]:
    """Return the audit of a stopped broker's journal, and the names that were submitted."""
    state = directory / ".taskyard"
    counting = Auditor()
    names: set[bytes] = set()
    with StateLock(state), closing(SqliteStore(state)) as store:
        for row in store.rows():
            records = records_of(row, row.record_first - 1)
            counting.add(records)
            for record in records:
                if type(record).__name__ == "Submitted":
                    names.update(record.submission.names)  # type: ignore[union-attr]
    return counting.tally(), names
