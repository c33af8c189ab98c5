"""A ledger restored from its snapshot, as in a broker."""

from taskyard.core.ledger import Ledger
from taskyard.journal import snapshot
from taskyard.journal.chain import Head

IDENTITY = bytes(16)


def reopened(ledger: Ledger) -> Ledger:
    """Return the ledger that a snapshot of this one restores."""
    return snapshot.decode(encoded(ledger), "test.snapshot")


def encoded(ledger: Ledger) -> bytes:
    """Return the content of a snapshot file."""
    return snapshot.encode(IDENTITY, Head(1, ledger.record, bytes(32)), ledger)
