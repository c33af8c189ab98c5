"""Readers of user-written values: names, numbers, durations, multiples, resources.

A reader takes a value from TOML, JSON, a table cell, a variable or Python. It returns the internal
form or raises `InvalidValue`. The caller adds the key.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import NAME_BYTES_MAX, NUMBER_MAX, RETRIES_MAX, SECOND_NS
from taskyard.core.resources import CPUS, GPUS, MEMORY, RESOURCES_MAX, UNIT
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.core.resources import Resources

#: The length of a value in a message.
SHOWN_CHARACTERS: Final = 60

#: Cached texts: a campaign has few different ones, or one for each task.
TEXTS_KEPT: Final = 4096

UNITS_NS: Final = {
    "d": 86_400 * SECOND_NS,
    "h": 3600 * SECOND_NS,
    "m": 60 * SECOND_NS,
    "s": SECOND_NS,
    "ms": SECOND_NS // 1000,
}
_NUMBER = r"([0-9]{1,20}(?:\.[0-9]{1,20})?)"
_DURATION = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in UNITS_NS))
_SECONDS = re.compile(_NUMBER)
_AMOUNT = re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,4})?")
_MEMORY = re.compile(rf"{_NUMBER} ?([KMGT]?(?:i?B)?)", re.IGNORECASE)
#: 4G and 4GiB are binary, as memory is sold. 4GB is decimal.
_MEMORY_UNITS: Final = {
    "": 1,
    "B": 1,
    **{
        f"{letter}{end}": 1024**power
        for power, letter in enumerate("KMGT", 1)
        for end in ("", "IB")
    },
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
}
#: Resources beside those that have keys of their own.
OTHER_RESOURCES_MAX: Final = RESOURCES_MAX - len((CPUS, MEMORY, GPUS))

_RESOURCE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: TOML and JSON have lists. Python may pass tuples.
LISTS: Final = (list, tuple)
_MICROSECOND: Final = timedelta(microseconds=1)


class InvalidValue(UserError):
    """An invalid value. The text follows the key's name: `must be …`."""

    code = "invalid-setting"


