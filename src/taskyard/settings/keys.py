"""The table of settings: a class for each section, and for each key its kind, default and help.

The only module that defines keys and kinds. A kind reads a value of a file, an environment variable
or an option, and shows it. The loader, `taskyard config`, and the docs with the JSON
Schema for editors use it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, overload

from msgspec import Struct

from taskyard.core.limits import LEASE_TASKS_MAX, SECOND_NS, WEIGHT_MAX
from taskyard.core.resources import UNIT, Resources
from taskyard.settings import values
from taskyard.settings.files import STATE_NAME
from taskyard.settings.values import LISTS, InvalidValue, invalid

#: More GPUs than one machine has.
GPUS_MAX: Final = 10_000

#: The value of a duration that is not fixed.
AUTO: Final = "auto"

#: The address of a page that is not there. Empty variables count as not set.
NO_PAGE: Final = "none"

#: The store in the state directory.
SQLITE: Final = "sqlite"

#: The beginning of an invitation's line, with the version of its format.
INVITATION_PREFIX: Final = "taskyard-invite-1:"

#: The longest routing id of ZeroMQ.
IDENTITY_BYTES_MAX: Final = 255

T = TypeVar("T")


def _plain(value: Any) -> Any:  # noqa: ANN401  # any value
    return list(value) if isinstance(value, tuple) else value


class Kind(Struct, Generic[T], frozen=True):
    """A kind of value, with its converters. A round trip gives the same value."""

    #: Accepted values, for the tables in the docs.
    description: str
    #: Converts a file's value. Raises `InvalidValue`.
    read: Callable[[object], T]
    #: Converts back to a file's value.
    to_file: Callable[[Any], Any] = _plain
    #: Converts a variable's text to a file's value.
    from_text: Callable[[str], object] = _plain
    #: Resolves relative paths from a directory.
    rebased: Callable[[Any, Path], Any] = lambda value, _directory: value
    #: The types of a file's value, by their names in JSON Schema.
    types: tuple[str, ...] = ("string",)
    #: All values, if they are few.
    choices: tuple[str, ...] = ()

    def text(self, value: object) -> str:
        """Format a value for people and variables."""
        to_file = self.to_file(value)
        if isinstance(to_file, list):
            return ", ".join(str(one) for one in to_file)
        return str(to_file).lower() if isinstance(to_file, bool) else str(to_file)


# Variable's text to file's value. Other text passes: the reader refuses it.


def _number(text: str) -> object:
    if re.fullmatch(r"[+-]?[0-9]{1,20}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]{1,20}\.[0-9]{1,20}", text) else text


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> object:
    parts = [_number(part) for part in _texts(text.strip("[] "))]
    return parts[0] if len(parts) == 1 and "[" not in text else parts


def _gpu_ids(text: str) -> object:
    """Parse a number of GPUs, or ids with a comma between or after them."""
    return _texts(text) if isinstance(_number(text), str) else _number(text)


def _endpoint_list(text: str) -> list[str]:
    """Split a list of endpoints. A path may contain commas."""
    return re.split(r"\s*,\s*(?=(?:tcp|ipc)://)", text.strip())


class InvitationLine:
    """The line of an invitation, from the environment. The `repr` does not show the secret."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the line. Only for its parser."""
        return self._text

    def __repr__(self) -> str:
        return "(a line)"


def _invitation(text: str) -> object:
    """Return a file's name, or the line itself. Only a variable may have a line."""
    return InvitationLine(text.strip()) if text.strip().startswith(INVITATION_PREFIX) else text


# Readers of values that only settings have.


def _read_invitation(value: object) -> Path | InvitationLine:
    if isinstance(value, InvitationLine):
        return value
    if isinstance(value, str) and value.strip().startswith(INVITATION_PREFIX):
        raise InvalidValue("must be a file (only the environment may have the line itself)")
    return values.read_file(value)


def _read_brokers(value: object) -> tuple[str, ...]:
    if value in ([], ()):
        raise InvalidValue("must be an endpoint, or a list of them, not an empty list")
    given = value if isinstance(value, LISTS) else (value,)
    parts = [_endpoint_list(one) if isinstance(one, str) else [one] for one in given]
    return tuple(dict.fromkeys(values.read_endpoint(one) for some in parts for one in some))


