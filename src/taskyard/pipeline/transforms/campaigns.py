"""Functions over one campaign at a time, for what only a walk along its graph can tell."""

from collections.abc import Callable

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from taskyard.pipeline.small import is_small

#: Makes a row of each row of its first frame, in their order.
Function = Callable[[pd.DataFrame, pd.DataFrame], pd.DataFrame]


def by_campaign(
    frame: DataFrame, others: DataFrame, function: Function, schema: StructType
) -> DataFrame:
    """What a function makes of the rows that two frames have of each campaign of the first; in the
    executors, or here in a session for small histories: a process takes longer to start."""
    if is_small(frame.sparkSession):
        made = each_campaign(frame.toPandas(), others.toPandas(), function)
        return frame.sparkSession.createDataFrame(made[schema.names] if len(made) else [], schema)
    pairs = frame.groupBy("campaign").cogroup(others.groupBy("campaign"))
    return pairs.applyInPandas(function, schema=schema)


def each_campaign(rows: pd.DataFrame, others: pd.DataFrame, function: Function) -> pd.DataFrame:
    """The same of rows that are here already, row by row."""
    by_name = dict(iter(others.groupby("campaign", sort=False)))
    none = others.iloc[:0]
    made = [
        function(
            group.reset_index(drop=True), by_name.get(name, none).reset_index(drop=True)
        ).set_axis(group.index)
        for name, group in rows.groupby("campaign", sort=False)
    ]
    return pd.concat(made).sort_index() if made else rows.iloc[:0]
