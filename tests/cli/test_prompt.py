"""A prompt around a scripted program: the ways to end it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from taskyard.cli.prompt import Console, run_prompt
from taskyard.net.host import Host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

import pytest


class StuckProgram:
    """Implements `PromptProgram`: stays busy after `quit`, and sends this process a signal."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.commands: dict[str, Callable[[], None]] = {
            "hello": lambda: self.calls.append("hello"),
            "quit": lambda: self.calls.append("quit"),
        }
        self.counted_commands: dict[str, Callable[[int], None]] = {}
        self.is_finished = False

    @property
    def is_busy(self) -> bool:
        return "quit" in self.calls

    def turn(self) -> None:
        self.calls.append("turn")
        if self.is_busy:
            os.kill(os.getpid(), signal.SIGTERM)

    def wake_at_ns(self) -> int:
        return 0


@pytest.fixture
def stdin(tmp_path: Path) -> Iterator[Path]:
    """Replace descriptor 0 by a file."""
    before = os.dup(0)
    file = tmp_path / "commands"
    file.touch()
    with file.open() as opened:
        os.dup2(opened.fileno(), 0)
    yield file
    os.dup2(before, 0)
    os.close(before)


def test_signal_while_quitting_ends_the_program_at_once(
    stdin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin.write_text("hello\n")
    program = StuckProgram()
    with Host() as host:
        run_prompt(program, host, Console("test", 1))
    assert program.calls == ["turn", "hello", "turn", "quit", "turn", "turn"]
    assert capsys.readouterr().out == "test> hello\ntest> \n"
