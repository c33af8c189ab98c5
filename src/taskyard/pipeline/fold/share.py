"""The fold of one share: carried steps and new events in, rows and carried steps out."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.pipeline.fold.attempts import Leases, attempts
from taskyard.pipeline.fold.buckets import SCOPE, buckets_of, scoped
from taskyard.pipeline.fold.changes import (
    QueueNumbers,
    depth_corrections,
    run_changes,
    step_changes,
    worker_changes,
)
from taskyard.pipeline.fold.columns import (
    Flags,
    Ints,
    combined,
    constant,
    grouped,
    kept,
    number,
    text,
)
from taskyard.pipeline.fold.steps import COLUMNS, Carried, Steps
from taskyard.pipeline.fold.tasks import Generations, generations, tasks_without_graph

#: An odd number, so that a product keeps all 64 bits.
_HASH_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)

#: Names are hashed by words of 64 bits.
_WORD_BYTES: Final = 8

GENERATIONS: Final = pa.schema(
    [("campaign", pa.string()), ("task", pa.string()), ("generations", pa.int64())]
)


class FoldedShare(Struct, frozen=True):
    """The result of a fold."""

    #: Rows to append: nothing changes them any more.
    attempts: pa.Table
    tasks: pa.Table
    #: Rows that replace all rows of this kind of the share.
    attempts_open: pa.Table
    tasks_open: pa.Table
    #: Changes to add to those of earlier folds, and the changes of open attempts.
    buckets: pa.Table
    buckets_open: pa.Table
    carried: Carried
    #: Steps of names that were never submitted, or not since they ended. They make no task.
    unplaced: int


def share_numbers(names: pa.ChunkedArray, count: int) -> Ints:
    """Return the share of each task, from 0 to below the count, by a hash of its name.

    The hash is the same on every machine, because executors divide files of one run by it.
    """
    strings = pa.concat_arrays(
        [pa.array([], pa.large_string()), *names.cast(pa.large_string()).chunks]
    )
    offsets = np.frombuffer(strings.buffers()[1], np.int64)[
        strings.offset : strings.offset + len(strings) + 1
    ]
    # Bytes after the last name complete its last word.
    data = bytes(strings.buffers()[2] or b"") + bytes(_WORD_BYTES)
    words = np.ndarray(len(data) - _WORD_BYTES + 1, "<u8", data, strides=(1,))
    begins, lengths = offsets[:-1], np.diff(offsets)
    mixed = lengths.astype(np.uint64)
    for place in range(0, int(lengths.max(initial=0)), _WORD_BYTES):
        rows = np.flatnonzero(lengths > place)
        unused = np.maximum(_WORD_BYTES - (lengths[rows] - place), 0).astype(np.uint64)
        # The bytes of the next name are shifted out.
        word = words[begins[rows] + place] << (unused * np.uint64(8))
        mixed[rows] = _mixed(mixed[rows] ^ word)
    found: Ints = ((mixed >> np.uint64(32)) % np.uint64(count)).astype(np.int64)
    return found


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Let every bit of each number change the upper bits."""
    found = numbers * _HASH_FACTOR
    return (found ^ (found >> np.uint64(29))) * _HASH_FACTOR


def nothing_carried(events: pa.Schema) -> Carried:
    """Return the state before the first fold of events with these columns."""
    steps = pa.schema([events.field(name) for name in COLUMNS]).empty_table()
    return Carried(steps, GENERATIONS.empty_table())


