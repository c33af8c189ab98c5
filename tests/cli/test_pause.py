"""`pause`, `resume` and `services`, and pauses in the output of other commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.yard import Caller, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.yard import Yard


@pytest.fixture
def call(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> Iterator[Caller]:
    """Return a caller of a separate broker, because pauses are global."""
    with running(tmp_path) as yard:
        call = Caller(yard.state, capsysbinary)
        while not call("workers", "--json").document()["workers"]:
            pass  # it has not come yet
        yield call


def test_paused_service_gets_no_work_until_it_is_resumed(call: Caller) -> None:
    assert call("pause", "--service", "exec") == (0, "paused: service exec\n", "")
    call.submit("held")
    assert call("why", "held").out == (
        "held: it is ready, but its service is paused (service exec)\n"
    )
    undo = "(undo with `taskyard resume --service exec`)"
    assert f"paused: service exec {undo}" in call("status").out
    (row,) = [line for line in call("services").out.splitlines() if line.startswith("exec ")]
    assert row.endswith("the service is paused")
    assert call("resume", "--service", "exec") == (0, "nothing is paused\n", "")
    assert call("wait", "held").code == 0


def test_paused_lane_holds_its_own_tasks_alone(call: Caller) -> None:
    call.submit("first", lane="slow")
    call("wait", "first")
    outcome = call("pause", "--service", "exec", "--lane", "slow", "--json").document()
    assert (outcome["paused"], outcome["pauses"]) == (False, [{"service": "exec", "lane": "slow"}])
    call.submit("held", lane="slow")
    call.submit("free")
    assert call("wait", "free").code == 0
    assert "its lane is paused" in call("why", "held").out
    assert call("status").out.splitlines()[2] == (
        "paused: lane slow of service exec (undo with `taskyard resume --service exec --lane slow`)"
    )
    (service,) = [
        one for one in call("services", "--json").document()["services"] if one["name"] == "exec"
    ]
    assert (service["paused"], service["lanes_paused"]) == (False, ["slow"])
    call("resume", "--service", "exec", "--lane", "slow")
    assert call("wait", "held").code == 0


def test_everything_can_be_paused_and_a_service_stays_so(call: Caller) -> None:
    call("pause", "--service", "call")
    assert call("pause", "--all").out == "paused: everything, service call\n"
    call.submit("held")
    assert "everything is paused" in call("why", "held").out
    undo = "(undo with `taskyard resume --all` and `taskyard resume --service call`)"
    assert undo in call("status").out
    assert call("resume", "--all").out == "still paused: service call\n"
    assert call("wait", "held").code == 0


def test_services_are_listed_with_slots_and_counts(call: Caller) -> None:
    call.submit("a")
    call("wait", "a")
    header, *rows = call("services").out.splitlines()
    assert header.split()[:3] == ["SERVICE", "WORKERS", "USED"]
    assert [row.split()[0] for row in rows] == ["exec", "call"]
    (service,) = [
        one for one in call("services", "--json").document()["services"] if one["name"] == "exec"
    ]
    assert (service["workers"], service["slots"], service["counts"]["done"]) == (1, 2, 1)


@pytest.mark.parametrize("verb", ["pause", "resume"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing chosen to "),
        (("--lane", "l"), "unknown lane 'l' (give its --service)"),
        (("--all", "--service", "exec"), "--all excludes"),
        (("--service", "exce"), "unknown service 'exce' (see `taskyard services`)"),
    ],
)
def test_target_of_a_pause_is_required(
    yard: Yard,
    capsysbinary: pytest.CaptureFixture[bytes],
    verb: str,
    words: tuple[str, ...],
    message: str,
) -> None:
    outcome = Caller(yard.state, capsysbinary)(verb, *words)  # nothing is paused by it: one for all
    assert outcome.code == 2
    assert message in outcome.err


def test_pause_outlives_a_killed_broker(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with running(tmp_path / "other", worker=False) as yard:
        call = Caller(yard.state, capsysbinary)
        call("pause", "--all")
        yard.kill_broker()
        yard.start_broker()
        assert call("status", "--json").document()["paused"] is True
