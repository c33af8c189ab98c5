"""The table of keys: every row is whole, and every struct has the fields of its section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from taskyard.settings import keys
from taskyard.settings.files import CONFIG_VARIABLE
from taskyard.settings.keys import DEFAULTS, KEYS, SERVICE, AnyKey, service_keys
from taskyard.settings.loader import OTHER_VARIABLES, Source, load
from taskyard.settings.values import Rate
from tests.kit.cases import each_case
from tests.settings.kit import written

ALL: Final = (*KEYS, *service_keys(DEFAULTS), *service_keys(f"{SERVICE}.smtp"))

#: For each key, by its name or path, a value in a file, and the loaded value.
VALUES: Final[dict[str, tuple[Any, Any]]] = {
    "url": (["tcp://127.0.0.1:1", "ipc:///a,b"], ("tcp://127.0.0.1:1", "ipc:///a,b")),
    "state": ("/var/yard", Path("/var/yard")),
    "store": ("postgresql://me@db.example/yard", "postgresql://me@db.example/yard"),
    "key": ("/var/me.key", Path("/var/me.key")),
    "invite": ("/var/me.invite", Path("/var/me.invite")),
    "page": ("[::1]:80", "[::1]:80"),
    "dwork": (["tcp://127.0.0.1:1", "ipc:///a"], ("tcp://127.0.0.1:1", "ipc:///a")),
    "round-robin": ("tcp://127.0.0.1:6714", ("tcp://127.0.0.1:6714",)),
    "ping-pong": (["ipc:///back", "ipc:///front"], ("ipc:///back", "ipc:///front")),
    "wmp": ("tcp://127.0.0.1:6014", ("tcp://127.0.0.1:6014",)),
    "heartbeat": ("1.5s", 1_500_000_000),
    "expire": ("1m30s", 90_000_000_000),
    "plain": ("1h", 3_600_000_000_000),
    "lease.store": ("1m30s", 90_000_000_000),
    "quota": ("1536M", 1536 << 20),
    "format": ("json", "json"),
    "level": ("debug", "debug"),
    "size": ("5M", 5 << 20),
    "files": (3, 3),
    "keep": ("30d", 30 * 86_400_000_000_000),
    "minimum": ("64K", 64 << 10),
    "grace": ("1m30s", 90_000_000_000),
    "cache": ("3G", 3 << 30),
    "directory": ("/mnt/values", Path("/mnt/values")),
    "processes": (0, 0),
    "slots": (7, 7),
    "services": (["exec", "gpu"], ("exec", "gpu")),
    "allow": (["imaging", "math.more"], ("imaging", "math.more")),
    "cpus": (2.5, 25_000),
    "memory": ("8G", 8 << 30),
    "gpus": (["0", "GPU-3"], ("0", "GPU-3")),
    "resources": (["disk=0.5", "license=2"], ((b"disk", 5_000), (b"license", 20_000))),
    "match": ("smtp/*", "smtp/*"),
    "lane": ("{host}-{{{0}}}", "{host}-{{{0}}}"),
    "command": ("agents/smtp 'two words'", ("agents/smtp", "two words")),
    "workers_max": (20, 20),
    "lane_workers_max": (1, 1),
    "interval": ("1m", 60_000_000_000),
    "retries": ([1, 2.5, 34], (1, 2.5, 34)),
    "jitter": ("10%", 10),
    "expiry": ("5d", 5 * 86_400_000_000_000),
    "expiry_hard": ("1d2h3m4.5s", 93_784_500_000_000),
    "order": ("age", "age"),
    "overfeed": (10, 10),
    "idle_max": ("3m", 180_000_000_000),
    "hunger_max": ("2h", 7_200_000_000_000),
    "lines": ("zmailer", "zmailer"),
    "hold": (True, True),
    "debounce": ("0s", 0),
    "rate": ("10/s", Rate(10, "s")),
    "lane_rate": ("5/s", Rate(5, "s")),
    "weight": (3, 3),
    "report_after": ("4h", 14_400_000_000_000),
}

each_key = each_case("key", ALL)


def values_of(key: AnyKey) -> tuple[Any, Any]:
    return VALUES.get(key.path) or VALUES[key.name]


def as_toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(as_toml(one) for one in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


@each_key
def test_every_key_has_a_sentence_and_a_variable(key: AnyKey) -> None:
    assert re.fullmatch(r"[A-Z].*\.", key.help)
    assert re.fullmatch(r"TASKYARD_[A-Z_]+", key.environment)
    assert key.text(key.default)
    assert key.kind.description


@each_key
def test_value_goes_there_and_back_again(key: AnyKey) -> None:
    raw, value = values_of(key)
    kind = key.kind
    assert kind.read(raw) == value
    assert kind.to_file(value) == raw
    assert kind.read(kind.from_text(kind.text(value))) == value


@each_key
def test_default_is_a_value_that_could_be_written(key: AnyKey) -> None:
    if key.default:
        assert key.kind.read(key.kind.to_file(key.default)) == key.default


@each_key
def test_key_is_read_from_the_file_with_its_line(key: AnyKey, tmp_path: Path) -> None:
    raw, value = values_of(key)
    section = key.section.replace("service.smtp", 'service."smtp"')
    # A lease has to be long enough for the heartbeat of the example.
    more = '\n[lease]\nexpire = "1m"\n' if key.section != "lease" else ""
    text = f"# first\n\n[{section}]\n# before\n{key.name} = {as_toml(raw)} # after\n{more}"
    settings = load(written(tmp_path, text), environment={})
    found = settings.all[key.path]
    assert (found.value, found.origin.source) == (value, Source.FILE)
    assert found.origin.location == f"{tmp_path}/taskyard.toml:5"


@each_key
def test_key_is_read_from_its_variable(key: AnyKey, tmp_path: Path) -> None:
    _, value = values_of(key)
    file = written(tmp_path, "[service.smtp]\n")
    settings = load(file, environment={key.environment: key.kind.text(value)})
    found = settings.all[key.path]
    assert (found.value, found.origin.source) == (value, Source.ENVIRONMENT)
    assert found.origin.location == key.environment
    assert settings.unknown_variables == ()


def test_variables_are_distinct() -> None:
    names = [*(key.environment for key in ALL), CONFIG_VARIABLE, *OTHER_VARIABLES]
    assert len(names) == len(dict.fromkeys(names))


def test_variables_that_existed_before_the_table_keep_their_names() -> None:
    names = {key.path: key.environment for key in KEYS}
    assert names["broker.url"] == "TASKYARD_BROKER"
    assert names["broker.state"] == "TASKYARD_STATE"
    assert names["lease.expire"] == "TASKYARD_LEASE_EXPIRE"
    assert names["listen.round-robin"] == "TASKYARD_LISTEN_ROUND_ROBIN"


def test_values_of_a_section_are_typed_attributes_with_their_units() -> None:
    lease = keys.LeaseSection(expire_ns=5)
    assert (lease.expire_ns, lease.plain_ns) == (5, 600_000_000_000)
    assert keys.LeaseSection.expire_ns.name == "expire"
    assert [key.field for key in keys.LeaseSection.keys("lease")] == [
        *("heartbeat_ns", "expire_ns", "plain_ns", "store_ns")
    ]