def _read_pair(value: object) -> tuple[str, ...]:
    if not isinstance(value, LISTS) or len(value) != 2:  # noqa: PLR2004  # a pair
        raise invalid("be a list of two endpoints, backend and frontend", value)
    return values.read_endpoints(value)


def _list_of(
    example: str, read_one: Callable[[object], str]
) -> Callable[[object], tuple[str, ...]]:
    def read_list(value: object) -> tuple[str, ...]:
        if not isinstance(value, LISTS):
            raise invalid(f"be a list, such as {example}", value)
        try:
            return tuple(dict.fromkeys(read_one(one) for one in value))
        except InvalidValue as bad:
            raise InvalidValue(f"must be a list, such as {example}, but an item {bad}") from None

    return read_list


def _read_services(value: object) -> tuple[str, ...]:
    names = _list_of('["exec", "call"]', values.read_name)(value)
    if not names:
        raise InvalidValue('must have at least one name, such as ["exec", "call"]')
    return names


def _read_module(value: object) -> str:
    text = values.read_text(value)
    if not all(part.isidentifier() for part in text.split(".")):
        raise invalid("be the name of a module, such as imaging.small", text)
    return text


def _read_store_lease(value: object) -> int:
    """Read the lease of a broker: a shorter one would end at every pause of a machine."""
    duration_ns = values.read_duration(value)
    if not SECOND_NS <= duration_ns <= 3600 * SECOND_NS:
        raise invalid("be from 1s to 1h", value)
    return duration_ns


def _read_duration_or_auto(value: object) -> int:
    """Read a duration. 0 is `auto`."""
    try:
        return 0 if value == AUTO else values.read_positive_duration(value)
    except InvalidValue as bad:
        raise InvalidValue(f"{bad} (or {AUTO})") from None


def _read_identity(value: object) -> str:
    """Read ZeroMQ's routing id of a socket, as text."""
    text = values.read_name(value)
    length = len(text.encode())
    if length > IDENTITY_BYTES_MAX:
        raise InvalidValue(f"must have at most {IDENTITY_BYTES_MAX} bytes, not {length}")
    return text


def _read_store(value: object) -> str:
    """Return the URL of a database, or an empty text for SQLite."""
    text = values.read_text(value)
    if text == SQLITE:
        return ""
    if not text.startswith(("postgresql://", "postgres://")):
        raise InvalidValue(f"must be {SQLITE} or postgresql://USER@HOST/DATABASE")
    if re.search(r"//[^/?#@]*:[^/?#@]*@|[?&]password=", text):
        raise InvalidValue("must not have a password (use a password file: PGPASSFILE)")
    return text


def _read_gpus(value: object) -> int | tuple[str, ...]:
    """Read a number of GPUs, or a list of their ids."""
    if type(value) is int and 0 <= value <= GPUS_MAX:
        return value
    ids = value if isinstance(value, LISTS) else ("",)
    if not all(isinstance(one, str) and one and "," not in one for one in ids):
        limits = f"a number from 0 to {GPUS_MAX}, or a list of ids"
        raise invalid(f'be {limits}, such as ["0", "3"]', value)
    if len(dict.fromkeys(ids)) < len(ids):
        raise invalid("not have an id twice", value)
    return tuple(ids)


def _read_resource_list(value: object) -> Resources:
    """Read a list of texts such as `license=2`."""
    if not isinstance(value, LISTS) or not all(isinstance(one, str) for one in value):
        raise invalid('be a list, such as ["license=2"]', value)
    amounts = {name: amount for name, _, amount in (one.partition("=") for one in value)}
    if len(amounts) < len(value):
        raise invalid("not have a name twice", value)
    return values.read_resources(amounts)


# Writers, and paths from a directory.


def _amount(amount: int) -> int | float:
    return amount // UNIT if not amount % UNIT else amount / UNIT


def _endpoints_from(endpoints: tuple[str, ...], directory: Path) -> tuple[str, ...]:
    pattern = r"(?:^|(?<=\+))ipc://(.*?)(?=\+(?:tcp|ipc)://|$)"
    return tuple(re.sub(pattern, lambda at: f"ipc://{directory / at[1]}", one) for one in endpoints)


