"""A broker and workers of an executor's own: processes that nobody else uses, and that end with it.

Their stdin is a pipe from here: when this process ends, however it ends, they end too. What they
keep is in memory, and in a temporary directory for the socket. A worker that dies is started again,
under its own name, so that what it held is done again at once; if the broker dies, everything is
lost, and whoever owns the household is told.

They are started as commands: nothing of the broker or the worker is imported here.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.errors import NoBroker
from taskyard.net import endpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Not with the current directory in front: a user's `json.py` must not become ours.
_TASKYARD: Final = ("-P", "-m", "taskyard.cli")

_BROKER: Final = "broker"

#: What was told to end has ended by then, or is killed.
END_SECONDS: Final = 5.0

#: A worker that dies so often in a row, each time within so many seconds, would do so for ever.
EARLY_EXITS_MAX: Final = 5
STABLE_SECONDS: Final = 10.0

#: And is started again after so long.
RESTART_SECONDS: Final = 0.2


#: Of a random incarnation number, so that there is room for the starts after it.
_INCARNATION_BITS: Final = 61


class WorkerSpec(Struct, frozen=True):
    """The workers to start."""

    workers: int
    slots: int
    service: str


class IncarnationOptions:
    """Options for the starts of one worker, each with the next incarnation number.

    A start reports to the broker that all earlier ones have ended: call `next` only then.
    """

    def __init__(self) -> None:
        self._first = self._next = 1 + secrets.randbits(_INCARNATION_BITS)

    def next(self) -> tuple[str, ...]:
        """Return the options for one more start."""
        number = self._next
        self._next += 1
        return ("--incarnation", str(number), "--replaces", str(self._first))


class LocalCluster:
    """Starts everything when made, and does not wait for it."""

    def __init__(self, worker_spec: WorkerSpec, on_broken: Callable[[str], None]) -> None:
        self._worker_spec = worker_spec
        self._on_broken = on_broken
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.state = Path(tempfile.mkdtemp(prefix="taskyard-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._incarnation_options: dict[str, IncarnationOptions] = {}
        self._threads: list[threading.Thread] = []
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        self._start_process(_BROKER)
        names = [f"worker-{number}" for number in range(1, self._worker_spec.workers + 1)]
        for name in names:
            self._start_process(name)
        self._start_watch_thread(_BROKER, self._watch_broker)
        for name in names:
            self._start_watch_thread(name, self._restart_worker)

    def _start_watch_thread(self, name: str, keep: Callable[[str], None]) -> None:
        told = f"taskyard keeper of {name}"
        thread = threading.Thread(target=keep, args=(name,), name=told, daemon=True)
        thread.start()
        self._threads.append(thread)

    def endpoint(self) -> str:
        """Where the broker listens; waits until it does. Raises NoBroker if it can't be started."""
        said = self._processes[_BROKER].stdout
        assert said is not None  # noqa: S101 - it is a pipe
        if not said.readline():
            raise NoBroker("a broker of its own can't be started; see what it printed")
        return endpoints.native_endpoint(self.state)

    def pids(self) -> list[int]:
        """The broker's first."""
        return [process.pid for process in self._processes.values()]

    def stop(self) -> None:
        """End everything at once, and wait until it has ended."""
        with self._lock:
            self._stopping.set()
        for process in reversed(self._processes.values()):
            _close_stdin(process)
        for process in self._processes.values():
            _wait_or_kill(process)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        shutil.rmtree(self.state, ignore_errors=True)

    # Keeping.

    def _watch_broker(self, name: str) -> None:
        status = self._processes[name].wait()
        if not self._stopping.is_set():
            self._on_broken(f"its broker ended, with exit status {status}, and all it held is lost")

    def _restart_worker(self, name: str) -> None:
        deaths = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            status = self._processes[name].wait()
            if self._stopping.is_set():
                return
            deaths = 1 if time.monotonic() - began > STABLE_SECONDS else deaths + 1
            if deaths == EARLY_EXITS_MAX:
                self._on_broken(f"its worker ended {deaths} times, last with exit status {status}")
                return
            if not self._stopping.wait(RESTART_SECONDS):
                self._start_process(name)

    def _start_process(self, name: str) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            if name in self._processes:
                _close_stdin(self._processes[name])
            is_broker = name == _BROKER
            self._processes[name] = subprocess.Popen(
                [sys.executable, *_TASKYARD, *self._arguments(name)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if is_broker else subprocess.DEVNULL,
                # A group of its own: Ctrl-C is this process's to answer.
                process_group=0,
                # The settings around us are meant for other brokers; a worker does its tasks here.
                cwd=self.state if is_broker else None,
                env=_environment_without_settings() if is_broker else None,
            )

    def _arguments(self, name: str) -> Sequence[str]:
        common = ("--state", str(self.state), "--until-eof", "--quiet")
        if name == _BROKER:
            return ("broker", "--memory", *common)
        worker_spec = self._worker_spec
        starts = self._incarnation_options.setdefault(name, IncarnationOptions())
        more = ("--name", name, "--slots", str(worker_spec.slots), *starts.next())
        return ("worker", *common, *more, "--service", worker_spec.service, "--allow-pickle")


def _environment_without_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TASKYARD_")}


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
