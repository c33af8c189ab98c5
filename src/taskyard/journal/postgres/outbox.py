"""The rows of `taskyard.outbox`: tasks that users submitted in transactions of their own.

A row is new, or is refused until a user decides. The leader removes a row once its journal has the
task, and writes only while its term lasts. Knows nothing about the meaning of a task.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from taskyard.journal.postgres.database import Connection
from taskyard.journal.postgres.leader import HELD, Term

#: Rows of one batch: one message and one row of the journal.
ROWS_MAX: Final = 1_000

#: Bytes of one batch, unless its first row has more.
BYTES_MAX: Final = 4 * 1024 * 1024

LISTEN: Final = "LISTEN taskyard_outbox"

_COLUMNS: Final = (
    "id, name, campaign, task::text, payload, "
    "(extract(epoch FROM submitted_at) * 1000000)::bigint * 1000"
)

#: The first new rows that fit one batch.
_READ: Final = (
    "SELECT " + _COLUMNS + " FROM (SELECT *, sum(bytes) OVER (ORDER BY id) AS total, "  # noqa: S608  # no input
    "row_number() OVER (ORDER BY id) AS place FROM (SELECT * FROM taskyard.outbox "
    "WHERE refused_code IS NULL ORDER BY id LIMIT %(rows)s) AS first) AS summed "
    "WHERE total <= %(bytes)s OR place = 1 ORDER BY id"
)

_REMOVE: Final = HELD + (  # noqa: S608  # no input
    " DELETE FROM taskyard.outbox WHERE id = ANY(%(ids)s) AND EXISTS (SELECT FROM held)"
)
_REFUSE: Final = HELD + (  # noqa: S608  # no input
    " UPDATE taskyard.outbox AS one SET refused_code = given.code, refused_reason = given.reason "
    "FROM unnest(%(ids)s::bigint[], %(codes)s::text[], %(reasons)s::text[]) "
    "AS given (id, code, reason) WHERE one.id = given.id AND EXISTS (SELECT FROM held)"
)
_COUNT: Final = "SELECT count(*) - count(refused_code), count(refused_code) FROM taskyard.outbox"
_LIST: Final = (
    "SELECT id, name, campaign, submitted_by, extract(epoch FROM submitted_at)::float8, "
    "refused_code, refused_reason FROM taskyard.outbox "
    "WHERE id > %s ORDER BY id LIMIT %s"
)
_FIRST_LINES: Final = (
    "SELECT substring(payload FROM 1 FOR coalesce(nullif(position('\\x0a'::bytea IN payload), 0), "
    "octet_length(payload))) FROM taskyard.outbox "
    "WHERE refused_code IS NOT NULL AND substring(payload FROM 1 FOR %s) = %s"
)
_RETRY: Final = (
    "WITH changed AS (UPDATE taskyard.outbox SET refused_code = NULL, refused_reason = NULL "
    "WHERE refused_code IS NOT NULL AND id = ANY(%s) RETURNING id) "
    "SELECT id, pg_notify('taskyard_outbox', '') FROM changed"
)
_DROP: Final = (
    "DELETE FROM taskyard.outbox WHERE refused_code IS NOT NULL AND id = ANY(%s) RETURNING id"
)


class OutboxRow(NamedTuple):
    """A task as its transaction left it."""

    id: int
    name: str
    campaign: str
    #: The JSON of a line of a campaign file, without its name.
    task: str
    payload: bytes | None
    #: By the clock of the database.
    submitted_ns: int


class Refused(NamedTuple):
    """Why a row was not submitted."""

    id: int
    code: str
    reason: str


class OutboxCounts(NamedTuple):
    """How many rows there are."""

    new: int = 0
    refused: int = 0


class OutboxEntry(NamedTuple):
    """A row as users see it."""

    id: int
    name: str
    campaign: str
    submitted_by: str
    #: Seconds since 1970.
    submitted: float
    #: None: the broker has not seen it yet.
    code: str | None
    reason: str | None


def read_new(connection: Connection) -> list[OutboxRow]:
    """Return the first new rows that fit one batch."""
    found = connection.execute(_READ, {"rows": ROWS_MAX, "bytes": BYTES_MAX}, prepare=True)
    return [OutboxRow(*columns) for columns in found]


def remove(connection: Connection, term: Term, ids: Sequence[int]) -> None:
    """Remove rows whose tasks are in the journal. Does nothing if the term is over."""
    connection.execute(_REMOVE, {**term._asdict(), "ids": [*ids]})


def refuse(connection: Connection, term: Term, refused: Sequence[Refused]) -> None:
    """Keep rows with the reason why they were refused. Does nothing if the term is over."""
    ids, codes, reasons = (list(column) for column in zip(*refused, strict=True))
    values = {"ids": ids, "codes": codes, "reasons": reasons}
    connection.execute(_REFUSE, {**term._asdict(), **values})


def count(connection: Connection) -> OutboxCounts:
    """Count the rows."""
    (columns,) = connection.execute(_COUNT).fetchall()
    return OutboxCounts(*columns)


def entries(connection: Connection, after: int, rows_max: int) -> list[OutboxEntry]:
    """Return rows after this one, in the order of their numbers."""
    return [OutboxEntry(*columns) for columns in connection.execute(_LIST, (after, rows_max))]


def first_lines(connection: Connection, mark: bytes) -> list[bytes]:
    """Return the first lines of payloads of refused rows that begin with a mark."""
    found = connection.execute(_FIRST_LINES, (len(mark), mark))
    return [bytes(line) for (line,) in found]


def retry(connection: Connection, ids: Sequence[int]) -> list[int]:
    """Make refused rows new again. Return the numbers of those that there are."""
    return [columns[0] for columns in connection.execute(_RETRY, ([*ids],))]


def drop(connection: Connection, ids: Sequence[int]) -> list[int]:
    """Remove refused rows. Return the numbers of those that there are."""
    return [columns[0] for columns in connection.execute(_DROP, ([*ids],))]
