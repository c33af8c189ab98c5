"""A prompt that reads commands from a terminal or a pipe while a program runs.

Owns stdin and stdout. A pipe does not echo input, so each command is printed after its prompt, and
the output looks the same as on a terminal. The end of stdin means `quit`. The program implements
the commands.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from typing import TYPE_CHECKING, Final, Protocol

from taskyard.cli.format import escape_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from taskyard.net.host import Host
    from taskyard.net.poller import Poller

_STDIN: Final = 0
_READ_BYTES: Final = 65_536

#: Longer lines are rejected.
LINE_BYTES_MAX: Final = 4096

#: The most digits of a number argument.
NUMBER_DIGITS_MAX: Final = 6

QUIT: Final = "quit"

#: How long the end of a program waits for the terminal.
_END_SECONDS_MAX: Final = 1.0


class Console:
    """Prints lines and keeps track of the prompt. Thread-safe."""

    def __init__(self, name: str, debug: int) -> None:
        self._prompt = f"{name}> "
        self._debug = debug
        self._is_prompting = False
        self._printing = threading.Lock()
        self._echoes = not os.isatty(_STDIN)

    def print_line(self, level: int, text: str) -> None:
        """Print a line if the debug level is at least `level`."""
        if level > self._debug:
            return
        with self._printing:
            if self._is_prompting:
                _write("\n")  # the user may be typing
            _write(escape_line(text) + "\n")
            if self._is_prompting:
                _write(self._prompt)

    def prompt(self) -> None:
        """Print the prompt unless it is shown already."""
        with self._printing:
            if not self._is_prompting:
                _write(self._prompt)
            self._is_prompting = True

    def command_read(self, line: str) -> None:
        """Echo a command that was read."""
        with self._printing:
            if not self._is_prompting:
                _write(self._prompt)
            self._is_prompting = False
            if self._echoes:
                _write(escape_line(line) + "\n")

    def end_prompt(self) -> None:
        """End the line of the prompt, unless another thread waits for a stopped terminal."""
        if not self._printing.acquire(timeout=_END_SECONDS_MAX):
            return
        try:
            if self._is_prompting:
                _write("\n")
            self._is_prompting = False
        finally:
            self._printing.release()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Lines:
    """A buffer of lines from stdin."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_at_eof = False

    def read(self) -> None:
        """Read available input. Blocks if there is none."""
        try:
            part = os.read(_STDIN, _READ_BYTES)
        except OSError:  # stdin is closed
            part = b""
        self._rest += part
        self.is_at_eof = not part

    def next(self) -> str | None:
        """Return the next complete line, or the rest at the end of input."""
        line, end, rest = self._rest.partition(b"\n")
        if end or (self.is_at_eof and line):
            self._rest = rest
        elif len(line) <= LINE_BYTES_MAX:
            return None
        else:
            self._rest = b""
        return line.decode(errors="replace").strip()


def read_commands() -> Iterator[str]:
    """Yield lines of stdin until its end."""
    lines = Lines()
    while True:
        while (line := lines.next()) is not None:
            yield line
        if lines.is_at_eof:
            return
        lines.read()


class PromptProgram(Protocol):
    """A program that is controlled by commands."""

    #: The commands by name. Those of `counted_commands` take a number.
    commands: dict[str, Callable[[], None]]
    counted_commands: dict[str, Callable[[int], None]]

    @property
    def is_busy(self) -> bool: ...

    @property
    def is_finished(self) -> bool: ...

    def turn(self) -> None: ...

    def wake_at_ns(self) -> int | None: ...


def run_command(
    line: str,
    commands: Mapping[str, Callable[[], None]],
    counted_commands: Mapping[str, Callable[[int], None]],
    console: Console,
) -> None:
    """Run a command, or print why it is invalid."""
    word, _, rest = line.partition(" ")
    number = rest.strip()
    if word in commands and not number:
        commands[word]()
    elif word in counted_commands and _is_number(number):
        counted_commands[word](int(number))
    elif word in counted_commands:
        console.print_line(
            0, f"{word}: expected a number up to {'9' * NUMBER_DIGITS_MAX}, as in {word} 100"
        )
    elif word:
        known = [*commands, *(f"{one} N" for one in counted_commands)]
        console.print_line(0, f"unknown command {line!r} (known: {', '.join(known)})")


def _is_number(text: str) -> bool:
    return (
        text.isascii() and text.isdecimal() and 0 < len(text) <= NUMBER_DIGITS_MAX and int(text) > 0
    )


class _PromptedProgram:
    """A program and its commands, as the host drives them: one command after the other."""

    def __init__(self, program: PromptProgram, console: Console, poller: Poller) -> None:
        self._program = program
        self._console = console
        self._poller = poller
        self._lines = Lines()
        self._stdin = select.poll()
        self._stdin.register(_STDIN, select.POLLIN)
        #: stdin is polled only while a command can run.
        self._reads_stdin = False
        self._is_quitting = False
        self._is_aborted = False
        self._run_commands()

    @property
    def has_exited(self) -> bool:
        return self._is_aborted or self._program.is_finished

    def turn(self) -> bool:
        if self._reads_stdin and self._stdin.poll(0):
            self._lines.read()
        self._program.turn()
        self._run_commands()
        return False

    def wake_at_ns(self) -> int | None:
        return self._program.wake_at_ns()

    def shut_down(self) -> None:
        """Quit. Called again, end the program at once."""
        if self._is_quitting:
            self._is_aborted = True
        else:
            self._quit()

    def _run_commands(self) -> None:
        """Run commands that were read, until one keeps the program busy."""
        while self._run_next():
            pass
        wants_line = self._can_run and not self._lines.is_at_eof
        if wants_line and not self._reads_stdin:
            self._poller.add(_STDIN)
        elif self._reads_stdin and not wants_line:
            self._poller.remove(_STDIN)
        self._reads_stdin = wants_line

    @property
    def _can_run(self) -> bool:
        return not (self._program.is_busy or self._is_quitting)

    def _run_next(self) -> bool:
        """Run the next command if the program is not busy. Return whether there was one."""
        if not self._can_run:
            return False
        line = self._lines.next()
        if line is not None:
            self._console.command_read(line)
            self._is_quitting = line == QUIT
            run_command(line, self._program.commands, self._program.counted_commands, self._console)
        elif self._lines.is_at_eof:
            self._quit()
        else:
            self._console.prompt()
        return line is not None

    def _quit(self) -> None:
        self._is_quitting = True
        self._console.end_prompt()
        self._program.commands[QUIT]()


def run_prompt(program: PromptProgram, host: Host, console: Console) -> None:
    """Run a program with commands from stdin until it is finished.

    A signal means `quit`. A second one ends the program at once.
    """
    host.run(_PromptedProgram(program, console, host.poller))
    console.end_prompt()
