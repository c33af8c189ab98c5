"""The kinds of values that settings have: how to read and write each.

A kind converts a file's value to ours (`read`) and back (`to_file`), and a variable's text to a
file's value (`from_text`). A round trip gives the same value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from taskyard.core.resources import UNIT, Resources
from taskyard.settings import placeholders
from taskyard.settings.values import (
    LISTS,
    UNITS_NS,
    InvalidValue,
    duration_text,
    integer_reader,
    read_amount,
    read_duration,
    read_memory,
    read_multiples,
    read_name,
    read_positive_duration,
    read_resources,
    read_size,
    read_text,
    shown,
    size_text,
)

_STORE_LEASE_NS_MIN: Final = 1_000_000_000
_STORE_LEASE_NS_MAX: Final = 3_600_000_000_000

#: The value of a duration that is not fixed.
AUTO: Final = "auto"

#: The address of a page that is not there. Empty variables count as not set.
NO_PAGE: Final = "none"

#: The store in the state directory.
SQLITE: Final = "sqlite"
_POSTGRESQL: Final = ("postgresql://", "postgres://")
_PASSWORD = re.compile(r"//[^/?#@]*:[^/?#@]*@|[?&]password=")

#: Followed by a path, relative to the directory of the settings file.
_IPC: Final = "ipc://"

_ENDPOINT = re.compile(r"(?:tcp|ipc)://\S+")
_NEXT_ENDPOINT = re.compile(r"\s*,\s*(?=(?:tcp|ipc)://)")
_NEXT_PLACE = re.compile(r"\+(?=(?:tcp|ipc)://)")
_RATE = re.compile(r"([1-9][0-9]{0,8})/(s|m|h|d)")
_HOST_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})", re.ASCII)
_PERCENT = re.compile(r"([0-9]{1,3})%?")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_FLOAT = re.compile(r"[0-9]{1,20}\.[0-9]{1,20}")
_PLACE = re.compile(r"\{[\w.-]+(?: [\w.-]+)*\}")
_CLASS_OF_GLOB = re.compile(r"\[!?[^]]+]")

#: More GPUs than one machine has.
GPUS_MAX: Final = 10_000

#: The beginning of an invitation's line, with the version of its format.
INVITATION_PREFIX: Final = "taskyard-invite-1:"

#: The longest routing id of ZeroMQ.
IDENTITY_BYTES_MAX: Final = 255

#: Endpoints of ping-pong: its backend and its frontend.
_PAIR: Final = 2

_PORT_MAX: Final = 65535


class Rate(Struct, frozen=True):
    """A number of tasks per unit of time."""

    tasks: int
    #: One of the units of rates.
    unit: str

    @property
    def interval_ns(self) -> int:
        """The average time between two tasks."""
        return UNITS_NS[self.unit] // self.tasks


class InvitationLine:
    """The line of an invitation, from the environment. Its `repr` does not show the secret."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the line. Only for its parser."""
        return self._text

    def __repr__(self) -> str:
        return "(a line)"


def _identity(value: Any) -> Any:  # noqa: ANN401  # any value
    return value


class Kind(Struct, frozen=True):
    """One kind of value."""

    #: Accepted values, for the tables in the docs.
    description: str
    #: Converts a file's value. Raises `InvalidValue`.
    read: Callable[[object], Any]
    #: Converts back to a file's value.
    to_file: Callable[[Any], Any] = _identity
    #: Converts a variable's text to a file's value.
    from_text: Callable[[str], object] = _identity
    #: Resolves relative paths from a directory.
    rebased: Callable[[Any, Path], Any] = lambda value, _directory: value
    #: The suffix of field names: the unit.
    suffix: str = ""

    def text(self, value: object) -> str:
        """Format a value for people and variables."""
        to_file = self.to_file(value)
        if isinstance(to_file, list):
            return ", ".join(str(one) for one in to_file)
        return str(to_file).lower() if isinstance(to_file, bool) else str(to_file)


# Variable's text to file's value.


def _numbers(text: str) -> object:
    """Parse a number, or several separated by commas."""
    parts = [_number(part.strip()) for part in text.strip("[] ").split(",") if part.strip()]
    return parts[0] if len(parts) == 1 and "[" not in text else parts


def _number(text: str) -> object:
    """Parse a number. Other text passes: the reader refuses it."""
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _endpoint_list(text: str) -> list[str]:
    """Split a list of endpoints. A path may contain commas."""
    return _NEXT_ENDPOINT.split(text.strip())


