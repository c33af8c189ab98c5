"""The input of `map`: its options, and the rows that they give.

Checks which options go together. Opens nothing before the rows are read.
"""

from __future__ import annotations

import re
import shlex
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from taskyard.campaign.lines import (
    NEWLINE,
    NUL,
    STDIN,
    blocks_of_lines,
    file_label,
    open_input,
)
from taskyard.campaign.values import shown
from taskyard.cli.input_rows import (
    InputRow,
    ListFormat,
    array_indexes,
    array_rows,
    column_rows,
    grouped_rows,
    list_rows,
    placed_texts,
    rows,
    split_lists,
)
from taskyard.cli.templates import RowShape, template_keys
from taskyard.core.limits import PAYLOAD_BYTES_MAX
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taskyard.cli.input_rows import ValueList
    from taskyard.cli.options import CommandFunction

#: The largest block. In base64 it takes a third more, and the command needs some room.
BLOCK_BYTES_MAX: Final = PAYLOAD_BYTES_MAX * 3 // 4 - 64 * 1024

#: Bytes of blocks that wait for a worker or for their turn to be printed.
_BLOCKS_WAITING_BYTES: Final = 128 * 1024 * 1024

#: A slow block at the head must not idle workers, however large blocks are.
_BLOCKS_WAITING_MIN: Final = 16

_SIZE: Final = re.compile(r"(\d{1,12})(|[kKmMgG])(?:i?[bB])?", re.ASCII)
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class ByteSize(click.ParamType[int]):
    """A number of bytes: `4096`, `64K` or `1M`, with units of 1,024."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        found = _SIZE.fullmatch(str(value).strip())
        size = int(found[1]) * _UNITS[found[2].lower()] if found else 0
        if not 0 < size <= BLOCK_BYTES_MAX:
            limit = f"{BLOCK_BYTES_MAX // 1024}K"
            self.fail(
                f"{shown(value)}: expected a size up to {limit}, such as 64K or 1M", param, ctx
            )
        return size


_OPTIONS: Final = (
    click.option("--lines", metavar="FILE", help="A task per line of this file. - is stdin."),
    click.option("--csv", metavar="FILE", help="A task per row. The first row names the columns."),
    click.option("--jsonl", metavar="FILE", help="A task per line, each a JSON object."),
    click.option(
        "--array", metavar="RANGES", help="A task per index: 1-1000:10 or 1,3,5-7. {} is the index."
    ),
    click.option("-0", "--null", is_flag=True, help="Lines end with NUL, as of find -print0."),
    click.option(
        "--colsep", metavar="REGEX", help="Split lines and values into the columns {1}, {2}, …"
    ),
    click.option(
        "-n",
        "--max-args",
        type=click.IntRange(1),
        metavar="N",
        help="Up to N lines or values per task: {} is all of them.",
    ),
    click.option(
        "--json-lines", is_flag=True, help="With --call: decode lines and values as JSON."
    ),
    click.option("--pipe", is_flag=True, help="A task per block of lines, which is its stdin."),
    click.option(
        "--block", type=ByteSize(), metavar="SIZE", help="Size of a block.", show_default="1M"
    ),
    click.option("--stdin", is_flag=True, help="A line names a file, which is the task's stdin."),
)

#: The default size of a block.
_BLOCK_BYTES: Final = 1 << 20

#: The inputs that a flag works with, and the flags that it excludes.
_FLAGS: Final = {
    "json_lines": ("lines", "lists"),
    "null": ("lines", "lists"),
    "colsep": ("lines", "lists"),
    "max_args": ("lines", "lists"),
    "pipe": ("lines",),
    "stdin": ("lines", "lists"),
}
_EXCLUDED: Final = {
    "json_lines": ("null", "colsep", "max_args"),
    "max_args": ("colsep", "stdin"),
    "pipe": ("null", "colsep", "stdin", "max_args"),
    "stdin": ("colsep",),
}

#: Options that do not work with products.
_ONE_LIST: Final = ("stdin", "max_args")


def input_options(command: CommandFunction) -> CommandFunction:
    """Add the options of the input of `map`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class MapInput(NamedTuple):
    """The input of a map."""

    #: The command or the arguments of a call, with templates.
    words: tuple[str, ...]
    shape: RowShape
    #: Opens the input and yields the rows.
    rows: Callable[[], Iterator[InputRow]]
    #: Whether the rows come from stdin.
    is_stdin: bool = False
    #: The most tasks in flight. None: the default.
    tasks_max: int | None = None
    #: Whether the line or the values are appended to a command without templates.
    is_appended: bool = False


def map_input(argv: Sequence[str], values: dict[str, Any], warn: Callable[[str], None]) -> MapInput:
    """Return the input that options and lists describe. Raise `UserError` if they disagree."""
    words, lists = split_lists(argv)
    kind, path = _source(lists, values)
    _check_flags(kind, lists, values)
    if values["pipe"]:
        return _block_input(words, path, values["block"] or _BLOCK_BYTES)
    if kind == "lists":
        return _list_input(words, lists, values, warn)
    if kind == "array":
        array_indexes(path)  # checks it
        shape = RowShape("indexes", must_be_used=False)
        return MapInput(tuple(words), shape, lambda: array_rows(path))
    is_stdin = path == STDIN
    if kind in ("csv", "jsonl"):
        return MapInput(tuple(words), RowShape("fields"), lambda: rows(kind, path), is_stdin)
    if values["json_lines"]:
        return MapInput(tuple(words), RowShape("lines"), lambda: rows("json_lines", path), is_stdin)
    return _line_input(words, path, values)


