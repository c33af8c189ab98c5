"""Functions over linked campaigns, for what only a walk along their graph can tell.

Campaigns are linked if a task of one waits for a task of the other, directly or through others.
"""

from collections.abc import Callable, Iterable

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from taskyard.pipeline.session import is_small

#: Makes a row of each row of its first frame, in their order.
Function = Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]


def by_linked_campaigns(
    nodes: DataFrame, links: DataFrame, function: Function, schema: StructType
) -> DataFrame:
    """Apply a function to the nodes of linked campaigns and the links between them.

    In the executors; in a session for small histories here and at once, because a process takes
    longer to start.
    """
    spark = nodes.sparkSession
    if is_small(spark):
        made = function(nodes.toPandas(), links.toPandas())
        return spark.createDataFrame(made[schema.names] if len(made) else [], schema)
    groups = [group for group in linked(_pairs(links)) if len(group) > 1]
    members = [(name, group[0]) for group in groups for name in group]
    named = spark.createDataFrame(members, "campaign string, linked string")

    def grouped(frame: DataFrame) -> DataFrame:
        joined = frame.join(f.broadcast(named), on="campaign", how="left")
        return joined.withColumn("linked", f.coalesce("linked", "campaign"))

    both = grouped(nodes).groupBy("linked").cogroup(grouped(links).groupBy("linked"))
    return both.applyInPandas(function, schema=schema)


def _pairs(links: DataFrame) -> list[tuple[str, str]]:
    """Collect the campaigns between which there are links."""
    is_between = f.col("campaign") != f.col("after_campaign")
    found = links.where(is_between).select("campaign", "after_campaign").distinct()
    return [(row[0], row[1]) for row in found.collect()]


def linked(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Group names that are linked by pairs, directly or through others."""
    group_of: dict[str, list[str]] = {}
    for pair in pairs:
        one, other = sorted((group_of.setdefault(name, [name]) for name in pair), key=len)
        if one is not other:
            other += one
            group_of |= dict.fromkeys(one, other)
    return sorted({id(group): sorted(group) for group in group_of.values()}.values())
