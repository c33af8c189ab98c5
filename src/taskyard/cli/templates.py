"""The command and the lane of `map` with places in them, and what a row makes of them.

`{}` is the row's text, `{#}` its number, `{column}` what that column has. What is not such a place
is left as it is, so that braces of other languages pass; `${name}` is a shell's, and left too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from taskyard.client.campaign import lanes
from taskyard.client.campaign.values import BadValue, shown
from taskyard.errors import UserError
from taskyard.wire.work import encode_call, encode_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.cli.rows import Row

#: Letters, digits, dots and dashes, with single spaces inside: what a column may be called.
_PLACE: Final = re.compile(r"(?<!\$)\{(#|[\w.-]+(?: [\w.-]+)*|)\}")

#: A row becomes a payload.
Encoder = "Callable[[Row], bytes]"


def command_encoder(
    words: Sequence[str], env: dict[str, str] | None, cwd: str | None
) -> Callable[[Row], bytes]:
    """Each row a command."""
    _check_used(words)

    def encode(row: Row) -> bytes:
        argv = [fill(word, row) for word in words]
        if not argv[0] or "\0" in "".join(argv):
            raise UserError(
                f"{row.place}: makes no command that can be run: {shown(argv)}; it must begin "
                "with a program, and can't have a NUL character"
            )
        return encode_command(argv, env, cwd)

    return encode


def call_encoder(
    call: str, words: Sequence[str], env: dict[str, str] | None, cwd: str | None
) -> Callable[[Row], bytes]:
    """Each row a call of a function: a word that is one place is its value, others are JSON."""
    words = words or ["{}"]
    _check_used(words)
    constants = {word: _constant(word) for word in words if not _PLACE.fullmatch(word)}

    def encode(row: Row) -> bytes:
        arguments = [constants[word] if word in constants else _value(word, row) for word in words]
        return encode_call(call, arguments, None, env, cwd)

    return encode


def payload_encoder(payload: str) -> Callable[[Row], bytes]:
    """Each row a payload."""
    _check_used([payload])
    return lambda row: fill(payload, row).encode(errors="surrogateescape")


def lane_maker(template: str, campaign: str, service: str) -> Callable[[str, Row, bytes], str]:
    """The lane of each task, by its name, its row and its payload."""
    if not lanes.is_template(template):
        return lambda _name, _row, _payload: template

    def lane_of(name: str, row: Row, payload: bytes) -> str:
        always = {"name": name, "campaign": campaign, "service": service}
        line = {"": row.text, "#": row.number}
        work = {**lanes.keys_of(payload), **(row.fields or {})}
        try:
            return lanes.expand(template, lanes.fields_of(work, always | line))
        except BadValue as bad:
            told = f"the lane {bad}"
            raise UserError(f"{row.place}: {told}") from None

    return lane_of


def _check_used(words: Sequence[str]) -> None:
    if not any(_PLACE.search(word) for word in words):
        raise UserError(
            "nothing of the line would reach its task: write {} in the command where it goes, or "
            "{#} for its number, {column} for a field"
        )


def _constant(word: str) -> object:
    try:
        return msgspec.json.decode(word)
    except (ValueError, RecursionError):
        raise UserError(
            f"argument {shown(word)} of the call is neither JSON nor one place; write a text in "
            "quotes, or {} alone"
        ) from None


def fill(word: str, row: Row) -> str:
    """The word with the row's values in their places."""
    return _PLACE.sub(lambda found: _text(found, row), word) if "{" in word else word


def _text(found: re.Match[str], row: Row) -> str:
    key = found[1]
    if not key:
        return row.text
    if key == "#":
        return str(row.number)
    if row.fields is None:
        return found[0]
    value = _field(key, row)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _value(word: str, row: Row) -> object:
    """What a word that is one place stands for, as it is."""
    key = word[1:-1]
    if key == "#":
        return row.number
    return _field(key, row) if key else row.value


def _field(key: str, row: Row) -> object:
    fields = row.fields or {}
    if key not in fields:
        known = ", ".join(map(shown, fields)) or "{}: a line has no columns"
        raise UserError(f"{row.place}: has no column {shown(key)}; use {known}")
    return fields[key]
