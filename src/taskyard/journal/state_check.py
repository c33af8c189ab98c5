"""Check a whole state directory: journal, snapshots, history, index, and their consistency.

Implements `taskyard journal check`. It writes nothing, so a full or read-only disk will do, and
continues after damage as far as possible. A plain check verifies chain and witness, reads every
snapshot, opens every history file and compares the index with the journal. A deep check also
replays the kept rows, compares the newest snapshot with the replay, and reads every row of every
file. Ledgers are compared by their fingerprint: the durable state as plain values, without indexes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from taskyard.errors import JournalDamaged, StateError, UnusableState
from taskyard.journal import (
    archive,
    history,
    recovery,
    schema,
    snapshot,
    sqlite,
    state_store,
    witness,
)
from taskyard.journal.archive import Archive
from taskyard.journal.schema import Connect
from taskyard.journal.sqlite import JournalReader, JournalReport, connect_readonly
from taskyard.journal.store import StoreReader

if TYPE_CHECKING:
    from taskyard.core.entities import Task
    from taskyard.core.ledger import Ledger


def ledger_fingerprint(ledger: Ledger, *, ended: bool = True) -> dict[str, Any]:
    """Return all durable state that a ledger's behaviour depends on, as plain values. Ended tasks
    may be left out, because the archive may hold them instead."""
    tasks = sorted(task.name for task in ledger.tasks.values() if ended or task.ending is None)
    awaited, attempts = ledger.awaited.tasks, ledger.failed_attempts
    return {
        "record": ledger.record,
        "paused": ledger.paused,
        "counts": list(ledger.counts),
        "campaigns": {one.name: list(one.counts) for one in ledger.campaigns.values()},
        "truncated": {one.name: one.truncated for one in ledger.campaigns.values()},
        "restarted": {one.name: one.restarted for one in ledger.campaigns.values()},
        "services": {
            one.name: (one.paused, one.has_wide_tasks, list(one.counts))
            for one in ledger.services.values()
        },
        "workers": {one.name: (one.facts, list(one.slots_kept)) for one in ledger.workers.values()},
        "tasks": {name: _task_fingerprint(ledger.tasks[name]) for name in tasks},
        "leases": {
            lease.number: (lease.worker.name, lease.at_ns, lease.lease_ns, lease.tasks_left)
            for worker in ledger.workers.values()
            for lease in worker.leases.values()
        },
        "queues": {
            (lane.service.name, lane.name): _names(lane.in_order())
            for service in ledger.services.values()
            for lane in service.lanes.values()
            if lane.ready
        },
        "runs": {
            (lane.service.name, lane.name): (len(lane.extras.next_run), lane.extras.run_left)
            for service in ledger.services.values()
            for lane in service.lanes.values()
            if lane.extras is not None and lane.extras.next_run
        },
        "released": {
            (lane.service.name, lane.name): lane.released
            for service in ledger.services.values()
            for lane in service.lanes.values()
            if lane.released
        },
        "reported": sorted(ledger.reported),
        "replaced": list(ledger.replaced.items()),
        "numbered": [(one.campaign, one.path, one.parts) for one in ledger.numbered.values()],
        "awaited": {
            name: waiting for name, some in sorted(awaited.items()) if (waiting := _names(some))
        },
        "reasons": dict(ledger.reasons),
        "envelopes": dict(ledger.envelopes),
        "outputs": {name: ledger.outputs[name] for name in tasks if name in ledger.outputs},
        "tries": {name: list(attempts[name]) for name in tasks if name in attempts},
    }


def _task_fingerprint(task: Task) -> tuple[Any, ...]:
    ending = None if task.ending is None else (task.ending.record, task.ending.at_ns)
    return (
        task.payload,
        task.terms,
        task.lane.name,
        task.state,
        0 if task.ending else task.waits,
        [] if task.ending else _names(task.dependents_list()),
        ending,
        task.attempt,
        task.failures,
        task.losses_excused,
        task.due_ns,
    )


def _names(tasks: list[Task]) -> list[bytes]:
    return [task.name for task in tasks if task.ending is None]


#: Files of a state directory that has, or had, a journal.
_JOURNAL_FILES = (
    schema.FILE_NAME,
    schema.LOG_NAME,
    witness.FILE_NAME,
    snapshot.FOLDER,
    history.FOLDER,
    archive.FILE_NAME,
    schema.DATABASE_NAME,
)


class StateReport(msgspec.Struct):
    """The content of a state directory and its damage."""

    #: The first and the last kept row, 0 if there are none.
    row_first: int = 0
    row_last: int = 0
    rows: int = 0
    #: The newest record.
    record: int = 0
    #: The last trimmed row.
    trimmed: int = 0
    #: Rows of the snapshots, newest first.
    snapshots: list[int] = []
    #: Tasks in the newest sound snapshot.
    snapshot_tasks: int = 0
    #: History files, their rows and events.
    history_files: int = 0
    history_first: int = 0
    history_last: int = 0
    events: int = 0
    #: Tasks in the index of ended tasks, and the last row that it covers.
    finished_tasks: int = 0
    finished_covers: int = 0
    #: Everything was read and replayed.
    deep: bool = False
    #: Each problem and its consequence, as sentences. Empty if there is no damage.
    wrong: list[str] = []
    lost: list[str] = []

    def note(self, error: StateError) -> None:
        """Add an error, unless it was added before."""
        wrong, lost = getattr(error, "wrong", str(error)), getattr(error, "lost", "")
        if wrong not in self.wrong:
            self.wrong.append(wrong)
            if lost:
                self.lost.append(lost)


def has_journal(directory: Path) -> bool:
    """Return whether the directory has, or had, a journal."""
    return any((directory / name).exists() for name in _JOURNAL_FILES)


def require_state(directory: Path) -> None:
    """Raise UnusableState unless the directory has, or had, a journal."""
    if not directory.is_dir() or not has_journal(directory):
        raise UnusableState(
            f"{directory}: not a state directory, it has no journal (use --state DIR, the broker's)"
        )


def check(directory: Path, *, deep: bool = False, live: bool = False) -> StateReport:
    """Check a state directory that no process writes to, or, `live`, beside its broker.

    That may change files meanwhile, which looks like damage. A journal in PostgreSQL is copied.
    """
    findings = StateReport(deep=deep)
    try:
        with state_store.in_sqlite(directory) as readable:
            is_live = live and readable == directory
            _check(readable, schema.connect_reader if is_live else connect_readonly, findings)
    except JournalDamaged as error:
        findings.note(error)
    return findings


def _check(directory: Path, connect: Connect, findings: StateReport) -> None:
    report = sqlite.verify_journal(directory, connect)
    _add_journal_report(findings, report)
    _check_snapshots(directory, report, findings)
    _check_history(directory, report, findings)
    with Archive(directory, connect) as index:
        with _noted(findings):
            covered = index.covered()
            findings.finished_tasks = index.verify() if findings.deep else index.count()
            findings.finished_covers = covered[1].sequence if covered else 0
        if report.head and not report.wrong:
            with (
                _noted(findings),
                JournalReader(directory, report.identity, report.head, connect) as store,
            ):
                _check_tasks_runnable(
                    directory, store, recovery.check_index(index, store), findings
                )


@contextmanager
def _noted(findings: StateReport) -> Iterator[None]:
    """Add an error to the findings, and go on."""
    try:
        yield
    except StateError as error:
        findings.note(error)


def _add_journal_report(findings: StateReport, report: JournalReport) -> None:
    findings.rows = report.rows
    if report.head and report.anchor:
        findings.record, findings.trimmed = report.head.record, report.anchor.sequence
        if report.rows:
            findings.row_first, findings.row_last = findings.trimmed + 1, report.head.sequence
    findings.wrong += report.wrong
    findings.lost += report.lost


def _check_snapshots(directory: Path, report: JournalReport, findings: StateReport) -> None:
    findings.snapshots = snapshot.sequences(directory)
    for sequence in reversed(findings.snapshots):
        with _noted(findings), snapshot.read(directory, sequence) as found:
            found.verify()
            findings.snapshot_tasks = found.rest.tasks
    newest = max(findings.snapshots, default=0)
    head = report.head
    if head and not report.wrong and newest > head.sequence:
        findings.wrong.append(f"the journal ends at row {head.sequence}, a snapshot is of {newest}")
        findings.lost.append(f"rows {head.sequence + 1}..{newest} are lost")


def _check_history(directory: Path, report: JournalReport, findings: StateReport) -> None:
    whole = history.parts(directory)
    findings.history_files = len(whole)
    if whole:
        findings.history_first, findings.history_last = whole[0].first, whole[-1].last
    # The rows of a damaged journal may be missing.
    trimmed = None if report.wrong else findings.trimmed
    for part in whole:
        only_here = part.last if trimmed is None else trimmed
        with _noted(findings):
            findings.events += history.check_part(directory, part, only_here, deep=findings.deep)
    head = report.head.sequence if report.head else 0
    for problem in history.problems(whole, trimmed, head):
        findings.note(problem)
    for loss in history.losses(whole, findings.trimmed):
        findings.note(loss)


def _check_tasks_runnable(
    directory: Path, store: StoreReader, covered: int, findings: StateReport
) -> None:
    """Check that the parts are consistent, as a broker does."""
    ledger, sequence = recovery.recovery_base(directory, store, covered)
    if findings.deep:
        recovery.recover(store, ledger, sequence)
        _compare_with_replay(directory, store, covered, findings)


def _compare_with_replay(
    directory: Path, store: StoreReader, covered: int, findings: StateReport
) -> None:
    """Compare the newest snapshot with a replay from the next older snapshot.

    During a trim the rows between them may be gone, and nothing is compared.
    """
    ledger, sequence = recovery.recovery_base(directory, store, covered)
    trimmed = store.anchor.sequence
    older = [one for one in snapshot.sequences(directory) if trimmed <= one < sequence]
    if sequence <= trimmed or (trimmed and not older):
        return
    head = recovery.head_at(store, sequence)
    replayed, before = recovery.recovery_base(directory, store, sequence - 1)
    for row in store.rows(before):
        if row.sequence <= sequence:
            recovery.apply_row(replayed, row)
    replayed.archive(recovery.archivable(replayed, head.record))
    if ledger_fingerprint(replayed) != ledger_fingerprint(ledger):
        findings.wrong.append(f"the snapshot of row {sequence} differs from a replay of its rows")
        findings.lost.append("nothing while the rows are kept; please report this")
