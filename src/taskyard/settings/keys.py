"""The table of settings: a class for each section, and for each key its kind, default and help.

The only module that defines keys. The loader, `taskyard config`, and the docs with the JSON
Schema for editors use it.
"""

from __future__ import annotations

import re
from copy import copy
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, overload

from taskyard.core.limits import LEASE_TASKS_MAX, SECOND_NS, WEIGHT_MAX
from taskyard.settings import kinds
from taskyard.settings.files import STATE_NAME
from taskyard.settings.kinds import Kind, choice, integer

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

T = TypeVar("T")
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
    url = Key(
        kinds.BROKERS, None, "The broker's endpoint, or endpoints.", _IN_STATE, "TASKYARD_BROKER"
    )
    state = Key(
        kinds.DIRECTORY, Path(STATE_NAME), "The state directory.", variable="TASKYARD_STATE"
    )
    #: A URL of PostgreSQL. Empty: SQLite in the state directory.
    store = Key(kinds.STORE, "", "The journal: in the state directory, or a URL of PostgreSQL.")
    key = Key(kinds.FILE, None, "The key file for brokers over TCP.", "none", "TASKYARD_KEY")
    invite = Key(
        kinds.INVITATION, None, "Endpoint, dialect and key in one.", "none", "TASKYARD_INVITE"
    )
    workers_max = Key(_COUNT, 0, "Lanes served at once, over all services. 0 is no limit.")
    #: Empty: no page.
    page = Key(kinds.PAGE, PAGE_ADDRESS, "The page of `up` and `web`. none: `up` starts no page.")


class LeaseSection(Section):
    #: 0: set by the broker.
    heartbeat_ns = Key(
        kinds.DURATION_OR_AUTO, 0, "The interval of a worker's heartbeats. auto: see Heartbeats."
    )
    expire_ns = Key(
        kinds.DURATION, 15 * SECOND_NS, "Without a heartbeat for so long, a worker loses its tasks."
    )
    plain_ns = Key(
        kinds.DURATION,
        600 * SECOND_NS,
        "The lease of plain dwork workers after a broker's restart.",
    )
    store_ns = Key(
        kinds.STORE_LEASE, 5 * SECOND_NS, "The lease of a broker on PostgreSQL over its journal."
    )


class BlobsSection(Section):
    quota_bytes = Key(
        kinds.SIZE, 0, "Bytes of blobs from which on no tasks are accepted. 0 is no limit."
    )
    keep_ns = Key(
        kinds.DURATION, None, "How long blobs of settled tasks are kept after use.", "for ever"
    )
    grace_ns = Key(kinds.DURATION, 3600 * SECOND_NS, "How long a blob is kept that no task names.")
    directory = Key(
        kinds.DIRECTORY, None, "Blobs of one broker or pair, on a shared file system.", _IN_STATE
    )
    cache_bytes = Key(kinds.SIZE, 10 << 30, "Bytes of fetched blobs that a user's processes keep.")


class LogSection(Section):
    format = Key(choice("text", "json"), "text", "The lines of a daemon's log.")
    #: Without a level, it depends on where the log is.
    level = Key(
        choice("debug", "info", "warning", "error"), None, "The least level of a log.", "warning"
    )
    size_bytes = Key(kinds.SIZE, 10 << 20, "The size at which a log file is rotated.")
    files = Key(integer(0, 1000), 5, "Rotated log files that are kept.")


class WorkerSection(Section):
    processes = Key(integer(0, PROCESSES_MAX), 1, "Workers that `map`, `run` and `up` start.")
    slots = Key(integer(1, SLOTS_MAX), None, "Tasks that a worker runs at once.", "one per core")
    services = Key(
        kinds.NAMES, SERVICES, "The services of `worker` and `up`, not of `map` and `run`."
    )
    allow = Key(kinds.MODULES, (), "Modules, with submodules, whose functions are called.", "none")
    # Resources of all workers of a machine, for tasks that ask for some.
    cpus = Key(kinds.AMOUNT, None, "Cores of a machine's workers.", "detected")
    memory_bytes = Key(kinds.SIZE, None, "Memory of a machine's workers.", "detected")
    gpus = Key(kinds.GPUS, None, "GPUs of a machine's workers: a number, or ids.", "detected")
    resources = Key(kinds.RESOURCES, (), "Other resources of a machine's workers.", "none")


