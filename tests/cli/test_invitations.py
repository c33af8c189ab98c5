"""`TASKYARD_INVITE` and `--invite`: which commands use an invitation, and in what order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taskyard.cli.entry import run, taskyard
from taskyard.cli.options import CliContext
from taskyard.client import discovery
from taskyard.errors import UserError
from taskyard.net import sockets
from taskyard.net.keyring import Keyring
from taskyard.wire.roles import Role

PLACES = {
    "dwork": "tcp://head.example:6125",
    "wmp": "tcp://head.example:6014",
    "round-robin": "tcp://head.example:6714",
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with an invitation of each dialect, without `TASKYARD_*` variables."""
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith("TASKYARD_"):
            monkeypatch.delenv(name)
    for dialect, place in PLACES.items():
        words = ["keys", "invite", "worker", dialect, "--for", dialect, "--broker", place, "-q"]
        assert run(taskyard, words) == 0
    Keyring(tmp_path / ".taskyard").create("other", Role.VIEWER, tmp_path / "other.key")
    return tmp_path


def line_of(file: str) -> str:
    return Path(file).read_text().splitlines()[-1]


def key_name(environment: dict[str, str], key: str | None = None) -> str | None:
    found = discovery.key_for(PLACES["dwork"], key, environment)
    return None if found is None else found.name


@pytest.mark.parametrize("is_line", [False, True])
def test_invitation_of_the_environment_has_the_endpoint_and_the_key(
    directory: Path, *, is_line: bool
) -> None:
    del directory
    invite = {"TASKYARD_INVITE": line_of("dwork.invite") if is_line else "dwork.invite"}
    assert discovery.locate(environment=invite).broker == PLACES["dwork"]
    assert key_name(invite) == "dwork"
    # Its parts are replaced one by one.
    assert discovery.locate("tcp://127.0.0.1:1", None, invite).broker == "tcp://127.0.0.1:1"
    assert discovery.locate(None, "here", invite).broker is None
    assert key_name(invite, "other.key") == "other"
    assert key_name({**invite, "TASKYARD_KEY": "other.key"}) == "other"
    url = {**invite, "TASKYARD_BROKER": "tcp://127.0.0.1:2"}
    assert discovery.locate(environment=url).broker == "tcp://127.0.0.1:2"
    state = {**invite, "TASKYARD_STATE": "there"}
    assert discovery.locate(environment=state).broker == PLACES["dwork"]


def test_nearer_source_wins_over_an_invitation(directory: Path) -> None:
    text = '[broker]\ninvite = "dwork.invite"\n'
    (directory / "taskyard.toml").write_text(text)
    assert discovery.locate(environment={}).broker == PLACES["dwork"]
    assert key_name({}) == "dwork"
    assert discovery.locate(environment={"TASKYARD_STATE": "there"}).broker is None
    (directory / "taskyard.toml").write_text('[broker]\nkey = "other.key"\nurl = "ipc:///x"\n')
    invite = {"TASKYARD_INVITE": "dwork.invite"}
    assert discovery.locate(environment=invite).broker == PLACES["dwork"]
    assert key_name(invite) == "dwork"
    (directory / "taskyard.toml").write_text(f'[broker]\ninvite = "{line_of("dwork.invite")}"\n')
    with pytest.raises(UserError, match=r"broker.invite must be a file \(only the environment"):
        discovery.locate(environment={})


@pytest.mark.parametrize(
    ("value", "words", "message"),
    [
        ("wmp.invite", ["status"], "for the dialect wmp, this needs dwork (give another broker"),
        ("taskyard-invite-1:x", ["status"], "TASKYARD_INVITE: not a valid invitation"),
        ("nowhere", ["status"], "nowhere: invitation not found"),
        ("nowhere", ["worker"], "nowhere: invitation not found"),
        ("wmp.invite", ["worker", "--dialect", "dwork"], "--dialect dwork: the invitation is for"),
        ("wmp.invite", ["rr", "client"], "it is for the dialect wmp, not round-robin"),
        (
            "wmp.invite",
            ["relay", "--listen", "dwork=tcp://127.0.0.1:0"],
            "it is for the dialect wmp, not dwork (give --listen wmp=ENDPOINT)",
        ),
        ("", ["relay", "--listen", "tcp://127.0.0.1:0"], "no broker (give --to, or --invite)"),
    ],
)
@pytest.mark.usefixtures("directory")
def test_unusable_invitation_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    value: str,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("TASKYARD_INVITE", value)
    assert run(taskyard, words) == 2
    assert message in capsys.readouterr().err


def test_line_is_neither_shown_nor_passed_on_to_tasks(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del directory
    monkeypatch.setenv("TASKYARD_INVITE", line_of("wmp.invite"))
    for words in (["config"], ["config", "--json"], ["status", "-v"]):
        run(taskyard, words)
    printed = "".join(capsys.readouterr())
    assert "(a line)" in printed
    assert "taskyard-invite-1:" not in printed
    context = CliContext()
    invitation = context.find_invitation()
    assert invitation is not None
    assert invitation.endpoints == (PLACES["wmp"],)
    assert "TASKYARD_INVITE" not in os.environ  # tasks inherit the environment of their worker


def choose(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> str:
    """Return the endpoint that a round-robin peer connects to."""
    found: list[str] = []

    def connect(endpoint: str, *_more: object) -> None:
        found.append(endpoint)
        raise UserError("stop here")

    monkeypatch.setattr(sockets, "connect_by_name", connect)
    assert run(taskyard, ["rr", *words]) == 2
    return found[0]


def test_round_robin_peers_connect_to_the_identity_of_the_listener(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = directory / "taskyard.toml"
    file.write_text('[listen]\nround-robin = "tcp://127.0.0.1:1"\n')
    assert choose(monkeypatch, ["client"]) == "tcp://127.0.0.1:1"
    table = '[listen.lstore]\ndialect = "round-robin"\nendpoint = "tcp://0.0.0.0:2"\n'
    file.write_text(f'{table}identity = "tcp://127.0.0.2:2"\n')
    assert choose(monkeypatch, ["client"]) == "tcp://127.0.0.2:2"
    monkeypatch.setenv("TASKYARD_INVITE", "round-robin.invite")
    assert choose(monkeypatch, ["client"]) == PLACES["round-robin"]
    assert choose(monkeypatch, ["client", "--endpoint", "tcp://127.0.0.1:3"]) == "tcp://127.0.0.1:3"


@pytest.mark.parametrize(
    ("listen", "more", "message"),
    [
        ("round-robin=tcp://0.0.0.0:0", [], "(give --identity tcp://HOST:PORT)"),
        ("wmp=tcp://127.0.0.1:0", ["--identity", "x"], "only round-robin's peers address a relay"),
        (
            "round-robin=tcp://127.0.0.1:0",
            ["--identity", "x" * 256],
            "--identity must have at most 255 bytes",
        ),
    ],
)
def test_identity_of_a_relay_is_checked(
    capsys: pytest.CaptureFixture[str], listen: str, more: list[str], message: str
) -> None:
    dialect = listen.partition("=")[0]
    words = ["relay", "--listen", listen, "--to", f"{dialect}=tcp://127.0.0.1:1", *more]
    assert run(taskyard, words) == 2
    assert message in capsys.readouterr().err
