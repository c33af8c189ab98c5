"""Scenarios for the journal's tests: a yard that writes its decisions, one row for each event.

`rich_story` has every kind of record but `Edited`, tasks in every state and most of a snapshot's
content. It is deterministic.
"""

import os
from pathlib import Path
from typing import Any

from taskyard.core.effects import Effect
from taskyard.core.events import (
    DuplicatePolicy,
    EditRequested,
    Event,
    ExpireRequested,
    MoveRequested,
    Outcome,
    PauseRequested,
    ResumeRequested,
    Scope,
    SlotFreed,
    SubmitRequested,
    TasksProgressed,
    TasksReported,
    TasksReturned,
    UnknownPolicy,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, TermsChanges
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.states import TaskState
from taskyard.journal import schema
from taskyard.journal.recovery import encode
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.journal.store import MemoryStore, Store
from tests.core.kit import Yard

FAILED = TaskState.FAILED

#: The wall clock at the start: 2026-01-01.
BEGIN_NS = 1_767_225_600 * SECOND_NS

#: In SQLite's log.
LOG_HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24

LONG_PAYLOAD = b"long payload " * 20


class WritingYard(Yard):
    """A yard with a journal: each event that decides something is a row."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        #: The ledger's fingerprint after each row, starting before the first.
        self.portraits = [ledger_fingerprint(self.scheduler.ledger)]
        self.clock(BEGIN_NS)

    def handle(self, event: Event) -> list[Effect]:
        effects = super().handle(event)
        if self.records:
            self.store.commit(encode(self.records), len(self.records))
            self.portraits.append(ledger_fingerprint(self.scheduler.ledger))
        return effects

    def handle_stale(self, name: bytes) -> None:
        """Report on an unknown task."""
        self.handle(TasksReported(0, b"a stranger", [name], [1]))


def rich_store() -> MemoryStore:
    """Return a journal in memory with a rich story."""
    store = MemoryStore()
    rich_story(store)
    return store


def rich_story(store: Store) -> WritingYard:
    yard = WritingYard(store)
    _beginning(yard)
    _troubles(yard)
    _commands(yard)
    _late_turns(yard)
    _lanes(yard)
    _names(yard)
    return yard


def edit(yard: WritingYard) -> None:
    """Edit a task that no worker has. Not part of the scenario, whose rows golden files have."""
    yard.submit(b"edited", service=b"edits")
    changes = TermsChanges(priority=2, time_limit_ns=SECOND_NS)
    yard.handle(EditRequested(0, b"client", Scope(names=(b"edited",)), changes))


def _names(yard: WritingYard) -> None:
    """Run two processes with one name: the silent one is replaced, and returns."""
    yard.submit(b"contested", service=b"names")
    held = {"services": (b"names",), "lease_timeout_ns": 15 * SECOND_NS, "heartbeat_ns": SECOND_NS}
    yard.join(b"w5", incarnation=1, **held)
    yard.take(b"w5")
    yard.join(b"w5", incarnation=2, **held)
    yard.later(3)
    yard.join(b"w5", incarnation=2, **held)
    yard.join(b"w5", incarnation=1, **held)


def _beginning(yard: WritingYard) -> None:
    """Register workers, submit tasks with all options, and finish some."""
    yard.join(b"w1", slots_total=4, services=(b"default", b"smtp"), dialect=b"native")
    yard.join(b"w2", slots_total=2, lease_timeout_ns=5 * SECOND_NS, incarnation=7, dialect=b"wmp")
    yard.submit(b"a", b"b", b"c", campaign=b"first", dialect=b"dwork")
    yard.submit(b"d", b"e", after=[[b"a", b"b"], [b"d"]], campaign=b"first", priority=3)
    yard.submit(b"l1", b"l2", b"l3", lanes=[b"x", b"x", b"y"], service=b"smtp", campaign=b"mail")
    yard.submit(b"later", due_ns=BEGIN_NS + 60 * SECOND_NS)
    yard.submit(b"wide", slots=2, payloads=[LONG_PAYLOAD], envelopes=[b"return to sender"])
    yard.submit(b"hopeful", after=[[b"unheard of"]], unknown=UnknownPolicy.WAIT)
    yard.submit(b"no \xff utf-8 \\", campaign=b"bin\xc3ary")
    yard.take(b"w1", 2)
    yard.finish(b"w1", b"first/a", texts=[b"result of a"])
    yard.finish(b"w1", b"first/b")
    yard.submit(b"f", after=[[b"a", b"c"]], campaign=b"first")


def _troubles(yard: WritingYard) -> None:
    """Fail tasks, miss heartbeats, leave, report late, and return tasks."""
    taken = yard.take(b"w1", 3)
    yard.handle(TasksProgressed(0, b"w1", taken[:1], [1], [40], [b"almost half"]))
    yard.report(b"w1", taken[0], Outcome.RETRY_AT, texts=[b"busy"], retry_at_ns=[BEGIN_NS + 10**10])
    yard.report(b"w1", taken[1], Outcome.FAILED_FINAL, texts=[b"broken"])
    yard.handle(TasksReturned(0, b"w1", taken[2:3], after=[[b"later"]]))
    yard.take(b"w2", 2)
    yard.later(6)  # w2 sends no heartbeat
    yard.finish(b"w2", b"first/c")  # too late
    yard.join(b"w3", slots_total=3, incarnation=1)
    yard.take(b"w3", 1)
    yard.join(b"w3", slots_total=3, incarnation=2)  # lost its tasks
    yard.take(b"w3", 1)
    yard.leave(b"w3")
    yard.later(5)  # delayed tasks are due


def _commands(yard: WritingYard) -> None:
    """Run users' commands: cancel, retry, pause, resume, extend."""
    yard.submit(b"g", b"h", after=[[], [b"g"]], campaign=b"second")
    yard.submit(b"old", expires_hard_ns=BEGIN_NS + 20 * SECOND_NS, after=[[b"second/g"]])
    yard.handle(PauseRequested(0, b"client", b"smtp", b"x"))
    yard.handle(PauseRequested(0, b"client", b"smtp"))
    yard.handle(PauseRequested(0, b"client"))
    yard.handle(ResumeRequested(0, b"client"))
    yard.handle(ResumeRequested(0, b"client", b"smtp"))
    yard.later(10)  # old expires
    yard.cancel(b"second/h")
    failed = [name for name, task in yard.scheduler.ledger.tasks.items() if task.state is FAILED]
    yard.retry(*failed)
    known = Submission(
        [b"h", b"f"],
        [b"h", b"f"],
        [Terms(campaign=b"second"), Terms(campaign=b"first")],
        terms_at=[0, 1],
        after=[[b"first/f"], [b"mail/l1"]],
    )
    yard.handle(SubmitRequested(0, b"client", known, repeat=DuplicatePolicy.EXTEND))


def _late_turns(yard: WritingYard) -> None:
    """Keep slots, reuse the name of an ended task, and leave leases open."""
    yard.join(b"w4", slots_total=3, services=(b"default", b"smtp"))
    lost = yard.take(b"w4", 3)
    yard.finish(b"w4", *lost, texts=[b"done by w4"] * len(lost))
    yard.submit(b"k1", b"k2", b"k3", campaign=b"second", priority=50)
    kept = yard.take(b"w4", 3)
    yard.finish(b"w4", *kept, keeps_slots=True, texts=[b"kept " + name for name in kept])
    yard.handle(SlotFreed(0, b"w4"))
    yard.submit(b"a", repeat=DuplicatePolicy.EXTEND, campaign=b"first", payloads=[b"again"])
    yard.submit(b"tomorrow", due_ns=BEGIN_NS + 86_400 * SECOND_NS, priority=-1)
    yard.submit(b"unwanted", b"unwanted too", after=[[], [b"unwanted"]])
    yard.cancel(b"unwanted")
    yard.submit(b"doomed", priority=99)
    yard.take(b"w4", 1)
    yard.report(b"w4", b"doomed", Outcome.FAILED_FINAL, texts=[b"as foretold"])
    yard.later(60)
    yard.ask(b"w4", 1)
    yard.ask(b"w1", 2)


def _lanes(yard: WritingYard) -> None:
    """Hold and release a lane, run tasks that are deferred, move, expire, report late."""
    held = Rule(b"held", b"smtp/held", LaneOptions(is_held=True))
    late = Rule(b"late", b"default/late", LaneOptions(report_after_ns=SECOND_NS))
    yard.set_rules(held, late)
    yard.submit(b"h1", b"h2", b"h3", lanes=[b"held"] * 3, service=b"smtp")
    yard.retry(b"h2")
    yard.submit(b"r1", b"r2", b"r3", lanes=[b"run"] * 3, service=b"bulk")
    yard.join(b"w5", services=(b"bulk",), slots_total=1)
    yard.take(b"w5")
    yard.report(b"w5", b"r1", Outcome.DEFER_BACK)
    yard.submit(b"n1", b"n2", lanes=[b"late", b"late"])
    yard.later(2)
    yard.handle(
        MoveRequested(0, b"client", Scope(names=(b"n2", b"tomorrow")), b"smtp", b"elsewhere")
    )
    yard.handle(ExpireRequested(0, b"client", Scope(names=(b"n1",))))


def rich_yard(directory: Path) -> WritingYard:
    """Return the rich scenario in a state directory, with its store open."""
    return rich_story(SqliteStore(directory))


def cut_fill(directory: Path) -> None:
    """Cut the zeros off the log of a store that was killed, so that it ends with its last row."""
    log = directory / schema.LOG_NAME
    os.truncate(log, log_end(log.read_bytes()))


def log_end(log: bytes) -> int:
    """Return the end of the last row in SQLite's log, which has no unfinished write."""
    page_bytes, end = int.from_bytes(log[8:12], "big"), LOG_HEADER_BYTES
    frame_bytes = FRAME_HEADER_BYTES + page_bytes
    while log[end + 8 : end + 16] == log[16:24]:  # of this generation
        end += frame_bytes
    return end


def copied(store: Store, rows: int) -> MemoryStore:
    """Return the first rows of a scenario in another journal."""
    copy = MemoryStore()
    go_on(copy, store, rows)
    return copy


def go_on(copy: Store, store: Store, rows: int) -> None:
    """Copy the scenario's rows up to that row."""
    for row in store.rows(copy.head.sequence):
        if row.sequence <= rows:
            copy.commit(row.body, row.record_last - row.record_first + 1)


def unfinished(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return a fingerprint without the ended tasks, which a compaction moves out of memory."""
    tasks = {name: task for name, task in fingerprint["tasks"].items() if not ending_of(task)}
    tries = {name: tries for name, tries in fingerprint["tries"].items() if name in tasks}
    return {**fingerprint, "tasks": tasks, "tries": tries}


def ended(fingerprint: dict[str, Any]) -> dict[bytes, tuple[int, int]]:
    """Return the ended tasks of a fingerprint, with their records and times."""
    tasks = fingerprint["tasks"].items()
    return {name: ending for name, task in tasks if (ending := ending_of(task))}


def ending_of(task: tuple[Any, ...]) -> tuple[int, int] | None:
    ending: tuple[int, int] | None = task[6]
    return ending
