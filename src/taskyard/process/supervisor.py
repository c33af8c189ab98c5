"""A broker and workers of one machine as child processes, kept running and stopped in order.

A child's stdin is a pipe from here (`--until-eof`): when this process ends, however it ends, its
children end too, so nothing is left behind that would keep the state locked. Children have process
groups of their own: Ctrl-C is this process's to answer, which stops the workers before the broker.

A child that ends with 0 was told to, one that ends with 2 or 6 would do so again; any other is
started again, a little later each time. Workers keep their names. A restarted worker reports the
death of its predecessor, so that the broker gives what that one held to others at once.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Self

import click
from msgspec import Struct

from taskyard.client.household import IncarnationOptions
from taskyard.errors import ExitCode, StateLocked
from taskyard.journal import lock
from taskyard.journal.files import check_owner, make_private_directory, open_regular
from taskyard.net.signals import Terminal
from taskyard.worker.processes import status_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

#: How long to wait before a child that died is started again: twice as long each time.
RESTART_SECONDS_FIRST: Final = 0.2
RESTART_SECONDS_MAX: Final = 10.0

#: A child that lived so long is not one that dies at once.
STABLE_SECONDS: Final = 10.0

#: A child that was told to end at once, and is still there, is killed.
KILL_SECONDS: Final = 5.0

#: A stop that takes longer is explained.
STOP_NOTICE_SECONDS: Final = 1.0

#: Not with the current directory in front: a user's `json.py` must not become ours.
_TASKYARD: Final = ("-P", "-m", "taskyard.cli")

#: Who uses a state directory: locked for as long as it does, with its process id.
LOCK_FILE: Final = lock.FILE_NAME

#: Who runs `up` on a state directory: locked for as long as it runs, with its process id.
UP_FILE: Final = "up.pid"

#: A worker that ends with 2 after so long was not refused for what it was told.
NAME_REFUSAL_SECONDS: Final = 2.0

_FINAL_STATUSES: Final = (ExitCode.OK, ExitCode.USAGE, ExitCode.STATE_DAMAGED)

_PID_BYTES_MAX: Final = 20


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command of another `taskyard` of the same install."""
    return [sys.executable, *_TASKYARD, *arguments]


class WorkerSpec(Struct, frozen=True):
    """The workers to start."""

    workers: int = 1
    #: None: one a core.
    slots: int | None = None
    allow: tuple[str, ...] = ()
    #: Empty: what a worker serves if nobody says.
    services: tuple[str, ...] = ()

    def arguments(self, state: Path, name: str) -> list[str]:
        """The command of one of them."""
        arguments = ["worker", "--state", str(state), "--name", name, "--quiet", "--until-eof"]
        if self.slots is not None:
            arguments += ["--slots", str(self.slots)]
        for module in self.allow:
            arguments += ["--allow", module]
        for service in self.services:
            arguments += ["--service", service]
        return arguments