def _source(lists: Sequence[ValueList], values: dict[str, Any]) -> tuple[str, str]:
    """Return the kind of the input, and its file or text."""
    kinds = ("lines", "csv", "jsonl", "array")
    given = {f"--{kind}": values[kind] for kind in kinds if values[kind] is not None}
    if lists:
        given[lists[0].separator] = ""
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other")
    option, text = next(iter(given.items()), ("--lines", STDIN))
    return ("lists" if lists else option.removeprefix("--")), text


def _check_flags(kind: str, lists: Sequence[ValueList], values: dict[str, Any]) -> None:
    """Raise `UserError` for flags that do not fit the input or each other."""
    label = lists[0].separator if lists else f"--{kind}"
    work = next((f"--{one}" for one in ("call", "payload") if values[one] is not None), "")
    if values["json_lines"] and values["call"] is None:
        raise UserError("--json-lines needs --call")
    if values["block"] is not None and not values["pipe"]:
        raise UserError("--block needs --pipe")
    for flag, kinds in _FLAGS.items():
        if not values[flag]:
            continue
        option = f"--{flag.replace('_', '-')}"
        if kind not in kinds:
            fits = "--lines, stdin or lists" if "lists" in kinds else "--lines or stdin"
            raise UserError(f"{option} works with {fits}, not with {label}")
        other = next((one for one in _EXCLUDED.get(flag, ()) if values[one]), None)
        if other:
            raise UserError(f"{option} and --{other.replace('_', '-')} exclude each other")
        if work and flag in ("pipe", "stdin"):
            raise UserError(f"{option} needs a command, not {work}")
    if values["null"] and lists and not any(one.path for one in lists):
        raise UserError("--null works with --lines, stdin and :::: files, but none is read")


def _list_format(values: dict[str, Any]) -> ListFormat:
    pattern = None
    if values["colsep"]:
        try:
            pattern = re.compile(values["colsep"])
        except re.error as wrong:
            raise UserError(
                f"--colsep {shown(values['colsep'])}: not a regular expression: {wrong}"
            ) from None
    return ListFormat(NUL if values["null"] else NEWLINE, pattern, bool(values["json_lines"]))


def _line_input(words: Sequence[str], path: str, values: dict[str, Any]) -> MapInput:
    list_format, max_args = _list_format(values), values["max_args"]
    has_columns = bool(list_format.column_separator or max_args)
    keep_blank = list_format.separator == NUL

    def read() -> Iterator[InputRow]:
        texts = placed_texts(path, list_format.separator)
        lines = column_rows(texts, list_format, keep_blank=keep_blank)
        return grouped_rows(lines, max_args) if max_args else lines

    shape = RowShape(
        "columns" if has_columns else "lines",
        None if has_columns else 0,
        must_be_used=not values["stdin"],
    )
    is_appended = not values["stdin"]
    return MapInput(tuple(words), shape, read, path == STDIN, is_appended=is_appended)


def _list_input(
    words: Sequence[str],
    lists: Sequence[ValueList],
    values: dict[str, Any],
    warn: Callable[[str], None],
) -> MapInput:
    if not words and values["call"] is None and values["payload"] is None:
        raise UserError(f"missing command before {lists[0].separator}")
    if len(lists) > 1 and (option := next((one for one in _ONE_LIST if values[one]), None)):
        raise UserError(f"--{option.replace('_', '-')} works with one list, not with several")
    list_format, max_args = _list_format(values), values["max_args"]
    columns = None if list_format.column_separator or max_args else len(lists)

    def read() -> Iterator[InputRow]:
        combinations = list_rows(lists, list_format, warn)
        return grouped_rows(combinations, max_args) if max_args else combinations

    shape = RowShape("columns", columns, must_be_used=not values["stdin"])
    is_stdin = any(one.path == STDIN for one in lists)
    return MapInput(tuple(words), shape, read, is_stdin, is_appended=not values["stdin"])


def one_input(words: Sequence[str]) -> MapInput:
    """Return the input of one task, which has no values."""
    shape = RowShape("indexes", must_be_used=False)
    if keys := template_keys(words, shape):
        text = "{" + keys[0] + "}"
        hint = "add ::: VALUES or --lines FILE, or pipe lines into `taskyard map`"
        raise UserError(f"{text}: there are no values ({hint})")
    row = InputRow(1, "command", shlex.join(words), None)
    return MapInput(tuple(words), shape, lambda: iter((row,)))


def _block_input(words: Sequence[str], path: str, block_bytes: int) -> MapInput:
    """Return an input whose rows are blocks. It is never decompressed: bytes arrive exactly."""

    def read() -> Iterator[InputRow]:
        label = file_label(path)
        with open_input(path, decompress=False) as stream:
            blocks = blocks_of_lines(stream, label, block_bytes, BLOCK_BYTES_MAX)
            for number, block in zip(count(1), blocks, strict=False):
                yield InputRow(number, f"{label}: block {number}", "", None, block=block)

    tasks_max = max(_BLOCKS_WAITING_BYTES // block_bytes, _BLOCKS_WAITING_MIN)
    shape = RowShape("blocks", must_be_used=False)
    return MapInput(tuple(words), shape, read, path == STDIN, tasks_max)
