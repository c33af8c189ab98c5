"""`taskyard broker` as a process: output, refusals and exit."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from taskyard.cli.entry import run as run_here
from taskyard.cli.entry import taskyard
from taskyard.client.internal import InternalClient
from tests.kit.processes import Broker, Running, Worker, marking, marks, run, until

if TYPE_CHECKING:
    from pathlib import Path


def test_broker_prints_its_endpoints_and_is_reachable_there(tmp_path: Path) -> None:
    with Running(tmp_path, "broker", "--listen", "dwork=tcp://127.0.0.1:0") as running:
        native, dwork = running.line(), running.line()
        assert native == f"listening native ipc://{tmp_path}/.taskyard/broker.sock"
        assert dwork.startswith("listening dwork tcp://127.0.0.1:")
        for line in (native, dwork):
            with InternalClient(line.split()[2]) as client:
                assert client.status()["workers"] == 0
        assert running.terminate() == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with Broker(tmp_path) as running:
        assert running.send(number).end() == (0, "", "")
    assert not (tmp_path / ".taskyard" / "broker.sock").exists()


def test_it_ends_with_the_stdin_that_it_was_given(tmp_path: Path) -> None:
    with Broker(tmp_path) as running:
        running.hang_up()
        assert running.end() == (0, "", "")


def test_second_broker_on_the_same_state_is_refused(tmp_path: Path) -> None:
    with Broker(tmp_path) as first:
        code, out, err = run(tmp_path, "broker")
        assert (code, out) == (2, "")
        assert err == (
            f"taskyard: state directory .taskyard: in use by process {first.pid} "
            "(stop it, or use another --state)\n"
        )


def test_damaged_state_is_refused_with_its_exit_code(tmp_path: Path) -> None:
    with Broker(tmp_path), InternalClient(state=tmp_path / ".taskyard") as client:
        client.submit(["true"], name="a")
    journal = tmp_path / ".taskyard" / "journal.sqlite"
    journal.write_bytes(b"no journal" * 1000)
    code, out, err = run(tmp_path, "broker")
    assert (code, out) == (6, "")
    assert "journal.sqlite" in err


def test_acknowledged_tasks_survive_a_kill(tmp_path: Path) -> None:
    with Broker(tmp_path) as running, InternalClient(state=tmp_path / ".taskyard") as client:
        client.submit(["true"], name="kept", campaign="c")
        client.show("c/kept")
        running.kill()
    with Broker(tmp_path), InternalClient(state=tmp_path / ".taskyard") as client:
        assert client.show("c/kept")["state"] == "ready"


def test_in_memory_nothing_survives(tmp_path: Path) -> None:
    with Broker(tmp_path, "--in-memory"), InternalClient(state=tmp_path / ".taskyard") as client:
        client.submit(["true"], name="lost")
    assert not (tmp_path / ".taskyard" / "journal.sqlite").exists()


@pytest.mark.parametrize(
    ("listen", "reason"),
    [
        (
            "ping-pong=tcp://127.0.0.1:0",
            "(ping-pong=BACKEND,FRONTEND)",
        ),
        ("wmp=tcp://127.0.0.1:0,tcp://127.0.0.1:0", "wmp: expected one endpoint, got 2"),
        ("wmp=tcp://0.0.0.0:0", "a remote endpoint requires keys, and .taskyard has no valid key"),
        ("smtp=tcp://127.0.0.1:0", "unknown dialect 'smtp'"),
        ("tcp://127.0.0.1:0", "expected DIALECT=ENDPOINT"),
        ("dwork=tcp://0.0.0.0:0", "a remote endpoint requires keys"),
    ],
)
def test_wrong_listen_is_refused_before_anything_is_made(
    listen: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here(taskyard, ["broker", "--listen", listen]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err
    assert not (tmp_path / ".taskyard").exists()


def test_drained_broker_exits_when_running_tasks_are_done(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    state = tmp_path / ".taskyard"
    with (
        Broker(tmp_path) as running,
        Worker(tmp_path, "--slots", "1") as working,
        InternalClient(state=state) as client,
    ):
        client.submit(
            marking("slow", "cat gate > /dev/null")["argv"], name="slow", cwd=str(tmp_path)
        )
        client.submit(["true"], name="later")
        until(lambda: marks(tmp_path))
        assert client.drain() == 1
        (tmp_path / "gate").write_text("")
        assert (running.end()[0], working.end()[0]) == (0, 0)
    with Broker(tmp_path), InternalClient(state=tmp_path / ".taskyard") as client:
        assert client.show("slow")["state"] == "done"
        assert client.show("later")["state"] == "ready"


def test_drained_without_workers_it_ends_at_once(tmp_path: Path) -> None:
    with Broker(tmp_path) as running, InternalClient(state=tmp_path / ".taskyard") as client:
        assert client.drain() == 0
        assert running.end()[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ("broker", "--listen", "dwork={address}"),
        ("up", "--page", "none", "--listen", "dwork={address}"),
        ("up", "--detach", "--page", "none", "--listen", "dwork={address}"),
        ("run", "bad.jsonl"),
        ("map", "--lines", "missing", "--", "echo", "{{}}"),
    ],
    ids=" ".join,
)
def test_command_that_fails_leaves_no_state_directory_behind(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"name": "a"}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        arguments = [word.format(address=address) for word in words]
        code, _, err = run(tmp_path, *arguments)
    assert code == 2, err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_state_with_tasks_stays_when_a_command_fails(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text('{"a": 1}\nnot JSON\n')
    code, _, err = run(tmp_path, "map", "--jsonl", "rows", "--", "echo", "{a}")
    assert (code, "rows:2: not a JSON object" in err) == (2, True)
    assert (tmp_path / ".taskyard" / "journal.sqlite").exists()
