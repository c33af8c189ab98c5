"""A broker, workers and a page on one machine as child processes: restarted, and stopped in order.

Owns which commands run, by which policy each is restarted, and the order of stopping: workers
before the broker. Workers keep their names. A restarted worker reports the death of its
predecessor, so the broker reassigns its tasks at once.

Children run as commands: this module imports nothing of the broker or the worker.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from msgspec import Struct

from taskyard.errors import ExitCode
from taskyard.net.host import Terminal
from taskyard.process.child import ChildProcess, status_text, taskyard_command
from taskyard.process.machine import Machine, this_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType


#: Delay before a child that died is restarted. It doubles with each restart.
RESTART_SECONDS_FIRST: Final = 0.2
RESTART_SECONDS_MAX: Final = 10.0

#: A child that ran longer than this did not fail at its start: the delay begins anew.
STABLE_SECONDS: Final = 10.0

#: Time between closing a child's stdin and SIGKILL.
KILL_SECONDS: Final = 5.0

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


def incarnation_options(*, owns_name: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield options for the starts of one worker, each with the next incarnation number.

    A start reports to the broker that all earlier workers have ended: take the options only then.
    With `owns_name`, these include the workers of earlier supervisors, which have ended with them.
    Numbers from the wall clock are above theirs.
    """
    number = time.time_ns() if owns_name else 1 + secrets.randbits(_INCARNATION_BITS)
    first = 1 if owns_name else number
    for incarnation in count(number):
        yield "--incarnation", str(incarnation), "--replaces", str(first)


class ManagedProcess:
    """A child that a thread restarts by its policy until it is stopped."""

    def __init__(  # noqa: PLR0913  # most are named
        self,
        name: str,
        arguments: Sequence[str],
        policy: RestartPolicy,
        info: Callable[[str], None],
        *,
        on_line: Callable[[str], None] | None = None,
        is_worker: bool = True,
        owns_name: bool = False,
        pass_fds: Sequence[int] = (),
        stdin_text: str = "",
        stdout: int | None = None,
    ) -> None:
        """Call `info` with each restart, and `on_line` with each line of its stdout.

        Without `on_line`, its stdout is the descriptor `stdout`, or /dev/null. See
        `incarnation_options` for `owns_name`. Each start inherits the descriptors `pass_fds` and
        reads `stdin_text` first.
        """
        self.name = name
        self._arguments = arguments
        self._policy = policy
        self._info = info
        self._on_line = on_line
        self._incarnations = incarnation_options(owns_name=owns_name) if is_worker else None
        self._pass_fds, self._stdin_text = pass_fds, stdin_text
        unread = subprocess.DEVNULL if stdout is None else stdout
        self._stdout = unread if on_line is None else subprocess.PIPE
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
        self.on_end: Callable[[], None] = ignore
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
            with suppress(BrokenPipeError, ValueError):  # it was killed or discarded
                self._child.write("\n")
        self._thread.start()

    def fork(self, run: Callable[[Sequence[str]], int]) -> None:
        """Fork the child, which waits for `start` and then calls `run` with its arguments.

        Later starts are new interpreters, because this process has threads then.
        """
        arguments = self._next_arguments()
        self._child = ChildProcess.fork(lambda: run(arguments), stdout=self._stdout)

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
        more = () if self._incarnations is None else next(self._incarnations)
        return [*self._arguments, *more]

    def _start_child(self) -> ChildProcess | None:
        with self._lock:
            if self._stopping.is_set():
                return None
            self._child = ChildProcess(
                taskyard_command(self._next_arguments()),
                stdout=self._stdout,
                pass_fds=self._pass_fds,
            )
            if self._stdin_text:
                with suppress(BrokenPipeError):  # it was killed
                    self._child.write(self._stdin_text)
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


def ignore(*_event: object) -> None:
    """Ignore the restart or the end of a child."""


#: A stop that takes longer is explained in the log.
STOP_NOTICE_SECONDS: Final = 1.0

#: A worker that exits with 2 later than this has lost its name to another process. The options
#: were good.
NAME_REFUSAL_SECONDS: Final = 2.0

#: Of `up` and `run`. A broker with bad options or a damaged state would fail again. A store in
#: PostgreSQL may be in use for long, so its unit decides.
BROKER_POLICY: Final = RestartPolicy((*RestartPolicy().final_statuses, ExitCode.STORE_IN_USE))
WORKER_POLICY: Final = RestartPolicy(final_seconds_max=NAME_REFUSAL_SECONDS)

#: The page comes last on a busy machine. If it fails at its start, it should not take much time.
PAGE_POLICY: Final = RestartPolicy(delay_seconds_max=60.0)


