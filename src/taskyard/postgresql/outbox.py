"""The outbox: tasks of transactions of users, and the thread that submits them to the broker.

A row of `taskyard.outbox` is new, or is refused until a user decides. The thread of a broker that
leads submits new rows as one more client of its native socket. A row is removed after its task is
acknowledged, so it may be submitted again after a crash. The broker keeps names for ever, and takes
the same name with the same payload for a repetition. A refused row stays with the reason, and
delays no other. Rows are changed only while the term lasts.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec
import psycopg
from msgspec import Struct

from taskyard.campaign.batches import encode_batch, encode_text, joined, task_bytes
from taskyard.campaign.lanes import LaneTemplates
from taskyard.campaign.task_spec import check_task
from taskyard.campaign.values import TimeSpec
from taskyard.core.blobs import PICKLE_MARK, blobs_in
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.model import Refusal
from taskyard.errors import NoBroker, UserError
from taskyard.net.channel import BlockingChannel
from taskyard.postgresql import database
from taskyard.postgresql.database import Connection
from taskyard.postgresql.leader import HELD, Term
from taskyard.wire.native import peer, task_contents

if TYPE_CHECKING:
    from taskyard.core.model import Submission
    from taskyard.wire.native.peer import Reply

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
    #: None if the broker has not seen it yet.
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
    """Return rows after a number, in the order of their numbers."""
    return [OutboxEntry(*columns) for columns in connection.execute(_LIST, (after, rows_max))]


def first_lines(connection: Connection, mark: bytes) -> list[bytes]:
    """Return the first lines of payloads of refused rows that begin with a mark."""
    found = connection.execute(_FIRST_LINES, (len(mark), mark))
    return [bytes(line) for (line,) in found]


def retry(connection: Connection, ids: Sequence[int]) -> list[int]:
    """Make refused rows new again. Return the numbers of rows that exist."""
    return [columns[0] for columns in connection.execute(_RETRY, ([*ids],))]


def drop(connection: Connection, ids: Sequence[int]) -> list[int]:
    """Remove refused rows. Return the numbers of rows that exist."""
    return [columns[0] for columns in connection.execute(_DROP, ([*ids],))]


#: How often rows are read without a notification, which may be lost with its connection.
POLL_SECONDS: Final = 1.0

#: The pause after which rows are read again that the broker, or the database, did not take.
PAUSE_SECONDS: Final = 1.0

#: How long a stop waits for the thread, which ends with the process. To connect to a silent server
#: takes seconds, and peers can't find the next broker meanwhile.
_JOIN_SECONDS: Final = 0.5

#: How often the blobs are noted as used that refused rows name. They are kept for an hour then.
RENEW_SECONDS: Final = 600

#: Counting rows takes at most this part of the time, however many there are.
_COUNT_PART: Final = 20

#: For administrators, in `pg_stat_activity`.
_NAME: Final = "SET application_name = 'taskyard outbox'"

#: The code of a row that can't be read as a task.
INVALID: Final = "invalid-task"

_DUPLICATE: Final = Refusal.DUPLICATE.value
_FULL: Final = Refusal.FULL.value

logger = logging.getLogger("taskyard.broker")


class _Paused(Exception):
    """The broker takes no tasks now, or this term is over."""


class _Task(Struct):
    """A row that can be submitted."""

    row: OutboxRow
    batch: Submission


class _Settled(Struct):
    """Rows that the broker has, and rows that it or the feed has refused."""

    accepted: list[int] = []
    refused: list[Refused] = []

    def refuse(self, task: _Task, code: str, reason: str) -> None:
        self.refused.append(Refused(task.row.id, code, reason))


class OutboxFeed:
    """A thread that submits rows until it is closed. Use it as a context manager."""

    def __init__(self, url: str, term: Term, endpoint: str) -> None:
        """`endpoint` is the native socket of this broker."""
        self._url = url
        self._term = term
        self._endpoint = endpoint
        #: Rows as of the last time that all new rows were submitted.
        self.counts = OutboxCounts()
        self._templates = LaneTemplates()
        self._connection: Connection | None = None
        self._count_at = self._renew_at = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-feed", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopping.set()
        if self._connection is not None:
            database.interrupt(self._connection)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        is_connected = True
        with BlockingChannel(self._endpoint, should_stop=self._stopping.is_set) as channel:
            while not self._stopping.is_set():
                try:
                    with database.connect(self._url) as self._connection:
                        self._connection.execute(_NAME)
                        self._connection.execute(LISTEN)
                        is_connected = True
                        self._serve(self._connection, channel)
                except psycopg.Error as error:
                    if is_connected and not self._stopping.is_set():
                        text = database.text_of(error)
                        logger.warning("%s: outbox: %s", database.describe(self._url), text)
                    is_connected = False
                    self._stopping.wait(PAUSE_SECONDS)
                except NoBroker:
                    pass  # only when it stops
                except Exception:
                    logger.exception("internal error in the outbox. Please report it")
                    self._stopping.wait(PAUSE_SECONDS)

    def _serve(self, connection: Connection, channel: BlockingChannel) -> None:
        while not self._stopping.is_set():
            try:
                if rows := read_new(connection):
                    self._consume(connection, channel, rows)
                    continue
                if time.monotonic() >= self._count_at:
                    self._count(connection, channel)
            except _Paused:
                self._stopping.wait(PAUSE_SECONDS)
            else:
                for _ in connection.notifies(timeout=POLL_SECONDS, stop_after=1):
                    pass

    def _count(self, connection: Connection, channel: BlockingChannel) -> None:
        """Count the rows, and keep the blobs of refused rows at times."""
        started = time.monotonic()
        self.counts = count(connection)
        if started >= self._renew_at:
            self._renew_at = started + RENEW_SECONDS
            _renew(connection, channel)
        ended = time.monotonic()
        self._count_at = ended + max(POLL_SECONDS / 2, _COUNT_PART * (ended - started))

    def _consume(
        self, connection: Connection, channel: BlockingChannel, rows: Sequence[OutboxRow]
    ) -> None:
        """Submit rows. Remove rows that the broker has, and keep the reasons of refused rows."""
        settled = _Settled()
        tasks: list[_Task] = []
        for row in rows:
            try:
                tasks.append(_Task(row, _encode(row)))
            except Exception as error:  # noqa: BLE001  # a row must not block other rows
                code = getattr(error, "code", INVALID)
                settled.refused.append(Refused(row.id, code, str(error) or type(error).__name__))
        try:
            self._submit(channel, self._with_lanes(channel, tasks, settled), settled)
        finally:  # what the broker has is settled, also if it takes no more
            if settled.accepted:
                remove(connection, self._term, settled.accepted)
            if settled.refused:
                refuse(connection, self._term, settled.refused)
        names = {row.id: spelling(row.campaign, row.name) for row in rows}
        for number, _, reason in settled.refused:
            logger.warning(
                "outbox: row %d, task %s: refused: %s (see `taskyard store init --outbox`)",
                number,
                names[number],
                reason,
            )
        if not settled.accepted and not settled.refused:
            raise _Paused

    def _with_lanes(
        self, channel: BlockingChannel, tasks: list[_Task], settled: _Settled
    ) -> list[_Task]:
        """Set the lanes of tasks that give none. Return the tasks that their template fits."""
        self._templates.drop_old(time.monotonic_ns())
        services = {task.batch.terms[0].service: None for task in tasks}
        missing = [service for service in services if not self._templates.has(service)]
        if missing:
            reply = channel.ask(partial(peer.rules, services=missing))
            self._templates.update(missing, reply.clauses(), time.monotonic_ns())
        fit: list[_Task] = []
        for task in tasks:
            problems = self._templates.assign(task.batch)
            for _, reason in problems:
                settled.refuse(task, INVALID, reason)
            if not problems:
                fit.append(task)
        return fit

    def _submit(self, channel: BlockingChannel, tasks: list[_Task], settled: _Settled) -> None:
        """Submit tasks until each is accepted or refused.

        They wait for unknown predecessors, whose transactions may end later.
        """
        while tasks:
            batch = joined([task.batch for task in tasks])
            create = partial(peer.create, submission=batch, unknown=UnknownPolicy.WAIT)
            reply = channel.ask(create)
            if reply.kind == peer.OK:
                settled.accepted += [task.row.id for task in tasks]
                return
            if reply.kind != peer.ERROR or reply.code == _FULL:
                raise _Paused
            faults = {one.index: one for one in reply.refused_tasks()}
            if not faults:
                self._submit_halves(channel, tasks, reply, settled)
                return
            for index, fault in faults.items():
                if fault.code != _DUPLICATE:  # stays, for a batch after the first of its name
                    settled.refuse(tasks[index], fault.code, fault.reason)
            tasks = [task for index, task in enumerate(tasks) if index not in faults]

    def _submit_halves(
        self, channel: BlockingChannel, tasks: list[_Task], reply: Reply, settled: _Settled
    ) -> None:
        """Submit a batch in parts that was refused as a whole. A single task is refused."""
        if len(tasks) == 1:
            settled.refuse(tasks[0], reply.code, reply.reason)
            return
        middle = len(tasks) // 2
        self._submit(channel, tasks[:middle], settled)
        self._submit(channel, tasks[middle:], settled)


def _renew(connection: Connection, channel: BlockingChannel) -> None:
    """Keep the blobs that refused rows name, which a user may have submitted again."""
    for line in first_lines(connection, PICKLE_MARK):
        for name in blobs_in(line):
            channel.ask(partial(task_contents.put_blob, value=name.encode()))


def _encode(row: OutboxRow) -> Submission:
    """Return a row as a batch of one task. Times from now count from its submission."""
    raw: dict[str, Any] = msgspec.json.decode(row.task)
    if isinstance(raw.get("argv"), str):
        try:
            raw["argv"] = shlex.split(raw["argv"])
        except ValueError as error:
            raise UserError(f"command: {error}") from None
    raw["name"] = row.name
    if row.payload is not None:
        raw["payload"] = row.payload
    spec = check_task(raw, row.campaign)
    if spec.due is not None:
        spec.due = TimeSpec(spec.due.at_ns(row.submitted_ns))
    if spec.expiry is not None:
        spec.expiry = TimeSpec(spec.expiry.at_ns(row.submitted_ns))
    batch = encode_batch([spec], encode_text(row.campaign), row.submitted_ns)
    after = batch.after[0] if batch.after else ()
    task_bytes(batch.names[0], batch.text_of(0), encode_text(spec.lane), after)  # raises
    return batch
