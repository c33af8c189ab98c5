"""A broker as a worker of another one, as processes that are killed."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from taskyard.client.client import Client
from tests.kit.processes import Worker, marks, until
from tests.system.kit import Broker

if TYPE_CHECKING:
    from pathlib import Path

TASKS = 60
SLOW = 12


def _have_run(directory: Path, number: int) -> bool:
    return len(marks(directory)) >= number


def test_forwarder_and_lower_broker_are_killed_and_every_task_runs_once(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    script = 'echo $1 >> "$2/marks"; sleep $3; echo out $1; echo err $1 >&2; test $1 -ne 7'
    with ExitStack() as stack:
        for directory in (upper, lower):
            directory.mkdir()
        above, below = (stack.enter_context(Broker(one)) for one in (upper, lower))
        stack.enter_context(Worker(lower, "--slots", "4"))
        client = stack.enter_context(Client(above.endpoint))
        options = [
            *("--forward-to", ".taskyard", "--slots", "20", "--name", "to-cluster"),
            *("--heartbeat", "200ms", "--lease", "1s", "--broker", above.endpoint),
        ]
        forwarder = stack.enter_context(Worker(lower, *options))
        futures = [
            client.submit(
                ["sh", "-c", script, "sh", str(one), str(tmp_path), "0.3" if one < SLOW else "0"],
                name=f"t{one}",
                campaign="c",
                retries=[0] if one == 7 else [],
            )
            for one in range(TASKS)
        ]
        for number in (SLOW // 3, SLOW):
            until(partial(_have_run, tmp_path, number), "tasks run")
            forwarder.kill()
            if number == SLOW:
                below.kill()
                below = stack.enter_context(Broker(lower))
            forwarder = stack.enter_context(Worker(lower, *options))
        for one, future in enumerate(futures):
            if one == 7:
                assert "exit status 1: err 7" in str(future.exception(100))
                continue
            assert future.result(100) == f"out {one}\n"
            assert client.stream(f"c/t{one}", stderr=True) == f"err {one}\n".encode()
        shown = client.show("c/t0")
        assert shown["attempts"][-1]["exit_status"] == 0
        assert "forwarded to ipc://" in client.why("c/t0")
        forwarder.kill()
    ran = Counter(marks(tmp_path))
    # Retried once. If the forwarder was lost before it reported the failure, once more.
    assert ran.pop("7") in (2, 3)
    assert ran == dict.fromkeys(map(str, {*range(TASKS)} - {7}), 1)
