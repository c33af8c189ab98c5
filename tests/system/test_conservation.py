"""Real workers that are killed: no task waits beside a free slot, and poison fails alone."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.client.client import Client
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The lease: a killed worker loses its tasks after this time.
LEASE = ("--heartbeat", "500ms", "--lease", "2s")


class Yard:
    """A broker, a client, and workers that are killed and replaced."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._stack = stack
        stack.enter_context(Broker(directory, stderr=None))
        self.client = stack.enter_context(Client(state=directory / ".taskyard"))

    def start(self, slots: int) -> Running:
        worker = Running(self.directory, "worker", "--slots", str(slots), *LEASE, stderr=None)
        return self._stack.enter_context(worker)

    def wait_for(self, name: str) -> Path:
        """Return the file that the task of this name creates when it runs."""
        return self.directory / f"{name} runs"

    def submit_long(self, name: str, **terms: Any) -> None:
        """Submit a task that runs until the file `free` exists."""
        here, free = self.wait_for(name), self.directory / "free"
        words = f"touch '{here}'; while [ ! -e {free} ]; do sleep 0.05; done"
        self.client.submit(["sh", "-c", words], name=name, **terms)

    def counts(self) -> dict[str, int]:
        """Return the number of tasks in each state that has any."""
        counts: dict[str, int] = self.client.status()["counts"]
        return {state: count for state, count in counts.items() if count}


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    with ExitStack() as stack:
        yield Yard(tmp_path, stack)


def test_killed_worker_starves_no_other(yard: Yard) -> None:
    workers = [yard.start(4), yard.start(4)]
    names = [f"long{number}" for number in range(4)]
    for name in names:
        yard.submit_long(name)
    until(lambda: all(yard.wait_for(name).exists() for name in names), "all four run")
    workers[0].kill()
    yard.start(4)
    assert yard.client.submit(["echo", "hi"], name="hi").result(PATIENCE_SECONDS) == "hi\n"
    until(lambda: yard.counts() == {"leased": 4, "done": 1}, "nothing is ready")
    (yard.directory / "free").touch()


def test_wide_task_is_not_starved_by_small_ones(yard: Yard) -> None:
    yard.start(2)
    yard.submit_long("small")
    until(yard.wait_for("small").exists, "the small one runs")
    wide = yard.client.submit(["echo", "wide"], name="wide", slots=2)
    more = [yard.client.submit(["true"], name=f"more{number}") for number in range(20)]
    until(lambda: "is reserved for it" in yard.client.why("wide"), "it is reserved")
    (yard.directory / "free").touch()
    assert wide.result(PATIENCE_SECONDS) == "wide\n"
    for one in more:
        one.result(PATIENCE_SECONDS)


def test_poisonous_task_fails_alone(yard: Yard) -> None:
    poison = yard.client.submit(["sh", "-c", "sleep 0.1; kill -9 $PPID"], name="poison")
    tasks = [yard.client.submit(["sleep", "0.2"], name=f"t{number}") for number in range(15)]
    worker = yard.start(16)
    while not poison.done():
        if worker.process.poll() is not None:
            worker = yard.start(16)
        time.sleep(0.05)  # a client gets no event for the end of a process
    for task in tasks:
        task.result(60)
    assert "lost 5 workers" in str(poison.exception())
    assert yard.counts() == {"done": 15, "failed": 1}
