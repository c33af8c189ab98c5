"""The process that forks and supervises the broker and the workers of an `Executor`.

Started as `python -P -m taskyard.cli.cluster STATE SPEC STDOUT` with a worker spec in JSON and the
descriptor for the output of calls. It imports everything before it forks, and ends its children
when its stdin ends.
"""

import gc
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import msgspec

from taskyard.cli import broker, entry, worker  # noqa: F401  # so that the children need not
from taskyard.process.cluster import LocalCluster
from taskyard.process.supervisor import WorkerSpec
from taskyard.worker import call_child  # noqa: F401  # as above


def _report(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main() -> None:
    state = Path(sys.argv[1])
    worker_spec = msgspec.json.decode(sys.argv[2], type=WorkerSpec)
    run, stdout = partial(entry.run, entry.taskyard), int(sys.argv[3])
    cluster = LocalCluster(state, worker_spec, run, _report, stdout)
    os.set_inheritable(stdout, False)  # noqa: FBT003 - positional only
    try:
        while os.read(0, 1):
            pass
    finally:
        cluster.stop()
        shutil.rmtree(state, ignore_errors=True)
        gc.freeze()  # the collection at exit would visit every object


if __name__ == "__main__":
    gc.set_threshold(entry.GC_THRESHOLD)
    main()
