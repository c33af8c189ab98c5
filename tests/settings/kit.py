"""Write a settings file to a directory and load it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.settings.loader import load, problems

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.settings.loader import Settings


def written(directory: Path, text: str) -> Path:
    file = directory / "taskyard.toml"
    file.write_text(text)
    return file


def loaded(file: Path | None = None, **variables: str) -> Settings:
    return load(file, environment=variables)


def wrong(file: Path | None = None, **variables: str) -> list[str]:
    """Return all problems, without the directory of the file."""
    found, _ = problems(file, variables)
    return [one.removeprefix(f"{file.parent}/" if file else "") for one in found]
