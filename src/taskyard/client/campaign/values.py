"""The values that a task's keys may have: each from whatever JSON, a cell or Python gave.

A reader takes a value and returns it in the form that we keep, or raises `BadValue` with what is
wrong about it; who calls knows which key it was. Nothing here knows about tasks or files.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from taskyard.core.limits import (
    AFTER_MAX,
    NAME_BYTES_MAX,
    NUMBER_MAX,
    PRIORITY_MAX,
    RETRIES_MAX,
    SECOND_NS,
)
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

#: A value in a message is cut to this length: it is to be recognised, not read.
SHOWN_CHARACTERS: Final = 60

#: Nobody means a number of seconds that is further away: it is a date that was written as one.
FROM_NOW_NS_MAX: Final = 3650 * 86_400 * SECOND_NS

#: Equal texts become one object; a campaign has few different ones, or one a task.
_TEXTS_KEPT: Final = 4096

_UNITS_NS: Final = {
    "d": 86_400 * SECOND_NS,
    "h": 3600 * SECOND_NS,
    "m": 60 * SECOND_NS,
    "s": SECOND_NS,
    "ms": SECOND_NS // 1000,
}
_NUMBER = r"([0-9]{1,20}(?:\.[0-9]{1,20})?)"
_DURATION = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in _UNITS_NS))
_SECONDS = re.compile(_NUMBER)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: JSON has lists; Python may give tuples.
_LISTS: Final = (list, tuple)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class BadValue(UserError):
    """A value can't be used. The text follows the name of its key: `must be …`."""


class When(msgspec.Struct, frozen=True, gc=False):
    """A point in time: by the wall clock, or counted from when the campaign is submitted."""

    ns: int
    from_now: bool = False

    def at_ns(self, now_ns: int) -> int:
        return now_ns + self.ns if self.from_now else self.ns


def shown(value: object) -> str:
    """A value as it is shown in a message."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def read_name(value: object) -> str:
    """A name of a task, a service or a lane: one line of text."""
    text = read_text(value)
    if _is_plain(text):
        return text
    if not text:
        raise BadValue("must not be empty")
    if _CONTROL.search(text):
        raise BadValue(f"must not have control characters, such as those in {shown(text)}")
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise BadValue(f"is not Unicode text: {shown(text)}") from None
    if length > NAME_BYTES_MAX:
        raise BadValue(f"has {length} bytes; at most {NAME_BYTES_MAX} are allowed")
    return text


def _is_plain(text: str) -> bool:
    """Nearly every name is: then nothing more needs to be looked at."""
    return text.isascii() and text.isprintable() and 0 < len(text) <= NAME_BYTES_MAX


def read_lane(value: object) -> str:
    """A lane; the empty one is the open lane."""
    return read_name(value) if value != "" else ""


def read_text(value: object) -> str:
    if not isinstance(value, str):
        raise BadValue(f"must be text, not {shown(value)}")
    return value


def read_names(value: object) -> tuple[str, ...]:
    """Names of tasks, each once."""
    if not isinstance(value, _LISTS):
        raise BadValue(f'must be a list of names, such as ["first", "second"], not {shown(value)}')
    if len(value) > AFTER_MAX:
        raise BadValue(f"has {len(value)} names; at most {AFTER_MAX} are allowed")
    try:
        plain = all(value) and _is_plain("".join(value))
        names = value if plain else [read_name(name) for name in value]
    except TypeError:
        wrong = next(name for name in value if not isinstance(name, str))
        raise BadValue(f"must have names only; write {shown(wrong)} in quotes") from None
    except BadValue as bad:
        raise BadValue(f"has a name that {bad}") from None
    return tuple(dict.fromkeys(names) if len(names) > 1 else names)


def read_words(value: object) -> list[str]:
    """A command: a program and its arguments."""
    if not isinstance(value, _LISTS):
        example = '["sleep", "1"]'
        raise BadValue(f"must be a list of words, such as {example}, not {shown(value)}")
    try:
        _check_passable("".join(value))
    except TypeError:
        wrong = next(word for word in value if not isinstance(word, str))
        raise BadValue(f"must have words only; write {shown(wrong)} in quotes") from None
    if not value or not value[0]:
        raise BadValue("must name a program first")
    return list(value)


def _check_passable(text: str) -> None:
    """What is handed to another program by the system ends at a zero byte."""
    if "\0" in text:
        raise BadValue(f"can't have a NUL character: {shown(text)}")


def read_directory(value: object) -> str:
    text = read_text(value)
    _check_passable(text)
    if not text:
        raise BadValue("must not be empty")
    return text


def read_environment(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise BadValue(f'must be an object, such as {{"LANG": "C"}}, not {shown(value)}')
    for name, setting in value.items():
        if not isinstance(name, str) or not isinstance(setting, str):
            raise BadValue(f"must have texts only; write {shown(setting)} in quotes")
        _check_passable(name + setting)
        if not name or "=" in name:
            raise BadValue(f"can't set a variable called {shown(name)}")
    return dict(value)


def read_call(value: object) -> str:
    """A function by import path: `module:function`."""
    text = read_text(value)
    module, colon, function = text.partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
        return text
    raise BadValue(f"must be module:function, such as imaging:thumbnail, not {shown(text)}")


def read_arguments(value: object) -> list[object]:
    if not isinstance(value, _LISTS):
        raise BadValue(f"must be a list, not {shown(value)}")
    return list(value)


def read_keywords(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise BadValue(f"must be an object, not {shown(value)}")
    return value


def read_payload(value: object) -> bytes:
    """Text is kept as UTF-8, bytes as they are, and what has a structure as JSON."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise BadValue(f"is not Unicode text: {shown(value)}") from None
    if isinstance(value, list | dict):
        return msgspec.json.encode(value)
    raise BadValue(f"must be text, a list or an object, not {shown(value)}")


