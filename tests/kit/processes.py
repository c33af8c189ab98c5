"""Commands as child processes: brokers to kill, workers, and commands that end by themselves.

A process runs in a directory, and has its state in `.taskyard` there. It is killed when its `with`
block ends.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from taskyard.cli import entry
from taskyard.process.child import ChildProcess, environment_without_settings

if TYPE_CHECKING:
    from collections.abc import Callable

TASKYARD = (sys.executable, "-m", "taskyard.cli")

#: Fail a test that waits longer. Generous, because the machine may be busy.
PATIENCE_SECONDS = 150


def environment(**more: str) -> dict[str, str]:
    """Return the environment without the `TASKYARD_*` variables of the caller's shell."""
    return environment_without_settings() | more


class Running(ChildProcess):
    """A command whose stdin, stdout and stderr are pipes. `stderr=None` inherits the caller's."""

    def __init__(
        self,
        directory: Path,
        *words: str,
        program: tuple[str, ...] = TASKYARD,
        stderr: int | None = subprocess.PIPE,
    ) -> None:
        super().__init__(
            [*program, *words],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment(),
            cwd=directory,
        )

    def line(self) -> str:
        """Return the next line of its stdout. "" means end of file."""
        return self.read_line()

    def error_line(self) -> str:
        """Return the next line of its stderr. "" means end of file."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().rstrip()

    def hang_up(self) -> None:
        """Close its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def send(self, number: signal.Signals) -> Self:
        """Send a signal."""
        self.process.send_signal(number)
        return self

    def end(self) -> tuple[int, str, str]:
        """Wait for its end. Return its exit status, and the stdout and stderr not read before.

        Its stdin stays open until then, because the end of stdin may stop it.
        """
        code = self.process.wait(PATIENCE_SECONDS)
        out, err = (
            "" if pipe is None or pipe.closed else pipe.read()
            for pipe in (self.process.stdout, self.process.stderr)
        )
        return code, out, err

    def terminate(self) -> tuple[int, str, str]:
        """Send SIGTERM, and wait for its end."""
        return self.send(signal.SIGTERM).end()

    def kill(self) -> int:
        """Send SIGKILL, and wait for its end."""
        return self.send(signal.SIGKILL).end()[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


class Broker(Running):
    """A broker that listens."""

    def __init__(self, directory: Path, *options: str, **how: Any) -> None:
        super().__init__(directory, "broker", "--until-eof", *options, **how)
        count = 1 + options.count("--listen")
        #: The native endpoint first.
        self.endpoints = [endpoint for _, endpoint in self.read_endpoints(count)]
        assert len(self.endpoints) == count, self.process.poll()

    @property
    def endpoint(self) -> str:
        return self.endpoints[0]


class Worker(Running):
    """A worker that the broker has answered."""

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory, "worker", "--until-eof", *options)
        assert " works for the broker at " in self.error_line()


def run(directory: Path, *words: str) -> tuple[int, str, str]:
    """Run a command until it ends. Return its exit status, stdout and stderr."""
    with Running(directory, *words) as running:
        return running.end()


def run_here(directory: Path, *words: str) -> tuple[int, str, str]:
    """Run a command in this process, which is faster. Return what `run` returns.

    For commands whose process is not the point, and that read nothing from stdin.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with chdir(directory), redirect_stdout(out), redirect_stderr(err):
        code = entry.run(entry.taskyard, words)
    out.seek(0)
    err.seek(0)
    return code, out.read(), err.read()


def campaign(directory: Path, tasks: list[dict[str, Any]], name: str = "campaign.jsonl") -> str:
    """Write a campaign file, and return its name."""
    (directory / name).write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return name


#: Waits for the file `gate`. Not a pipe: a process that was just killed may still read from
#: it in place of its successor.
AT_THE_GATE = "until [ -e gate ]; do sleep 0.02; done"


def marking(name: str, script: str = "true", **more: Any) -> dict[str, Any]:
    """Return a task that appends its name to the file `marks`, and then runs a script."""
    argv = ["sh", "-c", f"echo {name} >> marks; {script}"]
    return {"name": name, "argv": argv, **more}


def marks(directory: Path) -> list[str]:
    """Return the names of the tasks that have begun, in order."""
    try:
        return (directory / "marks").read_text().split()
    except FileNotFoundError:
        return []


def until(is_so: Callable[[], object], what: str = "it") -> None:
    """Poll until a condition holds. Fail after `PATIENCE_SECONDS`.

    To look may be a request that takes CPU, so the pauses grow with the time that it takes.
    """
    began = time.monotonic()
    while not is_so():
        waited = time.monotonic() - began
        assert waited < PATIENCE_SECONDS, f"did not happen: {what}"
        time.sleep(min(max(0.005, waited / 10), 0.05))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_children_of(running: Running) -> list[int]:
    """Return the ids of the processes that any of its threads has started."""
    threads = Path(f"/proc/{running.pid}/task").iterdir()
    return [int(one) for thread in threads for one in (thread / "children").read_text().split()]
