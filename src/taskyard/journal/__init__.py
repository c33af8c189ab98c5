"""The durable story: records to bytes to disk and back, verified.

Owns the state directory, its lock, the stores, snapshots, recovery, and the export to Parquet. It
knows what a record is, not why the scheduler decided on it, and it has no sockets.
"""
