"""The counts that prove the guarantees, from events and edges alone.

Computed with windows over the exported tables, independently of the scheduler, of the journal's own
audit, and of the fold that makes the tables. A test compares the counts. Tasks are counted by
generation: a name can be submitted again.

Edges connect names. Both ends of an edge are the newest generations when the edge was added. If a
name was only submitted later, its first generation counts. So an edge is a row among the events of
the name it waits for, and finds its generation by the order of records. Then it is a row among the
generations of the waiting name. No row holds all edges of a name, which can be millions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

from taskyard.pipeline.fold.steps import ENDED, STATES


class Guarantees(msgspec.Struct, frozen=True):
    """Counts of tasks by how they ended, and of violations, which must be 0."""

    submitted: int
    done: int
    failed: int
    cancelled: int
    #: Blocked by a failed task, with nothing before them that can still run.
    blocked_behind_failure: int
    #: Can still end.
    unfinished: int
    #: Can never end: replaced while open, blocked by nothing, or leased to a worker that has left.
    lost: int
    completed_twice: int
    #: Leases before a dependency was done, counted by pairs.
    dependencies_broken: int
    #: Tasks with events but no submission. 0 unless older files are missing.
    unknown: int
    #: Reports on expired leases. Refusing them is correct.
    stale_refused: int

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.completed_twice or self.dependencies_broken or self.unknown)


#: The counts of a history without tasks.
NO_TASKS: Final = Guarantees(*(0 for _ in msgspec.structs.fields(Guarantees)))


#: The kind of a row that is an edge.
_EDGE: Final = "edge"

#: Kinds after which a task is blocked.
_BLOCKING: Final = tuple(kind for kind, state in STATES.items() if state == "BLOCKED")

#: What `counts` tells of a row.
_KEYS: Final = ("kind", "last_kind", "is_newest", "is_stuck", "is_repeat", "is_unknown")


def counts(events: DataFrame, edges: DataFrame) -> DataFrame:
    """Count submissions, edges, refused reports and violations, in a few rows.

    Each row has a number of `rows` with the same values of:

    - `kind`: that of the event, or `edge`.
    - `last_kind`: the last step of the generation. For an edge, of the generation it waits for.
    - `is_newest`: the generation is the newest one of its name.
    - `is_stuck`: it is the newest one, without a due time, and blocked by nothing.
    - `is_repeat`: the event is a completion after the first of its generation.
    - `is_unknown`: the event is the last step of a name before any submission.

    `broken` counts leases after an edge was added and before its dependency was done.
    """
    return _by_waiting_name(_by_generation(_rows(events, edges)))


def _rows(events: DataFrame, edges: DataFrame) -> DataFrame:
    """Unite the events of tasks and the edges. An edge is a row of the `task` it waits for.

    `name` is the waiting task of an edge, and the task of an event.
    """
    kind, task = f.col("kind"), f.col("task")
    is_timed = f.col("due").isNotNull()
    of_tasks = events.where(kind.isin(*STATES, "stale")).select(
        "task", "record", "kind", is_timed.alias("is_timed"), task.alias("name")
    )
    of_edges = edges.select(
        f.col("after").alias("task"),
        "record",
        f.lit(_EDGE).alias("kind"),
        f.lit(False).alias("is_timed"),  # noqa: FBT003  # a column
        task.alias("name"),
    )
    return of_tasks.unionByName(of_edges)


def _by_generation(rows: DataFrame) -> DataFrame:
    """Find the generation of each row. Keep submissions, edges, refused reports and violations.

    `at_record` is the place of a row among those of its `name`. A generation stands at its
    submission, and the first one before all edges. `leases` are those of a generation, and null
    for other rows.
    """
    kind, record, last = f.col("kind"), f.col("record"), f.col("last")
    in_order = Window.partitionBy("task").orderBy("record")
    every = in_order.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    submission = f.when(kind == "submitted", record)
    # Null: before the first submission.
    so_far, first = f.max(submission).over(in_order), f.min(submission).over(every)
    # Of the same record, `ready` is the last event.
    step = f.struct(record, (kind == "ready").alias("is_ready"), kind)
    placed = rows.select(
        *("name", "task", "record", "kind", "is_timed"),
        f.when(kind == _EDGE, f.coalesce(so_far, first, f.lit(0)))
        .otherwise(so_far)
        .alias("generation"),
        first.alias("first"),
        f.max(submission).over(every).alias("newest"),
        f.when(kind.isin(*STATES), step).alias("step"),
    )
    own = Window.partitionBy("task", "generation")
    known = placed.select(
        *("name", "record", "kind", "is_timed", "generation", "first", "newest", "step"),
        f.max("step").over(own).alias("last"),
        f.min(f.when(kind == "finished", record)).over(own).alias("done_record"),
        f.collect_list(f.when(kind == "leased", record)).over(own).alias("leases"),
    )
    generation = f.col("generation")
    is_newest = generation == f.col("newest")
    is_repeat = (kind == "finished") & (record > f.col("done_record"))
    is_unknown = generation.isNull() & (f.col("step") == last)
    is_kept = kind.isin("submitted", "stale", _EDGE) | is_repeat | is_unknown
    is_blocked = is_newest & last["kind"].isin(*_BLOCKING) & ~f.col("is_timed")
    is_first = (kind == "submitted") & (generation == f.col("first"))
    return known.where(is_kept).select(
        *("name", "kind", "record", "done_record"),
        f.when(is_first, f.lit(0)).otherwise(record).alias("at_record"),
        f.when(kind == "submitted", f.col("leases")).alias("leases"),
        last["kind"].alias("last_kind"),
        is_newest.alias("is_newest"),
        is_blocked.alias("is_blocked"),
        is_repeat.alias("is_repeat"),
        is_unknown.alias("is_unknown"),
    )


def _by_waiting_name(rows: DataFrame) -> DataFrame:
    """Find the waiting generation of each edge, and count."""
    record, is_edge = f.col("record"), f.col("kind") == _EDGE
    in_order = Window.partitionBy("name").orderBy("at_record")
    every = in_order.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    is_pending = is_edge & ~f.col("last_kind").eqNullSafe("finished")
    resolved = rows.select(
        *("kind", "last_kind", "is_newest", "is_blocked", "is_repeat", "is_unknown"),
        *("record", "done_record", "at_record"),
        f.last("leases", ignorenulls=True).over(in_order).alias("leases"),
        f.max(f.when(is_pending, record)).over(every).alias("pending_record"),
    )
    # Edges of the newest generation are those after its submission.
    is_waiting = f.coalesce(f.col("pending_record") >= f.col("at_record"), f.lit(False))  # noqa: FBT003
    done_record = f.col("done_record")
    too_early = f.filter(
        "leases",
        lambda leased: (leased > record) & (done_record.isNull() | (leased < done_record)),
    )
    return (
        resolved.select(
            *("kind", "last_kind", "is_newest", "is_repeat", "is_unknown"),
            (f.col("is_blocked") & ~is_waiting).alias("is_stuck"),
            f.when(is_edge, f.size(too_early)).alias("broken"),
        )
        .groupBy(*_KEYS)
        .agg(f.count("kind").alias("rows"), f.sum("broken").alias("broken"))
    )


def left_leases(events: DataFrame) -> DataFrame:
    """Find the names whose newest task is leased to a worker that has left."""
    kind, record = f.col("kind"), f.col("record")
    step = f.struct(record, (kind == "ready").alias("is_ready"), kind, f.col("worker"))
    names = events.where(kind.isin(*STATES)).groupBy("task")
    lasts = names.agg(f.max(step).alias("last"), f.max(kind == "submitted").alias("is_known"))
    last = f.col("last")
    leases = lasts.where(f.col("is_known") & (last["kind"] == "leased")).select(
        "task", last["worker"].alias("worker"), last["record"].alias("leased_record")
    )
    leaves = events.where(kind == "worker_left").groupBy("worker")
    left = leaves.agg(f.max("record").alias("left_record"))
    held = leases.join(left, on="worker", how="inner")
    return held.where(f.col("leased_record") < f.col("left_record")).select("task")


class Counts:
    """The rows of `counts`."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._rows = [*rows]
        self._tasks = [row for row in self._rows if row["kind"] == "submitted"]

    def newest(self, kind: str) -> int:
        """Return the number of newest generations with a last step of this kind."""
        return sum(
            row["rows"] for row in self._tasks if row["is_newest"] and row["last_kind"] == kind
        )

    def guarantees(self, *, left: int, blocked_behind_failure: int) -> Guarantees:
        """Add the rows up.

        The caller gives the tasks that are leased to workers that have left. It also gives those
        blocked by a failure, which can only be found by a walk along the edges.
        """
        states: Counter[str] = Counter()
        lost = left
        for row in self._tasks:
            state = STATES[row["last_kind"]]
            states[state] += row["rows"]
            if row["is_stuck"] or not (row["is_newest"] or state in ENDED):
                lost += row["rows"]
        submitted = states.total()
        ended = sum(states[state] for state in ENDED)
        return Guarantees(
            submitted=submitted,
            done=states["DONE"],
            failed=states["FAILED"],
            cancelled=states["CANCELLED"],
            blocked_behind_failure=blocked_behind_failure,
            unfinished=submitted - ended - lost - blocked_behind_failure,
            lost=lost,
            completed_twice=self._sum("is_repeat"),
            dependencies_broken=sum(row["broken"] or 0 for row in self._rows),
            unknown=self._sum("is_unknown"),
            stale_refused=sum(row["rows"] for row in self._rows if row["kind"] == "stale"),
        )

    def _sum(self, flag: str) -> int:
        return sum(row["rows"] for row in self._rows if row[flag])
