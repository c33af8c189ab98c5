"""The table of settings: every key with its section, kind, default, variable and a sentence.

The one place where a key is defined. The reader, `taskyard config` and the table of the pages are
made from it. To add one, add its row here and its field to the section in `sections.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from taskyard.core.limits import LEASE_TASKS_MAX, SECOND_NS
from taskyard.settings import kinds
from taskyard.settings.kinds import Kind

PREFIX: Final = "TASKYARD_"

#: Where the file is.
CONFIG_VARIABLE: Final = "TASKYARD_CONFIG"

#: Not settings: what a worker tells its tasks, and what the benchmarks ask for.
OTHER_VARIABLES: Final = ("TASKYARD_TASK", "TASKYARD_ATTEMPT", "TASKYARD_BENCH_PROFILE")

#: The section that services stand under, each with its name: `[service.smtp]`.
SERVICE: Final = "service"
DEFAULTS: Final = "defaults"

#: Worker processes of one machine: more than it has cores many times over.
PROCESSES_MAX: Final = 1000

#: Tasks at once in one worker process: each of them is a process, too.
SLOTS_MAX: Final = 100_000

#: Workers at once, of a service: more than a broker serves.
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
    #: Something asks for it today; what nothing asks for is read and checked, and in no page.
    is_used: bool = True

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
    is_used: bool = True,
) -> Key:
    variable = environment or variable_of(section, name)
    return Key(section, name, kind, default, sentence, variable, unset, is_used)


def _listen(dialect: str, kind: Kind, *, is_used: bool = False) -> Key:
    sentence = f"Where `broker` and `up` listen to {dialect}, beside the native socket."
    return _key("listen", dialect, kind, None, sentence, unset="nowhere", is_used=is_used)


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
        "page",
        kinds.ADDRESS,
        None,
        "Where the page is served.",
        unset="nowhere",
        is_used=False,
    ),
    _listen("dwork", kinds.ENDPOINTS, is_used=True),
    _listen("round-robin", kinds.ENDPOINTS),
    _listen("ping-pong", kinds.PAIR, is_used=True),
    _listen("wmp", kinds.ENDPOINTS, is_used=True),
    _key("lease", "heartbeat", kinds.DURATION, SECOND_NS, "How often a worker shows life."),
    _key(
        "lease",
        "expire",
        kinds.DURATION,
        15 * SECOND_NS,
        "Silence of a worker after which its tasks go to others; at least three heartbeats.",
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

#: What can be set for each service; those of `[defaults]` are for all that do not set it.
_SERVICE_KEYS: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("match", kinds.GLOB, "The tasks that it is for, by service and lane."),
    ("lane", kinds.GLOB, "The lanes that it is for."),
    ("command", kinds.COMMAND, "The agent to start."),
    ("workers_max", kinds.integer(0, _WORKERS_MAX), "Workers at once; 0 for no limit."),
    ("lane_workers_max", kinds.integer(0, _WORKERS_MAX), "Workers at once for a lane."),
    ("interval", kinds.DURATION, "What the steps of `retries` are multiples of."),
    ("retries", kinds.MULTIPLES, "When to try again: a multiple of the interval each time."),
    ("jitter", kinds.PERCENT, "How much longer a retry may wait, by chance."),
    ("expiry", kinds.DURATION, "The age at which a task is given up at its next retry."),
    ("expiry_hard", kinds.DURATION, "The age at which a task is given up."),
    ("order", kinds.choice("random", "age"), "The order of a lane's tasks."),
    ("overfeed", kinds.integer(0, LEASE_TASKS_MAX), "Tasks handed over ahead, in a lane."),
    ("idle_max", kinds.DURATION, "How long an agent may be idle."),
    ("hunger_max", kinds.DURATION, "How long an agent may be silent with a task."),
    ("hold", kinds.BOOLEAN, "Keep its tasks until they are released."),
    ("debounce", kinds.DURATION_OR_NONE, "How long to gather tasks before a lane begins."),
    ("rate", kinds.RATE, "Tasks in a time, over all workers."),
    ("report_after", kinds.DURATION, "The age at which a waiting task is reported."),
)

#: Of one service alone.
_NO_DEFAULTS: Final = ("match", "lane", "command")


def service_keys(section: str) -> tuple[Key, ...]:
    """The keys of `defaults`, or of one service: `service.smtp`."""
    return tuple(
        Key(
            section,
            name,
            kind,
            None,
            sentence,
            variable_of(*section.split(".", 1), name),
            is_used=False,
        )
        for name, kind, sentence in _SERVICE_KEYS
        if section != DEFAULTS or name not in _NO_DEFAULTS
    )


#: Sections that stand in the table themselves.
SECTIONS: Final = tuple(dict.fromkeys(key.section for key in KEYS))
