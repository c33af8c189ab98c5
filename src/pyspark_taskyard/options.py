"""The options of `format("taskyard")`, with their defaults and their checks.

Imported for every session that uses a data source in Python, so it imports nothing that is slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from taskyard.errors import UserError

#: What can be read.
TABLES: Final = ("events", "edges", "tasks", "results")

#: Every option, with what it says.
OPTIONS: Final = {
    "broker": "the broker's endpoint, as the executors reach it",
    "state": "the state directory: of a broker on this machine, or to read from",
    "key": "the key to come with, a file on the executors",
    "campaign": "the campaign to write to, or to read alone",
    "service": "the service of tasks that name none",
    "unknown": "what a name means that nobody submitted yet: wait or refuse",
    "table": "what to read: " + ", ".join(TABLES),
}

#: Options of Spark's own that may come along.
_SPARK_OPTIONS: Final = ("path",)


class SourceOptions(Struct, frozen=True):
    """What was asked for."""

    broker: str | None = None
    state: str | None = None
    key: str | None = None
    campaign: str | None = None
    service: str | None = None
    unknown: str | None = None
    table: str = "events"

    def endpoint(self) -> str:
        """The broker's, by the rules that every client has."""
        from taskyard.client import discovery  # noqa: PLC0415  # only who talks to a broker

        return discovery.endpoint(self.broker, self.state)

    @property
    def directory(self) -> Path | None:
        """The state directory to read from; None: ask the broker."""
        return None if self.broker or not self.state else Path(self.state)


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Read the options of a DataFrame reader or writer. Raises UserError for an unknown one."""
    values = {name.lower(): value for name, value in given.items()}
    unknown = [name for name in values if name not in OPTIONS and name not in _SPARK_OPTIONS]
    if unknown:
        raise UserError(
            f"format('taskyard') has no option {unknown[0]!r}; it has {', '.join(OPTIONS)}"
        )
    if values.get("table", "events") not in TABLES:
        raise UserError(f"there is no table {values['table']!r}; read one of {', '.join(TABLES)}")
    return SourceOptions(**{name: values[name] for name in OPTIONS if name in values})
