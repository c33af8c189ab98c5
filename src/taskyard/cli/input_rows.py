"""The input of `map` and of `run` with a command: its options, and the rows that they give.

Rows are lines, table rows, JSON objects, lists of values, indexes or blocks. Nothing is read ahead,
so a line written to stdin is submitted before the next one arrives. An invalid line raises
`InvalidCampaign` with `FILE:LINE: reason`. Opens nothing before the rows are read.
"""

from __future__ import annotations

import csv
import heapq
import re
import shlex
from itertools import chain, count, islice, pairwise, product, zip_longest
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click
import msgspec
from msgspec import Struct

from taskyard.campaign.lines import (
    NEWLINE,
    NUL,
    STDIN,
    InvalidCampaign,
    InvalidRow,
    blocks_of_lines,
    file_label,
    numbered_lines,
    open_input,
    text_error,
)
from taskyard.campaign.values import shown
from taskyard.cli.templates import InputRow, MapInput, RowShape, template_keys
from taskyard.core.limits import PAYLOAD_BYTES_MAX
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from taskyard.campaign.lines import Stream
    from taskyard.cli.options import CommandFunction


#: Cell separators. The first that the header contains is used.
_SEPARATORS: Final = (",", ";", "\t")


def rows(kind: str, path: str = STDIN) -> Iterator[InputRow]:
    """Yield the rows of a file of kind `lines`, `json_lines`, `csv` or `jsonl`."""
    with open_input(path) as stream:
        yield from _KINDS[kind](stream, file_label(path))


def placed_texts(path: str, separator: bytes = NEWLINE) -> Iterator[tuple[str, str]]:
    """Yield all lines of a file, also blank lines, each with its `FILE:LINE`."""
    with open_input(path) as stream:
        yield from _texts(stream, file_label(path), separator)


def _texts(stream: Stream, label: str, separator: bytes = NEWLINE) -> Iterator[tuple[str, str]]:
    for number, line in numbered_lines(stream, label, separator):
        place = f"{label}:{number}"
        if isinstance(line, InvalidRow):
            _refuse(place, line.reason)
        if error := text_error(line):
            _refuse(place, error)
        yield place, line.decode()


def _refuse(place: str, reason: str) -> NoReturn:
    raise InvalidCampaign(f"{place}: {reason}")


def _line_rows(stream: Stream, label: str) -> Iterator[InputRow]:
    lines = ((place, text) for place, text in _texts(stream, label) if text.strip())
    for number, (place, text) in enumerate(lines, start=1):
        yield InputRow(number, place, text, text)


def _value_rows(stream: Stream, label: str) -> Iterator[InputRow]:
    decode = msgspec.json.Decoder().decode
    for row in _line_rows(stream, label):
        try:
            row.value = decode(row.text)
        except (ValueError, RecursionError) as wrong:
            _refuse(row.place, f"not valid JSON: {wrong} (strings need double quotes)")
        yield row


def _object_rows(stream: Stream, label: str) -> Iterator[InputRow]:
    decode = msgspec.json.Decoder(dict[str, object]).decode
    for row in _line_rows(stream, label):
        try:
            row.value = row.fields = decode(row.text)
        except (ValueError, RecursionError) as wrong:
            _refuse(row.place, f"not a JSON object: {wrong}")
        yield row


class _CsvLines:
    """Lines for the CSV reader. Keeps the lines of the current row."""

    def __init__(self, stream: Stream, label: str) -> None:
        self._texts = _texts(stream, label)
        self.consumed: list[tuple[str, str]] = []

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        self.consumed.append(next(self._texts))
        return self.consumed[-1][1] + "\n"

    def begin_row(self) -> None:
        self.consumed.clear()


def _table_rows(stream: Stream, label: str) -> Iterator[InputRow]:
    cells = _CsvLines(stream, label)
    header = next((text for text in cells if text.strip()), "")
    separator = next((one for one in _SEPARATORS if one in header), ",")
    columns = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
    _check_columns(columns, label)
    reader = csv.reader(cells, delimiter=separator, strict=True)
    number = 0
    while (values := _next_row(reader, cells, label)) is not None:
        if not any(values):
            continue
        number += 1
        place = cells.consumed[0][0]
        if len(values) != len(columns):
            _refuse(place, f"{len(values)} cells, but the header has {len(columns)}")
        text = "\n".join(text for _, text in cells.consumed)
        fields: dict[str, object] = dict(zip(columns, values, strict=True))
        yield InputRow(number, place, text, fields, fields, table_cells=values)


