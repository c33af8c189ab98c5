"""`taskyard up` and `taskyard down`: start, restart of processes, ordered stop."""

from __future__ import annotations

import os
import signal
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from taskyard.client.executor import Executor
from taskyard.client.internal import InternalClient
from tests.kit.processes import (
    PATIENCE_SECONDS,
    Broker,
    Running,
    Worker,
    all_children_of,
    is_alive,
    marking,
    marks,
    run,
    run_here,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The tests of `tests/web` start pages.
DETACHED = ("up", "--detach", "--page", "none")


@contextmanager
def up(directory: Path, *options: str) -> Iterator[tuple[Running, InternalClient]]:
    """Run `up` in the foreground of another process."""
    jobs = "2" if "--workers" in options else "1"
    with Running(directory, "up", "--page", "none", "-j", jobs, *options) as running:
        assert running.line() == f"listening native ipc://{directory}/.taskyard/broker.sock"
        with InternalClient(state=directory / ".taskyard") as client:
            yield running, client


def test_up_runs_until_it_is_interrupted(tmp_path: Path) -> None:
    allowed = ("--allow", "operator", "--allow-pickle")
    with up(tmp_path, "--workers", "2", *allowed) as (running, client):
        assert client.submit("operator:mul", args=[6, 7]).result(PATIENCE_SECONDS) == 42
        with Executor(state=tmp_path / ".taskyard") as executor:
            assert executor.submit(divmod, 7, 2).result(PATIENCE_SECONDS) == (3, 1)
        assert running.error_line().endswith(" info up: 2 workers started (Ctrl-C stops)")
        until(lambda: len(all_children_of(running)) == 3, "two workers and a broker")
        children = all_children_of(running)
        code, out, err = running.send(signal.SIGINT).end()
    assert (code, out) == (0, "")
    # A stop that takes longer than a second, as on a busy machine, prints a message.
    assert not err or err.endswith(" waiting for running tasks (Ctrl-C ends them)\n")
    assert not any(map(is_alive, children))
    assert not (tmp_path / ".taskyard" / "up.pid").exists()


def test_sigterm_lets_tasks_finish(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with up(tmp_path) as (running, client):
        client.submit(marking("a", "cat gate > /dev/null")["argv"], name="a", cwd=str(tmp_path))
        until(lambda: marks(tmp_path))
        running.send(signal.SIGTERM)
        (tmp_path / "gate").write_text("")
        assert running.end()[0] == 0
    with Broker(tmp_path), InternalClient(state=tmp_path / ".taskyard") as client:
        assert client.show("a")["state"] == "done"


def test_dead_processes_are_restarted(tmp_path: Path) -> None:
    with up(tmp_path) as (running, client):
        until(lambda: client.status()["workers"] == 1)
        for child in all_children_of(running):
            os.kill(child, signal.SIGKILL)
        assert client.submit(["echo", "again"]).result(60) == "again\n"
        code, _, err = running.terminate()
    assert code == 0
    assert "the broker died (killed by SIGKILL), restarting it" in err
    assert "worker local-1 died (killed by SIGKILL), restarting it" in err


def test_worker_that_lost_its_name_is_started_again_and_waits(tmp_path: Path) -> None:
    with up(tmp_path, "--workers", "1") as (_, client):
        until(lambda: bool(client.workers()), "its worker is there")
        first = client.workers()[0]["pid"]
        with Running(tmp_path, "worker", "--name", "local-1") as other:
            while "is held by another process" not in other.error_line():
                pass
            os.kill(first, signal.SIGSTOP)
            until(lambda: [one["pid"] for one in client.workers()] == [other.pid], "it took over")
            os.kill(first, signal.SIGCONT)
            until(lambda: not is_alive(first), "the replaced one ends")
            other.kill()
        assert client.submit(["echo", "hi"]).result(60) == "hi\n"
        assert client.workers()[0]["pid"] not in (first, other.pid)


def test_killed_it_takes_everything_with_it(tmp_path: Path) -> None:
    with up(tmp_path) as (running, client):
        client.submit(["sh", "-c", "echo $$ > pid; exec sleep 600"], cwd=str(tmp_path))
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        children = [*all_children_of(running), int((tmp_path / "pid").read_text())]
        running.kill()
        until(lambda: not any(map(is_alive, children)))


def test_detached_up_returns_when_ready_and_down_stops_it(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, *DETACHED, "--workers", "2", "-j", "2")
    try:
        assert (code, out) == (0, "")
        pid = int((tmp_path / ".taskyard" / "up.pid").read_text())
        assert err.startswith(f"up: 2 workers, process {pid}, log in .taskyard/log/up.log (")
        with InternalClient(state=tmp_path / ".taskyard") as client:
            assert client.status()["workers"] == 2
            assert client.submit(["echo", "hello"]).result(PATIENCE_SECONDS) == "hello\n"
        assert run(tmp_path, *DETACHED)[0] == 2
    finally:
        code, out, err = run_here(tmp_path, "down")
    assert (code, out, err) == (0, "", "stopped\n")
    until(lambda: not is_alive(pid))
    log = tmp_path / ".taskyard" / "log" / "up.log"
    assert "2 workers started" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_detached_up_reports_why_it_could_not_start(tmp_path: Path) -> None:
    with Broker(tmp_path) as running:
        code, _, err = run(tmp_path, *DETACHED)
    assert code == 2
    assert f"taskyard: state directory .taskyard: in use by process {running.pid}" in err


def test_down_waits_for_running_tasks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    with up(tmp_path) as (running, client):
        client.submit(marking("a", "cat gate > /dev/null")["argv"], name="a", cwd=str(tmp_path))
        client.submit(marking("b")["argv"], name="b", cwd=str(tmp_path))
        until(lambda: marks(tmp_path))
        with Running(tmp_path, "down") as stopping:
            assert stopping.error_line() == "waiting for 1 worker to finish 1 task"
            (tmp_path / "gate").write_text("")
            assert stopping.end() == (0, "", "stopped\n")
        assert running.end()[0] == 0
    assert marks(tmp_path) == ["a"]


def test_down_interrupts_tasks_after_the_timeout_and_reports_them(tmp_path: Path) -> None:
    with up(tmp_path) as (running, client):
        client.submit(marking("a", "exec sleep 600")["argv"], name="a", cwd=str(tmp_path))
        until(lambda: marks(tmp_path))
        code, _, err = run_here(tmp_path, "down", "--grace", "0.2s")
        assert running.end()[0] == 0
    assert code == 4
    assert err.splitlines()[-1] == (
        "taskyard: 1 task interrupted after 0.2 s, to run again after the next start: a"
    )
    with Broker(tmp_path), InternalClient(state=tmp_path / ".taskyard") as client:
        assert client.show("a")["state"] == "ready"


def test_down_stops_a_broker_and_workers_that_were_started_alone(tmp_path: Path) -> None:
    with Broker(tmp_path) as first, Worker(tmp_path) as second:
        assert run_here(tmp_path, "down") == (0, "", "stopped\n")
        assert (first.end()[0], second.end()[0]) == (0, 0)


def test_invalid_settings_do_not_stop_down_and_status_of_a_given_state(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        (tmp_path / "taskyard.toml").write_text("[broker]\nsate = 1\n")
        wrong = "unknown setting broker.sate (did you mean state?)"
        for verb in ("status", "down"):
            code, out, err = run_here(tmp_path, verb)
            assert (code, out, wrong in err) == (2, "", True)
        given = ("--state", ".taskyard")
        for verb in ("status", "down"):
            code, _, err = run_here(tmp_path, verb, *given, "--config", "taskyard.toml")
            assert (code, wrong in err) == (2, True)
        for verb in ("status", "list", "down"):
            code, _, err = run_here(tmp_path, verb, *given)
            assert code == 0
            assert f"taskyard: settings ignored: taskyard.toml:2: {wrong}\n" in err
        assert broker.end()[0] == 0
    code, out, err = run_here(tmp_path, "status", *given)  # offline
    assert (code, out[:7], "settings ignored" in err) == (0, "0 tasks", True)


def test_down_where_nothing_runs_exits_3(tmp_path: Path) -> None:
    code, out, err = run_here(tmp_path, "down")
    assert (code, out) == (3, "")
    assert "no broker is running on .taskyard" in err
