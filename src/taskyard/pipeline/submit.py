"""Submission of prepared tasks to a broker, in batches of columns, from any partition.

The broker accepts a batch whole or not at all. A name that it has with the same payload and
campaign is skipped. So a partition that is retried or run twice, and a job that is repeated, submit
nothing twice. Knows nothing of Spark.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.campaign.batches import (
    AFTER_EXTRA_BYTES,
    BYTES_PER_BATCH,
    TASKS_PER_BATCH,
)
from taskyard.campaign.lanes import expand_lane
from taskyard.campaign.values import InvalidValue
from taskyard.client.client import Client
from taskyard.core.events import UnknownPolicy
from taskyard.core.model import Submission, shown
from taskyard.errors import Refused
from taskyard.pipeline.arrow_rows import SharedTerms

#: Timeout of the first reply of a broker that many partitions connect to at once.
CONNECT_TIMEOUT_SECONDS: Final = 60.0


class Target(Struct, frozen=True):
    """The broker and the terms of submission, as sent to the partitions."""

    #: The broker's endpoint, as the executors reach it.
    broker: str
    #: The path of a key on the executors.
    key: str | None
    campaign: str
    #: The start of all durations.
    now_ns: int
    unknown: UnknownPolicy = UnknownPolicy.REFUSE
    #: Seconds to wait for a broker that does not reply. None: without limit.
    timeout: float | None = None

    def client(self) -> Client:
        return Client(
            self.broker, key=self.key, timeout=self.timeout, connect_timeout=CONNECT_TIMEOUT_SECONDS
        )


def make_target(
    broker: str,
    key: str | None,
    campaign: str,
    unknown: UnknownPolicy,
    timeout: float | None = None,
) -> Target:
    """Return a target whose durations start now."""
    return Target(broker, key, campaign, time.time_ns(), unknown, timeout)


class SubmitCounts(Struct):
    """The tasks that were submitted: new ones, and ones that the broker had."""

    new: int = 0
    existing: int = 0

    def add(self, more: SubmitCounts) -> None:
        self.new += more.new
        self.existing += more.existing


def submit(batches: Iterable[pa.RecordBatch], target: Target) -> SubmitCounts:
    """Submit valid rows of `PREPARED_SCHEMA`, in their order.

    Raises `Refused`. Earlier batches may have been submitted by then.
    """
    counts = SubmitCounts()
    terms = SharedTerms(target.campaign.encode(), target.now_ns)
    # One batch is sent while the next is built. A single thread keeps their order.
    with target.client() as client, ThreadPoolExecutor(1) as sender:
        in_flight: list[tuple[int, Future[int]]] = []
        lanes = LaneResolver(client)
        for submission in _submissions(batches, terms):
            errors = lanes.assign(submission)
            if errors:
                raise Refused(errors[0])
            sent = sender.submit(client.create, submission, target.unknown)
            in_flight.append((len(submission.names), sent))
            if len(in_flight) > 1:
                _add_counts(counts, *in_flight.pop(0))
        for one in in_flight:
            _add_counts(counts, *one)
    return counts


class LaneResolver:
    """Assigns lanes to tasks without one, by the broker's lane templates. Asks once per service."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._templates: dict[bytes, str] = {}

    def assign(self, whole: Submission) -> list[str]:
        """Assign lanes in place. Returns an error for each template that can't be expanded."""
        self._request_templates({terms.service for terms in whole.terms} - self._templates.keys())
        if not any(self._templates[terms.service] for terms in whole.terms):
            return []
        lanes = whole.lanes or [b""] * len(whole.names)
        errors: list[str] = []
        for row, name in enumerate(whole.names):
            if lanes[row]:
                continue
            terms = whole.terms_of(row)
            template = self._templates[terms.service]
            try:
                lanes[row] = expand_lane(template, name, whole.payload_of(row), terms)
            except InvalidValue as error:
                errors.append(f"task {shown(name)}: {error}")
        whole.lanes = lanes
        return errors

    def _request_templates(self, services: set[bytes]) -> None:
        if services:
            told = self._client.lane_templates(map(bytes.decode, services))
            self._templates |= {service: told.get(service.decode(), "") for service in services}


def _add_counts(counts: SubmitCounts, tasks: int, sent: Future[int]) -> None:
    new = sent.result()
    counts.new += new
    counts.existing += tasks - new


