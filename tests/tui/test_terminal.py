"""`taskyard top` in a real terminal: it starts, draws, quits, and leaves the terminal as it was."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import ExitStack
from pty import openpty
from select import select
from typing import TYPE_CHECKING

import pytest

from taskyard.client.client import Client
from tests.kit.processes import PATIENCE_SECONDS, TASKYARD, Broker, environment, run_here

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: A sequence that sets a colour of text or background.
_COLOUR = re.compile(rb"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[\d;]*)?m")


class Terminal:
    """A terminal of 80 by 24 characters, with a command in it."""

    def __init__(self, directory: Path, *words: str, **variables: str) -> None:
        self._near, self._far = openpty()
        fcntl.ioctl(self._far, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._modes = termios.tcgetattr(self._far)
        self.bytes = b""
        self.process = subprocess.Popen(
            [*TASKYARD, *words],
            cwd=directory,
            env=environment(TERM="xterm-256color", **variables),
            stdin=self._far,
            stdout=self._far,
            stderr=self._far,
            start_new_session=True,
        )

    def read_until(self, words: bytes) -> None:
        """Read what the command writes until these bytes appear."""
        end = time.monotonic() + PATIENCE_SECONDS
        while words not in self.bytes:
            assert time.monotonic() < end, self.bytes[-500:]
            assert self.process.poll() is None, self.bytes[-2000:]
            self._read()

    def _read(self) -> None:
        if select([self._near], [], [], 0.5)[0]:
            self.bytes += os.read(self._near, 65536)

    def type(self, keys: bytes) -> None:
        os.write(self._near, keys)

    def end(self) -> int:
        """Read the rest, and return the exit status."""
        end = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < end
            self._read()
        self._read()
        return self.process.returncode

    @property
    def is_restored(self) -> bool:
        return termios.tcgetattr(self._far) == self._modes

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._near)
        os.close(self._far)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_terminal_shows_a_broker_and_is_restored(tmp_path: Path, stack: ExitStack) -> None:
    stack.enter_context(Broker(tmp_path))
    with Client(state=tmp_path / ".taskyard") as client:
        client.submit(b"", name="early", campaign="night-\x1b]0;pwned\a", service="fax")
    terminal = Terminal(tmp_path, "top", NO_COLOR="1")
    stack.callback(terminal.close)
    terminal.read_until(b"fax")
    terminal.type(b"3")
    terminal.read_until(b"night-\\x1b]0;pwned\\x07/early")
    terminal.type(b"q")
    assert terminal.end() == 0
    assert terminal.is_restored
    assert b"\x1b[?1049l" in terminal.bytes, "the screen of before is back"
    assert terminal.bytes.rfind(b"\x1b[?25h") > terminal.bytes.rfind(b"\x1b[?25l"), "has a cursor"
    assert not _COLOUR.search(terminal.bytes)
    assert b"\x1b]0;pwned" not in terminal.bytes


def test_missing_state_is_reported_before_the_screen_is_cleared(
    tmp_path: Path, stack: ExitStack
) -> None:
    terminal = Terminal(tmp_path, "top", "--state", "nowhere")
    stack.callback(terminal.close)
    assert terminal.end() == 3
    assert b"no broker is running: nowhere has no journal" in terminal.bytes
    assert b"\x1b[?1049h" not in terminal.bytes


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "top: not a terminal (use `taskyard status` or `taskyard list`)"),
        (["--match", "a"], "unknown option --match"),
    ],
)
def test_usage_is_checked(tmp_path: Path, words: list[str], problem: str) -> None:
    code, out, err = run_here(tmp_path, "top", *words)
    assert (code, out) == (2, "")
    assert problem in err


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "taskyard.tui.app", None)
    code, _, err = run_here(tmp_path, "top")
    assert code == 2
    assert "pip install 'taskyard[tui]'" in err
