"""Submission of prepared tasks to a broker, in batches of columns, from any partition.

Owns the way from Arrow to the batches of `campaign.submitter`, which submits them. A batch is
accepted whole or not at all, and existing tasks are skipped. So a partition that is retried or run
twice, and a job that is repeated, submit nothing twice. Knows nothing of Spark.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.campaign.batches import (
    AFTER_EXTRA_BYTES,
    BYTES_PER_BATCH,
    TASKS_PER_BATCH,
)
from taskyard.campaign.submitter import BatchSubmitter, SubmitCounts
from taskyard.client.discovery import submitter_environment
from taskyard.client.internal import InternalClient
from taskyard.core.events import UnknownPolicy
from taskyard.core.model import Submission
from taskyard.errors import TaskProblem
from taskyard.pipeline.arrow_rows import SharedTerms
from taskyard.pipeline.fold.columns import Array

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
    #: Directory and variables of the driver. Executors have others.
    environment: bytes = b""

    def client(self) -> InternalClient:
        client = InternalClient(
            self.broker, key=self.key, timeout=self.timeout, connect_timeout=CONNECT_TIMEOUT_SECONDS
        )
        client._session.environment = self.environment  # noqa: SLF001  # the driver's
        return client


def make_target(
    broker: str,
    key: str | None,
    campaign: str,
    unknown: UnknownPolicy,
    timeout: float | None = None,
) -> Target:
    """Return a target whose durations start now."""
    environment = submitter_environment(broker)
    return Target(broker, key, campaign, time.time_ns(), unknown, timeout, environment)


class BrokerTemplates:
    """The lane templates of services, requested from a broker, each once."""

    def __init__(self, target: Target | None) -> None:
        """Connect at the first request. Without a target, no service has a template."""
        self._target = target
        self._client: InternalClient | None = None
        self._submitter: BatchSubmitter | None = None

    def get(self, service: str) -> str:
        """Return the lane template of a service, or ""."""
        if self._target is None:
            return ""
        if self._submitter is None:
            self._client = self._target.client()
            self._submitter = BatchSubmitter(self._client)
        return self._submitter.template_of(service.encode())

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def submit(
    batches: Iterable[pa.RecordBatch], target: Target, counts: SubmitCounts | None = None
) -> SubmitCounts:
    """Submit valid rows of `PREPARED_SCHEMA`, in their order.

    Raises `Refused`. Then `counts` has the tasks that were submitted before it.
    """
    with target.client() as client:
        submitter = BatchSubmitter(client, target.unknown, counts)
        return submitter.submit(submissions(batches, target))


def conflicts(batches: Iterable[pa.RecordBatch], target: Target) -> Iterator[TaskProblem]:
    """Yield the tasks that the broker would refuse. Submits nothing."""
    with target.client() as client:
        submitter = BatchSubmitter(client)
        for submission in submissions(batches, target):
            yield from submitter.problems(submission)


def submissions(batches: Iterable[pa.RecordBatch], target: Target) -> Iterator[Submission]:
    """Yield rows of `PREPARED_SCHEMA` as batches that fit a message. A bundle is one batch."""
    terms = SharedTerms(target.campaign.encode(), target.now_ns)
    for batch in batches:
        done = 0
        for first, last in _bundles(batch["place"].to_numpy()):
            yield from _in_batches(batch.slice(done, first - done), terms)
            yield submission_of(batch.slice(first, last - first), terms)
            done = last
        yield from _in_batches(batch.slice(done), terms)


def _bundles(places: Array) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows that have the same place."""
    begins = np.flatnonzero(np.diff(places, prepend=-1))
    ends = np.append(begins[1:], len(places))
    is_bundle = ends - begins > 1
    yield from zip(begins[is_bundle].tolist(), ends[is_bundle].tolist(), strict=True)


def _in_batches(rows: pa.RecordBatch, terms: SharedTerms) -> Iterator[Submission]:
    for first in range(0, rows.num_rows, TASKS_PER_BATCH):
        yield from _split_to_fit(rows.slice(first, TASKS_PER_BATCH), terms)


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
    """Convert rows of `PREPARED_SCHEMA` to a submission. They may be those of one bundle."""
    shared = rows["terms"].dictionary_encode()
    payloads = rows["payload"].drop_null().to_pylist()
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
