"""Commands as processes of their own: brokers to kill, workers, and all that ends by itself.

A process runs in a directory and has the usual state there; it is killed when its `with` ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable

TASKYARD = (sys.executable, "-m", "taskyard.cli")

#: What must come has come by then, however busy the machine.
PATIENCE_SECONDS = 150


def environment(**more: str) -> dict[str, str]:
    """Ours, without what a caller's shell may say of brokers."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TASKYARD_")}
    return own | more


class Running:
    """One command, with what it says. Who does not read its stderr may let it have ours."""

    def __init__(
        self,
        directory: Path,
        *words: str,
        program: tuple[str, ...] = TASKYARD,
        stderr: int | None = subprocess.PIPE,
    ) -> None:
        self.process = subprocess.Popen(
            [*program, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
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

    def write(self, text: str) -> None:
        """To its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def hang_up(self) -> None:
        """Close its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def send(self, number: signal.Signals) -> Self:
        self.process.send_signal(number)
        return self

    def end(self) -> tuple[int, str, str]:
        """Wait until it has ended: its exit code, and what it said that was not read yet.

        Its stdin stays open until then: the end of that may be an order.
        """
        code = self.process.wait(PATIENCE_SECONDS)
        out, err = (
            "" if pipe is None or pipe.closed else pipe.read()
            for pipe in (self.process.stdout, self.process.stderr)
        )
        return code, out, err

    def terminate(self) -> tuple[int, str, str]:
        return self.send(signal.SIGTERM).end()

    def kill(self) -> None:
        self.send(signal.SIGKILL).end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with self.process:
            pass  # closes the pipes


class Broker(Running):
    """A broker that listens."""

    def __init__(self, directory: Path, *options: str, **how: Any) -> None:
        super().__init__(directory, "broker", "--until-eof", *options, **how)
        lines = [self.line().split() for _ in range(1 + options.count("--listen"))]
        assert all(line[:1] == ["listening"] for line in lines), (lines, self.process.poll())
        #: Where it can be reached, in its own tongue first.
        self.endpoints = [line[2] for line in lines]

    @property
    def endpoint(self) -> str:
        return self.endpoints[0]


class Worker(Running):
    """A worker that was heard by the broker."""

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory, "worker", "--until-eof", *options)
        assert " works for the broker at " in self.error_line()


def run(directory: Path, *words: str) -> tuple[int, str, str]:
    """A command that ends by itself."""
    with Running(directory, *words) as running:
        return running.end()


def campaign(directory: Path, tasks: list[dict[str, Any]], name: str = "campaign.jsonl") -> str:
    """A campaign's file. Returns its name."""
    (directory / name).write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return name


#: Waits until somebody makes the file `gate`. No pipe: who has just been killed may still read from
#: one, in place of who came after.
AT_THE_GATE = "until [ -e gate ]; do sleep 0.02; done"


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


def until(is_so: Callable[[], object], what: str = "it") -> None:
    """Wait for what other threads and processes do, which nobody tells."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < ends, f"did not happen: {what}"
        time.sleep(0.005)


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
