"""Which broker is meant: the broker or the state that was named nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskyard.client import discovery
from taskyard.errors import SeveralBrokers, UnusableKey
from taskyard.net import endpoints
from taskyard.settings.files import InvalidSettings
from taskyard.settings.loader import load
from tests.settings.kit import written

FLAG, VARIABLE, FILE = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:3"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def native(state: str) -> str:
    return endpoints.native_endpoint(Path(state))


@pytest.mark.parametrize(
    ("flags", "variables", "file", "expected"),
    [
        ({"broker": FLAG, "state": "s"}, {"BROKER": VARIABLE}, {"url": FILE}, FLAG),
        ({"broker": FLAG}, {"STATE": "s"}, {}, FLAG),
        ({"state": "a"}, {"BROKER": VARIABLE, "STATE": "b"}, {"url": FILE}, "a"),
        ({}, {"BROKER": VARIABLE, "STATE": "b"}, {"url": FILE, "state": "c"}, VARIABLE),
        ({}, {"BROKER": VARIABLE}, {"state": "c"}, VARIABLE),
        ({}, {"STATE": "b"}, {"url": FILE, "state": "c"}, "b"),
        ({}, {}, {"url": FILE, "state": "c"}, FILE),
        ({}, {}, {"url": FILE}, FILE),
        ({}, {}, {"state": "c"}, "c"),
        ({}, {}, {}, ".taskyard"),
    ],
)
def test_nearest_source_wins_and_a_state_means_its_own_broker(
    flags: dict[str, str],
    variables: dict[str, str],
    file: dict[str, str],
    expected: str,
    tmp_path: Path,
) -> None:
    lines = "".join(f'{name} = "{value}"\n' for name, value in file.items())
    written(tmp_path, f"[broker]\n{lines}")
    environment = {f"TASKYARD_{name}": value for name, value in variables.items()}
    found = discovery.endpoint(flags.get("broker"), flags.get("state"), environment)
    assert found == (expected if expected.startswith("tcp:") else native(expected))


def test_places_of_a_broker_are_one_endpoint_of_a_list(tmp_path: Path) -> None:
    pair, single = "tcp://a.example:1+tcp://b.example:1", "tcp://c.example:1"
    environment = {"TASKYARD_BROKER": f"{pair},{single}"}
    found = discovery.worker_endpoints((), None, load(environment=environment))
    assert found == (pair, single)
    with pytest.raises(SeveralBrokers, match="this takes one broker"):
        discovery.endpoint(environment=environment)
    written(tmp_path, '[broker]\nurl = "ipc://x+tcp://a.example:1"\n')
    found = discovery.worker_endpoints((), None, load(environment={}))
    assert found == (f"ipc://{tmp_path}/x+tcp://a.example:1",)
    assert not discovery.is_refused("tcp://127.0.0.1:1+tcp://127.0.0.1:2")


def test_each_broker_of_a_worker_has_its_own_key() -> None:
    remote = ["tcp://127.0.0.1:1", "ipc:///a", "tcp://127.0.0.1:2"]
    assert discovery.keys_for(remote, environment={}) == [None, None, None]
    with pytest.raises(UnusableKey, match="1 key, but 2 brokers over TCP"):
        discovery.keys_for(remote, ["one.key"])
    with pytest.raises(UnusableKey, match=r"first\.key"):
        discovery.keys_for(remote, ["first.key", "second.key"])


def test_list_of_brokers_may_have_commas_and_repetitions() -> None:
    given = ["tcp://127.0.0.1:1,tcp://127.0.0.1:2", "ipc:///a,b", "tcp://127.0.0.1:1"]
    found = discovery.worker_endpoints(given, None, load(environment={}))
    assert found == ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "ipc:///a,b")
    with pytest.raises(SeveralBrokers):
        discovery.endpoint(given)


def test_explicit_broker_does_not_read_settings(tmp_path: Path) -> None:
    written(tmp_path, "no toml")
    assert discovery.endpoint(FLAG) == FLAG
    assert discovery.endpoint(state="s") == native("s")
    with pytest.raises(InvalidSettings, match=r"^taskyard.toml:1: invalid TOML: "):
        discovery.endpoint(environment={})


def test_invalid_endpoint_is_reported_with_its_origin(tmp_path: Path) -> None:
    written(tmp_path, '[broker]\nurl = "tcp://127.0.0.1:0"\n')
    with pytest.raises(InvalidSettings) as raised:
        discovery.endpoint(environment={})
    text = "taskyard.toml:2: broker.url: endpoint tcp://127.0.0.1:0: no port to connect to ("
    assert str(raised.value).startswith(text)
