"""Taskyard as a data source of Spark: rows become tasks, and what became of them becomes rows.

Spark finds top-level modules named `pyspark_*` by itself and asks each for its `DefaultSource`, so
`spark.read.format("taskyard")` needs no more than that this is installed. It is imported for every
session that uses any data source in Python: what takes long is imported where it is needed.

    df.write.format("taskyard").option("broker", URL).option("campaign", "c").mode("append").save()
    spark.read.format("taskyard").option("state", DIR).option("table", "events").load()
    spark.readStream.format("taskyard").option("state", DIR).load()
"""

from pyspark_taskyard.source import TaskyardSource

DefaultSource = TaskyardSource

__all__ = ["DefaultSource", "TaskyardSource"]