def integer_reader(lowest: int, highest: int) -> Callable[[object], int]:
    def read_integer(value: object) -> int:
        if type(value) is not int or not lowest <= value <= highest:
            raise BadValue(f"must be a whole number from {lowest} to {highest}, not {shown(value)}")
        return value

    return read_integer


read_priority: Final = integer_reader(-PRIORITY_MAX, PRIORITY_MAX)
read_slots: Final = integer_reader(1, NUMBER_MAX)


def read_duration(value: object) -> int:
    """Nanoseconds, of a text such as 1h30m or of a number of seconds."""
    duration_ns = None
    if isinstance(value, str):
        duration_ns = _text_ns(value.strip())
    elif isinstance(value, timedelta):
        duration_ns = value // _MICROSECOND * 1000
    elif type(value) is int or (type(value) is float and math.isfinite(value)):
        duration_ns = int(Decimal(str(value)) * SECOND_NS)
    if duration_ns is None:
        example = "such as 90s, 5m or 1h30m, or a number of seconds"
        raise BadValue(f"must be a duration, {example}, not {shown(value)}")
    if not 0 <= duration_ns <= NUMBER_MAX:
        raise BadValue(f"must be from 0 seconds to 292 years, not {shown(value)}")
    return duration_ns


@lru_cache(_TEXTS_KEPT)
def _text_ns(text: str) -> int | None:
    if _SECONDS.fullmatch(text):
        return int(Decimal(text) * SECOND_NS)
    found = _DURATION.fullmatch(text)
    if not text or not found:
        return None
    parts = zip(found.groups(), _UNITS_NS.values(), strict=True)
    return int(sum(Decimal(number) * unit_ns for number, unit_ns in parts if number))


def read_limit(value: object) -> int:
    """A duration that is not 0."""
    duration_ns = read_duration(value)
    if not duration_ns:
        raise BadValue("must be longer than 0")
    return duration_ns


def read_when(value: object) -> When:
    """A point in time: ISO 8601, or a duration from now."""
    if isinstance(value, str):
        return _text_when(value.strip())
    if isinstance(value, datetime):
        return _date_when(value)
    return _later(read_duration(value), value)


@lru_cache(_TEXTS_KEPT)
def _text_when(text: str) -> When:
    duration_ns = _text_ns(text)
    if duration_ns is not None:
        return _later(duration_ns, text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        example = "such as 2031-05-04T12:00:00Z, or a duration from now, such as 10m"
        raise BadValue(f"must be a time, {example}, not {shown(text)}") from None
    return _date_when(moment)


def _later(duration_ns: int, value: object) -> When:
    if duration_ns > FROM_NOW_NS_MAX:
        example = "a date is written as 2031-05-04T12:00:00Z"
        raise BadValue(f"is more than ten years from now ({shown(value)}); {example}")
    return When(duration_ns, from_now=True)


def _date_when(moment: datetime) -> When:
    if moment.tzinfo is None:
        example = f"{moment.isoformat()}Z for UTC"
        raise BadValue(f"must say its time zone, such as {example}")
    at_ns = (moment - _EPOCH) // _MICROSECOND * 1000
    if not 0 <= at_ns <= NUMBER_MAX:
        raise BadValue(f"must be from 1970 to 2262, not {moment.isoformat()}")
    return When(at_ns)


def read_multiples(value: object) -> tuple[float, ...]:
    """A retry schedule, in multiples of the interval: a number n is n times one interval."""
    if type(value) is int and 0 <= value <= RETRIES_MAX:
        return _ones(value)
    if not isinstance(value, _LISTS):
        limits = f"a number from 0 to {RETRIES_MAX}, or a list of multiples"
        raise BadValue(f"must be {limits}, such as [1, 2, 5], not {shown(value)}")
    if len(value) > RETRIES_MAX:
        raise BadValue(f"has {len(value)} steps; at most {RETRIES_MAX} are allowed")
    for multiple in value:
        if type(multiple) not in (int, float) or not 0 <= multiple <= NUMBER_MAX:
            raise BadValue(f"must have multiples of 0 or more, not {shown(multiple)}")
    return tuple(value)


@lru_cache(RETRIES_MAX + 1)
def _ones(count: int) -> tuple[float, ...]:
    """One object for all tasks with so many retries."""
    return (1,) * count


def duration_text(duration_ns: int) -> str:
    """A duration as a file has it, exactly."""
    seconds, rest_ns = divmod(duration_ns, SECOND_NS)
    return f"{seconds}.{rest_ns:09}".rstrip("0") + "s" if rest_ns else f"{seconds}s"


def when_text(when: When) -> str:
    """A point in time as a file has it, to the microsecond."""
    if when.from_now:
        return duration_text(when.ns)
    return (_EPOCH + timedelta(microseconds=when.ns // 1000)).isoformat()
