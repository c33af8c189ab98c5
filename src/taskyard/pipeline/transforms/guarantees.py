"""The counts that prove the guarantees, from events and edges alone.

Computed with a window and joins over the exported tables, independently of the scheduler, of the
journal's own audit, and of the fold that makes the tables. A test compares the counts. Tasks are
counted by generation.
"""

from typing import Final

import msgspec
from pyspark.sql import Column, DataFrame, Window
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

#: Columns of a name's generations that the counts need.
_GENERATION: Final = (
    *("submitted_record", "state", "is_timed", "worker", "last_record", "done_record", "leases"),
)


#: A record that no journal reaches.
_NEVER: Final = (1 << 63) - 1


def names(events: DataFrame) -> DataFrame:
    """Collect all generations of each name: one row for each `task`.

    `generations` is in the order of submission. `repeats` counts completions after the first of a
    generation, `unknown` campaigns in which the name was never submitted, and `stale` refused
    reports.
    """
    found = _generations(events)
    known = f.when(f.col("generation") > 0, f.struct(*_GENERATION))
    is_unknown = (f.col("generation") == 0) & (f.col("steps") > 0)
    return found.groupBy("task").agg(
        f.sort_array(f.collect_list(known)).alias("generations"),
        f.sum(f.greatest(f.col("finished") - 1, f.lit(0))).alias("repeats"),
        f.count_if(is_unknown).alias("unknown"),
        f.sum("stale").alias("stale"),
    )


def _generations(events: DataFrame) -> DataFrame:
    """Summarize the steps of each generation. Steps before the first submission are number 0."""
    kind, record = f.col("kind"), f.col("record")
    way = Window.partitionBy("campaign", "task").orderBy("record", kind == "ready")
    so_far = way.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    is_step, is_submission = kind != "stale", kind == "submitted"
    chosen = events.where(kind.isin(*STATES, "stale"))
    numbered = chosen.select(
        *("campaign", "task", "record", "kind", "worker", "due"),
        f.sum(is_submission.cast("long")).over(so_far).alias("generation"),
    )
    last = f.when(is_step, f.struct(record, kind == "ready"))
    return numbered.groupBy("campaign", "task", "generation").agg(
        f.max(f.when(is_submission, record)).alias("submitted_record"),
        f.max(f.col("due").isNotNull() & is_submission).alias("is_timed"),
        _state(f.max_by(kind, last)).alias("state"),
        f.max_by("worker", last).alias("worker"),
        f.max(f.when(is_step, record)).alias("last_record"),
        f.min(f.when(kind == "finished", record)).alias("done_record"),
        f.collect_list(f.when(kind == "leased", record)).alias("leases"),
        f.count_if(kind == "finished").alias("finished"),
        f.count_if(is_step).alias("steps"),
        f.count_if(~is_step).alias("stale"),
    )


def _state(kind: Column) -> Column:
    pairs = [f.lit(word) for pair in STATES.items() for word in pair]
    return f.create_map(*pairs)[kind]


def task_counts(found: DataFrame, events: DataFrame) -> DataFrame:
    """Count the tasks of all names in one row, by how they ended.

    `blocked` and `held` are newest generations: blocked without a due time, and leased to a worker
    that has left. `replaced` ones were open when their name was submitted again.
    """
    generations = f.col("generations")
    newest = f.try_element_at(generations, f.lit(-1))
    leaves = events.where(f.col("kind") == "worker_left").groupBy("worker")
    left = leaves.agg(f.max("record").alias("left_record"))
    joined = found.withColumn("worker", newest["worker"]).join(left, on="worker", how="left")
    is_held = (newest["state"] == "LEASED") & (newest["last_record"] < f.col("left_record"))

    def count(*states: str) -> Column:
        return f.sum(f.size(f.filter(generations, lambda one: one["state"].isin(*states))))

    earlier = f.slice(generations, f.lit(1), f.greatest(f.size(generations) - 1, f.lit(0)))
    replaced = f.size(f.filter(earlier, lambda one: ~one["state"].isin(*ENDED)))
    return joined.agg(
        f.sum(f.size(generations)).alias("submitted"),
        count("DONE").alias("done"),
        count("FAILED").alias("failed"),
        count("CANCELLED").alias("cancelled"),
        f.sum(replaced).alias("replaced"),
        f.count_if(_is_blocked(newest)).alias("blocked"),
        f.count_if(is_held).alias("held"),
        *(f.sum(name).alias(name) for name in ("repeats", "unknown", "stale")),
    ).select("*")


