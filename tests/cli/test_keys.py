"""`taskyard keys`: files, output and refusals, and the lookup of `--key`."""

from __future__ import annotations

import io
import re
import shlex
from socket import gethostname
from typing import TYPE_CHECKING

import pytest

from taskyard.cli.entry import run, taskyard
from taskyard.client import discovery
from taskyard.errors import UserError
from taskyard.net.keyring import Keyring
from taskyard.net.keys import PeerKey, make_secret, read_invitation, read_peer_key
from taskyard.wire.roles import AuthenticatedPeer, Role
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
        (["new", "x"], "missing --role"),
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


def key_of(*roles: Role) -> PeerKey:
    return PeerKey("gpu", roles, make_secret(), make_secret().public())


def test_worker_is_named_as_its_key_allows() -> None:
    usual = default_name().decode()
    assert name_for_key(None, None) is None
    assert name_for_key(None, "w") == "w"
    assert name_for_key(key_of(Role.ADMIN), "w") == "w"
    assert name_for_key(key_of(Role.WORKER, Role.RELAY), "w") == "w"
    assert name_for_key(key_of(Role.PRODUCER, Role.WORKER), None) == f"gpu/{usual}"
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


# Invitations.

NAMED = '[listen.a]\ndialect = "round-robin"'
TO = ("--broker", "tcp://head.example:6125")


def test_invitation_has_all_places_of_a_broker(keys: Keys) -> None:
    places = "tcp://a.example:6125+tcp://b.example:6125"
    outcome = keys("invite", "worker", "gpu", "--broker", places)
    assert outcome.err.splitlines()[0] == f"connects:  to dwork at {places}"
    file = str(keys.directory / "gpu.invite")
    assert read_invitation(file).endpoints == (places,)
    environment = {"TASKYARD_INVITE": file}
    assert discovery.endpoint(environment=environment) == places
    found = discovery.key_for(places, environment=environment)
    assert found is not None
    assert found.name == "gpu"


def test_invitation_has_all_that_a_peer_needs_and_is_private(keys: Keys) -> None:
    outcome = keys("invite", "worker,producer", "gpu", *TO, "--for", "wmp")
    assert outcome.out == (
        "gpu.invite: invitation of gpu (roles producer, worker), the only copy\n"
    )
    assert outcome.err.splitlines() == [
        "connects:  to wmp at tcp://head.example:6125",
        "use it:    taskyard join gpu.invite",
        "revoke it: taskyard keys revoke gpu --state .taskyard",
    ]
    file = keys.directory / "gpu.invite"
    assert file.stat().st_mode & 0o777 == 0o600
    found = read_invitation(str(file))
    assert (found.dialect, found.endpoints) == ("wmp", ("tcp://head.example:6125",))
    ring = Keyring(keys.directory / ".taskyard")
    assert (found.name, found.broker) == ("gpu", ring.secret().public())
    peer = ring.find(found.secret.public())
    assert peer == AuthenticatedPeer("gpu", (Role.PRODUCER, Role.WORKER))
    as_key = read_peer_key(file)  # it replaces a key file
    assert (as_key.name, as_key.secret.public()) == ("gpu", found.secret.public())


def test_invitation_is_printed_as_a_line_on_request(keys: Keys) -> None:
    outcome = keys("invite", "worker", "gpu", *TO, "--line")
    file = keys.directory / "copied"
    file.write_text(outcome.out)
    file.chmod(0o600)
    assert len(outcome.out.splitlines()) == 1
    assert read_invitation(str(file)).name == "gpu"
    assert not (keys.directory / "gpu.invite").exists()
    document = keys("invite", "worker", "two", *TO, "--line", "--json").document()
    assert (document["file"], document["endpoints"]) == (None, ["tcp://head.example:6125"])
    assert document["line"].startswith("taskyard-invite-1:")


@pytest.mark.parametrize(
    ("listen", "dialect", "endpoint"),
    [
        ('dwork = "tcp://192.0.2.1:6125"', "dwork", "tcp://192.0.2.1:6125"),
        ('dwork = ["tcp://127.0.0.1:1", "tcp://192.0.2.1:2"]', "dwork", "tcp://192.0.2.1:2"),
        (
            'ping-pong = ["tcp://192.0.2.1:2", "tcp://192.0.2.1:1"]',
            "ping-pong",
            "tcp://192.0.2.1:2",
        ),
        (
            '[listen.lab]\ndialect = "wmp"\nendpoint = "tcp://192.0.2.1:1"',
            "wmp",
            "tcp://192.0.2.1:1",
        ),
        (
            f'{NAMED}\nendpoint = "tcp://0.0.0.0:1"\nidentity = "tcp://head.example:1"',
            "round-robin",
            "tcp://head.example:1",
        ),
    ],
)
def test_endpoint_of_an_invitation_is_a_remote_one_of_the_settings(
    keys: Keys, listen: str, dialect: str, endpoint: str | None
) -> None:
    (keys.directory / "taskyard.toml").write_text(f"[listen]\n{listen}\n")
    outcome = keys("invite", "worker", "gpu", "--for", dialect)
    assert f"connects:  to {dialect} at {endpoint}\n" in outcome.err


