"""The directory and the processes of the demo: a broker, a relay and four workers.

Owns which processes run with which arguments, and the order in which they end. Each has a log file.
They end with this process: see `process.child`. The directory is created anew each time, without
removing any other file.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final, Self

from msgspec import Struct

from taskyard.demo import tasks
from taskyard.demo.campaign import AGENTS, MAIL, WMP
from taskyard.errors import ProcessEnded, StateLocked, UnusableFile
from taskyard.journal.lock import StateLock
from taskyard.process.child import (
    ChildProcess,
    environment_without_settings,
    status_text,
    taskyard_command,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


#: Marks a directory as a demo's. Locked while a demo runs there.
MARKER: Final = ".taskyard-demo"

#: The folder of the processes' logs.
LOGS: Final = "log"

_MARKER_TEXT: Final = (
    "A demo of Taskyard uses this directory. The next demo replaces its files and no others.\n"
)

_SETTINGS: Final = """\
# The settings of the demo's broker.

[lease]
heartbeat = "500ms"     # interval of a worker's heartbeats
expire = "4s"           # without heartbeats, its tasks go to another worker

[service.{mail}]
command = {command}
overfeed = 2            # the worker prefetches two more tasks of a lane for its agent
interval = "1s"
retries = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
"""


class DemoDirectory(Struct, frozen=True):
    """The paths of a demo. Use it as a context manager, which holds the lock."""

    directory: Path
    marker: int

    @property
    def campaign(self) -> Path:
        return self.directory / "campaign.jsonl"

    @property
    def settings(self) -> Path:
        return self.directory / "taskyard.toml"

    @property
    def state(self) -> Path:
        return self.directory / ".taskyard"

    @property
    def tables(self) -> Path:
        return self.directory / "tables"

    @property
    def report(self) -> Path:
        return self.directory / "report"

    @property
    def logs(self) -> Path:
        return self.directory / LOGS

    @property
    def agent_state(self) -> Path:
        """The agents' own file."""
        return self.directory / tasks.OUTAGE_FILE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.marker)


def prepare_directory(directory: Path) -> DemoDirectory:
    """Create a directory with settings and without files of an earlier demo.

    Raises UserError if it is not a demo's, or in use.
    """
    directory = directory.absolute()
    _check_demo_directory(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = DemoDirectory(directory, _locked(directory / MARKER))
    except OSError as error:
        raise UnusableFile(f"{directory}: {error.strerror} (use another --out)") from error
    try:
        _clear(paths)
        _write_settings(paths)
    except BaseException:
        os.close(paths.marker)
        raise
    return paths


def _check_demo_directory(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UnusableFile(f"{directory}: not a directory (use another --out)")
    if not (directory / MARKER).exists() and any(directory.iterdir()):
        raise UnusableFile(
            f"{directory}: exists and is not of an earlier demo, left unchanged (use another --out)"
        )


def _locked(marker: Path) -> int:
    descriptor = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StateLocked(
            f"{marker.parent}: another demo is running here (use another --out)"
        ) from None
    os.pwrite(descriptor, _MARKER_TEXT.encode(), 0)
    return descriptor


def _clear(paths: DemoDirectory) -> None:
    """Remove the files of an earlier demo, unless a broker uses its state."""
    if paths.state.is_dir():
        try:
            StateLock(paths.state).release()
        except StateLocked as locked:
            raise StateLocked(
                f"{paths.state}: a broker of an earlier demo is running (stop it with "
                f"`taskyard down --state {paths.state}`, or use another --out)"
            ) from locked
    for path in (paths.state, paths.tables, paths.report, paths.logs):
        if path.is_dir():
            shutil.rmtree(path)
    for path in (paths.campaign, paths.settings, paths.agent_state):
        path.unlink(missing_ok=True)
    paths.logs.mkdir()


def _write_settings(paths: DemoDirectory) -> None:
    # A JSON string is also a TOML string. Braces in a command are doubled.
    line = shlex.join([sys.executable, tasks.__file__]).replace("{", "{{").replace("}", "}}")
    command = json.dumps(line, ensure_ascii=False)
    paths.settings.write_text(_SETTINGS.format(mail=MAIL, command=command))


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
        """Start the broker at free ports, or at the ports of its predecessor."""
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
