"""`taskyard join`: an invitation starts what it is for, and nothing without a question."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from taskyard.cli import relay as relay_module
from taskyard.cli import worker as worker_module
from taskyard.cli.entry import run, taskyard
from taskyard.cli.keys import GATEWAYS
from taskyard.net import endpoints
from taskyard.net.keyring import Keyring

if TYPE_CHECKING:
    from pathlib import Path

PLACES = {
    "dwork": "tcp://head.example:6125",
    "ping-pong": "tcp://head.example:6002,tcp://head.example:6001",
    "round-robin": "tcp://head.example:6714",
    "wmp": "tcp://head.example:6014",
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith("TASKYARD_"):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize("dialect", [*PLACES])
def test_gateway_is_started_on_the_usual_port_of_its_dialect(
    dialect: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["keys", "invite", "--for", dialect, "site", "--broker", PLACES[dialect]]
    assert run(taskyard, words) == 0
    assert "use it:    taskyard join site.invite" in capsys.readouterr().err
    assert (directory / "site.invite").stat().st_mode & 0o777 == 0o600
    served = []
    monkeypatch.setattr(relay_module, "serve", lambda options, *_, **__: served.append(options))
    assert run(taskyard, ["join", "site.invite"]) == 0
    (options,) = served
    assert options.dialect == dialect
    assert ",".join(options.endpoints) == GATEWAYS[dialect]
    assert not any(endpoints.is_remote(endpoints.parse(one)) for one in options.endpoints)
    out = capsys.readouterr().out
    (entry,) = Keyring(directory / ".taskyard").entries()
    clients = ["producer"] if dialect != "wmp" else []
    assert [*entry.roles] == [*clients, "worker", "relay"]  # an admin's key would rule the broker
    for part in (PLACES[dialect], entry.fingerprint, dialect, f"a gateway at {GATEWAYS[dialect]}"):
        assert part in out


def test_worker_is_started_only_if_that_is_confirmed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del directory
    assert run(taskyard, ["keys", "invite", "worker", "gpu", "--broker", PLACES["dwork"]]) == 0
    served = []
    monkeypatch.setattr(worker_module, "serve", lambda brokers, *_, **__: served.append(brokers))
    assert run(taskyard, ["join", "gpu.invite"]) == 2
    assert (served, "(confirm with --yes)" in capsys.readouterr().err) == ([], True)
    assert run(taskyard, ["join", "gpu.invite", "--yes"]) == 0
    ((target,),) = served
    assert target.endpoint == PLACES["dwork"]


def test_invitation_of_a_client_starts_nothing(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del directory
    assert run(taskyard, ["keys", "invite", "viewer", "eye", "--broker", PLACES["dwork"]]) == 0
    assert run(taskyard, ["join", "eye.invite"]) == 2
    assert "for a client (use it with --invite eye.invite)" in capsys.readouterr().err
    assert run(taskyard, ["join", "none.invite"]) == 2


def test_worker_of_ping_pong_needs_a_program(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del directory
    words = ["keys", "invite", "worker", "old", "--for", "ping-pong"]
    assert run(taskyard, [*words, "--broker", "tcp://head.example:6002"]) == 0
    assert "worker --command PROGRAM --invite old.invite" in capsys.readouterr().err
    assert run(taskyard, ["join", "old.invite", "--yes"]) == 2
    assert (
        "(use `taskyard worker --command PROGRAM --invite old.invite`)" in capsys.readouterr().err
    )


def test_gateway_of_ping_pong_is_asked_for_both_endpoints(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del directory
    both = "tcp://HOST:PORT,tcp://HOST:PORT"
    for words in ([], ["--broker", "tcp://head.example:6002"]):
        assert run(taskyard, ["keys", "invite", "--for", "ping-pong", "site", *words]) == 2
        assert both in capsys.readouterr().err


def test_join_takes_a_file_and_no_stdin(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del directory
    assert run(taskyard, ["join", "-", "--yes"]) == 2
    assert "worker --invite -" in capsys.readouterr().err
