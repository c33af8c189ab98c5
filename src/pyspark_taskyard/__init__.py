"""Taskyard as a Spark data source: rows become tasks, and tasks and events become rows.

Spark discovers top-level modules named `pyspark_*` and asks each for its `DefaultSource`, so
`spark.read.format("taskyard")` only needs this package to be installed. It is imported for every
session that uses a Python data source, so slow imports are deferred.

    df.write.format("taskyard").option("broker", URL).option("campaign", "c").mode("append").save()
    spark.read.format("taskyard").option("state", DIR).option("table", "events").load()
    spark.readStream.format("taskyard").option("state", DIR).load()
"""

from pyspark_taskyard.source import TaskyardSource

DefaultSource = TaskyardSource

__all__ = ["DefaultSource", "TaskyardSource"]
