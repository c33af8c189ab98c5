"""A broker with a worker, and a caller of commands, for the tests of commands."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from taskyard.cli.entry import run, taskyard
from tests.kit.processes import Broker, Running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest


class Yard:
    """A directory with a broker and perhaps workers."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.state = directory / ".taskyard"
        self._stack = stack
        self.start_broker()

    def start_broker(self) -> None:
        """Start the broker and wait until it listens."""
        self.broker = Broker(self.directory)
        self._end_with_us(self.broker)

    def start_worker(self, *options: str) -> Self:
        words = ("worker", "--until-eof", "--slots", "2", *options)
        self._end_with_us(Running(self.directory, *words))
        return self

    def _end_with_us(self, running: Running) -> None:
        """Stop the processes in order, and kill them only if they hang."""
        self._stack.enter_context(running)
        self._stack.callback(running.end)
        self._stack.callback(running.hang_up)

    def kill_broker(self) -> None:
        self.broker.kill()


@contextmanager
def running(directory: Path, *, worker: bool = True) -> Iterator[Yard]:
    """Run a broker, and a worker by default."""
    directory.mkdir(exist_ok=True)
    with ExitStack() as stack:
        yard = Yard(directory, stack)
        yield yard.start_worker() if worker else yard


class Outcome(NamedTuple):
    """The outcome of a command in this process."""

    code: int
    out: str
    err: str

    def document(self) -> Any:
        document = msgspec.json.decode(self.out)
        assert document["version"] == 1
        return document


class Caller:
    """Runs commands in this process, which is faster than new processes."""

    def __init__(self, state: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
        self._state = state
        self._captured = capsysbinary

    def __call__(self, verb: str, *words: str) -> Outcome:
        self._captured.readouterr()
        code = run(taskyard, [verb, "--state", str(self._state), *words])
        out, err = self._captured.readouterr()
        return Outcome(code, out.decode(errors="surrogateescape"), err.decode())

    def submit(self, name: str, *words: str, **options: str) -> None:
        """Submit a task, by default one that does nothing."""
        given = [part for key, value in options.items() for part in (f"--{key}", value)]
        assert self("submit", "--name", name, *given, "--", *(words or ("true",))).code == 0
