"""The generated pages are up to date."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import click

from docs import pages, reference
from taskyard.cli.commands import COMMANDS
from taskyard.errors import ExitCode

DOCS: Final = Path(__file__).parents[2] / "docs"


def test_pages_are_made_from_the_code() -> None:
    made = pages.pages(DOCS)
    assert [name for name in made if (DOCS / name).read_text() != made[name]] == [], "./yard docs"


def test_changed_pages_are_written_and_stale_schemas_removed(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs)
    assert pages.write(docs) == []
    (docs / "schemas" / "gone.json").write_text("{}")
    (docs / "reference.md").unlink()
    settings = docs / "settings.md"
    kept = settings.read_text()
    settings.write_text(kept.replace("| `broker.state` |", "| `broker.sate` |"))
    assert pages.write(docs) == ["reference.md", "schemas/gone.json", "settings.md"]
    assert settings.read_text() == kept
    assert not (docs / "schemas" / "gone.json").exists()


def test_reference_has_every_verb_and_exit_code() -> None:
    page = reference.page()
    assert [verb for verb in COMMANDS if f"\n### taskyard {verb}\n" not in page] == []
    assert "\n### taskyard keys revoke\n" in page
    assert [*reference.EXIT_MEANINGS] == [*ExitCode]


def test_exit_codes_match_operating_md() -> None:
    operating = (DOCS / "operating.md").read_text()
    rows = [f"| {int(code)} | {text} |\n" for code, text in reference.EXIT_MEANINGS.items()]
    assert "".join(rows) in operating


def test_every_verb_has_an_example() -> None:
    commands = {name: verb.load() for name, verb in COMMANDS.items()}
    silent = [name for name, command in commands.items() if not command.epilog]
    assert silent == [name for name in silent if isinstance(commands[name], click.Group)]
    for name, command in commands.items():
        below = command.commands.values() if isinstance(command, click.Group) else ()
        assert all(one.epilog for one in below), name
