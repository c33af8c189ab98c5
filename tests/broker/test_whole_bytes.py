"""Payloads and results that come in one message and are kept as blobs."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.broker import contents
from taskyard.broker.blob_retention import BlobRetention
from taskyard.broker.blobs import BlobLimits
from taskyard.core.blobs import Blob, blob_name
from taskyard.core.effects import Accepted, Assign, NoWork, Refused, ReportAck, Settled, TaskDetails
from taskyard.core.events import (
    CancelRequested,
    LookupRequested,
    Outcome,
    ResultsRequested,
    Scope,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    WorkerRegistered,
)
from taskyard.core.limits import BLOB_BYTES_MIN, PAYLOAD_BYTES_MAX, SECOND_NS, STREAM_END_BYTES
from taskyard.core.model import Refusal, Submission, WorkerFacts
from taskyard.core.records import Failed, Finished, Submitted
from taskyard.core.states import DONE, FAILED, READY
from taskyard.errors import JournalFailed
from taskyard.journal import blob_files
from taskyard.journal.blobs import name_of, upload_of
from taskyard.journal.recovery import records_of, recover
from taskyard.wire.dialect import NATIVE_NUMBER, request_numbers, text_and_problem
from tests.broker.test_blobs import CONTENT, GRACE_NS, NAME, Yard, header

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.core.effects import Effect
    from taskyard.core.records import AnyRecord

LONG = bytes(range(256)) * 512
OTHER = LONG[1:] + b"!"

#: A request of a client of the native dialect, and of another one.
NATIVE, PLAIN = (next(request_numbers(dialect)) for dialect in (NATIVE_NUMBER, NATIVE_NUMBER + 1))


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path / "blobs")


def submit(yard: Yard, *payloads: bytes, names: tuple[bytes, ...] = (b"a",)) -> Effect:
    (reply,) = yard.process(SubmitRequested(0, b"c", Submission([*names], [*payloads]), 3))
    return reply


def take(yard: Yard, count: int = 1) -> Effect:
    (reply,) = yard.process(TasksRequested(0, b"w", count, request=4))
    return reply


def report(yard: Yard, name: bytes, text: bytes, **more: Any) -> list[Effect]:
    values: dict[str, Any] = {"outcomes": [Outcome.DONE], "request": 5, **more}
    return yard.process(TasksReported(0, b"w", [name], [1], texts=[text], **values))


def ask(yard: Yard, name: bytes, request: int) -> Settled:
    (reply,) = yard.process(ResultsRequested(0, b"c", [name], request=request))
    assert isinstance(reply, Settled)
    return reply


def records(yard: Yard) -> list[AnyRecord]:
    return [one for row in yard.store.rows(0) for one in records_of(row, row.record_first - 1)]


def damage(yard: Yard, content: bytes) -> None:
    path = yard.files.path(name_of(content))
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_long_payload_is_stored_before_its_record_and_inserted_for_its_worker(yard: Yard) -> None:
    assert submit(yard, LONG, b"short", names=(b"a", b"b")) == Accepted(b"c", 3, 2, 0)
    (record,) = [one for one in records(yard) if isinstance(one, Submitted)]
    stored, short = record.submission.payloads
    assert stored == Blob(stored.digest, len(LONG))  # type: ignore[union-attr]
    assert short == b"short"
    assert yard.files.read(name_of(LONG), 0, len(LONG)) == (LONG, len(LONG))
    assert yard.scheduler.ledger.tasks[b"a"].payload == stored
    given = take(yard, 2)
    assert isinstance(given, Assign)
    assert given.payloads == [LONG, b"short"]
    assert not yard.broker.completer._payloads.read  # noqa: SLF001  # it is not kept


def test_payload_of_many_tasks_is_stored_and_read_once(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (b"a", b"b", b"c")
    assert submit(yard, LONG, names=names) == Accepted(b"c", 3, 3, 0)
    reads: list[Blob] = []
    read_whole = contents.read_whole

    def count(store: Any, blob: Blob) -> bytes:
        reads.append(blob)
        return read_whole(store, blob)

    monkeypatch.setattr(contents, "read_whole", count)
    given = take(yard, 3)
    assert isinstance(given, Assign)
    assert given.payloads == [LONG] * 3
    assert given.payloads[0] is given.payloads[2], "a message has it once"
    assert len(reads) == 1


@pytest.mark.parametrize("length", [BLOB_BYTES_MIN - 1, BLOB_BYTES_MIN])
def test_payloads_and_results_are_blobs_from_one_limit_on(yard: Yard, length: int) -> None:
    submit(yard, LONG[:length])
    take(yard)
    report(yard, b"a", OTHER[:length])
    kept = [one for one in records(yard) if isinstance(one, Submitted | Finished)]
    submitted, finished = kept
    assert isinstance(submitted, Submitted)
    assert isinstance(finished, Finished)
    is_blob = length == BLOB_BYTES_MIN
    assert isinstance(submitted.submission.payloads[0], Blob) is is_blob
    assert isinstance((finished.results or [b""])[0], Blob) is is_blob


def test_payload_above_the_limit_is_refused_and_not_stored(yard: Yard) -> None:
    refused = submit(yard, bytes(PAYLOAD_BYTES_MAX + 1))
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.TOO_MANY
    assert not [*yard.files.walk()]


def test_repeated_submission_is_recognized_by_its_payload(yard: Yard) -> None:
    submit(yard, LONG)
    assert submit(yard, LONG) == Accepted(b"c", 3, 0, 1)
    refused = submit(yard, OTHER)
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.CONFLICT
    take(yard)
    report(yard, b"a", b"")
    assert yard.scheduler.ledger.tasks[b"a"].state is DONE
    assert submit(yard, LONG) == Accepted(b"c", 3, 0, 1)
    refused = submit(yard, OTHER)
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.CONFLICT


def test_recovered_ledger_is_the_one_that_was(yard: Yard) -> None:
    yard.put_all()
    submit(yard, header(NAME, results=["x"]) + LONG)
    submit(yard, LONG, names=(b"b",))
    recovered = recover(yard.store).tasks
    assert {name: task.payload for name, task in recovered.items()} == {
        name: task.payload for name, task in yard.scheduler.ledger.tasks.items()
    }


def test_full_quota_refuses_a_payload_and_no_result(yard: Yard) -> None:
    submit(yard, b"")
    yard.put_all()
    yard.limits = BlobLimits(quota_bytes=len(CONTENT))
    refused = submit(yard, LONG, names=(b"b",))
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.FULL
    assert refused.text.startswith("task b: its payload can't be stored: ")
    take(yard)
    assert report(yard, b"a", LONG) == [ReportAck(b"w", 5, [])]
    assert ask(yard, b"a", PLAIN).texts == [LONG]


def test_disk_that_is_full_refuses_a_payload_and_stops_the_broker_at_a_result(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(yard, b"")
    take(yard)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blob_files.BlobFiles, "append", full)
    refused = submit(yard, LONG, names=(b"b",))
    assert isinstance(refused, Refused)
    assert (refused.refusal, refused.text) == (
        Refusal.FULL,
        "task b: its payload can't be stored: No space left on device",
    )
    with pytest.raises(JournalFailed, match="result of task a: No space left on device"):
        report(yard, b"a", LONG)


def test_bytes_of_a_broken_upload_are_replaced(yard: Yard) -> None:
    yard.files.append(upload_of(name_of(LONG)), 0, b"other bytes")
    submit(yard, LONG)
    given = take(yard)
    assert isinstance(given, Assign)
    assert given.payloads == [LONG]


@pytest.mark.parametrize("is_there", [True, False])
def test_task_whose_payload_is_lost_fails_with_the_reason(
    yard: Yard, caplog: pytest.LogCaptureFixture, *, is_there: bool
) -> None:
    submit(yard, LONG, b"short", names=(b"a", b"b"))
    if is_there:
        damage(yard, LONG)
    else:
        yard.files.path(name_of(LONG)).unlink()
    given = take(yard, 2)
    assert isinstance(given, Assign)
    assert (given.names, given.payloads, len(given.terms)) == ([b"b"], [b"short"], 1)
    yard.process()
    wrong = "damaged (they were removed: submit the task again)"
    text = wrong if is_there else "missing (`taskyard clean` and blobs.keep remove them)"
    reason = f"payload: 131,072 bytes are {text}"
    assert caplog.messages == [f"task a: {reason}"]
    (failed,) = [one for one in records(yard) if isinstance(one, Failed)]
    assert (failed.names, failed.reasons) == ([b"a"], [reason.encode()])
    assert yard.scheduler.ledger.workers[b"w"].slots_free
    submit(yard, b"", names=(b"c",))
    given = take(yard)
    assert isinstance(given, Assign)
    assert given.names == [b"c"]
    assert yard.scheduler.ledger.tasks[b"a"].state is FAILED


def test_worker_gets_nothing_if_all_payloads_are_lost(yard: Yard) -> None:
    submit(yard, LONG)
    damage(yard, LONG)
    assert take(yard) == NoWork(b"w", settled=False, request=4)
    yard.process()
    assert not [*yard.files.walk()], "the next submission stores it again"
    submit(yard, LONG, names=(b"again",))
    given = take(yard)
    assert isinstance(given, Assign)
    assert given.payloads == [LONG]


def test_lost_payload_frees_the_slot_of_a_worker_that_is_always_ready(yard: Yard) -> None:
    submit(yard, LONG, b"short", names=(b"a", b"b"))
    damage(yard, LONG)
    facts = WorkerFacts(slots_total=1, always_ready=True)
    joined = yard.process(WorkerRegistered(0, b"pushed", facts))
    assert joined == [NoWork(b"pushed", settled=False)]
    (given,) = yard.process()
    assert isinstance(given, Assign)
    assert given.names == [b"b"]


def test_whole_result_is_sent_to_other_dialects_and_named_to_native_clients(yard: Yard) -> None:
    submit(yard, b"")
    take(yard)
    assert report(yard, b"a", LONG) == [ReportAck(b"w", 5, [])]
    (kept,) = ask(yard, b"a", NATIVE).texts
    assert isinstance(kept, Blob)
    assert blob_name(kept) == name_of(LONG)
    assert kept.ends == LONG[:STREAM_END_BYTES] + LONG[-STREAM_END_BYTES:]
    assert text_and_problem(ask(yard, b"a", PLAIN)) == (LONG, None)


def test_damaged_result_is_not_sent(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    submit(yard, b"")
    take(yard)
    report(yard, b"a", LONG)
    damage(yard, LONG)
    _, problem = text_and_problem(ask(yard, b"a", PLAIN))
    assert problem == b"result truncated: only the last 16384 of 131072 bytes are kept"
    assert caplog.messages[0].startswith("task a: result: 131,072 bytes are damaged")


def test_reasons_and_results_of_others_are_not_stored(yard: Yard) -> None:
    submit(yard, b"", names=(b"a", b"b"))
    take(yard)
    report(yard, b"b", LONG)
    report(yard, b"a", LONG, outcomes=[Outcome.FAILED_FINAL])
    report(yard, b"a", LONG, outcomes=[])
    assert not [*yard.files.walk()]
    assert yard.scheduler.ledger.tasks[b"b"].state is READY


def test_lookup_has_the_whole_payload(yard: Yard) -> None:
    submit(yard, LONG)
    (details,) = yard.process(LookupRequested(0, b"c", [b"a"], request=6))
    assert isinstance(details, TaskDetails)
    assert details.views[0].payload == LONG
    damage(yard, LONG)
    (details,) = yard.process(LookupRequested(0, b"c", [b"a"], request=6))
    assert isinstance(details, TaskDetails)
    assert details.views[0].payload is None


def test_sweep_spares_payloads_of_tasks_that_may_run_and_what_they_name(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.put_all()
    payload = header(NAME) + LONG
    submit(yard, payload)
    yard.age(10 * GRACE_NS // SECOND_NS)
    assert {*yard.sweep()} == {NAME, name_of(payload)}
    monkeypatch.setattr(BlobRetention, "_add_recent", lambda *_: iter(()))  # all rows are trimmed
    assert {*yard.sweep()} == {NAME, name_of(payload)}
    yard.process(CancelRequested(0, b"c", Scope(names=(b"a",)), 7))
    assert not yard.sweep()


def test_pickled_result_names_its_blobs_wherever_its_first_line_ends(yard: Yard) -> None:
    yard.put_all()
    submit(yard, b"")
    take(yard)
    line = header(*["x" * STREAM_END_BYTES, NAME])
    report(yard, b"a", line + LONG)
    yard.age(10 * GRACE_NS // SECOND_NS)
    assert {*yard.sweep()} == {NAME, name_of(line + LONG)}
