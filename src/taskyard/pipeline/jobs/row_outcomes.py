"""Outcomes of rows: one partition waits for the tasks of its rows, and yields them as they settle.

Only reads. A partition that Spark kills, runs again or runs twice submits nothing and finds the
same tasks by their names. Knows nothing of Spark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
from msgspec import Struct

from taskyard.campaign.batches import encode_text
from taskyard.client import discovery
from taskyard.client.internal import InternalClient
from taskyard.client.requests import full_name, portions, scope_of
from taskyard.core.blobs import Blob, Result, truncated_result_reason
from taskyard.core.model import shown
from taskyard.core.states import TaskState
from taskyard.errors import BytesDamaged, BytesMissing, BytesTruncated, UnknownName, UserError
from taskyard.pipeline.submit import CONNECT_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from taskyard.client.results import SettableFuture

#: Outcomes in one batch at most. Measurements come in pages of 250 tasks.
ROWS_PER_BATCH: Final = 1000

#: After the first outcome of a batch, others are waited for this long.
LINGER_SECONDS: Final = 0.25

#: The columns of an outcome after `key`, `name` and `task`.
OUTCOME_FIELDS: Final = pa.schema(
    [
        pa.field("state", pa.string()),
        pa.field("result", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("attempts", pa.int64()),
        pa.field("worker", pa.string()),
        pa.field("seconds", pa.float64()),
    ]
)

#: The columns of a failed task, after those of its row.
FAILED_FIELDS: Final = pa.schema(
    [
        pa.field("service", pa.string()),
        pa.field("lane", pa.string()),
        pa.field("priority", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("attempt", pa.int64()),
        pa.field("failures", pa.int64()),
        pa.field("ended", pa.float64()),
    ]
)


#: Returns tasks by their full names.
_ViewReader: TypeAlias = Callable[[list[str]], dict[str, dict[str, Any]]]


class MapTarget(Struct, frozen=True):
    """The broker's address and the campaign, as sent to the partitions."""

    broker: str
    key: str | None
    campaign: str
    #: Seconds that a partition waits for its tasks. None: without limit.
    timeout: float | None = None
    #: Read `worker` and `seconds` of the latest attempts too.
    measured: bool = True

    def client(self) -> InternalClient:
        return InternalClient(self.broker, key=self.key, connect_timeout=CONNECT_TIMEOUT_SECONDS)


def map_target(
    broker: str | None,
    state: str | None,
    key: str | None,
    campaign: str,
    **reading: Any,  # noqa: ANN401  # the last fields
) -> MapTarget:
    """Find the broker by the rules of every client. Raises UserError without a campaign.

    Raises `NoBroker` if it does not answer here: the partitions would try for minutes.
    """
    if not campaign:
        raise UserError("campaign: a name is required (tasks are named CAMPAIGN/KEY)")
    target = MapTarget(discovery.endpoint(broker, state), key, campaign, **reading)
    if discovery.is_refused(target.broker):
        raise discovery.refused_error(target.broker)
    InternalClient(target.broker, key=key).close()
    return target


def outcome_function(
    target: MapTarget,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function of a partition. Its rows have `key`, `name` and `task`."""

    def outcomes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        timeout = target.timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        found = [batch for batch in batches if batch.num_rows]
        if found:
            with target.client() as client:
                reader = partial(_views, client, measured=target.measured)
                yield from _outcomes(client, reader, pa.Table.from_batches(found), deadline)

    return outcomes


def _outcomes(
    client: InternalClient, read_views: _ViewReader, rows: pa.Table, deadline: float | None
) -> Iterator[pa.RecordBatch]:
    """Yield rows with their outcomes as they settle, and at the deadline those that have not."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(rows["task"].to_pylist()):
        places.setdefault(name, []).append(place)
    for settled in settled_tasks(client, [*places], deadline):
        views = read_views([*settled])
        outcomes = {name: _outcome(one, views[name]) for name, one in settled.items()}
        yield _batch(rows, {name: places.pop(name) for name in settled}, outcomes)
    for some in portions([*places], ROWS_PER_BATCH) if places else ():
        outcomes = {name: _open(view) for name, view in read_views(some).items()}
        yield _batch(rows, {name: places[name] for name in some}, outcomes)


def _batch(
    rows: pa.Table, places: dict[str, list[int]], outcomes: dict[str, dict[str, Any]]
) -> pa.RecordBatch:
    """Return the rows of some tasks, at their places, with the outcomes of the tasks."""
    at = [place for each in places.values() for place in each]
    values = [outcomes[name] for name, each in places.items() for _ in each]
    return _chosen(rows, at, values, OUTCOME_FIELDS)


def _chosen(
    rows: pa.Table, at: list[int], values: list[dict[str, Any]], fields: pa.Schema
) -> pa.RecordBatch:
    """Return the rows at these places with more columns."""
    chosen = rows.take(pa.array(at, pa.int64())).combine_chunks()
    columns = [chosen.column(name).chunk(0) for name in chosen.schema.names]
    columns += [pa.array([one[own.name] for one in values], own.type) for own in fields]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*chosen.schema, *fields]))


