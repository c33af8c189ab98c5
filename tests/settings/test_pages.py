"""The page about settings has the table of the code, and what it shows is what is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from taskyard.cli.entry import run, taskyard
from taskyard.settings.keys import KEYS
from taskyard.settings.reference import table
from tests.settings.kit import written

if TYPE_CHECKING:
    import pytest

PAGE: Final = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()


def test_page_has_the_table_of_the_code() -> None:
    assert table() in PAGE, "run ./yard docs"


def test_table_has_what_is_used_and_nothing_else() -> None:
    named = re.findall(r"^\| `([\w.-]+)`", table(), re.MULTILINE)
    assert named == [key.path for key in KEYS if key.is_used]
    assert "broker.page" not in named


def test_example_of_the_page_is_shown_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example, printed = re.findall(r"```(?:toml|text)\n(.*?)```", PAGE, re.DOTALL)
    written(tmp_path, example)
    monkeypatch.chdir(tmp_path)
    assert run(taskyard, ["config"]) == 0
    assert capsys.readouterr().out == printed