class ServiceSection(Section):
    """`[service.NAME]`, or `[defaults]`, which sets the keys for services that do not."""

    match = Key(
        kinds.GLOB, "", "The lanes of this section, as `service/lane`. `*` matches `/`.", "NAME/*"
    )
    lane = Key(kinds.TEMPLATE, "", "The lane of tasks without one, from fields: `{host}`.", "none")
    command = Key(
        kinds.COMMAND, (), "The agent to start on demand, with `{lane}` and `{service}`.", "none"
    )
    workers_max = Key(_COUNT, 0, "Lanes served at once, over all workers. 0 is no limit.")
    lane_workers_max = Key(_COUNT, 1, "Workers of one named lane at once. 0 is no limit.")
    interval_ns = Key(kinds.DURATION, INTERVAL_NS, "The unit of `retries`.")
    retries = Key(kinds.MULTIPLES, (), "Delays of retries, in intervals. 3 is [1, 1, 1].", "never")
    jitter = Key(kinds.PERCENT, 0, "Random extra delay of a retry, at most this share.")
    expiry_ns = Key(kinds.DURATION, 0, "The age at which a task fails, once attempted.", "never")
    expiry_hard_ns = Key(kinds.DURATION, 0, "The age at which any task fails.", "never")
    order = Key(choice("random", "age"), "age", "The order of a lane's tasks of equal priority.")
    overfeed = Key(integer(0, LEASE_TASKS_MAX), 0, "Tasks of a lane that a worker gets ahead.")
    #: 0: the worker's.
    idle_max_ns = Key(kinds.DURATION, 0, "How long an agent may be idle.", "3m")
    hunger_max_ns = Key(kinds.DURATION, 0, "How long an agent may be silent with a task.", "1h")
    lines = Key(
        choice("hungry", "zmailer"), "", "The lines of an agent: ours, or ZMailer's.", "hungry"
    )
    hold = Key(kinds.BOOLEAN, False, "Hold tasks until `taskyard retry` releases them.")  # noqa: FBT003  # the default
    debounce_ns = Key(kinds.DURATION_OR_NONE, 0, "How long a lane collects tasks first.")
    rate = Key(kinds.RATE, None, "Tasks leased per time, over all workers.", "no limit")
    lane_rate = Key(kinds.RATE, None, "Tasks of each lane leased per time.", "no limit")
    weight = Key(
        integer(1, WEIGHT_MAX), 1, "The share of each of its waiting lanes, relative to 1."
    )
    report_after_ns = Key(
        kinds.DURATION, 0, "The age at which a task is reported late, once.", "never"
    )

    def match_for(self, name: str) -> str:
        """Return the pattern of this section, by default all lanes of the service of its name."""
        return self.match or f"{re.sub('[*?[]', lambda found: f'[{found[0]}]', name)}/*"


class ListenSection(Section):
    """`[listen.NAME]`. A table named like a dialect takes the place of that dialect's key."""

    dialect = Key(choice(*DIALECTS), "", "The dialect, for a table with another name.", "the name")
    endpoint = Key(
        kinds.ENDPOINTS, None, "Endpoints. If unset, `--listen NAME=ENDPOINT` opens it.", "nowhere"
    )
    identity = Key(
        kinds.IDENTITY, "", "The address by which peers send here. Required with 0.0.0.0 or [::]."
    )
    service = Key(kinds.NAME, "default", "The service of clients' tasks, and of workers here.")
    lane = Key(kinds.NAME, "", "The lane of tasks that clients submit here.")
    expire_ns = Key(kinds.DURATION, None, "The silence after which a worker loses its tasks.")
    timeout_ns = Key(
        kinds.DURATION, None, "The silence after which a worker that never pings loses its task."
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
    kind = kinds.PAIR if dialect == PING_PONG else kinds.ENDPOINTS
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
            key.kind = kinds.PAIR if dialect == PING_PONG else key.kind
            # A table takes the place of the dialect's key, so it has its variable.
            key.environment = variable_of(LISTEN, name) if name == dialect else key.environment
        if dialect in unset:
            found.append(key)
    return found