def _next_row(reader: Iterator[list[str]], cells: _CsvLines, label: str) -> list[str] | None:
    cells.begin_row()
    try:
        return next(reader, None)
    except csv.Error as wrong:
        place = cells.consumed[0][0] if cells.consumed else label
        _refuse(place, f"not valid CSV: {wrong}")


def _check_columns(columns: list[str], label: str) -> None:
    for name in columns:
        if columns.count(name) > 1:
            _refuse(f"{label}:1", f"duplicate column {shown(name)}")


_KINDS: Final[dict[str, Callable[[Stream, str], Iterator[InputRow]]]] = {
    "lines": _line_rows,
    "json_lines": _value_rows,
    "csv": _table_rows,
    "jsonl": _object_rows,
}


#: The words before a list: whether files follow, and whether the list is linked.
SEPARATORS: Final = {
    ":::": (False, False),
    ":::+": (False, True),
    "::::": (True, False),
    "::::+": (True, True),
}

#: A range of --array: `7`, `1-10` or `0-15:4`.
_RANGE: Final = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?::(\d{1,18}))?)?", re.ASCII)

#: Ranges with Slurm's limit of tasks at once.
_SLURM_LIMIT: Final = re.compile(r"([\d,:-]+)%(\d+)", re.ASCII)

#: The variable with the index of a task of an array.
ARRAY_VARIABLE: Final = "TASKYARD_ARRAY_INDEX"


class ValueList(Struct):
    """Values from the command line or from a file."""

    #: The word before the list.
    separator: str
    values: Sequence[str] = ()
    #: The file. Empty: the values are above.
    path: str = ""
    #: Whether its values belong to the values of the list before.
    is_linked: bool = False


class ListFormat(Struct):
    """How values are read."""

    #: Between the values of a file.
    separator: bytes = NEWLINE
    #: Between the columns of a value. None: a value is one column.
    column_separator: re.Pattern[str] | None = None
    #: Decode the values for a function as JSON.
    is_json: bool = False

    def columns(self, value: str) -> tuple[str, ...]:
        """Split a value into columns. Spaces around them are removed, as in GNU parallel."""
        if self.column_separator is None:
            return (value,)
        return tuple((cell or "").strip() for cell in self.column_separator.split(value))


def split_lists(words: Sequence[str]) -> tuple[list[str], list[ValueList]]:
    """Split the words after the options into a command and its lists."""
    starts = [index for index, word in enumerate(words) if word in SEPARATORS]
    command = list(words[: starts[0]] if starts else words)
    lists: list[ValueList] = []
    for start, end in pairwise([*starts, len(words)]):
        lists += _lists_after(words[start], words[start + 1 : end], is_first=not lists)
    if sum(one.path == STDIN for one in lists) > 1:
        raise UserError("'::::': stdin (-) can be read once only")
    return command, lists


def _lists_after(separator: str, words: Sequence[str], *, is_first: bool) -> list[ValueList]:
    has_files, is_linked = SEPARATORS[separator]
    if is_linked and is_first:
        hint = f"begin with {separator[:-1]}"
        raise UserError(f"{shown(separator)}: no list before it to link to ({hint})")
    for word in words:
        if "\0" in word or not _is_unicode(word):
            raise UserError(f"{shown(separator)}: value {shown(word)} is not valid UTF-8")
    if not has_files:
        return [ValueList(separator, words, is_linked=is_linked)]
    if not words:
        raise UserError(f"{shown(separator)}: missing file name")
    return [ValueList(separator, path=path, is_linked=is_linked) for path in words]


def _is_unicode(word: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in word)


def list_rows(
    lists: Sequence[ValueList], list_format: ListFormat, warn: Callable[[str], None]
) -> Iterator[InputRow]:
    """Yield a row for each combination of values. `warn` gets messages about unused values."""
    decode = msgspec.json.Decoder().decode
    for number, cells in enumerate(_combinations(lists, list_format, warn), start=1):
        row = InputRow(number, f"row {number}", " ".join(cells), list(cells), cells=cells)
        if list_format.is_json:
            try:
                row.value = [decode(cell) for cell in cells]
            except (ValueError, RecursionError) as wrong:
                reason = f"not valid JSON: {wrong} (strings need double quotes)"
                raise UserError(f"row {number}: {shown(row.text)}: {reason}") from None
        yield row


