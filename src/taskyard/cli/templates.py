"""Templates in the command, the payload and some options of `map`.

`{}` is the text of the row, `{#}` its number, `{column}` a field and `{1}` a numbered column. `{.}`
`{/}` `{//}` `{/.}` are parts of the text as a path, and `{1.}` or `{column/}` parts of a column.
Other braces are left alone, because they may belong to another language. So is a shell's `${name}`.

In the script of a shell values are quoted, and a template that can't be quoted is refused: a row
must not become code. Numbers are no code, so `{#}` may be anywhere.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from taskyard.calls import scripts
from taskyard.calls.payloads import encode_call, encode_command
from taskyard.campaign import lanes
from taskyard.campaign.values import InvalidValue, shown
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.calls.scripts import Script
    from taskyard.cli.input_rows import InputRow

#: Doubled braces stand for literal single ones. A column name may contain spaces.
_PLACEHOLDER: Final = re.compile(
    r"(?<!\$)(?:\{\{(?P<literal>[\w./#-]*)\}\}|\{(?P<key>[\w./#-]*|[\w.-]+(?: [\w.-]+)+)\})"
)

#: A column and a part of its value as a path. A negative number counts from the last column.
_COLUMN: Final = re.compile(r"(?P<number>-?[1-9]\d{0,5})(?P<part>//|/\.|/|\.|)", re.ASCII)
_FIELD_PART: Final = re.compile(r"(?P<name>.+?)(?P<part>//|/\.|/|\.)")

#: Parts of a path, named as in GNU parallel.
_PATH_PARTS: Final[dict[str, Callable[[str], str]]] = {
    ".": lambda path: os.path.splitext(path)[0],  # noqa: PTH122  # pathlib would normalize the rest
    "/": os.path.basename,
    "//": lambda path: os.path.dirname(path.rstrip("/") or path) or ".",  # noqa: PTH120  # as above
    "/.": lambda path: os.path.splitext(os.path.basename(path))[0],  # noqa: PTH119, PTH122
}

#: The templates of a whole row. With several columns they stand for several words.
_WHOLE: Final = ("", *_PATH_PARTS)

#: The value of a template that a row does not have.
_MISSING: Final = object()


class RowShape(NamedTuple):
    """The templates that the rows of an input have."""

    #: `lines`, `columns`, `fields`, `indexes` or `blocks`.
    kind: str
    #: The number of columns. None: it differs from row to row.
    columns: int | None = 0
    #: Whether a command must use the row.
    must_be_used: bool = True

    def has(self, key: str) -> bool:
        """Return whether a template may be used. Fields are checked row by row."""
        if key == "#" or self.kind == "fields":
            return True
        if self.kind in ("blocks", "indexes"):
            return not key and self.kind == "indexes"
        found = _COLUMN.fullmatch(key)
        if self.kind == "columns" and found:
            return self.columns is None or abs(int(found["number"])) <= self.columns
        return key in _WHOLE

    def hint(self) -> str:
        """Return the templates that there are."""
        if self.kind == "blocks":
            return "a block has no text, use {#}"
        if self.kind == "indexes":
            return "an index has no parts, use {} or {#}"
        if self.kind == "lines":
            return "lines have no columns without --colsep, use {} {#} {.} {/} {//} or {/.}"
        last = "" if self.columns == 1 else f" to {{{self.columns}}}" if self.columns else " {2} …"
        return f"columns are numbered, use {{}} {{#}} {{1}}{last} or parts such as {{.}} and {{1/}}"


class Template:
    """A word of a command, parsed once."""

    def __init__(
        self, word: str, script: Script | None = None, numbers: Sequence[str] = ()
    ) -> None:
        """Parse a word. Raise `UserError` for a template that would become code of a script.

        The templates in `numbers` are numbers.
        """
        self._pieces: list[str | _Key] = []
        end, before = 0, ""
        for found in _PLACEHOLDER.finditer(word):
            piece = _piece(found)
            before += word[end : found.start()]
            if script and isinstance(piece, _Key) and piece.key not in numbers:
                piece = _script_piece(piece, script, before, word)
            self._pieces += [word[end : found.start()], piece]
            before += piece if isinstance(piece, str) else scripts.VALUE
            end = found.end()
        self._pieces = [piece for piece in (*self._pieces, word[end:]) if piece != ""]
        #: The names of its templates.
        self.keys = [piece.key for piece in self._pieces if isinstance(piece, _Key)]
        #: The key of a word that is a single template.
        self.single = self.keys[0] if len(self._pieces) == len(self.keys) == 1 else None

    def fill(self, row: InputRow) -> str:
        """Return the word with the values of a row."""
        return "".join(
            [piece if isinstance(piece, str) else piece.text(row) for piece in self._pieces]
        )

    def words(self, row: InputRow) -> list[str]:
        """Return the words for a row. `{}` alone is a word for each column."""
        if row.cells is None or self.single not in _WHOLE:
            return [self.fill(row)]
        part = _PATH_PARTS.get(self.single or "", str)
        return [part(cell) for cell in row.cells]

    def values(self, row: InputRow) -> list[object]:
        """Return the arguments of a call for a row, for a word that is a single template."""
        if row.cells is None or self.single not in _WHOLE:
            return [self._pieces[0].value(row)]  # type: ignore[union-attr]  # it is a `_Key`
        return [*row.value] if not self.single else [*self.words(row)]  # type: ignore[misc]  # a list


class _Key(NamedTuple):
    """A template: its name, and the text that it was written as."""

    key: str
    written: str
    #: Whether its value is quoted for a shell.
    is_quoted: bool = False

    def text(self, row: InputRow) -> str:
        if not self.is_quoted:
            return self._text(row)
        if row.cells is None or self.key not in _WHOLE:
            return scripts.quote(self._text(row))
        part = _PATH_PARTS.get(self.key, str)
        return " ".join([scripts.quote(part(cell)) for cell in row.cells])

    def _text(self, row: InputRow) -> str:
        if not self.key:
            return row.text
        if " " in self.key and self.key not in (row.fields or {}):  # awk's {print x}
            return self.written
        value = self.value(row)
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()

    def value(self, row: InputRow) -> object:
        if not self.key:
            return row.value
        value = _value_of(self.key, row)
        if value is _MISSING:
            raise UserError(f"{row.place}: unknown column {shown(self.key)} ({_columns_text(row)})")
        return value


def _piece(found: re.Match[str]) -> str | _Key:
    key = found["key"]
    if key is None:
        return f"{{{found['literal']}}}"
    return found[0] if ".." in key else _Key(key, found[0])  # a shell's {1..9}


def _script_piece(key: _Key, script: Script, before: str, word: str) -> str | _Key:
    """Return a template in a script, quoted. Raise `UserError` if it can't be quoted there."""
    if not script.is_shell:
        problem = f"a part of the script of {script.program}"
    elif word == key.written:
        problem = f"the whole script of {script.program}"
    elif reason := scripts.problem_after(before):
        problem = f"{reason} in the script of {script.program}, where it can't be quoted"
    else:
        return key._replace(is_quoted=True)
    if " " in key.key:  # of awk
        return key.written
    raise UserError(f"template {key.written}: {problem} ({script.hint})")


