"""The page about settings has the tables of the code, and its examples are real output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from docs.settings import schema, schema_text, tables
from taskyard.cli.entry import run, taskyard
from taskyard.settings.keys import DEFAULTS, KEYS, listener_keys, service_keys
from taskyard.settings.loader import diff
from taskyard.settings.values import read_duration
from taskyard.wire.ping_pong import frames as ping_pong_frames
from taskyard.wire.round_robin import frames as round_robin_frames
from taskyard.wire.wmp.server import SILENCE_NS
from taskyard.worker.jobs import AGENT_HUNGER_NS_MAX, AGENT_IDLE_NS_MAX
from tests.settings.kit import loaded, written

DOCS: Final = Path(__file__).parents[2] / "docs"
PAGE: Final = (DOCS / "settings.md").read_text()
SCHEMA: Final = DOCS / "taskyard.schema.json"

KNOWN: Final = ("broker", "listen", "lease", "blobs", "log", "worker")


#: Blocks of the page: files and output.
BLOCKS: Final = re.findall(r"```(?:toml|text)\n(.*?)```", PAGE, re.DOTALL)


def test_page_has_the_tables_of_the_code() -> None:
    for name, table in tables().items():
        assert table in PAGE, f"{name}: run ./yard docs"


def test_schema_in_the_docs_is_that_of_the_table() -> None:
    assert SCHEMA.read_text() == schema_text(), "run ./yard docs"


def test_schema_has_every_key_and_no_others() -> None:
    properties = schema()["properties"]
    named = [f"{section}.{name}" for section in KNOWN for name in properties[section]["properties"]]
    assert named == [key.path for key in KEYS]
    service = properties["service"]["additionalProperties"]
    assert [*service["properties"]] == [key.name for key in service_keys("service.NAME")]
    assert all(one["additionalProperties"] is False for one in (schema(), service))
    assert properties["log"]["properties"]["format"] == {
        "description": "The lines of a daemon's log. Text or json.",
        "type": "string",
        "enum": ["text", "json"],
        "default": "text",
    }


@pytest.mark.slow
def test_services_of_the_page_are_valid_and_reload_as_shown(tmp_path: Path) -> None:
    text, _, log = BLOCKS[2:]
    before = loaded(written(tmp_path, text))
    lower = text.replace("workers_max = 20", "workers_max = 5")
    listen = '[listen]\ndwork = "tcp://127.0.0.1:1"\n'
    after = loaded(written(tmp_path, lower + listen))
    message = diff(before, after).sentence()
    assert log.partition(" ")[2] == f"warning broker: settings reloaded: {message}\n"


def test_listeners_of_the_page_are_valid(tmp_path: Path) -> None:
    settings = loaded(written(tmp_path, BLOCKS[3]))
    assert [*settings.listeners] == ["ping-pong", "render"]


def test_defaults_of_listeners_match_the_dialects() -> None:
    expires_ns = {
        "round-robin": round_robin_frames.Settings().expire_ns,
        "ping-pong": ping_pong_frames.Settings().expire_ns,
        "wmp": SILENCE_NS,
    }
    for dialect, expire_ns in expires_ns.items():
        unset = {key.name: key.unset for key in listener_keys(dialect, dialect)}
        assert read_duration(unset["expire"]) == expire_ns
    unset = {key.name: key.unset for key in listener_keys("ping-pong", "ping-pong")}
    assert read_duration(unset["timeout"]) == ping_pong_frames.Settings().lease_ns


def test_defaults_of_agents_match_the_worker() -> None:
    unset = {key.name: key.unset for key in service_keys(DEFAULTS)}
    assert read_duration(unset["idle_max"]) == AGENT_IDLE_NS_MAX
    assert read_duration(unset["hunger_max"]) == AGENT_HUNGER_NS_MAX


def test_table_has_every_key() -> None:
    named = re.findall(r"^\| `([\w.-]+)`", tables()["setting"], re.MULTILINE)
    assert named == [key.path for key in KEYS]


def test_example_of_the_page_prints_the_shown_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example, printed, *_ = BLOCKS
    written(tmp_path, example)
    monkeypatch.chdir(tmp_path)
    assert run(taskyard, ["config"]) == 0
    assert capsys.readouterr().out == printed
