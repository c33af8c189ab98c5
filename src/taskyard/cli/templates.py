"""Templates in the command, the payload and the lane of `map`.

`{}` is the text of the row, `{#}` its number, `{column}` a field, and `{.}` `{/}` `{//}` `{/.}` are
parts of the text as a path. Other braces are left alone, because they may belong to another
language. So is a shell's `${name}`.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from taskyard.campaign import lanes
from taskyard.campaign.values import InvalidValue, shown
from taskyard.errors import UserError
from taskyard.wire.payloads import encode_call, encode_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.cli.input_rows import InputRow

#: Doubled braces stand for literal single ones. A column name may contain spaces.
_PLACEHOLDER: Final = re.compile(
    r"(?<!\$)(?:\{\{(?P<literal>[\w./#-]*)\}\}|\{(?P<key>[\w./#-]*|[\w.-]+(?: [\w.-]+)+)\})"
)

#: Parts of a path, named as in GNU parallel.
_PATH_PARTS: Final[dict[str, Callable[[str], str]]] = {
    ".": lambda path: os.path.splitext(path)[0],  # noqa: PTH122  # pathlib would normalize the rest
    "/": os.path.basename,
    "//": lambda path: os.path.dirname(path) or ".",  # noqa: PTH120  # as above
    "/.": lambda path: os.path.splitext(os.path.basename(path))[0],  # noqa: PTH119, PTH122
}


def command_encoder(
    words: Sequence[str],
    env: dict[str, str] | None,
    cwd: str | None,
    files: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> Callable[[InputRow], bytes]:
    """Return a function that encodes a row as a command. `files` are its inputs and outputs."""
    inputs, outputs = files

    def encode(row: InputRow) -> bytes:
        argv = [fill(word, row) for word in words]
        if not argv[0] or "\0" in "".join(argv):
            raise UserError(
                f"{row.place}: can't run {shown(argv)} (empty program or NUL character)"
            )
        filled = ([fill(path, row) for path in paths] for paths in (inputs, outputs))
        return encode_command(argv, env, cwd, *filled)

    return encode


def call_encoder(
    call: str, words: Sequence[str], env: dict[str, str] | None, cwd: str | None
) -> Callable[[InputRow], bytes]:
    """Return a function that encodes a row as a call.

    An argument that is a single template keeps the type of its value. Other arguments are JSON.
    """
    words = words or ["{}"]
    constants = {word: _constant(word) for word in words if not _is_placeholder(word)}

    def encode(row: InputRow) -> bytes:
        arguments = [constants[word] if word in constants else _value(word, row) for word in words]
        return encode_call(call, arguments, None, env, cwd)

    return encode


def payload_encoder(payload: str) -> Callable[[InputRow], bytes]:
    """Return a function that encodes a row as a payload."""
    return lambda row: fill(payload, row).encode(errors="surrogateescape")


def lane_function(
    template: str, campaign: str, service: str
) -> Callable[[str, InputRow, bytes], str]:
    """Return a function from a task's name, row and payload to its lane."""
    if not lanes.is_template(template):
        return lambda _name, _row, _payload: template

    def lane_of(name: str, row: InputRow, payload: bytes) -> str:
        always = {"name": name, "campaign": campaign, "service": service}
        line = {"": row.text, "#": row.number}
        line |= {key: part(row.text) for key, part in _PATH_PARTS.items()}
        work = {**lanes.payload_keys(payload), **(row.fields or {})}
        try:
            return lanes.expand(template, lanes.fields_of(work, always | line))
        except InvalidValue as bad:
            raise UserError(f"{row.place}: the lane {bad}") from None

    return lane_of


def check_templates(words: Sequence[str], *, has_columns: bool) -> None:
    """Raise `UserError` if there is no template, or an unknown one for plain lines."""
    keys = [key for word in words for key in _keys(word) if has_columns or " " not in key]
    if not keys:
        raise UserError(
            "command: does not use the input (add {} for the line, {#} for its number or {column} "
            "for a field)"
        )
    unknown = [key for key in keys if key not in ("", "#", *_PATH_PARTS)]
    if unknown and not has_columns:
        raise UserError(
            f"unknown template {{{unknown[0]}}}: lines have no columns, use {{}} {{#}} "
            f"{{.}} {{/}} {{//}} or {{/.}} (write {{{{{unknown[0]}}}}} for literal braces)"
        )


def _keys(word: str) -> list[str]:
    """Return the names of the templates in a word."""
    found = [one["key"] for one in _PLACEHOLDER.finditer(word)]
    return [key for key in found if key is not None and ".." not in key]


def _is_placeholder(word: str) -> bool:
    """Return whether a word is a single template."""
    return bool(_PLACEHOLDER.fullmatch(word)) and bool(_keys(word))


def _constant(word: str) -> object:
    try:
        return msgspec.json.decode(word)
    except (ValueError, RecursionError):
        raise UserError(
            f"argument {shown(word)} of the call: neither valid JSON nor a single template"
        ) from None


def fill(word: str, row: InputRow) -> str:
    """Replace the templates in a word by values of the row."""
    return _PLACEHOLDER.sub(lambda found: _text(found, row), word) if "{" in word else word


def _text(found: re.Match[str], row: InputRow) -> str:
    key = found["key"]
    if key is None:
        return f"{{{found['literal']}}}"
    if not key:
        return row.text
    is_range, is_other = ".." in key, " " in key and key not in (row.fields or {})
    if is_range or is_other:  # a shell's {1..9}, or awk's {print x}
        return found[0]
    value = _placeholder_value(key, row)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _value(word: str, row: InputRow) -> object:
    """Return the value of a word that is a single template."""
    key = word[1:-1]
    return _placeholder_value(key, row) if key else row.value


def _placeholder_value(key: str, row: InputRow) -> object:
    if key == "#":
        return row.number
    if key in _PATH_PARTS:
        return _PATH_PARTS[key](row.text)
    return _field(key, row)


def _field(key: str, row: InputRow) -> object:
    fields = row.fields or {}
    if key not in fields:
        known = ", ".join(map(shown, fields)) or "none, lines have no columns"
        raise UserError(f"{row.place}: unknown column {shown(key)} (columns: {known})")
    return fields[key]