def _path_from(path: Path, directory: Path) -> Path:
    return directory / path


def _one_or_list(found: tuple[str, ...]) -> object:
    return found[0] if len(found) == 1 else list(found)


def integer(lowest: int, highest: int) -> Kind[int]:
    read = values.integer_reader(lowest, highest)
    return Kind(f"{lowest:,} to {highest:,}", read, from_text=_number, types=("integer",))


def choice(*choices: str) -> Kind[str]:
    def read_choice(value: object) -> str:
        if value not in choices:
            raise invalid(f"be {' or '.join(choices)}", value)
        return str(value)

    return Kind(" or ".join(choices), read_choice, choices=choices)


def _duration(description: str, read: Callable[[object], int], zero: str = "0s") -> Kind[int]:
    def to_file(duration_ns: int) -> str:
        return values.span_text(duration_ns) if duration_ns else zero

    return Kind(description, read, to_file, types=("string", "number"))


def _endpoints(
    read: Callable[[object], tuple[str, ...]], from_text: Callable[[str], object] = _texts
) -> Kind[tuple[str, ...]]:
    description, types = "an endpoint, or a list of them", ("string", "array")
    return Kind(description, read, _one_or_list, from_text, _endpoints_from, types)


def _list(description: str, read: Callable[[object], tuple[str, ...]]) -> Kind[tuple[str, ...]]:
    return Kind(description, read, _plain, _texts, types=("array",))


DIRECTORY: Final = Kind("a directory", values.read_directory, str, rebased=_path_from)
FILE: Final = Kind("a file", values.read_file, str, rebased=_path_from)
INVITATION: Final = Kind(
    "a file, in the variable also a line", _read_invitation, str, _invitation, _path_from
)
ENDPOINTS: Final = _endpoints(values.read_endpoints)
BROKERS: Final = _endpoints(_read_brokers, _endpoint_list)
PAIR: Final = Kind(
    "a list of two endpoints", _read_pair, _plain, _texts, _endpoints_from, types=("array",)
)
DURATION: Final = _duration("a duration over 0", values.read_positive_duration)
DURATION_OR_NONE: Final = _duration("a duration", values.read_duration)
DURATION_OR_AUTO: Final = _duration("a duration over 0, or auto", _read_duration_or_auto, AUTO)
STORE_LEASE: Final = _duration("a duration from 1s to 1h", _read_store_lease)
SIZE: Final = Kind("a size: 10G", values.read_size, values.size_text, types=("string", "integer"))
PAGE: Final = Kind(
    "HOST:PORT or none",
    lambda value: "" if value in ("", NO_PAGE) else values.read_host_port(value),
    lambda address: address or NO_PAGE,
)
STORE: Final = Kind("sqlite or postgresql://…", _read_store, lambda url: url or SQLITE)
NAME: Final = Kind("a name", values.read_name)
IDENTITY: Final = Kind("a text", _read_identity)
NAMES: Final = _list("a list of names", _read_services)
MODULES: Final = _list("a list of modules", _list_of('["imaging"]', _read_module))
_MIXED: Final = ("integer", "array")
MULTIPLES: Final = Kind(
    "a number, or a list of multiples", values.read_multiples, _plain, _numbers, types=_MIXED
)
AMOUNT: Final = Kind(
    "a number: 2 or 0.5", values.read_amount, _amount, _number, types=("number", "string")
)
GPUS: Final = Kind("a number, or a list of ids", _read_gpus, _plain, _gpu_ids, types=_MIXED)
RESOURCES: Final = Kind(
    "a list: `license=2`",
    _read_resource_list,
    lambda resources: [f"{name.decode()}={_amount(amount)}" for name, amount in resources],
    _texts,
    types=("array",),
)
RATE: Final = Kind("tasks per time: 10/s", values.read_rate, str)
PERCENT: Final = Kind(
    "0% to 100%", values.read_percent, lambda percent: f"{percent}%", types=("string", "integer")
)
BOOLEAN: Final = Kind(
    "true or false",
    values.read_boolean,
    from_text=lambda text: {"true": True, "false": False}.get(text, text),
    types=("boolean",),
)
COMMAND: Final = Kind("a command", values.read_command, shlex.join, types=("string", "array"))
GLOB: Final = Kind("a pattern: smtp/*", values.read_glob)
TEMPLATE: Final = Kind("a text with `{field}`", values.read_template)


