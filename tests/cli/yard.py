"""A broker and a worker as processes, and commands against them: what the tests of verbs share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from taskyard.cli.entry import run, taskyard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

TASKYARD = (sys.executable, "-m", "taskyard.cli")

#: What must come has come by then, however busy the machine.
PATIENCE_SECONDS = 60


def environment(**more: str) -> dict[str, str]:
    """Ours, without what a caller's shell may say of brokers."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TASKYARD_")}
    return own | more


class Yard:
    """A state directory with a broker and perhaps a worker; they end when our end of stdin does."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.endpoint = ""
        self._broker: subprocess.Popen[str] | None = None
        self._workers: list[subprocess.Popen[str]] = []

    def start_broker(self) -> Self:
        """Start it, and wait until it listens."""
        self._broker = self._start("broker")
        assert self._broker.stdout is not None
        line = self._broker.stdout.readline().split()
        assert line[:2] == ["listening", "native"], line
        self.endpoint = line[2]
        return self

    def start_worker(self, *options: str) -> Self:
        self._workers.append(self._start("worker", "--slots", "2", *options))
        return self

    def _start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*TASKYARD, *words, "--state", str(self.state), "--until-eof"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=self.state.parent,
        )

    def kill_broker(self) -> None:
        assert self._broker is not None
        self._broker.send_signal(signal.SIGKILL)
        self._broker.communicate()

    def wait_for_end(self) -> int:
        """The exit code of a broker that leaves by itself."""
        assert self._broker is not None
        self._broker.communicate(timeout=PATIENCE_SECONDS)
        return self._broker.returncode

    def stop(self) -> None:
        for process in (*self._workers, self._broker):
            if process is None:
                continue
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            if process.stdin is not None and not process.stdin.closed:
                process.communicate(timeout=PATIENCE_SECONDS)

    def command(self, *words: str) -> list[str]:
        """A command against this broker, for a process of its own."""
        return [*TASKYARD, *words[:1], "--state", str(self.state), *words[1:]]

    def run(self, *words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
        """The same, run."""
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            check=False,
            timeout=PATIENCE_SECONDS,
            env=environment(),
            **more,
        )


@contextmanager
def running(state: Path, *, worker: bool = True) -> Iterator[Yard]:
    """A broker, and a worker unless asked otherwise."""
    state.parent.mkdir(exist_ok=True)
    yard = Yard(state)
    try:
        yard.start_broker()
        if worker:
            yard.start_worker()
        yield yard
    finally:
        yard.stop()


class Said(NamedTuple):
    """What came of a command in this process."""

    code: int
    out: str
    err: str

    def document(self) -> Any:
        document = msgspec.json.decode(self.out)
        assert document["version"] == 1
        return document


class Caller:
    """Runs commands in this process: quicker than a process each."""

    def __init__(self, yard: Yard, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
        self._yard = yard
        self._captured = capsysbinary

    def __call__(self, verb: str, *words: str) -> Said:
        self._captured.readouterr()
        code = run(taskyard, [verb, "--state", str(self._yard.state), *words])
        out, err = self._captured.readouterr()
        return Said(code, out.decode(errors="surrogateescape"), err.decode())
