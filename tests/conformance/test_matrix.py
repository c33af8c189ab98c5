"""The matrix as a test; `python -m tests.conformance.matrix` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance import matrix
from tests.conformance.yard import CLIENTS, WORKERS

if TYPE_CHECKING:
    from pathlib import Path

#: Enough tasks to keep every peer busy at the kill.
TASKS = 60


def test_every_client_works_with_every_worker_while_the_broker_is_killed(tmp_path: Path) -> None:
    done = matrix.run(tmp_path, TASKS)
    cells = done.cells
    assert cells.keys() == {(client, worker) for client in CLIENTS for worker in WORKERS}
    assert {place: cell for place, cell in cells.items() if not cell.is_good} == {}
    assert done.tally.is_clean
    assert done.tally.unfinished == done.tally.failed == 0
