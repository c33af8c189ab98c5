"""Analysis and loading at scale with Spark: sources, datasets, transforms and jobs.

Reads history files, and journal rows after them, as any reader may. Never changes the files of a
running broker. No other package imports it, so a plain install works without Spark.
"""
