"""Futures of tasks: real `concurrent.futures` ones that know their task.

A future is settled when its task is: with the result, with `TaskFailed` or `TaskBlocked`, or as
cancelled. A task that is tried again after that has a new story, and needs a new future.
"""

from __future__ import annotations

import concurrent.futures
import sys
from typing import TYPE_CHECKING, Any, Final, cast

from taskyard.core.states import TaskState
from taskyard.core.tasks import shown
from taskyard.errors import TaskBlocked, TaskFailed
from taskyard.wire import work

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from taskyard.client.client import Client


class Future(concurrent.futures.Future[Any]):
    """What will become of a task."""

    def __init__(self, client: Client, name: bytes, service: bytes) -> None:
        super().__init__()
        self._client = client
        self._name = name
        self._service = service

    @property
    def name(self) -> str:
        return shown(self._name)

    @property
    def state(self) -> str:
        """Where the task is: blocked, delayed, ready, leased, done, failed or cancelled."""
        return str(self._client.show(self.name)["state"])

    def why(self) -> str:
        """What the task waits for, or how it ended, in a sentence."""
        return self._client.why(self.name)

    def cancel(self) -> bool:
        """Cancel the task, also where it runs already. True if it will not be done. Raises
        `TimedOut` if the broker does not answer in the client's time."""
        if not self.done():
            self._client.cancel([self.name], timeout=self._client.timeout)
            concurrent.futures.wait([self], timeout=self._client.timeout)
        return self.cancelled()

    def __repr__(self) -> str:
        return f"<Future of task {self.name!r}: {super().__repr__().split(' state=')[-1]}"

    # For the courier.

    def settle(self, state: TaskState, text: bytes) -> None:
        """The task is settled: whoever waits for it is told."""
        if self.done():
            return
        if state is TaskState.CANCELLED:
            super().cancel()
            self.set_running_or_notify_cancel()
        elif state is TaskState.DONE:
            self._settle_done(text)
        else:
            self.set_exception(_failure(self.name, state, text))

    def _settle_done(self, text: bytes) -> None:
        try:
            value = value_of(self._service, text)
        except Exception as error:  # noqa: BLE001  # it is whoever asks for the result's to see
            self.set_exception(error)
        else:
            self.set_result(value)


def value_of(service: bytes, text: bytes) -> Any:  # noqa: ANN401  # whatever the task returned
    """The result as Python sees it: what a program printed, what a function returned, bytes."""
    if service == work.EXEC:
        return shown(text)
    if service == work.CALL:
        return work.decode_value(text)
    return text


def _failure(name: str, state: TaskState, text: bytes) -> TaskFailed:
    if state is TaskState.FAILED:
        reason = shown(text) or "no reason given"
        return TaskFailed(f"task {name} failed: {reason}")
    return TaskBlocked(
        f"task {name} waits behind a task that failed; `taskyard why {name}` says which"
    )


#: The bar is drawn on terminals only; in a pipe nothing is.
_PROGRESS: Final = "tasks"


def as_completed(
    futures: Iterable[Future], timeout: float | None = None, *, progress: bool = False
) -> Iterator[Future]:
    """Futures as they are settled, whatever became of them."""
    waiting = list(futures)
    done = cast("Iterator[Future]", concurrent.futures.as_completed(waiting, timeout))
    if not progress or not sys.stderr.isatty():
        return done
    from rich.console import Console  # noqa: PLC0415  # only who wants a bar pays for it
    from rich.progress import track  # noqa: PLC0415

    console = Console(stderr=True)
    return iter(track(done, description=_PROGRESS, total=len(waiting), console=console))


def wait(
    futures: Iterable[Future],
    timeout: float | None = None,
    return_when: str = concurrent.futures.ALL_COMPLETED,
) -> concurrent.futures._base.DoneAndNotDoneFutures[Any]:
    """Wait until futures are settled, as `concurrent.futures.wait` does."""
    return concurrent.futures.wait(list(futures), timeout, return_when)
