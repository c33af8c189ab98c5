"""The two machines as data: what a task and a worker can be, and what moves them.

A machine is a table and one mover. `TASK_TRANSITIONS[LEASED][Cause.EXPIRED]` is READY; a pair that
is not in the table is a bug of ours and raises. The tables are complete: tests walk every state
and every cause, the diagrams in the documentation are made from them, and nobody but the movers
(`Ledger.move`, `Worker.turn`) assigns a state.
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
    EXPIRED = 7  #: the worker fell silent
    EXHAUSTED = 8  #: it failed and has no attempt left
    AGED = 9  #: it grew too old before it was done
    CANCELLED = 10
    RETRIED = 11  #: somebody asked for it to be tried now


_BLOCKED, _DELAYED, _READY, _LEASED, _DONE, _FAILED, _CANCELLED = TaskState

TASK_TRANSITIONS: dict[TaskState, dict[Cause, TaskState]] = {
    _BLOCKED: {
        Cause.RELEASED: _READY,
        Cause.BLOCKED: _BLOCKED,
        Cause.POSTPONED: _DELAYED,
        Cause.AGED: _FAILED,
        Cause.CANCELLED: _CANCELLED,
    },
    _DELAYED: {
        Cause.CAME_DUE: _READY,
        Cause.BLOCKED: _BLOCKED,
        Cause.AGED: _FAILED,
        Cause.CANCELLED: _CANCELLED,
        Cause.RETRIED: _READY,
    },
    _READY: {
        Cause.BLOCKED: _BLOCKED,
        Cause.POSTPONED: _DELAYED,
        Cause.LEASED: _LEASED,
        Cause.AGED: _FAILED,
        Cause.CANCELLED: _CANCELLED,
    },
    _LEASED: {
        Cause.BLOCKED: _BLOCKED,
        Cause.POSTPONED: _DELAYED,
        Cause.COMPLETED: _DONE,
        Cause.RETURNED: _READY,
        Cause.EXPIRED: _READY,
        Cause.EXHAUSTED: _FAILED,
        Cause.CANCELLED: _CANCELLED,
    },
    _DONE: {},
    _FAILED: {
        Cause.BLOCKED: _BLOCKED,
        Cause.CANCELLED: _CANCELLED,
        Cause.RETRIED: _READY,
    },
    _CANCELLED: {},
}

#: The same table turned by cause, for the mover: `TASK_TARGETS[cause][state]`, None where illegal.
TASK_TARGETS: tuple[tuple[TaskState | None, ...], ...] = tuple(
    tuple(TASK_TRANSITIONS[state].get(cause) for state in TaskState) for cause in Cause
)

#: A task begins in one of these: it waits for tasks, for time, or for a worker.
TASK_STATES_INITIAL = (_BLOCKED, _DELAYED, _READY)
#: A task of these states can still come to a worker without anybody's help.
TASK_STATES_RUNNABLE = (_DELAYED, _READY, _LEASED)
#: The end. A name that has ended may be submitted anew: a new generation, a new task.
TASK_STATES_ENDED = (_DONE, _CANCELLED)


class WorkerState(IntEnum):
    """What a worker waits for, as far as the broker knows. Volatile: a restart makes all BUSY."""

    BUSY = 0  #: has not asked for work
    PARKED = 1  #: waits for work; the first to be ready goes to it
    CALLED = 2  #: waits for work in its own way, was told that there is some, and should ask now
    DRAINING = 3  #: gets no more work


class Turn(IntEnum):
    """Why a worker's state turns."""

    ASKED = 0  #: it wants work
    SERVED = 1  #: it got what it asked for
    CALLED = 2
    PASSED_OVER = 3  #: it did not answer the call in time
    CUT_OFF = 4  #: its route is dead
    DRAINED = 5


_BUSY, _PARKED, _CALLED, _DRAINING = WorkerState

WORKER_TRANSITIONS: dict[WorkerState, dict[Turn, WorkerState]] = {
    _BUSY: {
        Turn.ASKED: _PARKED,
        Turn.SERVED: _BUSY,
        Turn.CUT_OFF: _BUSY,
        Turn.DRAINED: _DRAINING,
    },
    _PARKED: {
        Turn.ASKED: _PARKED,
        Turn.SERVED: _BUSY,
        Turn.CALLED: _CALLED,
        Turn.CUT_OFF: _BUSY,
        Turn.DRAINED: _DRAINING,
    },
    _CALLED: {
        Turn.ASKED: _PARKED,
        Turn.SERVED: _BUSY,
        Turn.PASSED_OVER: _PARKED,
        Turn.CUT_OFF: _BUSY,
        Turn.DRAINED: _DRAINING,
    },
    _DRAINING: {
        Turn.SERVED: _DRAINING,
        Turn.CUT_OFF: _DRAINING,
        Turn.DRAINED: _DRAINING,
    },
}
