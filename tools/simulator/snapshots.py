"""Snapshots of whole ledgers, in memory or in a state directory. The product makes them of rows."""

from __future__ import annotations

import io
from contextlib import closing
from typing import TYPE_CHECKING

from taskyard.core.snapshots.cold_ledger import ColdLedger
from taskyard.journal import snapshot
from taskyard.journal.row_file import BlockWriter
from taskyard.journal.snapshot import SnapshotFile, SnapshotReader, SnapshotWriter

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.core.ledger import Ledger
    from taskyard.core.snapshots.columns import Rest
    from taskyard.journal.chain import Head


def encode(identity: bytes, head: Head, ledger: Ledger) -> bytes:
    """Return the content of a snapshot's file, without the ended tasks of a ledger."""
    file = io.BytesIO()
    blocks = BlockWriter(file, snapshot.header(identity, head))
    writer = SnapshotWriter(blocks, head)
    blocks.end(writer.end(_add(writer, ledger)))
    return file.getvalue()


def decode(content: bytes, name: str) -> Ledger:
    """Return the ledger of a snapshot's content. `name` appears in errors."""
    return SnapshotReader(io.BytesIO(content), name).restore()


def write(directory: Path, identity: bytes, head: Head, ledger: Ledger) -> Path:
    """Write the snapshot of a ledger. Return its path."""
    with closing(SnapshotFile(directory, identity, head)) as file:
        file.finish(_add(file.writer, ledger))
    return snapshot.path_of(directory, head.sequence)


def _add(writer: SnapshotWriter, ledger: Ledger) -> Rest:
    return ColdLedger.of(ledger, writer.add_tasks).finish((), writer.add_edges)
