"""A ledger restored from its snapshot, as in a broker."""

from simulator import snapshots
from taskyard.core.entities import Task
from taskyard.core.ledger import Ledger
from taskyard.journal.chain import Head

IDENTITY = bytes(16)


def reopened(ledger: Ledger) -> Ledger:
    """Return the ledger that a snapshot of this one restores, with the ended tasks added to it."""
    restored = snapshots.decode(encoded(ledger), "test.snapshot")
    for task in ledger.tasks.values():
        if task.ending is not None:
            lane = restored.service(task.terms.service).lane(task.lane.name)
            ended = Task(task.name, task.payload, task.terms, lane, task.state)
            ended.attempt, ended.extras, ended.lease_or_ending = (
                task.attempt,
                task.extras,
                task.ending,
            )
            restored.tasks[task.name] = ended
    tasks = {name: restored.tasks[name] for name in ledger.tasks}
    restored.tasks.clear()
    restored.tasks.update(tasks)
    return restored


def encoded(ledger: Ledger) -> bytes:
    """Return the content of a snapshot file."""
    return snapshots.encode(IDENTITY, Head(1, ledger.record, bytes(32)), ledger)
