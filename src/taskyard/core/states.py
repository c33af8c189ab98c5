"""The two machines as data: what a task and a worker can be, and what moves them.

A machine is a table and one mover. `TASK_TRANSITIONS[LEASED][Cause.LEASE_EXPIRED]` is READY; a
pair that is not in the table is a bug of ours and raises. The tables are complete: tests walk
every state and every cause, the diagrams in the documentation are made from them, and nobody but
the movers (`Ledger.move`, `Worker.turn`) assigns a state.
"""

from enum import IntEnum


class TaskState(IntEnum):
    """Where a task is on its way. LEASED, not running: the broker can't see the worker's hands."""

    BLOCKED = 0  #: waits for tasks
    DELAYED = 1  #: waits for time
    READY = 2  #: waits for a worker
    LEASED = 3  #: entrusted to a worker
    DONE = 4
    FAILED = 5  #: stays with its reason, for a retry; its dependents wait
    CANCELLED = 6


class Cause(IntEnum):
    """Why a task moves."""

    RELEASED = 0  #: the last task it waited for is done
    CAME_DUE = 1  #: its time has come
    BLOCKED = 2  #: it was given tasks to wait for
    POSTPONED = 3  #: it was given a time to wait for
    LEASED = 4
    COMPLETED = 5
    RETURNED = 6  #: given back, by the worker or because the worker left
    LEASE_EXPIRED = 7  #: the worker fell silent
    EXHAUSTED = 8  #: it failed and has no attempt left
    TASK_EXPIRED = 9  #: it grew too old before it was done
    CANCELLED = 10
    RETRIED = 11  #: somebody asked for it to be tried now


# Names of their own: to find a member in its class takes Python 3.11 ten times as long as a global,
# which shows in every loop over tasks.
BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState

TASK_TRANSITIONS: dict[TaskState, dict[Cause, TaskState]] = {
    BLOCKED: {
        Cause.RELEASED: READY,
        Cause.BLOCKED: BLOCKED,
        Cause.POSTPONED: DELAYED,
        Cause.TASK_EXPIRED: FAILED,
        Cause.CANCELLED: CANCELLED,
    },
    DELAYED: {
        Cause.CAME_DUE: READY,
        Cause.BLOCKED: BLOCKED,
        Cause.TASK_EXPIRED: FAILED,
        Cause.CANCELLED: CANCELLED,
        Cause.RETRIED: READY,
    },
    READY: {
        Cause.BLOCKED: BLOCKED,
        Cause.POSTPONED: DELAYED,
        Cause.LEASED: LEASED,
        Cause.TASK_EXPIRED: FAILED,
        Cause.CANCELLED: CANCELLED,
    },
    LEASED: {
        Cause.BLOCKED: BLOCKED,
        Cause.POSTPONED: DELAYED,
        Cause.COMPLETED: DONE,
        Cause.RETURNED: READY,
        Cause.LEASE_EXPIRED: READY,
        Cause.EXHAUSTED: FAILED,
        Cause.CANCELLED: CANCELLED,
    },
    DONE: {},
    FAILED: {
        Cause.BLOCKED: BLOCKED,
        Cause.CANCELLED: CANCELLED,
        Cause.RETRIED: READY,
    },
    CANCELLED: {},
}

#: The same table turned by cause, for the mover: `TASK_TARGETS[cause][state]`, None where illegal.
TASK_TARGETS: tuple[tuple[TaskState | None, ...], ...] = tuple(
    tuple(TASK_TRANSITIONS[state].get(cause) for state in TaskState) for cause in Cause
)

#: A task begins in one of these: it waits for tasks, for time, or for a worker.
TASK_STATES_INITIAL = (BLOCKED, DELAYED, READY)
#: A task of these states can still come to a worker without anybody's help.
TASK_STATES_RUNNABLE = (DELAYED, READY, LEASED)
#: The end. A name that has ended may be submitted anew: a new generation, a new task.
TASK_STATES_ENDED = (DONE, CANCELLED)


class WorkerState(IntEnum):
    """What a worker waits for, as far as the broker knows. Volatile: a restart makes all BUSY."""

    BUSY = 0  #: has not asked for work
    PARKED = 1  #: waits for work; the first to be ready goes to it
    WOKEN = 2  #: waits for work in its own way, was told that there is some, and should ask now
    DRAINING = 3  #: gets no more work


class WorkerCause(IntEnum):
    """Why a worker's state turns."""

    REQUESTED = 0  #: it wants work
    ASSIGNED = 1  #: it got what it asked for
    WOKEN = 2
    PASSED_OVER = 3  #: it did not answer the call in time
    UNREACHABLE = 4  #: its route is dead
    DRAINED = 5
    WAIT_ENDED = 6  #: it asked, and does not want to wait any longer


BUSY, PARKED, WOKEN, DRAINING = WorkerState

WORKER_TRANSITIONS: dict[WorkerState, dict[WorkerCause, WorkerState]] = {
    BUSY: {
        WorkerCause.REQUESTED: PARKED,
        WorkerCause.ASSIGNED: BUSY,
        WorkerCause.UNREACHABLE: BUSY,
        WorkerCause.DRAINED: DRAINING,
    },
    PARKED: {
        WorkerCause.REQUESTED: PARKED,
        WorkerCause.ASSIGNED: BUSY,
        WorkerCause.WOKEN: WOKEN,
        WorkerCause.UNREACHABLE: BUSY,
        WorkerCause.DRAINED: DRAINING,
        WorkerCause.WAIT_ENDED: BUSY,
    },
    WOKEN: {
        WorkerCause.REQUESTED: PARKED,
        WorkerCause.ASSIGNED: BUSY,
        WorkerCause.PASSED_OVER: PARKED,
        WorkerCause.UNREACHABLE: BUSY,
        WorkerCause.DRAINED: DRAINING,
    },
    DRAINING: {
        WorkerCause.ASSIGNED: DRAINING,
        WorkerCause.UNREACHABLE: DRAINING,
        WorkerCause.DRAINED: DRAINING,
    },
}
