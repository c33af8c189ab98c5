"""Full names of tasks by row: lookup, text search, order, and stems.

Names are also kept as one text, because a search in that is ten times as fast as one in each name.
Results of a search are kept: a name never changes, so the next one only looks at new names. A stem
is a name with its numbers left out. Tasks with the same stem belong together in a drawing.
"""

from __future__ import annotations

import re
from bisect import bisect
from typing import TYPE_CHECKING, Final

import numpy as np

from taskyard.web.events import Growing, Numbering

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.web.events import Codes, Flags, Ints

#: Between names in the text. A text to find that contains it is searched in each name.
_BETWEEN: Final = b"\0"

_NOT_SEARCHED: Final = np.zeros(0, bool)

#: Searches whose results are kept, a byte for each task.
_SEARCHES_MAX: Final = 8

#: More hits than this are found faster by comparing the whole text, a byte of the part at a time.
_HITS_MAX: Final = 100_000

#: New names up to this share of all are merged into the order. More are sorted with all names.
_MERGED_SHARE: Final = 0.01

#: Different stems. Further stems share number 0: their names have no pattern.
STEMS_MAX: Final = 4096

#: Digits are replaced at once for a whole name. Their runs are shortened once for each result.
_DIGITS: Final = bytes.maketrans(b"0123456789", b"0" * 10)
_NUMBER: Final = re.compile(rb"0+")

#: Stands for a number in a stem.
NUMBER_SIGN: Final = "#"


class TaskNames:
    """Names in the order in which they appeared."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self._rows = Numbering(self.names, none=-1)
        self._text = bytearray()
        #: Where each name begins in the text, and the end of the last name.
        self._begins = Growing(np.int64)
        self._begins.add(np.zeros(1, np.int64))
        self._searches: dict[bytes, Flags] = {}
        self._order: Ints = np.array([], np.int64)
        self._stems = Growing(np.int32)
        self._stem_numbers: dict[bytes, int] = {}
        #: Numbers of stems by names with their digits replaced.
        self._stem_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> bytes:
        return self.names[row]

    def row_of(self, name: bytes) -> int | None:
        return self._rows.get(name)

    def rows_of(self, names: Sequence[bytes | None]) -> Ints:
        """Return the rows of names. New names get new rows, None gets -1."""
        found: Ints = np.fromiter(map(self._rows.__getitem__, names), np.int64, len(names))
        new = self.names[len(self._stems) :]
        if new:
            self._add(new)
        return found

    def _add(self, new: list[bytes]) -> None:
        lengths = np.fromiter(map(len, new), np.int64, len(new)) + len(_BETWEEN)
        self._begins.add(len(self._text) + np.cumsum(lengths))
        self._text += _BETWEEN.join([*new, b""])
        known = self._stem_of
        kinds = [name.translate(_DIGITS) for name in new]
        for kind in set(kinds).difference(known):
            stem = _NUMBER.sub(b"0", kind)
            number = self._stem_numbers.get(stem, 0)
            if not number and len(self._stem_numbers) < STEMS_MAX:
                number = self._stem_numbers[stem] = len(self._stem_numbers) + 1
            known[kind] = number
        self._stems.add(np.fromiter(map(known.__getitem__, kinds), np.int32, len(kinds)))
        if len(known) > 2 * STEMS_MAX:
            known.clear()

    @property
    def stems(self) -> Codes:
        """Return the number of each name's stem. 0 for names without a pattern."""
        found: Codes = self._stems.values
        return found

    # Search.

    def search(self, part: bytes) -> Flags:
        """Return which names contain a text."""
        found = self._searches.pop(part, _NOT_SEARCHED)
        first = len(found)
        if first < len(self.names):
            found = np.concatenate([found, self._search(part, first)])
        self._searches[part] = found
        while len(self._searches) > _SEARCHES_MAX:
            del self._searches[next(iter(self._searches))]
        return found

    def _search(self, part: bytes, first: int) -> Flags:
        """Search in the names from a row on."""
        if not part or _BETWEEN in part:
            return np.array([part in name for name in self.names[first:]], bool)
        begins = self._begins.values[first:-1]
        hits = self._hits(part, int(begins[0]))
        found = np.zeros(len(begins), bool)
        if hits is not None:
            found[np.searchsorted(begins, hits, "right") - 1] = True
            return found
        start = int(begins[0])
        text = np.frombuffer(self._text, np.uint8)[start:]
        is_hit = np.zeros(len(text), bool)
        size = len(text) - len(part) + 1
        is_hit[:size] = text[:size] == part[0]
        for index in range(1, len(part)):
            is_hit[:size] &= text[index : index + size] == part[index]
        return np.logical_or.reduceat(is_hit, begins - start)

    def _hits(self, part: bytes, start: int) -> list[int] | None:
        """Return the offsets of a part in the text, or None if there are too many."""
        find, hits = self._text.find, []
        at = find(part, start)
        while at >= 0:
            hits.append(at)
            if len(hits) > _HITS_MAX:
                return None
            at = find(part, at + 1)
        return hits

    # Order.

    def order(self) -> Ints:
        """Return all rows in the order of their names."""
        names, known = self.names, len(self._order)
        new = range(known, len(names))
        if len(new) > _MERGED_SHARE * len(names):
            rows = sorted([*self._order.tolist(), *new], key=names.__getitem__)
            self._order = np.array(rows, np.int64)
        elif new:
            ordered = self._order.tolist()
            added = sorted(new, key=names.__getitem__)
            indexes = [bisect(ordered, names[row], key=names.__getitem__) for row in added]
            self._order = np.insert(self._order, indexes, added)
        return self._order


def stem(name: str) -> str:
    """Return a name with a sign in place of each number."""
    return re.sub("[0-9]+", NUMBER_SIGN, name)
