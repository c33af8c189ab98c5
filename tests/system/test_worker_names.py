"""Real workers with one name: none fails the other's tasks, and a replaced one is refused."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.client.internal import InternalClient
from taskyard.errors import TaskFailed
from tests.kit.processes import Broker, Running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Yard:
    """A broker, a client, and workers that are all named `same`."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._stack = stack
        self.broker = stack.enter_context(Broker(directory, stderr=None))
        self.client = stack.enter_context(InternalClient(state=directory / ".taskyard"))

    def hire(self, heartbeat: str = "1s") -> Running:
        words = ("worker", "--name", "same", "--slots", "2")
        worker = Running(self.directory, *words, "--heartbeat", heartbeat, "--lease", "60s")
        return self._stack.enter_context(worker)

    def hold(self) -> Running:
        """Start a worker that holds the name."""
        worker = self.hire()
        until(lambda: bool(self.client.workers()), "a worker holds the name")
        return worker

    def wait_for_name(self) -> Running:
        """Start a second worker, which waits for the name."""
        worker = self.hire()
        while "is held by another process" not in worker.error_line():
            pass
        return worker

    def task(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.show(name)
        return found


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with ExitStack() as stack:
        yield Yard(tmp_path, stack)


def test_two_workers_with_one_name_finish_four_healthy_tasks(yard: Yard) -> None:
    tasks = [yard.client.submit(["sleep", "2"], name=f"t{number}") for number in range(4)]
    for _ in range(2):
        yard.hire(heartbeat="5s")  # a busy machine makes no worker miss two of these
    for task in tasks:
        task.result(60)
    views = [yard.task(task.name) for task in tasks]
    assert [(view["state"], view["attempt"]) for view in views] == [("done", 1)] * 4


def test_newcomer_takes_over_from_a_killed_holder(yard: Yard) -> None:
    holder = yard.hold()
    newcomer = yard.wait_for_name()
    until_free, begun = yard.directory / "free", yard.directory / "begun"
    words = f"echo $PPID >> {begun}; while [ ! -e {until_free} ]; do sleep 0.05; done"
    task = yard.client.submit(["sh", "-c", words], name="long")
    until(lambda: begun.exists() and begun.read_text(), "the task runs")
    holder.kill()
    until(lambda: len(begun.read_text().split()) == 2, "the task runs again")
    assert begun.read_text().split()[1] == str(newcomer.pid)
    view = yard.task("long")
    assert (view["attempt"], view["losses"]) == (2, 1)
    until_free.touch()
    task.result(60)


def test_holder_that_was_stopped_and_replaced_exits_2_and_its_charge_is_refunded(
    yard: Yard,
) -> None:
    holder = yard.hold()
    yard.wait_for_name()
    until_free, begun = yard.directory / "free", yard.directory / "begun"
    words = f"echo >> {begun}; while [ ! -e {until_free} ]; do sleep 0.05; done"
    task = yard.client.submit(["sh", "-c", words], name="long")
    until(lambda: begun.exists() and begun.read_text(), "the task runs")
    os.kill(holder.pid, signal.SIGSTOP)
    until(lambda: len(begun.read_text()) == 2, "the task runs again")
    assert yard.task("long")["losses"] == 1
    os.kill(holder.pid, signal.SIGCONT)
    code, _, err = holder.end()
    assert code == 2
    assert "worker name 'same' was taken over by another process while this one was silent" in err
    assert yard.task("long")["losses"] == 0
    until_free.touch()
    task.result(60)


def test_task_that_kills_its_worker_fails_under_up(tmp_path: Path) -> None:
    words = ("up", "--page", "none", "--workers", "1", "-j", "2")
    with Running(tmp_path, *words) as running:
        assert "1 worker started" in running.error_line()
        with InternalClient(state=tmp_path / ".taskyard") as client:
            poison = client.submit(["sh", "-c", "kill -9 $PPID; sleep 60"], name="poison")
            with pytest.raises(TaskFailed, match="lost 5 workers"):
                poison.result(120)
            assert client.show("poison")["attempt"] == 5
        assert running.terminate()[0] == 0
