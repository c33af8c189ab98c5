"""From the journal back to a ledger: `apply` over every record, nothing else."""

from taskyard.core.apply import apply
from taskyard.core.ledger import Ledger
from taskyard.errors import JournalDamaged
from taskyard.journal.encoding import decode
from taskyard.journal.store import Store


def recover(store: Store, ledger: Ledger | None = None, after: int = 0) -> Ledger:
    """The ledger as of the newest row, from a snapshot's ledger or an empty one."""
    ledger = Ledger() if ledger is None else ledger
    for row in store.rows(after):
        if row.record_first != ledger.record + 1:
            raise JournalDamaged(
                f"row {row.sequence} begins with record {row.record_first}",
                f"records {ledger.record + 1} to {row.record_first - 1} are missing",
            )
        for record in decode(row.body):
            apply(ledger, record)
        if ledger.record != row.record_last:
            raise JournalDamaged(
                f"row {row.sequence} should end with record {row.record_last}, "
                f"and ends with {ledger.record}"
            )
    return ledger
