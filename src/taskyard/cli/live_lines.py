"""Lines of running tasks for `map --line-buffer`: printed whole, as they arrive.

A thread asks for the output of leased tasks twice a second. It prints whole lines only, so that
lines of different tasks never mix. The rest is printed when the task is settled.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from taskyard.cli.format import full_name
from taskyard.core.states import TaskState
from taskyard.errors import TaskyardError

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.client.internal import InternalClient

#: How often running tasks are asked for.
POLL_SECONDS: Final = 0.5


class _Position(NamedTuple):
    """How much of an attempt is printed."""

    attempt: int
    offset: int


class LiveLines:
    """Prints lines of a campaign's running tasks. A context manager."""

    def __init__(
        self, client: InternalClient, campaign: str, write: Callable[[str, bytes], None]
    ) -> None:
        """Prepare the thread. It calls `write` with a task's full name and whole lines."""
        self._client = client
        self._campaign = campaign
        self._write = write
        self._positions: dict[str, _Position] = {}
        #: Held while something is printed.
        self.lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taskyard-lines", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def printed(self, name: str) -> int:
        """Return how many bytes of a settled task's last attempt are printed. Hold the lock."""
        position = self._positions.pop(name, None)
        if position is None:
            return 0
        is_last = self._client.output_page(name, count=1).attempt == position.attempt
        return position.offset if is_last else 0

    def _run(self) -> None:
        from taskyard.client.requests import scope_of  # noqa: PLC0415  # not for `--help`

        scope = scope_of(campaign=self._campaign, states=[TaskState.LEASED])
        while not self._stopping.wait(POLL_SECONDS):
            try:
                for view in self._client.tasks(scope):
                    self._poll(full_name(view))
            except (TaskyardError, BrokenPipeError):
                return  # the main thread reports it

    def _poll(self, name: str) -> None:
        """Print the whole lines that a running task has written since the last time."""
        with self.lock:
            attempt, offset = self._positions.get(name, (None, 0))
            page = self._client.output_page(name, offset)
            if attempt not in (None, page.attempt):  # it was retried
                offset, page = 0, self._client.output_page(name)
            lines = page.data[: page.data.rfind(b"\n") + 1]
            if lines and page.live:
                self._write(name, lines)
                self._positions[name] = _Position(page.attempt, offset + len(lines))