def _invitation(text: str) -> object:
    """Return a file's name, or the line itself. Only a variable may have a line."""
    return InvitationLine(text.strip()) if text.strip().startswith(INVITATION_PREFIX) else text


def _boolean(text: str) -> object:
    return {"true": True, "false": False}.get(text, text)


# Readers.


def _read_directory(value: object) -> Path:
    text = read_text(value)
    if "://" in text:
        raise InvalidValue(f"must be a directory, not {shown(text)}")
    if not text or "\0" in text:
        raise InvalidValue(f"must be a directory, such as ./.taskyard, not {shown(text)}")
    return Path(text)


def _read_file(value: object) -> Path:
    text = read_text(value)
    if not text or "\0" in text:
        raise InvalidValue(f"must be a file, such as ./my.key, not {shown(text)}")
    return Path(text)


def _read_invitation(value: object) -> Path | InvitationLine:
    if isinstance(value, InvitationLine):
        return value
    if isinstance(value, str) and value.strip().startswith(INVITATION_PREFIX):
        raise InvalidValue("must be a file (only the environment may have the line itself)")
    return _read_file(value)


def _read_endpoint(value: object) -> str:
    if isinstance(value, str) and _ENDPOINT.fullmatch(value):
        return value
    example = "such as tcp://127.0.0.1:6125 or ipc://PATH"
    raise InvalidValue(f"must be an endpoint, {example}, not {shown(value)}")


def _read_endpoints(value: object) -> tuple[str, ...]:
    given = value if isinstance(value, LISTS) else (value,)
    return tuple(_read_endpoint(one) for one in given)


def _read_brokers(value: object) -> tuple[str, ...]:
    if value in ([], ()):
        raise InvalidValue("must be an endpoint, or a list of them, not an empty list")
    given = value if isinstance(value, LISTS) else (value,)
    parts = [_endpoint_list(one) if isinstance(one, str) else [one] for one in given]
    return tuple(dict.fromkeys(_read_endpoint(one) for some in parts for one in some))


def _read_pair(value: object) -> tuple[str, ...]:
    if not isinstance(value, LISTS) or len(value) != _PAIR:
        raise InvalidValue(
            f"must be a list of two endpoints, backend and frontend, not {shown(value)}"
        )
    return _read_endpoints(value)


def _list_reader(
    example: str, read_one: Callable[[object], str]
) -> Callable[[object], tuple[str, ...]]:
    def read_list(value: object) -> tuple[str, ...]:
        if not isinstance(value, LISTS):
            raise InvalidValue(f"must be a list, such as {example}, not {shown(value)}")
        try:
            return tuple(dict.fromkeys(read_one(one) for one in value))
        except InvalidValue as bad:
            raise InvalidValue(f"must be a list, such as {example}, but an item {bad}") from None

    return read_list


def _read_names(value: object) -> tuple[str, ...]:
    names = _list_reader('["exec", "call"]', read_name)(value)
    if not names:
        raise InvalidValue('must have at least one name, such as ["exec", "call"]')
    return names


def _read_module(value: object) -> str:
    text = read_text(value)
    if not all(part.isidentifier() for part in text.split(".")):
        raise InvalidValue(
            f"must be the name of a module, such as imaging.small, not {shown(text)}"
        )
    return text


def _read_rate(value: object) -> Rate:
    found = _RATE.fullmatch(value.replace(" ", "")) if isinstance(value, str) else None
    if found is None:
        raise InvalidValue(
            f"must be tasks per time, such as 10/s, 5/m or 100/h, not {shown(value)}"
        )
    return Rate(int(found[1]), found[2])


def _read_store_lease(value: object) -> int:
    """Read the lease of a broker: a shorter one would end at every pause of a machine."""
    duration_ns = read_duration(value)
    if not _STORE_LEASE_NS_MIN <= duration_ns <= _STORE_LEASE_NS_MAX:
        raise InvalidValue(f"must be from 1s to 1h, not {shown(value)}")
    return duration_ns


def _read_duration_or_auto(value: object) -> int:
    """Read a duration. 0 is `auto`."""
    if value == AUTO:
        return 0
    try:
        return read_positive_duration(value)
    except InvalidValue as bad:
        raise InvalidValue(f"{bad} (or {AUTO})") from None


def _read_percent(value: object) -> int:
    found = _PERCENT.fullmatch(str(value)) if type(value) in (int, str) else None
    if found is None or int(found[1]) > 100:  # noqa: PLR2004  # per cent
        raise InvalidValue(f"must be from 0% to 100%, not {shown(value)}")
    return int(found[1])


