"""Text for people: counts, durations and escaped names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_MINUTE_SECONDS: Final = 60
_HOUR_SECONDS: Final = 3600
_DAY_SECONDS: Final = 86_400

#: Shorter durations are shown with tenths of a second.
_SHORT_SECONDS: Final = 10


#: Characters with a meaning in a pattern.
_SPECIAL: Final = re.compile(r"[*?[]")


def escape_pattern(text: str) -> str:
    """Return a pattern that matches only this text."""
    return _SPECIAL.sub(lambda found: f"[{found[0]}]", text)


def escape_line(text: str) -> str:
    """Return a text on one line, with non-printable characters as escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


def format_count(number: int, thing: str) -> str:
    """Format a count: `1 task`, `2,000 tasks`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def format_slots(slots: int, used: int) -> str:
    """Format the used slots as `3 of 4`. Prefetched tasks use none."""
    return f"{min(used, slots)} of {slots}" if slots else str(used)


def format_duration(seconds: float) -> str:
    """Format a duration with at most two units."""
    if seconds < _SHORT_SECONDS:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE_SECONDS:
        return f"{whole} s"
    if whole < _HOUR_SECONDS:
        return f"{whole // _MINUTE_SECONDS} min {whole % _MINUTE_SECONDS} s"
    if whole < _DAY_SECONDS:
        return f"{whole // _HOUR_SECONDS} h {whole % _HOUR_SECONDS // _MINUTE_SECONDS} min"
    return f"{whole // _DAY_SECONDS} d {whole % _DAY_SECONDS // _HOUR_SECONDS} h"


def full_name(view: Mapping[str, Any]) -> str:
    """Return the full name of a task, CAMPAIGN/NAME."""
    from taskyard.core.identity import spelling  # noqa: PLC0415  # not needed by `--help`

    return spelling(str(view["campaign"]), str(view["name"]))


def task_name_fields(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that name a task in a document."""
    return {"name": view["name"], "campaign": view["campaign"]}
