"""The task around this code: its name, and a client of its broker.

A worker passes the broker, the key file and the names on by the environment, so this works in
functions and in programs. In a function, waiting for futures gives its slot back meanwhile.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.client.executor import Executor
from taskyard.client.task import ProcessClients
from taskyard.core.identity import spelling
from taskyard.errors import UserError
from taskyard.process import current_task

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from taskyard.client.client import Client

logger = logging.getLogger("taskyard.client")

#: Timeout for the first answer of the broker, on a busy machine or while it is restarted.
CONNECT_SECONDS: Final = 60.0


class CurrentTask(Struct, frozen=True):
    """The task that runs this code."""

    #: Its name in its campaign.
    name: str
    #: Its campaign. Empty: none.
    campaign: str
    #: The number of this attempt, from 1.
    attempt: int
    #: The endpoint of its broker. Empty: the worker has a dialect without clients.
    broker: str

    @property
    def full_name(self) -> str:
        """The name that every call of a client accepts: CAMPAIGN/NAME, or NAME."""
        return spelling(self.campaign, self.name)

    @property
    def client(self) -> Client:
        """A client of the task's broker. All tasks of this process share it, so don't close it.

        It uses the key of the worker, which has to be a producer's too: only then may it submit
        tasks. Raises `UserError` if the worker has passed no broker on.
        """
        endpoint = self._endpoint()
        return _clients.get(endpoint, connect_timeout=CONNECT_SECONDS, report=logger.info)

    def executor(self) -> Executor:
        """Return an executor that calls functions as tasks of the same broker.

        A worker of that broker has to allow pickled calls.
        """
        return Executor(self._endpoint())

    def slot_given_back(self) -> AbstractContextManager[None]:
        """Give the slot back to the worker in a `with` block that waits for other tasks.

        `Future.result`, `wait` and `as_completed` do so by themselves. This is for other ways of
        waiting, such as `asyncio.run`. The end of the block waits for a free slot. Does nothing in
        a program, and in a thread other than that of the call.
        """
        return current_task.slot_given_back()

    def _endpoint(self) -> str:
        if not self.broker:
            raise UserError(
                f"task {self.full_name}: its worker has passed no broker on (use Client(…) with an "
                "endpoint)"
            )
        return self.broker

    def __repr__(self) -> str:
        return f"<CurrentTask {self.full_name!r}, attempt {self.attempt}>"


_clients = ProcessClients()


def current() -> CurrentTask:
    """Return the task that runs this code, in a function or in a program.

    Raises `UserError` outside a task.
    """
    env = os.environ
    name = env.get(current_task.TASK_VARIABLE)
    if name is None:
        raise UserError("current task: there is none (no worker runs this process)")
    return CurrentTask(
        name,
        env.get(current_task.CAMPAIGN_VARIABLE, ""),
        int(env.get(current_task.ATTEMPT_VARIABLE, "1")),
        env.get(current_task.BROKER_VARIABLE, ""),
    )
