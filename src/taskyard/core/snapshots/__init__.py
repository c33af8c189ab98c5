"""Snapshots of the ledger, as values. `journal.snapshot` reads and writes their files.

`columns` has the current format, `cold_ledger` makes the next snapshot of the last one and the
records since, and `old_formats` reads the formats before.
"""
