"""The history of a schedule: its events and edges as a broker exports them, and its last ledger.

Every row of the simulated journal is applied to a ledger of its own, so nothing here depends on the
broker that wrote it. Tests of the data pipeline process these histories and compare with the
ledger.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from msgspec import Struct

from simulator.schedule import run
from taskyard.core.ledger import Ledger
from taskyard.journal import history_arrow, history_rows, recovery
from taskyard.journal.row_file import RowFileWriter

if TYPE_CHECKING:
    import pyarrow as pa

    from taskyard.journal.chain import Row


class History(Struct):
    """Events and edges in the order of the journal, and the ledger after them."""

    events: pa.Table
    edges: pa.Table
    ledger: Ledger


def history(seed: int) -> History:
    """Run the schedule of a seed, and return the history of its journal."""
    rows: list[Row] = []
    run(seed, invariants=False, on_row=rows.append)
    return history_of(rows)


def history_of(rows: list[Row]) -> History:
    """Return the history of a journal's rows."""
    ledger = Ledger()
    with TemporaryDirectory(prefix="taskyard-simulated-") as directory:
        path = Path(directory) / "rows"
        writer = RowFileWriter(path)
        for row in rows:
            for record in recovery.records_of(row, ledger.record):
                history_rows.write_rows(ledger, row.sequence, record, writer.events, writer.edges)
        writer.finish(path, 1, rows[-1].sequence)
        events, edges = (history_arrow.read_table([path], name) for name in ("events", "edges"))
    return History(events, edges, ledger)
