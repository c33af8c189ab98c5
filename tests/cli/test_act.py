"""The verbs that act: retry, cancel, drain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.yard import Caller, Yard, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("yard") / "state") as running_yard:
        yield running_yard


@pytest.fixture
def call(yard: Yard, capsysbinary: pytest.CaptureFixture[bytes]) -> Caller:
    return Caller(yard, capsysbinary)


def submit(call: Caller, name: str, *words: str, **options: str) -> None:
    given = [part for key, value in options.items() for part in (f"--{key}", value)]
    assert call("submit", "--name", name, *given, "--", *(words or ("true",))).code == 0


def state(call: Caller, name: str) -> str:
    return str(call("show", name, "--json").document()["task"]["state"])


def test_retry_lets_what_waits_behind_go_on(call: Caller, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    submit(call, "flaky", "test", "-e", str(flag))
    submit(call, "next", after="flaky")
    assert call("wait", "flaky", "next").code == 1
    flag.touch()
    assert call("retry", "flaky") == (0, "retried 1 task\n", "")
    assert call("wait", "flaky", "next").code == 0
    assert call("retry", "flaky").out.startswith("nothing to retry")


def test_retry_of_everything_that_failed(call: Caller) -> None:
    for name, campaign in (("f1", "x"), ("f2", "y")):
        submit(call, name, "false", campaign=campaign)
    call("wait", "f1", "f2")
    assert call("retry", "--failed", "--campaign", "x", "--json").document()["retried"] == 1
    call("wait", "f1")
    assert call("retry", "--failed").out == "retried 2 tasks\n"
    call("wait", "f1", "f2")
    assert call("cancel", "--failed").out == "cancelled 2 tasks\n"


def test_retry_makes_a_delayed_task_due(call: Caller) -> None:
    submit(call, "sleepy", due="1h")
    assert call("retry", "--only", "delayed").out == "retried 1 task\n"
    assert call("wait", "sleepy").code == 0


def test_cancel_takes_along_what_waits_and_ends_what_runs(call: Caller) -> None:
    submit(call, "long", "sleep", "600")
    submit(call, "after-long", after="long")
    submit(call, "beside", due="1h", lane="beside")
    assert call("cancel", "long") == (0, "cancelled 2 tasks\n", "")
    assert (state(call, "after-long"), state(call, "beside")) == ("cancelled", "delayed")
    assert call("cancel", "--lane", "beside", "--json").document()["cancelled"] == 1
    assert call("cancel", "long").out.startswith("nothing to cancel")


def test_cancelling_everything_wants_a_yes(call: Caller) -> None:
    submit(call, "one", due="1h")
    submit(call, "two", due="1h", campaign="c")
    refused = call("cancel", "--all")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert state(call, "one") == "delayed"
    assert call("cancel", "--all", "--campaign", "c", "--yes").code == 2
    assert call("cancel", "--all", "--yes").out == "cancelled 2 tasks\n"


@pytest.mark.parametrize("verb", ["retry", "cancel"])
def test_acts_want_to_know_on_what(call: Caller, verb: str) -> None:
    assert "say which tasks" in call(verb).err
    assert "give names, or" in call(verb, "a", "--failed").err
    there = f"there-{verb}"
    submit(call, there, due="1h")
    unknown = call(verb, there, "not-there")
    assert unknown.code == 2
    assert "no task is called not-there" in unknown.err
    assert state(call, there) == "delayed"
    call("cancel", there)


def test_drained_worker_goes_home_and_the_broker_with_the_last(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with running(tmp_path / "state", worker=False) as yard:
        call = Caller(yard, capsysbinary)
        yard.start_worker("--name", "one").start_worker("--name", "two")
        while len(call("workers", "--json").document()["workers"]) < 2:
            pass  # the second one has not come yet
        assert call("drain").code == 2
        assert "no worker is called three" in call("drain", "one", "three").err
        assert call("drain", "one") == (0, "drained 1 worker\n", "")
        while [worker["name"] for worker in call("workers", "--json").document()["workers"]] != [
            "two"
        ]:
            pass  # it says goodbye
        said = call("drain", "--all")
        assert said.out.startswith("drained 1 worker, and the broker leaves")
        assert yard.wait_for_end() == 0
