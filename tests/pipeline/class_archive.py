"""Run `pipeline history` once, so that its JVM stores the classes that it has loaded.

A JVM that is to store its classes takes three times as long to start, and killed ones store none.
"""

import sys
from pathlib import Path

from taskyard.pipeline.jobs.history import HistoryJob
from taskyard.pipeline.session import session_scope
from tests.pipeline.scenarios import SMALL, EventLog, write_part


def main(directory: Path) -> None:
    log = EventLog()
    log.join(0, "w")
    log.submit(0, "a")
    log.submit(0, "b", "a")
    log.run("a", 1, 2)
    write_part(directory / "state", 1, 9, log)
    job = HistoryJob(directory / "state", directory / "tables")
    with session_scope("tests", "local[2]", conf=SMALL) as spark:
        job.run(spark)
    job.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
