"""Readers of user-written values: names, numbers, durations, endpoints, commands, resources.

A reader takes a value from TOML, JSON, a table cell, a variable or Python. It returns the internal
form or raises `InvalidValue`. The caller adds the key.
"""

from __future__ import annotations

import math
import re
import shlex
from datetime import timedelta
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.calls.scripts import scripts_in
from taskyard.core.limits import NAME_BYTES_MAX, NUMBER_MAX, RETRIES_MAX, SECOND_NS
from taskyard.core.resources import CPUS, GPUS, MEMORY, RESOURCES_MAX, UNIT
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.resources import Resources

#: The length of a value in a message.
SHOWN_CHARACTERS: Final = 60

#: Cached texts: a campaign has few different texts, or one for each task.
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
_AMOUNT = re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,4})?")
#: Units of sizes: powers of 1024.
UNITS_BYTES: Final = {"T": 1 << 40, "G": 1 << 30, "M": 1 << 20, "K": 1 << 10}
_SIZE = re.compile(rf"{_NUMBER} ?([KMGT]?)(i?B)?", re.IGNORECASE)
#: Resources beside CPUs, memory and GPUs, which have keys of their own.
OTHER_RESOURCES_MAX: Final = RESOURCES_MAX - len((CPUS, MEMORY, GPUS))

#: TOML and JSON have lists. Python may pass tuples.
LISTS: Final = (list, tuple)


class InvalidValue(UserError):
    """An invalid value. The text follows the key's name: `must be …`."""

    code = "invalid-setting"


