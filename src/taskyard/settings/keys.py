"""The table of settings: every key with its section, kind, default, variable and a sentence.

The one place where a key is defined. The reader, `taskyard config` and the table of the pages are
made from it. To add one, add its row here and its field to the section in `sections.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import Struct

from taskyard.core.limits import LEASE_TASKS_MAX, SECOND_NS
from taskyard.settings import kinds
from taskyard.settings.kinds import Kind

PREFIX: Final = "TASKYARD_"

#: Where the file is.
CONFIG_VARIABLE: Final = "TASKYARD_CONFIG"

#: Not settings: what a worker tells its tasks, what the benchmarks ask for, and whose a state
#: directory may be, which a file in some directory must not decide.
OTHER_VARIABLES: Final = (
    "TASKYARD_TASK",
    "TASKYARD_CAMPAIGN",
    "TASKYARD_ATTEMPT",
    "TASKYARD_BENCH_PROFILE",
    "TASKYARD_STATE_OWNER",
)

#: The section that services stand under, each with its name: `[service.smtp]`.
SERVICE: Final = "service"
DEFAULTS: Final = "defaults"

#: Worker processes of one machine: more than it has cores many times over.
PROCESSES_MAX: Final = 1000

#: Tasks at once in one worker process: each of them is a process, too.
SLOTS_MAX: Final = 100_000

#: Workers at once, of a service or of all: more than a broker serves.
_WORKERS_MAX: Final = 1_000_000

#: What a worker serves unless told otherwise: programs and functions.
SERVICES: Final = ("exec", "call")

_NO_VARIABLE = re.compile(r"[^A-Z0-9]")


def variable_of(*path: str) -> str:
    """The variable of a setting: `TASKYARD_LEASE_EXPIRE`."""
    return PREFIX + "_".join(_NO_VARIABLE.sub("_", part.upper()) for part in path)


class Key(Struct, frozen=True):
    """One setting."""

    section: str
    name: str
    kind: Kind
    #: None: it is not set, and `unset` says what that means.
    default: Any
    help: str
    environment: str
    unset: str = "-"

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def field(self) -> str:
        """What it is called in its section's struct: with its unit."""
        return self.name.replace("-", "_") + self.kind.suffix

    def text(self, value: object) -> str:
        """A value as it is shown."""
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


def _listen(dialect: str, kind: Kind) -> Key:
    sentence = f"Where `broker` and `up` listen to {dialect}, beside the native socket."
    return _key("listen", dialect, kind, None, sentence, unset="nowhere")


KEYS: Final = (
    _key(
        "broker",
        "url",
        kinds.ENDPOINT,
        None,
        "Where the broker is, for commands and clients.",
        environment="TASKYARD_BROKER",
        unset="in the state directory",
    ),
    _key(
        "broker",
        "state",
        kinds.DIRECTORY,
        Path(".taskyard"),
        "The state directory.",
        environment="TASKYARD_STATE",
    ),
    _key(
        "broker",
        "key",
        kinds.FILE,
        None,
        "The key file to come with, for commands, workers and clients over TCP.",
        environment="TASKYARD_KEY",
        unset="none",
    ),
    _key(
        "broker",
        "workers_max",
        kinds.integer(0, _WORKERS_MAX),
        0,
        "Lanes served at once, over all services; 0 for no limit.",
    ),
    _listen("dwork", kinds.ENDPOINTS),
    _listen("round-robin", kinds.ENDPOINTS),
    _listen("ping-pong", kinds.PAIR),
    _listen("wmp", kinds.ENDPOINTS),
    _key("lease", "heartbeat", kinds.DURATION, SECOND_NS, "How often a worker shows life."),
    _key(
        "lease",
        "expire",
        kinds.DURATION,
        15 * SECOND_NS,
        "Silence of a worker after which its tasks go to others; at least three heartbeats.",
    ),
    _key(
        "lease",
        "plain",
        kinds.DURATION,
        600 * SECOND_NS,
        "How long a plain dwork worker keeps its tasks after a restart of the broker. Then others "
        "get them.",
    ),
    _key(
        "worker",
        "processes",
        kinds.integer(0, PROCESSES_MAX),
        1,
        "Workers that `run` and `up` start.",
    ),
    _key(
        "worker",
        "slots",
        kinds.integer(1, SLOTS_MAX),
        None,
        "Tasks that a worker does at once.",
        unset="one a core",
    ),
    _key(
        "worker",
        "services",
        kinds.NAMES,
        SERVICES,
        "What `worker` and the workers of `up` do; those of `run` do what its file needs.",
    ),
    _key(
        "worker",
        "allow",
        kinds.MODULES,
        (),
        "Modules whose functions workers offer, with those below them.",
        unset="none",
    ),
)


