"""A prompt: one command a line, from a terminal or a pipe, while something else goes on.

Owns stdin and stdout. In a pipe nobody sees what is typed, so each command is written after its
prompt, and what is printed reads the same as in a terminal. The end of stdin is `quit`. What the
commands do is the programs' business.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Final, Protocol

from taskyard.cli.format import escape_line
from taskyard.net.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from taskyard.net.poller import Poller
    from taskyard.net.protocols import SystemClock

_STDIN: Final = 0
_READ_BYTES: Final = 65_536

#: A longer line is no command.
LINE_BYTES_MAX: Final = 4096

#: Digits of a number that a command takes.
NUMBER_DIGITS_MAX: Final = 6

QUIT: Final = "quit"


class Console:
    """What is printed, and where the prompt stands. For several threads at once."""

    def __init__(self, who: str, debug: int) -> None:
        self._prompt = f"{who}> "
        self._debug = debug
        self._is_prompting = False
        self._printing = threading.Lock()
        self._echoes = not os.isatty(_STDIN)

    def print_line(self, level: int, text: str) -> None:
        """Tell something that is for this debug level and those above."""
        if level > self._debug:
            return
        with self._printing:
            if self._is_prompting:
                _write("\n")  # somebody may be typing
            _write(escape_line(text) + "\n")
            if self._is_prompting:
                _write(self._prompt)

    def prompt(self) -> None:
        """Ask for a command; once is enough."""
        with self._printing:
            if not self._is_prompting:
                _write(self._prompt)
            self._is_prompting = True

    def command_read(self, line: str) -> None:
        """A command was typed."""
        with self._printing:
            if not self._is_prompting:
                _write(self._prompt)
            self._is_prompting = False
            if self._echoes:
                _write(escape_line(line) + "\n")

    def end_prompt(self) -> None:
        """Nothing more is asked for."""
        with self._printing:
            if self._is_prompting:
                _write("\n")
            self._is_prompting = False


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Lines:
    """Lines of stdin, as they come."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_at_eof = False

    def read(self) -> None:
        """Take in what is there; waits where nothing is."""
        try:
            part = os.read(_STDIN, _READ_BYTES)
        except OSError:  # there is no stdin
            part = b""
        self._rest += part
        self.is_at_eof = not part

    def next(self) -> str | None:
        """The next whole line; at the end, what there is."""
        line, end, rest = self._rest.partition(b"\n")
        if end or (self.is_at_eof and line):
            self._rest = rest
        elif len(line) <= LINE_BYTES_MAX:
            return None
        else:
            self._rest = b""
        return line.decode(errors="replace").strip()


def read_commands() -> Iterator[str]:
    """Lines of stdin, waited for, up to its end."""
    lines = Lines()
    while True:
        while (line := lines.next()) is not None:
            yield line
        if lines.is_at_eof:
            return
        lines.read()


class PromptProgram(Protocol):
    """What is commanded."""

    #: By their words; those of the second take a number.
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
    """Carry out one command, or say why not."""
    word, _, rest = line.partition(" ")
    number = rest.strip()
    if word in commands and not number:
        commands[word]()
    elif word in counted_commands and _is_number(number):
        counted_commands[word](int(number))
    elif word in counted_commands:
        console.print_line(0, f"{word} takes a number, up to {'9' * NUMBER_DIGITS_MAX}: {word} 100")
    elif word:
        known = [*commands, *(f"{one} N" for one in counted_commands)]
        console.print_line(0, f"there is no command {line!r}; the commands are {', '.join(known)}")


def _is_number(text: str) -> bool:
    return (
        text.isascii() and text.isdecimal() and 0 < len(text) <= NUMBER_DIGITS_MAX and int(text) > 0
    )


class _PromptLoop:
    """Commands, one after the other."""

    def __init__(self, program: PromptProgram, console: Console) -> None:
        self._program = program
        self._console = console
        self.lines = Lines()
        self.is_quitting = False

    @property
    def wants_line(self) -> bool:
        return not (self._program.is_busy or self.is_quitting or self.lines.is_at_eof)

    def run_next(self) -> bool:
        """Take the next command, if it may be taken; whether there was one."""
        if self._program.is_busy or self.is_quitting:
            return False
        line = self.lines.next()
        if line is not None:
            self._console.command_read(line)
            self.is_quitting = line == QUIT
            run_command(line, self._program.commands, self._program.counted_commands, self._console)
        elif self.lines.is_at_eof:
            self.quit()
        else:
            self._console.prompt()
        return line is not None

    def quit(self) -> None:
        self.is_quitting = True
        self._console.end_prompt()
        self._program.commands[QUIT]()


def run_prompt(
    program: PromptProgram, poller: Poller, clock: SystemClock, console: Console
) -> None:
    """Run a program by the commands of stdin, until it is over. A signal is `quit`, a second one
    ends it at once."""
    prompt_loop = _PromptLoop(program, console)
    with Signals() as signals:
        poller.add(signals.fileno())
        while not program.is_finished:
            while prompt_loop.run_next():
                pass
            wants_line = prompt_loop.wants_line
            if wants_line:
                poller.add(_STDIN)
            ready = poller.wait(_wait_ns(program, clock))
            if wants_line:
                poller.remove(_STDIN)
            if _STDIN in ready:
                prompt_loop.lines.read()
            if signals.fileno() in ready and signals.received():
                if prompt_loop.is_quitting:
                    break
                prompt_loop.quit()
            program.turn()
        poller.remove(signals.fileno())
    console.end_prompt()


def _wait_ns(program: PromptProgram, clock: SystemClock) -> int | None:
    if program.is_finished:
        return 0
    wake_at_ns = program.wake_at_ns()
    return None if wake_at_ns is None else max(0, wake_at_ns - clock.monotonic_ns())