def shown(value: object) -> str:
    """Format a value for a message, truncated."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def read_name(value: object) -> str:
    """Read the name of a task, service or lane: one line of text."""
    text = read_text(value)
    if is_plain(text):
        return text
    if not text:
        raise InvalidValue("must not be empty")
    if _CONTROL.search(text):
        raise InvalidValue(f"must not contain control characters, such as those in {shown(text)}")
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidValue(f"must be Unicode text, not {shown(text)}") from None
    if length > NAME_BYTES_MAX:
        raise InvalidValue(f"must have at most {NAME_BYTES_MAX} bytes, not {length}")
    return text


def is_plain(text: str) -> bool:
    """Return whether a name is valid by a quick test. Nearly all names are."""
    return text.isascii() and text.isprintable() and 0 < len(text) <= NAME_BYTES_MAX


def read_text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidValue(f"must be text, not {shown(value)}")
    return value


def integer_reader(lowest: int, highest: int) -> Callable[[object], int]:
    def read_integer(value: object) -> int:
        if type(value) is not int or not lowest <= value <= highest:
            raise InvalidValue(
                f"must be a whole number from {lowest} to {highest}, not {shown(value)}"
            )
        return value

    return read_integer


def read_duration(value: object) -> int:
    """Read a text such as 1h30m, or a number of seconds, as nanoseconds."""
    duration_ns = None
    if isinstance(value, str):
        duration_ns = parse_duration(value.strip())
    elif isinstance(value, timedelta):
        duration_ns = value // _MICROSECOND * 1000
    elif type(value) is int or (type(value) is float and math.isfinite(value)):
        duration_ns = int(Decimal(str(value)) * SECOND_NS)
    if duration_ns is None:
        example = "such as 90s, 5m or 1h30m, or a number of seconds"
        raise InvalidValue(f"must be a duration, {example}, not {shown(value)}")
    if not 0 <= duration_ns <= NUMBER_MAX:
        raise InvalidValue(f"must be from 0 seconds to 292 years, not {shown(value)}")
    return duration_ns


@lru_cache(TEXTS_KEPT)
def parse_duration(text: str) -> int | None:
    """Parse a duration to nanoseconds. None if the text is not a duration."""
    if _SECONDS.fullmatch(text):
        return int(Decimal(text) * SECOND_NS)
    found = _DURATION.fullmatch(text)
    if not text or not found:
        return None
    parts = zip(found.groups(), UNITS_NS.values(), strict=True)
    return int(sum(Decimal(number) * unit_ns for number, unit_ns in parts if number))


#: Units of sizes: powers of 1024.
UNITS_BYTES: Final = {"T": 1 << 40, "G": 1 << 30, "M": 1 << 20, "K": 1 << 10}
_SIZE = re.compile(rf"{_NUMBER}([KMGT]?)")


def read_size(value: object) -> int:
    """Read a text such as 10G, or a number, as bytes."""
    size = None
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        size = int(Decimal(found[1]) * UNITS_BYTES.get(found[2], 1))
    elif type(value) is int:
        size = value
    if size is None:
        raise InvalidValue(f"must be a size, such as 500M or 10G, not {shown(value)}")
    if not 0 <= size <= NUMBER_MAX:
        raise InvalidValue(f"must be from 0 to {NUMBER_MAX} bytes, not {shown(value)}")
    return size


def size_text(size_bytes: int) -> str:
    """Format a size exactly, as in a file."""
    for unit, factor in UNITS_BYTES.items():
        if size_bytes and not size_bytes % factor:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def read_positive_duration(value: object) -> int:
    """Read a duration above 0."""
    duration_ns = read_duration(value)
    if not duration_ns:
        raise InvalidValue("must be longer than 0")
    return duration_ns


def read_multiples(value: object) -> tuple[float, ...]:
    """Read a retry schedule in multiples of the interval. A number n is n times one interval."""
    if type(value) is int and 0 <= value <= RETRIES_MAX:
        return _ones(value)
    if not isinstance(value, LISTS):
        limits = f"a number from 0 to {RETRIES_MAX}, or a list of multiples"
        raise InvalidValue(f"must be {limits}, such as [1, 2, 5], not {shown(value)}")
    if len(value) > RETRIES_MAX:
        raise InvalidValue(f"must have at most {RETRIES_MAX} steps, not {len(value)}")
    for multiple in value:
        if type(multiple) not in (int, float) or not 0 <= multiple <= NUMBER_MAX:
            raise InvalidValue(f"must have multiples of 0 or more, not {shown(multiple)}")
    return tuple(value)


@lru_cache(RETRIES_MAX + 1)
def _ones(count: int) -> tuple[float, ...]:
    """Return one shared tuple for all tasks with this many retries."""
    return (1,) * count


def duration_text(duration_ns: int) -> str:
    """Format a duration exactly, as in a file."""
    seconds, rest_ns = divmod(duration_ns, SECOND_NS)
    return f"{seconds}.{rest_ns:09}".rstrip("0") + "s" if rest_ns else f"{seconds}s"


# Resources: amounts are bytes of memory, and ten-thousandths of everything else.


def read_memory(value: object) -> int:
    """Read an amount of memory: a number of bytes, or a text such as 4G."""
    found = _MEMORY.fullmatch(value.strip()) if isinstance(value, str) else None
    if found:
        amount = int(Decimal(found[1]) * _MEMORY_UNITS[found[2].upper()])
    elif type(value) is int or (type(value) is float and value.is_integer()):
        amount = int(value)
    else:
        example = "such as 512M, 1.5G or a number of bytes"
        raise InvalidValue(f"must be an amount of memory, {example}, not {shown(value)}")
    if not 0 <= amount <= NUMBER_MAX:
        raise InvalidValue(f"must be from 0 to {NUMBER_MAX} bytes, not {shown(value)}")
    return amount


def read_amount(value: object) -> int:
    """Read an amount of a resource other than memory, such as 2 or 0.5."""
    text = value.strip() if isinstance(value, str) else str(value)
    if isinstance(value, bool) or not _AMOUNT.fullmatch(text):
        example = "with at most four decimals, such as 2 or 0.5"
        raise InvalidValue(f"must be a number of 0 or more, {example}, not {shown(value)}")
    amount = int(Decimal(text) * UNIT)
    if amount > NUMBER_MAX:
        raise InvalidValue(f"must be at most {NUMBER_MAX // UNIT}, not {shown(value)}")
    return amount


def read_resources(value: object) -> Resources:
    """Read named resources that have no key of their own: an object of names and amounts."""
    if not isinstance(value, dict):
        raise InvalidValue(f'must be an object, such as {{"license": 1}}, not {shown(value)}')
    amounts: dict[bytes, int] = {}
    for name, amount in value.items():
        if not isinstance(name, str) or not _RESOURCE_NAME.fullmatch(name):
            text = "must have names of letters, digits, - and _ that begin with a letter"
            raise InvalidValue(f"{text}, not {shown(name)}")
        if name.encode() in (CPUS, MEMORY, GPUS):
            raise InvalidValue(f'must not have "{name}", which has a key or option of its own')
        try:
            amounts[name.encode()] = read_amount(amount)
        except InvalidValue as bad:
            raise InvalidValue(f'has "{name}", which {bad}') from None
    if len(amounts) > OTHER_RESOURCES_MAX:
        raise InvalidValue(f"must have at most {OTHER_RESOURCES_MAX} names, not {len(amounts)}")
    return tuple(sorted((name, amount) for name, amount in amounts.items() if amount))
