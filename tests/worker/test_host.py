"""The host's loop with a scripted worker, and the announcements of every dialect."""

from __future__ import annotations

import os
import signal

from taskyard.core.limits import SECOND_NS
from taskyard.net.protocols import SystemClock
from taskyard.worker.host import Announcer, WorkerHost


class ScriptedWorker:
    """Implements `HostedWorker`: records calls, and exits at its second shutdown."""

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
    worker = ScriptedWorker()
    with WorkerHost(until_eof=False) as host:
        host.run(worker)
    assert worker.calls == [
        *("wait", "turn"),
        *("wait", "shut down", "turn"),
        *("wait", "shut down", "turn"),
    ]


def test_host_does_not_wait_while_more_input_is_there() -> None:
    worker = ScriptedWorker(more=2)
    with WorkerHost(until_eof=False) as host:
        host.run(worker)
    assert worker.calls[:5] == ["wait", "turn", "turn", "turn", "wait"]


def test_signals_are_restored_and_callbacks_run_at_the_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    closed: list[str] = []
    with WorkerHost(until_eof=False) as host:
        host.callback(lambda: closed.append("first"))
        host.callback(lambda: closed.append("second"))
        assert signal.getsignal(signal.SIGTERM) is not before
    assert closed == ["second", "first"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_connection_is_announced_once_per_change_and_endpoint() -> None:
    lines: list[str] = []
    announcer = Announcer("w", lines.append)
    announcer.connection("a", connected=False, missing=False)  # too early
    for _ in range(2):
        announcer.connection("a", connected=False, missing=True)
    for endpoint in ("a", "a", "b"):
        announcer.connection(endpoint, connected=True, missing=False)
    announcer.connection("a", connected=False, missing=True)
    assert lines == [
        "no broker answers at a, worker w waits",
        "worker w works for the broker at a",
        "worker w works for the broker at b",
        "no broker answers at a, worker w waits",
    ]


def test_steps_of_a_shutdown_are_announced() -> None:
    lines: list[str] = []
    announcer = Announcer("w", lines.append, peer="manager")
    for tasks in (0, 1, 2):
        announcer.finishing(tasks)
    announcer.stopping()
    announcer.unreported(2)
    assert lines == [
        "worker w exits after 1 task (a second signal stops it)",
        "worker w exits after 2 tasks (a second signal stops them)",
        "worker w stops its running tasks and returns them",
        "worker w exits without a manager to report to: 2 tasks will run again",
    ]
