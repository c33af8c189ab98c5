"""Durations as text for people, in at most two units.

The sentences of `explain` and the command line use the same functions, so that a time reads the
same in both. Moments are formatted by the command line: the core has no calendar. The durations are
apart from `model`, because `taskyard --help` imports no structs.
"""

from typing import Final

from taskyard.core.limits import SECOND_NS

MINUTE_SECONDS: Final = 60
HOUR_SECONDS: Final = 3600
DAY_SECONDS: Final = 86_400

#: Shorter durations have tenths of a second.
_SHORT_SECONDS: Final = 10

#: From here on a rough duration has no seconds.
_ROUGH_SECONDS: Final = 600


def duration_text(seconds: float) -> str:
    """Return a measured duration: `0.3 s`, `1 min 5 s`, `1 h 12 min`."""
    if round(seconds, 1) < _SHORT_SECONDS:
        return f"{seconds:.1f} s"
    return _two_units(round(seconds))


def rough_duration(seconds: float) -> str:
    """Return a duration until or since now, rounded down: `45 s`, `59 min`, `3 d 4 h`."""
    whole = int(seconds)
    if _ROUGH_SECONDS <= whole < HOUR_SECONDS:
        whole -= whole % MINUTE_SECONDS
    return _two_units(whole)


def rough_duration_ns(duration_ns: int) -> str:
    """Return `rough_duration` of nanoseconds. Below 0 it is 0."""
    return rough_duration(max(0, duration_ns) // SECOND_NS)


def _two_units(seconds: int) -> str:
    """Return the largest unit and the next unit. A zero is left out."""
    if seconds < MINUTE_SECONDS:
        return f"{seconds} s"
    if seconds < HOUR_SECONDS:
        return _pair(seconds // MINUTE_SECONDS, "min", seconds % MINUTE_SECONDS, "s")
    if seconds < DAY_SECONDS:
        minutes = seconds % HOUR_SECONDS // MINUTE_SECONDS
        return _pair(seconds // HOUR_SECONDS, "h", minutes, "min")
    return _pair(seconds // DAY_SECONDS, "d", seconds % DAY_SECONDS // HOUR_SECONDS, "h")


def _pair(number: int, unit: str, rest: int, rest_unit: str) -> str:
    return f"{number:,} {unit} {rest} {rest_unit}" if rest else f"{number:,} {unit}"
