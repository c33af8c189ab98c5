"""Workers whose agents are chosen by the broker's rules."""

from __future__ import annotations

import shlex
import signal
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from taskyard.client.internal import InternalClient
from taskyard.worker.agents.rules import fill_command
from tests.kit.processes import (
    PATIENCE_SECONDS,
    Broker,
    Worker,
    all_children_of,
    marks,
    run_here,
    until,
)
from tests.worker.agents_harness import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

#: An agent whose payloads contain its report.
OBEYS = shell('report "$lane" "$payload"')


def set_service(directory: Path, argv: tuple[str, ...], *more: str) -> None:
    """Write the settings of the service `s`."""
    command = shlex.join(argv).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = ["[service.s]", f'command = "{command}"', *more, ""]
    beside = directory / "taskyard.toml.new"
    beside.write_text("\n".join(lines))
    beside.replace(directory / "taskyard.toml")


def script(command: tuple[str, ...]) -> str:
    """Return a shell script that runs a command of the settings."""
    return f"#!/bin/sh\nexec {shlex.join(fill_command(command, '', ''))}\n"


class Yard:
    """A broker, a client, and workers of the service `s`."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.broker = stack.enter_context(Broker(directory))
        self.client = stack.enter_context(InternalClient(state=directory / ".taskyard"))

    def hire(self, *options: str) -> Worker:
        words = ("--service", "s", *options)
        return self._stack.enter_context(Worker(self._directory, *words))

    def submit(self, name: str, payload: bytes, **terms: Any) -> Any:
        return self.client.submit(payload, name=name, service="s", **terms)

    def states(self, *names: str) -> list[str]:
        return [self.client.show(name)["state"] for name in names]


@contextmanager
def a_yard(directory: Path) -> Iterator[Yard]:
    with ExitStack() as stack:
        yield Yard(directory, stack)


def test_worker_without_a_command_starts_agents_by_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agents" / "here"
    agent.parent.mkdir()
    says = shell('report "$lane,$GIVEN,$TAKEN,$OTHER" ok')
    agent.write_text(script(says))
    agent.chmod(0o700)
    set_service(tmp_path, ("agents/here",))
    monkeypatch.setenv("TAKEN", "two")
    monkeypatch.setenv("OTHER", "three")
    with a_yard(tmp_path) as yard:
        yard.hire("--env", "GIVEN=one", "--env", "TAKEN")
        assert yard.submit("a", b"x", lane="disk-1").result(PATIENCE_SECONDS) == b"disk-1,one,two,"


def test_long_result_is_passed_whole(tmp_path: Path) -> None:
    size = 1_500_000
    set_service(tmp_path, shell(f"printf '%s\\t%{size}d\\tok text\\n' \"$id\" 7"))
    with a_yard(tmp_path) as yard:
        yard.hire("--slots", "1")
        assert yard.submit("a", b"x").result(PATIENCE_SECONDS) == b"7".rjust(size)
        assert run_here(tmp_path, "results", "a") == (0, "7".rjust(size), "")
        assert run_here(tmp_path, "log", "a", "--stderr") == (0, "text", "")


def test_lane_in_the_command_is_that_of_the_agents_tasks(tmp_path: Path) -> None:
    set_service(tmp_path, (*shell('report "$0,$lane" ok'), "{service}/{lane}"))
    with a_yard(tmp_path) as yard:
        yard.hire("--slots", "1")
        futures = [yard.submit(f"t-{lane}", b"x", lane=lane) for lane in ("a", "b b", "a/c")]
        assert [one.result(PATIENCE_SECONDS) for one in futures] == [
            b"s/a,a",
            b"s/b b,b b",
            b"s/a/c,a/c",
        ]


def test_rules_that_change_are_followed_without_a_restart(tmp_path: Path) -> None:
    set_service(tmp_path, shell("report old ok", after="echo > bye"))
    with a_yard(tmp_path) as yard:
        host = yard.hire("--slots", "1")
        assert yard.submit("first", b"x").result(PATIENCE_SECONDS) == b"old"
        (before,) = all_children_of(host)
        set_service(tmp_path, shell("report new ok"))
        yard.broker.send(signal.SIGHUP)
        until((tmp_path / "bye").exists)
        assert yard.submit("second", b"x").result(PATIENCE_SECONDS) == b"new"
        assert before not in all_children_of(host)


def test_limit_of_a_lane_holds_over_all_hosts(tmp_path: Path) -> None:
    notes = 'echo "begin-$lane" >> marks; echo "end-$lane" >> marks; report r ok'
    set_service(tmp_path, shell(notes), "overfeed = 2")
    lanes, count = ("a", "b", "c"), 20
    with a_yard(tmp_path) as yard:
        futures = [
            yard.submit(f"{lane}-{number}", b"x", lane=lane)
            for number in range(count)
            for lane in lanes
        ]
        for _ in range(2):
            yard.hire("--slots", "2")
        for future in futures:
            future.result(60)
    for lane in lanes:
        seen = [mark for mark in marks(tmp_path) if mark.endswith(lane)]
        assert seen == [f"begin-{lane}", f"end-{lane}"] * count


def test_task_that_kills_its_agents_fails_and_its_lane_continues(
    tmp_path: Path,
) -> None:
    set_service(tmp_path, shell("[ $payload = die ] && exit 3; report r ok"), "retries = [0.05]")
    with a_yard(tmp_path) as yard:
        yard.hire("--slots", "1")
        bad, good = yard.submit("bad", b"die", lane="l"), yard.submit("good", b"x", lane="l")
        assert good.result(60) == b"r"
        assert "the agent died: exit status 3" in str(bad.exception(60))
        assert (yard.client.show("bad")["failures"], yard.client.show("good")["attempt"]) == (2, 1)


def test_deferred_lane_waits_with_its_task_without_charging_others(
    tmp_path: Path,
) -> None:
    set_service(tmp_path, OBEYS, "retries = [100]", "overfeed = 2")
    with a_yard(tmp_path) as yard:
        names = [f"a{number}" for number in range(5)]
        for name in names:
            yard.submit(name, b"deferall host down", lane="a")
        other = yard.submit("b", b"ok", lane="b")
        yard.hire("--slots", "1")
        assert other.result(PATIENCE_SECONDS) == b"b"
        until(lambda: yard.states(*names) == ["delayed"] * 5)
        assert [yard.client.show(name)["failures"] for name in names] == [1, 0, 0, 0, 0]


def test_task_moved_to_the_end_of_its_lane_runs_last(tmp_path: Path) -> None:
    first = "[ $payload = later ] && [ ! -e put ]"
    once = f"{first} && {{ echo > put; report r deferback; echo '#hungry'; continue; }}"
    set_service(tmp_path, shell(f"echo $id >> marks; {once}; report r ok"))
    with a_yard(tmp_path) as yard:
        futures = [
            yard.submit(name, payload, lane="l")
            for name, payload in [("a", b"later"), ("b", b"x"), ("c", b"x")]
        ]
        yard.hire("--slots", "1")
        for future in futures:
            future.result(PATIENCE_SECONDS)
        assert [mark.partition("/")[0] for mark in marks(tmp_path)] == ["a", "b", "c", "a"]
        assert yard.client.show("a")["failures"] == 0


def test_heartbeat_carries_the_agent_error_until_agents_start(tmp_path: Path) -> None:
    set_service(tmp_path, ("./agent",))
    with a_yard(tmp_path) as yard:
        yard.hire("--slots", "1")
        future = yard.submit("a", b"ok", lane="l")
        reason = "can't start agent ./agent: No such file or directory"
        until(lambda: [one["agent_error"] for one in yard.client.workers()] == [reason])
        beside = tmp_path / "agent.new"
        beside.write_text(script(OBEYS))
        beside.chmod(0o700)
        beside.replace(tmp_path / "agent")
        assert future.result(60) == b"l"
        until(lambda: [one["agent_error"] for one in yard.client.workers()] == [""])