def _read_boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidValue(f"must be true or false, not {shown(value)}")
    return value


def _read_command(value: object) -> tuple[str, ...]:
    try:
        description = shlex.split(value) if isinstance(value, str) else value
    except ValueError as wrong:
        raise InvalidValue(f"must be a command: {wrong} in {shown(value)}") from None
    if (
        not isinstance(description, LISTS)
        or not description
        or not all(isinstance(one, str) for one in description)
    ):
        raise InvalidValue(
            f"must be a command, such as 'agents/smtp --verbose', not {shown(value)}"
        )
    if not description[0] or "\0" in "".join(description):
        raise InvalidValue(
            f"must start with a program and have no NUL character, not {shown(value)}"
        )
    if problem := placeholders.problem_of(description):
        raise InvalidValue(f"must be a command, but {problem}")
    return tuple(description)


def _read_glob(value: object) -> str:
    text = read_name(value)
    if "[" in _CLASS_OF_GLOB.sub("", text):
        raise InvalidValue(
            f"must be a pattern, such as smtp/*, but {shown(text)} has a [ without a ]"
        )
    return text


def _read_template(value: object) -> str:
    """Read a template with a task's fields, `{host}`. `{{` and `}}` are braces."""
    text = read_name(value)
    plain = _PLACE.sub("", text.replace("{{", "").replace("}}", ""))
    if "{" in plain or "}" in plain:
        example = "such as {host} ({{ and }} for a brace)"
        raise InvalidValue(f"must have field names in braces, {example}, not {shown(text)}")
    return text


def _read_identity(value: object) -> str:
    """Read ZeroMQ's routing id of a socket, as text."""
    text = read_name(value)
    length = len(text.encode())
    if length > IDENTITY_BYTES_MAX:
        raise InvalidValue(f"must have at most {IDENTITY_BYTES_MAX} bytes, not {length}")
    return text


def read_host_port(value: object) -> str:
    """Read `HOST:PORT`. A host with colons is in brackets."""
    match = _HOST_PORT.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1]) > _PORT_MAX:
        raise InvalidValue(f"must be HOST:PORT, such as 127.0.0.1:6180, not {shown(value)}")
    return match[0]


def _read_store(value: object) -> str:
    """Return the URL of a database, or an empty text for SQLite."""
    text = read_text(value)
    if text == SQLITE:
        return ""
    if not text.startswith(_POSTGRESQL):
        raise InvalidValue(f"must be {SQLITE} or postgresql://USER@HOST/DATABASE")
    if _PASSWORD.search(text):
        raise InvalidValue("must not have a password (use a password file: PGPASSFILE)")
    return text


def _read_page(value: object) -> str:
    return "" if value in ("", NO_PAGE) else read_host_port(value)


def _read_gpus(value: object) -> int | tuple[str, ...]:
    """Read a number of GPUs, or a list of their ids."""
    if type(value) is int and 0 <= value <= GPUS_MAX:
        return value
    ids = value if isinstance(value, LISTS) else ("",)
    if not all(isinstance(one, str) and one and "," not in one for one in ids):
        limits = f"a number from 0 to {GPUS_MAX}, or a list of ids"
        raise InvalidValue(f'must be {limits}, such as ["0", "3"], not {shown(value)}')
    if len(dict.fromkeys(ids)) < len(ids):
        raise InvalidValue(f"must not have an id twice, not {shown(value)}")
    return tuple(ids)


def _read_resource_list(value: object) -> Resources:
    """Read a list of texts such as `license=2`."""
    if not isinstance(value, LISTS) or not all(isinstance(one, str) for one in value):
        raise InvalidValue(f'must be a list, such as ["license=2"], not {shown(value)}')
    amounts = {name: amount for name, _, amount in (one.partition("=") for one in value)}
    if len(amounts) < len(value):
        raise InvalidValue(f"must not have a name twice, not {shown(value)}")
    return read_resources(amounts)


# Writers.


def _amount(amount: int) -> int | float:
    return amount // UNIT if not amount % UNIT else amount / UNIT


def _resource_list(resources: Resources) -> list[str]:
    return [f"{name.decode()}={_amount(amount)}" for name, amount in resources]


def _gpus(text: str) -> object:
    """Parse a number of GPUs, or ids with a comma between or after them."""
    return int(text) if _INTEGER.fullmatch(text) else _texts(text)


