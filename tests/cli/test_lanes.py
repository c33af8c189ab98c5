"""`lanes`, `services`, `move`, `expire`, and lanes in other commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from docs import schemas
from taskyard.cli import connection
from taskyard.cli.entry import run, taskyard
from taskyard.cli.inspect import ROWS_SHOWN, row, sort_key
from tests.cli.yard import Caller, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTINGS = """
[service.slow]
match = "gpu/*.org"
workers_max = 2
[service.kept]
hold = true
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run a broker without workers, with tasks in several lanes of several services."""
    directory = tmp_path_factory.mktemp("lanes")
    (directory / "taskyard.toml").write_text(SETTINGS)
    with running(directory, worker=False) as yard:
        yield yard.state


@pytest.fixture
def call(state: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> Iterator[Caller]:
    """Return a caller. Each test uses its own task names."""
    call = Caller(state, capsysbinary)
    yield call
    call("cancel", "--all", "--yes")


def lanes(call: Caller, *words: str) -> list[tuple[str, str]]:
    found = call("lanes", "--json", *words)
    schemas.check(found.out)
    return [(one["service"], one["lane"]) for one in found.document()["lanes"]]


def task(call: Caller, name: str) -> dict[str, Any]:
    found: dict[str, Any] = call("show", name, "--json").document()["task"]
    return found


def test_waiting_lanes_are_listed_first(call: Caller) -> None:
    call.submit("later", lane="a", due="1h")
    call.submit("behind", lane="b", after="later")
    call.submit("now", lane="c")
    call.submit("open")
    assert lanes(call) == [("exec", "c"), ("exec", ""), ("exec", "a"), ("exec", "b")]
    header, *rows = call("lanes").out.splitlines()
    assert header.split("  ")[0] == "SERVICE"
    assert rows[0].split()[:2] == ["exec", "c"]
    assert "no worker" in rows[0]


def test_lanes_of_a_service_or_a_pattern_are_listed_alone(call: Caller) -> None:
    for lane in ("a.org", "b.org", "a.com"):
        call.submit(f"x-{lane}", lane=lane)
    call.submit("gpu", lane="a.org", service="gpu")
    assert lanes(call, "--service", "gpu") == [("gpu", "a.org")]
    assert lanes(call, "--lane", "*.org", "--service", "exec") == [
        ("exec", "a.org"),
        ("exec", "b.org"),
    ]
    assert lanes(call, "--lane", "none") == []
    assert call("lanes", "--lane", "none").err == "no matching lane has tasks\n"


def test_lane_has_its_rule_its_limits_and_its_times(call: Caller) -> None:
    call.submit("one", lane="a.org", service="gpu")
    call.submit("two", lane="a.org", service="gpu", due="1h")
    (found,) = call("lanes", "--json", "--service", "gpu").document()["lanes"]
    assert (found["rule"], found["rule_limit"], found["limit"]) == ("slow", 2, 1)
    assert (found["tasks"], found["ready"], found["delayed"], found["leased"]) == (2, 1, 1, 0)
    assert found["oldest"] < found["next_due"]
    assert (found["reason"], found["attempts"]) == ("no-worker", 0)


def test_table_in_a_pipe_has_all_lanes(call: Caller) -> None:
    for number in range(5):
        call.submit(f"t{number}", lane=f"l{number}")
    assert len(call("lanes").out.splitlines()) == 6


def test_many_lanes_are_listed_page_by_page(call: Caller, tmp_path: Path) -> None:
    names = [f"n{number:04}" for number in range(1203)]
    file = tmp_path / "many.jsonl"
    file.write_text("".join(f'{{"name":"{one}","argv":["a"],"lane":"{one}"}}\n' for one in names))
    assert call("load", str(file)).code == 0
    assert sorted(lane for _, lane in lanes(call)) == names
    services = call("services", "--json").document()["services"]
    (service,) = [one for one in services if one["name"] == "exec"]
    assert (service["lanes"], service["reasons"]) == (1203, {"no-worker": 1203})


def test_services_summarize_the_reasons_of_their_lanes(call: Caller) -> None:
    call.submit("held", service="kept", lane="l")
    call.submit("org", service="gpu", lane="a.org")
    call.submit("com", service="gpu", lane="a.com", due="1h")
    outcome = call("services", "--json")
    schemas.check(outcome.out)
    found = {one["name"]: one for one in outcome.document()["services"]}
    assert found["gpu"]["rules"] == [{"name": "", "limit": 0}, {"name": "slow", "limit": 2}]
    assert found["gpu"]["why"] == "1 lane: delayed, 1 lane: no worker"
    assert found["gpu"]["oldest"] < found["gpu"]["next_due"]
    (line,) = [one for one in call("services").out.splitlines() if one.startswith("gpu ")]
    assert "defaults, slow" in line
    assert "none, 2" in line


def test_why_explains_a_lane(call: Caller) -> None:
    call.submit("kept-one", service="kept", lane="l")
    outcome = call("why", "--lane", "l")
    assert outcome.out.startswith("kept/l: ")
    assert "retry --service kept --lane l" in outcome.out
    message = call("why", "--service", "kept", "--json")
    schemas.check(message.out)
    assert [one["reason"] for one in message.document()["lanes"]] == ["held"]
    assert "give names of tasks, or --campaign, or --lane and --service" in call("why").err
    assert (
        "give names of tasks, or --campaign, or --lane and --service"
        in call("why", "kept-one", "--lane", "l").err
    )
    assert "lane m: no waiting or running tasks" in call("why", "--lane", "m").err


def test_move_puts_tasks_into_another_lane_or_service(call: Caller) -> None:
    call.submit("m1", lane="a")
    call.submit("m2", lane="a")
    assert call("move", "m1", "--to-lane", "b") == (0, "moved 1 task\n", "")
    assert task(call, "m1")["lane"] == "b"
    outcome = call("move", "--lane", "a", "--to-lane", "", "--to-service", "gpu", "--json")
    schemas.check(outcome.out)
    assert outcome.document()["moved"] == 1
    assert (task(call, "m2")["lane"], task(call, "m2")["service"]) == ("", "gpu")
    assert call("move", "m2", "--to-lane", "").out.startswith("nothing to move")
    assert "missing target" in call("move", "m1").err
    assert "no tasks chosen" in call("move", "--to-lane", "x").err


def test_expired_lane_has_failed_and_can_be_retried(call: Caller) -> None:
    call.submit("e1", lane="a")
    call.submit("e2", lane="a", due="1h")
    outcome = call("expire", "--lane", "a", "--json")
    schemas.check(outcome.out)
    assert outcome.document()["expired"] == 2
    assert task(call, "e1")["state"] == "failed"
    assert call("expire", "e1").out.startswith("nothing to expire")
    assert call("retry", "--lane", "a").out == "retried 2 tasks\n"
    assert task(call, "e2")["state"] == "ready"


def test_flush_makes_delayed_tasks_due_and_releases_held_ones(call: Caller) -> None:
    call.submit("flushed", service="kept", lane="l", due="1h")
    assert call("retry", "--service", "kept", "--lane", "l").out == "retried 1 task\n"
    assert call("lanes", "--service", "kept", "--json").document()["lanes"][0]["reason"] == (
        "no-worker"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("retry", "--lane", "l"),
        ("cancel", "--lane", "l"),
        ("expire", "--lane", "l"),
        ("move", "--lane", "l", "--to-lane", "m"),
        ("pause", "--lane", "l"),
        ("resume", "--lane", "l"),
        ("why", "--lane", "l"),
    ],
)
def test_lane_that_several_services_have_is_not_guessed(
    call: Caller, words: tuple[str, ...]
) -> None:
    call.submit(f"one-{words[0]}", service="gpu", lane="l")
    call.submit(f"two-{words[0]}", service="kept", lane="l")
    outcome = call(*words)
    assert outcome.code == 2
    assert outcome.err == (
        "taskyard: lane l: exists in several services, gpu, kept (give --service)\n"
    )


def test_lane_of_one_service_alone_can_be_paused_by_its_name(call: Caller) -> None:
    call.submit("p1", service="gpu", lane="[*]")
    call.submit("p2", service="kept", lane="*")
    assert call("pause", "--lane", "[*]").out == "paused: lane [*] of service gpu\n"
    assert call("lanes", "--service", "gpu", "--json").document()["lanes"][0]["reason"] == "paused"
    assert call("resume", "--lane", "[*]").out == "nothing is paused\n"


def test_lanes_of_a_stopped_state_are_as_a_broker_of_its_settings_would_have_them(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taskyard.toml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(connection, "FIRST_ANSWER_SECONDS", 0.1)
    with running(tmp_path, worker=False) as yard:
        Caller(yard.state, capsysbinary).submit("held", service="kept", lane="l")
    call = Caller(yard.state, capsysbinary)
    (found,) = call("lanes", "--json").document()["lanes"]
    assert (found["rule"], found["reason"]) == ("kept", "held")
    assert call("services").code == 0
    assert call("why", "--lane", "l").out.startswith("kept/l: ")
    assert run(taskyard, ["expire", "held"]) == 3


def of_lane(**counts: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("tasks", "ready", "delayed", "blocked", "leased", "limit"), 0)
    rest = {"service": "s", "lane": "", "oldest": None, "next_due": None, "why": "", "attempts": 0}
    return nothing | rest | counts


def test_lanes_are_ranked_by_reason() -> None:
    ranked = [
        of_lane(ready=1, delayed=1),
        of_lane(delayed=1, blocked=1),
        of_lane(blocked=1),
        of_lane(leased=1, ready=5),
        of_lane(),
    ]
    assert [sort_key(one) for one in ranked] == [0, 1, 2, 3, 4]


def test_row_has_ages_and_due_times() -> None:
    lane = of_lane(oldest=100.0, next_due=165.0, tasks=3, ready=2, leased=1, limit=4)
    assert row(lane, 160.0) == ("s", "", 3, 2, 1, 4, "1 min", 0, "in 5 s", "")
    assert row(lane, 170.0)[8] == "now"
    assert row(of_lane(), 0.0)[5:9] == ("none", "", 0, "")


def test_terminal_gets_a_screen_of_lanes_and_the_number_of_the_rest(
    call: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = [f"s{number:02}" for number in range(ROWS_SHOWN + 2)]
    file = tmp_path / "screen.jsonl"
    file.write_text("".join(f'{{"name":"{one}","argv":["a"],"lane":"{one}"}}\n' for one in names))
    assert call("load", str(file)).code == 0
    monkeypatch.setattr("taskyard.cli.inspect.is_on_terminal", lambda: True)
    outcome = call("lanes")
    assert outcome.err == "… and 2 more (all: `taskyard lanes | less`)\n"
    assert len(outcome.out.splitlines()) == 1 + ROWS_SHOWN
    monkeypatch.setattr("taskyard.cli.inspect.is_on_terminal", lambda: False)
    assert len(call("lanes").out.splitlines()) == 1 + len(names)
