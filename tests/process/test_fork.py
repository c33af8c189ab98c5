"""Forked children: their standard files, signals, descriptors and end."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from taskyard.errors import ExitCode
from tests.kit.processes import environment

#: Forks a child in an interpreter with one thread, which pytest's may not have.
PREAMBLE = """
import gc, os, signal, subprocess, sys, threading
from taskyard.process.child import ChildProcess
from taskyard.process.child import can_fork
signal.signal(signal.SIGTERM, lambda *_: None)
assert can_fork()
"""


def output_of(code: str) -> str:
    """Run code after the preamble, and return its stdout."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.needs("Linux")
class TestFork:
    def test_child_has_its_own_group_files_and_signals(self) -> None:
        code = """
inherited = os.open(os.devnull, os.O_RDONLY)
def program():
    handlers = [signal.getsignal(one) == signal.SIG_DFL for one in (signal.SIGTERM, signal.SIGHUP)]
    print(os.getpgrp() == os.getpid() and gc.isenabled(), handlers, end=" ")
    print(os.listdir("/proc/self/fd")[3:], flush=True)
    return 7
child = ChildProcess.fork(program, stdout=subprocess.PIPE)
child.write("\\n")
print(child.read_line(), child.wait(), child.poll())
"""
        first, *rest = output_of(code).split(" ", 1)
        assert first == "True"
        # The descriptor of the listing itself is the only one beside the standard files.
        assert rest == ["[True, True] ['3'] 7 7\n"]

    def test_child_that_is_not_started_ends_with_its_stdin(self) -> None:
        code = """
child = ChildProcess.fork(lambda: 7)
assert child.poll() is None
child.close_stdin()
print(child.wait())
"""
        assert output_of(code) == "0\n"

    def test_signals_reach_the_child_until_it_is_reaped(self) -> None:
        code = """
child = ChildProcess.fork(lambda: signal.pause())
try:
    child.process.wait(0.01)
except subprocess.TimeoutExpired:
    print("runs")
child.signal(signal.SIGTERM)
print(child.wait())
child.signal(signal.SIGTERM)
"""
        assert output_of(code) == f"runs\n{-signal.SIGTERM}\n"

    def test_interrupt_during_the_fork_is_raised_after_it(self) -> None:
        code = """
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
def program():
    signal.pause()
try:
    ChildProcess.fork(program)
except KeyboardInterrupt:
    print("interrupted", signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
        assert output_of(code) == "interrupted set()\n"

    def test_interrupt_reaches_the_child(self) -> None:
        code = """
def program():
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
    signal.pause()
child = ChildProcess.fork(program, stdout=subprocess.PIPE)
child.write("\\n")
print(child.read_line())
child.signal(signal.SIGINT)
print(child.wait())
"""
        assert output_of(code) == f"set()\n{ExitCode.INTERRUPTED}\n"

    def test_process_with_another_thread_is_not_forked(self) -> None:
        code = """
event = threading.Event()
threading.Thread(target=event.wait).start()
print(can_fork())
event.set()
"""
        assert output_of(code) == "False\n"
