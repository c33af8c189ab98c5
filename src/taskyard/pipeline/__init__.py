"""The Spark side: sources, datasets with schemas, transforms, jobs.

Owns how campaigns are loaded and histories are read at scale. It reads what the journal exported
and never touches a running broker's files.
"""
