"""Functions over one campaign at a time, for what only a walk along its graph can tell."""

from collections.abc import Callable

import pandas as pd
from pyspark.sql import DataFrame

from taskyard.pipeline.small import is_small

Function = Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]


def by_campaign(frame: DataFrame, others: DataFrame, function: Function, schema: str) -> DataFrame:
    """What a function makes of the rows that two frames have of each campaign of the first; in the
    executors, or here in a session for small histories: a process takes longer to start."""
    if is_small(frame.sparkSession):
        return _here(frame, others, function, schema)
    pairs = frame.groupBy("campaign").cogroup(others.groupBy("campaign"))
    return pairs.applyInPandas(function, schema=schema)


def _here(frame: DataFrame, others: DataFrame, function: Function, schema: str) -> DataFrame:
    rows, other_rows = frame.toPandas(), others.toPandas()
    by_name = dict(iter(other_rows.groupby("campaign", sort=False)))
    none = other_rows.iloc[:0]
    made = [
        function(group.reset_index(drop=True), by_name.get(name, none).reset_index(drop=True))
        for name, group in rows.groupby("campaign", sort=False)
    ]
    spark = frame.sparkSession
    return (
        spark.createDataFrame(pd.concat(made), schema)
        if made
        else spark.createDataFrame([], schema)
    )
