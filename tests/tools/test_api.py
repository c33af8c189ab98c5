"""The API page: every public name is documented, and its arguments are explained."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

import taskyard
from docs import api
from docs.api import Entry

ENTRIES: Final = {entry.path: entry for entry in api.entries()}


def test_page_has_every_public_name() -> None:
    page = api.page()
    assert [name for name in taskyard.__all__ if f"\n## taskyard.{name}\n" not in page] == []
    assert "\n### taskyard.Client.submit\n" in page
    assert "\n## taskyard.testing.broker\n" in page


def test_every_public_name_has_a_docstring() -> None:
    assert [path for path, entry in ENTRIES.items() if not entry.text] == []


def test_every_argument_is_explained() -> None:
    missing = {path: unexplained(entry) for path, entry in ENTRIES.items()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_common_arguments_are_used() -> None:
    used = {name for entry in ENTRIES.values() for name in entry.parameters}
    assert [name for name in api.COMMON_ARGUMENTS if name not in used] == []


def test_inner_members_exist() -> None:
    for name, members in api.INNER_MEMBERS.items():
        known = dir(getattr(taskyard, name))
        assert [member for member in members if member not in known] == [], name


def unexplained(entry: Entry) -> list[str]:
    """Return arguments that neither the docstring, one that it names, nor the page explains."""
    text = " ".join([entry.text, *(ENTRIES[path].text for path in named_in(entry))])
    words = {*re.findall(r"\w+", text), *api.COMMON_ARGUMENTS}
    return [name for name in entry.parameters if name not in words]


def named_in(entry: Entry) -> list[str]:
    """Return the entries that a docstring names, such as `Client.map` or `run_all`."""
    return [
        path
        for name in re.findall(r"`([\w.]+)`", entry.text)
        for path in by_end().get(name, ())
        if "." in name or ENTRIES[path].owner is entry.owner
    ]


@cache
def by_end() -> dict[str, list[str]]:
    """Return the paths of entries by their last word, and by class and last word."""
    ends: dict[str, list[str]] = {}
    for path in ENTRIES:
        parts = path.split(".")
        for count in (1, 2):
            ends.setdefault(".".join(parts[-count:]), []).append(path)
    return ends
