"""The state machines of tasks and workers, as tables.

`TASK_TRANSITIONS[LEASED][Cause.LEASE_EXPIRED]` is READY. A pair that is not in the table is a bug
in Taskyard and raises. Only the movers (`Ledger.move`, `Worker.turn`) assign a state. Tests walk
every state and every cause, and the diagrams in the documentation are made from these tables.
"""

from enum import IntEnum


class TaskState(IntEnum):
    """State of a task. LEASED, not running: the broker can't see whether the worker has begun."""

    BLOCKED = 0  #: waits for tasks
    DELAYED = 1  #: waits for time
    READY = 2  #: waits for a worker
    LEASED = 3  #: held by a worker
    DONE = 4
    FAILED = 5  #: kept with its reason for a retry, while its dependents wait
    CANCELLED = 6


class Cause(IntEnum):
    """Why a task moves."""

    RELEASED = 0  #: the last task it waited for is done
    CAME_DUE = 1  #: its due time has come
    BLOCKED = 2  #: it got predecessors
    POSTPONED = 3  #: it got a due time
    LEASED = 4
    COMPLETED = 5
    RETURNED = 6  #: returned by the worker, or because the worker left
    LEASE_EXPIRED = 7  #: the worker missed its heartbeats
    EXHAUSTED = 8  #: it failed and has no attempt left
    TASK_EXPIRED = 9  #: it reached its expiry before it was done
    CANCELLED = 10
    RETRIED = 11  #: a client requested another attempt


# Module-level names: in Python 3.11 a lookup of an enum member in its class takes ten times as long
# as a global, which shows in every loop over tasks.
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

#: `TASK_TRANSITIONS` by cause, for the mover: `TASK_TARGETS[cause][state]`, None where illegal.
TASK_TARGETS: tuple[tuple[TaskState | None, ...], ...] = tuple(
    tuple(TASK_TRANSITIONS[state].get(cause) for state in TaskState) for cause in Cause
)

#: A new task starts in one of these: it waits for tasks, for time, or for a worker.
TASK_STATES_INITIAL = (BLOCKED, DELAYED, READY)
#: Tasks in these states can reach a worker without a command from a client.
TASK_STATES_RUNNABLE = (DELAYED, READY, LEASED)
#: Final states. An ended name may be submitted again, as a new generation.
TASK_STATES_ENDED = (DONE, CANCELLED)


class WorkerState(IntEnum):
    """State of a worker, as the broker sees it. Volatile: a restart makes all BUSY."""

    BUSY = 0  #: has not requested tasks
    PARKED = 1  #: waits for tasks and gets the first that is ready
    WOKEN = 2  #: was notified of work and is expected to request it
    DRAINING = 3  #: gets no more tasks


class WorkerCause(IntEnum):
    """Why a worker's state changes."""

    REQUESTED = 0  #: it requested tasks
    ASSIGNED = 1  #: it got tasks
    WOKEN = 2
    PASSED_OVER = 3  #: it did not react to `Wake` in time
    UNREACHABLE = 4  #: messages to it can't be delivered
    DRAINED = 5
    WAIT_ENDED = 6  #: it stopped waiting for tasks


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
