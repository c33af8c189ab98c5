"""The options of `format("taskyard")`, with their defaults and checks.

Imported for every session that uses a Python data source, so it has no slow imports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct, convert

from taskyard.errors import UserError

#: The tables that can be read.
TABLES: Final = ("events", "edges", "tasks", "results")

#: Every option with its meaning.
OPTIONS: Final = {
    "broker": "the broker's endpoint, as the executors reach it",
    "state": "a state directory to read from, or of a broker on this machine",
    "key": "the path of a key on the executors",
    "campaign": "the campaign to write to, or to read",
    "service": "the service of tasks without one",
    "unknown": "for a dependency that was not submitted yet: wait or refuse",
    "table": "the table to read: " + ", ".join(TABLES),
    "filters": "true to skip rows by Spark's filters, if the session has them enabled",
    "rows_max": "the most events in a batch of a stream",
}

#: The tables that can be streamed.
STREAMS: Final = ("events", "results")

#: Some seconds of a busy broker, and some megabytes.
STREAM_ROWS_MAX: Final = 100_000

#: Options that Spark adds: the arguments of `load`, `save` and `start`, and the properties of a
#: table in its catalog. `paths` is a list as JSON.
_SPARK_OPTIONS: Final = (
    *("path", "paths", "checkpointlocation", "queryname"),
    *("provider", "owner", "external"),
)

#: Spark puts this before the options of a table in its catalog.
_OF_TABLE: Final = "option."


class SourceOptions(Struct, frozen=True):
    """The parsed options."""

    broker: str | None = None
    state: str | None = None
    key: str | None = None
    campaign: str | None = None
    service: str | None = None
    unknown: str | None = None
    table: str = "events"
    filters: bool = False
    rows_max: int = STREAM_ROWS_MAX
    #: Several state directories to read from, or none.
    states: tuple[str, ...] = ()

    def endpoint(self) -> str:
        """Find the broker's endpoint by the rules of every client."""
        from taskyard.client import discovery  # noqa: PLC0415  # only needed to reach a broker

        return discovery.endpoint(self.broker, self.state)

    @property
    def directory(self) -> Path | None:
        """The state directory to read from, or None to ask the broker."""
        return None if self.broker or not self.state else Path(self.state)

    @property
    def directories(self) -> tuple[Path, ...]:
        """All state directories to read from. Empty to ask the broker."""
        one = () if self.directory is None else (self.directory,)
        return tuple(map(Path, self.states)) or one

    def require_one_state(self, use: str) -> None:
        """Raise UserError if there are several states."""
        if len(self.states) > 1:
            raise UserError(f"{use}: {len(self.states)} states (use one)")


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Parse the options of a DataFrame reader or writer. Raises UserError for an unknown one."""
    values = {name.lower().removeprefix(_OF_TABLE): value for name, value in given.items()}
    unknown = [name for name in values if name not in OPTIONS and name not in _SPARK_OPTIONS]
    if unknown:
        raise UserError(
            f"format('taskyard'): unknown option {unknown[0]!r} (the options are "
            f"{', '.join(OPTIONS)})"
        )
    if values.get("table", "events") not in TABLES:
        raise UserError(f"unknown table {values['table']!r} (the tables are {', '.join(TABLES)})")
    states = _states(values)
    if states and (values.get("state") or values.get("broker")):
        raise UserError("path: it is a state directory, and excludes the options state and broker")
    named: dict[str, object] = {name: values[name] for name in OPTIONS if name in values}
    if "rows_max" in values:
        named["rows_max"] = _positive("rows_max", values["rows_max"])
    if "filters" in values:
        named["filters"] = _flag("filters", values["filters"])
    more = {"state": states[0], "states": states} if states else {}
    return convert({**named, **more}, SourceOptions)


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise UserError(f"option {name}: {text!r} is not a whole number from 1")
    return int(text)


def _states(values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the arguments of `load` or `save`."""
    paths = json.loads(values.get("paths", "[]"))
    return (values["path"],) if "path" in values else tuple(paths)


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UserError(f"option {name}: {text!r} is not true or false")
    return text.lower() == "true"
