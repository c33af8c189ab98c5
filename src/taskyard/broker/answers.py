"""What answers owe to the journal: results and output that the scheduler does not keep.

The scheduler says in which record a result or a text lies; this puts it into the answer, after the
commit and before it is sent, because a task may have been done in this very turn. Each row is read
and decoded once a turn, and the latest few are kept: who asks for one result often asks for its
neighbours next. It must not know who is answered, nor why.
"""

from collections import deque
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Final

from taskyard.core.effects import Effect, Printed, Told
from taskyard.core.records import AnyRecord
from taskyard.errors import JournalDamaged
from taskyard.journal.files import PUT_BACK
from taskyard.journal.recovery import EndedIndex, records_of, results_in, text_in
from taskyard.journal.store import Store

#: Decoded rows that are kept from one turn to the next, and their bytes in all: enough for clients
#: that fetch results in the order in which they came, nothing against the tasks in memory.
ROWS_KEPT: Final = 8
ROWS_KEPT_BYTES: Final = 8 * 1024 * 1024

#: Which record, into which answer, at which place of its columns.
_Owed = tuple[int, Told, int]


class Answers:
    """Completes answers from the journal's rows and, where those are trimmed, from the index."""

    def __init__(self, store: Store, index: EndedIndex | None) -> None:
        self._store = store
        self._index = index
        #: The first record of a row, all of them, and how many bytes they were.
        self._rows: deque[tuple[int, list[AnyRecord], int]] = deque(maxlen=ROWS_KEPT)

    def complete(self, effects: Iterable[Effect]) -> None:
        """Put in what these effects owe. Called every turn: most owe nothing."""
        owed: list[_Owed] = []
        for effect in effects:
            if type(effect) is Told:
                if effect.records:
                    owed += _owed(effect)
            elif type(effect) is Printed and effect.record:
                effect.text = self._text(effect.record, effect.name)
        if owed:
            owed.sort(key=itemgetter(0))
            for number, group in groupby(owed, key=itemgetter(0)):
                self._put_results(number, list(group))
        if self._kept_bytes() > ROWS_KEPT_BYTES:
            self._rows.clear()

    def _text(self, number: int, name: bytes) -> bytes:
        """What a task printed. It is gone from here when its row is trimmed: the history has it."""
        record = self._record(number)
        return b"" if record is None else text_in(record, number, name)

    def _put_results(self, number: int, owed: list[_Owed]) -> None:
        """The results of one record, each to where it is owed."""
        names = [told.names[place] for _, told, place in owed]
        record = self._record(number)
        if record is None:
            results = [self._archived(number, name) for name in names]
        else:
            results = results_in(record, number, names)
        for (_, told, place), result in zip(owed, results, strict=True):
            told.texts[place] = result

    def _archived(self, number: int, name: bytes) -> bytes:
        result = None if self._index is None else self._index.result(name)
        if result is None:
            wrong = f"record {number}, which says how {name!r} ended, is trimmed and not indexed"
            raise JournalDamaged(wrong, PUT_BACK)
        return result

    def _record(self, number: int) -> AnyRecord | None:
        """A record of the journal; None if its row is trimmed."""
        for first, records, _ in self._rows:
            if first <= number < first + len(records):
                return records[number - first]
        row = self._store.row_of(number)
        if row is None:
            return None
        while self._rows and self._kept_bytes() + len(row.body) > ROWS_KEPT_BYTES:
            self._rows.popleft()
        records = records_of(row, row.record_first - 1)
        self._rows.append((row.record_first, records, len(row.body)))
        return records[number - row.record_first]

    def _kept_bytes(self) -> int:
        return sum(size for _, _, size in self._rows)


def _owed(told: Told) -> list[_Owed]:
    """The results that are not there yet; from now on nothing says that they are owed."""
    places = [place for place, text in enumerate(told.texts) if text is None]
    records, told.records = told.records, []
    return [(number, told, place) for number, place in zip(records, places, strict=True)]
