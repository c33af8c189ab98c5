"""`taskyard` whose broker compacts after a few tasks, with compactions that wait for a file.

The broker starts this program as its compaction process too. That waits for the file `go`, and then
runs the product's code.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from taskyard.broker.compaction import CompactionLimits
from taskyard.cli import broker
from taskyard.cli.entry import main
from taskyard.journal import compaction_process

CHILD = "beside"
ENDED_MAX = 20


def small_limits(**_: int) -> CompactionLimits:
    return CompactionLimits(ended=ENDED_MAX, lag_min=1)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == CHILD:
        compaction_process.exit_on_stdin_close()
        while not Path("go").exists():
            time.sleep(0.01)
        compaction_process.main(words[1:])
    compaction_process.COMPACTION_COMMAND = (sys.executable, __file__, CHILD)
    vars(broker)["CompactionLimits"] = small_limits
    main(words)
