"""A task's values as text: in the cells of a table, or behind the options of a command.

A cell becomes what JSON would have there; `tasks.check` does the rest. An empty cell is a key that
was not given.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final

import msgspec

from taskyard.campaign.values import InvalidValue, shown

if TYPE_CHECKING:
    from collections.abc import Callable


def _json(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as wrong:
        raise InvalidValue(f"must be JSON ({wrong}), not {shown(text)}") from None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as wrong:
        raise InvalidValue(
            f"can't be split into words ({wrong}); mend the quotes in {shown(text)}"
        ) from None


def _split_command(text: str) -> object:
    """A command: a list as JSON has it, or words with quotes as in a shell."""
    return _json(text) if text.startswith("[") else _split(text)


def _split_names(text: str) -> object:
    """A list as JSON has it, or names with semicolons or spaces between them."""
    if text.startswith("["):
        return _json(text)
    names = text.split(";") if ";" in text else text.split()
    return [name.strip() for name in names if name.strip()]


def _number(text: str) -> object:
    """A whole number where it is one; the check refuses what is not wanted."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else text


def _retries(text: str) -> object:
    """A number of retries, or a list as JSON has it."""
    return _json(text) if text.startswith("[") else _number(text)


def _environment(text: str) -> object:
    """An object as JSON has it, or NAME=VALUE words with quotes as in a shell."""
    if text.startswith("{"):
        return _json(text)
    settings = [word.partition("=") for word in _split(text)]
    if not all(equals for _, equals, _ in settings):
        raise InvalidValue(f"must be NAME=VALUE, or an object, not {shown(text)}")
    return {name: setting for name, _, setting in settings}


#: Keys whose value is more than a text.
_READERS: Final[dict[str, Callable[[str], object]]] = {
    "argv": _split_command,
    "args": _json,
    "kwargs": _json,
    "after": _split_names,
    "recipients": _split_names,
    "priority": _number,
    "retries": _retries,
    "slots": _number,
    "env": _environment,
}

#: Spaces around these belong to them.
_VERBATIM: Final = ("payload",)


def from_cell(key: str, cell: str) -> object:
    """What JSON would have for this key. Raises `InvalidValue`."""
    text = cell if key in _VERBATIM else cell.strip()
    if not text:
        return None
    reader = _READERS.get(key)
    return text if reader is None else reader(text)
