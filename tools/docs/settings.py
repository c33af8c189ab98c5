"""The tables of `docs/settings.md`, and the JSON Schema of `taskyard.toml` for editors.

Both are made from the table of keys. Knows no other pages.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from taskyard.settings.keys import (
    DEFAULTS,
    DIALECTS,
    KEYS,
    LISTEN,
    LISTENER_UNSET,
    SERVICE,
    ListenSection,
    listener_keys,
    service_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.settings.keys import AnyKey


#: Defaults that are no values.
_PROSE: Final = ("never", "none", "nowhere", "detected")


def tables() -> dict[str, str]:
    """Return the tables as Markdown, by the first cell of their head."""
    common = [key.name for key in service_keys(DEFAULTS)]
    found: dict[str, tuple[list[str], list[list[str]]]] = {
        "setting": (
            ["is", "if not set", "variable", ""],
            [
                [
                    f"`{key.path}`",
                    key.kind.description,
                    _default(key),
                    f"`{key.environment}`",
                    key.help,
                ]
                for key in KEYS
            ],
        ),
        "of a service": (
            ["is", "if not set", ""],
            [
                [
                    f"`{key.name}`{'*' if key.name in common else ''}",
                    key.kind.description,
                    _default(key),
                    key.help,
                ]
                for key in service_keys(f"{SERVICE}.NAME")
            ],
        ),
        "of a listener": (
            ["is", *DIALECTS, ""],
            [
                [f"`{key.name}`", key.kind.description, *_by_dialect(key), key.help]
                for key in ListenSection.keys(f"{LISTEN}.NAME")
            ],
        ),
    }
    return {name: _table([name, *head], rows) for name, (head, rows) in found.items()}


def _default(key: AnyKey) -> str:
    text = key.text(key.default)
    return text if text in _PROSE or " " in text else f"`{text}`"


def _by_dialect(key: AnyKey) -> list[str]:
    unset = LISTENER_UNSET.get(key.name) or dict.fromkeys(DIALECTS, key.text(key.default))
    return [unset.get(dialect, "-") for dialect in DIALECTS]


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    plain = (f"| {' | '.join(cells)} |\n" for cells in lines)
    return "".join(plain).replace("| --- ", "|---").replace("--- |", "---|").replace("|  |", "| |")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the settings file."""
    sections: dict[str, dict[str, Any]] = {}
    for key in (*KEYS, *service_keys(DEFAULTS)):
        sections.setdefault(key.section, {})[key.name] = _value(key)
    listeners = {
        dialect: _section({key.name: _value(key) for key in listener_keys(dialect, dialect)})
        for dialect in DIALECTS
    }
    for dialect, table in listeners.items():
        sections[LISTEN][dialect] = {"anyOf": [sections[LISTEN][dialect], table]}
    named = {key.name: _value(key) for key in ListenSection.keys(f"{LISTEN}.NAME")}
    service = {key.name: _value(key) for key in service_keys(f"{SERVICE}.NAME")}
    properties = {name: _section(values) for name, values in sections.items()}
    properties[LISTEN]["additionalProperties"] = _section(named)
    properties[SERVICE] = {"type": "object", "additionalProperties": _section(service)}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "taskyard.toml"}
    return {**head, **_section(properties)}


def schema_text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _section(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(key: AnyKey) -> dict[str, Any]:
    """Return the schema of one key. The kind of a value is a comment: a reader has more rules."""
    types = [*key.kind.types]
    found: dict[str, Any] = {
        "description": f"{key.help} {key.kind.description.capitalize()}.",
        "type": types[0] if len(types) == 1 else types,
    }
    if key.kind.choices:
        found["enum"] = [*key.kind.choices]
    if key.default not in (None, "", ()):
        found["default"] = key.kind.to_file(key.default)
    return found
