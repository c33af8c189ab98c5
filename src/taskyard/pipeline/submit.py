"""Prepared tasks to a broker, in batches made of columns, from wherever a partition is.

A batch is taken whole or not at all, and one that was taken before is harmless: a name that is
known with the same payload and campaign is passed over. So a partition that is tried again, or run
by two at once, or a whole job that is run twice, submits nothing twice. Knows nothing of Spark.
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

#: How long the first answer of a broker may take that many partitions talk to at once.
FIRST_ANSWER_SECONDS: Final = 60.0


class Target(Struct, frozen=True):
    """Where tasks go, and as what: all that a partition has to be told."""

    #: The broker's endpoint, as it is reached from the executors.
    broker: str
    #: The path of a key, on the executors.
    key: str | None
    campaign: str
    #: The moment that durations are counted from.
    now_ns: int
    unknown: UnknownPolicy = UnknownPolicy.REFUSE
    #: How many seconds to wait for a broker that does not answer; None: until it does.
    timeout: float | None = None

    def client(self) -> Client:
        return Client(
            self.broker, key=self.key, timeout=self.timeout, connect_timeout=FIRST_ANSWER_SECONDS
        )


def make_target(
    broker: str,
    key: str | None,
    campaign: str,
    unknown: UnknownPolicy,
    timeout: float | None = None,
) -> Target:
    """Where to send tasks to from now on."""
    return Target(broker, key, campaign, time.time_ns(), unknown, timeout)


class SubmitCounts(Struct):
    """What came of submitting."""

    new: int = 0
    existing: int = 0

    def add(self, more: SubmitCounts) -> None:
        self.new += more.new
        self.existing += more.existing


def submit(batches: Iterable[pa.RecordBatch], target: Target) -> SubmitCounts:
    """Submit rows of `PREPARED_SCHEMA` that are all good, in their order. Raises `Refused`, having
    submitted some of the batches before."""
    counts = SubmitCounts()
    terms = SharedTerms(target.campaign.encode(), target.now_ns)
    # One batch is under way while the next is made; a single helper keeps their order.
    with target.client() as client, ThreadPoolExecutor(1) as helper:
        under_way: list[tuple[int, Future[int]]] = []
        lanes = LaneResolver(client)
        for submission in _submissions(batches, terms):
            wrong = lanes.assign(submission)
            if wrong:
                raise Refused(wrong[0])
            sent = helper.submit(client.create, submission, target.unknown)
            under_way.append((len(submission.names), sent))
            if len(under_way) > 1:
                _add_counts(counts, *under_way.pop(0))
        for one in under_way:
            _add_counts(counts, *one)
    return counts


class LaneResolver:
    """The lanes of tasks that give none, as the broker's settings say. Asked once a service."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._templates: dict[bytes, str] = {}

    def assign(self, whole: Submission) -> list[str]:
        """Put tasks that give no lane where they belong. Returns of which it can't be said, and
        why."""
        self._request_templates({terms.service for terms in whole.terms} - self._templates.keys())
        if not any(self._templates[terms.service] for terms in whole.terms):
            return []
        lanes = whole.lanes or [b""] * len(whole.names)
        wrong: list[str] = []
        for row, name in enumerate(whole.names):
            if lanes[row]:
                continue
            terms = whole.terms_of(row)
            template = self._templates[terms.service]
            try:
                lanes[row] = expand_lane(template, name, whole.payload_of(row), terms)
            except InvalidValue as bad:
                wrong.append(f"task {shown(name)}: {bad}")
        whole.lanes = lanes
        return wrong

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
    """These rows in as many messages as they need."""
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
    """Rows of `PREPARED_SCHEMA` as the broker takes them."""
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
    """What is wrong with tasks whose lane the broker's settings make of their fields. Nothing is
    submitted."""
    terms = SharedTerms(target.campaign.encode(), target.now_ns)
    with target.client() as client:
        lanes = LaneResolver(client)
        for submission in _submissions(batches, terms):
            yield from lanes.assign(submission)


def find_conflicts(batches: Iterable[pa.RecordBatch], target: Target) -> Iterator[str]:
    """What the broker says of tasks that it knows with another command or campaign. Nothing is
    submitted."""
    terms = SharedTerms(target.campaign.encode(), target.now_ns)
    with target.client() as client:
        for submission in _submissions(batches, terms):
            yield from _conflicts(client, submission, list(range(len(submission.names))))


def _conflicts(client: Client, whole: Submission, rows: list[int]) -> Iterator[str]:
    """By halves, until a single task is to blame."""
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
    """Why these can't be taken because of what is known; "" if nothing speaks against them.

    They are offered together with a task that waits for nobody: such a batch is refused whole, but
    what is known is compared before that.
    """
    nobody = secrets.token_hex(16).encode()
    rows = len(part.names)
    shared = len(part.payloads) == 1
    probe = Submission(
        names=[*part.names, b"waits-for-" + nobody],
        payloads=part.payloads if shared else [*part.payloads, b""],
        terms=part.terms,
        terms_at=None if part.terms_at is None else [*part.terms_at, 0],
        after=[*[[] for _ in range(rows)], [nobody]],
    )
    try:
        client.create(probe, UnknownPolicy.REFUSE)
    except Refused as refused:
        return "" if nobody.decode() in str(refused) else str(refused)
    raise AssertionError("a broker took a task that waits for nobody")
