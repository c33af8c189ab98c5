"""The slots, resources and GPUs of a worker host, and how many tasks to request beyond them.

Each broker has a worker of its own, with its own runner and the rules of that broker. Every broker
sees all slots. The budget decides how many tasks a worker may request, and which runner may start
the next task: the runner with the fewest slots. A broker without work holds no slots: its request
for tasks waits at the broker, and counts for a moment only.

A call that waits for other tasks gives its slots back and takes them again. Knows no messages and
no processes.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeAlias, TypeVar

from taskyard.core.limits import SECOND_NS
from taskyard.core.resources import CPUS, GPUS, MEMORY, UNIT, Resources, fits, format_amount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from taskyard.core.resources import Resources
    from taskyard.net.protocols import MonotonicClock
    from taskyard.worker.jobs import Job


#: Parts of devices by id, in ten-thousandths.
DeviceParts: TypeAlias = dict[str, int]


class DevicePool:
    """Hands out devices by id. Tasks with a fraction share a device."""

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._free: DeviceParts = dict.fromkeys(ids, UNIT)

    def has(self, amount: int) -> bool:
        """Return whether `take` would find this amount."""
        return self._find(amount) is not None

    def take(self, amount: int) -> DeviceParts:
        """Take whole devices, and of one more the fraction that is left.

        A fraction comes from the fullest device that has room, so that other devices stay whole. An
        amount larger than the pool gets all of it.
        """
        shares = self._find(amount) or {}
        for device, part in shares.items():
            self._free[device] -= part
        return shares

    def give_back(self, shares: Mapping[str, int]) -> None:
        """Return parts that were taken."""
        for device, part in shares.items():
            self._free[device] += part

    def _find(self, amount: int) -> DeviceParts | None:
        if not amount:
            return {}
        whole, fraction = divmod(min(amount, len(self._free) * UNIT), UNIT)
        idle = [device for device, free in self._free.items() if free == UNIT]
        if len(idle) < whole:
            return None
        shares = dict.fromkeys(idle[:whole], UNIT)
        if fraction:
            open_devices = [
                device
                for device, free in self._free.items()
                if free >= fraction and device not in shares
            ]
            if not open_devices:
                return None
            shares[min(open_devices, key=self._free.__getitem__)] = fraction
        return shares


def resource_env(resources: Resources, gpus: Mapping[str, int]) -> dict[str, str]:
    """Return the variables for a task's process: CUDA_VISIBLE_DEVICES and TASKYARD_*."""
    if not resources:
        return {}
    amounts, env = dict(resources), {}
    if CPUS in amounts:
        env["TASKYARD_CPUS"] = format_amount(CPUS, amounts[CPUS])
    if MEMORY in amounts:
        env["TASKYARD_MEMORY"] = str(amounts[MEMORY])
    if GPUS in amounts:
        env["TASKYARD_GPUS"] = env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env


#: Tasks requested beyond the free slots, by tasks finished per second: about a tenth of a second of
#: work.
PREFETCH_STEPS: Final = (
    *((2560, 256), (1280, 128), (640, 64), (320, 32), (160, 16), (80, 8)),
    *((40, 4), (20, 2), (4, 1), (0, 0)),
)

#: Tasks that each slot must have finished since the last heartbeat before the next heartbeat may
#: raise the prefetch. Fewer could be long tasks that ended together.
QUICK_TASKS_PER_SLOT: Final = 4

#: The shortest time for a rate. A report brings the tasks of up to this time at once.
RATE_NS_MIN: Final = SECOND_NS // 20


