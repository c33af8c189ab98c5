"""Numbers and times as the pages print them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from taskyard.design import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Characters that a browser drops, or that change how the text around them is read: controls except
#: tab and newline, marks of the direction, and the byte order mark.
_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)

_SECOND_NS: Final = 1_000_000_000


def count(number: float) -> str:
    """Format a number with commas: 1,234,567."""
    return f"{number:,.0f}"


def counted(number: int, thing: str) -> str:
    """Format a number of things: 1 worker, 2,000 workers."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def duration(time_ns: int) -> str:
    """Format a length of time. Empty if it is unknown."""
    return format_duration(time_ns) if time_ns else ""


def size(number: int) -> str:
    """Format a number of bytes. Empty if it is unknown."""
    return format_bytes(number) if number else ""


#: States from left to right in a bar: what is behind comes first.
_BAR_ORDER: Final = ("DONE", "FAILED", "CANCELLED", "LEASED", "READY", "DELAYED", "BLOCKED")


def shares(counts: Mapping[str, int]) -> list[tuple[str, float, float]]:
    """Return the parts of a bar in percent: the state, where it begins, and how long it is."""
    total = sum(counts.values())
    found: list[tuple[str, float, float]] = []
    before = 0
    for state in _BAR_ORDER:
        if counts[state]:
            width = 100 * counts[state] / total
            found.append((state.lower(), round(100 * before / total, 3), round(width, 3)))
            before += counts[state]
    return found


def moment(time_ns: int) -> str:
    """Format a time as commands do, in the zone of the server, which its title has."""
    if not time_ns:
        return ""
    at = datetime.fromtimestamp(time_ns / _SECOND_NS, UTC).astimezone()
    element = Markup('<time datetime="{0}" title="{0}">{1}</time>')
    return element.format(at.isoformat(timespec="milliseconds"), f"{at:%Y-%m-%d %H:%M:%S}")


def visible(value: object) -> object:
    """Return a value for a template, with an escape for each character that is not seen.

    Markup has no such characters, because its parts were values before.
    """
    if not isinstance(value, str) or _UNSEEN.search(value) is None:
        return value
    return type(value)(_UNSEEN.sub(_escape, value))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def seconds(time_s: float | None) -> int:
    """Return a time in seconds as nanoseconds, for `duration` and `moment`. 0 if it is unknown."""
    return 0 if time_s is None else round(time_s * _SECOND_NS)
