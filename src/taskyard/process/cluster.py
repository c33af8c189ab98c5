"""An executor's own broker and workers: one child process that forks and supervises them.

`ClusterProcess` is the end in the executor's process, `LocalCluster` the end in the child. A new
interpreter for each process would take three times as long. The user's process is not forked: it
may have threads. The child writes lines to its stdout, and ends everything when its stdin ends.
Workers have the stdout and stderr of the executor's process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from taskyard.errors import NoBroker
from taskyard.net import endpoints
from taskyard.process.child import ChildProcess, environment_without_settings, status_text
from taskyard.process.supervisor import (
    KILL_SECONDS,
    RESTART_SECONDS_FIRST,
    ManagedProcess,
    RestartPolicy,
    ignore,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.process.supervisor import WorkerSpec

#: The broker keeps everything in memory, so a restart would find nothing.
BROKER_POLICY: Final = RestartPolicy(early_exits_max=0)
WORKER_POLICY: Final = RestartPolicy(
    final_statuses=(), early_exits_max=5, delay_seconds_max=RESTART_SECONDS_FIRST
)

#: First words of the lines that the child writes. A reason or process ids follow.
LISTENING: Final = "listening"
BROKEN: Final = "broken"
PIDS: Final = "pids"

#: `-P` keeps the current directory off `sys.path`: a user's `json.py` must not replace Python's.
_PROGRAM: Final = ("-P", "-m", "taskyard.cli.cluster")


class ClusterProcess:
    """A broker in memory and workers, in a temporary directory, from their start to `stop`.

    Starts everything when made, and does not wait for it. Workers are restarted. Calls `on_broken`
    with a reason when the broker has died, or a worker that can't stay alive.
    """

    def __init__(self, worker_spec: WorkerSpec, on_broken: Callable[[str], None]) -> None:
        self._on_broken = on_broken
        self.state = Path(tempfile.mkdtemp(prefix="taskyard-"))
        self._pids: list[int] = []
        self._is_started = threading.Event()
        #: Set when the broker listens, or when it never will.
        self._is_listening = threading.Event()
        self._broken = ""
        self._is_stopping = False
        #: Guards the child against a signal after its end.
        self._lock = threading.Lock()
        spec = msgspec.json.encode(worker_spec).decode()
        stdout = _copy_stdout()
        command = [sys.executable, *_PROGRAM, str(self.state), spec, str(stdout)]
        try:
            self._child = ChildProcess(command, stdout=subprocess.PIPE, pass_fds=[stdout])
        except BaseException:
            shutil.rmtree(self.state, ignore_errors=True)
            raise
        finally:
            os.close(stdout)
        self._reader = threading.Thread(target=self._read, name="taskyard-cluster", daemon=True)
        self._reader.start()
        _running.add(self)

    def endpoint(self) -> str:
        """Wait until the broker listens, and return its endpoint.

        Raises `NoBroker` if it did not start.
        """
        self._is_listening.wait()
        if self._broken:
            raise NoBroker(f"the executor's broker did not start: {self._broken}")
        return endpoints.native_endpoint(self.state)

    def pids(self) -> list[int]:
        """Return the ids of the processes as they were started, the broker's first."""
        self._is_started.wait()
        return self._pids

    def stop(self) -> None:
        """End everything at once, and wait until it has ended. Does nothing in a forked child."""
        if self not in _running:
            return
        self._is_stopping = True
        self._child.close_stdin()
        if self._reader is not threading.current_thread():
            self._reader.join(2 * KILL_SECONDS)
            with self._lock:
                self._child.kill()
        shutil.rmtree(self.state, ignore_errors=True)

    def _read(self) -> None:
        while line := self._child.read_line():
            word, _, rest = line.partition(" ")
            if word == PIDS:
                self._pids = [*map(int, rest.split())]
                self._is_started.set()
            elif word == BROKEN:
                self._break(rest)
            else:
                self._is_listening.set()
        with self._lock:
            status = self._child.process.wait()
        self._break(f"its processes ended: {status_text(status)}")

    def _break(self, why: str) -> None:
        if self._broken or self._is_stopping:
            why = ""
        self._broken = self._broken or why
        self._is_started.set()
        self._is_listening.set()
        if why:
            self._on_broken(why)


#: The clusters that this process has started.
_running: weakref.WeakSet[ClusterProcess] = weakref.WeakSet()


def _on_fork() -> None:
    """Leave the clusters to the process that started them. Called in its forked child.

    An open copy of the pipe there would keep a cluster from seeing that it was closed.
    """
    for cluster in [*_running]:
        cluster._child.close_stdin()  # noqa: SLF001  # its own module
    _running.clear()


os.register_at_fork(after_in_child=_on_fork)


class LocalCluster:
    """The broker and the workers of a cluster, as children of this process.

    Passes lines for the executor to `report`.
    """

    def __init__(
        self,
        state: Path,
        worker_spec: WorkerSpec,
        run: Callable[[Sequence[str]], int],
        report: Callable[[str], None],
        stdout: int,
    ) -> None:
        """Fork everything. `run` runs a command of `taskyard`. Only while there is one thread.

        Workers have the descriptor `stdout` as theirs.
        """
        self._report = report
        self._broker = ManagedProcess(
            "broker",
            ["broker", "--in-memory", "--state", str(state), "--until-eof", "--quiet"],
            BROKER_POLICY,
            ignore,  # an executor raises exceptions instead
            on_line=lambda _line: self._on_listening(),
            is_worker=False,
        )
        self._workers = [
            ManagedProcess(
                f"worker-{number}",
                worker_spec.arguments(state, f"worker-{number}", number),
                WORKER_POLICY,
                ignore,
                stdout=stdout,
            )
            for number in range(1, worker_spec.workers + 1)
        ]
        self._broker.fork(lambda arguments: _run_broker(run, arguments, state))
        for worker in self._workers:
            worker.fork(run)
        for managed in self._all():
            managed.on_end = self._on_end
        self._broker.start()
        report(" ".join([PIDS, *(str(managed.pid) for managed in self._all())]))

    def _on_listening(self) -> None:
        """Start the workers. Earlier they would have to connect again, after a pause."""
        if not any(worker.is_started() for worker in self._workers):
            for worker in self._workers:
                worker.start()
            self._report(LISTENING)

    def _all(self) -> list[ManagedProcess]:
        return [self._broker, *self._workers]

    def stop(self) -> None:
        """End everything at once, and wait until it has ended."""
        for managed in reversed(self._all()):
            managed.discard()
            managed.close_stdin()
        for managed in self._all():
            managed.kill()
        for managed in self._all():
            managed.join()

    def _on_end(self) -> None:
        if self._broker.ended.is_set():
            if not self._broker.is_stopping:
                status = status_text(self._broker.status)
                self._report(f"{BROKEN} its broker died with all tasks: {status}")
            return
        for worker in self._workers:
            if worker.ended.is_set() and not worker.is_stopping:
                status = status_text(worker.status)
                self._report(f"{BROKEN} its worker died {worker.early_exits} times: {status}")


def _run_broker(run: Callable[[Sequence[str]], int], arguments: Sequence[str], state: Path) -> int:
    """Run the broker. The settings around this process are meant for other brokers."""
    os.chdir(state)
    own = environment_without_settings()
    for name in [name for name in os.environ if name not in own]:
        del os.environ[name]
    return run(arguments)


def _copy_stdout() -> int:
    """Return a copy of this process's stdout, or of /dev/null if it is closed."""
    try:
        return os.dup(1)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
