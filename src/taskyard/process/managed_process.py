"""A child process that a thread restarts by a policy, and that stops on request.

Owns one child: its command, its starts and its end. Which children there are, and the order in
which they stop, is the supervisor's.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import threading
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.errors import ExitCode
from taskyard.process.child import ChildProcess, status_text, taskyard_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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

    A start reports to the broker that all earlier ones have ended: take the options only then. With
    `owns_name`, earlier ones are also those of earlier supervisors. Their workers have ended with
    them. Numbers from the wall clock are above theirs.
    """
    number = time.time_ns() if owns_name else 1 + secrets.randbits(_INCARNATION_BITS)
    first = 1 if owns_name else number
    for incarnation in count(number):
        yield "--incarnation", str(incarnation), "--replaces", str(first)


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
