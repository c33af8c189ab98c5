"""Every planted bug is caught by the checkers, and planting leaves nothing behind."""

from collections.abc import Callable

import pytest

from simulator.__main__ import HUNT_SCHEDULES_MAX, killing_seeds, main
from simulator.mutations import MUTATIONS
from simulator.schedule import find_killing_seed, run

SEEDS = killing_seeds()

#: Errors of a planted bug that no longer fits the code: it proves nothing about the checkers.
MISTAKES = ("AttributeError", "ImportError", "NameError", "TypeError")


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_is_caught(name: str, record_property: Callable[[str, object], None]) -> None:
    # The last killing seed first: a change of the simulator may move it, and then all are tried.
    seeds = [SEEDS.get(name, 0), *range(HUNT_SCHEDULES_MAX)]
    verdict = find_killing_seed(MUTATIONS[name], seeds)
    assert verdict is not None
    assert verdict.checker not in MISTAKES, verdict.text
    record_property("simulated planted bugs caught", 1)


def test_there_are_enough_planted_bugs() -> None:
    assert len(MUTATIONS) >= 40


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_has_a_sentence(name: str) -> None:
    assert (MUTATIONS[name].__doc__ or "").endswith(".")


def test_planting_leaves_nothing_behind() -> None:
    before = run(7)
    for planted in MUTATIONS.values():
        with planted():
            pass
    assert run(7) == before


def test_command_prints_the_checker_that_caught_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    start = str(SEEDS["retry_never_ends"])
    assert main(["--bug", "retry_never_ends", "--start", start]) == 0
    assert "retry_never_ends: caught by retry" in capsys.readouterr().out


def test_command_fails_when_a_promise_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with MUTATIONS["request_answered_twice"]():
        assert main(["--schedules", "2"]) == 1
    assert "seed " in capsys.readouterr().out