class WorkerSpec(Struct, frozen=True):
    """How many workers to start, and with which options."""

    workers: int = 1
    #: Of each. None: one per core.
    slots: int | None = None
    allow: tuple[str, ...] = ()
    #: Empty: the worker's default services.
    services: tuple[str, ...] = ()
    allow_pickle: bool = False
    #: Start the processes for functions with the worker, not with the first tasks.
    starts_children: bool = False
    #: Functions print to the worker's stdout and stderr.
    passes_output: bool = False
    #: Calls after which a process for functions is replaced. 0: never.
    calls_max: int = 0
    #: The resources that all workers share. None: the machine's.
    machine: Machine | None = None
    #: Slots of all workers together, in place of `slots`.
    jobs: int | None = None

    def share(self, number: int) -> Machine:
        """Return the resources of the worker with this number, from 1 on."""
        whole = this_machine() if self.machine is None else self.machine
        return whole.share(number - 1, self.workers)

    def slots_of(self, number: int = 1) -> int | None:
        """Return the slots of the worker with this number. The first worker has the most."""
        if self.jobs is None:
            return self.slots
        each, more = divmod(self.jobs, self.workers)
        return each + (number <= more)

    def arguments(self, state: Path, name: str, number: int) -> list[str]:
        """Return the command line of the worker `name`, which has this number from 1 on."""
        arguments = ["worker", "--state", str(state), "--name", name, "--quiet", "--until-eof"]
        if (slots := self.slots_of(number)) is not None:
            arguments += ["--slots", str(slots)]
        for module in self.allow:
            arguments += ["--allow", module]
        for service in self.services:
            arguments += ["--service", service]
        if self.allow_pickle:
            arguments.append("--allow-pickle")
        if self.starts_children:
            arguments.append("--start-children")
        if self.passes_output:
            arguments.append("--pass-output")
        if self.calls_max:
            arguments += ["--calls-max", str(self.calls_max)]
        if self.machine is not None or self.workers > 1:
            arguments += self.share(number).arguments()
        return arguments


class Supervisor:
    """A broker and workers that are restarted. As a context manager it stops them at the end."""

    def __init__(
        self,
        state: Path,
        info: Callable[[str], None],
        listen: Sequence[str] = (),
        config: Path | None = None,
        *,
        log: Sequence[str] = (),
    ) -> None:
        """`log` has the log options of all children."""
        self._state = state
        self._info = info
        #: All children read the settings file that this process has read.
        self._common = [*log, *([] if config is None else ["--config", str(config)])]
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
        self.page: ManagedProcess | None = None
        #: Called when no task can run any more, unless `stop` was called before.
        self.on_over: Callable[[], None] = ignore
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
        """Start workers, or let forked workers begin."""
        if not self.workers:
            self._make_workers(worker_spec)
        for worker in self.workers:
            worker.start()

    def _make_workers(self, worker_spec: WorkerSpec) -> None:
        for number in range(1, worker_spec.workers + 1):
            name = f"local-{number}"
            arguments = [*worker_spec.arguments(self._state, name, number), *self._common]
            worker = ManagedProcess(
                f"worker {name}", arguments, WORKER_POLICY, self._info, owns_name=True
            )
            worker.on_end = self._on_end
            self.workers.append(worker)

    def start_page(self, descriptor: int, secret: bytes) -> None:
        """Start the page, on a socket that listens. It ends after the workers.

        Socket and secret belong to this process, so addresses are good after a restart of the
        page. The secret is written to its stdin, because other users see arguments.
        """
        arguments = ["web", "--state", str(self._state), "--inherited", str(descriptor)]
        self.page = ManagedProcess(
            "the page",
            [*arguments, "--until-eof", *self._common],
            PAGE_POLICY,
            self._info,
            is_worker=False,
            pass_fds=[descriptor],
            stdin_text=f"{secret.hex()}\n",
        )
        self.page.on_end = partial(self._on_page_ended, descriptor)
        self.page.start()

    def _on_page_ended(self, descriptor: int) -> None:
        """Say that there is no page any more. It has printed the reason.

        The address refuses connections from now on. Browsers would wait for ever.
        """
        if self.page is not None and not self.page.is_stopping:
            with socket.socket(fileno=os.dup(descriptor)) as listening:
                listening.shutdown(socket.SHUT_RDWR)
            status = status_text(self.page.status)
            self._info(f"the page ended ({status}), not restarting it (tasks go on without it)")

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

    def finish_workers(self) -> None:
        """Stop the workers when their running tasks have finished, and keep the broker.

        After an interrupt the tasks are ended and returned.
        """
        self._is_stopping = True
        for managed in self.workers:
            managed.discard()
        self._stop_workers(finish_running=True)

    def stop(self, *, finish_running: bool = True) -> None:
        """Stop the workers and then the broker.

        Running tasks finish first. Without `finish_running`, or after an interrupt, they are ended
        and returned. Another interrupt kills everything.
        """
        self._is_stopping = True
        for managed in (*self.workers, self.broker):
            managed.discard()
        try:
            self._stop_workers(finish_running=finish_running)
            if self.page is not None:
                self.page.close_stdin()
            self._stop_all([self.broker])
        except KeyboardInterrupt:
            for managed in (*self.workers, self.broker):
                managed.kill()
        finally:
            if self.page is not None:
                self.page.kill()
                self.page.join()

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
                # A second signal ends the tasks. Two of the same kind could merge.
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


@contextmanager
def stop_signals_as_interrupt() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGTERM and SIGHUP, as on Ctrl-C.

    A SIGHUP that is ignored stays so, as under nohup. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
