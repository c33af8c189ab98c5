"""The loaded settings: a struct for each section, and the origin of each value.

Checked values, in the units of their names. Independent of how they were loaded.
"""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.core.resources import Resources
from taskyard.settings.keys import Key
from taskyard.settings.kinds import InvitationLine, Rate

#: The default unit of `retries`, also of a task's own.
INTERVAL_NS: Final = SECOND_NS

#: Special characters of a pattern.
_SPECIAL: Final = re.compile(r"[*?[]")


class Source(IntEnum):
    """Where a value comes from. A higher source overrides a lower one."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3


class Origin(Struct, frozen=True):
    """Where one value came from, with its place."""

    source: Source
    #: `taskyard.toml:3`, `TASKYARD_STATE`, `--state`. Empty for a default.
    place: str = ""

    def __str__(self) -> str:
        return self.place or self.source.name.lower()


class Setting(Struct, frozen=True):
    """The effective value of a key."""

    key: Key
    value: Any
    origin: Origin

    def describe(self) -> str:
        """Format the value for a message: `15s (default)`."""
        return f"{self.key.text(self.value)} ({self.origin})"


class BrokerSection(Struct, frozen=True):
    #: The endpoints of the brokers.
    url: tuple[str, ...] | None
    state: Path
    #: A URL of PostgreSQL. Empty: SQLite in the state directory.
    store: str
    key: Path | None
    invite: Path | InvitationLine | None
    workers_max: int
    #: The address of the page. Empty: no page.
    page: str


class ListenSection(Struct, frozen=True):
    """One `[listen.NAME]`. None for unset values."""

    dialect: str
    endpoint: tuple[str, ...] | None = None
    identity: str | None = None
    service: str | None = None
    lane: str | None = None
    expire_ns: int | None = None
    timeout_ns: int | None = None
    retries: tuple[float, ...] | None = None

    @property
    def retry_delays_ns(self) -> tuple[int, ...] | None:
        """The delay before each further attempt."""
        if self.retries is None:
            return None
        return tuple(round(seconds * SECOND_NS) for seconds in self.retries)


class LeaseSection(Struct, frozen=True):
    #: 0: set by the broker.
    heartbeat_ns: int
    expire_ns: int
    plain_ns: int
    #: Of a broker on PostgreSQL.
    store_ns: int


class BlobsSection(Struct, frozen=True):
    #: 0 for no limit.
    quota_bytes: int
    #: None for ever.
    keep_ns: int | None
    grace_ns: int
    #: None: in the state directory.
    directory: Path | None
    cache_bytes: int


class LogSection(Struct, frozen=True):
    format: str
    #: None: depends on where the log is.
    level: str | None
    size_bytes: int
    files: int


class WorkerSection(Struct, frozen=True):
    processes: int
    #: None for one per core.
    slots: int | None
    services: tuple[str, ...]
    allow: tuple[str, ...]
    #: Resources of all workers of a machine. None: detected. Amounts are in ten-thousandths.
    cpus: int | None
    memory_bytes: int | None
    gpus: int | tuple[str, ...] | None
    resources: Resources


class ServiceSection(Struct, frozen=True):
    """`[defaults]`, or one `[service.NAME]`. None for unset values."""

    match: str | None = None
    lane: str | None = None
    command: tuple[str, ...] | None = None
    workers_max: int | None = None
    lane_workers_max: int | None = None
    interval_ns: int | None = None
    retries: tuple[float, ...] | None = None
    jitter: int | None = None
    expiry_ns: int | None = None
    expiry_hard_ns: int | None = None
    order: str | None = None
    overfeed: int | None = None
    idle_max_ns: int | None = None
    hunger_max_ns: int | None = None
    lines: str | None = None
    hold: bool | None = None
    debounce_ns: int | None = None
    rate: Rate | None = None
    lane_rate: Rate | None = None
    weight: int | None = None
    report_after_ns: int | None = None

    def match_for(self, name: str) -> str:
        """Return the pattern of this section, by default all lanes of the service of its name."""
        return self.match or f"{_SPECIAL.sub(lambda found: f'[{found[0]}]', name)}/*"

    @property
    def longest_wait_ns(self) -> float:
        """The longest delay of the retry schedule."""
        return max(self.retries or (0,)) * (self.interval_ns or INTERVAL_NS)


class Settings(Struct, frozen=True):
    """All settings."""

    broker: BrokerSection
    #: Endpoints by dialect or table, where set.
    listen: dict[str, tuple[str, ...]]
    #: The tables of listeners, by name.
    listeners: dict[str, ListenSection]
    lease: LeaseSection
    blobs: BlobsSection
    log: LogSection
    worker: WorkerSection
    defaults: ServiceSection
    services: dict[str, ServiceSection]
    #: Every setting by path, with its origin: the whole table, and the set keys of services.
    all: dict[str, Setting]
    #: The file that was read.
    file: Path | None
    #: Warnings about variables that look like settings.
    unknown_variables: tuple[str, ...]

    def value(self, path: str) -> Any:  # noqa: ANN401  # any value
        return self.all[path].value

    def source(self, path: str) -> Source:
        return self.all[path].origin.source
