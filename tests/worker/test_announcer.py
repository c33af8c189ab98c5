"""The announcements of every dialect's worker."""

from __future__ import annotations

from taskyard.worker.native_process import Announcer


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


def test_other_place_of_a_broker_is_announced() -> None:
    lines: list[str] = []
    announcer = Announcer("w", lines.append)
    for place in ("a", "a", "", "b", ""):
        announcer.connection("a+b", connected=True, missing=False, address=place)
    announcer.connection("a+b", connected=False, missing=True)
    announcer.connection("a+b", connected=True, missing=False, address="b")
    assert lines == [
        "worker w works for the broker at a",
        "worker w works for the broker at b",
        "no broker answers at a+b, worker w waits",
        "worker w works for the broker at b",
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
