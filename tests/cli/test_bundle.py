"""`taskyard submit --to`: one payload for many recipients, and lane templates in other commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.client.internal import InternalClient
from tests.cli.yard import Caller, Yard, running
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def people(tmp_path: Path) -> str:
    file = tmp_path / "people.csv"
    file.write_text("to,host\nann@a,a.org\nbob@b,b.org\n")
    return str(file)


@pytest.fixture
def addresses(tmp_path: Path) -> str:
    file = tmp_path / "addresses.txt"
    file.write_text("ann\n\nbob\n")
    return str(file)


def lanes_of(call: Caller, campaign: str) -> list[tuple[str, str]]:
    tasks = call("list", "--campaign", campaign, "--json").document()["tasks"]
    return [(task["name"], task["lane"]) for task in tasks]


def test_name_is_printed_and_every_line_has_its_lane(call: Caller, addresses: str) -> None:
    options = ("--service", "mail", "--payload", "hi")
    outcome = call("submit", "--name", "news", "--to-file", addresses, *options)
    assert outcome == (0, "news\n", "2 tasks, 2 new\n")
    assert lanes_of(call, "news") == [("0", "ann"), ("1", "bob")]
    again = call("submit", "--name", "news", "--to-file", addresses, *options)
    assert again.out == "news\n"
    assert again.err.startswith("bundle news exists already: nothing submitted\n")
    other = call(
        "submit", "--name", "news", "--to-file", addresses, "--service", "mail", "--payload", "x"
    )
    message = (
        "taskyard: bundle news: exists with another payload or campaign (give another --name)\n"
    )
    assert (other.code, other.err) == (2, message)


def test_columns_are_fields_of_the_lane(call: Caller, people: str) -> None:
    outcome = call("submit", "--to-file", people, "--lane", "{host}", "--payload", "hi", "--json")
    document = outcome.document()
    assert (document["tasks"], document["new"]) == (2, 2)
    assert document["campaign"] == document["name"]
    name = document["name"]
    assert lanes_of(call, name) == [("0", "a.org"), ("1", "b.org")]


def test_objects_are_recipients_too(call: Caller, tmp_path: Path) -> None:
    file = tmp_path / "people.jsonl"
    file.write_text('{"host": "a"}\n{"host": "b"}\n')
    options = ("--lane", "{host}", "--campaign", "week", "--payload", "hi")
    assert call("submit", "--name", "objects", "--to-file", str(file), *options).code == 0
    assert lanes_of(call, "week") == [("objects/0", "a"), ("objects/1", "b")]


def test_recipients_may_be_words_and_a_file(call: Caller, addresses: str) -> None:
    options = ("--name", "both", "--service", "mail", "--payload", "hi")
    outcome = call("submit", *options, "--to", "eve", "--to", "joe", "--to-file", addresses)
    assert (outcome.code, outcome.out) == (0, "both\n")
    assert [lane for _, lane in lanes_of(call, "both")] == ["eve", "joe", "ann", "bob"]
    refused = call("submit", "--to", "eve", "--", "true")
    assert (refused.code, "'true': --to and --to-file need --payload" in refused.err) == (2, True)


def test_missing_field_is_reported_with_its_line_and_nothing_is_submitted(
    call: Caller, tmp_path: Path
) -> None:
    file = tmp_path / "people.jsonl"
    file.write_text('{"host": "a"}\n\n{"hots": "b"}\n')
    options = ("--name", "lost", "--lane", "{host}", "--payload", "hi")
    outcome = call("submit", "--to-file", str(file), *options)
    assert outcome.code == 2
    assert (
        f"{file}:3: \"lane\" of recipient 1 is '{{host}}', but the task has no field" in outcome.err
    )
    assert call("show", "lost/0").code == 2
    default = call("submit", "--to-file", str(file), "--payload", "hi")
    assert f"{file}:1: " in default.err
    assert "no field 'recipient'" in default.err


def test_bundle_without_a_payload_or_recipients_is_refused(
    call: Caller, addresses: str, tmp_path: Path
) -> None:
    assert "missing payload: give --payload" in call("submit", "--to-file", addresses).err
    (tmp_path / "none").touch()
    outcome = call("submit", "--to-file", str(tmp_path / "none"), "--payload", "hi")
    assert ": no recipients" in outcome.err
    assert call("submit", "--to-file", str(tmp_path / "nowhere"), "--payload", "hi").code == 2
    name = call("submit", "--to-file", addresses, "--payload", "hi", "--name", "x" * 1024)
    assert 'the bundle: "name" must leave room for /1' in name.err


def test_wait_reports_the_outcome_of_all_tasks(call: Caller, addresses: str) -> None:
    # A plain payload, which this worker can't run.
    options = ("--service", "exec", "--payload", "hi", "--wait")
    outcome = call("submit", "--name", "sad", "--to-file", addresses, *options)
    assert outcome.code == 1
    assert "sad/0 failed: " in outcome.err
    more = call(
        "submit", "--name", "sad2", "--campaign", "c", "--to-file", addresses, *options, "--json"
    )
    document = more.document()
    assert (document["counts"]["failed"], document["settled"], document["tasks"]) == (2, True, 2)


def test_lane_of_a_submitted_task_is_expanded(call: Caller) -> None:
    options = ("--campaign", "templates", "--lane", "{campaign}-{1}")
    assert call("submit", "--name", "t", *options, "--", "echo", "disk-1").code == 0
    assert lanes_of(call, "templates") == [("t", "templates-disk-1")]
    outcome = call("submit", "--lane", "{host}", "--", "echo")
    assert outcome.code == 2
    assert "has no field 'host' (it has '0', 'name', 'campaign', 'service')" in outcome.err


def test_lane_of_a_mapped_task_is_made_of_its_line(call: Caller, people: str) -> None:
    map_csv = ("map", "--csv", people, "--campaign", "mapped")
    assert call(*map_csv, "--lane", "{host}-{#}-{1}", "--", "echo", "{to}").code == 0
    lanes = [lane for _, lane in lanes_of(call, "mapped")]
    assert lanes == ["a.org-1-ann@a", "b.org-2-bob@b"]
    outcome = call("map", "--lines", people, "--campaign", "m2", "--lane", "{}", "--", "echo", "{}")
    assert lanes_of(call, "m2")[1][1] == "ann@a,a.org"
    outcome = call(
        "map", "--csv", people, "--campaign", "m3", "--lane", "{x}", "--", "echo", "{to}"
    )
    assert outcome.code == 2
    assert f"{people}:2: the lane is '{{x}}', but the task has no field 'x' (it has" in outcome.err


def test_file_has_bundles_and_templates(call: Caller, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_text(
        '{"name": "one", "argv": ["echo", "x"], "lane": "{campaign}"}\n'
        '{"name": "many", "payload": "hi", "recipients": ["ann", "bob"]}\n'
    )
    assert "tasks       3" in call("load", str(file), "--dry-run").out
    outcome = call("load", str(file))
    assert outcome.out == "campaign mixed: 3 tasks: 3 new, 0 existing\n"
    assert lanes_of(call, "mixed") == [("one", "mixed"), ("many/0", "ann"), ("many/1", "bob")]
    assert call("load", str(file)).out == "campaign mixed: 3 tasks: 0 new, 3 existing\n"


SETTINGS = """
[service.smtp]
lane = "{host}"
"""


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """Run a broker whose settings have a lane template for a service."""
    directory = tmp_path_factory.mktemp("settled")
    (directory / "taskyard.toml").write_text(SETTINGS)
    with running(directory, worker=False) as yard:
        yield yard


@pytest.fixture
def call_settled(settled: Yard, capsysbinary: pytest.CaptureFixture[bytes]) -> Caller:
    return Caller(settled.state, capsysbinary)


def test_settings_of_a_service_say_the_lanes_of_tasks_that_give_none(
    call_settled: Caller, people: str, tmp_path: Path
) -> None:
    call, smtp = call_settled, ("--service", "smtp")
    payload = '{"host": "a.org"}'
    (tmp_path / "c.jsonl").write_text(
        '{"name": "loaded", "service": "smtp", "payload": {"host": "l.org"}}\n'
        '{"name": "own", "service": "smtp", "payload": {}, "lane": "own"}\n'
        '{"name": "other", "payload": {"host": "l.org"}}\n'
    )
    assert call("submit", *smtp, "--campaign", "c", "--name", "s", "--payload", payload).code == 0
    assert call("load", str(tmp_path / "c.jsonl"), "--campaign", "c").code == 0
    words = ("--csv", people, "--no-wait", "--payload", "{to}")
    assert call("map", *smtp, "--campaign", "m", *words).code == 0
    assert call("submit", *smtp, "--name", "b", "--to-file", people, "--payload", "hi").code == 0
    assert lanes_of(call, "c") == [
        ("s", "a.org"),
        ("loaded", "l.org"),
        ("own", "own"),
        ("other", ""),
    ]
    assert [lane for _, lane in lanes_of(call, "m")] == ["a.org", "b.org"]
    assert lanes_of(call, "b") == [("0", "a.org"), ("1", "b.org")]


def test_task_that_its_services_template_does_not_fit_is_refused(
    call_settled: Caller, settled: Yard, addresses: str, tmp_path: Path
) -> None:
    call, message = call_settled, "is '{host}', but the task has no field 'host' (it has"
    file = tmp_path / "bad.jsonl"
    file.write_text(
        '{"name": "x", "argv": ["true"]}\n{"name": "y", "service": "smtp", "payload": "y"}\n'
    )
    outcome = call("load", str(file))
    lane = f"{file}:2: task bad/y: the lane of service smtp {message}"
    assert (outcome.code, lane in outcome.err) == (2, True)
    outcome = call("submit", "--service", "smtp", "--payload", "y")
    assert (outcome.code, message in outcome.err) == (2, True)
    outcome = call("submit", "--service", "smtp", "--to-file", addresses, "--payload", "y")
    assert (outcome.code, f'{addresses}:1: "lane" of recipient 0 {message}' in outcome.err) == (
        2,
        True,
    )
    assert call("show", "x").code == 2
    with InternalClient(state=settled.state) as client:
        future = client.submit(b"y", service="smtp")
        assert message in str(future.exception(PATIENCE_SECONDS))
