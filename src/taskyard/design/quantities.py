"""Durations and sizes as the page and the report print them. One rule for both."""

from __future__ import annotations

from typing import Final

_MICROSECOND_NS: Final = 1_000
_MILLISECOND_NS: Final = 1_000_000
_SECOND_NS: Final = 1_000_000_000

#: Below this, milliseconds and seconds have a fraction.
_FEW: Final = 10

#: Seconds of each unit, the largest first, with the unit below it.
_UNITS: Final = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))

_SIZES: Final = ("B", "kB", "MB", "GB", "TB")
_SIZE_STEP: Final = 1000


def format_duration(time_ns: float) -> str:
    """Format a duration: `35 µs`, `2.5 ms`, `4.2 s`, `41 min`, `5 h 12 min`."""
    seconds = time_ns / _SECOND_NS
    if 0 < time_ns < _MILLISECOND_NS:
        return f"{time_ns / _MICROSECOND_NS:.3g} µs"
    if 0 < seconds < 1:
        millis = time_ns / _MILLISECOND_NS
        return f"{millis:.2g} ms" if millis < _FEW else f"{millis:.0f} ms"
    if seconds < _FEW:
        return f"{seconds:.1f} s" if seconds else "0 s"
    whole = round(seconds)
    for large, name, small, part in _UNITS:
        if whole >= large:
            return _two_units(whole, (large, name), (small, part))
    return f"{whole} s"


def _two_units(whole: int, large: tuple[int, str], small: tuple[int, str]) -> str:
    """Format two units, or one if the second adds little."""
    count, rest = divmod(whole, large[0])
    left = rest // small[0]
    if count >= _FEW or not left:
        return f"{round(whole / large[0])} {large[1]}"
    return f"{count} {large[1]} {left} {small[1]}"


def format_bytes(number: float) -> str:
    """Format a number of bytes: `512 B`, `1.2 GB`."""
    amount, units = float(number), iter(_SIZES)
    unit = next(units)
    for larger in units:
        if round(amount) < _SIZE_STEP:
            break
        amount, unit = amount / _SIZE_STEP, larger
    return f"{amount:.3g} {unit}"