class _ServiceKey(NamedTuple):
    """A row of the table of services."""

    name: str
    kind: Kind
    #: What it is where nobody sets it.
    unset: str
    help: str


#: What can be set for each service; those of `[defaults]` are for all that do not set it.
_SERVICE_KEYS: Final[tuple[_ServiceKey, ...]] = (
    _ServiceKey(
        "match",
        kinds.GLOB,
        "NAME/*",
        "The tasks that it is for, by `service/lane`; `*` stands for anything, also `/`. The first "
        "section of the file that fits counts.",
    ),
    _ServiceKey(
        "lane",
        kinds.TEMPLATE,
        "none",
        "The lane of a task that gives none, made of its fields: `{host}`.",
    ),
    _ServiceKey(
        "command", kinds.COMMAND, "none", "The agent that worker hosts start when there is work."
    ),
    _ServiceKey(
        "workers_max",
        kinds.integer(0, _WORKERS_MAX),
        "0",
        "Lanes served at once, counted over all workers; 0 for no limit.",
    ),
    _ServiceKey(
        "lane_workers_max",
        kinds.integer(0, _WORKERS_MAX),
        "1",
        "Workers that serve one lane at once: 1 does its tasks one after the other, 0 is no limit. "
        "Tasks without a lane have none.",
    ),
    _ServiceKey("interval", kinds.DURATION, "1s", "What the steps of `retries` are multiples of."),
    _ServiceKey(
        "retries",
        kinds.MULTIPLES,
        "never",
        "When to try a task again that says nothing itself: after so many intervals each time; a "
        "number is so many times one interval.",
    ),
    _ServiceKey(
        "jitter", kinds.PERCENT, "0%", "How much longer a retry may wait, by chance, never less."
    ),
    _ServiceKey(
        "expiry", kinds.DURATION, "never", "The age at which a task that was tried is given up."
    ),
    _ServiceKey(
        "expiry_hard",
        kinds.DURATION,
        "never",
        "The age at which a task is given up, tried or not.",
    ),
    _ServiceKey(
        "order",
        kinds.choice("random", "age"),
        "age",
        "The order of a lane's tasks of one priority: `age` or `random`.",
    ),
    _ServiceKey(
        "overfeed",
        kinds.integer(0, LEASE_TASKS_MAX),
        "0",
        "Tasks of a lane that are handed over beyond the one in hand.",
    ),
    _ServiceKey("idle_max", kinds.DURATION, "3m", "How long an agent may be idle."),
    _ServiceKey(
        "hunger_max",
        kinds.DURATION,
        "1h",
        "How long an agent may be silent while it holds a task.",
    ),
    _ServiceKey(
        "hold",
        kinds.BOOLEAN,
        "false",
        "Tasks wait until somebody asks: `taskyard retry --service S --lane L` lets those that are "
        "there run.",
    ),
    _ServiceKey(
        "debounce",
        kinds.DURATION_OR_NONE,
        "0s",
        "How long a lane gathers tasks before it begins.",
    ),
    _ServiceKey("rate", kinds.RATE, "no limit", "Tasks leased in a time, over all workers."),
    _ServiceKey(
        "report_after",
        kinds.DURATION,
        "never",
        "The age at which a task that has not ended is reported as late, once.",
    ),
)

#: Of one service alone.
_NO_DEFAULTS: Final = ("match", "lane", "command")


def service_keys(section: str) -> tuple[Key, ...]:
    """The keys of `defaults`, or of one service: `service.smtp`."""
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


#: Sections that stand in the table themselves.
SECTIONS: Final = tuple(dict.fromkeys(key.section for key in KEYS))


_HEAD = "| setting | is | if not set | variable | |\n|---|---|---|---|---|\n"


def table() -> str:
    """As Markdown, a row a setting."""
    return _HEAD + "".join(_row(key) for key in KEYS)


def _row(key: Key) -> str:
    default = key.text(key.default)
    shown = default if default == key.unset else f"`{default}`"
    return (
        f"| `{key.path}` | {key.kind.description} | {shown} | `{key.environment}` | {key.help} |\n"
    )


_HEAD_OF_SERVICES = "| of a service | is | if not set | |\n|---|---|---|---|\n"


def service_table() -> str:
    """What can be set for a service; a star where `[defaults]` has it, too."""
    common = [key.name for key in service_keys(DEFAULTS)]
    return _HEAD_OF_SERVICES + "".join(
        f"| `{key.name}`{'*' if key.name in common else ''} | {key.kind.description} | "
        f"{_unset(key)} | {key.help} |\n"
        for key in service_keys("service.NAME")
    )


def _unset(key: Key) -> str:
    """A value as it would be written, or words."""
    return key.unset if key.unset in ("never", "none", "no limit") else f"`{key.unset}`"
