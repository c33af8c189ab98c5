"""The Spark side: sources, datasets with schemas, transforms, jobs.

Owns how campaigns are loaded and histories are read at scale. It reads what the journal exported,
and the rows after that as any reader may; it never changes a running broker's files. Nothing else
imports it: whoever runs no pipeline needs no Spark.
"""
