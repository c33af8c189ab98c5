"""`taskyard keys`: files, output and refusals, and the lookup of `--key`."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

from taskyard.cli.entry import run, taskyard
from taskyard.client import discovery
from taskyard.errors import UserError
from taskyard.net.keyring import Keyring
from taskyard.net.keys import PeerKey, make_secret, read_peer_key
from taskyard.wire.roles import Role
from taskyard.worker.settings import default_name, name_for_key
from tests.cli.yard import Outcome
from tests.kit import processes
from tests.kit.processes import Broker

if TYPE_CHECKING:
    from pathlib import Path


class Keys:
    """Calls `taskyard keys` in this process, in a new directory."""

    def __init__(self, directory: Path, captured: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self._captured = captured

    def __call__(self, *words: str) -> Outcome:
        self._captured.readouterr()
        code = run(taskyard, ["keys", *words])
        return Outcome(code, *self._captured.readouterr())


@pytest.fixture
def keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Keys:
    monkeypatch.chdir(tmp_path)
    for variable in ("TASKYARD_STATE", "TASKYARD_BROKER", "TASKYARD_KEY"):
        monkeypatch.delenv(variable, raising=False)
    return Keys(tmp_path, capsys)


def test_key_is_written_to_a_file_of_its_name_with_usage_hints(keys: Keys) -> None:
    outcome = keys("new", "ci-bot", "--role", "producer")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        "ci-bot.key: key of ci-bot (role producer), the only copy",
        "use it:    taskyard status --broker tcp://HOST:PORT --key ci-bot.key",
        "revoke it: taskyard keys revoke ci-bot --state .taskyard",
    ]
    assert read_peer_key(keys.directory / "ci-bot.key").roles == (Role.PRODUCER,)
    assert (keys.directory / ".taskyard" / "keys" / "broker.key").exists()


def test_workers_key_is_for_a_worker(keys: Keys) -> None:
    outcome = keys("new", "gpu", "--role", "worker", "--out", "my key", "--state", "a b")
    assert outcome.out.splitlines()[1:] == [
        "use it:    taskyard worker --broker tcp://HOST:PORT --key 'my key'",
        "revoke it: taskyard keys revoke gpu --state 'a b'",
    ]
    assert read_peer_key(keys.directory / "my key").name == "gpu"


def test_keys_are_listed_with_revocations_and_without_secrets(keys: Keys) -> None:
    for name, role in (("boss", "admin"), ("eye", "viewer")):
        keys("new", name, "--role", role)
    revoked = keys("revoke", "eye")
    assert re.fullmatch(r"revoked the key of eye \(role viewer, [0-9a-f]{16}\)\n", revoked.out)
    lines = keys("list").out.splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert lines[0].split() == ["NAME", "ROLES", "FINGERPRINT", "CREATED", "REVOKED"]
    assert re.fullmatch(rf"boss  admin   [0-9a-f]{{16}}  {time}  -", lines[1])
    assert re.fullmatch(rf"eye   viewer  [0-9a-f]{{16}}  {time}  {time}", lines[2])


def test_documents_are_for_programs_and_have_no_secrets(keys: Keys) -> None:
    made = keys("new", "eye", "--role", "viewer", "--json")
    listed, revoked = keys("list", "--json"), keys("revoke", "eye", "--json")
    document = made.document()
    assert (document["document"], document["file"]) == ("keys new", "eye.key")
    assert listed.document()["keys"] == [document["key"]]
    assert {**revoked.document()["key"], "revoked": None} == document["key"]
    assert revoked.document()["key"]["revoked"] >= document["key"]["created"]
    assert sorted(document["key"]) == [
        *("created", "fingerprint", "name", "public", "revoked", "role", "roles")
    ]
    secret = read_peer_key(keys.directory / "eye.key").secret.reveal().decode()
    assert not any(secret in outcome.out + outcome.err for outcome in (made, listed, revoked))


def test_nothing_is_listed_where_there_is_nothing(keys: Keys) -> None:
    assert keys("list").out.split() == ["NAME", "ROLES", "FINGERPRINT", "CREATED", "REVOKED"]
    assert keys("list", "--json").document()["keys"] == []
    assert not (keys.directory / ".taskyard").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new", "../x", "--role", "viewer"], "key name '../x': must have 1 to 64"),
        (["new", "x"], "Missing option '--role'. Choose from:"),
        (["new", "x", "--role", "king"], "'king' is not one of 'viewer', 'producer', 'worker'"),
        (["revoke", "x"], "unknown key 'x' (see `taskyard keys list`)"),
    ],
)
def test_invalid_arguments_are_refused(keys: Keys, words: list[str], message: str) -> None:
    outcome = keys(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_directory_of_keys_that_is_open_to_others_is_refused_with_a_remedy(
    keys: Keys,
) -> None:
    keys("new", "eye", "--role", "viewer")
    directory = keys.directory / ".taskyard" / "keys"
    directory.chmod(0o755)
    outcome = keys("list")
    assert outcome.code == 2
    assert "(chmod 700 .taskyard/keys, and create new keys unless you trust" in outcome.err


def test_broker_without_keys_names_the_command_that_creates_one(keys: Keys) -> None:
    code, out, err = processes.run(keys.directory, "broker", "--listen", "dwork=tcp://0.0.0.0:0")
    assert (code, out) == (2, "")
    (command,) = re.findall(r"`taskyard (.*)`", err)
    assert err == (
        "taskyard: tcp://0.0.0.0:0: a remote endpoint requires keys, and .taskyard has no valid "
        f"key (create one with `taskyard {command}`)\n"
    )
    words = shlex.split(command.replace("NAME", "ci-bot"))
    assert processes.run(keys.directory, *words)[0] == 0
    with Broker(keys.directory, "--secure", "--listen", "dwork=tcp://127.0.0.1:0") as broker:
        words = ["status", "--broker", broker.endpoints[1], "--key", "ci-bot.key"]
        assert processes.run(keys.directory, *words)[0] == 0


# The choice of a key.

TCP = "tcp://127.0.0.1:6125"


def test_key_is_the_one_given_or_of_the_environment_or_of_the_settings(keys: Keys) -> None:
    for name in ("flag", "variable", "file"):
        keys("new", name, "--role", "viewer")
    (keys.directory / "taskyard.toml").write_text('[broker]\nkey = "file.key"\n')
    environment = {"TASKYARD_KEY": "variable.key"}
    found = [
        discovery.key_for(TCP, "flag.key", environment),
        discovery.key_for(TCP, None, environment),
        discovery.key_for(TCP, None, {}),
    ]
    assert [key.name for key in found if key is not None] == ["flag", "variable", "file"]


def test_without_a_key_there_is_none_and_elsewhere_none_is_looked_for(keys: Keys) -> None:
    del keys
    assert discovery.key_for(TCP, None, {}) is None
    assert discovery.key_for("ipc:///run/broker.sock", "there-is-none.key", {}) is None
    with pytest.raises(UserError, match=r"there-is-none.key: key file not found \(create one"):
        discovery.key_for(TCP, "there-is-none.key", {})


@pytest.mark.parametrize("words", [["status"], ["worker"]])
def test_key_file_that_is_open_to_others_is_refused(keys: Keys, words: list[str]) -> None:
    keys("new", "gpu", "--role", "worker")
    (keys.directory / "gpu.key").chmod(0o640)
    words = [*words, "--broker", TCP, "--key", "gpu.key"]
    code, out, err = processes.run(keys.directory, *words)
    assert (code, out) == (2, "")
    assert err == (
        "taskyard: gpu.key: accessible to other users, mode 0640 (chmod 600 gpu.key, and create "
        "new keys unless you trust them all)\n"
    )


def test_broker_beyond_this_machine_is_not_talked_to_without_a_key(keys: Keys) -> None:
    for verb in ("status", "worker"):
        code, out, err = processes.run(keys.directory, verb, "--broker", "tcp://192.0.2.7:6125")
        assert (code, out) == (2, "")
        assert "a broker on another machine needs a key (give --key FILE" in err


def key_of(role: Role) -> PeerKey:
    return PeerKey("gpu", (role,), make_secret(), make_secret().public())


def test_worker_is_named_as_its_key_allows() -> None:
    usual = default_name().decode()
    assert name_for_key(None, None) is None
    assert name_for_key(None, "w") == "w"
    assert name_for_key(key_of(Role.ADMIN), "w") == "w"
    assert name_for_key(key_of(Role.WORKER), None) == f"gpu/{usual}"
    assert name_for_key(key_of(Role.WORKER), "gpu") == "gpu"
    assert name_for_key(key_of(Role.WORKER), "gpu/2") == "gpu/2"
    with pytest.raises(UserError, match=r"key gpu: only for workers named gpu or gpu/…, not"):
        name_for_key(key_of(Role.WORKER), "gpu2")
    with pytest.raises(UserError, match=r"key gpu: is a producer's key, not a worker's"):
        name_for_key(key_of(Role.PRODUCER), None)


def test_state_of_another_ring_is_another_broker(keys: Keys) -> None:
    keys("new", "one", "--role", "viewer", "--state", "a")
    keys("new", "one", "--role", "viewer", "--state", "b", "--out", "other.key")
    brokers = [read_peer_key(keys.directory / file).broker for file in ("one.key", "other.key")]
    assert brokers == [Keyring(keys.directory / state).secret().public() for state in ("a", "b")]
    assert brokers[0] != brokers[1]
