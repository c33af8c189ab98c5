"""All tasks of a campaign, also those that the broker has dropped from memory.

Archived tasks come first, in the order in which they ended, then those in memory, in the order of
submission. The list is in a temporary file, because it may be longer than memory allows. Reads the
archive beside a running broker, as a compaction does.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any, Final, Self

from taskyard.campaign.batches import encode_text
from taskyard.cli.connection import broker_location, is_offline
from taskyard.core.identity import split
from taskyard.core.model import shown
from taskyard.core.states import TaskState
from taskyard.journal import readonly
from taskyard.journal.archive import Archive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from taskyard.cli.connection import ReadOnlyClient
    from taskyard.cli.options import CliContext
    from taskyard.core.model import EndedTask

#: SQLite deletes the file of a database without a name.
_TEMPORARY: Final = ""

_LISTED: Final = (
    "CREATE TABLE listed(place INTEGER PRIMARY KEY, name BLOB UNIQUE, state TEXT, reason TEXT, "
    "service TEXT)"
)
_ARCHIVED: Final = (
    "CREATE TABLE archived(record INTEGER, name BLOB, state TEXT, PRIMARY KEY (record, name)) "
    "WITHOUT ROWID"
)
_SETTINGS: Final = ("PRAGMA journal_mode=OFF", "PRAGMA synchronous=OFF")

#: An ended task in both was recalled, or is leaving memory. Another one has started again.
_ADD_ARCHIVED: Final = (
    "INSERT INTO archived SELECT ?1, ?2, coalesce((SELECT state FROM listed WHERE name = ?2), ?3) "
    "WHERE NOT EXISTS (SELECT 1 FROM listed WHERE name = ?2 AND NOT state IN ('done', 'cancelled'))"
)
_DROP_DOUBLES: Final = "DELETE FROM listed WHERE name IN (SELECT name FROM archived)"
_COUNT: Final = "SELECT (SELECT count(*) FROM archived) + (SELECT count(*) FROM listed)"
_ALL: Final = (
    "SELECT name, state, '', '' FROM archived ORDER BY record, name",
    "SELECT name, state, reason, service FROM listed ORDER BY place",
)


class CampaignTasks:
    """The tasks of a campaign in a temporary file. A context manager."""

    def __init__(self, campaign: str) -> None:
        self._campaign = campaign
        self._database = sqlite3.connect(_TEMPORARY, isolation_level=None)
        for statement in (*_SETTINGS, _LISTED, _ARCHIVED, "BEGIN"):
            self._database.execute(statement)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add_listed(self, views: Iterable[dict[str, Any]]) -> None:
        """Add the tasks in memory. Call it before `add_archived`: tasks move to the archive."""
        fields = ("state", "reason", "service")
        rows = ((encode_text(view["name"]), *(view[field] for field in fields)) for view in views)
        insert = "INSERT OR IGNORE INTO listed(name, state, reason, service) VALUES (?, ?, ?, ?)"
        self._database.executemany(insert, rows)

    def add_archived(self, cli_context: CliContext, broker: ReadOnlyClient) -> None:
        """Add the tasks in the archive, if the state directory is on this machine."""
        location = broker_location(cli_context)
        if location.broker is not None:
            return
        open_file = readonly.connect if is_offline(broker) else None
        with Archive(location.state, open_file) as archive:
            rows = map(self._row, archive.ended_in(encode_text(self._campaign)))
            self._database.executemany(_ADD_ARCHIVED, rows)
        self._database.execute(_DROP_DOUBLES)

    def _row(self, ended: EndedTask) -> tuple[int, bytes, str]:
        name = split(ended.name, ended.campaign)
        return ended.record, name, TaskState(ended.state).name.lower()

    def count(self) -> int:
        """Return how many tasks there are."""
        ((count,),) = self._database.execute(_COUNT)
        return int(count)

    def views(self) -> Iterator[dict[str, Any]]:
        """Yield name, campaign, state, reason and service of each task.

        Reason and service of an archived task are empty. No failed task is archived.
        """
        for query in _ALL:
            for name, state, reason, service in self._database.execute(query):
                named = {"name": shown(name), "campaign": self._campaign}
                yield {**named, "state": state, "reason": reason, "service": service}
