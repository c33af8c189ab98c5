"""The journal: encode records, store them durably, read them back verified.

Owns the state directory, its lock, the stores, snapshots, recovery, compaction and history. It
depends on the records of the core, never on the scheduler's decisions, and opens no sockets.
"""
