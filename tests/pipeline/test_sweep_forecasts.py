"""Forecasts beside real runs: a broker, its workers and tasks that sleep.

The history of each run is simulated with as many workers. Slow, so only with --whole.
"""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from tests.kit import processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: The most relative error of a forecast.
ERROR_MAX = 0.10

SETTINGS = """
[service.bulk]
match = "mail/host-0"
lane_workers_max = 2

[service.mail]
lane_rate = "1/s"

[service.api]
rate = "3/s"
workers_max = 2
"""


def sleeping(rng: random.Random, name: str, **more: object) -> dict[str, Any]:
    return {"name": name, "argv": ["sleep", f"{rng.uniform(0.3, 1.5):.3f}"], **more}


def flat(rng: random.Random) -> list[dict[str, Any]]:
    """Return independent tasks, of which some fail and are retried."""
    tasks = [sleeping(rng, f"flat-{number}") for number in range(150)]
    for task in tasks[::15]:
        task |= {"argv": ["sh", "-c", "sleep 0.5; exit 1"], "retries": 1, "backoff": "1s"}
    return tasks


def graph(rng: random.Random) -> list[dict[str, Any]]:
    """Return tasks that wait for up to two of the twenty before them."""
    tasks = [sleeping(rng, f"graph-{number}") for number in range(150)]
    for number, task in enumerate(tasks[20:], 20):
        before = {rng.randrange(number - 20, number) for _ in range(rng.randrange(3))}
        task["after"] = [f"graph-{one}" for one in sorted(before)]
    return tasks


def lanes(rng: random.Random) -> list[dict[str, Any]]:
    """Return lanes of different lengths under limits and rates, and tasks in the open lane."""
    mail = [
        sleeping(rng, f"mail-{number}", service="mail", lane=f"host-{rng.choice(range(12))}")
        for number in range(90)
    ]
    bulk = [sleeping(rng, f"bulk-{number}", service="mail", lane="host-0") for number in range(30)]
    api = [
        sleeping(rng, f"api-{number}", service="api", lane=f"key-{number % 4}")
        for number in range(30)
    ]
    return mail + bulk + api


class RealRun(Struct, frozen=True):
    """Tasks, the workers that run them, and the settings of the broker."""

    make: Callable[[random.Random], list[dict[str, Any]]]
    workers: int
    slots: int
    settings: str = ""

    def finish(self, directory: Path) -> int:
        """Run the tasks on workers that wait for them. Return the number of tasks."""
        (directory / "taskyard.toml").write_text(self.settings)
        tasks = self.make(random.Random(1))
        services = sorted({str(task.get("service", "exec")) for task in tasks})
        options = ["--slots", str(self.slots), *(f"--service={name}" for name in services)]
        with ExitStack() as stack:
            stack.enter_context(processes.Broker(directory))
            for number in range(self.workers):
                stack.enter_context(processes.Worker(directory, "--name", f"w{number}", *options))
            path = processes.campaign(directory, tasks)
            code, _, err = processes.run(directory, "run", path, "-q")
            assert code in (0, 1), err
        return len(tasks)


@pytest.mark.whole
@pytest.mark.parametrize(
    "real_run",
    [RealRun(flat, 8, 1), RealRun(graph, 4, 2), RealRun(lanes, 8, 1, SETTINGS)],
    ids=["flat", "graph", "lanes"],
)
def test_forecast_is_within_a_tenth_of_the_real_run(
    real_run: RealRun, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    count = real_run.finish(tmp_path)
    numbers = ("--workers", str(real_run.workers), "--slots", str(real_run.slots))
    code, out, err = processes.run(tmp_path, "pipeline", "sweep", *numbers, "--json", "-q")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    (point,), measured_ns = document["points"], document["measured_ns"]
    error = point["makespan_ns"] / measured_ns - 1
    record_property("measured", f"{measured_ns / SECOND_NS:.1f} s")
    record_property("errors", f"{error:+.1%} and {document['error']:+.1%}")
    assert (document["tasks"], point["unfinished"]) == (count, 0)
    assert abs(error) < ERROR_MAX
    assert abs(document["error"]) < ERROR_MAX
