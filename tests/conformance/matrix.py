"""The matrix: every client dialect with every worker dialect, on a broker that is killed.

`python -m tests.conformance.matrix [TASKS [WORKER…]]` prints it as a table. A column is a kind of
worker. Clients of all dialects submit at the same time, and in the middle of each column the broker
is killed and restarted. The journal decides: a task without a Finished record is lost, one with two
is doubled. A client that can only resubmit after the restart makes another task. Those are counted
too.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from taskyard.core.records import AnyRecord, Finished, Submitted
from taskyard.demo.campaign import AuditCounts, Auditor
from taskyard.journal.lock import StateLock
from taskyard.journal.recovery import records_of
from taskyard.journal.sqlite import SqliteStore
from tests.conformance.raw_sockets import Deadline
from tests.conformance.skills import Client, SubmittedTask, Worker
from tests.conformance.yard import CLIENTS, WORKERS, Yard
from tests.kit.processes import until

TASKS: Final = 200

#: Open tasks per client, and workers of a kind.
WINDOW: Final = 8
WORKERS_AT_ONCE: Final = 2
SLOTS: Final = 4

#: A client resubmits after this time without an answer.
LOST_SECONDS: Final = 2.0

#: A worker without tasks registers again after this time.
IDLE_SECONDS: Final = 0.6

Place = tuple[str, str]


class Cell(Struct):
    """The results for one client dialect and one worker dialect."""

    tasks: int
    #: Answered to the client, with the worker's result.
    right: int = 0
    lost: int = 0
    doubled: int = 0
    asked_again: int = 0
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.right == self.tasks and not self.lost and not self.doubled


class Matrix(Struct):
    """All cells by client and worker, and the totals of the journal."""

    cells: dict[Place, Cell]
    tally: AuditCounts

    @property
    def is_good(self) -> bool:
        return self.tally.is_clean and all(cell.is_good for cell in self.cells.values())


class WorkerThread(threading.Thread):
    """Runs a worker in a thread until it is stopped."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(daemon=True)
        self._worker = worker
        self.stopping = False
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  # raised by `finish`
            self.error = error

    def _serve(self) -> None:
        idle = Deadline(IDLE_SECONDS)
        while not self.stopping:
            job = self._worker.take(0.1)
            if job is not None:
                self._worker.done(job, b"=" + job.payload)
            elif idle:
                continue
            else:
                self._worker.reregister()
            idle = Deadline(IDLE_SECONDS)

    def finish(self) -> None:
        self.stopping = True
        self.join(30)
        assert not self.is_alive(), f"the {self._worker.kind} worker hangs"
        if self.error is not None:
            raise self.error


