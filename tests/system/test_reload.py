"""Settings of services with real processes: applied, changed while tasks run, never in part."""

from __future__ import annotations

import os
import pty
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from taskyard.client.internal import InternalClient
from taskyard.core.states import TaskState
from tests.kit.processes import (
    PATIENCE_SECONDS,
    TASKYARD,
    Broker,
    Running,
    Worker,
    environment,
    is_alive,
    marks,
    run_here,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Runs until the file `go` exists.
WAITING: Final = "while ! test -e go; do sleep 0.02; done"


def settings(directory: Path, *lines: str) -> None:
    """Return settings of the service, followed by others."""
    (directory / "taskyard.toml").write_text("\n".join(["[service.exec]", *lines, ""]))


class Yard:
    """A broker, a worker with many slots, and a client."""

    def __init__(
        self, directory: Path, broker: Broker, worker: Running, client: InternalClient
    ) -> None:
        self.directory, self.broker, self.worker, self.client = directory, broker, worker, client

    def submit(self, *names: str, script: str = WAITING) -> None:
        """Submit one task per lane."""
        for name in names:
            argv = ["sh", "-c", f"echo {name} >> marks; {script}"]
            self.client.submit(argv, name=name, lane=name, cwd=str(self.directory))

    def leased(self) -> int:
        return int(self.client.status()["counts"]["leased"])

    def tasks(self) -> dict[str, Any]:
        return {one["name"]: one for one in self.client.tasks()}

    def hang_up(self) -> str:
        """Send SIGHUP. Return the line that the broker logs, without its time."""
        self.broker.send(signal.SIGHUP)
        return self.broker.error_line().partition(" ")[2]

    def lane(self, name: str) -> dict[str, Any]:
        (found,) = self.client.lanes("exec", name)
        return found

    def finish(self) -> None:
        (self.directory / "go").touch()
        names = [*self.tasks()]
        states = self.client.wait_names(names, PATIENCE_SECONDS)
        assert states == dict.fromkeys(names, TaskState.DONE)


@contextmanager
def yard_of(directory: Path, *lines: str) -> Iterator[Yard]:
    settings(directory, *lines)
    with (
        Broker(directory) as broker,
        Worker(directory, "--slots", "10") as worker,
        InternalClient(state=directory / ".taskyard") as client,
    ):
        yield Yard(directory, broker, worker, client)


def test_changed_limit_applies_to_waiting_and_running_tasks(tmp_path: Path) -> None:
    with yard_of(tmp_path, "workers_max = 1") as yard:
        yard.submit("a", "b", "c", "d", "e")
        until(lambda: marks(tmp_path))
        first = yard.tasks()["a"]
        assert yard.leased() == 1
        assert yard.lane("b")["reason"] == "service-limit"

        settings(tmp_path, "workers_max = 3")
        assert yard.hang_up() == (
            "warning broker: settings reloaded: applied service.exec.workers_max 1 → 3"
        )
        until(lambda: yard.leased() == 3)

        settings(tmp_path, "workers_max = 1")
        yard.hang_up()
        assert yard.leased() == 3  # no worker loses a task
        assert yard.tasks()["a"] == first  # the same lease
        assert yard.lane("d")["reason"] == "service-limit"
        yard.finish()
        assert {one["attempt"] for one in yard.tasks().values()} == {1}
        assert is_alive(yard.broker.pid)
        assert is_alive(yard.worker.pid)
        assert sorted(marks(tmp_path)) == ["a", "b", "c", "d", "e"]


def test_bad_file_leaves_the_rules_as_they_were(tmp_path: Path) -> None:
    with yard_of(tmp_path, "workers_max = 1") as yard:
        yard.submit("a", "b", "c")
        until(lambda: marks(tmp_path))
        for lines, expected in (
            (["workers_max = 3", "retires = 2"], "taskyard.toml:3: unknown setting"),
            (["workers_max = "], "taskyard.toml:2: invalid TOML"),
        ):
            settings(tmp_path, *lines)
            output = yard.hang_up()
            assert output.startswith("warning broker: settings not reloaded: ")
            assert expected in output
        (tmp_path / "taskyard.toml").unlink()
        assert "No such file" in yard.hang_up()
        assert yard.lane("c")["reason"] == "service-limit"
        assert yard.leased() == 1
        settings(tmp_path, "workers_max = 2")
        yard.hang_up()
        until(lambda: yard.leased() == 2)
        yard.finish()


def test_settings_for_the_next_start_are_named_and_open_no_listener(tmp_path: Path) -> None:
    with yard_of(tmp_path) as yard:
        settings(tmp_path, "[listen]", 'dwork = "tcp://127.0.0.1:0"', "[lease]", 'expire = "1m"')
        assert yard.hang_up() == (
            "warning broker: settings reloaded: restart needed for listen.dwork, lease.expire"
        )
        assert yard.hang_up() == "warning broker: settings reloaded: no changes"
        assert yard.broker.terminate() == (0, "", "")


def test_rate_is_kept_until_it_is_taken_away(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(6)]
    with yard_of(tmp_path, 'rate = "4/s"') as yard:
        began = time.monotonic()
        yard.submit(*names, script="true")
        yard.client.wait_names(names, PATIENCE_SECONDS)
        assert time.monotonic() - began > 0.8  # five more at four per second, minus the saved ones
        settings(tmp_path, 'rate = "1/h"')
        yard.hang_up()
        yard.submit("next", "late", script="true")
        until(lambda: "rate-limit" in [one["reason"] for one in yard.client.lanes()])
        settings(tmp_path, 'lane_rate = "1/h"', "weight = 3")
        yard.hang_up()
        for name in ("x1", "x2"):
            yard.client.submit(["true"], name=name, lane="x")
        yard.client.wait_names(["late", "x1"], PATIENCE_SECONDS)  # lanes of their own
        lane = yard.lane("x")
        assert (lane["reason"], lane["lane_rate"], lane["weight"]) == ("lane-rate-limit", "1/h", 3)
        code, out, _ = run_here(tmp_path, "why", "x2")
        assert code == 0
        assert "its lane's rate limit is reached: 1/h, next in " in out
        settings(tmp_path)
        yard.hang_up()
        yard.finish()


def test_held_lane_starts_on_request_or_when_its_hold_is_lifted(tmp_path: Path) -> None:
    with yard_of(tmp_path, "hold = true") as yard:
        yard.submit("a", "b", script="true")
        assert yard.lane("a")["reason"] == "held"
        code, out, _ = run_here(tmp_path, "why", "a")
        assert code == 0
        assert "retry --service exec --lane a" in out
        assert run_here(tmp_path, "retry", "--lane", "a")[:2] == (0, "retried 1 task\n")
        yard.client.wait_names(["a"], PATIENCE_SECONDS)
        assert yard.tasks()["b"]["state"] == "ready"
        yard.client.submit(["true"], name="again", lane="a")
        until(lambda: "again" in yard.tasks())
        assert yard.lane("a")["reason"] == "held"
        settings(tmp_path)
        yard.hang_up()
        yard.finish()


def test_up_forwards_sighup_to_its_broker(tmp_path: Path) -> None:
    settings(tmp_path, "workers_max = 1")
    with Running(tmp_path, "up", "--page", "none", "--workers", "0") as up:
        assert up.line().startswith("listening native ")
        assert "0 workers started" in up.error_line()
        settings(tmp_path, "workers_max = 2")
        code, _, err = run_here(tmp_path, "config", "--reload")
        assert (code, f"(process {up.pid})" in err) == (0, True)
        assert up.error_line().endswith("applied service.exec.workers_max 1 → 2")
        up.send(signal.SIGHUP)
        assert up.error_line().endswith("settings reloaded: no changes")
        settings(tmp_path, "workers_max = two")
        assert run_here(tmp_path, "config", "--reload")[0] == 2
        assert up.terminate()[0] == 0
    settings(tmp_path)
    assert run_here(tmp_path, "config", "--reload")[0] == 3


@pytest.mark.parametrize("words", [["broker"], ["up", "--page", "none", "--workers", "0"]])
def test_closed_terminal_ends_its_programs(words: list[str], tmp_path: Path) -> None:
    """It sends the same signal."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execve(TASKYARD[0], [*TASKYARD, *words], environment())  # noqa: S606  # ours
    ended = 0
    try:
        output = b""
        while b"listening native" not in output:
            output += os.read(terminal, 4096)
        os.close(terminal)
        until(lambda: os.waitpid(pid, os.WNOHANG)[0])
        ended = pid
    finally:
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    code, _, err = run_here(tmp_path, "status")
    assert (code, "showing its last state" in err) == (0, True)
