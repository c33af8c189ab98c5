"""Write the golden files of the formats of this version, part of every format change.

    python -m tests.journal.make_golden

Writes missing files and never changes existing ones: a golden file stands for all the state
directories that were written in its time, and must stay readable forever. Only `LATEST` is
rewritten: records as this version writes them, with the fields that were added at their ends since
the format began.
"""

import pprint
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from taskyard.core.apply import apply
from taskyard.core.fingerprint import ledger_fingerprint
from taskyard.core.ledger import Ledger
from taskyard.core.model import EndedTask, Result, Submission, Terms, TermsChanges, WorkerFacts
from taskyard.core.records import (
    AnyRecord,
    CameDue,
    Cancelled,
    Edited,
    Extended,
    Failed,
    Finished,
    Leased,
    LeaseExpired,
    Moved,
    Paused,
    Postponed,
    Progressed,
    Refunded,
    Released,
    ReportedLate,
    Resumed,
    Retried,
    Returned,
    ReturnReason,
    SlotsFreed,
    StaleReport,
    Submitted,
    TaskExpired,
    WorkerJoined,
    WorkerLeft,
    WorkerReplaced,
)
from taskyard.core.runs import RunColumns
from taskyard.core.states import TaskState
from taskyard.journal import archive, compaction, row_file, snapshot
from taskyard.journal.archive import ArchiveRow, ArchiveWriter, OutputRow
from taskyard.journal.recovery import JOURNAL_FORMAT, encode
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.store import Head, MemoryStore
from tests.journal.scenarios import go_on, rich_story

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_SNAPSHOTS = Path(__file__).parent / "golden_snapshots"
LATEST = "records-latest.txt"
GOLDEN_INDEXES = Path(__file__).parent / "golden_indexes"
GOLDEN_ROWS = Path(__file__).parent / "golden_rows"

#: The row after which the golden state directory was compacted.
COMPACTED_AT = 30

_TERMS = Terms(
    campaign=b"campaign",
    service=b"service",
    priority=-3,
    due_ns=1_767_225_600_000_000_001,
    expires_ns=2,
    expires_hard_ns=3,
    retry_delays_ns=(1, 2, 3),
    lease_ns=4,
    time_limit_ns=5,
    slots=6,
    crashes_max=7,
    origin=b"origin",
    dialect=b"dialect",
    submitted_ns=8,
)
_SUBMISSION = Submission(
    names=[b"a", b"b\xff"],
    payloads=[b"", b"payload"],
    terms=[_TERMS, Terms()],
    terms_at=[0, 1],
    lanes=[b"lane", b""],
    after=[[b"x", b"y"], []],
    envelopes=[b"envelope", b""],
)
_FACTS = WorkerFacts(
    (b"s1", b"s2"), 2, 3, 4, wants_wake=True, always_ready=True, dialect=b"dialect"
)
_RUNS = RunColumns(b"host", [1_767_225_600_000_000_001, 0], [5, 0], [-9, None], [6, 0], [7, 0])