@pytest.mark.parametrize(
    ("listen", "dialect", "message"),
    [
        ('dwork = "tcp://127.0.0.1:1"', "dwork", "other machines can't reach tcp://127.0.0.1:1"),
        ('dwork = "tcp://192.0.2.1:0"', "dwork", "other machines can't reach tcp://192.0.2.1:0"),
        ('dwork = "tcp://192.0.2.1:1"', "wmp", "no broker is running with such a listener, and"),
        (
            'wmp = "tcp://0.0.0.0:6014"',
            "wmp",
            f"that the peer reaches, such as --broker tcp://{gethostname()}:6014",
        ),
    ],
)
def test_invitation_without_an_endpoint_for_others_is_refused(
    keys: Keys, listen: str, dialect: str, message: str
) -> None:
    (keys.directory / "taskyard.toml").write_text(f"[listen]\n{listen}\n")
    outcome = keys("invite", "worker", "gpu", "--for", dialect)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert Keyring(keys.directory / ".taskyard").entries() == []


def test_invitation_of_a_ping_pong_relay_has_both_endpoints(keys: Keys) -> None:
    both = '[listen]\nping-pong = ["tcp://192.0.2.1:2", "tcp://192.0.2.1:1"]\n'
    (keys.directory / "taskyard.toml").write_text(both)
    words = ("--for", "ping-pong")
    outcome = keys("invite", "producer,worker,relay", "site", *words)
    assert outcome.err.splitlines()[:2] == [
        "connects:  to ping-pong at tcp://192.0.2.1:2,tcp://192.0.2.1:1",
        "use it:    taskyard join site.invite",
    ]
    client = keys("invite", "producer", "client", *words)
    assert "connects:  to ping-pong at tcp://192.0.2.1:1\n" in client.err
    refused = keys("invite", "worker,relay", "x", *words, *TO)
    assert "expected BACKEND,FRONTEND of ping-pong" in refused.err


def test_endpoint_of_an_invitation_is_that_of_the_running_broker(keys: Keys) -> None:
    (keys.directory / "taskyard.toml").write_text('[listen]\nwmp = "tcp://192.0.2.1:1"\n')
    keys("new", "first", "--role", "admin")
    options = ("--listen", "dwork=tcp://127.0.0.1:0", "--listen", "wmp=tcp://0.0.0.0:0")
    with Broker(keys.directory, *options) as broker:
        near = keys("invite", "worker", "gpu")
        assert f"dwork: other machines can't reach {broker.endpoints[1]} (give" in near.err
        far = keys("invite", "worker", "gpu", "--for", "wmp")
        port = broker.endpoints[2].rpartition(":")[2]
        assert f"--broker tcp://{gethostname()}:{port}" in far.err
        broker.kill()
    # A killed broker leaves the file, and it does not count.
    assert (keys.directory / ".taskyard" / "endpoints.json").exists()
    outcome = keys("invite", "worker", "gpu", "--for", "wmp")
    assert "connects:  to wmp at tcp://192.0.2.1:1\n" in outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["king", "x", *TO], "role 'king': must be one of viewer, producer, worker, relay, admin"),
        (["relay", "x", *TO], "role relay: needs another one beside it, such as worker"),
        (["worker", "x", "--broker", "ipc:///x"], "must be a TCP endpoint"),
        (["worker", "x", *TO, "--line", "--out", "f"], "--line and --out exclude each other"),
        (["worker", "x", *TO, "--for", "smoke"], "unknown dialect 'smoke'"),
    ],
)
def test_invalid_invitation_is_refused_and_makes_no_key(
    keys: Keys, words: list[str], message: str
) -> None:
    outcome = keys("invite", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert Keyring(keys.directory / ".taskyard").entries() == []


def test_file_of_an_invitation_may_be_piped(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    keys("invite", "worker", "gpu", *TO)
    content = (keys.directory / "gpu.invite").read_bytes()
    for piped in (content, content.splitlines()[-1]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped)))
        assert read_invitation("-").name == "gpu"


def test_damaged_or_exposed_invitation_is_refused_without_its_content(keys: Keys) -> None:
    keys("invite", "worker", "gpu", *TO)
    file = keys.directory / "gpu.invite"
    line = file.read_text().splitlines()[-1]
    for content in ("", line[:-40], line + "\n" + line, "taskyard-invite-1:e30=", "name = 1"):
        file.write_text(content)
        with pytest.raises(UserError, match=r"gpu.invite: not a valid invitation") as refused:
            read_invitation(str(file))
        assert refused.value.__cause__ is None
    file.write_text(line)
    file.chmod(0o644)
    with pytest.raises(UserError, match="accessible to other users"):
        read_invitation(str(file))
    with pytest.raises(UserError, match="other users can see the options"):
        read_invitation(line)
    with pytest.raises(UserError, match="invitation not found"):
        read_invitation("nowhere")


def test_client_needs_an_invitation_of_its_dialect(
    keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    keys("invite", "viewer", "eye", *TO, "--for", "wmp")
    assert run(taskyard, ["status", "--invite", "eye.invite"]) == 2
    assert "is for the dialect wmp, this command needs dwork" in capsys.readouterr().err
    assert run(taskyard, ["rr", "client", "--invite", "eye.invite"]) == 2
    assert "it is for the dialect wmp, not round-robin" in capsys.readouterr().err
