"""`taskyard worker` as a process: stopped, killed, or without a broker."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.cli.entry import run as run_here
from taskyard.cli.entry import taskyard
from taskyard.client.internal import InternalClient
from taskyard.worker import wmp
from tests.kit.processes import (
    AT_THE_GATE,
    PATIENCE_SECONDS,
    Broker,
    Running,
    Worker,
    is_alive,
    marking,
    marks,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.worker.native_process import BrokerTarget


@pytest.fixture
def client(tmp_path: Path) -> Iterator[InternalClient]:
    """Return a client of a broker that runs during the test."""
    with Broker(tmp_path), InternalClient(state=tmp_path / ".taskyard") as connected:
        yield connected


@contextmanager
def attended(directory: Path) -> Iterator[tuple[Running, InternalClient]]:
    """Run a broker that may be killed. Return it with a client."""
    with Broker(directory) as running, InternalClient(state=directory / ".taskyard") as connected:
        yield running, connected


def submit_gated(client: InternalClient, directory: Path, *names: str) -> None:
    """Submit tasks that start and wait for a gate."""
    for name in names:
        client.submit(marking(name, AT_THE_GATE)["argv"], name=name, cwd=str(directory))
    until(lambda: len(marks(directory)) >= len(names))


def open_gate(directory: Path) -> None:
    (directory / "gate").write_text("")


def test_worker_finishes_running_tasks_on_sigterm_and_returns_the_rest(
    tmp_path: Path, client: InternalClient
) -> None:
    with Worker(tmp_path, "--slots", "1") as working:
        submit_gated(client, tmp_path, "slow")
        client.submit(["true"], name="next")
        working.send(signal.SIGTERM)
        assert "exits after 1 task (" in working.error_line()
        open_gate(tmp_path)
        assert working.end()[0] == 0
    assert client.wait_names(["slow"], 10)["slow"].name == "DONE"
    assert client.show("next")["state"] == "ready"
    assert client.status()["workers"] == 0


def test_worker_hands_out_the_resources_that_it_was_given(
    tmp_path: Path, client: InternalClient
) -> None:
    given = ("--cpus", "0.5", "--memory", "1G", "--gpus", "3,7", "--resource", "license=1")
    show = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES $TASKYARD_CPUS $TASKYARD_MEMORY"]
    with Worker(tmp_path, "--slots", "2", *given):
        needs: dict[str, Any] = {"cpus": 0.5, "memory": "512M", "resources": {"license": 1}}
        one = client.submit(show, name="one", gpus=1, **needs)
        two = client.submit(show, name="two", gpus=2, **needs)
        assert (one.result(), two.result()) == ("3 0.5 536870912\n", "3,7 0.5 536870912\n")
        client.submit(["true"], name="large", gpus=3)
        explained = client.explain("large")["sentence"]
        assert explained == "it is ready, but no worker has 3 gpus (the largest has 2)"
        (worker,) = client.workers()
    assert worker["resources"] == {"cpus": 0.5, "gpus": 2, "license": 1, "memory": 1 << 30}


def test_second_sigterm_kills_running_tasks_and_returns_them(
    tmp_path: Path, client: InternalClient
) -> None:
    with Worker(tmp_path, "--slots", "1") as working:
        submit_gated(client, tmp_path, "slow")
        working.send(signal.SIGTERM)
        assert "exits after" in working.error_line()
        working.send(signal.SIGTERM)
        assert working.end()[0] == 0
    task = client.show("slow")
    assert (task["state"], task["losses"], task["failures"]) == ("ready", 0, 0)


def test_tasks_of_a_killed_worker_go_to_another_within_the_lease(
    tmp_path: Path, client: InternalClient
) -> None:
    short = ("--slots", "1", "--heartbeat", "50ms", "--lease", "300ms")
    with Worker(tmp_path, *short) as doomed:
        submit_gated(client, tmp_path, "a")
        doomed.kill()
    with Worker(tmp_path, *short):
        until(lambda: marks(tmp_path) == ["a", "a"])
        open_gate(tmp_path)
        assert client.wait_names(["a"], 10)["a"].name == "DONE"
    assert client.show("a")["attempt"] == 2


def test_worker_of_the_same_name_takes_over_after_two_heartbeats(
    tmp_path: Path, client: InternalClient
) -> None:
    named = ("--slots", "1", "--name", "twin", "--lease", "1h")
    with Worker(tmp_path, *named) as doomed:
        submit_gated(client, tmp_path, "a")
        doomed.kill()
    with Worker(tmp_path, *named):
        until(lambda: marks(tmp_path) == ["a", "a"])
        open_gate(tmp_path)
        assert client.wait_names(["a"], 10)["a"].name == "DONE"


def test_task_that_runs_while_the_broker_is_killed_is_run_once(tmp_path: Path) -> None:
    with attended(tmp_path) as (first, client), Worker(tmp_path, "--slots", "2"):
        submit_gated(client, tmp_path, "a", "b")
        first.kill()
        open_gate(tmp_path)
        with Broker(tmp_path):
            states = client.wait_names(["a", "b"], 30)
            assert {state.name for state in states.values()} == {"DONE"}
    assert sorted(marks(tmp_path)) == ["a", "b"]


def test_worker_waits_for_a_broker_and_reports_it_once(tmp_path: Path) -> None:
    with Running(tmp_path, "worker", "--until-eof", "--slots", "1", "--name", "early") as waiting:
        assert waiting.error_line() == (
            f"no broker answers at ipc://{tmp_path}/.taskyard/broker.sock, worker early waits"
        )
        with Broker(tmp_path), InternalClient(state=tmp_path / ".taskyard") as client:
            assert client.submit(["echo", "hello"]).result(PATIENCE_SECONDS) == "hello\n"
            assert "worker early works for the broker" in waiting.error_line()
            assert waiting.terminate() == (0, "", "")


def test_worker_exits_at_once_with_its_tasks_when_stdin_is_closed(
    tmp_path: Path, client: InternalClient
) -> None:
    with Worker(tmp_path, "--slots", "1") as working:
        argv = ["sh", "-c", "echo $$ > pid; exec sleep 600"]
        client.submit(argv, name="long", cwd=str(tmp_path))
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        working.hang_up()
        assert working.end() == (0, "", "")
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_without_a_broker_to_report_to_it_leaves_after_the_lease(tmp_path: Path) -> None:
    short = ("--slots", "1", "--heartbeat", "50ms", "--lease", "500ms")
    with attended(tmp_path) as (first, client), Worker(tmp_path, *short) as working:
        submit_gated(client, tmp_path, "a")
        first.kill()
        working.send(signal.SIGTERM)
        open_gate(tmp_path)
        code, _, err = working.end()
        assert code == 0
        assert "without a broker to report to: 1 task will run again" in err
        client.close(0)


def test_worker_of_another_dialect_connects_as_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the settings file, and after --broker and --state."""
    found: list[list[str]] = []
    monkeypatch.setattr(wmp, "serve", lambda places, *_given, **_more: found.append(places))
    monkeypatch.chdir(tmp_path)
    settings = '[broker]\nurl = "tcp://127.0.0.1:3"\n[listen]\nwmp = "tcp://127.0.0.1:4"\n'
    (tmp_path / "taskyard.toml").write_text(settings)
    words = ["worker", "--dialect", "wmp"]
    assert run_here(taskyard, words) == 0
    monkeypatch.setenv("TASKYARD_BROKER", "tcp://127.0.0.1:1,tcp://127.0.0.1:2")
    for more in ((), ("--broker", "tcp://127.0.0.1:5"), ("--state", "there")):
        assert run_here(taskyard, [*words, *more]) == 0
    file = ["tcp://127.0.0.1:4"]
    both = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    assert found == [file, both, ["tcp://127.0.0.1:5"], file]
    assert run_here(taskyard, ["worker", "--dialect", "ping-pong"]) == 2
    assert "TASKYARD_BROKER: a ping-pong worker has one broker" in capsys.readouterr().err


