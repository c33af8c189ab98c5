"""Real processes for the system tests: a broker to kill, peers to load it, the journal to count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Self

from taskyard.journal.lock import StateLock
from taskyard.journal.recovery import records_of
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.tally import Counting, Tally

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

TASKYARD = (sys.executable, "-m", "taskyard.cli")
SLOW_DISK = (sys.executable, str(Path(__file__).with_name("slow_disk.py")))


def until(condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
    """Other threads and processes are at work: look until it is so."""
    ends = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < ends, f"timed out: {what}"
        time.sleep(0.005)


def environment() -> dict[str, str]:
    """Ours, without what a caller's shell may say of brokers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TASKYARD_")}


class BrokerProcess:
    """A broker of its own, at `endpoint`; killed and started again at will."""

    def __init__(self, state: Path, *options: str) -> None:
        self.state = state
        self._arguments = ["broker", "--state", str(state), *options]
        self._process: subprocess.Popen[str] | None = None
        #: The endpoints that it listens at, the native one first.
        self.endpoints: list[str] = []

    @property
    def endpoint(self) -> str:
        return self.endpoints[0]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, program: tuple[str, ...] = TASKYARD) -> Self:
        """Start, and wait until it listens."""
        self._process = process = subprocess.Popen(
            [*program, *self._arguments], stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert process.stdout is not None
        expected = 1 + self._arguments.count("--listen")
        lines = [process.stdout.readline().split() for _ in range(expected)]
        assert all(line[:1] == ["listening"] for line in lines), lines
        self.endpoints = [line[2] for line in lines]
        return self

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout: float = 30) -> int:
        assert self._process is not None
        status = self._process.wait(timeout)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM. Returns the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


def count(state: Path) -> tuple[Tally, set[bytes]]:
    """What the journal of a stopped broker proves, and the names that were submitted."""
    counting = Counting()
    names: set[bytes] = set()
    with StateLock(state), closing(SqliteStore(state)) as store:
        for row in store.rows():
            told = records_of(row, row.record_first - 1)
            counting.add(told)
            for record in told:
                if type(record).__name__ == "Submitted":
                    names.update(record.submission.names)  # type: ignore[union-attr]
    return counting.tally(), names