def _value_of(key: str, row: InputRow) -> object:
    """Return the value of a template other than `{}`."""
    if key == "#":
        return row.number
    if key in _PATH_PARTS:
        part = _PATH_PARTS[key]
        return part(row.text) if row.cells is None else " ".join([part(one) for one in row.cells])
    fields = row.fields or {}
    if key in fields:
        return fields[key]
    cells = row.table_cells if row.cells is None else row.cells
    if cells is not None and (found := _COLUMN.fullmatch(key)) and found["number"] not in fields:
        return _cell(int(found["number"]), found["part"], cells)
    if (found := _FIELD_PART.fullmatch(key)) and isinstance(fields.get(found["name"]), str):
        return _PATH_PARTS[found["part"]](str(fields[found["name"]]))
    return _MISSING


def _cell(number: int, part: str, cells: Sequence[str]) -> object:
    """Return a part of a numbered column."""
    if abs(number) > len(cells):
        return _MISSING
    return _PATH_PARTS.get(part, str)(cells[number - 1 if number > 0 else number])


def _columns_text(row: InputRow) -> str:
    if row.cells is not None:
        return f"it has {len(row.cells)} columns"
    return f"columns: {', '.join(map(shown, row.fields or {})) or 'none, lines have no columns'}"


class CommandOptions(NamedTuple):
    """Options that all tasks of a map share."""

    env: dict[str, str] | None
    cwd: str | None
    #: Whether the text of a row is the file that is fed to stdin.
    is_stdin_file: bool = False
    #: Files that the command needs, and files that it makes.
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    #: Exit statuses after which a command is not retried.
    final_exit_status: Sequence[int] = ()

    def place_function(self) -> Callable[[InputRow], tuple[dict[str, str] | None, str | None]]:
        """Return a function from a row to the variables and the directory of its task."""
        cwd = None if self.cwd is None else Template(self.cwd)
        env = {name: Template(value) for name, value in (self.env or {}).items()}

        def place_of(row: InputRow) -> tuple[dict[str, str] | None, str | None]:
            variables = {name: value.fill(row) for name, value in env.items()}
            variables |= row.env or {}
            return variables or None, None if cwd is None else cwd.fill(row)

        return place_of


