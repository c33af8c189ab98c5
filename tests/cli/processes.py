"""Commands as processes of their own, for the verbs that run until they are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.cli.yard import PATIENCE_SECONDS, TASKYARD, environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Running:
    """One command, with what it says."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [*TASKYARD, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=directory,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line of its stdout; "" at the end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def error_line(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline().rstrip()

    def send(self, number: signal.Signals) -> Self:
        self.process.send_signal(number)
        return self

    def end(self) -> tuple[int, str, str]:
        """Wait until it has ended: its exit code, and what it said that was not read yet.

        Its stdin stays open until then: the end of that may be an order.
        """
        code = self.process.wait(PATIENCE_SECONDS)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return code, self.process.stdout.read(), self.process.stderr.read()

    def hang_up(self) -> None:
        """Close its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        """Kill it if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
        with self.process:
            pass

    def terminate(self) -> tuple[int, str, str]:
        return self.send(signal.SIGTERM).end()

    def kill(self) -> None:
        self.send(signal.SIGKILL).end()


@contextmanager
def started(directory: Path, *words: str) -> Iterator[Running]:
    """A command that is killed at the end, if it has not ended by then."""
    running = Running(directory, *words)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def broker(directory: Path, *options: str) -> Iterator[Running]:
    """A broker that listens, on the usual state of a directory."""
    with started(directory, "broker", "--until-eof", *options) as running:
        assert running.line().startswith("listening native ipc://")
        yield running


@contextmanager
def worker(directory: Path, *options: str) -> Iterator[Running]:
    """A worker that was heard by the broker."""
    with started(directory, "worker", "--until-eof", *options) as running:
        assert " works for the broker at " in running.error_line()
        yield running


def run(directory: Path, *words: str) -> tuple[int, str, str]:
    """A command that ends by itself."""
    with started(directory, *words) as running:
        return running.end()


def campaign(directory: Path, tasks: list[dict[str, Any]], name: str = "campaign.jsonl") -> str:
    """A campaign's file. Returns its name."""
    (directory / name).write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return name


def marking(name: str, script: str = "true", **more: Any) -> dict[str, Any]:
    """A task that writes its name into `marks` when it begins, and does something more."""
    argv = ["sh", "-c", f"echo {name} >> marks; {script}"]
    return {"name": name, "argv": argv, **more}


def marks(directory: Path) -> list[str]:
    """The tasks that have begun, in their order."""
    try:
        return (directory / "marks").read_text().split()
    except FileNotFoundError:
        return []


def until(is_so: Callable[[], object]) -> None:
    """Wait for what other processes do to files, which nobody tells."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_children_of(running: Running) -> list[int]:
    """The processes that it has started, by whichever of its threads."""
    threads = Path(f"/proc/{running.pid}/task").iterdir()
    return [int(one) for thread in threads for one in (thread / "children").read_text().split()]
