"""The host's loop with a scripted program."""

from __future__ import annotations

import os
import signal

from taskyard.core.limits import SECOND_NS
from taskyard.net.host import Host
from taskyard.net.protocols import SystemClock


class ScriptedProgram:
    """Implements `HostedProgram`: records calls, and exits at its second shutdown."""

    def __init__(self, *, more: int = 0) -> None:
        self.calls: list[str] = []
        self._more = more

    @property
    def has_exited(self) -> bool:
        return self.calls.count("shut down") == 2

    def turn(self) -> bool:
        self.calls.append("turn")
        self._more -= 1
        if self._more < 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return self._more >= 0

    def wake_at_ns(self) -> int:
        self.calls.append("wait")
        return SystemClock.monotonic_ns() + 60 * SECOND_NS * self.calls.count("turn")

    def shut_down(self) -> None:
        self.calls.append("shut down")


def test_each_signal_is_a_shutdown_before_the_next_turn() -> None:
    program = ScriptedProgram()
    with Host() as host:
        host.run(program)
    assert program.calls == [
        *("wait", "turn"),
        *("wait", "shut down", "turn"),
        *("wait", "shut down", "turn"),
    ]


def test_host_does_not_wait_while_more_input_is_there() -> None:
    program = ScriptedProgram(more=2)
    with Host() as host:
        host.run(program)
    assert program.calls[:5] == ["wait", "turn", "turn", "turn", "wait"]


def test_signals_are_restored_and_callbacks_run_at_the_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    closed: list[str] = []
    with Host() as host:
        host.callback(lambda: closed.append("first"))
        host.callback(lambda: closed.append("second"))
        assert signal.getsignal(signal.SIGTERM) is not before
    assert closed == ["second", "first"]
    assert signal.getsignal(signal.SIGTERM) is before
