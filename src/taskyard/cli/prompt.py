"""A prompt that reads commands from a terminal or a pipe, beside a program that prints lines.

Owns stdin and stdout. A pipe does not echo input, so each command is printed after its prompt, and
the output looks the same as on a terminal. The end of stdin means `quit`.
"""

from __future__ import annotations

import cmd
import io
import os
import queue
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from taskyard.cli.format import escape_line
from taskyard.net.host import Waker

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.net.host import Host

_STDIN: Final = 0

#: The most digits of a number argument.
NUMBER_DIGITS_MAX: Final = 6

#: How long the end of a program waits for the terminal.
_END_SECONDS_MAX: Final = 1.0


class Prompt(cmd.Cmd):
    """Reads and runs commands, which are the methods `do_NAME`. Prints from any thread."""

    use_rawinput = False
    #: Commands that take a number.
    counted: tuple[str, ...] = ()

    def __init__(self, name: str, debug: int) -> None:
        super().__init__(stdin=_open_stdin())
        self.prompt = ""  # `print_line` and `postcmd` print it
        self._shown, self._debug = f"{name}> ", debug
        self._is_prompting = False
        self._printing = threading.Lock()
        self._echoes = not os.isatty(_STDIN)

    def print_line(self, level: int, text: str) -> None:
        """Print a line if the debug level is at least `level`."""
        if level <= self._debug:
            with self._printing:
                before, after = ("\n", self._shown) if self._is_prompting else ("", "")
                _write(f"{before}{escape_line(text)}\n{after}")  # the user may be typing

    def end_prompt(self) -> None:
        """End the line of the prompt, unless another thread waits for a stopped terminal."""
        if self._printing.acquire(timeout=_END_SECONDS_MAX):
            try:
                if self._is_prompting:
                    _write("\n")
                self._is_prompting = False
            finally:
                self._printing.release()

    # The loop of `cmd.Cmd`.

    def start(self) -> None:
        """Read commands in a thread. It ends with the process if stdin does not end before."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(BrokenPipeError):
            try:
                self.cmdloop()
            except OSError:  # the terminal was closed
                self.onecmd("EOF")

    def preloop(self) -> None:
        with self._printing:
            _write(self._shown)
            self._is_prompting = True

    def precmd(self, line: str) -> str:
        if line == "EOF":
            self.end_prompt()
            return line
        with self._printing:
            self._is_prompting = False
            if self._echoes:
                _write(f"{escape_line(line.strip())}\n")
        return line

    def postcmd(self, stop: bool, line: str) -> bool:  # noqa: ARG002, FBT001  # of `cmd.Cmd`
        if not stop:
            self.preloop()
        return stop

    def onecmd(self, line: str) -> bool:
        """Run a command. Return whether it is the last one."""
        word, argument, _ = self.parseline(line)
        if argument and word not in (*self.counted, "help"):
            self.default(line)
            return False
        return bool(super().onecmd(line))

    def emptyline(self) -> bool:
        return False

    def default(self, line: str) -> None:
        names = [name.removeprefix("do_") for name in self.get_names() if name.startswith("do_")]
        known = [f"{one} N" if one in self.counted else one for one in names if one != "EOF"]
        self.print_line(0, f"unknown command {line.strip()!r} (known: {', '.join(known)})")

    def read_number(self, command: str, text: str) -> int:
        """Return the number of a command. 0 if it is invalid, which is printed."""
        if text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX and int(text):
            return int(text)
        example = f"a number up to {'9' * NUMBER_DIGITS_MAX}, as in {command} 100"
        self.print_line(0, f"{command}: expected {example}")
        return 0

    def do_quit(self, _: str) -> bool:
        """End the program."""
        raise NotImplementedError

    def do_EOF(self, _: str) -> bool:  # noqa: N802  # of `cmd.Cmd`
        """End the program, as `quit` does."""
        return self.do_quit("")


def _open_stdin() -> TextIO:
    """Open stdin without a buffer, whose lock a thread would still hold when the process ends."""
    try:
        return io.TextIOWrapper(io.FileIO(_STDIN, closefd=False), errors="replace")
    except OSError:  # it is closed
        return io.StringIO()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class PromptProgram(Protocol):
    """A program that runs commands."""

    @property
    def is_busy(self) -> bool:
        """Return whether the last command is in progress."""

    @property
    def is_finished(self) -> bool: ...

    def turn(self) -> None: ...

    def wake_at_ns(self) -> int | None: ...


class HostedPrompt(Prompt):
    """A prompt whose commands run in the thread of a host, one after the other."""

    def __init__(self, name: str, debug: int, host: Host) -> None:
        super().__init__(name, debug)
        self._host = host
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._waker = Waker()
        host.poller.add(self._waker.fileno())
        host.callback(self._waker.close)
        self._is_running = self._is_quitting = self._is_aborted = False
        self._program: PromptProgram

    def run(self, program: PromptProgram) -> None:
        """Run the program with commands until it is finished.

        A signal means `quit`. A second one ends the program at once.
        """
        self._program = program
        self.start()
        self._host.run(self)
        self.end_prompt()

    def onecmd(self, line: str) -> bool:
        """Let the thread of the host run a command, and wait until it is done."""
        self._commands.put(lambda: self._begin(line))
        self._waker.wake()
        return self._done.get()

    def _begin(self, line: str) -> None:
        self._is_running = True
        self._is_quitting = super().onecmd(line) or self._is_quitting

    @property
    def has_exited(self) -> bool:
        return self._is_aborted or self._program.is_finished

    def turn(self) -> bool:
        self._waker.clear()
        self._program.turn()
        while not (self._program.is_busy or self._is_quitting):
            if self._is_running:
                self._is_running = False
                self._done.put(self._is_quitting)
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                break
        return False

    def wake_at_ns(self) -> int | None:
        return self._program.wake_at_ns()

    def shut_down(self) -> None:
        """Quit. Called again, end the program at once."""
        self._is_aborted = self._is_quitting
        if not self._is_quitting:
            self._is_quitting = True
            self.end_prompt()
            self.do_quit("")
