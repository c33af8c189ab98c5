"""A broker and workers on one machine as child processes: restarted, and stopped in order.

Owns which commands run, when a child is restarted, and the order of stopping: workers before the
broker. Workers keep their names. A restarted worker reports the death of its predecessor, so the
broker reassigns that one's tasks at once.

Children run as commands: this module imports nothing of the broker or the worker.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from msgspec import Struct

from taskyard.errors import ExitCode, NoBroker
from taskyard.net import endpoints
from taskyard.net.signals import Terminal
from taskyard.process.child import (
    ChildProcess,
    environment_without_settings,
    status_text,
    taskyard_command,
)
from taskyard.process.machine import Machine, this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

#: Delay before a child that died is restarted. It doubles with each restart.
RESTART_SECONDS_FIRST: Final = 0.2
RESTART_SECONDS_MAX: Final = 10.0

#: A child that ran longer than this did not fail at its start: the delay begins anew.
STABLE_SECONDS: Final = 10.0

#: Time between closing a child's stdin and SIGKILL.
KILL_SECONDS: Final = 5.0

#: A stop that takes longer is explained in the log.
STOP_NOTICE_SECONDS: Final = 1.0

#: A worker that exits with 2 later than this has lost its name to another process. Its options
#: were good.
NAME_REFUSAL_SECONDS: Final = 2.0

#: Of a random incarnation number, which leaves room for the restarts after it.
_INCARNATION_BITS: Final = 61


class RestartPolicy(Struct, frozen=True):
    """When a child that has ended is started again."""

    #: Exit statuses after which it stays ended.
    final_statuses: tuple[int, ...] = (ExitCode.OK, ExitCode.USAGE, ExitCode.STATE_DAMAGED)
    #: Statuses other than 0 are final only for a child that ran no longer than this.
    final_seconds_max: float = float("inf")
    #: Exits in a row, each within `STABLE_SECONDS`, after which it stays ended.
    early_exits_max: float = float("inf")
    delay_seconds_max: float = RESTART_SECONDS_MAX

    def is_final(self, status: int, seconds: float, early_exits: int) -> bool:
        """Return whether a child that ran for `seconds` stays ended."""
        if early_exits >= self.early_exits_max:
            return True
        if status not in self.final_statuses:
            return False
        return status == ExitCode.OK or seconds <= self.final_seconds_max


#: Of `up` and `run`. A broker with bad options or a damaged state would fail again.
BROKER_POLICY: Final = RestartPolicy()
WORKER_POLICY: Final = RestartPolicy(final_seconds_max=NAME_REFUSAL_SECONDS)

#: Of an executor. Its broker keeps everything in memory, so a restart would find nothing.
PRIVATE_BROKER_POLICY: Final = RestartPolicy(early_exits_max=0)
PRIVATE_WORKER_POLICY: Final = RestartPolicy(
    final_statuses=(), early_exits_max=5, delay_seconds_max=RESTART_SECONDS_FIRST
)


class WorkerSpec(Struct, frozen=True):
    """How many workers to start, and with which options."""

    workers: int = 1
    #: None: one per core.
    slots: int | None = None
    allow: tuple[str, ...] = ()
    #: Empty: the worker's default services.
    services: tuple[str, ...] = ()
    allow_pickle: bool = False
    #: The resources that all workers share. None: those of this machine.
    machine: Machine | None = None

    def share(self, number: int) -> Machine:
        """Return the resources of the worker with this number, from 1 on."""
        whole = this_machine() if self.machine is None else self.machine
        return whole.share(number - 1, self.workers)

    def arguments(self, state: Path, name: str, number: int) -> list[str]:
        """Return the command line of the worker `name`, which has this number from 1 on."""
        arguments = ["worker", "--state", str(state), "--name", name, "--quiet", "--until-eof"]
        if self.slots is not None:
            arguments += ["--slots", str(self.slots)]
        for module in self.allow:
            arguments += ["--allow", module]
        for service in self.services:
            arguments += ["--service", service]
        if self.allow_pickle:
            arguments.append("--allow-pickle")
        if self.machine is not None or self.workers > 1:
            arguments += self.share(number).arguments()
        return arguments


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


class ManagedProcess:
    """A child that a thread restarts by its policy until it is stopped."""

    def __init__(  # noqa: PLR0913  # the last ones are named
        self,
        name: str,
        arguments: Sequence[str],
        policy: RestartPolicy,
        info: Callable[[str], None],
        *,
        on_line: Callable[[str], None] | None = None,
        is_worker: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Call `info` with each restart, and `on_line` with each line of its stdout."""
        self.name = name
        self._arguments = arguments
        self._policy = policy
        self._info = info
        self._on_line = on_line
        self._incarnations = IncarnationOptions() if is_worker else None
        self._cwd, self._env = cwd, env
        #: Guards the child against a stop at the time of its start.
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._stopping = threading.Event()
        #: Set when the child has ended for good.
        self.ended = threading.Event()
        #: The last exit status.
        self.status = 0
        #: Exits in a row that were each soon after the start.
        self.early_exits = 0
        #: Called when the child has ended for good.
        self.on_end: Callable[[], None] = _no_callback
        self._thread = threading.Thread(
            target=self._watch, name=f"supervisor of {name}", daemon=True
        )

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def start(self) -> None:
        """Start the child, and the thread that watches it. Raises `OSError` if it can't start."""
        if self._child is None:
            self._start_child()
        else:
            with suppress(BrokenPipeError):  # it was killed
                self._child.write("\n")
        self._thread.start()

    def fork(self, run: Callable[[Sequence[str]], int]) -> None:
        """Fork the child, which waits for `start` and then calls `run` with its arguments.

        Later starts are new interpreters, because this process has threads then.
        """
        arguments = self._next_arguments()
        self._child = ChildProcess.fork(lambda: run(arguments), is_read=self._on_line is not None)

    def is_started(self) -> bool:
        return self._thread.ident is not None

    def discard(self) -> None:
        """End a forked child that was never started."""
        if self._child is not None and not self.is_started():
            self.close_stdin()
            self._child.wait()

    def stop(self) -> None:
        """Send SIGTERM, and don't restart it."""
        self._stopping.set()
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        with self._lock:
            if self._child is not None:
                self._child.signal(number)

    def close_stdin(self) -> None:
        """Have the child end at once, and don't restart it."""
        self._stopping.set()
        with self._lock:
            if self._child is not None:
                self._child.close_stdin()

    def kill(self) -> None:
        """Have the child end at once. Send SIGKILL if it takes too long."""
        self.close_stdin()
        if self.is_started() and not self.ended.wait(KILL_SECONDS):
            self.signal(signal.SIGKILL)

    def join(self) -> None:
        """Wait for the thread, unless called by it."""
        if self.is_started() and self._thread is not threading.current_thread():
            self._thread.join()

    def _next_arguments(self) -> list[str]:
        more = () if self._incarnations is None else self._incarnations.next()
        return [*self._arguments, *more]

    def _start_child(self) -> ChildProcess | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            self._child = ChildProcess(
                taskyard_command(self._next_arguments()),
                stdout=subprocess.DEVNULL if self._on_line is None else subprocess.PIPE,
                cwd=self._cwd,
                env=self._env,
            )
            return self._child

    def _watch(self) -> None:
        delay, child = RESTART_SECONDS_FIRST, self._child
        while child is not None:
            began = time.monotonic()
            self.status = self._wait(child)
            seconds = time.monotonic() - began
            is_early = seconds <= STABLE_SECONDS
            self.early_exits = self.early_exits + 1 if is_early else 1
            if self.is_stopping or self._is_final(seconds):
                break
            if not is_early:
                delay = RESTART_SECONDS_FIRST
            self._info(f"{self.name} died ({status_text(self.status)}), restarting it")
            if self._stopping.wait(delay):
                break
            delay = min(2 * delay, self._policy.delay_seconds_max)
            child = self._start_child()
        self.ended.set()
        self.on_end()

    def _wait(self, child: ChildProcess) -> int:
        if self._on_line is not None and child.process.stdout is not None:
            for line in child.process.stdout:
                self._on_line(line.rstrip())
        child.process.wait()
        with self._lock:
            return child.wait()

    def _is_final(self, seconds: float) -> bool:
        is_final = self._policy.is_final(self.status, seconds, self.early_exits)
        if is_final and self._incarnations is not None and self.status != ExitCode.OK:
            self._info(f"{self.name} ended ({status_text(self.status)}), not restarting it")
        return is_final


