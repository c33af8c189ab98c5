"""The command and the lane of `map` with templates in them, and what a row makes of them.

`{}` is the row's text, `{#}` its number, `{column}` what that column has, and `{.}` `{/}` `{//}`
`{/.}` are parts of the text as a path. An unknown template is refused. Braces around anything else
are left as they are, so that braces of other languages pass; `${name}` is a shell's, and left too.
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

#: A template in doubled braces stands for itself in single ones. A column may have spaces inside.
_PLACEHOLDER: Final = re.compile(
    r"(?<!\$)(?:\{\{(?P<literal>[\w./#-]*)\}\}|\{(?P<key>[\w./#-]*|[\w.-]+(?: [\w.-]+)+)\})"
)

#: Parts of a row's text as a path, as GNU parallel names them.
_PATH_PARTS: Final[dict[str, Callable[[str], str]]] = {
    ".": lambda path: os.path.splitext(path)[0],  # noqa: PTH122  # pathlib changes the rest, too
    "/": os.path.basename,
    "//": lambda path: os.path.dirname(path) or ".",  # noqa: PTH120  # as above
    "/.": lambda path: os.path.splitext(os.path.basename(path))[0],  # noqa: PTH119, PTH122
}

#: A row becomes a payload.
Encoder = "Callable[[Row], bytes]"


def command_encoder(
    words: Sequence[str], env: dict[str, str] | None, cwd: str | None
) -> Callable[[InputRow], bytes]:
    """Each row a command."""

    def encode(row: InputRow) -> bytes:
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
) -> Callable[[InputRow], bytes]:
    """Each row a call of a function: a word that is one place is its value, others are JSON."""
    words = words or ["{}"]
    constants = {word: _constant(word) for word in words if not _is_placeholder(word)}

    def encode(row: InputRow) -> bytes:
        arguments = [constants[word] if word in constants else _value(word, row) for word in words]
        return encode_call(call, arguments, None, env, cwd)

    return encode


def payload_encoder(payload: str) -> Callable[[InputRow], bytes]:
    """Each row a payload."""
    return lambda row: fill(payload, row).encode(errors="surrogateescape")


def lane_function(
    template: str, campaign: str, service: str
) -> Callable[[str, InputRow, bytes], str]:
    """The lane of each task, by its name, its row and its payload."""
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
            told = f"the lane {bad}"
            raise UserError(f"{row.place}: {told}") from None

    return lane_of


def check_templates(words: Sequence[str], *, has_columns: bool) -> None:
    """Refuse words without a template, and where rows have no columns, unknown templates."""
    keys = [key for word in words for key in _keys(word) if has_columns or " " not in key]
    if not keys:
        raise UserError(
            "nothing of the line would reach its task: write {} in the command where it goes, or "
            "{#} for its number, {column} for a field"
        )
    unknown = [key for key in keys if key not in ("", "#", *_PATH_PARTS)]
    if unknown and not has_columns:
        raise UserError(
            f"unknown template {{{unknown[0]}}}: lines have no columns, use {{}} {{#}} {{.}} {{/}} "
            f"{{//}} or {{/.}} (write {{{{{unknown[0]}}}}} for the text itself)"
        )


def _keys(word: str) -> list[str]:
    """Return the names of the templates in a word."""
    found = [one["key"] for one in _PLACEHOLDER.finditer(word)]
    return [key for key in found if key is not None and ".." not in key]


def _is_placeholder(word: str) -> bool:
    """Whether a word is one template and nothing else."""
    return bool(_PLACEHOLDER.fullmatch(word)) and bool(_keys(word))


def _constant(word: str) -> object:
    try:
        return msgspec.json.decode(word)
    except (ValueError, RecursionError):
        raise UserError(
            f"argument {shown(word)} of the call is neither JSON nor one place; write a text in "
            "quotes, or {} alone"
        ) from None


def fill(word: str, row: InputRow) -> str:
    """The word with the row's values in their places."""
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
    """What a word that is one place stands for, as it is."""
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
        known = ", ".join(map(shown, fields)) or "{}: a line has no columns"
        raise UserError(f"{row.place}: has no column {shown(key)}; use {known}")
    return fields[key]