def test_agent_offers_the_services_of_the_settings_or_that_of_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[bytes, ...]] = []

    def serve(brokers: list[BrokerTarget], *_given: object, **_more: object) -> None:
        found.extend(broker.settings.services for broker in brokers)

    monkeypatch.setattr("taskyard.cli.worker.serve", serve)
    monkeypatch.chdir(tmp_path)
    words = ["worker", "--state", "there", "--agent", "cat"]
    assert run_here(taskyard, words) == 0
    assert run_here(taskyard, [*words, "--service", "mail"]) == 0
    (tmp_path / "taskyard.toml").write_text('[worker]\nservices = ["fetch"]\n')
    assert run_here(taskyard, words) == 0
    assert found == [(b"default",), (b"mail",), (b"fetch",)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--dialect", "smtp"], "unknown dialect 'smtp'"),
        (
            ["--dialect", "wmp", "--key", "a", "--key", "b"],
            "2 keys, but 1 broker over TCP (give --key for each of them, in the same order)",
        ),
        (
            ["--dialect", "ping-pong", "--broker", "ipc://a", "--broker", "ipc://b"],
            "worker has one broker",
        ),
        (["--command", "'"], "No closing quotation"),
        (["--agent", "nothing-such", "--service", "s"], "program 'nothing-such' not found"),
        (["--agent", "cat", "--service", "s", "--dialect", "wmp"], "--agent needs --dialect"),
        (["--agent", "cat", "--service", "s", "--command", "cat"], "--agent and --command"),
        (
            ["--heartbeat", "1s", "--lease", "2s"],
            "--lease must be at least three times --heartbeat",
        ),
        (["--heartbeat", "soon"], "must be a duration"),
        (["--slots", "0"], "--slots: must be from 1 to 100000, not 0"),
        (["--gpus", "-1"], "must be a number from 0 to 10000, or a list of ids"),
        (["--gpus", "1,1"], "must not have an id twice"),
        (["--memory", "much"], "must be a size"),
        (["--resource", "license"], 'has "license", which must be a number'),
        (["--resource", "gpus=1"], 'must not have "gpus"'),
        (["--cpus", "1", "--dialect", "wmp"], "--cpus: needs --dialect dwork, not wmp"),
    ],
)
def test_wrong_option_is_one_line_and_exit_2(
    options: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here(taskyard, ["worker", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err


def test_function_of_a_module_that_is_not_allowed_is_refused_with_a_hint(
    tmp_path: Path, client: InternalClient
) -> None:
    with Worker(tmp_path, "--slots", "1", "--allow", "operator"):
        assert client.submit("operator:add", args=[1, 2]).result(PATIENCE_SECONDS) == 3
        failed = client.submit("os:getpid").exception(30)
        assert "start the worker with --allow os" in str(failed)
