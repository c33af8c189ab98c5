"""The demo's processes: a broker, a relay and four workers, each a `taskyard` of its own.

Owns who is started with which arguments and how they end. Their stdin is a pipe from here
(`--until-eof`): when this process ends, however it ends, they end too. They have process groups of
their own: Ctrl-C is this process's to answer. What they say goes to a file each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Final, Self

from taskyard.demo import tasks
from taskyard.demo.campaign import MAIL, WMP
from taskyard.errors import TaskyardError

if TYPE_CHECKING:
    from taskyard.demo.directory import DemoDirectory

#: The worker that feeds agents, by which the closing table knows it.
AGENTS: Final = "agents"

#: Not with the current directory in front: a user's `json.py` must not become ours.
_TASKYARD: Final = ("-P", "-m", "taskyard.cli")

#: What was told to end has ended by then, or is killed.
_END_SECONDS: Final = 10.0
_CUT_SECONDS: Final = 3.0

#: Free ports of this machine.
_ANY: Final = "tcp://127.0.0.1:0"

#: What workers of other dialects do with a task: it reads the payload, and prints the result.
_FOREIGN_COMMAND: Final = "wc -c"

#: What each worker does at once. It is mostly waiting, so there may be more than cores.
_NATIVE_SLOTS: Final = 4
_AGENTS_MAX: Final = 4
_FOREIGN_SLOTS: Final = 2


class ProcessEnded(TaskyardError):
    """A process of the demo ended that should not have."""


class DemoProcess:
    """One of them, from its start on."""

    def __init__(
        self, name: str, arguments: list[str], paths: DemoDirectory, *, reads_endpoints: bool
    ) -> None:
        """`reads_endpoints`: it says where it listens, on stdout."""
        self.name = name
        self.log = paths.logs / f"{name}.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *_TASKYARD, *arguments, "--until-eof"],
                cwd=paths.directory,
                env=_environment_without_settings(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if reads_endpoints else log,
                stderr=log,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def listening(self, lines: int) -> dict[str, str]:
        """Where it listens, by dialect; waits until it has said so many lines."""
        said = self._process.stdout
        assert said is not None  # noqa: S101  # it speaks
        found: dict[str, str] = {}
        while len(found) < lines:
            words = said.readline().decode().split()
            if not words:
                self._process.wait()
                self.check()
            if words[:1] == ["listening"]:
                found[words[1]] = words[2]
        return found

    def check(self) -> None:
        """Raises `ProcessEnded` if it has ended."""
        status = self._process.poll()
        if status is not None:
            raise ProcessEnded(f"{self.name} has ended, with {status}; see {self.log}")

    def kill(self) -> int:
        """End it as a power cut would. Returns its exit status."""
        self._process.kill()
        return self._close_files()

    def stop(self) -> None:
        """Tell it to end in order."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def close_stdin(self) -> None:
        """Have it end at once, as if we were gone."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def await_end(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._close_files()

    def _close_files(self) -> int:
        status = self._process.wait()
        pipes: tuple[IO[bytes] | None, ...] = (self._process.stdin, self._process.stdout)
        for pipe in pipes:
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        return status


class DemoCluster:
    """All of them. Use it as a context manager, which ends them."""

    def __init__(self, paths: DemoDirectory) -> None:
        self._place = paths
        #: Where the broker listens, by dialect.
        self.listening: dict[str, str] = {}
        self.broker = self._start_broker()
        #: The relay and the workers, in the order of their start.
        self.others: list[DemoProcess] = []
        try:
            self.listening = self.broker.listening(3)
            self._start_others()
        except BaseException:
            self._kill_all()
            raise

    def _start_broker(self) -> DemoProcess:
        """At free ports, or where it was before."""
        arguments = ["broker", "--state", str(self._place.state)]
        for dialect, anywhere in (("ping-pong", f"{_ANY},{_ANY}"), ("wmp", _ANY)):
            arguments += ["--listen", f"{dialect}={self.listening.get(dialect, anywhere)}"]
        return DemoProcess("broker", arguments, self._place, reads_endpoints=True)

    def _start_others(self) -> None:
        relay = ["relay", "--listen", _ANY, "--to", self.listening["wmp"]]
        self._start("relay", relay, reads_endpoints=True)
        below = self.others[0].listening(1)["wmp"]
        backend = self.listening["ping-pong"].partition(",")[0]
        state = ["--state", str(self._place.state)]
        foreign = ["--command", _FOREIGN_COMMAND, "--slots", str(_FOREIGN_SLOTS)]
        workers = {
            "native": [*state, "--slots", str(_NATIVE_SLOTS), "--allow", tasks.__name__],
            AGENTS: [*state, "--service", MAIL, "--slots", str(_AGENTS_MAX)],
            "ping-pong": ["--dialect", "ping-pong", "--broker", backend, *foreign],
            "wmp": ["--dialect", "wmp", "--broker", below, "--service", WMP, *foreign],
        }
        for name, arguments in workers.items():
            self._start(name, ["worker", "--name", name, *arguments], reads_endpoints=False)

    def _start(self, name: str, arguments: list[str], *, reads_endpoints: bool) -> None:
        self.others.append(
            DemoProcess(name, arguments, self._place, reads_endpoints=reads_endpoints)
        )

    def kill_broker(self) -> int:
        """SIGKILL. Returns its exit status."""
        return self.broker.kill()

    def restart_broker(self) -> None:
        """On the same state, at the same ports."""
        self.broker = self._start_broker()
        self.listening = self.broker.listening(3)

    def check(self) -> None:
        """Raises `ProcessEnded` if somebody is missing."""
        for process in (self.broker, *self.others):
            process.check()

    def stop(self) -> None:
        """End all in order: the workers, the relay, and then the broker."""
        relay, *workers = self.others
        for some in (workers, [relay], [self.broker]):
            for process in some:
                process.stop()
            for process in some:
                process.await_end(_END_SECONDS)

    def _kill_all(self) -> None:
        every = (*reversed(self.others), self.broker)
        for process in every:
            process.close_stdin()
        for process in every:
            process.await_end(_CUT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()


def _environment_without_settings() -> dict[str, str]:
    """The environment, without settings for other brokers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TASKYARD_")}
