"""The options of `format("taskyard")`, with their defaults and checks.

Imported for every session that uses a Python data source, so it has no slow imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

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
}

#: Options that Spark adds.
_SPARK_OPTIONS: Final = ("path",)


class SourceOptions(Struct, frozen=True):
    """The parsed options."""

    broker: str | None = None
    state: str | None = None
    key: str | None = None
    campaign: str | None = None
    service: str | None = None
    unknown: str | None = None
    table: str = "events"

    def endpoint(self) -> str:
        """Find the broker's endpoint by the rules of every client."""
        from taskyard.client import discovery  # noqa: PLC0415  # only needed to reach a broker

        return discovery.endpoint(self.broker, self.state)

    @property
    def directory(self) -> Path | None:
        """The state directory to read from, or None to ask the broker."""
        return None if self.broker or not self.state else Path(self.state)


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Parse the options of a DataFrame reader or writer. Raises UserError for an unknown one."""
    values = {name.lower(): value for name, value in given.items()}
    unknown = [name for name in values if name not in OPTIONS and name not in _SPARK_OPTIONS]
    if unknown:
        raise UserError(
            f"format('taskyard'): unknown option {unknown[0]!r} (the options are "
            f"{', '.join(OPTIONS)})"
        )
    if values.get("table", "events") not in TABLES:
        raise UserError(f"unknown table {values['table']!r} (the tables are {', '.join(TABLES)})")
    return SourceOptions(**{name: values[name] for name in OPTIONS if name in values})