def column_rows(
    texts: Iterable[tuple[str, str]], list_format: ListFormat, *, keep_blank: bool
) -> Iterator[InputRow]:
    """Yield a row for each line, with columns if the format has them."""
    lines = ((place, text) for place, text in texts if keep_blank or text.strip())
    has_columns = list_format.column_separator is not None
    for number, (place, text) in enumerate(lines, start=1):
        if has_columns:
            cells = list_format.columns(text)
            yield InputRow(number, place, " ".join(cells), list(cells), cells=cells)
        else:
            yield InputRow(number, place, text, text)


def grouped_rows(single: Iterable[InputRow], rows_max: int) -> Iterator[InputRow]:
    """Yield rows that have the texts of several rows as columns."""
    rest = iter(single)
    for number in count(1):
        group = list(islice(rest, rows_max))
        if not group:
            return
        cells = [row.text for row in group]
        yield InputRow(number, group[0].place, " ".join(cells), cells, cells=cells)


def _combinations(
    lists: Sequence[ValueList], list_format: ListFormat, warn: Callable[[str], None]
) -> Iterator[tuple[str, ...]]:
    groups: list[list[ValueList]] = []
    for one in lists:
        if one.is_linked:
            groups[-1].append(one)
        else:
            groups.append([one])
    first, *others = (_linked(group, list_format, warn) for group in groups)
    held = [list(other) for other in others]
    for group, values in zip(groups[1:], held, strict=True):
        if not values:
            warn(f"{_label(group[0])}: no values, so there are no combinations")
            return
    for head in first:
        for tail in product(*held):
            yield tuple(chain(head, *tail))


def _linked(
    group: Sequence[ValueList], list_format: ListFormat, warn: Callable[[str], None]
) -> Iterator[tuple[str, ...]]:
    """Yield the columns of lists that are linked. The shortest list ends them."""
    sources = [_columns_of(one, list_format) for one in group]
    if len(sources) == 1:
        yield from sources[0]
        return
    for columns in zip_longest(*sources):
        together = [one for one in columns if one is not None]
        if len(together) < len(columns):
            short = next(one for one, found in zip(group, columns, strict=True) if found is None)
            warn(f"{_label(short)}: shorter than the list linked to it, whose rest is not used")
            return
        yield tuple(chain(*together))


def _columns_of(one: ValueList, list_format: ListFormat) -> Iterator[tuple[str, ...]]:
    if not one.path:
        return map(list_format.columns, one.values)
    return (list_format.columns(text) for _, text in placed_texts(one.path, list_format.separator))


def _label(one: ValueList) -> str:
    return one.path or shown(one.separator)


# Arrays, in the form of Slurm.


def array_rows(text: str) -> Iterator[InputRow]:
    """Yield a row for each index of an array."""
    for number, index in enumerate(array_indexes(text), start=1):
        env = {ARRAY_VARIABLE: str(index)}
        yield InputRow(number, f"index {index}", str(index), index, env=env)


def array_indexes(text: str) -> Iterator[int]:
    """Return the indexes of an array, such as `1,3,5-7` or `0-15:4`: ascending, each once."""
    return _unique(heapq.merge(*(_index_range(one, text) for one in text.split(","))))


def _index_range(one: str, text: str) -> range:
    found = _RANGE.fullmatch(one.strip())
    if found is None:
        if limit := _SLURM_LIMIT.fullmatch(text):
            raise UserError(
                f"--array {shown(text)}: the limit of tasks at once is another option "
                f"(write --array {limit[1]} -j {limit[2]})"
            )
        raise UserError(f"--array {shown(text)}: expected indexes such as 1-10, 1,3,5-7 or 0-15:4")
    first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
    if last < first:
        raise UserError(f"--array {shown(text)}: {first} is greater than {last}")
    if not step:
        raise UserError(f"--array {shown(text)}: the step must not be 0")
    return range(first, last + 1, step)


def _unique(indexes: Iterable[int]) -> Iterator[int]:
    before = -1
    for index in indexes:
        if index != before:
            yield index
        before = index


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