def _no_callback() -> None:
    """Ignore the end of a child."""


class Supervisor:
    """A broker and workers that are restarted. As a context manager it stops them at the end."""

    def __init__(
        self,
        state: Path,
        info: Callable[[str], None],
        listen: Sequence[str] = (),
        config: Path | None = None,
    ) -> None:
        self._state = state
        self._info = info
        #: All children read the settings file that this process has read.
        self._common = [] if config is None else ["--config", str(config)]
        #: The `listening …` lines that the broker has printed.
        self.listening: list[str] = []
        self._expected = 1 + len(listen)
        arguments = ["broker", "--state", str(state), "--until-eof", *self._common]
        for pair in listen:
            arguments += ["--listen", pair]
        if not listen:  # even if the settings name listeners
            arguments.append("--native-only")
        self.broker = ManagedProcess(
            "the broker",
            arguments,
            BROKER_POLICY,
            info,
            on_line=self._on_broker_line,
            is_worker=False,
        )
        self.broker.on_end = self._on_end
        self.workers: list[ManagedProcess] = []
        #: Called when no task can run any more, unless `stop` was called before.
        self.on_over: Callable[[], None] = _no_callback
        self._is_stopping = False

    def _on_end(self) -> None:
        if not self._is_stopping and self.exit_reason() is not None:
            self.on_over()

    def _on_broker_line(self, line: str) -> None:
        if line.startswith("listening ") and len(self.listening) < self._expected:
            self.listening.append(line)

    def start_broker(self) -> int | None:
        """Start the broker, and wait until it listens.

        Return None then. Return its exit status if it ended before: it has printed the reason.
        """
        self.broker.start()
        return self.await_broker()

    def await_broker(self) -> int | None:
        """Wait until the broker listens. Return None, or its exit status if it ended before."""
        while len(self.listening) < self._expected:
            if self.broker.ended.wait(0.01):
                return self.broker.status
        return None

    def reload(self) -> None:
        """Have the broker read its settings again, unless it is still starting."""
        if len(self.listening) >= self._expected:
            self.broker.signal(signal.SIGHUP)

    def fork(self, run: Callable[[Sequence[str]], int], worker_spec: WorkerSpec) -> None:
        """Fork the broker and the workers, which start later. Only while there is one thread."""
        self._make_workers(worker_spec)
        for managed in (self.broker, *self.workers):
            managed.fork(run)

    def start_workers(self, worker_spec: WorkerSpec) -> None:
        """Start workers, unless they were forked before: then start those."""
        if not self.workers:
            self._make_workers(worker_spec)
        for worker in self.workers:
            worker.start()

    def _make_workers(self, worker_spec: WorkerSpec) -> None:
        for number in range(1, worker_spec.workers + 1):
            name = f"local-{number}"
            arguments = [*worker_spec.arguments(self._state, name, number), *self._common]
            worker = ManagedProcess(f"worker {name}", arguments, WORKER_POLICY, self._info)
            worker.on_end = self._on_end
            self.workers.append(worker)

    def exit_reason(self) -> str | None:
        """Return why no task can run any more; None while the broker and a worker run."""
        if self.broker.ended.is_set():
            return "the broker has ended"
        if self.workers and all(worker.ended.is_set() for worker in self.workers):
            return "all workers have left"
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def stop(self, *, finish_running: bool = True) -> None:
        """Stop the workers and then the broker.

        Running tasks finish first. Without `finish_running`, or after an interrupt, they are ended
        and returned. One more interrupt kills everything.
        """
        self._is_stopping = True
        for managed in (*self.workers, self.broker):
            managed.discard()
        try:
            self._stop_workers(finish_running=finish_running)
            self._stop_all([self.broker])
        except KeyboardInterrupt:
            for managed in (*self.workers, self.broker):
                managed.kill()

    def _stop_workers(self, *, finish_running: bool) -> None:
        if self.broker.ended.is_set():  # reports would reach no broker
            for worker in self.workers:
                worker.kill()
        try:
            self._stop_all(self.workers, finish_running=finish_running)
        except KeyboardInterrupt:
            if not finish_running:
                raise
            self._info("ending running tasks, which will run again")
            self._stop_all(self.workers, finish_running=False)

    def _stop_all(
        self, processes: Sequence[ManagedProcess], *, finish_running: bool = True
    ) -> None:
        started = [managed for managed in processes if managed.is_started()]
        for managed in started:
            managed.stop()
            if not finish_running:
                # A second signal ends the tasks. Two of the same kind could become one.
                managed.signal(signal.SIGINT)
        until = time.monotonic() + STOP_NOTICE_SECONDS
        for managed in started:
            managed.ended.wait(max(0.0, until - time.monotonic()))
        late = [managed for managed in started if not managed.ended.is_set()]
        if late and finish_running and late[0] is not self.broker:
            self._info("waiting for running tasks (Ctrl-C ends them)")
        for managed in late:
            while not managed.ended.wait(1.0):
                pass


