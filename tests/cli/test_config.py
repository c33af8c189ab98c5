"""`taskyard config`, and the effect of settings on every command."""

from __future__ import annotations

import json
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import pytest

from taskyard.cli import entry
from taskyard.cli.commands import COMMANDS
from taskyard.cli.options import SettingOption
from taskyard.client import discovery
from taskyard.client.internal import InternalClient
from taskyard.settings.files import CONFIG_VARIABLE
from taskyard.settings.keys import KEYS
from tests.kit.processes import (
    PATIENCE_SECONDS,
    TASKYARD,
    Broker,
    campaign,
    environment,
    marking,
    run,
    run_here,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


def settings_file(directory: Path, text: str, name: str = "taskyard.toml") -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(text)


def called(directory: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    """Run a command in an environment."""
    done = subprocess.run(
        [*TASKYARD, *words],
        cwd=directory,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of commands in this process."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return value, source and place of each setting in `config --json`."""
    assert entry.run(entry.taskyard, ["config", "--json", *words]) == 0
    document = msgspec.json.decode(capsys.readouterr().out)
    assert (document["version"], document["document"]) == (1, "config")
    return {one["key"]: (one["value"], one["source"], one["place"]) for one in document["settings"]}


# Show.


def test_origins_of_all_four_kinds_are_shown(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings_file(here, '[lease]\nexpire = "20s"\n[worker]\nslots = 3\n[broker]\nstate = "a"\n')
    monkeypatch.setenv("TASKYARD_WORKER_SLOTS", "4")
    monkeypatch.setenv("TASKYARD_STATE", "b")
    found = shown(capsys, "--state", "c")
    assert found["lease.heartbeat"] == ("auto", "default", None)
    assert found["lease.expire"] == ("20s", "file", "taskyard.toml:2")
    assert found["worker.slots"] == (4, "environment", "TASKYARD_WORKER_SLOTS")
    assert found["broker.state"] == ("c", "flag", "--state")
    assert shown(capsys, "--broker", "ipc:///b")["broker.url"] == ("ipc:///b", "flag", "--broker")


def test_services_are_shown_as_far_as_they_are_set(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings_file(here, '[service.smtp]\nrate = "10/s"\nretries = [1, 2]\nexpiry = "5d"\n')
    found = shown(capsys)
    assert {path: one[0] for path, one in found.items() if path.startswith("service")} == {
        "service.smtp.rate": "10/s",
        "service.smtp.retries": [1, 2],
        "service.smtp.expiry": "5d",
    }


def test_table_explains_unset_values(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(entry.taskyard, ["config"]) == 0
    out, err = capsys.readouterr()
    assert err == "settings file: none\n"
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert ["worker.slots", "one per core            default"] in lines
    assert here.is_dir()


def test_file_is_found_from_a_subdirectory_and_paths_begin_at_it(tmp_path: Path) -> None:
    settings_file(tmp_path, '[broker]\nstate = "yard"\n')
    (tmp_path / "sub").mkdir()
    code, out, err = run(tmp_path / "sub", "config", "--json")
    found = {one["key"]: one for one in json.loads(out)["settings"]}
    assert (code, err) == (0, "")
    assert found["broker.state"]["value"] == str(tmp_path / "yard")
    assert found["broker.state"]["place"] == f"{tmp_path}/taskyard.toml:2"


def test_state_of_a_parent_directory_is_shown_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert shown(capsys)["broker.state"] == (".taskyard", "default", None)
    (tmp_path / ".taskyard").mkdir()
    place = (str(tmp_path / ".taskyard"), "default", "parent directory")
    assert shown(capsys)["broker.state"] == place
    assert discovery.locate(environment={}).state == tmp_path / ".taskyard"
    assert shown(capsys, "--state", "here")["broker.state"] == ("here", "flag", "--state")


@pytest.mark.parametrize(
    "words", [["--config", "own.toml", "config"], ["config", "--config=own.toml"]]
)
def test_file_may_be_named_before_the_verb_and_after_it(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings_file(here, "[worker]\nslots = 1\n")
    settings_file(here, "[worker]\nslots = 2\n", "own.toml")
    assert entry.run(entry.taskyard, [*words, "--json"]) == 0
    assert '"file":"own.toml"' in capsys.readouterr().out


def test_unknown_variable_is_reported_and_ignored(tmp_path: Path) -> None:
    code, out, err = called(tmp_path, "config", "--check", TASKYARD_SATE="x")
    assert (code, out) == (0, "")
    assert err.splitlines() == [
        "taskyard: unknown variable TASKYARD_SATE (did you mean TASKYARD_STATE?)",
        "the settings are valid",
    ]


# Check.


def test_check_reports_all_errors(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings_file(here, "[broker]\nsate = 1\n[worker]\nslots = 0\n")
    assert entry.run(entry.taskyard, ["config", "--check"]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "taskyard.toml:2: unknown setting broker.sate (did you mean state?)",
        "taskyard.toml:4: worker.slots must be a whole number from 1 to 100000, not 0",
    ]
    assert err == "taskyard: 2 errors in the settings\n"


def test_check_reports_six_errors_of_six_kinds(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        *('[listen]\ndwork = "tcp://127.0.0.1:99999"', '[lease]\nheartbeat = "6s"'),
        *('[service.smtp]\nmatch = "smtp["', "workers = 20", 'rate = "many"'),
        *('[service.web]\nlane = "{host"', ""),
    ]
    settings_file(here, "\n".join(lines))
    assert entry.run(entry.taskyard, ["config", "--check"]) == 2
    out, err = capsys.readouterr()
    assert [
        line.partition(": ")[2].split(";")[0].split(" (")[0].split(",")[0]
        for line in out.splitlines()
    ] == [
        "lease.expire",
        "service.smtp.match must be a pattern",
        "unknown setting service.smtp.workers",
        "service.smtp.rate must be tasks per time",
        "service.web.lane must have field names in braces",
        "listen.dwork: endpoint tcp://127.0.0.1:99999: port over 65535",
    ]
    assert all(line.startswith("taskyard.toml:") for line in out.splitlines())
    assert "did you mean workers_max?" in out
    assert err == "taskyard: 6 errors in the settings\n"


def test_check_of_good_services_lists_them_in_the_order_in_which_they_are_tried(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[service.slow]\nmatch = "smtp/*.org"\nrate = "1/s"\n[service.smtp]\nhold = true\n'
    settings_file(here, text)
    assert entry.run(entry.taskyard, ["config", "--check"]) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [
        ["service", "match", "sets"],
        ["slow", "smtp/*.org", "rate"],
        ["smtp", "smtp/*", "hold"],
    ]
    assert err == "the settings are valid\n"
    assert entry.run(entry.taskyard, ["config", "--check", "--json"]) == 0
    document = msgspec.json.decode(capsys.readouterr().out)
    assert document["services"][1] == {"name": "smtp", "match": "smtp/*", "sets": ["hold"]}


def test_check_of_another_file_reports_bad_endpoints(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listen = '[listen]\nwmp = "ipc://@w"\ndwork = "tcp://127.0.0.1:99999"\n'
    settings_file(here, f'[broker]\nurl = "tcp://127.0.0.1:0"\n{listen}', "own.toml")
    assert entry.run(entry.taskyard, ["config", "--check", "own.toml", "--json"]) == 2
    document = msgspec.json.decode(capsys.readouterr().out)
    assert (document["file"], document["valid"]) == ("own.toml", False)
    assert [one.partition(": ")[0] for one in document["problems"]] == [
        "own.toml:2",
        "own.toml:5",
        "own.toml:4",
    ]
    assert document["problems"][0].startswith(
        "own.toml:2: broker.url: endpoint tcp://127.0.0.1:0: no port to connect to ("
    )


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_check_of_a_good_file_is_good(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings_file(here, '[service.smtp]\ncommand = "agents/smtp --verbose"\n')
    assert entry.run(entry.taskyard, ["config", "--check", *words]) == 0
    out, err = capsys.readouterr()
    assert ("the settings are valid" in err) is not bool(words)
    assert ('"valid":true' in out) is bool(words)


def test_check_of_a_file_that_is_not_there_is_wrong(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.run(entry.taskyard, ["config", "--check", "none.toml"]) == 2
    assert "settings file none.toml: No such file" in capsys.readouterr().out
    assert here.is_dir()


# Commands.


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["status", "--state", "elsewhere", "--config", "taskyard.toml"],
        ["list", "--broker", "tcp://127.0.0.1:1"],
        ["submit", "--", "true"],
        ["broker"],
        ["worker"],
        ["up"],
        ["down"],
        ["run", "first.jsonl"],
        ["journal", "check"],
        ["config"],
    ],
)
def test_bad_file_is_an_error_of_every_verb(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings_file(here, '[broker]\nsate = "x"\n')
    campaign(here, [{"name": "a", "argv": ["true"]}], "first.jsonl")
    assert entry.run(entry.taskyard, words) == 2
    assert capsys.readouterr() == (
        "",
        "taskyard: taskyard.toml:2: unknown setting broker.sate (did you mean state?)\n",
    )
    assert sorted(path.name for path in here.iterdir()) == ["first.jsonl", "taskyard.toml"]


def test_help_needs_no_good_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings_file(here, "no toml")
    assert entry.run(entry.taskyard, ["worker", "--help-all"]) == 0
    assert "--heartbeat" in capsys.readouterr().out


@contextmanager
def broker_by_file(directory: Path, *words: str) -> Iterator[Broker]:
    settings_file(directory, '[broker]\nstate = "yard"\n[listen]\ndwork = "tcp://127.0.0.1:0"\n')
    with Broker(directory, *words) as broker:
        yield broker


def test_broker_takes_state_and_endpoints_from_the_file(tmp_path: Path) -> None:
    with broker_by_file(tmp_path) as broker:
        assert broker.endpoint == f"ipc://{tmp_path}/yard/broker.sock"
        assert broker.line().startswith("listening dwork tcp://127.0.0.1:")


def test_listen_option_replaces_the_file(tmp_path: Path) -> None:
    with broker_by_file(tmp_path, "--listen", f"dwork=ipc://{tmp_path}/own") as broker:
        assert broker.endpoints[1:] == [f"ipc://{tmp_path}/own"]
        assert broker.terminate() == (0, "", "")
    with broker_by_file(tmp_path, "--native-only") as broker:
        assert broker.terminate() == (0, "", "")


def test_bad_endpoint_is_reported_with_its_location(tmp_path: Path) -> None:
    settings_file(tmp_path, '[listen]\nwmp = ["tcp://127.0.0.1:0", "tcp://nowhere"]\n')
    code, out, err = run(tmp_path, "broker")
    assert (code, out) == (2, "")
    assert err.startswith("taskyard: taskyard.toml:2: listen.wmp")
    assert not (tmp_path / ".taskyard").exists()


def test_commands_and_python_find_the_broker_of_the_file_from_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broker_by_file(tmp_path):
        (tmp_path / "sub").mkdir()
        code, _, err = run_here(tmp_path / "sub", "status", "--json")
        assert (code, err) == (0, "")
        monkeypatch.chdir(tmp_path / "sub")
        with InternalClient() as client:
            assert client.status()["workers"] == 0
    code, out, _ = run_here(tmp_path / "sub", "list", "--json")
    assert (code, json.loads(out)["tasks"]) == (0, [])  # of the stopped state


def test_url_of_the_file_is_where_commands_go_and_a_state_goes_before_it(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        project = tmp_path / "project"
        settings_file(project, f'[broker]\nurl = "{broker.endpoint}"\n')
        assert run_here(project, "status", "--json")[0] == 0
        code, _, err = run_here(project, "down", "--state", "none")
        assert code == 3
        assert "no broker is running on none" in err


def worked(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Any, ...]:
    """Return the endpoint, settings and allowed modules that a worker would start with."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr("taskyard.cli.worker.serve", lambda *given, **_more: seen.append(given))
    assert entry.run(entry.taskyard, ["worker", *words]) == 0
    (broker,), options = seen[0][:2]
    return broker.endpoint, broker.settings, options.allow


def test_worker_options_override_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        *('[broker]\nstate = "yard"', '[lease]\nheartbeat = "200ms"\nexpire = "700ms"'),
        '[worker]\nslots = 3\nservices = ["gpu"]\nallow = ["math"]\n',
    ]
    settings_file(here, "\n".join(lines))
    endpoint, settings, allow = worked(monkeypatch)
    assert (endpoint, allow) == (f"ipc://{here}/yard/broker.sock", ("math",))
    assert (settings.heartbeat_ns, settings.lease_timeout_ns) == (200_000_000, 700_000_000)
    assert (settings.slots, settings.services) == (3, (b"gpu",))
    words = "--heartbeat 1s --lease 3s --slots 4 --service cpu --allow json --broker ipc:///b"
    endpoint, settings, allow = worked(monkeypatch, *words.split())
    assert (endpoint, allow) == ("ipc:///b", ("json",))
    assert (settings.heartbeat_ns, settings.lease_timeout_ns) == (1_000_000_000, 3_000_000_000)
    assert (settings.slots, settings.services) == (4, (b"cpu",))


def test_lease_of_a_flag_is_compared_with_the_heartbeat_of_the_file(tmp_path: Path) -> None:
    settings_file(tmp_path, '[lease]\nheartbeat = "5s"\n')
    code, _, err = run(tmp_path, "worker", "--lease", "14s")
    assert code == 2
    assert "--lease must be at least three times --heartbeat" in err


def test_up_follows_the_file_and_passes_it_on(tmp_path: Path) -> None:
    text = (
        '[broker]\nstate = "yard"\n[listen]\ndwork = "tcp://127.0.0.1:0"\n'
        '[worker]\nprocesses = 2\nslots = 3\nservices = ["exec"]\nallow = ["math"]\n'
    )
    settings_file(tmp_path, text, "own.toml")
    settings_file(tmp_path, "none of these may read this")
    words = ("--config", "own.toml")
    try:
        code, _, err = called(tmp_path, "up", "--detach", "--page", "none", *words)
        assert (code, err.partition(",")[0]) == (0, "up: 2 workers")
        with InternalClient(state=tmp_path / "yard") as client:
            found = sorted(client.workers(), key=lambda one: str(one["name"]))
            assert [(one["name"], one["slots"], one["services"]) for one in found] == [
                ("local-1", 3, ["exec"]),
                ("local-2", 3, ["exec"]),
            ]
        log = (tmp_path / "yard" / "log" / "up.log").read_text()
        assert "listening dwork tcp://127.0.0.1:" in log
    finally:
        assert called(tmp_path, "down", *words)[0] == 0


def test_detached_up_gets_all_settings_and_options(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_file(here, '[listen]\ndwork = "ipc:///d"\n[worker]\nslots = 2\n', "own.toml")
    seen: list[list[str]] = []
    monkeypatch.setattr("taskyard.cli.up._detach", lambda *given: seen.append(given[-1]))
    pages = ([*("--page", "none")], ["--page", "[::1]:1"])
    for more in ([], ["--native-only"], ["--listen", "dwork=ipc:///e"], *pages):
        assert entry.run(entry.taskyard, ["up", "--detach", "--config", "own.toml", *more]) == 0
    usual = ["up", "--workers", "1", "--state", ".taskyard"]
    services, config = ["--service", "exec", "--service", "call"], ["--config", "own.toml"]
    page, listen = ["--page", "127.0.0.1:6180"], ["--listen", "dwork=ipc:///d"]
    assert seen == [
        [*usual, *listen, *services, *config, *page],
        [*usual, *services, *config, *page, "--native-only"],
        [*usual, "--listen", "dwork=ipc:///e", *services, *config, *page],
        [*usual, *listen, *services, *config, *("--page", "none")],
        [*usual, *listen, *services, *config, "--page", "[::1]:1"],
    ]


def test_run_uses_the_file_and_listens_nowhere_else(tmp_path: Path) -> None:
    file = campaign(
        tmp_path,
        [marking("a", slots=2), {"name": "b", "call": "math:factorial", "args": [3]}],
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        lines = [
            *('[broker]\nstate = "yard"', '[worker]\nslots = 2\nallow = ["math"]'),
            f'[listen]\ndwork = "tcp://127.0.0.1:{taken.getsockname()[1]}"\n',
        ]
        settings_file(tmp_path, "\n".join(lines))
        assert called(tmp_path, "broker")[0] == 2
        code, out, _ = run_here(tmp_path, "run", file, "--json")
    assert (code, json.loads(out)["state"]) == (0, "yard")
    code, _, err = called(tmp_path, "run", file, TASKYARD_WORKER_PROCESSES="0")
    assert code == 2
    assert "TASKYARD_WORKER_PROCESSES: worker.processes is 0, but without a running" in err


def test_child_processes_do_not_repeat_warnings_about_variables(tmp_path: Path) -> None:
    file = campaign(tmp_path, [{"name": "a", "argv": ["true"]}])
    code, _, err = called(tmp_path, "run", file, TASKYARD_SATE="x")
    assert (code, err.count("TASKYARD_SATE")) == (0, 1)


def test_settings_are_not_loaded_for_a_list_of_verbs(tmp_path: Path) -> None:
    code = (
        "import sys; from taskyard.cli.entry import run, taskyard; run(taskyard, ['--help']);"
        "sys.exit('taskyard.settings' in sys.modules)"
    )
    done = subprocess.run(
        [TASKYARD[0], "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0


def test_help_names_the_variables_of_settings() -> None:
    known = {key.environment for key in KEYS} | {CONFIG_VARIABLE}
    found: set[object] = set()
    for name in ("worker", "up", "run", "submit", "broker"):
        command = COMMANDS[name].load()
        params = command.get_params(click.Context(command))
        found |= {one.envvar for one in params if isinstance(one, SettingOption)}
    assert found <= known
    assert found >= {"TASKYARD_STATE", "TASKYARD_BROKER", "TASKYARD_KEY", "TASKYARD_WORKER_SLOTS"}
