"""Stays: one row for each time that a worker was registered, with the work done in it.

A stay begins when a worker joins after it left, or joins as another process. Attempts belong to the
stay in which they were leased. A stay that goes on lasts until the last event of its worker. Owns
the spans of work that are carried for stays that may change.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.pipeline.fold.columns import (
    INT_MIN,
    Flags,
    Groups,
    Ints,
    Number,
    Text,
    combined,
    constant,
    grouped,
    is_first,
    is_last,
    kept,
    maxima_before,
    number,
    running_sums,
    text,
)
from taskyard.pipeline.fold.links import NameIndex

_JOINED: Final = ("worker_joined",)
_MEMBER_KINDS: Final = (*_JOINED, "worker_left")

_COUNTS: Final = ("attempts", "finished", "failed", "lost")

#: One piece of work: its worker, the record of its lease, its span if it is known, and counts.
#: Spans that touch are merged, so a piece may stand for many attempts.
WORK: Final = pa.schema(
    [
        ("worker", pa.string()),
        *((name, pa.int64()) for name in ("record", "start_ns", "end_ns", "run_ns")),
        *((name, pa.int64()) for name in _COUNTS),
    ]
)

#: Outcomes of attempts that each count stands for.
_OUTCOMES: Final = {
    "finished": ("finished",),
    "failed": ("failed", "postponed"),
    "lost": ("returned", "expired"),
}


def work_of(attempts: pa.Table) -> pa.Table:
    """Return the work of attempts, a piece for each."""
    outcome = text(attempts["outcome"])
    start_ns = number(attempts["leased_ns"]).values + number(attempts["queued_ns"]).filled(0)
    run_ns = number(attempts["run_ns"])
    columns = {
        "worker": text(attempts["worker"]).arrow.cast(pa.string()),
        "record": attempts["leased_record"],
        "start_ns": pa.array(start_ns),
        "end_ns": Number(start_ns + run_ns.values, run_ns.known).arrow,
        "run_ns": run_ns.filled(0),
        "attempts": np.ones(len(attempts), np.int64),
    }
    for name, outcomes in _OUTCOMES.items():
        columns[name] = outcome.is_any(outcomes).astype(np.int64)
    return pa.table(columns, schema=WORK)


class CarriedStays(Struct, frozen=True):
    """Stays that may still change: their joins, exits and last events, and the work done so far."""

    members: pa.Table
    work: pa.Table
    #: The number of final stays of each worker that has any: columns `worker` and `stays`.
    before: pa.Table


class FoldedStays(Struct, frozen=True):
    """The result of a fold of workers."""

    #: Rows to append, and rows that replace all rows of this kind.
    workers: pa.Table
    workers_open: pa.Table
    carried: CarriedStays
    #: The first moment at which a worker has other slots than earlier folds found. None: nowhere.
    slots_since_ns: int | None


BEFORE: Final = pa.schema([("worker", pa.string()), ("stays", pa.int64())])

#: Columns of an event about a worker that a stay needs.
MEMBER_COLUMNS: Final = (
    *("worker", "record", "time_ns", "kind", "incarnation", "dialect", "services", "slots"),
    "reason",
)


def member_rows(events: pa.Table) -> Ints:
    """Return the rows of all joins and exits, and of the last event of each worker before a join.

    Without a later join, the last event of all counts. Events are in the order of the journal.
    """
    worker, kind = text(events["worker"]), text(events["kind"])
    rows = np.flatnonzero(worker.codes >= 0)
    order = rows[np.argsort(worker.codes[rows], kind="stable")]
    is_member = kind.at(order).is_any(_MEMBER_KINDS)
    is_end = is_last(worker.codes[order])
    is_end[:-1] |= kind.at(order[1:]).is_any(_JOINED)
    return np.sort(order[is_member | is_end])


def fold_stays(
    events: pa.Table,
    ended: pa.Table,
    still_open: pa.Table,
    broker: str,
    carried: CarriedStays | None = None,
) -> FoldedStays:
    """Fold new events of workers, and the attempts that ended or are open now.

    A stay is final if the worker left or was replaced, and none of its attempts is open.
    """
    new = events.select(MEMBER_COLUMNS).take(pa.array(member_rows(events)))
    before = CarriedStays(new.slice(0, 0), WORK.empty_table(), BEFORE.empty_table())
    before = before if carried is None else carried
    seen = pa.concat_tables([before.members, new]).unify_dictionaries()
    is_member = text(seen["kind"]).is_any(_MEMBER_KINDS)
    members, known = kept(seen, is_member), int(is_member[: len(before.members)].sum())
    done = pa.concat_tables([before.work, work_of(ended)])
    work = pa.concat_tables([done, work_of(still_open)])
    walk = _walk(members, work, before.before)
    stay_of = _stays_of(walk, members, seen)
    rows = _rows(walk, members, work, _last_times(seen, stay_of, walk.groups.count), broker)
    has_open = np.zeros(walk.groups.count, bool)
    has_open[walk.group_of(len(members) + len(done), len(members) + len(work))] = True
    is_over = ~is_last(walk.workers.codes) | number(rows["left"]).is_known
    is_final = is_over & ~has_open & (walk.stays > 0)
    return FoldedStays(
        kept(rows, is_final),
        kept(rows, ~is_final),
        CarriedStays(
            _still_needed(seen, ~np.append(is_final, values=True)[stay_of]),
            _merged(done, walk.group_of(len(members), len(members) + len(done)), is_final),
            _counted(kept(rows, is_final), before.before),
        ),
        _slots_since_ns(rows, members.slice(0, known), walk.group_of(0, known)),
    )


class _Walk(Struct, frozen=True):
    """Joins, exits and work, each in its stay. Joins and exits come first in the input."""

    #: Places in the input, in the order of worker and record.
    order: Ints
    #: The stay of each of them.
    groups: Groups
    #: Worker and number of each stay.
    workers: Text
    stays: Ints

    def group_of(self, first: int, last: int) -> Ints:
        """Return the stay of each row of the input from the first to before the last."""
        found = np.empty(len(self.order), np.int64)
        found[self.order] = self.groups.of_row
        return found[first:last]


def _walk(members: pa.Table, work: pa.Table, before: pa.Table) -> _Walk:
    """Give each row the number of its stay."""
    names = [*members["worker"].cast(pa.string()).chunks, *work["worker"].chunks]
    worker = text(pa.chunked_array(names, pa.string()))
    records = np.concatenate([number(table["record"]).values for table in (members, work)])
    order = np.lexsort((records, worker.codes))
    begins = np.zeros(len(order), np.int64)
    begins[: len(members)] = _begins(members)
    codes = worker.codes[order]
    earlier = np.zeros(len(worker.values) + 1, np.int64)
    known = pc.index_in(before["worker"], value_set=worker.values).fill_null(-1)
    earlier[known.to_numpy().astype(np.int64)] = number(before["stays"]).values
    earlier[-1] = 0
    stay = running_sums(begins[order], is_first(codes)) + earlier[codes]
    groups = grouped(combined(codes, stay))
    rows = np.zeros(groups.count, np.int64)
    rows[groups.of_row] = np.arange(len(order))
    return _Walk(order, groups, Text(codes[rows], worker.values), stay[rows])


def _begins(members: pa.Table) -> Flags:
    """Return whether each join or exit begins a stay."""
    worker, records = text(members["worker"]), number(members["record"]).values
    is_join = text(members["kind"]).is_any(_JOINED)
    process = number(members["incarnation"])
    order = np.lexsort((records, worker.codes))
    starts = is_first(worker.codes[order])
    last_join = np.maximum.accumulate(np.where(is_join[order], np.arange(len(order)), -1))
    joins = is_join[order]
    was_join = np.append(False, joins[:-1]) & ~starts
    place = np.append(-1, last_join[:-1])
    known, values = process.is_known[order], process.values[order]
    is_other = known & known[place] & (values != values[place]) if len(order) else known
    found = np.zeros(len(order), bool)
    found[order] = joins & (~was_join | is_other)
    return found


def _stays_of(walk: _Walk, members: pa.Table, seen: pa.Table) -> Ints:
    """Return the stay of each event of a worker: the last one that began before it, or -1."""
    is_join = text(members["kind"]).is_any(_JOINED)
    joins = np.flatnonzero(is_join)
    stays = walk.group_of(0, len(members))[joins]
    index = NameIndex(
        members["worker"].cast(pa.string()).take(pa.array(joins)),
        number(members["record"]).values[joins],
    )
    found = index.places(seen["worker"].cast(pa.string()), number(seen["record"]).values)
    return np.where(found >= 0, np.append(stays, -1)[found], -1)


def _last_times(seen: pa.Table, stay_of: Ints, count: int) -> Ints:
    """Return the time of the last event of each stay, by the order of the journal."""
    order = np.argsort(number(seen["record"]).values, kind="stable")
    order = order[stay_of[order] >= 0]
    found = np.full(count, INT_MIN)
    found[stay_of[order]] = number(seen["time_ns"]).values[order]
    return found


def _slots_since_ns(rows: pa.Table, members: pa.Table, stay_of: Ints) -> int | None:
    """Return the beginning of the first stay that is new, or has other slots than before.

    `members` are the joins and exits of earlier folds. The first stay of a worker also counts for
    the time before it, see `metrics`.
    """
    joins = np.flatnonzero(text(members["kind"]).is_any(_JOINED))
    before = np.full(len(rows), -1)
    before[stay_of[joins]] = number(members["slots"]).filled(0)[joins]
    joined = number(rows["joined"])
    is_other = joined.is_known & (number(rows["slots"]).filled(0) != before)
    is_first_stay = (number(rows["stay"]).values == 1) & (before >= 0)
    since_ns = np.where(is_first_stay, 0, joined.values * 1000)[is_other]
    return int(since_ns.min()) if len(since_ns) else None


def _still_needed(seen: pa.Table, is_kept: Flags) -> pa.Table:
    found = kept(seen, is_kept)
    return found.take(pa.array(member_rows(found)))


def _rows(walk: _Walk, members: pa.Table, work: pa.Table, seen_ns: Ints, broker: str) -> pa.Table:
    """Return a row for each stay, in the order of worker and stay."""
    groups = walk.groups
    count = len(members)
    is_work = walk.order >= count
    kind = text(members["kind"])
    is_join = np.append(kind.is_any(_JOINED), np.zeros(len(work), bool))[walk.order]
    is_exit = ~is_join & ~is_work
    at = np.where(is_work, 0, walk.order)
    time_ns = Number(_padded(number(members["time_ns"]).values)[at], ~is_work)
    pieces = _Pieces(work, walk.order[is_work] - count, groups.of_row[is_work], groups.count)
    joins = _first_rows(groups, is_join)
    joined_ns = _chosen(time_ns.values, joins)
    left_ns = groups.maxima(time_ns.where(is_exit))
    last_ns = np.where(left_ns.is_known, left_ns.values, seen_ns)
    stay_ns = np.where(joined_ns.is_known, np.maximum(last_ns - joined_ns.filled(0), 0), 0)
    newest = members.take(_last_rows(groups, walk.order, is_join))
    exits = members.take(_last_rows(groups, walk.order, is_exit))
    slots = number(newest["slots"])
    sums = pieces.sums
    columns = {
        "broker": constant(broker, groups.count),
        "worker": walk.workers.arrow,
        "stay": walk.stays,
        **{name: newest[name] for name in ("incarnation", "dialect", "services", "slots")},
        "joined": joined_ns.times,
        "joined_record": _chosen(_records(members, at).values, joins).arrow,
        "left": left_ns.times,
        "reason": exits["reason"],
        **{name: sums[name] for name in _COUNTS},
        "busy_ns": pieces.busy_ns,
        "run_ns": sums["run_ns"],
        "stay_ns": stay_ns,
        "utilisation": _utilisation(sums["run_ns"], slots.filled(0) * stay_ns),
    }
    return pa.table(columns)


class _Pieces:
    """Sums over the work of each stay."""

    def __init__(self, work: pa.Table, rows: Ints, stay: Ints, count: int) -> None:
        groups = Groups(stay, np.arange(count))
        self.sums = {
            name: groups.sums(number(work[name]).values[rows]) for name in ("run_ns", *_COUNTS)
        }
        start, end = number(work["start_ns"]).at(rows), number(work["end_ns"]).at(rows)
        spans = _Spans(stay, start, end)
        # Tasks that run at the same time count once.
        begins = np.maximum(spans.start_ns, spans.before_ns.filled(INT_MIN))
        alone = Groups(spans.stay, groups.keys)
        self.busy_ns = alone.sums(np.maximum(spans.end_ns - begins, 0))


class _Spans:
    """The known spans of work, in the order of stay and start."""

    def __init__(self, stay: Ints, start_ns: Number, end_ns: Number) -> None:
        known = np.flatnonzero(end_ns.is_known)
        order = known[np.lexsort((start_ns.values[known], stay[known]))]
        self.stay = stay[order]
        self.start_ns, self.end_ns = start_ns.values[order], end_ns.values[order]
        #: The latest end of the spans before each in its stay.
        self.before_ns = maxima_before(self.end_ns, is_first(self.stay))


def _merged(work: pa.Table, stay: Ints, is_final: Flags) -> pa.Table:
    """Return the work of stays that are not final, with one piece for spans that touch."""
    rows = np.flatnonzero(~is_final[stay])
    work, stay = work.take(pa.array(rows)), stay[rows]
    groups = grouped(stay)
    start, end = number(work["start_ns"]), number(work["end_ns"])
    spans = _Spans(groups.of_row, start, end)
    is_begin = ~spans.before_ns.is_known | (spans.start_ns > spans.before_ns.values)
    pieces = Groups(np.cumsum(is_begin) - 1, np.arange(int(is_begin.sum())))
    # One more piece for each stay has its counts.
    none = Number(np.zeros(groups.count, np.int64), np.zeros(groups.count, bool))
    firsts = np.zeros(groups.count, np.int64)
    firsts[groups.of_row[::-1]] = np.arange(len(work))[::-1]
    at = np.concatenate([firsts, firsts[spans.stay[is_begin]]])
    starts, ends = spans.start_ns[is_begin], pieces.maxima(Number(spans.end_ns)).values
    columns = {
        "worker": work["worker"].take(pa.array(at)),
        "record": work["record"].take(pa.array(at)),
        "start_ns": _joined(none, Number(starts)),
        "end_ns": _joined(none, Number(ends)),
    }
    for name in ("run_ns", *_COUNTS):
        sums = groups.sums(number(work[name]).values)
        columns[name] = np.append(sums, np.zeros(len(starts), np.int64))
    return pa.table(columns, schema=WORK)


def _joined(one: Number, other: Number) -> pa.Array:
    return pa.concat_arrays([one.arrow, other.arrow])


def _counted(final: pa.Table, before: pa.Table) -> pa.Table:
    """Return the number of final stays of each worker: the largest number of one."""
    names = [*before["worker"].chunks, *final["worker"].cast(pa.string()).chunks]
    worker = text(pa.chunked_array(names, pa.string()))
    stays = np.append(number(before["stays"]).values, number(final["stay"]).values)
    counts = np.zeros(len(worker.values), np.int64)
    np.maximum.at(counts, worker.codes, stays)
    return pa.table({"worker": worker.values, "stays": counts}, schema=BEFORE)


def _padded(values: Ints) -> Ints:
    """Add a value, so that there is one to choose."""
    return np.append(values, 0)


def _records(members: pa.Table, at: Ints) -> Number:
    return Number(_padded(number(members["record"]).values)[at])


def _first_rows(groups: Groups, is_wanted: Flags) -> Ints:
    """Return the first wanted row of each group, -1 if there is none."""
    count = len(groups.of_row)
    found = np.full(groups.count, count)
    rows = np.flatnonzero(is_wanted)
    np.minimum.at(found, groups.of_row[rows], rows)
    return np.where(found < count, found, -1)


def _chosen(values: Ints, rows: Ints) -> Number:
    """Return the values of some rows. Null for -1."""
    return Number(_padded(values)[rows], rows >= 0)


def _last_rows(groups: Groups, order: Ints, is_wanted: Flags) -> pa.Array:
    """Return the row of the last wanted one of each group, null if there is none."""
    rows = np.full(groups.count, -1)
    rows[groups.of_row[is_wanted]] = order[is_wanted]
    return pa.array(rows, mask=rows < 0)


def _utilisation(run_ns: Ints, room_ns: Ints) -> pa.Array:
    used = run_ns / np.maximum(room_ns, 1)
    return pa.array(used, pa.float64(), mask=room_ns <= 0)
