"""A prompt around a scripted program: the ways to end it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from taskyard.cli.round_robin import HostedPrompt
from taskyard.net.host import Host

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

import pytest


class StuckProgram(HostedPrompt):
    """A prompt and its program, which stays busy after `quit` and sends this process a signal."""

    def __init__(self, host: Host) -> None:
        super().__init__("test", 1, host)
        self.calls: list[str] = []

    def do_hello(self, _: str) -> None:
        self.calls.append("hello")

    def do_quit(self, _: str) -> bool:
        self.calls.append("quit")
        return True


class Turns:
    """The turns of a stuck program."""

    def __init__(self, prompt: StuckProgram) -> None:
        self.prompt = prompt
        self.is_finished = False

    @property
    def is_busy(self) -> bool:
        return "quit" in self.prompt.calls

    def turn(self) -> None:
        if self.is_busy:
            self.prompt.calls.append("turn")
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
    with Host() as host:
        prompt = StuckProgram(host)
        prompt.run(Turns(prompt))
    assert prompt.calls[:2] == ["hello", "quit"]
    assert set(prompt.calls[2:]) == {"turn"}
    assert capsys.readouterr().out == "test> hello\ntest> \n"


def test_line_that_arrives_while_the_prompt_waits_is_shown_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Host() as host:
        prompt = StuckProgram(host)
        prompt.preloop()
        prompt.print_line(1, "message from \x1b peer")
        prompt.print_line(2, "not at this level")
        prompt.precmd("hello")
        prompt.print_line(1, "at work")
    out = capsys.readouterr().out
    assert out.replace("hello\n", "") == "test> \nmessage from \\x1b peer\ntest> at work\n"
