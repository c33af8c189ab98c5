"""Workers that die, hang or return: their tasks are reassigned, and each is done once."""

from __future__ import annotations

import random
import signal
import subprocess
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from taskyard.client.internal import InternalClient
from tests.kit.processes import Running, until
from tests.system.kit import Broker, count

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 8
TASKS = 150


def worker(broker: Broker, directory: Path, name: str, slots: int) -> Running:
    words = ("worker", "--broker", broker.endpoint, "--name", name, "--slots", str(slots))
    short = ("--heartbeat", "200ms", "--lease", "2s")
    return Running(directory, *words, *short, stderr=subprocess.DEVNULL)


def test_workers_killed_at_random_lose_and_double_nothing(tmp_path: Path) -> None:
    luck = random.Random(5)
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path))
        client = stack.enter_context(InternalClient(broker.endpoint))
        names = (f"worker-{number}" for number in range(100))
        workers = [stack.enter_context(worker(broker, tmp_path, next(names), 3)) for _ in range(3)]
        futures = [client.submit(["sleep", "0.1"], campaign="c") for _ in range(TASKS)]
        for kill in range(1, KILLS + 1):
            goal = kill * TASKS // (KILLS + 2)
            until(partial(_are_done, client, goal), f"{goal} tasks done")
            place = luck.randrange(len(workers))
            workers[place].kill()
            new = worker(broker, tmp_path, next(names), 3)
            workers[place] = stack.enter_context(new)
        client.wait_campaign("c", 60)
        assert all(future.exception(10) is None for future in futures)
        assert broker.terminate()[0] == 0
    tally, submitted = count(tmp_path)
    assert (tally.submitted, tally.done, tally.completed_twice) == (TASKS, TASKS, 0)
    assert tally.leases > tally.done  # some were lost with their workers, and reassigned
    assert len(submitted) == TASKS


def test_worker_stopped_past_its_lease_is_too_late(tmp_path: Path) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path))
        client = stack.enter_context(InternalClient(broker.endpoint))
        first = stack.enter_context(worker(broker, tmp_path, "first", 1))
        marks = tmp_path / "marks"
        # The child ends while its worker can't report it.
        script = f"echo $TASKYARD_ATTEMPT >> {marks}; sleep 0.5"
        client.submit(["sh", "-c", script], name="slow")
        until(lambda: marks.exists() and marks.read_text() == "1\n", "the first attempt runs")
        first.send(signal.SIGSTOP)
        try:
            stack.enter_context(worker(broker, tmp_path, "second", 1))
            assert client.wait_names(["slow"], 30)
        finally:
            first.send(signal.SIGCONT)
        until(lambda: len(client.workers()) == 2, "the first worker is back")
        assert marks.read_text() == "1\n2\n"
        assert broker.terminate()[0] == 0
    tally, _ = count(tmp_path)
    assert (tally.done, tally.completed_twice, tally.leases) == (1, 0, 2)


def _are_done(client: InternalClient, goal: int) -> bool:
    return bool(client.status()["counts"]["done"] >= goal)
