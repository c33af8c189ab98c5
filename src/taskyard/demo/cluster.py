"""The demo's processes: a broker, a relay and four workers, each a `taskyard` command.

Owns which processes run with which arguments, and the order in which they end. Each has a log file.
They end with this process: see `process.child`.
"""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING, Final, Self

from taskyard.demo import tasks
from taskyard.demo.campaign import MAIL, WMP
from taskyard.demo.directory import LOGS
from taskyard.errors import ProcessEnded
from taskyard.process.child import (
    ChildProcess,
    environment_without_settings,
    status_text,
    taskyard_command,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from taskyard.demo.directory import DemoDirectory

#: The name of the worker that feeds agents. The closing table counts its tasks.
AGENTS: Final = "agents"

#: Time to exit after SIGTERM, and after stdin is closed. Then a process is killed.
_END_SECONDS: Final = 10.0
_CUT_SECONDS: Final = 3.0

#: Free ports of this machine.
_ANY: Final = "tcp://127.0.0.1:0"

#: The command of the workers of other dialects: reads the payload and prints the result.
_FOREIGN_COMMAND: Final = "wc -c"

#: Slots of the workers. Tasks mostly wait, so there are more slots than cores.
_NATIVE_SLOTS: Final = 4
_AGENTS_MAX: Final = 4
_FOREIGN_SLOTS: Final = 2


class DemoProcess(ChildProcess):
    """A `taskyard` process whose stderr goes to a log file."""

    def __init__(
        self, name: str, arguments: list[str], directory: Path, *, reads_endpoints: bool
    ) -> None:
        """Start it in a demo's directory.

        With `reads_endpoints`, its stdout is a pipe that lists its endpoints.
        """
        self.name = name
        self.log = directory / LOGS / f"{name}.log"
        with self.log.open("ab") as log:
            super().__init__(
                taskyard_command([*arguments, "--until-eof"]),
                cwd=directory,
                env=environment_without_settings(),
                stdout=subprocess.PIPE if reads_endpoints else log,
                stderr=log,
            )

    def listening(self, lines: int) -> dict[str, str]:
        """Wait until it listens at `lines` endpoints, and return them by dialect.

        Raises `ProcessEnded` if it ends before that.
        """
        found = dict(self.read_endpoints(lines))
        if len(found) < lines:
            self.process.wait()
            self.check()
        return found

    def check(self) -> None:
        """Raise `ProcessEnded` if it has ended."""
        status = self.poll()
        if status is not None:
            raise ProcessEnded(f"{self.name}: {status_text(status)} (see {self.log})")


def stop_processes(processes: Sequence[DemoProcess]) -> None:
    """Stop processes by SIGTERM, and wait for them."""
    for process in processes:
        process.signal(signal.SIGTERM)
    for process in processes:
        process.wait_or_kill(_END_SECONDS)


def end_processes(processes: Sequence[DemoProcess]) -> None:
    """End processes at once, whatever they do."""
    for process in processes:
        process.close_stdin()
    for process in processes:
        process.wait_or_kill(_CUT_SECONDS)


class DemoCluster:
    """All processes of the demo. As a context manager it ends them."""

    def __init__(self, paths: DemoDirectory) -> None:
        self._place = paths
        #: The broker's endpoints by dialect.
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
        """Start the broker at free ports, or at those of its predecessor."""
        arguments = ["broker", "--state", str(self._place.state)]
        for dialect, anywhere in (("ping-pong", f"{_ANY},{_ANY}"), ("wmp", _ANY)):
            arguments += ["--listen", f"{dialect}={self.listening.get(dialect, anywhere)}"]
        return DemoProcess("broker", arguments, self._place.directory, reads_endpoints=True)

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
            DemoProcess(name, arguments, self._place.directory, reads_endpoints=reads_endpoints)
        )

    def kill_broker(self) -> int:
        """Kill the broker by SIGKILL, and return its exit status."""
        return self.broker.kill()

    def restart_broker(self) -> None:
        """Restart the broker on the same state and ports."""
        self.broker = self._start_broker()
        self.listening = self.broker.listening(3)

    def check(self) -> None:
        """Raise `ProcessEnded` if a process has ended."""
        for process in (self.broker, *self.others):
            process.check()

    def stop(self) -> None:
        """Stop the workers, then the relay, then the broker."""
        relay, *workers = self.others
        for some in (workers, [relay], [self.broker]):
            stop_processes(some)

    def _kill_all(self) -> None:
        end_processes((*reversed(self.others), self.broker))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
