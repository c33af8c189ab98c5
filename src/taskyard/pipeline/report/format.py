"""Text for readers of a page: counts, durations, percentages and safe names."""

from __future__ import annotations

from typing import Final

from taskyard.core.limits import SECOND_NS

#: Longer names are cut, because they would displace the chart.
NAME_CHARACTERS_MAX: Final = 48

_MINUTE_SECONDS: Final = 60
_HOUR_SECONDS: Final = 3600
_DAY_SECONDS: Final = 86_400

_SIZES: Final = ("B", "kB", "MB", "GB", "TB")
_SIZE_STEP: Final = 1000

#: Below these, the smaller unit is shown too.
_SHORT_SECONDS: Final = 10
_FEW_UNITS: Final = 10


def format_duration(time_ns: float) -> str:
    """Format a duration: `3 ms`, `4.2 s`, `41 min`, `5 h 12 min`."""
    seconds = time_ns / SECOND_NS
    if 0 < seconds < 1:
        millis = seconds * 1000
        return f"{millis:.0f} ms" if millis >= 1 else "less than 1 ms"
    if seconds < _SHORT_SECONDS:
        return f"{seconds:.1f} s" if seconds else "0 s"
    whole = round(seconds)
    if whole < _MINUTE_SECONDS:
        return f"{whole} s"
    if whole < _HOUR_SECONDS:
        return _two_units(whole, _MINUTE_SECONDS, "min", 1, "s")
    if whole < _DAY_SECONDS:
        return _two_units(whole, _HOUR_SECONDS, "h", _MINUTE_SECONDS, "min")
    return _two_units(whole, _DAY_SECONDS, "d", _HOUR_SECONDS, "h")


def _two_units(whole: int, large: int, name: str, small: int, part: str) -> str:
    """Format two units, or one if the second adds little."""
    count, rest = divmod(whole, large)
    left = rest // small
    if count >= _FEW_UNITS or not left:
        return f"{round(whole / large)} {name}"
    return f"{count} {name} {left} {part}"


def format_count(number: int, thing: str) -> str:
    """Format a count: `1 task`, `2,000 tasks`, `no tasks`."""
    if not number:
        return f"no {thing}s"
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def format_percent(part: float) -> str:
    """Format a fraction of 1 as a percentage, such as `97 %`."""
    shown = part * 100
    return f"{shown:.1f} %" if 0 < shown < 1 else f"{shown:.0f} %"


def format_bytes(number: int) -> str:
    """Format a number of bytes: `512 B`, `1.2 GB`."""
    amount, units = float(number), iter(_SIZES)
    unit = next(units)
    for larger in units:
        if round(amount) < _SIZE_STEP:
            break
        amount, unit = amount / _SIZE_STEP, larger
    return f"{amount:.3g} {unit}"


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
