# ruff: noqa: INP001  # Spark runs it by its path
"""Files of an inbox become tasks, and the results of all tasks a table.

Every run submits the lines of new files, each once, and computes the table again. INBOX_FILES is a
directory of JSON lines such as {"argv": ["echo", "hello"]}, INBOX_BROKER the broker's endpoint,
and INBOX_STATE its state directory.
"""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

BROKER, FILES, STATE = (os.environ[f"INBOX_{name}"] for name in ("BROKER", "FILES", "STATE"))

spark = SparkSession.active()

dp.create_sink("tasks", "taskyard", {"broker": BROKER, "campaign": "inbox"})


@dp.append_flow(target="tasks")
def submissions() -> DataFrame:
    return spark.readStream.schema("argv array<string>").json(FILES)


@dp.materialized_view
def outcomes() -> DataFrame:
    ended = spark.read.format("taskyard").options(state=STATE, table="results").load()
    return ended.groupBy("campaign", "state").count()
