"""Restart policies, incarnation numbers, and children that a supervisor restarts and stops."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard.core.resources import UNIT
from taskyard.errors import ExitCode
from taskyard.process import cluster, supervisor
from taskyard.process.machine import Machine
from taskyard.process.supervisor import (
    BROKER_POLICY,
    NAME_REFUSAL_SECONDS,
    WORKER_POLICY,
    ManagedProcess,
    RestartPolicy,
    Supervisor,
    WorkerSpec,
    incarnation_options,
)
from tests.kit.processes import PATIENCE_SECONDS, is_alive, until

if TYPE_CHECKING:
    from collections.abc import Callable

    #: Makes a managed process of Python code, and collects its log lines.
    Maker = Callable[[str, RestartPolicy], tuple[ManagedProcess, list[str]]]

UNTIL_EOF = "import sys; sys.stdin.read()"


def test_every_start_of_a_worker_has_the_next_number_and_replaces_all_before_it() -> None:
    incarnations = incarnation_options()
    starts = [next(incarnations) for _ in range(3)]
    first = int(starts[0][1])
    assert starts == [
        ("--incarnation", str(first + number), "--replaces", str(first)) for number in range(3)
    ]


def test_worker_that_owns_its_name_replaces_those_of_earlier_supervisors() -> None:
    earlier, later = (next(incarnation_options(owns_name=True)) for _ in range(2))
    assert int(later[3]) <= int(earlier[1]) < int(later[1])


def test_two_workers_have_different_numbers() -> None:
    assert next(incarnation_options()) != next(incarnation_options())


def test_page_that_ends_for_good_is_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as bound:
        supervisor = Supervisor(tmp_path, lines.append)  # there is no state
        supervisor.start_page(bound.fileno(), b"secret")
        assert supervisor.page is not None
        assert supervisor.page.ended.wait(PATIENCE_SECONDS)
        supervisor.page.join()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(bound.getsockname())
    assert lines == ["the page ended (exit status 2), not restarting it (tasks go on without it)"]


def test_worker_spec_becomes_options() -> None:
    worker_spec = WorkerSpec(1, 3, ("a", "b"), ("s",), allow_pickle=True)
    arguments = worker_spec.arguments(Path("state"), "w", 1)
    assert arguments[:5] == ["worker", "--state", "state", "--name", "w"]
    assert arguments[5:] == [
        *("--quiet", "--until-eof", "--slots", "3", "--allow", "a", "--allow", "b"),
        *("--service", "s", "--allow-pickle"),
    ]


def test_workers_get_their_shares_as_options() -> None:
    machine = Machine(2 * UNIT + 1, 999, ("0", "GPU-1", "2"), ((b"license", 3 * UNIT + 1),))
    worker_spec = WorkerSpec(2, machine=machine)
    shares = [worker_spec.arguments(Path("state"), "w", number)[7:] for number in (1, 2)]
    assert shares == [
        [
            *("--cpus", "1", "--memory", "499", "--gpus", "0,2,"),
            *("--resource", "license=2.0001"),
        ],
        [*("--cpus", "1", "--memory", "499", "--gpus", "GPU-1,"), *("--resource", "license=1")],
    ]
    one = WorkerSpec(2, machine=Machine(others=((b"license", UNIT),)))
    none_left = one.arguments(Path("state"), "w", 2)[-2:]
    assert none_left == ["--resource", "license=0"]  # or the settings would give it one
    alone = WorkerSpec(3, machine=Machine(UNIT, 30)).arguments(Path("state"), "w", 3)[7:]
    assert alone == ["--cpus", "0.3333", "--memory", "10", "--gpus", "0"]
    assert "--memory" in WorkerSpec(2).arguments(Path("state"), "w", 2)


@pytest.mark.parametrize(
    ("policy", "status", "seconds", "is_final"),
    [
        (BROKER_POLICY, ExitCode.OK, 100.0, True),
        (BROKER_POLICY, ExitCode.STATE_DAMAGED, 100.0, True),
        (BROKER_POLICY, -signal.SIGKILL, 0.0, False),
        (WORKER_POLICY, ExitCode.OK, 100.0, True),
        (WORKER_POLICY, ExitCode.USAGE, 0.0, True),
        (WORKER_POLICY, ExitCode.USAGE, NAME_REFUSAL_SECONDS + 1, False),
        (WORKER_POLICY, -signal.SIGKILL, 0.0, False),
        (cluster.BROKER_POLICY, -signal.SIGKILL, 100.0, True),
        (cluster.WORKER_POLICY, ExitCode.OK, 0.0, False),
        (cluster.WORKER_POLICY, ExitCode.USAGE, 0.0, False),
    ],
)
def test_policy_decides_by_status_and_run_time(
    policy: RestartPolicy, status: int, seconds: float, *, is_final: bool
) -> None:
    assert policy.is_final(status, seconds, early_exits=1) is is_final


def test_policy_limits_early_exits() -> None:
    exits = range(1, 7)
    final = [cluster.WORKER_POLICY.is_final(1, 0.0, early_exits) for early_exits in exits]
    assert final == [False, False, False, False, True, True]
    assert not BROKER_POLICY.is_final(1, 0.0, early_exits=1_000_000)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Maker:
    monkeypatch.setattr(supervisor, "taskyard_command", lambda code: [sys.executable, "-c", *code])

    def managed(code: str, policy: RestartPolicy) -> tuple[ManagedProcess, list[str]]:
        lines: list[str] = []
        return ManagedProcess("it", [code], policy, lines.append, is_worker=False), lines

    return managed


def test_child_that_dies_early_is_restarted_up_to_the_limit(make: Maker) -> None:
    policy = RestartPolicy(early_exits_max=3, delay_seconds_max=0.01)
    managed, lines = make("raise SystemExit(7)", policy)
    ended = threading.Event()
    managed.on_end = ended.set
    managed.start()
    assert ended.wait(PATIENCE_SECONDS)
    assert managed.ended.is_set()
    assert (managed.status, managed.early_exits) == (7, 3)
    assert lines == ["it died (exit status 7), restarting it"] * 2


@pytest.mark.parametrize("status", [2, 7])
def test_child_that_exits_with_a_final_status_stays_ended(make: Maker, status: int) -> None:
    managed, lines = make(f"raise SystemExit({status})", BROKER_POLICY)
    managed.start()
    assert managed.ended.wait(PATIENCE_SECONDS)
    assert (managed.status, lines) == (status, [])


def test_killed_child_is_replaced_by_another_process(make: Maker) -> None:
    managed, _ = make(UNTIL_EOF, BROKER_POLICY)
    managed.start()
    first = managed.pid
    managed.signal(signal.SIGKILL)
    until(lambda: managed.pid != first, "another process")
    managed.kill()
    assert managed.ended.is_set()
    assert managed.pid is not None
    assert not is_alive(managed.pid)


def test_stopped_child_is_not_restarted(make: Maker) -> None:
    managed, lines = make(UNTIL_EOF, BROKER_POLICY)
    managed.start()
    managed.stop()
    assert managed.ended.wait(PATIENCE_SECONDS)
    managed.join()
    assert (managed.status, lines) == (-signal.SIGTERM, [])


def test_child_that_ignores_the_end_of_stdin_is_killed(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "KILL_SECONDS", 0.1)
    managed, _ = make("import signal; signal.pause()", BROKER_POLICY)
    managed.start()
    managed.kill()
    assert managed.ended.wait(PATIENCE_SECONDS)
    assert managed.status == -signal.SIGKILL