def fold_share(events: pa.Table, broker: str, carried: Carried | None = None) -> FoldedShare:
    """Fold new events of a share. Events that an earlier fold has seen are skipped."""
    before = nothing_carried(events.schema) if carried is None else carried
    records = number(events["record"]).values
    new = kept(events.select(COLUMNS), records > before.record)
    whole = pa.concat_tables([before.steps, new]) if len(before.steps) else new
    steps = Steps(whole, before.generations)
    leases = Leases(steps)
    found = generations(steps)
    is_new = _is_new(leases, before.record)
    made, known = attempts(leases, broker), tasks_without_graph(steps, leases, found, broker)
    is_task = found.is_task
    last = int(records.max()) if len(records) else 0
    ended, still_open = kept(made, is_new), kept(made, ~leases.is_final)
    buckets = _campaign_buckets(leases, before.record, is_new, broker)
    open_buckets = _campaign_buckets(leases, None, ~leases.is_final, broker)
    return FoldedShare(
        attempts=ended,
        tasks=kept(known, is_task & found.is_final),
        attempts_open=still_open,
        tasks_open=kept(known, is_task & ~found.is_final),
        buckets=pa.concat_tables([buckets, worker_buckets(ended, broker)]),
        buckets_open=pa.concat_tables([open_buckets, worker_buckets(still_open, broker)]),
        carried=_carried(steps, found, max(before.record, last)),
        unplaced=int((steps.submission < 0).sum()),
    )


def _is_new(leases: Leases, record: int) -> Flags:
    """Return whether each attempt became final after a record."""
    return leases.is_final & (leases.steps.record[leases.next_rows] > record)


def _campaign_buckets(
    leases: Leases, record: int | None, is_chosen: Flags, broker: str
) -> pa.Table:
    """Return the buckets of campaigns, services and lanes from steps and from some leases.

    Steps after the record count. None: no steps.
    """
    steps = leases.steps
    table, queues = _queues(steps, broker)
    changes = run_changes(leases, np.flatnonzero(is_chosen), queues.of_step)
    if record is not None:
        rows = np.flatnonzero(steps.record > record)
        changes.append(step_changes(steps, rows, queues.of_step))
        changes += depth_corrections(steps, record, queues)
    return scoped(buckets_of(changes, table))


def worker_buckets(attempts: pa.Table, broker: str) -> pa.Table:
    """Return the buckets of workers from some of their attempts."""
    workers = text(attempts["worker"])
    # The last place is for attempts without a worker.
    names = pa.concat_arrays([workers.values, pa.nulls(1, pa.string())])
    columns = {name: pa.nulls(len(names), pa.string()) for name in SCOPE}
    columns |= {
        "broker": constant(broker, len(names)),
        "scope": constant("worker", len(names)),
        "worker": names,
    }
    place = np.where(workers.codes < 0, len(workers.values), workers.codes)
    return buckets_of(worker_changes(attempts, place), pa.table(columns))


def _queues(steps: Steps, broker: str) -> tuple[pa.Table, QueueNumbers]:
    """Return a row for each campaign, service and lane, and the rows of steps and other changes."""
    changes = steps.queue_changes
    campaigns = steps.campaigns.at(steps.name[np.append(np.arange(steps.count), changes.after)])
    places = np.append(steps.places, changes.places)
    services, lanes = steps.event_text("service", places), steps.event_text("lane", places)
    groups = grouped(combined(campaigns.codes, services.codes, lanes.codes))
    firsts = np.zeros(groups.count, np.int64)
    firsts[groups.of_row] = np.arange(len(places))
    columns = {
        "broker": constant(broker, groups.count),
        "scope": constant("lane", groups.count),
        "campaign": campaigns.at(firsts).arrow,
        "service": services.at(firsts).arrow,
        "lane": lanes.at(firsts).arrow,
        "worker": pa.nulls(groups.count, pa.string()),
    }
    of_step, of_change = groups.of_row[: steps.count], groups.of_row[steps.count :]
    return pa.table(columns), QueueNumbers(of_step, of_change)


def _carried(steps: Steps, found: Generations, record: int) -> Carried:
    """Return the steps of all generations that are not final."""
    begins = found.begins[~found.is_final]
    names = steps.name[begins]
    before = steps.generation[begins] - found.is_task[~found.is_final]
    columns = [
        steps.campaigns.at(names).arrow.cast(pa.string()),
        steps.tasks.at(names).arrow.cast(pa.string()),
        pa.array(before),
    ]
    table = pa.Table.from_arrays(columns, schema=GENERATIONS)
    open_steps = steps.events_of(found.is_in_open(steps.count))
    return Carried(open_steps, table.filter(pc.greater(table["generations"], 0)), record)