def shown(value: object) -> str:
    """Format a value for a message, truncated."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def invalid(expected: str, value: object) -> InvalidValue:
    """Return the error about a value that is not as expected."""
    return InvalidValue(f"must {expected}, not {shown(value)}")


def read_name(value: object) -> str:
    """Read the name of a task, service or lane: one line of text."""
    text = read_text(value)
    if is_plain(text):
        return text
    if not text:
        raise InvalidValue("must not be empty")
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise InvalidValue(f"must not contain control characters, such as those in {shown(text)}")
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise invalid("be Unicode text", text) from None
    if length > NAME_BYTES_MAX:
        raise InvalidValue(f"must have at most {NAME_BYTES_MAX} bytes, not {length}")
    return text


def is_plain(text: str) -> bool:
    """Return whether a name is valid by a quick test. Nearly all names are."""
    return text.isascii() and text.isprintable() and 0 < len(text) <= NAME_BYTES_MAX


def read_text(value: object) -> str:
    if not isinstance(value, str):
        raise invalid("be text", value)
    return value


def read_boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid("be true or false", value)
    return value


# Numbers, durations and sizes.


def integer_reader(lowest: int, highest: int) -> Callable[[object], int]:
    """Return a reader of whole numbers. A bound of the machine is not named."""

    def read_integer(value: object) -> int:
        if type(value) is int and lowest <= value <= highest:
            return value
        if highest < NUMBER_MAX:
            raise invalid(f"be a whole number from {lowest} to {highest}", value)
        is_large = type(value) is int and value > highest
        raise invalid("be less than 2**63" if is_large else f"be at least {lowest}", value)

    return read_integer


def read_duration(value: object) -> int:
    """Read a text such as 1h30m, or a number of seconds, as nanoseconds."""
    duration_ns = None
    if isinstance(value, str):
        duration_ns = parse_duration(value.strip())
    elif isinstance(value, timedelta):
        duration_ns = value // timedelta(microseconds=1) * 1000
    elif type(value) is int or (type(value) is float and math.isfinite(value)):
        duration_ns = int(Decimal(str(value)) * SECOND_NS)
    if duration_ns is None:
        example = "such as 90s, 5m or 1h30m, or a number of seconds"
        raise invalid(f"be a duration, {example}", value)
    if not 0 <= duration_ns <= NUMBER_MAX:
        raise invalid("be from 0 seconds to 292 years", value)
    return duration_ns


@lru_cache(TEXTS_KEPT)
def parse_duration(text: str) -> int | None:
    """Parse a duration to nanoseconds. None if the text is not a duration."""
    if re.fullmatch(_NUMBER, text):
        return int(Decimal(text) * SECOND_NS)
    found = _DURATION.fullmatch(text)
    if not text or not found:
        return None
    parts = zip(found.groups(), UNITS_NS.values(), strict=True)
    return int(sum(Decimal(number) * unit_ns for number, unit_ns in parts if number))


def read_positive_duration(value: object) -> int:
    """Read a duration above 0."""
    duration_ns = read_duration(value)
    if not duration_ns:
        raise InvalidValue("must be longer than 0")
    return duration_ns


def duration_text(duration_ns: int) -> str:
    """Format a duration exactly, as in a file."""
    seconds, rest_ns = divmod(duration_ns, SECOND_NS)
    return f"{seconds}.{rest_ns:09}".rstrip("0") + "s" if rest_ns else f"{seconds}s"


def span_text(duration_ns: int) -> str:
    """Format a duration exactly, in few and large units."""
    parts, rest_ns = [], duration_ns
    for unit in ("d", "h", "m"):
        number, rest_ns = divmod(rest_ns, UNITS_NS[unit])
        parts.append(f"{number}{unit}" if number else "")
    if rest_ns or not any(parts):
        parts.append(duration_text(rest_ns))
    return "".join(parts)


def read_size(value: object) -> int:
    """Read a number of bytes, or a text such as 10G, as bytes.

    4G and 4GiB are binary, as memory is sold. 4GB is decimal.
    """
    size = int(value) if type(value) is int or (type(value) is float and value % 1 == 0) else None
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        base = 1000 if (found[3] or "").upper() == "B" else 1024
        size = int(Decimal(found[1]) * base ** " KMGT".index(found[2].upper() or " "))
    if size is None:
        raise invalid("be a size, such as 512M, 1.5G or a number of bytes", value)
    if not 0 <= size <= NUMBER_MAX:
        raise invalid("be from 0 to 8 EiB", value)
    return size


def size_text(size_bytes: int) -> str:
    """Format a size exactly, as in a file."""
    for unit, factor in UNITS_BYTES.items():
        if size_bytes and not size_bytes % factor:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def read_percent(value: object) -> int:
    text = str(value).removesuffix("%") if type(value) in (int, str) else ""
    if not re.fullmatch("[0-9]{1,2}|100", text):
        raise invalid("be from 0% to 100%", value)
    return int(text)


def read_multiples(value: object) -> tuple[float, ...]:
    """Read a retry schedule in multiples of the interval. A number n is n times one interval."""
    if type(value) is int and 0 <= value <= RETRIES_MAX:
        return _ones(value)
    if not isinstance(value, LISTS):
        limits = f"a number from 0 to {RETRIES_MAX}, or a list of multiples"
        raise invalid(f"be {limits}, such as [1, 2, 5]", value)
    if len(value) > RETRIES_MAX:
        raise InvalidValue(f"must have at most {RETRIES_MAX} steps, not {len(value)}")
    for multiple in value:
        if type(multiple) not in (int, float) or not 0 <= multiple <= NUMBER_MAX:
            raise invalid("have numbers of 0 or more", multiple)
    return tuple(value)


@lru_cache(RETRIES_MAX + 1)
def _ones(count: int) -> tuple[float, ...]:
    """Return one shared tuple for all tasks with this many retries."""
    return (1,) * count


class Rate(Struct, frozen=True):
    """A number of tasks per unit of time."""

    tasks: int
    #: A unit of rates.
    unit: str

    @property
    def interval_ns(self) -> int:
        """The average time between two tasks."""
        return UNITS_NS[self.unit] // self.tasks

    def __str__(self) -> str:
        return f"{self.tasks}/{self.unit}"


def read_rate(value: object) -> Rate:
    text = value.replace(" ", "") if isinstance(value, str) else ""
    found = re.fullmatch(r"([1-9][0-9]{0,8})/(s|m|h|d)", text)
    if found is None:
        raise invalid("be tasks per time, such as 10/s, 5/m or 100/h", value)
    return Rate(int(found[1]), found[2])


# Files and endpoints.


def read_file(value: object) -> Path:
    text = read_text(value)
    if not text or "\0" in text:
        raise invalid("be a file, such as ./my.key", text)
    return Path(text)


def read_directory(value: object) -> Path:
    text = read_text(value)
    if not text or "\0" in text or "://" in text:
        raise invalid("be a directory, such as ./.taskyard", text)
    return Path(text)


def read_endpoint(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"(?:tcp|ipc)://\S+", value):
        return value
    raise invalid("be an endpoint, such as tcp://127.0.0.1:6125 or ipc://PATH", value)


def read_endpoints(value: object) -> tuple[str, ...]:
    given = value if isinstance(value, LISTS) else (value,)
    return tuple(read_endpoint(one) for one in given)


def read_host_port(value: object) -> str:
    """Read `HOST:PORT`. A host with colons is in brackets."""
    text = value if isinstance(value, str) else ""
    found = re.fullmatch(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})", text, re.ASCII)
    if found is None or int(found[1]) > 65535:  # noqa: PLR2004  # the highest port
        raise invalid("be HOST:PORT, such as 127.0.0.1:6180", value)
    return found[0]


# Commands of agents, and the templates of lanes.

LANE: Final = "{lane}"
SERVICE: Final = "{service}"

PLACEHOLDER: Final = re.compile(r"\{\{|\}\}|\{lane\}|\{service\}")
_FIELD: Final = re.compile(r"\{[\w.-]+(?: [\w.-]+)*\}")


def read_command(value: object) -> tuple[str, ...]:
    """Read an agent's command: a text as in a shell, or a list of texts."""
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as wrong:
        raise InvalidValue(f"must be a command: {wrong} in {shown(value)}") from None
    is_list = isinstance(words, LISTS) and all(isinstance(one, str) for one in words)
    if not isinstance(words, LISTS) or not is_list or not words:
        raise invalid("be a command, such as 'agents/smtp --verbose'", value)
    if not words[0] or "\0" in "".join(words):
        raise invalid("start with a program and have no NUL character", value)
    if problem := command_problem(words):
        raise InvalidValue(f"must be a command, but {problem}")
    return tuple(words)


