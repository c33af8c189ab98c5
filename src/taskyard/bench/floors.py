"""What must be reached, and what we would like to reach, by name. The tables print them beside."""

from typing import Final

from msgspec import Struct


class Bound(Struct, frozen=True):
    """A measured figure should be at most this."""

    floor: float
    goal: float

    def verdict(self, figure: float) -> str:
        if figure <= self.goal:
            return "goal"
        return "floor" if figure <= self.floor else f"missed, {figure / self.floor:.2f} × floor"


#: CPU microseconds of submit, lease and finish a task, scheduler alone, batch 100, a million tasks.
CORE_TASK_US: Final = {
    "flat": Bound(3.0, 2.0),
    "chains": Bound(4.0, 3.0),
    "lanes": Bound(4.5, 3.5),
}
#: Bytes a queued task with a payload of 20 bytes takes.
QUEUED_TASK_BYTES: Final = Bound(400, 260)
#: Cost a task at the largest size over that at 10,000.
GROWTH: Final = Bound(1.5, 1.15)
#: Seconds to recover a million unfinished tasks.
RECOVERY_S: Final = Bound(5.0, 2.0)
