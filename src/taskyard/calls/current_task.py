"""The task that this process runs: its variables, and the slot that it gives back while it waits.

A worker sets the variables of each task, and the process for calls installs its slot. Clients look
here before they wait. Knows neither workers nor clients.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from taskyard.core.limits import PRIORITY_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

#: Set for each task.
TASK_VARIABLE: Final = "TASKYARD_TASK"
CAMPAIGN_VARIABLE: Final = "TASKYARD_CAMPAIGN"
ATTEMPT_VARIABLE: Final = "TASKYARD_ATTEMPT"
#: Set for tasks with a priority other than 0.
PRIORITY_VARIABLE: Final = "TASKYARD_PRIORITY"

#: The settings `broker.url` and `broker.key`, which a worker sets for its tasks.
BROKER_VARIABLE: Final = "TASKYARD_BROKER"
KEY_VARIABLE: Final = "TASKYARD_KEY"
#: The same endpoint again. A different `TASKYARD_BROKER` was set by a user.
TASK_BROKER_VARIABLE: Final = "TASKYARD_TASK_BROKER"

#: The name of the worker.
WORKER_VARIABLE: Final = "TASKYARD_WORKER"

#: A program that a task runs has the variables from its start. A process for calls gets them later.
_IS_PROGRAM_OF_TASK: Final = TASK_VARIABLE in os.environ


def broker_variables(
    endpoint: str, key_file: Path | None, own: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables by which tasks find the broker of their worker. No secret is in them.

    `own` is the environment of the worker. A broker that a user has set there is named, too.
    """
    variables = {BROKER_VARIABLE: endpoint}
    if key_file is not None:
        variables[KEY_VARIABLE] = str(key_file)
    if not own.get(BROKER_VARIABLE):
        variables[TASK_BROKER_VARIABLE] = endpoint
    return variables


def is_broker_of_worker(environment: Mapping[str, str]) -> bool:
    """Return whether the broker in an environment was set by a worker, and not by a user."""
    broker = environment.get(BROKER_VARIABLE)
    return broker is not None and broker == environment.get(TASK_BROKER_VARIABLE)


def nested_priority(endpoint: str) -> int:
    """Return the priority of tasks that this process submits: its task's own, and one more.

    So tasks of tasks run depth first, and few of them wait for others at once. 0 outside a task,
    and for another broker than that of the task.
    """
    if not (_Installed.process or _IS_PROGRAM_OF_TASK):  # quick, for loops of many tasks
        return 0
    env = os.environ
    if TASK_VARIABLE not in env or env.get(BROKER_VARIABLE) != endpoint:
        return 0
    own = env.get(PRIORITY_VARIABLE, "")
    return min(1 + int(own), PRIORITY_MAX) if own.lstrip("-").isdecimal() else 1


class CallSlot(Protocol):
    """The slot of the call that runs in this process."""

    def give_back(self) -> None:
        """Give the slot back to the worker. Returns at once."""

    def retake(self) -> None:
        """Wait until the worker has a slot for this call again."""


class _Installed:
    """The slot of this process, and the thread that runs its calls."""

    slot: CallSlot | None = None
    thread = process = 0


def install_slot(slot: CallSlot) -> None:
    """Set the slot of the calls that this thread runs."""
    _Installed.thread, _Installed.process = threading.get_ident(), os.getpid()
    _Installed.slot = slot


def runs_calls() -> bool:
    """Return whether this is a process for calls, or forked from one."""
    return _Installed.process != 0


def has_slot() -> bool:
    """Return whether this thread runs a call that holds its slot. A forked process does not."""
    is_here = _Installed.thread == threading.get_ident() and _Installed.process == os.getpid()
    return _Installed.slot is not None and is_here


@contextmanager
def slot_given_back() -> Iterator[None]:
    """Give the slot of this call back meanwhile. Does nothing in other threads and processes."""
    slot = _Installed.slot
    if slot is None or not has_slot():
        yield
        return
    _Installed.slot = None  # it can't be given back twice
    slot.give_back()
    try:
        yield
    finally:
        slot.retake()
        _Installed.slot = slot
