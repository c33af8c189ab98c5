"""CPU time of a request in a lane of mixed demands, behind tasks that need a GPU.

The scheduler alone, with the journal off. `python -m bench.core.mixed_demands COUNT` prints one
JSON document.
"""

import sys
from time import process_time_ns
from typing import Final

import msgspec

from taskyard.core.effects import Assign
from taskyard.core.events import (
    Event,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    WorkerRegistered,
)
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.resources import GPUS, UNIT
from taskyard.core.scheduler import Scheduler

REQUESTS: Final = 500

_WORKER: Final = b"worker"
_BATCH: Final = 10_000
_GPU: Final = ((GPUS, UNIT),)


class MixedDemands(msgspec.Struct):
    """Ready tasks that do not fit, and the CPU time of all requests behind the first."""

    unfit: int
    requests: int = REQUESTS
    cpu_ns: int = 0

    @property
    def request_us(self) -> float:
        return self.cpu_ns / self.requests / 1e3


def measure(case: MixedDemands) -> MixedDemands:
    """Request tasks that queue behind tasks which do not fit, one at a time."""
    scheduler = Scheduler()

    def handle(event: Event) -> list[object]:
        effects = scheduler.handle(event)
        scheduler.take_records()
        return list(effects)

    handle(WorkerRegistered(0, b"with GPU", WorkerFacts(resources=_GPU)))
    handle(WorkerRegistered(0, _WORKER, WorkerFacts()))
    for first in range(0, case.unfit, _BATCH):
        names = [b"gpu %d" % number for number in range(first, min(first + _BATCH, case.unfit))]
        handle(SubmitRequested(0, b"client", Submission(names, terms=[Terms(resources=_GPU)])))
    names = [b"%d" % number for number in range(case.requests + 1)]
    handle(SubmitRequested(0, b"client", Submission(names)))
    for name in names:
        start_ns = process_time_ns()
        (effect,) = handle(TasksRequested(0, _WORKER, parks=False))
        if name is not names[0]:  # the first one makes the index
            case.cpu_ns += process_time_ns() - start_ns
        if not isinstance(effect, Assign) or effect.names != [name]:
            raise AssertionError(f"{name!r}: not assigned ({effect})")
        handle(TasksReported(0, _WORKER, effect.names, effect.attempts))
    return case


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(measure(MixedDemands(int(sys.argv[1])))).decode() + "\n")