class ManagedProcess:
    """Keeps one child process running, in a thread of its own, until it is stopped."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        say: Callable[[str], None],
        on_line: Callable[[str], None] | None = None,
        incarnation_options: IncarnationOptions | None = None,
    ) -> None:
        self.name = name
        self._command = command_of(arguments)
        self._incarnation_options = incarnation_options
        self._say = say
        self._on_line = on_line
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        #: It is not running, and will not be started again.
        self.ended = threading.Event()
        #: How it ended.
        self.status = 0
        #: Called when it has ended.
        self.on_end: Callable[[], None] = _no_callback
        self._thread = threading.Thread(
            target=self._run_and_restart, name=f"keeper of {name}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def is_started(self) -> bool:
        return self._thread.ident is not None

    def stop(self) -> None:
        """Ask it to end, and don't start it again."""
        self._stopping.set()
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(number)

    def kill(self) -> None:
        """Let it end at once, as if we were gone; if it does not, kill it."""
        self._stopping.set()
        with self._lock, suppress(OSError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
        if not self.ended.wait(KILL_SECONDS):
            self.signal(signal.SIGKILL)

    def _run_and_restart(self) -> None:
        delay = RESTART_SECONDS_FIRST
        while True:
            began = time.monotonic()
            self.status = self._run_once()
            if self._stopping.is_set() or self._is_over(time.monotonic() - began):
                break
            if time.monotonic() - began > STABLE_SECONDS:
                delay = RESTART_SECONDS_FIRST
            self._say(f"{self.name} died ({status_text(self.status)}); starting it again")
            if self._stopping.wait(delay):
                break
            delay = min(2 * delay, RESTART_SECONDS_MAX)
        self.ended.set()
        self.on_end()

    def _is_over(self, seconds: float) -> bool:
        """Return whether to leave it ended after it ran for so long. A worker that ran for a while
        before it ended with 2 has lost its name to another process: as a new one it waits."""
        if self.status == ExitCode.OK:
            return True
        if self.status not in _FINAL_STATUSES:
            return False
        if self._incarnation_options is None:
            return True
        if seconds > NAME_REFUSAL_SECONDS:
            return False
        self._say(f"{self.name} ended ({status_text(self.status)}); it is not started again")
        return True

    def _run_once(self) -> int:
        """Start it, and wait until it has ended. Returns its exit status."""
        with self._lock:
            if self._stopping.is_set():
                return 0
            more = () if self._incarnation_options is None else self._incarnation_options.next()
            self._process = process = subprocess.Popen(
                [*self._command, *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if self._on_line is None else subprocess.PIPE,
                process_group=0,
            )
        if process.stdout is not None and self._on_line is not None:
            for line in process.stdout:
                self._on_line(line.decode(errors="backslashreplace").rstrip())
            process.stdout.close()
        status = process.wait()
        with self._lock, suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        return status


def _no_callback() -> None:
    """Nobody wants to know."""


class Supervisor:
    """One broker and some workers. Use it as a context manager, which stops them."""

    def __init__(
        self,
        state: Path,
        say: Callable[[str], None],
        listen: Sequence[str] = (),
        config: Path | None = None,
    ) -> None:
        self._state = state
        self._say = say
        #: So that all of them read the settings that we have read.
        self._common = [] if config is None else ["--config", str(config)]
        #: Where the broker listens, as it said.
        self.listening: list[str] = []
        self._expected = 1 + len(listen)
        arguments = ["broker", "--state", str(state), "--until-eof", *self._common]
        for pair in listen:
            arguments += ["--listen", pair]
        if not listen:  # whatever the settings say
            arguments.append("--native-only")
        self.broker = ManagedProcess("the broker", arguments, say, self._on_broker_line)
        self.workers: list[ManagedProcess] = []

    def _on_broker_line(self, line: str) -> None:
        if line.startswith("listening ") and len(self.listening) < self._expected:
            self.listening.append(line)

    def start_broker(self) -> None:
        """Start it, and wait until it listens. What kept it from that it has said itself."""
        self.broker.start()
        while len(self.listening) < self._expected:
            if self.broker.ended.wait(0.01):
                raise click.exceptions.Exit(self.broker.status)

    def reload(self) -> None:
        """Have the broker read its settings again; one that has not begun to listen is about to."""
        if len(self.listening) >= self._expected:
            self.broker.signal(signal.SIGHUP)

    def start_workers(self, worker_spec: WorkerSpec) -> None:
        for number in range(1, worker_spec.workers + 1):
            name = f"local-{number}"
            arguments = [*worker_spec.arguments(self._state, name), *self._common]
            starts = IncarnationOptions()
            worker = ManagedProcess(
                f"worker {name}", arguments, self._say, incarnation_options=starts
            )
            self.workers.append(worker)
            worker.start()

    def exit_reason(self) -> str | None:
        """Why there is nobody left to go on with; None while there is somebody."""
        if self.broker.ended.is_set():
            return "the broker has ended"
        if self.workers and all(worker.ended.is_set() for worker in self.workers):
            return "all workers have left"
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the workers, which finish what runs, and then the broker.

        An interruption ends what runs and gives it back, one more cuts everything short.
        """
        try:
            self._stop_workers()
            self._stop_all([self.broker])
        except KeyboardInterrupt:
            for managed in (*self.workers, self.broker):
                managed.kill()

    def _stop_workers(self) -> None:
        if self.broker.ended.is_set():  # nobody to report to
            for worker in self.workers:
                worker.kill()
        try:
            self._stop_all(self.workers)
        except KeyboardInterrupt:
            self._say("ending what runs; it will be done again")
            self._stop_all(self.workers)

    def _stop_all(self, processes: Sequence[ManagedProcess]) -> None:
        started = [managed for managed in processes if managed.is_started()]
        for managed in started:
            managed.stop()
        until = time.monotonic() + STOP_NOTICE_SECONDS
        for managed in started:
            managed.ended.wait(max(0.0, until - time.monotonic()))
        late = [managed for managed in started if not managed.ended.is_set()]
        if late and late[0] is not self.broker:
            self._say("waiting for the tasks that run; Ctrl-C ends them")
        for managed in late:
            while not managed.ended.wait(1.0):
                pass


def lock_holder(path: Path) -> int | None:
    """The process that holds the lock on a file, by what it wrote there; None if nobody does."""
    try:
        descriptor = lock.open_file(path)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.pread(descriptor, _PID_BYTES_MAX, 0).strip()
        return int(written) if written.isdigit() else 0
    finally:
        os.close(descriptor)
    return None


@contextmanager
def hold_up_lock(state: Path) -> Iterator[None]:
    """Say in the state directory that this process runs it, for as long as it does."""
    make_private_directory(state)
    check_owner(state)
    descriptor = open_regular(state / UP_FILE, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StateLocked(
            f"`taskyard up` runs on {state} already; stop it with `taskyard down --state {state}`"
        ) from error
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        with suppress(OSError):
            (state / UP_FILE).unlink()
        os.close(descriptor)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM is Ctrl-C, inside."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def reload_on_sighup(reload: Callable[[], None]) -> Iterator[None]:
    """SIGHUP has the settings read again, inside; but it is Ctrl-C if the terminal is gone."""
    terminal = Terminal()

    def hang_up(number: int, frame: FrameType | None) -> None:
        if terminal.is_gone():
            _interrupt(number, frame)
        # In a thread: what is interrupted here may hold the lock that this takes.
        threading.Thread(target=reload, name="reload", daemon=True).start()

    before = signal.signal(signal.SIGHUP, hang_up)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