def _submissions(batches: Iterable[pa.RecordBatch], terms: SharedTerms) -> Iterator[Submission]:
    for batch in batches:
        for first in range(0, batch.num_rows, TASKS_PER_BATCH):
            yield from _split_to_fit(batch.slice(first, TASKS_PER_BATCH), terms)


def _split_to_fit(rows: pa.RecordBatch, terms: SharedTerms) -> Iterator[Submission]:
    """Split rows into as many messages as their size needs."""
    if rows.num_rows > 1 and _bytes_in(rows) > BYTES_PER_BATCH:
        half = rows.num_rows // 2
        yield from _split_to_fit(rows.slice(0, half), terms)
        yield from _split_to_fit(rows.slice(half), terms)
    else:
        yield submission_of(rows, terms)


def _bytes_in(rows: pa.RecordBatch) -> int:
    after = rows["after"].flatten()
    columns = (rows["name"], rows["payload"], rows["lane"], after)
    lengths = [pc.sum(pc.binary_length(column)).as_py() or 0 for column in columns]
    return sum(lengths) + AFTER_EXTRA_BYTES * len(after)


def submission_of(rows: pa.RecordBatch, terms: SharedTerms) -> Submission:
    """Convert rows of `PREPARED_SCHEMA` to a submission."""
    shared = rows["terms"].dictionary_encode()
    payloads = rows["payload"].to_pylist()
    lanes = _bytes_list(rows["lane"])
    return Submission(
        names=_bytes_list(rows["name"]),
        payloads=payloads if any(payloads) else [b""],
        terms=[terms.get(text) for text in shared.dictionary.to_pylist()],
        terms_at=shared.indices.to_pylist() if len(shared.dictionary) > 1 else None,
        lanes=lanes if any(lanes) else None,
        after=_after(rows["after"]),
    )


def _bytes_list(texts: pa.Array) -> list[bytes]:
    found: list[bytes] = texts.cast(pa.binary()).to_pylist()
    return found


def _after(column: pa.Array) -> list[list[bytes]] | None:
    names = _bytes_list(column.flatten())
    if not names:
        return None
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    ends = [0, *pc.cumulative_sum(lengths).to_pylist()]
    return [names[first:last] for first, last in pairwise(ends)]


def find_unplaced(batches: Iterable[pa.RecordBatch], target: Target) -> Iterator[str]:
    """Yield an error for each task whose lane template can't be expanded. Submits nothing."""
    terms = SharedTerms(target.campaign.encode(), target.now_ns)
    with target.client() as client:
        lanes = LaneResolver(client)
        for submission in _submissions(batches, terms):
            yield from lanes.assign(submission)


def find_conflicts(batches: Iterable[pa.RecordBatch], target: Target) -> Iterator[str]:
    """Yield an error for each task that the broker has with another payload or campaign.

    Submits nothing.
    """
    terms = SharedTerms(target.campaign.encode(), target.now_ns)
    with target.client() as client:
        for submission in _submissions(batches, terms):
            yield from _conflicts(client, submission, list(range(len(submission.names))))


def _conflicts(client: Client, whole: Submission, rows: list[int]) -> Iterator[str]:
    """Bisect the rows until single tasks are found."""
    reason = _refusal_of(client, whole.part(rows))
    if not reason:
        return
    if len(rows) == 1:
        yield reason
        return
    half = len(rows) // 2
    yield from _conflicts(client, whole, rows[:half])
    yield from _conflicts(client, whole, rows[half:])


def _refusal_of(client: Client, part: Submission) -> str:
    """Return why the broker would refuse these tasks as existing ones, or "".

    They are sent with one more task that waits for an unknown name. The broker always refuses that
    batch, but compares existing tasks first.
    """
    unknown_name = secrets.token_hex(16).encode()
    rows = len(part.names)
    shared = len(part.payloads) == 1
    probe = Submission(
        names=[*part.names, b"waits-for-" + unknown_name],
        payloads=part.payloads if shared else [*part.payloads, b""],
        terms=part.terms,
        terms_at=None if part.terms_at is None else [*part.terms_at, 0],
        after=[*[[] for _ in range(rows)], [unknown_name]],
    )
    try:
        client.create(probe, UnknownPolicy.REFUSE)
    except Refused as refused:
        return "" if unknown_name.decode() in str(refused) else str(refused)
    raise AssertionError("the broker accepted a task with an unknown dependency")