PREFIX: Final = "TASKYARD_"

#: Where the page is: the port of nothing else that is registered.
PAGE_ADDRESS: Final = "127.0.0.1:6180"

_IN_STATE: Final = "in the state directory"

#: Worker processes of one machine: many times its cores.
PROCESSES_MAX: Final = 1000

#: Tasks at once in one worker process. Each is a process, too.
SLOTS_MAX: Final = 100_000

#: Workers at once, of one or all services: more than a broker serves.
_COUNT: Final = integer(0, 1_000_000)

#: The default services of a worker: programs and functions.
SERVICES: Final = ("exec", "call")

#: The default unit of `retries`, also of a task's own.
INTERVAL_NS: Final = SECOND_NS

#: Sections by name: `[service.smtp]`, `[listen.render]`. `[defaults]` is for all services.
SERVICE: Final = "service"
DEFAULTS: Final = "defaults"
LISTEN: Final = "listen"

DIALECTS: Final = ("dwork", "round-robin", "ping-pong", "wmp")
DWORK, ROUND_ROBIN, PING_PONG, WMP = DIALECTS

D = TypeVar("D")


def variable_of(*path: str) -> str:
    """Return the variable of a setting: `TASKYARD_LEASE_EXPIRE`."""
    return PREFIX + "_".join(re.sub(r"[^A-Z0-9]", "_", part.upper()) for part in path)


class Key(Generic[T, D]):
    """A setting. As an attribute of a section it is the default, until a value replaces it.

    The attribute's name has the unit, too: `expire_ns`.
    """

    section = name = field = ""

    def __init__(
        self, kind: Kind[T], default: D, sentence: str, unset: str = "", variable: str = ""
    ) -> None:
        self.kind = kind
        self.default = default
        self.help = sentence
        #: Describes an empty value.
        self.unset = unset
        self.environment = variable

    def __set_name__(self, _owner: object, name: str) -> None:
        self.field, self.name = name, name.removesuffix("_ns").removesuffix("_bytes")

    @overload
    def __get__(self, section: None, owner: object) -> Key[T, D]: ...
    @overload
    def __get__(self, section: tuple[object, ...], owner: object) -> Key[T, D]: ...
    @overload
    def __get__(self, section: Section, owner: object) -> T | D: ...
    def __get__(self, section: object, owner: object) -> Key[T, D] | T | D:
        return self if section is None else self.default

    def of(self, section: str, unset: str = "") -> AnyKey:
        """Return the key of a section of the file: `service.smtp`."""
        found = copy(self)
        found.section, found.unset = section, unset or self.unset
        found.environment = self.environment or variable_of(*section.split(".", 1), self.name)
        return found

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    def text(self, value: object) -> str:
        """Format a value."""
        return self.unset if self.unset and not value else self.kind.text(value)


#: Any setting.
AnyKey = Key[Any, Any]