def command_problem(words: Sequence[str]) -> str | None:
    """Return what is wrong with the braces in a command; None: nothing."""
    for word in words:
        rest = PLACEHOLDER.sub("", word)
        if "{" in rest or "}" in rest:
            known = f"{LANE} and {SERVICE}"
            return f"{word!r} has other braces than {known} (write {{{{ and }}}} for a brace)"
    if LANE in placeholders(words[0]):
        return f"{words[0]!r} has {LANE} in the program, which clients would choose then"
    for index, script in scripts_in(words).items():
        if LANE in placeholders(words[index]):
            hint = script.hint.replace("{}", LANE)
            what = f"{LANE} in the script of {script.program}, which clients would write then"
            return f"{words[index]!r} has {what} ({hint})"
    return None


def placeholders(word: str) -> list[str]:
    """Return the placeholders and doubled braces in a word."""
    return PLACEHOLDER.findall(word)


def read_template(value: object) -> str:
    """Read a template with a task's fields, `{host}`. `{{` and `}}` are braces."""
    text = read_name(value)
    if re.search("[{}]", _FIELD.sub("", text.replace("{{", "").replace("}}", ""))):
        example = "such as {host} ({{ and }} for a brace)"
        raise invalid(f"have field names in braces, {example}", text)
    return text


def read_glob(value: object) -> str:
    text = read_name(value)
    if "[" in re.sub(r"\[!?[^]]+]", "", text):
        raise InvalidValue(
            f"must be a pattern, such as smtp/*, but {shown(text)} has a [ without a ]"
        )
    return text


# Resources: amounts are bytes of memory, and ten-thousandths of everything else.


def read_amount(value: object) -> int:
    """Read an amount of a resource other than memory, such as 2 or 0.5."""
    text = value.strip() if isinstance(value, str) else str(value)
    if isinstance(value, bool) or not _AMOUNT.fullmatch(text):
        example = "with at most four decimals, such as 2 or 0.5"
        raise invalid(f"be a number of 0 or more, {example}", value)
    amount = int(Decimal(text) * UNIT)
    if amount > NUMBER_MAX:
        raise invalid(f"be at most {NUMBER_MAX // UNIT}", value)
    return amount


def read_resources(value: object) -> Resources:
    """Read named resources that have no key of their own: an object of names and amounts."""
    if not isinstance(value, dict):
        raise invalid('be an object, such as {"license": 1}', value)
    amounts: dict[bytes, int] = {}
    for name, amount in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,99}", name):
            text = "have names of letters, digits, - and _ that begin with a letter"
            raise invalid(text, name)
        if name.encode() in (CPUS, MEMORY, GPUS):
            raise InvalidValue(f'must not have "{name}", which has a key or option of its own')
        try:
            amounts[name.encode()] = read_amount(amount)
        except InvalidValue as bad:
            raise InvalidValue(f'has "{name}", which {bad}') from None
    if len(amounts) > OTHER_RESOURCES_MAX:
        raise InvalidValue(f"must have at most {OTHER_RESOURCES_MAX} names, not {len(amounts)}")
    return tuple(sorted((name, amount) for name, amount in amounts.items() if amount))
