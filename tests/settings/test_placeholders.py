"""Placeholders in an agent's command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.settings.values import command_problem
from taskyard.worker.agents.rules import fill_command, has_places
from tests.settings.kit import loaded, written, wrong

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("plain", "plain"),
        ("--lane={lane}", "--lane=a b"),
        ("{service}/{lane}", "smtp/a b"),
        ("{{lane}}", "{lane}"),
        ("{{{lane}}}", "{a b}"),
        ("{{}}", "{}"),
        ("{other}", "{other}"),  # from a broker that does not check it
    ],
)
def test_placeholders_are_filled_in_within_a_word(word: str, filled: str) -> None:
    assert fill_command(("agent", word), "smtp", "a b") == ("agent", filled)
    assert has_places(("agent", word)) == (filled != fill_command(("agent", word), "x", "y")[1])


def test_lane_with_braces_is_not_filled_in_again() -> None:
    assert fill_command(("a", "{lane}{service}"), "s", "{service}") == ("a", "{service}s")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["a", "{host}"], "'{host}' has other braces than {lane} and {service} (write {{ and }}"),
        (["a", "{}"], "'{}' has other braces than"),
        (["a", "{ lane }"], "'{ lane }' has other braces than"),
        (["a", "{lane}}"], "'{lane}}' has other braces than"),
        (
            ["env", "sh", "-c", "deliver {lane}"],
            "'deliver {lane}' has {lane} in the script of sh, which clients would write then",
        ),
        (["agents/{lane}"], "'agents/{lane}' has {lane} in the program, which clients would"),
    ],
)
def test_other_braces_are_refused(words: list[str], problem: str, tmp_path: Path) -> None:
    found = command_problem(words)
    assert found is not None
    assert found.startswith(problem)
    (in_file,) = wrong(written(tmp_path, f"[service.s]\ncommand = {words}\n"))
    assert in_file == f"taskyard.toml:2: service.s.command must be a command, but {found}"


@pytest.mark.parametrize("command", ["agents/{service} --lane={lane}", "a '{{x}}'", "{{lane}}"])
def test_placeholders_and_doubled_braces_are_accepted(command: str, tmp_path: Path) -> None:
    settings = loaded(written(tmp_path, f'[service.s]\ncommand = "{command}"\n'))
    assert settings.services["s"].command is not None