class Section:
    """The values of one section of the file. A key without a value has its default."""

    __hash__ = None  # type: ignore[assignment]  # compared by value

    def __init__(self, **given: object) -> None:
        vars(self).update(given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"

    @classmethod
    def keys(cls, section: str) -> list[AnyKey]:
        """Return the keys of a section of this class, in their order."""
        return [one.of(section) for one in vars(cls).values() if isinstance(one, Key)]


class BrokerSection(Section):
    url = Key(BROKERS, None, "The broker's endpoint, or endpoints.", _IN_STATE, "TASKYARD_BROKER")
    state = Key(DIRECTORY, Path(STATE_NAME), "The state directory.", variable="TASKYARD_STATE")
    #: A URL of PostgreSQL. Empty: SQLite in the state directory.
    store = Key(STORE, "", "The journal: in the state directory, or a URL of PostgreSQL.")
    key = Key(FILE, None, "The key file for brokers over TCP.", "none", "TASKYARD_KEY")
    invite = Key(INVITATION, None, "Endpoint, dialect and key in one.", "none", "TASKYARD_INVITE")
    workers_max = Key(_COUNT, 0, "Lanes served at once, over all services. 0 is no limit.")
    #: Empty: no page.
    page = Key(PAGE, PAGE_ADDRESS, "The page of `up` and `web`. none: `up` starts no page.")


class LeaseSection(Section):
    #: 0: set by the broker.
    heartbeat_ns = Key(
        DURATION_OR_AUTO, 0, "The interval of a worker's heartbeats. auto: see Heartbeats."
    )
    expire_ns = Key(
        DURATION, 15 * SECOND_NS, "Without a heartbeat for so long, a worker loses its tasks."
    )
    plain_ns = Key(
        DURATION,
        600 * SECOND_NS,
        "The lease of plain dwork workers after a broker's restart.",
    )
    store_ns = Key(
        STORE_LEASE, 5 * SECOND_NS, "The lease of a broker on PostgreSQL over its journal."
    )


class BlobsSection(Section):
    quota_bytes = Key(SIZE, 0, "Bytes of blobs from which on no tasks are accepted. 0 is no limit.")
    keep_ns = Key(DURATION, None, "How long blobs of settled tasks are kept after use.", "for ever")
    grace_ns = Key(DURATION, 3600 * SECOND_NS, "How long a blob is kept that no task names.")
    directory = Key(
        DIRECTORY, None, "Blobs of one broker or pair, on a shared file system.", _IN_STATE
    )
    cache_bytes = Key(SIZE, 10 << 30, "Bytes of fetched blobs that a user's processes keep.")


class LogSection(Section):
    format = Key(choice("text", "json"), "text", "The lines of a daemon's log.")
    #: Without a level, it depends on where the log is.
    level = Key(
        choice("debug", "info", "warning", "error"), None, "The least level of a log.", "warning"
    )
    size_bytes = Key(SIZE, 10 << 20, "The size at which a log file is rotated.")
    files = Key(integer(0, 1000), 5, "Rotated log files that are kept.")


class WorkerSection(Section):
    processes = Key(integer(0, PROCESSES_MAX), 1, "Workers that `map`, `run` and `up` start.")
    slots = Key(integer(1, SLOTS_MAX), None, "Tasks that a worker runs at once.", "one per core")
    services = Key(NAMES, SERVICES, "The services of `worker` and `up`, not of `map` and `run`.")
    allow = Key(MODULES, (), "Modules, with submodules, whose functions are called.", "none")
    # Resources of all workers of a machine, for tasks that ask for some.
    cpus = Key(AMOUNT, None, "Cores of a machine's workers.", "detected")
    memory_bytes = Key(SIZE, None, "Memory of a machine's workers.", "detected")
    gpus = Key(GPUS, None, "GPUs of a machine's workers: a number, or ids.", "detected")
    resources = Key(RESOURCES, (), "Other resources of a machine's workers.", "none")


class ServiceSection(Section):
    """`[service.NAME]`, or `[defaults]`, which sets the keys for services that do not."""

    match = Key(
        GLOB, "", "The lanes of this section, as `service/lane`. `*` matches `/`.", "NAME/*"
    )
    lane = Key(TEMPLATE, "", "The lane of tasks without one, from fields: `{host}`.", "none")
    command = Key(
        COMMAND, (), "The agent to start on demand, with `{lane}` and `{service}`.", "none"
    )
    workers_max = Key(_COUNT, 0, "Lanes served at once, over all workers. 0 is no limit.")
    lane_workers_max = Key(_COUNT, 1, "Workers of one named lane at once. 0 is no limit.")
    interval_ns = Key(DURATION, INTERVAL_NS, "The unit of `retries`.")
    retries = Key(MULTIPLES, (), "Delays of retries, in intervals. 3 is [1, 1, 1].", "never")
    jitter = Key(PERCENT, 0, "Random extra delay of a retry, at most this share.")
    expiry_ns = Key(DURATION, 0, "The age at which a task fails, once attempted.", "never")
    expiry_hard_ns = Key(DURATION, 0, "The age at which any task fails.", "never")
    order = Key(choice("random", "age"), "age", "The order of a lane's tasks of equal priority.")
    overfeed = Key(integer(0, LEASE_TASKS_MAX), 0, "Tasks of a lane that a worker gets ahead.")
    #: 0: the worker's.
    idle_max_ns = Key(DURATION, 0, "How long an agent may be idle.", "3m")
    hunger_max_ns = Key(DURATION, 0, "How long an agent may be silent with a task.", "1h")
    lines = Key(
        choice("hungry", "zmailer"), "", "The lines of an agent: ours, or ZMailer's.", "hungry"
    )
    hold = Key(BOOLEAN, False, "Hold tasks until `taskyard retry` releases them.")  # noqa: FBT003  # the default
    debounce_ns = Key(DURATION_OR_NONE, 0, "How long a lane collects tasks first.")
    rate = Key(RATE, None, "Tasks leased per time, over all workers.", "no limit")
    lane_rate = Key(RATE, None, "Tasks of each lane leased per time.", "no limit")
    weight = Key(
        integer(1, WEIGHT_MAX), 1, "The share of each of its waiting lanes, relative to 1."
    )
    report_after_ns = Key(DURATION, 0, "The age at which a task is reported late, once.", "never")

    def match_for(self, name: str) -> str:
        """Return the pattern of this section, by default all lanes of the service of its name."""
        return self.match or f"{re.sub('[*?[]', lambda found: f'[{found[0]}]', name)}/*"


class ListenSection(Section):
    """`[listen.NAME]`. A table named like a dialect takes the place of that dialect's key."""

    dialect = Key(choice(*DIALECTS), "", "The dialect, for a table with another name.", "the name")
    endpoint = Key(
        ENDPOINTS, None, "Endpoints. If unset, `--listen NAME=ENDPOINT` opens it.", "nowhere"
    )
    identity = Key(
        IDENTITY, "", "The address by which peers send here. Required with 0.0.0.0 or [::]."
    )
    service = Key(NAME, "default", "The service of clients' tasks, and of workers here.")
    lane = Key(NAME, "", "The lane of tasks that clients submit here.")
    expire_ns = Key(DURATION, None, "The silence after which a worker loses its tasks.")
    timeout_ns = Key(
        DURATION, None, "The silence after which a worker that never pings loses its task."
    )


#: What a listener's key is in each dialect if it is not set. Other dialects do not have the key.
LISTENER_UNSET: Final = {
    "identity": {ROUND_ROBIN: "the endpoint"},
    "lane": dict.fromkeys((DWORK, ROUND_ROBIN, PING_PONG), "none"),
    "expire": {ROUND_ROBIN: "60s", PING_PONG: "3s", WMP: "15s"},
    "timeout": {DWORK: "never", ROUND_ROBIN: "expire", PING_PONG: "60s"},
}


def _listen_key(dialect: str) -> AnyKey:
    sentence = f"Endpoints of `broker` and `up` for {dialect}, besides the native socket."
    kind = PAIR if dialect == PING_PONG else ENDPOINTS
    key = Key(kind, None, sentence, unset="nowhere")
    key.name = dialect
    return key.of(LISTEN)


#: The keys of the fixed sections.
KEYS: Final = (
    *BrokerSection.keys("broker"),
    *map(_listen_key, DIALECTS),
    *LeaseSection.keys("lease"),
    *BlobsSection.keys("blobs"),
    *LogSection.keys("log"),
    *WorkerSection.keys("worker"),
)


def service_keys(section: str) -> list[AnyKey]:
    """Return the keys of `defaults`, or of one service: `service.smtp`."""
    found = ServiceSection.keys(section)
    return found[3:] if section == DEFAULTS else found  # no match, lane and command


def listener_keys(name: str, dialect: str) -> list[AnyKey]:
    """Return the keys of a listener's table with this name and dialect."""
    found = []
    for row in ListenSection.keys(f"{LISTEN}.{name}"):
        unset = LISTENER_UNSET.get(row.name, {dialect: row.unset})
        key = row.of(row.section, unset.get(dialect, ""))
        if key.name == "endpoint":
            key.kind = PAIR if dialect == PING_PONG else key.kind
            # A table takes the place of the dialect's key, so it has its variable.
            key.environment = variable_of(LISTEN, name) if name == dialect else key.environment
        if dialect in unset:
            found.append(key)
    return found
