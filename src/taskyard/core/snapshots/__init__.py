"""Snapshots of the ledger, as values. `journal.snapshot` reads and writes their files.

`columns` has the format, and rebuilds a ledger from it. `cold_ledger` makes the
next snapshot from the last snapshot and the records since.
"""
