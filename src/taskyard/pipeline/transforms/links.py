"""Edges resolved to tasks, and the campaigns that they connect.

Edges connect names, and a name can be submitted again. Both ends of an edge resolve to the newest
generation of the name when the edge was added. If the name was only submitted later, its first
generation counts. The two ends may be of different campaigns.
"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f


def links(tasks: DataFrame, edges: DataFrame) -> DataFrame:
    """Resolve both ends of each edge to campaign, task and generation.

    `task` waits for `after`. A name that was never submitted has a null campaign and generation.
    """
    known = tasks.select(
        f.col("task").alias("name"),
        f.col("submitted_record").alias("record"),
        "campaign",
        "generation",
    )
    waiting = _placed(known, edges.select("task", "after", "record"), "task", "")
    both = _placed(known, waiting, "after", "after_")
    return both.select(
        "campaign",
        "task",
        "generation",
        "record",
        "after_campaign",
        "after",
        "after_generation",
    )


def _placed(known: DataFrame, edges: DataFrame, end: str, prefix: str) -> DataFrame:
    """Add campaign and generation of the task at one end of each edge."""
    way = Window.partitionBy("name").orderBy("record", "is_edge")
    so_far = way.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    from_now = way.rowsBetween(Window.currentRow, Window.unboundedFollowing)
    added = edges.withColumns({"name": f.col(end), "is_edge": f.lit(1)})
    submitted = known.withColumnsRenamed(
        {"campaign": f"{prefix}campaign", "generation": f"{prefix}generation"}
    ).withColumn("is_edge", f.lit(0))
    walk = submitted.unionByName(added, allowMissingColumns=True)
    newest = {
        column: f.coalesce(
            f.last(column, ignorenulls=True).over(so_far),
            f.first(column, ignorenulls=True).over(from_now),
        )
        for column in (f"{prefix}campaign", f"{prefix}generation")
    }
    return walk.withColumns(newest).where(f.col("is_edge") == 1).drop("name", "is_edge")


def linked_campaigns(both_ends: DataFrame) -> DataFrame:
    """Find the pairs of campaigns that have an edge between them.

    `both_ends` has the campaigns of both ends of an edge: `campaign` and `after_campaign`.
    """
    is_between = f.col("campaign") != f.col("after_campaign")
    return both_ends.where(is_between).select("campaign", "after_campaign").distinct()


def edges_by_name(edges: DataFrame, events: DataFrame) -> DataFrame:
    """Pair the campaign of each edge with every campaign that has submitted the other end's name.

    Much cheaper than `links`. A name that several campaigns use counts for all of them.
    """
    submitted = events.where(f.col("kind") == "submitted").select(
        f.col("campaign").alias("after_campaign"), f.col("task").alias("after")
    )
    both = edges.distinct().join(submitted.distinct(), on="after", how="inner")
    return both.select("campaign", "after_campaign")