def _views(
    client: InternalClient, names: list[str], *, measured: bool
) -> dict[str, dict[str, Any]]:
    """Return tasks, `measured` with their latest attempts. Raises `UnknownName`."""
    found = {full_name(view): view for view in client.tasks(scope_of(names), measured=measured)}
    _check_known(names, found)
    return {name: found[name] for name in names}


def _check_known(names: list[str], found: dict[str, Any]) -> None:
    unknown = [name for name in names if name not in found]
    if unknown:
        others = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
        raise UnknownName(
            f"unknown task {unknown[0]!r}{others} (the frame has other rows than at submission: "
            "store it before `map_rows`)",
            *unknown,
        )


class Settled(NamedTuple):
    """The outcome of a task: its result, or the reason why there is none."""

    state: TaskState
    result: bytes | None
    reason: bytes

    @classmethod
    def of(cls, state: TaskState, result: Result) -> Settled:
        if state is not TaskState.DONE:
            return cls(state, None, result.text)
        if isinstance(result.content, Blob):
            return cls(state, None, truncated_result_reason(result.content))
        return cls(state, result.content, b"")


def _outcome(settled: Settled, view: dict[str, Any]) -> dict[str, Any]:
    result = settled.result
    return {
        "state": settled.state.name.lower(),
        "result": None if result is None else shown(result),
        "reason": shown(settled.reason) or (view["reason"] if result is None else "") or None,
        "attempts": view["attempt"],
        "worker": view.get("worker_last"),
        "seconds": view.get("duration"),
    }


def _open(view: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a task that has not settled. The reason is that of its last failure."""
    return {
        "state": view["state"],
        "result": None,
        "reason": view["reason"] or None,
        "attempts": view["attempt"],
        "worker": view.get("worker_last"),
        "seconds": None,
    }


# Failures.


def failed_function(
    target: MapTarget,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function of a partition that keeps the rows whose tasks have failed.

    Its rows have `name`. All failures of the campaign are read, in each partition.
    """

    def failed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        views: dict[str, dict[str, Any]] | None = None
        for batch in batches:
            if views is None:
                views = _failures(target)
            names = batch["name"].to_pylist()
            at = [place for place, name in enumerate(names) if name in views]
            if at:
                found = [views[names[place]] for place in at]
                yield _chosen(pa.Table.from_batches([batch]), at, found, FAILED_FIELDS)

    return failed


def _failures(target: MapTarget) -> dict[str, dict[str, Any]]:
    scope = scope_of(campaign=target.campaign, states=[TaskState.FAILED])
    with target.client() as client:
        return {view["name"]: view for view in client.tasks(scope)}


# Settlement.


#: A task's name and its outcome, or the error that ended the session.
_Outcomes: TypeAlias = "SimpleQueue[tuple[str, Settled | BaseException]]"


class _Watch:
    """Puts the outcome of one task into a queue. Called by the thread of the session."""

    __slots__ = ("_is_done", "_name", "_queue")

    def __init__(self, name: str, queue: _Outcomes) -> None:
        self._name, self._queue, self._is_done = name, queue, False

    def done(self) -> bool:
        return self._is_done

    def settle(self, state: TaskState, result: Result) -> None:
        self.set_result(Settled.of(state, result))

    def set_result(self, result: Settled | BaseException) -> None:
        self._is_done = True
        self._queue.put((self._name, result))

    def set_exception(self, exception: BaseException) -> None:
        is_own = isinstance(exception, BytesDamaged | BytesMissing | BytesTruncated)
        reason = str(exception).encode()
        self.set_result(Settled(TaskState.DONE, None, reason) if is_own else exception)


def settled_tasks(
    client: InternalClient, names: list[str], deadline: float | None
) -> Iterator[dict[str, Settled]]:
    """Yield tasks by name as they settle, some at a time, until all have or it is the deadline."""
    for some in portions(names):
        _check_known(some, client.existing(some))
    queue: _Outcomes = SimpleQueue()
    for some in portions(names):
        watches: dict[bytes, SettableFuture] = {
            encode_text(name): _Watch(name, queue) for name in some
        }
        client._session.watch(watches)  # noqa: SLF001  # as `Client.futures` does
    left = len(names)
    while left:
        settled = _take(queue, min(left, ROWS_PER_BATCH), deadline)
        if not settled:
            return
        left -= len(settled)
        yield settled


def _take(queue: _Outcomes, count_max: int, deadline: float | None) -> dict[str, Settled]:
    """Wait for an outcome and a moment for more. Return none at the deadline."""
    settled: dict[str, Settled] = {}
    while len(settled) < count_max:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            name, outcome = queue.get(timeout=wait)
        except Empty:
            break
        if isinstance(outcome, BaseException):
            raise outcome
        if not settled:
            linger = time.monotonic() + LINGER_SECONDS
            deadline = linger if deadline is None else min(deadline, linger)
        settled[name] = outcome
    return settled
