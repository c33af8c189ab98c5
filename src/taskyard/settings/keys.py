"""The table of settings: every key with its section, kind, default, variable and help.

The only place where a key is defined. The loader, `taskyard config` and the tables in the docs use
it. To add a key, add its row here and its field to the section in `sections.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import Struct

from taskyard.core.limits import LEASE_TASKS_MAX, SECOND_NS, WEIGHT_MAX
from taskyard.settings import kinds
from taskyard.settings.kinds import Kind

PREFIX: Final = "TASKYARD_"

#: The path of the settings file.
CONFIG_VARIABLE: Final = "TASKYARD_CONFIG"

#: Not settings: variables of tasks and benchmarks, and the accepted owner of a state directory,
#: which a file in some directory must not decide.
OTHER_VARIABLES: Final = (
    "TASKYARD_TASK",
    "TASKYARD_CAMPAIGN",
    "TASKYARD_ATTEMPT",
    "TASKYARD_PRIORITY",
    "TASKYARD_TASK_BROKER",
    "TASKYARD_WORKER",
    "TASKYARD_CPUS",
    "TASKYARD_MEMORY",
    "TASKYARD_GPUS",
    "TASKYARD_BENCH_PROFILE",
    "TASKYARD_STATE_OWNER",
)

#: The setting whose default is searched for in the parent directories, and the name searched for.
STATE: Final = "broker.state"
STATE_NAME: Final = ".taskyard"

#: The section of all services: `[service.smtp]`.
SERVICE: Final = "service"
DEFAULTS: Final = "defaults"

#: The section of listeners: a key for each dialect, or a table for each listener.
LISTEN: Final = "listen"
DIALECTS: Final = ("dwork", "round-robin", "ping-pong", "wmp")

#: Where the page is: the port of nothing else that is registered.
PAGE_ADDRESS: Final = "127.0.0.1:6180"

#: Worker processes of one machine: many times its cores.
PROCESSES_MAX: Final = 1000

#: Tasks at once in one worker process. Each is a process, too.
SLOTS_MAX: Final = 100_000

#: Workers at once, of one or all services: more than a broker serves.
_WORKERS_MAX: Final = 1_000_000

#: The default services of a worker: programs and functions.
SERVICES: Final = ("exec", "call")

_NO_VARIABLE = re.compile(r"[^A-Z0-9]")


def variable_of(*path: str) -> str:
    """Return the variable of a setting: `TASKYARD_LEASE_EXPIRE`."""
    return PREFIX + "_".join(_NO_VARIABLE.sub("_", part.upper()) for part in path)


class Key(Struct, frozen=True):
    """One setting."""

    section: str
    name: str
    kind: Kind
    #: None if it is not set. `unset` describes that case.
    default: Any
    help: str
    environment: str
    unset: str = "-"

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def field(self) -> str:
        """The field's name in the section's struct, with its unit."""
        return self.name.replace("-", "_") + self.kind.suffix

    def text(self, value: object) -> str:
        """Format a value."""
        return self.unset if value in (None, ()) else self.kind.text(value)


def _key(  # noqa: PLR0913  # a row of the table
    section: str,
    name: str,
    kind: Kind,
    default: object,
    sentence: str,
    *,
    environment: str = "",
    unset: str = "-",
) -> Key:
    variable = environment or variable_of(section, name)
    return Key(section, name, kind, default, sentence, variable, unset)


def _listen(dialect: str) -> Key:
    sentence = f"Endpoints of `broker` and `up` for {dialect}, besides the native socket."
    kind = kinds.PAIR if dialect == "ping-pong" else kinds.ENDPOINTS
    return _key(LISTEN, dialect, kind, None, sentence, unset="nowhere")


KEYS: Final = (
    _key(
        "broker",
        "url",
        kinds.BROKERS,
        None,
        "The broker's endpoint, for commands, workers and clients. `+` joins the places of one "
        "broker. A list is for workers of several brokers.",
        environment="TASKYARD_BROKER",
        unset="in the state directory",
    ),
    _key(
        "broker",
        "state",
        kinds.DIRECTORY,
        Path(STATE_NAME),
        "The state directory. If not set: the nearest one, here or in a parent directory.",
        environment="TASKYARD_STATE",
    ),
    _key(
        "broker",
        "store",
        kinds.STORE,
        "",
        "The broker's journal: `sqlite`, in the state directory, or a URL of PostgreSQL.",
        unset=kinds.SQLITE,
    ),
    _key(
        "broker",
        "key",
        kinds.FILE,
        None,
        "The key file of commands, workers and clients over TCP.",
        environment="TASKYARD_KEY",
        unset="none",
    ),
    _key(
        "broker",
        "invite",
        kinds.INVITATION,
        None,
        "An invitation of `taskyard keys invite`: endpoint, dialect and key in one.",
        environment="TASKYARD_INVITE",
        unset="none",
    ),
    _key(
        "broker",
        "workers_max",
        kinds.integer(0, _WORKERS_MAX),
        0,
        "Lanes served at once, over all services. 0 is no limit.",
    ),
    _key(
        "broker",
        "page",
        kinds.PAGE,
        PAGE_ADDRESS,
        "The address of the page of `up` and `web`. none: `up` starts no page.",
    ),
    *(_listen(dialect) for dialect in DIALECTS),
    _key(
        "lease",
        "heartbeat",
        kinds.DURATION_OR_AUTO,
        0,
        "The interval of a worker's heartbeats. auto: set by the broker by the number of workers, "
        "1s to a third of lease.expire, and up to lease.expire without tasks.",
    ),
    _key(
        "lease",
        "expire",
        kinds.DURATION,
        15 * SECOND_NS,
        "Time without a heartbeat after which a worker loses its tasks, at least three heartbeats.",
    ),
    _key(
        "lease",
        "plain",
        kinds.DURATION,
        600 * SECOND_NS,
        "How long plain dwork workers keep their tasks after a restart of the broker, and stay "
        "listed without a message while they have none.",
    ),
    _key(
        "lease",
        "store",
        kinds.STORE_LEASE,
        5 * SECOND_NS,
        "How long a broker on PostgreSQL may be silent before another one takes over. Without a "
        "renewal it answers nothing more before that.",
    ),
    _key(
        "blobs",
        "quota",
        kinds.SIZE,
        0,
        "Bytes of long output, large arguments and large results from which on no tasks are "
        "accepted. 0 is no limit.",
    ),
    _key(
        "blobs",
        "keep",
        kinds.DURATION,
        None,
        "How long they are kept after their last use, if their task has settled.",
        unset="for ever",
    ),
    _key(
        "blobs",
        "grace",
        kinds.DURATION,
        3600 * SECOND_NS,
        "How long a large argument or result is kept that no task names.",
    ),
    _key(
        "blobs",
        "directory",
        kinds.DIRECTORY,
        None,
        "The directory of them all, which other machines may mount. One for each broker, or for "
        "each pair. A broker on PostgreSQL without one has them in the database.",
        unset="in the state directory",
    ),
    _key(
        "blobs",
        "cache",
        kinds.SIZE,
        10 << 30,
        "Bytes that the processes of a user keep of what they fetched from a broker.",
    ),
    _key(
        "log",
        "format",
        kinds.choice("text", "json"),
        "text",
        "The lines of a daemon's log.",
    ),
    _key(
        "log",
        "level",
        kinds.choice("debug", "info", "warning", "error"),
        None,
        "The least level of a daemon's log. If not set, a log file has info too.",
        unset="warning",
    ),
    _key(
        "log",
        "size",
        kinds.SIZE,
        10 << 20,
        "The size at which a log file is rotated.",
    ),
    _key(
        "log",
        "files",
        kinds.integer(0, 1000),
        5,
        "Rotated log files that are kept.",
    ),
    _key(
        "worker",
        "processes",
        kinds.integer(0, PROCESSES_MAX),
        1,
        "Workers that `map`, `run` and `up` start.",
    ),
    _key(
        "worker",
        "slots",
        kinds.integer(1, SLOTS_MAX),
        None,
        "Tasks that a worker runs at once.",
        unset="one per core",
    ),
    _key(
        "worker",
        "services",
        kinds.NAMES,
        SERVICES,
        "The services of `worker` and `up`. `map` and `run` serve what their tasks need.",
    ),
    _key(
        "worker",
        "allow",
        kinds.MODULES,
        (),
        "Modules whose functions workers may call, with their submodules.",
        unset="none",
    ),
    _key(
        "worker",
        "cpus",
        kinds.AMOUNT,
        None,
        "Cores of a machine's workers for tasks that ask for some.",
        unset="detected",
    ),
    _key(
        "worker",
        "memory",
        kinds.MEMORY,
        None,
        "Memory of a machine's workers for tasks that ask for some.",
        unset="detected",
    ),
    _key(
        "worker",
        "gpus",
        kinds.GPUS,
        None,
        "GPUs of a machine's workers: their number, or their ids.",
        unset="detected",
    ),
    _key(
        "worker",
        "resources",
        kinds.RESOURCES,
        (),
        "Other resources of a machine's workers.",
        unset="none",
    ),
)


class _ServiceKey(NamedTuple):
    """A row of the table of service keys."""

    name: str
    kind: Kind
    #: The meaning if it is not set.
    unset: str
    help: str


#: The keys of each service. `[defaults]` sets them for services that do not.
_SERVICE_KEYS: Final[tuple[_ServiceKey, ...]] = (
    _ServiceKey(
        "match",
        kinds.GLOB,
        "NAME/*",
        "The tasks of this section, by `service/lane`. `*` matches anything, `/` included. The "
        "first matching section of the file is used.",
    ),
    _ServiceKey(
        "lane",
        kinds.TEMPLATE,
        "none",
        "The lane of a task without one, built from its fields: `{host}`.",
    ),
    _ServiceKey(
        "command",
        kinds.COMMAND,
        "none",
        "The agent that worker hosts start on demand. `{lane}` and `{service}` are replaced.",
    ),
    _ServiceKey(
        "workers_max",
        kinds.integer(0, _WORKERS_MAX),
        "0",
        "Lanes served at once, over all workers. 0 is no limit.",
    ),
    _ServiceKey(
        "lane_workers_max",
        kinds.integer(0, _WORKERS_MAX),
        "1",
        "Workers that serve one lane at once: 1 runs its tasks one after another, 0 is no limit. "
        "Tasks without a lane have no limit.",
    ),
    _ServiceKey("interval", kinds.DURATION, "1s", "The unit of `retries`."),
    _ServiceKey(
        "retries",
        kinds.MULTIPLES,
        "never",
        "Delays before each retry, in intervals, for tasks without their own. A number is that "
        "many retries, one interval apart.",
    ),
    _ServiceKey(
        "jitter", kinds.PERCENT, "0%", "Random extra delay of a retry, at most this share."
    ),
    _ServiceKey(
        "expiry", kinds.DURATION, "never", "The age at which a task fails, once it was attempted."
    ),
    _ServiceKey(
        "expiry_hard",
        kinds.DURATION,
        "never",
        "The age at which a task fails, attempted or not.",
    ),
    _ServiceKey(
        "order",
        kinds.choice("random", "age"),
        "age",
        "The order of a lane's tasks with equal priority: `age` or `random`.",
    ),
    _ServiceKey(
        "overfeed",
        kinds.integer(0, LEASE_TASKS_MAX),
        "0",
        "Tasks of a lane sent to a worker beyond the running one.",
    ),
    _ServiceKey("idle_max", kinds.DURATION, "3m", "How long an agent may be idle."),
    _ServiceKey(
        "hunger_max",
        kinds.DURATION,
        "1h",
        "How long an agent may hold a task without a word.",
    ),
    _ServiceKey(
        "lines",
        kinds.choice("hungry", "zmailer"),
        "hungry",
        "The lines that an agent reads and writes: ours, or those of ZMailer's agents.",
    ),
    _ServiceKey(
        "hold",
        kinds.BOOLEAN,
        "false",
        "Hold tasks until `taskyard retry --service S --lane L` releases those that are waiting.",
    ),
    _ServiceKey(
        "debounce",
        kinds.DURATION_OR_NONE,
        "0s",
        "How long a lane collects tasks before it starts.",
    ),
    _ServiceKey("rate", kinds.RATE, "no limit", "Tasks leased per time, over all workers."),
    _ServiceKey(
        "lane_rate",
        kinds.RATE,
        "no limit",
        "Tasks of one lane leased per time, over all workers. Tasks without a lane count as one "
        "lane.",
    ),
    _ServiceKey(
        "weight",
        kinds.integer(1, WEIGHT_MAX),
        "1",
        "The share of each lane while lanes of its service wait for workers, relative to 1.",
    ),
    _ServiceKey(
        "report_after",
        kinds.DURATION,
        "never",
        "The age at which an unfinished task is reported as late, once.",
    ),
)

#: Keys that `[defaults]` lacks.
_NO_DEFAULTS: Final = ("match", "lane", "command")


def service_keys(section: str) -> tuple[Key, ...]:
    """Return the keys of `defaults`, or of one service: `service.smtp`."""
    return tuple(
        Key(
            section,
            row.name,
            row.kind,
            None,
            row.help,
            variable_of(*section.split(".", 1), row.name),
            row.unset,
        )
        for row in _SERVICE_KEYS
        if section != DEFAULTS or row.name not in _NO_DEFAULTS
    )


#: Sections of the table.
SECTIONS: Final = tuple(dict.fromkeys(key.section for key in KEYS))


_HEAD = "| setting | is | if not set | variable | |\n|---|---|---|---|---|\n"


def table() -> str:
    """Return the table of settings as Markdown."""
    return _HEAD + "".join(_row(key) for key in KEYS)


def _row(key: Key) -> str:
    default = key.text(key.default)
    shown = default if default == key.unset else f"`{default}`"
    return (
        f"| `{key.path}` | {key.kind.description} | {shown} | `{key.environment}` | {key.help} |\n"
    )


_HEAD_OF_SERVICES = "| of a service | is | if not set | |\n|---|---|---|---|\n"


def service_table() -> str:
    """Return the table of service keys as Markdown. A star marks keys of `[defaults]`."""
    common = [key.name for key in service_keys(DEFAULTS)]
    return _HEAD_OF_SERVICES + "".join(
        f"| `{key.name}`{'*' if key.name in common else ''} | {key.kind.description} | "
        f"{_unset(key)} | {key.help} |\n"
        for key in service_keys("service.NAME")
    )


def _unset(key: Key) -> str:
    """Format the default as code, unless it is prose."""
    return key.unset if key.unset in ("never", "none", "no limit") else f"`{key.unset}`"