#: Every record with every field set, and the shortest forms of those with defaults.
RECORDS: list[AnyRecord] = [
    Submitted(1, _SUBMISSION, after_done=[[b"z"], []], attempts=[0, 9]),
    Submitted(1, Submission([b"a"])),
    Extended(2, [b"a"], [[b"x"]]),
    Leased(3, b"w", [b"a", b"b"], [1, 2], 15_000_000_000),
    Finished(4, b"w", [b"a"], [1], [b"result"], keeps_slots=True),
    Finished(4, b"w", [b"a"], [1]),
    Failed(5, b"w", [b"a"], [1], [b"reason"], own_fault=False),
    Failed(5, b"w", [b"a"], [1], [b"reason"]),
    Postponed(6, b"w", [b"a"], [1], [7], [b"reason"], own_fault=False),
    Postponed(6, b"w", [b"a"], [1], [7], [b"reason"]),
    Returned(7, b"w", [b"a"], [1], ReturnReason.TRANSFERRED, [[b"x"]]),
    Returned(7, b"w", [b"a"], [1], ReturnReason.LEFT),
    LeaseExpired(8, b"w", [b"a"], [1]),
    CameDue(9, [b"a"]),
    TaskExpired(10, [b"a"]),
    Cancelled(11, [b"a", b"b"]),
    Retried(12, [b"a"]),
    Progressed(13, b"w", [b"a"], [1], [50], [b"half"]),
    StaleReport(14, b"w", [b"a"], [1]),
    WorkerJoined(15, b"w", _FACTS),
    WorkerJoined(15, b"w", WorkerFacts()),
    WorkerLeft(16, b"w", b"reason"),
    SlotsFreed(17, b"w", 2),
    Paused(18, b"service", b"lane"),
    Paused(18, b"", None),
    Resumed(19, b"service", None),
    # Since format 2.
    Submitted(1, Submission([b"late"], terms=[Terms(report_ns=9)])),
    TaskExpired(10, [b"a"], b"reason"),
    Moved(20, [b"a"], b"service", b"lane"),
    Moved(20, [b"a"], None, None),
    ReportedLate(21, [b"a"]),
    Released(22, [b"a", b"b"]),
    # Since format 3.
    WorkerJoined(15, b"w", WorkerFacts(heartbeat_ns=5)),
    WorkerReplaced(23, b"w", 7, [b"a"], [1]),
    Refunded(24, b"w", 7, [b"a"], [1]),
    # With fields that were added at the end of records of format 2.
    Cancelled(11, [b"a", b"b"], [0]),
    WorkerJoined(15, b"w", WorkerFacts(host=b"host", pid=5)),
    # Fields that were added at the end since.
    Finished(4, b"w", [b"a"], [1], [b"result"], result_bytes_total=[2_000_000]),
    Progressed(13, b"w", [b"a"], [1], [50], [b"half"], text_bytes_total=[70_000]),
    Finished(4, b"w", [b"a", b"b"], [1, 2], runs=_RUNS),
    Failed(5, b"w", [b"a", b"b"], [1, 2], [b"", b""], runs=RunColumns(b"", [1, 2], [3, 4])),
    Postponed(6, b"w", [b"a", b"b"], [1, 2], [7, 7], [b"", b""], runs=_RUNS),
    Returned(7, b"w", [b"a", b"b"], [1, 2], ReturnReason.REFUSED, runs=_RUNS),
    # Since format 4.
    Submitted(1, Submission([b"c/a"], terms=[Terms(campaign=b"c")])),
    # Fields that were added at the end of records of format 4.
    Finished(4, b"w", [b"a"], [1], [b"ends"], result_bytes_total=[20_000], files=[1]),
    Progressed(
        *(13, b"w", [b"a", b"b"], [1, 2], [0, 0], [b"out", b""], [20_000, 0]),
        *([b"", b"err"], [0, 30_000], [1, 2], [0, 7]),
    ),
    Submitted(1, Submission([b"a"], environment=b'{"host":"h","cwd":"/"}')),
    Finished(4, b"w", [b"a"], [1], runs=RunColumns(b"", [1], [2], notes=[b"up to date"])),
    # Fields that were added at the end since.
    Submitted(1, Submission([b"a"], terms=[Terms(resources=((b"gpus", 5_000),))])),
    WorkerJoined(15, b"w", WorkerFacts(resources=((b"gpus", 20_000), (b"memory", 1 << 33)))),
    # Since format 5.
    Edited(25, [b"a"], TermsChanges(5, 6, (7, 8), 9)),
    Edited(25, [b"a"], TermsChanges(retry_delays_ns=())),
]


#: Ended tasks of the golden index.
INDEXED: list[ArchiveRow] = [
    (EndedTask(b"a", TaskState.DONE, b"c", b"exec", 1, b"digest", 7, 8), Result(b"whole")),
    (EndedTask(b"b", TaskState.DONE, b"c", b"exec", 1, b"digest", 7, 8), Result(b"end", 2_000_000)),
    (EndedTask(b"c", TaskState.CANCELLED, b"", b"default", 0, b"", 9, 8), None),
]


