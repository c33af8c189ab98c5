"""Places of tasks in the graph as columns: what the walk adds to tasks, and the critical paths.

The critical path is the chain that decided how long a campaign really took. It goes back from the
task that ended last, each time to the dependency that ended last. `earliest_end` shows how short it
could have been with any number of workers. Owns the rows. `graph` walks.

A walk takes the places of earlier walks that can't change any more, and all other tasks. So its
cost depends on the tasks that are new or open. Tasks are numbered: first those with a known place,
then the others.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from taskyard.pipeline.fold import graph
from taskyard.pipeline.fold.columns import (
    CODED_TYPE,
    INT_MAX,
    INT_MIN,
    Flags,
    Ints,
    Number,
    Text,
    codes_of,
    distinct,
    kept,
    number,
    plain,
    text,
)
from taskyard.pipeline.fold.graph import Chained, Chains, KnownPlaces, Nodes
from taskyard.pipeline.fold.links import Links, links
from taskyard.pipeline.fold.schemas import CRITICAL_PATH, PLACED, PLACES
from taskyard.pipeline.fold.steps import STATE_NAMES

#: The columns of a task that the walk needs.
NODE: Final = (
    *("broker", "campaign", "task", "generation", "submitted", "submitted_record", "state", "due"),
    *("run_last_ns", "is_last_run_unknown", "attempts", "ended"),
)

#: The columns of an edge that the walk needs.
EDGE: Final = ("record", "task", "after")

#: The columns of a task that its row in a critical path needs.
CHAINED: Final = (
    *("broker", "campaign", "task", "name", "generation", "service", "lane", "priority", "state"),
    *("attempts", "ready", "leased", "ended", "wait_ns", "queued_ns", "run_last_ns"),
)

_DONE: Final = STATE_NAMES.index("DONE")
_CANCELLED: Final = STATE_NAMES.index("CANCELLED")


class Places:
    """The places of tasks, found by one walk."""

    def __init__(
        self, known: pa.Table, nodes: pa.Table, is_settled: Flags, edges: pa.Table
    ) -> None:
        """Walk. `known` are places of earlier walks, `nodes` all other tasks."""
        self._known, self._nodes = known, nodes
        self._records = np.append(
            number(known["submitted_record"]).values, number(nodes["submitted_record"]).values
        )
        self._names = pa.chunked_array([*known["task"].chunks, *nodes["task"].chunks], pa.string())
        #: Known tasks that an edge may lead to.
        self._named = _named_in(known["task"], edges)
        found = _links(known, nodes, self._named, edges)
        self._placed = graph.place(_walked(known, nodes, self._named, is_settled), found)
        first = len(self._named)
        #: The place of each of the nodes is final.
        self.is_final: Flags = self._placed.is_final[first:] & is_settled
        #: An edge may be needed again: its waiting task is not final.
        is_open = np.append(np.zeros(first, bool), ~self.is_final)
        self.is_edge_open: Flags = _is_open_edge(edges, kept(nodes, is_open[first:])["task"])
        self._before = self._find_before(found)

    @cached_property
    def _ended_us(self) -> Number:
        """The end of each task, as far as it was leased. Others took no time."""
        known, ended = number(self._known["ended_us"]), number(self._nodes["ended"])
        was_leased = number(self._nodes["attempts"]).values > 0
        return Number(
            np.append(known.values, ended.values),
            np.append(known.is_known, ended.is_known & was_leased),
        )

    @cached_property
    def _is_last_run_unknown(self) -> Flags:
        both = [number(one["is_last_run_unknown"]).is_true for one in (self._known, self._nodes)]
        return np.concatenate(both)

    @cached_property
    def _submitted_us(self) -> Ints:
        known, submitted = self._known["submitted_us"], self._nodes["submitted"]
        return np.append(number(known).values, number(submitted).values)

    @cached_property
    def _campaigns(self) -> Text:
        chunks = [*self._known["campaign"].chunks, *self._nodes["campaign"].chunks]
        return text(pa.chunked_array([*map(codes_of, chunks)], CODED_TYPE))

    @cached_property
    def _begins_us(self) -> Ints:
        """The first submission of each campaign."""
        found = np.full(len(self._campaigns.values), INT_MAX)
        np.minimum.at(found, self._campaigns.codes, self._submitted_us)
        return found

    def _find_before(self, found: Links) -> Ints:
        """Return the task that ended last among those that each task waits for."""
        of_walk = np.append(self._named, np.arange(len(self._known), len(self._records)))
        ends = self._ended_us.at(of_walk)

        def first_of(rows: Ints) -> int:
            numbers = of_walk[rows]
            return int(rows[np.flatnonzero(numbers == self._first_of(numbers))[0]])

        before = graph.last_before(found, ends, first_of)[len(self._named) :]
        mine = np.where(before >= 0, of_walk[before], -1)
        return np.append(number(self._known["before"]).values, mine)

    def _first_of(self, rows: Ints) -> int:
        """Choose the task that was submitted first, then by name."""
        tied = rows[self._records[rows] == self._records[rows].min()]
        texts = self._names.take(pa.array(tied)).to_pylist()
        return int(tied[texts.index(min(texts))])

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns that the walk adds to the nodes. `state` replaces the one before."""
        placed, first = self._placed, len(self._named)
        level = Number(placed.level.values[first:], placed.level.is_known[first:])
        columns = {
            "state": Text(placed.state[first:], pa.array(STATE_NAMES)).arrow,
            "is_behind_failure": pa.array(placed.is_behind_failure[first:]),
            "waits_for": pa.array(placed.waits_for[first:]),
            "level": level.arrow,
            "path_ns": pa.array(placed.path_ns[first:]),
            "earliest_end": Number(placed.earliest_ns[first:]).times,
        }
        return {name: columns[name] for name in PLACED.names}

    def new_places(self) -> pa.Table:
        """Return the places of nodes that are final now, in their order."""
        rows, first = np.flatnonzero(self.is_final), len(self._named)
        nodes, placed = kept(self._nodes, self.is_final), self._placed
        count = len(self._known)
        #: Numbers that the nodes have from now on.
        numbers = np.append(np.arange(count), count + np.cumsum(self.is_final) - 1)
        before = self._before[count + rows]
        level = Number(placed.level.values[first + rows], placed.level.is_known[first + rows])
        columns = {
            **{name: nodes[name] for name in nodes.column_names if name in PLACES.names},
            "is_done": pa.array(placed.state[first + rows] == _DONE),
            "submitted_us": pa.array(self._submitted_us[count + rows]),
            "ended_us": self._ended_us.at(count + rows).arrow,
            "level": level.arrow,
            "path_ns": pa.array(placed.path_ns[first + rows]),
            "earliest_ns": pa.array(placed.earliest_ns[first + rows]),
            "before": pa.array(np.where(before >= 0, numbers[before], -1)),
        }
        return plain(pa.table(columns), PLACES)

    def chains(self) -> Chains:
        """Find the critical paths of the campaigns of all nodes."""
        codes, ended = self._campaigns.codes, self._ended_us
        return graph.chains(
            Chained(codes, Number(ended.values * 1000, ended.known), self._before),
            self._begins_us * 1000,
            distinct(codes[len(self._known) :].astype(np.int64)),
            self._first_of,
        )

    def critical_path(self, ways: Chains, rows: pa.Table) -> pa.Table:
        """Return the rows of critical paths. `rows` are their tasks, with columns of `CHAINED`."""
        # A run of an earlier attempt was in vain.
        run_ns = number(rows["run_last_ns"]).where(~self._is_last_run_unknown[ways.node])
        place = rows.schema.get_field_index("run_last_ns")
        rows = rows.set_column(place, "run_last_ns", run_ns.arrow)
        return plain(_critical_path(rows, ways, self._campaigns, self._begins_us), CRITICAL_PATH)