def dependency_counts(found: DataFrame, edges: DataFrame) -> DataFrame:
    """Count over all edges, in one row.

    `broken` are leases after an edge was added and before its dependency was done. `waiting` are
    newest generations that are blocked by a dependency that is not done or not known.
    """
    resolved = _links(found, edges)
    one, newest, after = f.col("waiting"), f.col("newest"), f.col("before")
    is_newest = one["submitted_record"] == newest["submitted_record"]
    done_record = f.coalesce(after["done_record"], f.lit(_NEVER))
    too_early = f.filter(
        one["leases"], lambda leased: (leased > f.col("record")) & (leased < done_record)
    )
    is_done = after["state"].eqNullSafe("DONE")
    is_waiting = is_newest & _is_blocked(newest) & ~is_done
    return resolved.agg(
        f.coalesce(f.sum(f.size(too_early)), f.lit(0)).alias("broken"),
        f.count_distinct(f.when(is_waiting, f.col("task"))).alias("waiting"),
    ).select("*")


def _is_blocked(generation: Column) -> Column:
    """Return whether a generation is blocked by dependencies. With a due time it may be delayed."""
    return (generation["state"] == "BLOCKED") & ~generation["is_timed"]


def counted(row: dict[str, int | None], blocked_behind_failure: int) -> Guarantees:
    """Return the guarantees from the rows of `task_counts` and `dependency_counts` as one.

    Tasks blocked by a failure can only be found by a walk along the edges, so the caller gives
    their number.
    """
    count = {name: value or 0 for name, value in row.items()}
    ended = count["done"] + count["failed"] + count["cancelled"]
    lost = count["replaced"] + count["held"] + count["blocked"] - count["waiting"]
    return Guarantees(
        submitted=count["submitted"],
        done=count["done"],
        failed=count["failed"],
        cancelled=count["cancelled"],
        blocked_behind_failure=blocked_behind_failure,
        unfinished=count["submitted"] - ended - lost - blocked_behind_failure,
        lost=lost,
        completed_twice=count["repeats"],
        dependencies_broken=count["broken"],
        unknown=count["unknown"],
        stale_refused=count["stale"],
    )


def _links(names: DataFrame, edges: DataFrame) -> DataFrame:
    """Resolve both ends of each edge to generations: `waiting`, and `before`, null if unknown.

    Edges connect names, and a name can be submitted again. Both ends resolve to the newest
    generation when the edge was added. If a name was only submitted later, its first one counts.

    `names` has the `generations` of each `task`, in order of `submitted_record`. `newest` is the
    newest generation of the waiting name. Edges of names that were never submitted are left out.
    """
    waiting = names.select("task", f.col("generations").alias("every"))
    before = names.select(f.col("task").alias("after"), f.col("generations").alias("before"))
    both = edges.select("task", "after", "record").join(waiting, on="task", how="inner")
    return both.join(before, on="after", how="left").select(
        "task",
        "record",
        _as_of_record("every").alias("waiting"),
        f.try_element_at("every", f.lit(-1)).alias("newest"),
        _as_of_record("before").alias("before"),
    )


def _as_of_record(name: str) -> Column:
    """Return the generation that a name had at a record, or its first one, or null."""
    every = f.col(name)
    so_far = f.filter(every, lambda one: one["submitted_record"] <= f.col("record"))
    return f.coalesce(f.try_element_at(so_far, f.lit(-1)), f.try_element_at(every, f.lit(1)))