#: Output of attempts in the golden index, since its format 3.
OUTPUTS: list[OutputRow] = [
    (b"a", 1, Result(b"out"), Result(b"err")),
    (b"a", 2, Result(b"ends", 20_000, in_file=True), Result(b"end", 30_000)),
]


def record_lines() -> list[str]:
    """Return each record's name and the body of a row with only this record."""
    return [f"{type(record).__name__} {encode([record]).hex()}" for record in RECORDS]


def described(ledger: Ledger) -> str:
    """Describe a ledger in a text that does not change when a record or a task gets a new field."""
    fingerprint = ledger_fingerprint(ledger)
    tasks: dict[str, Any] = {
        repr(task.name): (
            task.state.name,
            task.payload,
            task.terms.campaign,
            task.terms.priority,
            task.lane.service.name,
            task.lane.name,
            task.waits,
            task.attempt,
            task.failures,
            task.losses_excused,
            task.due_ns,
        )
        for task in ledger.tasks.values()
        if task.ending is None
    }
    same = ("record", "paused", "counts", "campaigns", "leases", "queues", "awaited", "reasons")
    kept = {key: fingerprint[key] for key in same} | {"tasks": tasks}
    return pprint.pformat(kept, width=100) + "\n"


def make_state(directory: Path) -> Ledger:
    """Make a state directory with everything in it: a snapshot, history, an index, and rows."""
    with_story = rich_story(SqliteStore(directory / "whole"))
    store = SqliteStore(directory / "state")
    go_on(store, with_story.store, COMPACTED_AT)
    compaction.compact(directory / "state", store)
    go_on(store, with_story.store, with_story.store.head.sequence)
    store.close()
    with_story.store.close()
    return with_story.scheduler.ledger


def make_snapshot() -> bytes:
    """Make a snapshot of tasks of which some share a payload."""
    ledger = Ledger()
    apply(ledger, Submitted(1, Submission([b"bundle/0", b"bundle/1"], [b"shared" * 100])))
    apply(ledger, Submitted(2, Submission([b"other"], [b"own"])))
    head = Head(2, ledger.record, bytes(32))
    return snapshot.encode(b"sixteen bytes ..", head, ledger)


def make_index(directory: Path) -> None:
    """Make an index with a whole result, a truncated one, and a task without a result."""
    with closing(ArchiveWriter(directory, b"sixteen bytes ..")) as writer:
        writer.add(INDEXED)
        writer.add_outputs(OUTPUTS, 9)
        writer.commit(Head(5, 9, bytes(32)))


def main() -> None:
    _make_golden_snapshot()
    _make_golden_index()
    _make_golden_rows()
    version = GOLDEN / f"format-{JOURNAL_FORMAT}"
    if version.exists():
        (version / LATEST).write_text("\n".join(record_lines()) + "\n")
        sys.stdout.write(f"{version} is there, and stays as it is\n")
        return
    version.mkdir(parents=True)
    (version / "records.txt").write_text("\n".join(record_lines()) + "\n")
    (version / "ledger.txt").write_text(described(make_state(version)))
    (version / "state" / "journal.sqlite-shm").unlink(missing_ok=True)
    for leftover in (version / "whole").iterdir():
        leftover.unlink()
    (version / "whole").rmdir()
    sys.stdout.write(f"made {version}\n")


def _make_golden_snapshot() -> None:
    path = GOLDEN_SNAPSHOTS / f"format-{snapshot.FORMAT}.snapshot"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(make_snapshot())
        sys.stdout.write(f"made {path}\n")


def _make_golden_index() -> None:
    path = GOLDEN_INDEXES / f"format-{archive.FORMAT.decode()}"
    if not path.exists():
        path.mkdir(parents=True)
        make_index(path)
        sys.stdout.write(f"made {path}\n")


def _make_golden_rows() -> None:
    path = GOLDEN_ROWS / f"format-{row_file.FORMAT}"
    if not path.exists():
        compaction.export(path, rich_story(MemoryStore()).store)
        for other in (*path.glob("finished.sqlite*"), *path.glob("snapshots/*")):
            other.unlink()
        (path / "snapshots").rmdir()
        sys.stdout.write(f"made {path}\n")


if __name__ == "__main__":
    main()