def command_function(words: Sequence[str], shape: RowShape) -> Callable[[InputRow], list[str]]:
    """Return a function from a row to the words of a command.

    Raises `UserError` for a template that would become code of a script.
    """
    found = scripts.scripts_in(words)
    numbers = ("#", "") if shape.kind == "indexes" else ("#",)
    templates = [Template(word, found.get(place), numbers) for place, word in enumerate(words)]

    def argv_of(row: InputRow) -> list[str]:
        argv = [word for template in templates for word in template.words(row)]
        if not argv or not argv[0] or "\0" in "".join(argv):
            raise UserError(
                f"{row.place}: can't run {shown(argv)} (empty program or NUL character)"
            )
        return argv

    return argv_of


def command_encoder(
    argv_of: Callable[[InputRow], list[str]], options: CommandOptions
) -> Callable[[InputRow], bytes]:
    """Return a function that encodes a row as a command."""
    place_of = options.place_function()
    inputs, outputs = ([*map(Template, paths)] for paths in (options.inputs, options.outputs))

    def encode(row: InputRow) -> bytes:
        return encode_command(
            argv_of(row),
            *place_of(row),
            [path.fill(row) for path in inputs],
            [path.fill(row) for path in outputs],
            stdin=row.block,
            stdin_file=row.text if options.is_stdin_file else None,
            final_exit_status=options.final_exit_status,
        )

    return encode


def arguments_function(words: Sequence[str]) -> Callable[[InputRow], list[Any]]:
    """Return a function from a row to the arguments of a call.

    An argument that is a single template keeps the type of its value. Other arguments are JSON.
    """
    templates = [Template(word) for word in words or ["{}"]]
    constants = [
        None if template.single is not None else [_constant(word)]
        for word, template in zip(words or ["{}"], templates, strict=True)
    ]

    def arguments_of(row: InputRow) -> list[Any]:
        return [
            value
            for template, constant in zip(templates, constants, strict=True)
            for value in (constant or template.values(row))
        ]

    return arguments_of


def call_encoder(
    call: str, words: Sequence[str], options: CommandOptions
) -> Callable[[InputRow], bytes]:
    """Return a function that encodes a row as a call."""
    arguments_of, place_of = arguments_function(words), options.place_function()
    return lambda row: encode_call(call, arguments_of(row), None, *place_of(row))


def payload_encoder(payload: str) -> Callable[[InputRow], bytes]:
    """Return a function that encodes a row as a payload."""
    template = Template(payload)
    return lambda row: template.fill(row).encode(errors="surrogateescape")


def lane_function(
    template: str, campaign: str, service: str
) -> Callable[[str, InputRow, bytes], str]:
    """Return a function from a task's name, row and payload to its lane."""
    if not lanes.is_template(template):
        return lambda _name, _row, _payload: template

    own = ("", "name", "campaign", "service")
    keys = [key for key in lanes.template_keys(template) if key not in own]

    def lane_of(name: str, row: InputRow, payload: bytes) -> str:
        always = {"name": name, "campaign": campaign, "service": service}
        # A column wins over a word of the command with the same number.
        values = {key: _value_of(key, row) for key in keys}
        line = {key: value for key, value in values.items() if value is not _MISSING}
        work = {**lanes.payload_keys(payload), **(row.fields or {})}
        try:
            return lanes.expand(template, lanes.fields_of(work, always | line | {"": row.text}))
        except InvalidValue as bad:
            raise UserError(f"{row.place}: the lane {bad}") from None

    return lane_of


def template_keys(words: Sequence[str], shape: RowShape) -> list[str]:
    """Return the names of all templates in words. Only fields may have spaces in their names."""
    keys = [key for word in words for key in Template(word).keys]
    return [key for key in keys if shape.kind == "fields" or " " not in key]


def check_templates(words: Sequence[str], shape: RowShape, subject: str = "command") -> list[str]:
    """Return the names of the templates. Raise `UserError` if there is none, or an unknown one."""
    keys = template_keys(words, shape)
    if not keys and shape.must_be_used:
        raise UserError(
            f"{subject}: does not use the input (add {{}} for the line, {{#}} for its number or "
            "{column} for a field)"
        )
    unknown = [key for key in keys if not shape.has(key)]
    if unknown:
        raise UserError(
            f"unknown template {{{unknown[0]}}}: {shape.hint()} (write {{{{{unknown[0]}}}}} for "
            "literal braces)"
        )
    return keys


def _constant(word: str) -> object:
    try:
        return msgspec.json.decode(word)
    except (ValueError, RecursionError):
        raise UserError(
            f"argument {shown(word)} of the call: neither valid JSON nor a single template"
        ) from None
