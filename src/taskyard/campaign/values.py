"""The values of a task's keys, from JSON, Python, or the text of a table's cell or an option.

A reader returns the value in the form that is kept, or raises `InvalidValue` with the problem. The
caller adds the key. Values that settings use too, such as durations, are read by `settings.values`.
Does not import tasks or files.
"""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from taskyard.calls.payloads import EXIT_STATUS_MAX
from taskyard.core.limits import AFTER_MAX, NUMBER_MAX, PRIORITY_MAX, SECOND_NS
from taskyard.settings.values import (
    LISTS,
    TEXTS_KEPT,
    InvalidValue,
    duration_text,
    integer_reader,
    is_plain,
    parse_duration,
    read_amount,
    read_duration,
    read_multiples,
    read_name,
    read_positive_duration,
    read_resources,
    read_size,
    read_text,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "InvalidValue",
    "TimeSpec",
    "duration_text",
    "format_time",
    "from_cell",
    "read_amount",
    "read_arguments",
    "read_call",
    "read_command",
    "read_directory",
    "read_duration",
    "read_environment",
    "read_keywords",
    "read_lane",
    "read_multiples",
    "read_name",
    "read_names",
    "read_paths",
    "read_payload",
    "read_positive_duration",
    "read_priority",
    "read_recipients",
    "read_resources",
    "read_size",
    "read_slots",
    "read_text",
    "read_time",
    "shown",
]

#: A longer duration from now is taken for a timestamp by mistake.
RELATIVE_NS_MAX: Final = 3650 * 86_400 * SECOND_NS

#: Input or output files of one task. Each is looked at before and after a run.
PATHS_MAX: Final = 10_000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class TimeSpec(msgspec.Struct, frozen=True, gc=False):
    """A point in time: by the wall clock, or relative to the submission."""

    ns: int
    from_now: bool = False

    def at_ns(self, now_ns: int) -> int:
        return now_ns + self.ns if self.from_now else self.ns


def read_lane(value: object) -> str:
    """Read a lane. The empty name is the open lane."""
    return read_name(value) if value != "" else ""


def read_names(value: object) -> tuple[str, ...]:
    """Read names of tasks, without duplicates."""
    if not isinstance(value, LISTS):
        raise InvalidValue(
            f'must be a list of names, such as ["first", "second"], not {shown(value)}'
        )
    if len(value) > AFTER_MAX:
        raise InvalidValue(
            f"must have at most {AFTER_MAX} names, not {len(value)} (put a task in between)"
        )
    try:
        plain = all(value) and is_plain("".join(value))
        names = value if plain else [read_name(name) for name in value]
    except TypeError:
        wrong = next(name for name in value if not isinstance(name, str))
        raise InvalidValue(f"must contain only texts, not {shown(wrong)}") from None
    except InvalidValue as bad:
        raise InvalidValue(f"has a name that {bad}") from None
    return tuple(dict.fromkeys(names) if len(names) > 1 else names)


def read_command(value: object) -> list[str]:
    """Read a command: a program and its arguments."""
    if not isinstance(value, LISTS):
        example = '["sleep", "1"]'
        raise InvalidValue(f"must be a list of words, such as {example}, not {shown(value)}")
    try:
        _check_no_null("".join(value))
    except TypeError:
        wrong = next(word for word in value if not isinstance(word, str))
        raise InvalidValue(f"must contain only texts, not {shown(wrong)}") from None
    if not value or not value[0]:
        raise InvalidValue("must name a program first")
    return list(value)


def _check_no_null(text: str) -> None:
    """Raise `InvalidValue` for a NUL, which would end an argument of a program."""
    if "\0" in text:
        raise InvalidValue(f"must not contain a NUL character: {shown(text)}")


def read_directory(value: object) -> str:
    text = read_text(value)
    _check_no_null(text)
    if not text:
        raise InvalidValue("must not be empty")
    return text


def read_paths(value: object) -> list[str]:
    """Read paths of files, without duplicates. A single one may be a text."""
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, LISTS):
        raise InvalidValue(f'must be a list of paths, such as ["a.csv"], not {shown(value)}')
    if len(paths) > PATHS_MAX:
        raise InvalidValue(f"must have at most {PATHS_MAX} paths, not {len(paths)}")
    try:
        return list(dict.fromkeys(map(read_directory, paths)))
    except InvalidValue as bad:
        raise InvalidValue(f"has a path that {bad}") from None


def read_exit_statuses(value: object) -> list[int]:
    """Read exit statuses, without duplicates. A single one may be a number."""
    statuses = value if isinstance(value, LISTS) else [value]
    for status in statuses:
        if type(status) is not int or not 1 <= status <= EXIT_STATUS_MAX:
            range_text = f"from 1 to {EXIT_STATUS_MAX}, such as [3]"
            raise InvalidValue(f"must be exit statuses {range_text}, not {shown(value)}")
    return sorted({*statuses})


