"""Lists of values for `map`: `::: VALUES` and `:::: FILES` after the command, columns, arrays.

The lists combine as in GNU parallel. Several lists give all combinations, in which the last list
varies fastest. A linked list (`:::+`, `::::+`) gives one value for each value of the list before.
The first list is read as it arrives and the others are held, so a product needs no more memory than
its lists.
"""

from __future__ import annotations

import heapq
import re
from itertools import chain, count, islice, pairwise, product, zip_longest
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from taskyard.campaign.lines import NEWLINE, STDIN
from taskyard.campaign.values import shown
from taskyard.cli.input_rows import InputRow, placed_texts
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

#: The words before a list: whether files follow, and whether the list is linked.
SEPARATORS: Final = {
    ":::": (False, False),
    ":::+": (False, True),
    "::::": (True, False),
    "::::+": (True, True),
}

#: One range of --array: `7`, `1-10` or `0-15:4`.
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
    #: Whether its values belong to those of the list before.
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
