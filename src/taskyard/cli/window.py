"""Futures under way between who submits and who tells: a bounded number, told by another thread.

Who submits waits when too many are under way. What goes wrong while telling is raised to who
submits, at the next one or at the end.
"""

from __future__ import annotations

import concurrent.futures
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.client.futures import Future

#: Tasks under way: more than there are slots, so that a slow one at the head does not leave workers
#: idle; some tens of megabytes.
FUTURES_MAX: Final = 20_000

#: How often who waits for room looks whether telling has gone wrong.
_POLL_SECONDS: Final = 0.2

#: How long who leaves waits for a line that is being written.
_LAST_LINE_SECONDS: Final = 2


class FutureWindow:
    """Hands each future to `on_settled` when it is settled; `on_idle` is called before waiting.
    Use it as a context manager: after its end nothing is told, whatever the reason for leaving."""

    def __init__(
        self,
        on_settled: Callable[[Future], None],
        on_idle: Callable[[], None],
        *,
        in_order: bool,
        futures_max: int = FUTURES_MAX,
    ) -> None:
        self._on_settled = on_settled
        self._on_idle = on_idle
        self._in_order = in_order
        self._room = threading.Semaphore(futures_max)
        self._queue: SimpleQueue[Future | None] = SimpleQueue()
        self._error: BaseException | None = None
        #: Held by who tells. Python ends a thread anywhere when the program ends: if it is writing
        #: then, stdout can't be closed, and the whole program aborts.
        self._output_lock = threading.Lock()
        #: How many there were so far.
        self.added = 0
        self._thread = threading.Thread(target=self._run, name="taskyard-results", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._output_lock.acquire(timeout=_LAST_LINE_SECONDS)  # and never given back

    def add(self, future: Future) -> None:
        """One more; waits for room."""
        while not self._room.acquire(timeout=_POLL_SECONDS):
            self._raise_error()
        self._raise_error()
        self.added += 1
        if self._in_order:
            self._queue.put(future)
        else:
            future.add_done_callback(self._queue.put)  # type: ignore[arg-type]  # it is the same one

    def finish(self) -> None:
        """Wait until all are told."""
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._deliver_all()
        except BaseException as wrong:  # noqa: BLE001  # it is raised to who submits
            self._error = wrong

    def _deliver_all(self) -> None:
        told = 0
        is_last = False
        while not is_last or told < self.added:
            if self._queue.empty():
                with self._output_lock:
                    self._on_idle()
            future = self._queue.get()
            if future is None:
                is_last = True
                continue
            if not future.done():
                with self._output_lock:
                    self._on_idle()
                concurrent.futures.wait([future])
            with self._output_lock:
                self._on_settled(future)
            told += 1
            self._room.release()