def _named_in(names: pa.ChunkedArray, edges: pa.Table) -> Ints:
    """Return the rows whose name is in an edge."""
    if not len(names) or not len(edges):
        return np.empty(0, np.int64)
    wanted = pa.chunked_array([*edges["task"].chunks, *edges["after"].chunks], pa.string())
    found = pc.is_in(names, value_set=pc.unique(wanted))
    return np.flatnonzero(found.to_numpy())


def _links(known: pa.Table, nodes: pa.Table, named: Ints, edges: pa.Table) -> Links:
    """Resolve edges. Those of tasks with a known place are left out."""
    columns = ("task", "submitted_record")
    before = known.select(columns).take(pa.array(named))
    found = links(pa.concat_tables([before, nodes.select(columns)]), edges)
    is_new = found.waiting >= len(named)
    return Links(
        found.waiting[is_new], found.before[is_new], found.unknown[found.unknown >= len(named)]
    )


def _walked(known: pa.Table, nodes: pa.Table, named: Ints, is_settled: Flags) -> Nodes:
    """Return the columns of all tasks that take part in the walk."""
    count = len(named)
    is_done = number(known["is_done"]).at(named).is_true
    zeros = np.zeros(count, np.int64)
    places = KnownPlaces(
        np.arange(count),
        *(number(known[name]).at(named).filled(0) for name in ("level", "path_ns", "earliest_ns")),
    )
    return Nodes(
        state=np.append(np.where(is_done, _DONE, _CANCELLED), _state_codes(nodes["state"])),
        released_ns=np.append(zeros, _released_us(nodes) * 1000),
        duration_ns=np.append(zeros, number(nodes["run_last_ns"]).filled(0)),
        is_timed=np.append(zeros > 0, number(nodes["due"]).is_known),
        is_settled=np.append(zeros == 0, is_settled),
        known=places,
    )