class LocalCluster:
    """An executor's own broker and workers, in memory and in a temporary directory.

    Starts everything when made, and does not wait for it. Workers are restarted. Calls `on_broken`
    with a reason when the broker has died, or a worker that can't stay alive.
    """

    def __init__(self, worker_spec: WorkerSpec, on_broken: Callable[[str], None]) -> None:
        self._on_broken = on_broken
        self.state = Path(tempfile.mkdtemp(prefix="taskyard-"))
        self._is_listening = threading.Event()
        self._broker = self._make_broker()
        self._workers = [
            ManagedProcess(
                f"worker-{number}",
                worker_spec.arguments(self.state, f"worker-{number}", number),
                PRIVATE_WORKER_POLICY,
                _no_info,
            )
            for number in range(1, worker_spec.workers + 1)
        ]
        try:
            for managed in self._all():
                managed.on_end = self._on_end
                managed.start()
        except BaseException:
            self.stop()
            raise

    def _make_broker(self) -> ManagedProcess:
        return ManagedProcess(
            "broker",
            ["broker", "--memory", "--state", str(self.state), "--until-eof", "--quiet"],
            PRIVATE_BROKER_POLICY,
            _no_info,
            on_line=lambda _line: self._is_listening.set(),
            is_worker=False,
            # The settings around this process are meant for other brokers.
            cwd=self.state,
            env=environment_without_settings(),
        )

    def _all(self) -> list[ManagedProcess]:
        return [self._broker, *self._workers]

    def endpoint(self) -> str:
        """Wait until the broker listens, and return its endpoint.

        Raises `NoBroker` if it did not start.
        """
        self._is_listening.wait()
        if self._broker.ended.is_set():
            raise NoBroker(f"the executor's broker did not start: {self._broker_status()}")
        return endpoints.native_endpoint(self.state)

    def pids(self) -> list[int]:
        """Return the ids of all processes, the broker's first."""
        return [managed.pid for managed in self._all() if managed.pid is not None]

    def stop(self) -> None:
        """End everything at once, and wait until it has ended."""
        for managed in reversed(self._all()):
            managed.close_stdin()
        for managed in self._all():
            managed.kill()
        for managed in self._all():
            managed.join()
        shutil.rmtree(self.state, ignore_errors=True)

    def _on_end(self) -> None:
        if self._broker.ended.is_set():
            self._is_listening.set()  # `endpoint` may wait for it
            if not self._broker.is_stopping:
                self._on_broken(f"its broker died with all tasks: {self._broker_status()}")
            return
        for worker in self._workers:
            if worker.ended.is_set() and not worker.is_stopping:
                self._on_broken(
                    f"its worker died {worker.early_exits} times: {status_text(worker.status)}"
                )

    def _broker_status(self) -> str:
        return status_text(self._broker.status)


def _no_info(_line: str) -> None:
    """Log nothing: an executor raises exceptions instead."""


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM, as on Ctrl-C. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def reload_on_sighup(reload: Callable[[], None]) -> Iterator[None]:
    """Call `reload` on SIGHUP. Raise `KeyboardInterrupt` instead if the terminal has closed."""
    terminal = Terminal()

    def on_sighup(number: int, frame: FrameType | None) -> None:
        if terminal.is_gone():
            _interrupt(number, frame)
        # In a thread: the interrupted code may hold the lock that `reload` takes.
        threading.Thread(target=reload, name="reload", daemon=True).start()

    before = signal.signal(signal.SIGHUP, on_sighup)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
