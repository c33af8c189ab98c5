"""HTML pages with charts: the report of a history, and that of a sweep.

Owns the look of a page (`page`), text (`format`, `headline`) and charts (`figures`, `charts`).
Charts show aggregates of at most a few thousand points, so the page of any campaign opens at once.
Nothing here uses Spark or reads files.
"""