def _released_us(nodes: pa.Table) -> Ints:
    """Return when each task was submitted, or when it was due if that is later."""
    submitted = number(nodes["submitted"]).values
    return np.maximum(submitted, number(nodes["due"]).filled(INT_MIN))


def _is_open_edge(edges: pa.Table, names: pa.ChunkedArray) -> Flags:
    """Return whether the waiting task of each edge has one of these names."""
    if not len(edges) or not len(names):
        return np.zeros(len(edges), bool)
    found: Flags = pc.is_in(edges["task"], value_set=pc.unique(names)).to_numpy()
    return found


def _state_codes(column: pa.ChunkedArray) -> Ints:
    states = text(column)
    places = pc.index_in(states.values, pa.array(STATE_NAMES, pa.string()))
    codes: Ints = places.to_numpy(zero_copy_only=False).astype(np.int64)[states.codes]
    return codes


def _critical_path(rows: pa.Table, ways: Chains, campaigns: Text, first_us: Ints) -> pa.Table:
    """Split the time of each task in a path. The sum over a path is the makespan."""
    is_begin = ways.position == 1
    ended_us = number(rows["ended"]).values
    started_us = np.where(is_begin, first_us[ways.campaign], np.roll(ended_us, 1))
    times = _times(rows, started_us, ended_us)
    previous = np.where(is_begin, -1, np.arange(len(rows)) - 1)
    columns = {name: rows[name] for name in rows.column_names if name in CRITICAL_PATH.names}
    columns |= {name: pa.array(values) for name, values in times.items()}
    columns |= {
        "campaign": campaigns.values.take(pa.array(ways.campaign)),
        "task_campaign": rows["campaign"],
        "position": pa.array(ways.position),
        "after": rows["task"].take(pa.array(previous, mask=previous < 0)),
        "started": Number(started_us).micros,
    }
    return pa.table({name: columns[name] for name in CRITICAL_PATH.names if name in columns})


def _times(rows: pa.Table, started_us: Ints, ended_us: Ints) -> dict[str, Ints]:
    """Return the parts of the time from the end of the task before to the end of each."""
    total_ns = np.maximum(ended_us - started_us, 0) * 1000
    ready = number(rows["ready"])
    held_ns = np.maximum(np.where(ready.is_known, ready.values, 0) - started_us, 0) * 1000
    held_ns = np.minimum(held_ns, total_ns)
    # After rounding to microseconds, the parts must not exceed the whole.
    run_ns = np.minimum(number(rows["run_last_ns"]).filled(0), total_ns - held_ns)
    wait_ns = np.minimum(number(rows["wait_ns"]).values, total_ns - held_ns - run_ns)
    rest_ns = total_ns - held_ns - wait_ns - run_ns
    # The rest of a single attempt is the wait before its start and for its report.
    is_single = number(rows["attempts"]).values == 1
    queued_ns = np.minimum(number(rows["queued_ns"]).values, rest_ns)
    queued_ns = np.where(is_single, rest_ns, queued_ns)
    return {
        "total_ns": total_ns,
        "held_ns": held_ns,
        "wait_ns": wait_ns,
        "run_ns": run_ns,
        "queued_ns": queued_ns,
        "retry_ns": rest_ns - queued_ns,
        "gain_ns": total_ns - run_ns,
    }