class ClientThread(threading.Thread):
    """Runs a client in a thread until it has all answers."""

    def __init__(
        self,
        client: Client,
        worker: type[Worker],
        payloads: list[bytes],
        all_at_half: threading.Barrier,
    ) -> None:
        super().__init__(daemon=True)
        self._all_at_half = all_at_half
        self._client = client
        self._worker = worker
        self._todo = deque(payloads)
        self.cell = Cell(len(payloads))
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._ask()
        except BaseException as error:  # noqa: BLE001  # raised by `finish`
            self.error = error
        self.cell.seconds = time.monotonic() - began

    def _ask(self) -> None:
        waiting: deque[SubmittedTask] = deque()
        halves = [len(self._todo) // 2]
        while waiting or self._todo:
            if self.cell.right in halves:
                self._all_at_half.wait(120)
                halves.clear()
            while self._todo and len(waiting) < WINDOW:
                waiting.append(self._client.submit(self._todo.popleft()))
            if not self._receive(waiting, LOST_SECONDS):
                # If one was lost with the broker, all may be.
                while self._receive(waiting, 0):
                    pass
                waiting = deque(self._client.again(submitted) for submitted in waiting)

    def _receive(self, waiting: deque[SubmittedTask], seconds: float) -> bool:
        """Return the answer to the first open task."""
        answer = self._client.answer(waiting[0], seconds) if waiting else None
        if answer is None:
            return False
        payload = waiting.popleft().payload
        expected = b"" if "results" in self._worker.cannot else b"=" + payload
        self.cell.right += answer.is_done and answer.text in (None, expected)
        return True

    def finish(self) -> None:
        self.join(40)
        assert not self.is_alive(), f"the {self._client.kind} client hangs"
        if self.error is not None:
            raise self.error


def run(directory: Path, tasks: int = TASKS, workers: list[str] | None = None) -> Matrix:
    """Run the whole matrix, or the columns of some workers."""
    cells: dict[Place, Cell] = {}
    with Yard(directory) as yard:
        for kind in workers or WORKERS:
            cells |= _column(yard, kind, tasks)
        yard.broker.terminate()
    return Matrix(cells, _count(cells, directory))


def _column(yard: Yard, kind: str, tasks: int) -> dict[Place, Cell]:
    doing = [WorkerThread(yard.worker(kind, SLOTS)) for _ in range(WORKERS_AT_ONCE)]
    asking, all_at_half = {}, threading.Barrier(len(CLIENTS) + 1)
    for client in CLIENTS:
        payloads = [f"{client}|{kind}|{number}".encode() for number in range(tasks)]
        asking[client, kind] = ClientThread(
            yard.client(client), WORKERS[kind], payloads, all_at_half
        )
    all_at_half.wait(120)
    done = yard.control.counts()["done"]
    until(lambda: yard.control.counts()["done"] > done, "they go on")
    yard.restart()
    for one in asking.values():
        one.finish()
    until(lambda: not yard.control.unsettled(), "resubmitted tasks are done too")
    for other in doing:
        other.finish()
    yard.sweep()
    return {place: one.cell for place, one in asking.items()}


def _count(cells: dict[Place, Cell], directory: Path) -> AuditCounts:
    """Count the journal's records for each cell and in total."""
    counting = Auditor()
    task_of: dict[bytes, bytes] = {}
    finished: Counter[bytes] = Counter()
    for record in _records(directory):
        counting.add([record])
        if isinstance(record, Submitted):
            submission = record.submission
            for index, name in enumerate(submission.names):
                task_of[name] = submission.text_of(index) or name
        elif isinstance(record, Finished):
            finished.update(record.names)
    made = Counter(_place(payload) for payload in task_of.values())
    payloads_done = {task_of[name] for name in finished}
    done = Counter(_place(payload) for payload in payloads_done)
    doubled = Counter(_place(task_of[name]) for name, times in finished.items() if times > 1)
    for place, cell in cells.items():
        cell.asked_again = made[place] - cell.tasks
        cell.lost = cell.tasks - done[place]
        cell.doubled = doubled[place]
    return counting.tally()


def _records(directory: Path) -> Iterator[AnyRecord]:
    state = directory / ".taskyard"
    with StateLock(state), closing(SqliteStore(state)) as store:
        for row in store.rows():
            yield from records_of(row, row.record_first - 1)


def _place(payload: bytes) -> Place:
    client, worker, _ = payload.decode().split("|")
    return client, worker


def table(cells: dict[Place, Cell]) -> Table:
    made = Table(title="clients × workers, the broker killed in every column", title_justify="left")
    for column in ("client", "worker"):
        made.add_column(column, no_wrap=True)
    for column in ("tasks", "right", "lost", "doubled", "asked again", "seconds"):
        made.add_column(column, justify="right")
    for (client, worker), cell in cells.items():
        counts = (cell.tasks, cell.right, cell.lost, cell.doubled, cell.asked_again)
        made.add_row(client, worker, *map(str, counts), f"{cell.seconds:.1f}")
    return made


def main(arguments: list[str]) -> int:
    tasks = int(arguments[0]) if arguments else TASKS
    with tempfile.TemporaryDirectory() as directory:
        matrix = run(Path(directory), tasks, arguments[1:] or None)
    console, tally = Console(width=100), matrix.tally
    console.print(table(matrix.cells))
    console.print(
        f"the journal: {tally.submitted} tasks, {tally.done} done, {tally.failed} failed, "
        f"{tally.unfinished} unfinished, {tally.completed_twice} completed twice, "
        f"{tally.leases} leases, {tally.stale} stale reports"
    )
    return 0 if matrix.is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