def read_environment(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise InvalidValue(f'must be an object, such as {{"LANG": "C"}}, not {shown(value)}')
    for name, setting in value.items():
        if not isinstance(name, str) or not isinstance(setting, str):
            raise InvalidValue(f"must have texts as values, not {shown(setting)}")
        _check_no_null(name + setting)
        if not name or "=" in name:
            raise InvalidValue(f"must have names of variables, not {shown(name)}")
    return dict(value)


def read_call(value: object) -> str:
    """Read a function's import path: `module:function`."""
    text = read_text(value)
    module, colon, function = text.partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
        return text
    raise InvalidValue(f"must be module:function, such as imaging:thumbnail, not {shown(text)}")


def read_arguments(value: object) -> list[object]:
    if not isinstance(value, LISTS):
        raise InvalidValue(f"must be a list, not {shown(value)}")
    return list(value)


def read_keywords(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidValue(f"must be an object, not {shown(value)}")
    return value


def read_payload(value: object) -> bytes:
    """Read a payload: text as UTF-8, bytes as they are, a list or an object as JSON."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise InvalidValue(f"must be Unicode text, not {shown(value)}") from None
    if isinstance(value, list | dict):
        return msgspec.json.encode(value)
    raise InvalidValue(f"must be text, a list or an object, not {shown(value)}")


def read_recipients(value: object) -> list[str | dict[str, object]]:
    """Read the recipients of a bundle: each a text, or an object of fields."""
    if not isinstance(value, LISTS):
        raise InvalidValue(f'must be a list, such as ["a@b.org", "c@d.org"], not {shown(value)}')
    if not value:
        raise InvalidValue("must have at least one")
    for place, one in enumerate(value):
        fields = isinstance(one, dict) and all(isinstance(key, str) for key in one)
        if not one or not (fields or isinstance(one, str)):
            raise InvalidValue(
                f"must be a list of texts or objects, but number {place} is {shown(one)}"
            )
    return list(value)


read_priority: Final = integer_reader(-PRIORITY_MAX, PRIORITY_MAX)


def read_slots(value: object) -> int:
    if type(value) is not int or not 1 <= value <= NUMBER_MAX:
        raise InvalidValue(f"must be at least 1, not {shown(value)}")
    return value


def read_time(value: object) -> TimeSpec:
    """Read a point in time: ISO 8601, or a duration from now."""
    if isinstance(value, str):
        return _time_from_text(value.strip())
    if isinstance(value, datetime):
        return _time_from_datetime(value)
    return _time_from_now(read_duration(value), value)


@lru_cache(TEXTS_KEPT)
def _time_from_text(text: str) -> TimeSpec:
    duration_ns = parse_duration(text)
    if duration_ns is not None:
        return _time_from_now(duration_ns, text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        example = "such as 2031-05-04T12:00:00Z, or a duration from now, such as 10m"
        raise InvalidValue(f"must be a time, {example}, not {shown(text)}") from None
    return _time_from_datetime(moment)


def _time_from_now(duration_ns: int, value: object) -> TimeSpec:
    if duration_ns > RELATIVE_NS_MAX:
        hint = "write a date as 2031-05-04T12:00:00Z"
        raise InvalidValue(f"is more than ten years from now: {shown(value)} ({hint})")
    return TimeSpec(duration_ns, from_now=True)


def _time_from_datetime(moment: datetime) -> TimeSpec:
    if moment.tzinfo is None:
        example = f"{moment.isoformat()}Z for UTC"
        raise InvalidValue(f"must have a time zone, such as {example}")
    at_ns = (moment - _EPOCH) // _MICROSECOND * 1000
    if not 0 <= at_ns <= NUMBER_MAX:
        raise InvalidValue(f"must be from 1970 to 2262, not {moment.isoformat()}")
    return TimeSpec(at_ns)


def format_time(when: TimeSpec) -> str:
    """Return a point in time as a file has it, to the microsecond."""
    if when.from_now:
        return duration_text(when.ns)
    return (_EPOCH + timedelta(microseconds=when.ns // 1000)).isoformat()


# Text of a cell or an option. `check_task` reads the resulting value.


def _json(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as wrong:
        raise InvalidValue(f"must be JSON ({wrong}), not {shown(text)}") from None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as wrong:
        raise InvalidValue(f"can't be split into words ({wrong}): {shown(text)}") from None


def _split_command(text: str) -> object:
    """Read a command: a JSON list, or words with shell quotes."""
    return _json(text) if text.startswith("[") else _split(text)


def _split_names(text: str) -> object:
    """Read names: a JSON list, or names separated by semicolons or spaces."""
    if text.startswith("["):
        return _json(text)
    names = text.split(";") if ";" in text else text.split()
    return [name.strip() for name in names if name.strip()]


def _number(text: str) -> object:
    """Return a whole number, or the text, which the reader of the key refuses."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else text


def _exit_statuses(text: str) -> object:
    """Read numbers separated by spaces, or a JSON list."""
    return _json(text) if text.startswith("[") else [*map(_number, text.split())]


def _retries(text: str) -> object:
    """Read a number of retries, or a JSON list of multiples."""
    return _json(text) if text.startswith("[") else _number(text)


def _environment(text: str) -> object:
    """Read variables: a JSON object, or NAME=VALUE words with shell quotes."""
    if text.startswith("{"):
        return _json(text)
    settings = [word.partition("=") for word in _split(text)]
    if not all(equals for _, equals, _ in settings):
        raise InvalidValue(f"must be NAME=VALUE, or an object, not {shown(text)}")
    return {name: setting for name, _, setting in settings}


#: Readers of keys whose value is not a text.
_READERS: Final[dict[str, Callable[[str], object]]] = {
    "argv": _split_command,
    "args": _json,
    "kwargs": _json,
    "after": _split_names,
    "inputs": _split_command,
    "outputs": _split_command,
    "final_exit_status": _exit_statuses,
    "recipients": _split_names,
    "priority": _number,
    "retries": _retries,
    "slots": _number,
    "resources": _environment,
    "env": _environment,
}

#: Keys whose value keeps surrounding spaces.
_VERBATIM: Final = ("payload",)


def from_cell(key: str, cell: str) -> object:
    """Return the JSON value of a cell for this key. Empty: None. Raises `InvalidValue`."""
    text = cell if key in _VERBATIM else cell.strip()
    if not text:
        return None
    reader = _READERS.get(key)
    return text if reader is None else reader(text)
