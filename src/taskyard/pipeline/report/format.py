"""Text for readers of a page: counts, durations, percentages and safe names."""

from __future__ import annotations

from typing import Final

from taskyard.design import format_bytes, format_duration

__all__ = [
    "format_bytes",
    "format_count",
    "format_duration",
    "format_percent",
    "format_time",
    "shorten_name",
]

#: Longer names are cut, because they would displace the chart.
NAME_CHARACTERS_MAX: Final = 48


def format_count(number: int, thing: str) -> str:
    """Format a count: `1 task`, `2,000 tasks`, `no tasks`."""
    if not number:
        return f"no {thing}s"
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def format_percent(part: float) -> str:
    """Format a fraction of 1 as a percentage, such as `97 %`."""
    shown = part * 100
    return f"{shown:.1f} %" if 0 < shown < 1 else f"{shown:.0f} %"


def format_time(time: object) -> str:
    """Format a time of a table to the second, in UTC."""
    return "" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def shorten_name(name: str) -> str:
    """Return a name on one line, with unprintable characters escaped, cut in the middle if long."""
    text = "".join(one if one.isprintable() else _escaped(one) for one in name)
    if len(text) <= NAME_CHARACTERS_MAX:
        return text
    half = NAME_CHARACTERS_MAX // 2 - 1
    return f"{text[:half]}…{text[-half:]}"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()
