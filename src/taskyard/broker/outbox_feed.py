"""Submits the tasks of the outbox in PostgreSQL to this broker, each exactly once.

Runs in a thread of a broker that leads, as one more client of its native socket. A row is removed
after its task is acknowledged, so it may be submitted again after a crash. The broker keeps names
for ever, and takes the same name with the same payload for a repetition. A row that is refused
stays with the reason, and delays no other. Knows nothing about turns.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

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
from taskyard.journal.postgres import database, outbox
from taskyard.journal.postgres.outbox import OutboxCounts, Refused
from taskyard.net.blocking_channel import BlockingChannel
from taskyard.wire.native import peer, task_contents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.model import Submission
    from taskyard.journal.postgres.database import Connection
    from taskyard.journal.postgres.leader import Term
    from taskyard.journal.postgres.outbox import OutboxRow
    from taskyard.wire.native.peer import Reply

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
_COUNT_SHARE: Final = 20

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


class OutboxFeed:
    """A thread that submits rows until it is closed. Use it as a context manager."""

    def __init__(self, url: str, term: Term, endpoint: str) -> None:
        """`endpoint` is the native socket of this broker."""
        self._url = url
        self._term = term
        self._endpoint = endpoint
        #: Rows as of the last time that all new ones were submitted.
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
                        self._connection.execute(outbox.LISTEN)
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
                if rows := outbox.read_new(connection):
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
        """Count the rows, and keep the blobs of refused ones at times."""
        started = time.monotonic()
        self.counts = outbox.count(connection)
        if started >= self._renew_at:
            self._renew_at = started + RENEW_SECONDS
            _renew(connection, channel)
        ended = time.monotonic()
        self._count_at = ended + max(POLL_SECONDS / 2, _COUNT_SHARE * (ended - started))

    def _consume(
        self, connection: Connection, channel: BlockingChannel, rows: Sequence[OutboxRow]
    ) -> None:
        """Submit rows. Remove those that the broker has, and keep the reasons of the others."""
        refused: list[Refused] = []
        tasks: list[_Task] = []
        for row in rows:
            try:
                tasks.append(_Task(row, _encode(row)))
            except Exception as error:  # noqa: BLE001  # a row must not block others
                code = getattr(error, "code", INVALID)
                refused.append(Refused(row.id, code, str(error) or type(error).__name__))
        accepted: list[int] = []
        try:
            tasks = self._with_lanes(channel, tasks, refused)
            self._submit(channel, tasks, accepted, refused)
        finally:  # what the broker has is settled, also if it takes no more
            if accepted:
                outbox.remove(connection, self._term, accepted)
            if refused:
                outbox.refuse(connection, self._term, refused)
        names = {row.id: spelling(row.campaign, row.name) for row in rows}
        for one in refused:
            _log_refused(one.id, names[one.id], one.reason)
        if not accepted and not refused:
            raise _Paused

    def _with_lanes(
        self, channel: BlockingChannel, tasks: list[_Task], refused: list[Refused]
    ) -> list[_Task]:
        """Set the lanes of tasks that give none. Return those that their template fits."""
        self._templates.drop_old(time.monotonic_ns())
        services = {task.batch.terms[0].service: None for task in tasks}
        missing = [service for service in services if not self._templates.has(service)]
        if missing:
            reply = channel.ask(partial(peer.rules, services=missing))
            self._templates.update(missing, reply.clauses(), time.monotonic_ns())
        fit: list[_Task] = []
        for task in tasks:
            problems = self._templates.assign(task.batch)
            refused += [Refused(task.row.id, INVALID, text) for _, text in problems]
            if not problems:
                fit.append(task)
        return fit

    def _submit(
        self,
        channel: BlockingChannel,
        tasks: list[_Task],
        accepted: list[int],
        refused: list[Refused],
    ) -> None:
        """Submit tasks until each is accepted or refused.

        They wait for unknown predecessors, whose transactions may end later.
        """
        while tasks:
            batch = joined([task.batch for task in tasks])
            create = partial(peer.create, submission=batch, unknown=UnknownPolicy.WAIT)
            reply = channel.ask(create)
            if reply.kind == peer.OK:
                accepted += [task.row.id for task in tasks]
                return
            if reply.kind != peer.ERROR or reply.code == _FULL:
                raise _Paused
            faults = {one.index: one for one in reply.refused_tasks()}
            if not faults:
                self._submit_halves(channel, tasks, reply, (accepted, refused))
                return
            for index, fault in faults.items():
                if fault.code != _DUPLICATE:  # stays, for a batch after the first of its name
                    refused.append(Refused(tasks[index].row.id, fault.code, fault.reason))
            tasks = [task for index, task in enumerate(tasks) if index not in faults]

    def _submit_halves(
        self,
        channel: BlockingChannel,
        tasks: list[_Task],
        reply: Reply,
        settled: tuple[list[int], list[Refused]],
    ) -> None:
        """Submit a batch in parts that was refused as a whole. A single task is refused."""
        if len(tasks) == 1:
            settled[1].append(Refused(tasks[0].row.id, reply.code, reply.reason))
            return
        middle = len(tasks) // 2
        self._submit(channel, tasks[:middle], *settled)
        self._submit(channel, tasks[middle:], *settled)


def _renew(connection: Connection, channel: BlockingChannel) -> None:
    """Keep the blobs that refused rows name, which a user may have submitted again."""
    for line in outbox.first_lines(connection, PICKLE_MARK):
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


def _log_refused(number: int, full_name: str, reason: str) -> None:
    logger.warning(
        "outbox: row %d, task %s: refused: %s (see `taskyard store init --outbox`)",
        *(number, full_name, reason),
    )
