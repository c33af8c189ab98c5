"""The form of a reason: what is left when everything that differs from task to task is replaced.

`row 17 of /data/a.csv` and `row 18 of /data/b.csv` have one form, `row # of /…`. So a thousand
failures with one cause are one group. Pure.
"""

from __future__ import annotations

import re
from typing import Final

#: The beginning of a reason decides its form. A worker's reason is rarely longer.
_CHARACTERS_MAX: Final = 300

#: Addresses, paths, quoted names, identifiers in hexadecimal digits, and numbers, in this order.
#: Exit statuses and signals stay, because they tell failures apart.
_VARYING: Final = re.compile(
    r"""
    (?P<kept>\b(?:exit\ status|exit\ code|signal)\ \d+\b)
    | (?P<address>\b[a-z][a-z0-9+.-]{1,15}://[^\s'"`<>]+)
    | (?P<path>(?<![\w./~\#…-])(?:~|\.{1,2})?[/\\][^\s'"`:;,()<>]+)
    | (?<![\w\#…])(?P<quote>['"`])[^\n]{1,200}?(?P=quote)(?![\w\#…])
    | (?P<number>0x[0-9a-fA-F]+
        | \b(?=[0-9a-f-]*\d)[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b
        | \d+(?:[.,]\d+)*)
    """,
    re.VERBOSE,
)


def form_of(reason: str) -> str:
    """Return the form of a reason. The form of a form is itself."""
    return _VARYING.sub(_replaced, reason[:_CHARACTERS_MAX]).strip()


def _replaced(found: re.Match[str]) -> str:
    if found["kept"]:
        return found["kept"]
    if found["number"]:
        return "#"
    if found["quote"]:
        return f"{found['quote']}…{found['quote']}"
    return "…" if found["address"] else "/…"