class Prefetch:
    """The prefetch of one worker."""

    def __init__(self, slots: int, now_ns: int) -> None:
        self._quick_tasks_min = slots * QUICK_TASKS_PER_SLOT
        #: Tasks finished since the last heartbeat, and when that was. An idle time before them
        #: does not count.
        self._finished = 0
        self._since_ns = now_ns
        self.count = 0

    def on_busy(self, now_ns: int) -> None:
        """Begin to measure the rate: tasks have come to an idle worker."""
        if not self._finished:
            self._since_ns = now_ns

    def on_finished(self, tasks: int, now_ns: int) -> bool:
        """Count finished tasks. Return whether they were so many that the prefetch has risen."""
        self._finished += tasks
        if self._finished < self._quick_tasks_min:
            return False
        count = max(self.count, self._count_for_rate(now_ns))
        has_risen, self.count = count != self.count, count
        return has_risen

    def on_heartbeat(self, now_ns: int) -> bool:
        """Raise or lower the prefetch by the last interval. Return whether it has changed."""
        count = self._count_for_rate(now_ns)
        self._finished, self._since_ns = 0, now_ns
        has_changed, self.count = count != self.count, count
        return has_changed

    def _count_for_rate(self, now_ns: int) -> int:
        """Return the prefetch for the current rate. It is lowered only at half the rate."""
        rate = self._finished * SECOND_NS // max(RATE_NS_MIN, now_ns - self._since_ns)
        for lowest, count in PREFETCH_STEPS:
            if rate >= (lowest // 2 if count <= self.count else lowest):
                return count
        return 0


#: How long the slots of a request for tasks are kept for its broker. A broker with work replies
#: sooner.
REQUEST_NS: Final = SECOND_NS // 10


#: How long tasks may be queued beyond the slots before they are returned. Quick tasks start sooner.
EXCESS_NS: Final = SECOND_NS // 2


_Call = TypeVar("_Call")


class WaitingCalls(Generic[_Call]):
    """Calls that wait for other tasks, and gave their slots back meanwhile.

    Each is a process. So only `calls_max` give their slots back, and further calls keep theirs
    until another goes on. A call that goes on is served before new tasks, in the order of asking.
    """

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        #: Without their slots, in the order of waiting.
        self.waiting: dict[_Call, None] = {}
        #: With their slots, because too many wait.
        self.keeping: dict[_Call, None] = {}
        #: Need their slots again.
        self.resuming: deque[_Call] = deque()

    def wait(self, call: _Call) -> None:
        """Note that a call waits. It keeps its slots until `admit` returns it."""
        self.keeping[call] = None

    def resume(self, call: _Call) -> bool:
        """Note that a call goes on. Return whether it has its slots: then it does so at once."""
        if call in self.waiting:
            del self.waiting[call]
            self.resuming.append(call)
            return False
        self.keeping.pop(call, None)
        return True

    def drop(self, call: _Call) -> None:
        """Forget a call that has ended."""
        self.waiting.pop(call, None)
        self.keeping.pop(call, None)
        if call in self.resuming:
            self.resuming.remove(call)

    def admit(self) -> list[_Call]:
        """Return the waiting calls that give their slots back now."""
        count = max(0, self._calls_max - len(self.waiting))
        admitted = [*islice(self.keeping, count)]
        for call in admitted:
            del self.keeping[call]
            self.waiting[call] = None
        return admitted

    def next_resumed(self, may_start: Callable[[_Call], bool]) -> _Call | None:
        """Remove and return the next call that goes on, if it may start. New tasks wait for it."""
        if self.resuming and may_start(self.resuming[0]):
            return self.resuming.popleft()
        return None


class BudgetRunner(Protocol):
    """A runner, as the budget sees it."""

    @property
    def slots_used(self) -> int: ...

    def started(self) -> list[Job]: ...


class SlotBudget:
    """The slots of a host, and the shares of its workers."""

    def __init__(
        self, slots: int, resources: Resources, gpus: Sequence[str], clock: MonotonicClock
    ) -> None:
        self.slots_total = slots
        self.gpus = DevicePool(gpus)
        self._resources = dict(resources)
        self.clock = clock
        self.shares: list[Share] = []

    def add(self) -> Share:
        """Return the share of one more worker."""
        share = Share(self)
        self.shares.append(share)
        return share

    @property
    def slots_used(self) -> int:
        return sum(share.slots_used for share in self.shares)

    def resources_free(self) -> dict[bytes, int]:
        """Return the resources that no running task has."""
        free = dict(self._resources)
        for share in self.shares:
            for job in share.started():
                for name, amount in job.resources:
                    free[name] = free.get(name, 0) - amount
        return free

    def has_freed(self) -> bool:
        """Return whether slots are free since a runner lacked them: then it needs a turn."""
        used = self.slots_used
        return any(share.denied_at is not None and used < share.denied_at for share in self.shares)


class Share:
    """The part of one worker, whose size follows from the work of its broker."""

    #: Set by the worker before its first turn.
    runner: BudgetRunner | None = None
    prefetch: Prefetch | None = None

    def __init__(self, budget: SlotBudget) -> None:
        self._budget = budget
        self.gpus = budget.gpus
        #: The slots in use when the runner lacked some for its next task. None: it did not.
        self.denied_at: int | None = None
        #: Tasks that were requested and have not arrived, and until when slots are kept for them.
        self._requested = 0
        self._requested_until_ns = 0
        #: Since when tasks are queued beyond the slots. 0: none are.
        self._excess_since_ns = 0

    @property
    def slots_used(self) -> int:
        return 0 if self.runner is None else self.runner.slots_used

    def started(self) -> list[Job]:
        return [] if self.runner is None else self.runner.started()

    # For the runner.

    def begin(self) -> None:
        """Forget that slots were lacking: the runner looks for tasks to start again."""
        self.denied_at = None

    def may_start(self, slots: int, resources: Resources) -> bool:
        """Return whether a task may start that takes these slots and resources.

        A task wider than the host runs alone. A runner that lacks slots and has fewer goes first.
        """
        used = self._budget.slots_used
        has_slots = not slots or not used or used + slots <= self._budget.slots_total
        if has_slots and used and resources:
            has_slots = fits(resources, self._budget.resources_free())
        if not has_slots or self._must_yield():
            self.denied_at = used
            return False
        return True

    def _must_yield(self) -> bool:
        own = self.slots_used
        return any(one.denied_at is not None and one.slots_used < own for one in self._others())

    def _others(self) -> list[Share]:
        return [share for share in self._budget.shares if share is not self]

    # For the loop.

    def slots_available(self) -> int:
        """Return the slots that other workers neither use nor have requested tasks for."""
        taken = sum(share.slots_taken() for share in self._others())
        return max(0, self._budget.slots_total - taken)

    def slots_taken(self) -> int:
        """Return the slots that are in use, or kept for requested tasks."""
        is_kept = self._budget.clock.monotonic_ns() < self._requested_until_ns
        return self.slots_used + (self._requested if is_kept else 0)

    def slots_unused(self) -> int:
        """Return the slots that the tasks of other workers do not use."""
        used = sum(share.slots_used for share in self._others())
        return max(0, self._budget.slots_total - used)

    def must_return(self, excess: int) -> bool:
        """Return whether tasks were queued beyond the slots for too long."""
        now_ns = self._budget.clock.monotonic_ns()
        if excess <= 0:
            self._excess_since_ns = 0
        elif not self._excess_since_ns:
            self._excess_since_ns = now_ns
        elif now_ns - self._excess_since_ns >= EXCESS_NS:
            self._excess_since_ns = 0
            return True
        return False

    def waiting_max(self) -> int:
        """Return how many tasks may wait for slots: one while other workers have quick tasks."""
        return int(
            any(share.prefetch is not None and share.prefetch.count for share in self._others())
        )

    def on_request(self, tasks: int) -> None:
        """Keep slots for tasks that were requested."""
        self._requested = tasks
        self._requested_until_ns = self._budget.clock.monotonic_ns() + REQUEST_NS

    def on_reply(self) -> None:
        """Keep no more slots: the tasks have arrived, or there are none."""
        self._requested_until_ns = 0

    def wake_at_ns(self) -> int | None:
        """Return when slots kept for another worker become available, or tasks are returned."""
        now_ns = self._budget.clock.monotonic_ns()
        times = [one._requested_until_ns for one in self._others()]  # noqa: SLF001  # its own class
        if self._excess_since_ns:
            times.append(self._excess_since_ns + EXCESS_NS)
        return min((time for time in times if time > now_ns), default=None)
