"""Every planted bug is caught by the checkers, and planting leaves nothing behind."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.__main__ import HUNT_SCHEDULES_MAX, killing_seeds, main
from simulator.mutations import MUTATIONS
from simulator.mutations.registry import PAIR_MUTATIONS
from simulator.schedule import find_killing_seed, run

ROOT = Path(__file__).parents[2]
SEEDS = killing_seeds()

#: Schedules that are tried when a killing seed is outdated. A rare bug may need hundreds.
RETRIED_SCHEDULES = 40
RETRIED_SCHEDULES_OF_PAIRS = 300

#: The command that records new seeds.
UPDATE = "`./yard sim --bugs --update`"

#: Errors of a planted bug that no longer fits the code: it proves nothing about the checkers.
MISTAKES = ("AttributeError", "ImportError", "NameError", "TypeError")


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_is_caught(
    name: str, record_property: Callable[[str, object], None], pytestconfig: pytest.Config
) -> None:
    # The last killing seed first: a change of the simulator may move it. Then others are tried.
    whole = pytestconfig.getoption("--whole")
    is_pair = MUTATIONS[name] in PAIR_MUTATIONS
    retried = RETRIED_SCHEDULES_OF_PAIRS if is_pair else RETRIED_SCHEDULES
    others = range(HUNT_SCHEDULES_MAX if whole else retried)
    verdict = find_killing_seed(MUTATIONS[name], [SEEDS.get(name, 0), *others])
    assert verdict is not None, f"{name}: killing seed outdated (see {UPDATE})"
    assert verdict.checker not in MISTAKES, verdict.text
    record_property("simulated planted bugs caught", 1)
    if verdict.seed != SEEDS.get(name):
        record_property(f"simulated killing seeds outdated (see {UPDATE})", 1)


def test_there_are_as_many_planted_bugs_as_the_page_says() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    counts = re.findall(r"\| (\d+)(?:, all caught| planted, all caught) \|", page)
    assert counts == [str(len(MUTATIONS))] * 2


def test_planted_bugs_have_a_sentence() -> None:
    assert [name for name in MUTATIONS if not (MUTATIONS[name].__doc__ or "").endswith(".")] == []


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


def test_update_replaces_outdated_seeds_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "seeds.txt"
    monkeypatch.setattr("simulator.__main__.KILLING_SEEDS", file)
    monkeypatch.setattr("simulator.__main__.SHORTER_SCHEDULES", 0)
    bug, other = "retry_never_ends", "request_answered_twice"
    good = SEEDS[bug]
    outdated = next(
        seed for seed in range(100) if find_killing_seed(MUTATIONS[bug], [seed]) is None
    )
    for recorded in (good, outdated):
        file.write_text(f"{bug} {recorded}\n{other} 7\n")
        assert main(["--bug", bug, "--start", str(good), "--update"]) == 0
        assert sorted(file.read_text().splitlines()) == [f"{other} 7", f"{bug} {good}"]
        is_kept = f"{bug}: caught by the recorded seed {good}\n" in capsys.readouterr().out
        assert is_kept == (recorded == good)


def test_command_fails_when_a_promise_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with MUTATIONS["request_answered_twice"]():
        assert main(["--schedules", "2"]) == 1
    assert "seed " in capsys.readouterr().out
