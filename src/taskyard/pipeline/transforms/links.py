"""Edges resolved to tasks.

Edges connect names, and a name can be submitted again. Both ends of an edge resolve to the newest
generation of the name when the edge was added. If the name was only submitted later, its first
generation counts. The two ends may be of different campaigns.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f


def links(names: DataFrame, edges: DataFrame) -> DataFrame:
    """Resolve both ends of each edge to generations: `waiting`, and `before`, null if unknown.

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
