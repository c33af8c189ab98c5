"""One child process: its pipes, its endpoints, its exit status in words."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from taskyard.process.child import (
    STATUS_UNKNOWN,
    ChildProcess,
    environment_without_settings,
    status_text,
)
from tests.kit.processes import PATIENCE_SECONDS


def a_child(code: str) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_endpoints_are_read_from_listening_lines() -> None:
    child = a_child(
        "print('recovering')\nprint()\nprint('listening native ipc://a')\n"
        "print('listening wmp tcp://b')\nprint('ready')\n"
    )
    assert child.read_endpoints(2) == [("native", "ipc://a"), ("wmp", "tcp://b")]
    assert child.read_line() == "ready"
    assert child.wait() == 0


def test_endpoints_of_a_child_that_ends_are_incomplete() -> None:
    child = a_child("print('listening native ipc://a')")
    assert child.read_endpoints(2) == [("native", "ipc://a")]
    assert child.wait() == 0


def test_line_that_is_not_utf8_is_escaped() -> None:
    child = a_child(r"import sys; sys.stdout.buffer.write(b'\xff\n')")
    assert child.read_line() == r"\xff"
    child.wait()


def test_end_of_stdin_reaches_the_child() -> None:
    child = a_child("import sys; sys.stdin.read(); raise SystemExit(3)")
    assert child.poll() is None
    child.close_stdin()
    assert child.wait_or_kill(PATIENCE_SECONDS) == 3


def test_child_that_does_not_end_in_time_is_killed() -> None:
    child = a_child("import signal; signal.pause()")
    assert child.wait_or_kill(0.05) == -signal.SIGKILL
    child.signal(signal.SIGTERM)  # no error: it has ended


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exit status 0"),
        (3, "exit status 3"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
        (STATUS_UNKNOWN, "ended, but its exit status was taken by another part of the worker"),
    ],
)
def test_exit_status_is_described(status: int, text: str) -> None:
    assert status_text(status) == text


def test_settings_of_other_brokers_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKYARD_BROKER", "tcp://elsewhere:1")
    monkeypatch.setenv("OTHER", "kept")
    environment = environment_without_settings()
    assert "TASKYARD_BROKER" not in environment
    assert environment["OTHER"] == "kept"


def test_text_reaches_the_childs_stdin_at_once() -> None:
    child = a_child("print(input())")
    child.write("hello\n")
    assert child.read_line() == "hello"
    assert child.wait() == 0