def _span(duration_ns: int) -> str:
    """Format a duration exactly, in few and large units."""
    parts, rest_ns = [], duration_ns
    for unit in ("d", "h", "m"):
        number, rest_ns = divmod(rest_ns, UNITS_NS[unit])
        parts.append(f"{number}{unit}" if number else "")
    if rest_ns or not any(parts):
        parts.append(duration_text(rest_ns))
    return "".join(parts)


def _span_or_auto(duration_ns: int) -> str:
    return _span(duration_ns) if duration_ns else AUTO


def _from_directory(endpoint: str, directory: Path) -> str:
    return "+".join(_place_from(place, directory) for place in _NEXT_PLACE.split(endpoint))


def _place_from(place: str, directory: Path) -> str:
    path = place.removeprefix(_IPC)
    return place if path == place else f"{_IPC}{directory / path}"


def _all_from_directory(endpoints: tuple[str, ...], directory: Path) -> tuple[str, ...]:
    return tuple(_from_directory(one, directory) for one in endpoints)


def _one_or_list(values: tuple[str, ...]) -> object:
    return values[0] if len(values) == 1 else list(values)


def integer(lowest: int, highest: int) -> Kind:
    return Kind(f"{lowest:,} to {highest:,}", integer_reader(lowest, highest), from_text=_number)


def choice(*values: str) -> Kind:
    def read_choice(value: object) -> str:
        if value not in values:
            raise InvalidValue(f"must be {' or '.join(values)}, not {shown(value)}")
        return str(value)

    return Kind(" or ".join(values), read_choice)


DIRECTORY: Final = Kind(
    "a directory", _read_directory, str, rebased=lambda path, directory: directory / path
)
FILE: Final = Kind("a file", _read_file, str, rebased=lambda path, directory: directory / path)
INVITATION: Final = Kind(
    "a file, in the variable also a line",
    _read_invitation,
    str,
    _invitation,
    lambda invite, directory: directory / invite,
)
ENDPOINTS: Final = Kind(
    "an endpoint, or a list of them", _read_endpoints, _one_or_list, _texts, _all_from_directory
)
BROKERS: Final = Kind(
    "an endpoint, or a list of them",
    _read_brokers,
    _one_or_list,
    _endpoint_list,
    _all_from_directory,
)
PAIR: Final = Kind("a list of two endpoints", _read_pair, list, _texts, _all_from_directory)
DURATION: Final = Kind("a duration over 0", read_positive_duration, _span, suffix="_ns")
STORE_LEASE: Final = Kind("a duration from 1s to 1h", _read_store_lease, _span, suffix="_ns")
DURATION_OR_AUTO: Final = Kind(
    "a duration over 0, or auto", _read_duration_or_auto, _span_or_auto, suffix="_ns"
)
DURATION_OR_NONE: Final = Kind("a duration", read_duration, _span, suffix="_ns")
SIZE: Final = Kind("a size: 10G", read_size, size_text, suffix="_bytes")
PAGE: Final = Kind("HOST:PORT or none", _read_page, lambda address: address or NO_PAGE)
STORE: Final = Kind("sqlite or postgresql://…", _read_store, lambda url: url or SQLITE)
NAME: Final = Kind("a name", read_name)
IDENTITY: Final = Kind("a text", _read_identity)
NAMES: Final = Kind("a list of names", _read_names, list, _texts)
MODULES: Final = Kind("a list of modules", _list_reader('["imaging"]', _read_module), list, _texts)
MULTIPLES: Final = Kind("a number, or a list of multiples", read_multiples, list, _numbers)
AMOUNT: Final = Kind("a number: 2 or 0.5", read_amount, _amount, _number)
MEMORY: Final = Kind("a size: 8G", read_memory, size_text, suffix="_bytes")
GPUS: Final = Kind(
    "a number, or a list of ids",
    _read_gpus,
    lambda gpus: list(gpus) if isinstance(gpus, tuple) else gpus,
    _gpus,
)
RESOURCES: Final = Kind("a list: `license=2`", _read_resource_list, _resource_list, _texts)
RATE: Final = Kind("tasks per time: 10/s", _read_rate, lambda rate: f"{rate.tasks}/{rate.unit}")
PERCENT: Final = Kind("0% to 100%", _read_percent, lambda percent: f"{percent}%")
BOOLEAN: Final = Kind("true or false", _read_boolean, from_text=_boolean)
COMMAND: Final = Kind("a command", _read_command, shlex.join)
GLOB: Final = Kind("a pattern: smtp/*", _read_glob)
TEMPLATE: Final = Kind("a text with `{field}`", _read_template)
