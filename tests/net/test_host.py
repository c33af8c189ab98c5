"""The host's loop with a scripted program, and counts in the log."""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING

from taskyard.core.limits import SECOND_NS
from taskyard.net.host import WARNING_NS, CountLog, Host
from taskyard.net.protocols import SystemClock

if TYPE_CHECKING:
    import pytest


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


class RisingCount:
    """A count that rises, and a clock."""

    def __init__(self) -> None:
        self.count = 0
        self.now_ns = 1
        self.log = CountLog(
            lambda: self.count, self, logging.getLogger("host"), "%d new, %d in all"
        )

    def monotonic_ns(self) -> int:
        return self.now_ns

    def add(self, count: int, after_ns: int = 0) -> None:
        self.count += count
        self.now_ns += after_ns
        self.log.log_if_due()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings, and clear them."""
    texts = [record.getMessage() for record in caplog.records]
    assert {record.levelno for record in caplog.records} <= {logging.WARNING}
    caplog.clear()
    return texts


def test_count_that_stays_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    RisingCount().add(0, WARNING_NS)
    assert warnings(caplog) == []


def test_count_is_logged_at_once_and_again_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rising = RisingCount()
    rising.add(1)
    assert warnings(caplog) == ["1 new, 1 in all"]
    for _ in range(5):
        rising.add(2)
    rising.add(1, WARNING_NS - 1)
    assert warnings(caplog) == []
    rising.add(1, 1)
    assert warnings(caplog) == ["12 new, 13 in all"]
    rising.add(0, WARNING_NS)
    assert warnings(caplog) == []
