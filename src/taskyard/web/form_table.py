"""The form of each reason, as numbers: which failures belong together.

A form is computed once, when a task fails with a new reason. So a request compares numbers only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from taskyard.client.task_filters import form_of

if TYPE_CHECKING:
    from taskyard.web.event_columns import Codes, Ints, NameList

#: Forms that are kept apart. Reasons without any common form would fill the memory.
FORMS_MAX: Final = 10_000

#: Stands for all forms beyond the limit.
OTHER: Final = "(other)"

_UNKNOWN: Final = -1


class FormTable:
    """Numbers the forms of reasons in the order in which they appear."""

    def __init__(self, reasons: NameList) -> None:
        self._reasons = reasons
        #: The number of a form by the number of a reason.
        self._by_reason = np.full(64, _UNKNOWN, np.int32)
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def find(self, form: str) -> int:
        """Return the number of a form, or -2 if no reason has it."""
        return self._numbers.get(form, -2)

    def numbers(self, reasons: Codes | Ints) -> Codes:
        """Return the numbers of the forms of reasons."""
        size = len(self._by_reason)
        if size < len(self._reasons):
            more = max(len(self._reasons) - size, size)
            self._by_reason = np.append(self._by_reason, np.full(more, _UNKNOWN, np.int32))
        found = self._by_reason[reasons]
        unknown = found == _UNKNOWN
        if unknown.any():
            for code in np.unique(reasons[unknown]).tolist():
                self._by_reason[code] = self._number(code)
            found = self._by_reason[reasons]
        return found

    def _number(self, code: int) -> int:
        form = form_of(self._reasons.names[code].decode(errors="backslashreplace"))
        if form not in self._numbers and len(self.names) >= FORMS_MAX:
            form = OTHER
        number = self._numbers.setdefault(form, len(self.names))
        if number == len(self.names):
            self.names.append(form)
        return number
