"""Write the golden files of the formats of this version, part of every format change.

    python -m tests.journal.make_golden

Writes missing files and never changes existing ones: a golden file stands for all the state
directories that were written in its time, and must stay readable forever. Only `LATEST` is
rewritten: records as this version writes them, with the fields that were added at their ends since
the format began.
"""

import pprint
from contextlib import closing
from pathlib import Path
from typing import Any

from taskyard.core.blobs import Blob
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, TermsChanges, WorkerFacts
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
    Numbered,
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
from taskyard.journal import compaction, recovery
from taskyard.journal.recovery import JOURNAL_FORMAT, encode
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.journal.store import MemoryStore
from tests.journal.scenarios import BEGIN_NS, go_on, rich_story

GOLDEN = Path(__file__).parent / "golden"
LATEST = "records-latest.txt"

#: Rows of the story before the golden state directory is compacted.
STORY_BEGINS = 30

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
    report_ns=9,
    resources=((b"gpus", 5_000),),
)
_SUBMISSION = Submission(
    names=[b"a", b"b\xff"],
    payloads=[b"", b"payload"],
    terms=[_TERMS, Terms()],
    terms_at=[0, 1],
    lanes=[b"lane", b""],
    after=[[b"x", b"y"], []],
    envelopes=[b"envelope", b""],
    environment=b'{"host":"h","cwd":"/"}',
)
_FACTS = WorkerFacts(
    (b"s1", b"s2"),
    slots_total=2,
    lease_timeout_ns=3,
    incarnation=4,
    wants_wake=True,
    always_ready=True,
    dialect=b"dialect",
    host=b"host",
    pid=5,
    restart_lease_ns=6,
    heartbeat_ns=7,
    reserved_payloads=(b"STOP",),
    resources=((b"gpus", 20_000), (b"memory", 1 << 33)),
    forwards=True,
    forwards_to=b"tcp://lower",
)
_RUNS = RunColumns(b"host", [1_767_225_600_000_000_001], [5], [-9], [6], [7], [b"up to date"])

#: A blob, and a stream of which only the ends are kept.
_LONG = Blob(bytes(range(32)), 2_000_000, b"ends")
_CUT = Blob(b"", 300_000, b"err")

#: A payload of which the scheduler reads that it needs a result.
_ARGUMENTS = Blob(bytes(range(32)), 100_000, b'{"call":"","results":["a"]}\n')

#: Every record with every field set, and the shortest forms of those with defaults.
RECORDS: list[AnyRecord] = [
    Submitted(1, _SUBMISSION, after_done=[[b"z"], []], attempts=[0, 9], by=b"key"),
    Submitted(1, Submission([b"a"])),
    Submitted(1, Submission([b"a", b"b"], [_ARGUMENTS, b"payload"])),
    Extended(2, [b"a"], [[b"x"]]),
    Leased(3, b"w", [b"a", b"b"], [1, 2], 15_000_000_000),
    Finished(4, b"w", [b"a", b"b"], [1, 2], [b"whole", _LONG], True, _RUNS),  # noqa: FBT003
    Finished(4, b"w", [b"a"], [1]),
    Failed(5, b"w", [b"a"], [1], [b"reason"], own_fault=False, runs=_RUNS),
    Failed(5, b"w", [b"a"], [1], [b"reason"]),
    Postponed(6, b"w", [b"a"], [1], [7], [b"reason"], own_fault=False, runs=_RUNS),
    Postponed(6, b"w", [b"a"], [1], [7], [b"reason"]),
    Returned(7, b"w", [b"a"], [1], ReturnReason.TRANSFERRED, [[b"x"]], _RUNS, [b"reason"]),
    Returned(7, b"w", [b"a"], [1], ReturnReason.LEFT),
    LeaseExpired(8, b"w", [b"a"], [1]),
    CameDue(9, [b"a"]),
    TaskExpired(10, [b"a"], b"reason"),
    TaskExpired(10, [b"a"]),
    Cancelled(11, [b"a", b"b"], [0], b"key"),
    Cancelled(11, [b"a"], []),
    Retried(12, [b"a"], b"key"),
    Progressed(13, b"w", [b"a", b"b"], [1, 2], [0, 0], [_LONG, b"out"], [b"", _CUT], [0, 7]),
    Progressed(13, b"w", [b"a"], [1], [50], [b"half"]),
    StaleReport(14, b"w", [b"a"], [1]),
    WorkerJoined(15, b"w", _FACTS),
    WorkerJoined(15, b"w", WorkerFacts()),
    WorkerLeft(16, b"w", b"reason"),
    SlotsFreed(17, b"w", 2),
    Paused(18, b"service", b"lane", b"key"),
    Paused(18, b"", None),
    Resumed(19, b"service", None),
    Moved(20, [b"a"], b"service", b"lane", b"key"),
    Moved(20, [b"a"], None, None),
    ReportedLate(21, [b"a"]),
    Released(22, [b"a", b"b"], b"key"),
    WorkerReplaced(23, b"w", 7, [b"a"], [1]),
    Refunded(24, b"w", 7, [b"a"], [1]),
    Edited(25, [b"a"], TermsChanges(5, 6, (7, 8), 9), b"key"),
    Edited(25, [b"a"], TermsChanges(retry_delays_ns=())),
    Numbered(26, b"c", b"/d/cmds.txt", 0, [b"part 0", b"part 1"]),
]

#: Rows after the story: tasks that share a payload, blobs, and output.
_MORE: list[list[AnyRecord]] = [
    [
        WorkerJoined(BEGIN_NS, b"bundler", WorkerFacts((b"default",), 4)),
        Submitted(BEGIN_NS, Submission([b"bundle/0", b"bundle/1"], [b"shared" * 100])),
        Submitted(BEGIN_NS, Submission([b"long"])),
        Submitted(BEGIN_NS, Submission([b"stored"], [_ARGUMENTS])),
    ],
    [
        Leased(BEGIN_NS, b"bundler", [b"long"], [1], SECOND_NS),
        Progressed(BEGIN_NS, b"bundler", [b"long"], [1], [0], [b""], [_CUT], [0]),
        Finished(BEGIN_NS, b"bundler", [b"long"], [1], [_LONG]),
    ],
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
    story = rich_story(MemoryStore()).store
    with closing(SqliteStore(directory)) as store:
        go_on(store, story, STORY_BEGINS)
        for records in _MORE:
            store.commit(encode(records), len(records))
        compaction.compact(directory, store)
        for row in story.rows(STORY_BEGINS):
            store.commit(row.body, row.record_last - row.record_first + 1)
        return recovery.open_ledger(directory, store)


def main() -> None:
    version = GOLDEN / f"format-{JOURNAL_FORMAT}"
    lines = "\n".join(record_lines()) + "\n"
    if not version.exists():
        version.mkdir(parents=True)
        (version / "records.txt").write_text(lines)
        (version / "ledger.txt").write_text(described(make_state(version / "state")))
        (version / "state" / "journal.sqlite-shm").unlink(missing_ok=True)
    (version / LATEST).write_text(lines)


if __name__ == "__main__":
    main()
