"""The campaigns that benchmarks run: names, payloads and shapes, made batch by batch.

Their construction is never timed.
"""

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

from taskyard.core.events import SubmitRequested
from taskyard.core.model import Submission

Shape: TypeAlias = Literal["flat", "chains", "lanes"]

SHAPES: Final[tuple[Shape, ...]] = ("flat", "chains", "lanes")

#: Tasks in a chain, and tasks in a lane.
TASKS_PER_CHAIN: Final = 10
TASKS_PER_LANE: Final = 10


def submissions(shape: Shape, count: int, batch: int, first: int = 0) -> Iterator[SubmitRequested]:
    """Yield a campaign of `count` tasks as events of `batch` tasks each, numbered from `first`."""
    for start in range(first, first + count, batch):
        numbers = range(start, min(start + batch, first + count))
        names = [b"task-%09d" % number for number in numbers]
        payloads = [b"payload-of-%09d" % number for number in numbers]  # 20 bytes
        submission = Submission(names, payloads)
        if shape == "chains":
            submission.after = [_before(number) for number in numbers]
        elif shape == "lanes":
            lanes = max(1, count // TASKS_PER_LANE)
            submission.lanes = [b"lane-%06d" % (number % lanes) for number in numbers]
        yield SubmitRequested(0, b"bench", submission)


def _before(number: int) -> list[bytes]:
    return [b"task-%09d" % (number - 1)] if number % TASKS_PER_CHAIN else []
