"""`taskyard` on a slow disk, so that kills often hit a commit."""

import sys
import time

from taskyard.cli.entry import main
from taskyard.journal.sqlite import SqliteStore

commit = SqliteStore.commit


def slow_commit(self: SqliteStore, body: bytes, records: int) -> object:
    time.sleep(0.008)
    head = commit(self, body, records)
    time.sleep(0.008)
    return head


if __name__ == "__main__":
    SqliteStore.commit = slow_commit  # type: ignore[method-assign,assignment]
    main(sys.argv[1:])
