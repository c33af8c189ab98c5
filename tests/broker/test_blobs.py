"""Blobs at the broker: parts, uploads that resume, and the removal of unused ones."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from taskyard.broker.blob_retention import SCAN_NS, BlobRetention
from taskyard.broker.blobs import BlobLimits, BrokerBlobs
from taskyard.broker.contents import MISSING_RETRY_NS
from taskyard.broker.turn import Broker
from taskyard.core.effects import Accepted, Part, Refused, ReportAck, StoreReply, ValueReceived
from taskyard.core.events import (
    CancelRequested,
    Outcome,
    PartRequested,
    Scope,
    StoreRequested,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    UnknownPolicy,
    ValueSent,
    WorkerRegistered,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal, Submission, Terms, WorkerFacts
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import TimerHeap
from taskyard.errors import UserError
from taskyard.journal import blob_files
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import blobs_needed, name_of, short_name, upload_of
from taskyard.journal.store import MemoryStore
from taskyard.wire.native.task_contents import StoreDocument
from tests.worker.runner_harness import SetClock

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from taskyard.core.blobs import Content
    from taskyard.core.effects import Effect
    from taskyard.core.events import Event

CONTENT = bytes(range(256)) * 8
NAME = name_of(CONTENT)
OTHER = name_of(CONTENT[1:])
GRACE_NS = 100 * SECOND_NS


def header(*values: str, results: Sequence[str] = ()) -> bytes:
    """Return a payload or a result that names values."""
    fields = {"pickle": 1, "blobs": values, "results": results}
    return msgspec.json.encode(fields) + b"\n\x80 no pickle"


class _Transport:
    timers = TimerHeap()

    def __init__(self) -> None:
        self.sent: list[Effect] = []

    def receive(self, _wait_ns: int | None) -> Sequence[Event]:
        return ()

    def is_reading(self, client: bytes) -> bool:
        del client
        return True

    def send(self, effects: Sequence[Effect]) -> Sequence[Event]:
        self.sent += effects
        return ()


class Yard:
    """A broker with values, and a worker."""

    def __init__(
        self, directory: Path, store: MemoryStore | None = None, *, shared: bool = False
    ) -> None:
        self.limits = BlobLimits(grace_ns=GRACE_NS)
        self.files = BlobFiles(directory)
        self.blobs = BrokerBlobs(self.files, "me", lambda: self.limits, shared=shared)
        self.store = store or MemoryStore()
        self.clock = SetClock()
        self.clock.now_ns = time.time_ns()  # files have the system's time
        self.scheduler = Scheduler()
        self.transport = _Transport()
        self.broker = Broker(
            *(self.scheduler, self.transport, self.store, self.clock), blobs=self.blobs
        )
        self.retention = self.new_retention()
        self.process(WorkerRegistered(0, b"w", WorkerFacts(slots_total=9)))

    def new_retention(self) -> BlobRetention:
        return BlobRetention(
            *(self.blobs, self.scheduler.ledger, self.clock, self.store, None),
            self.broker.completer.result_of,
        )

    def process(self, *events: Event) -> list[Effect]:
        self.transport.sent = []
        self.broker.process(events)
        return self.transport.sent

    def put(self, content: bytes, name: str = "", offset: int = 0) -> Effect:
        sent = ValueSent(0, b"c", (name or name_of(content)).encode(), offset, content, 5)
        return self.process(sent)[0]

    def put_all(self, content: bytes = CONTENT) -> str:
        """Store a blob, all of it."""
        self.put(content)
        return name_of(content)

    def get(self, value: str = NAME, *, task: bytes = b"t", **more: Any) -> Effect:
        options = {"count": 1 << 20, "request": 6, **more}
        return self.process(PartRequested(0, b"c", task, blob=value.encode(), **options))[0]

    def read(self, value: str = NAME, **more: Any) -> Part:
        """Return the reply to a request that is not refused."""
        part = self.get(value, **more)
        assert isinstance(part, Part)
        return part

    def submit(self, name: bytes, payload: bytes, after: list[list[bytes]] | None = None) -> None:
        self.process(SubmitRequested(0, b"c", Submission([name], [payload], after=after), 3))

    def finish(self, name: bytes, result: bytes) -> None:
        self.process(TasksRequested(0, b"w", 9, request=4))
        self.process(TasksReported(0, b"w", [name], [1], [Outcome.DONE], [result], None, 8))

    def sweep(self) -> list[str]:
        """Run a scan, and return the names of the values that are left."""
        self.clock.now_ns += SCAN_NS
        while self.retention.run_step() == 0:
            pass
        return [str(file.id) for file in self.files.walk()]

    def age(self, seconds: int) -> None:
        """Make all files older, and the broker with them."""
        self.clock.now_ns += seconds * SECOND_NS


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path / "blobs")


# Parts.


def test_value_arrives_in_parts_and_is_read_in_parts(yard: Yard) -> None:
    assert yard.put(b"", NAME) == ValueReceived(b"c", 5, NAME.encode(), 0, received=0)
    first = yard.put(CONTENT[:1000], NAME)
    assert first == ValueReceived(b"c", 5, NAME.encode(), 0, received=1000)
    assert [file.id for file in yard.files.walk()] == [upload_of(NAME)]
    last = yard.put(CONTENT[1000:], NAME, 1000)
    assert last == ValueReceived(b"c", 5, NAME.encode(), 1000, received=2048)
    yard.submit(b"t", header(NAME))
    part = yard.read()
    assert (part.data, part.bytes_total, part.problem) == (CONTENT, 2048, "")
    assert yard.read(offset=2000, count=9).data == CONTENT[2000:2009]
    assert yard.put(CONTENT) == ValueReceived(b"c", 5, NAME.encode(), 0, received=2048)


def test_upload_goes_on_at_another_broker_of_the_same_state(yard: Yard, tmp_path: Path) -> None:
    yard.put(CONTENT[:1000], NAME)
    second = Yard(tmp_path / "blobs")
    there = second.put(b"", NAME)
    assert there == ValueReceived(b"c", 5, NAME.encode(), 0, received=1000)
    again = second.put(CONTENT[:1000], NAME)  # a message that was sent twice
    assert again == ValueReceived(b"c", 5, NAME.encode(), 0, received=1000)
    skipped = second.put(CONTENT[1500:], NAME, 1500)
    assert skipped == ValueReceived(b"c", 5, NAME.encode(), 1500, received=1000)
    second.put(CONTENT[1000:], NAME, 1000)
    assert bytes(second.files.load(NAME)) == CONTENT


def test_upload_that_was_complete_is_checked_after_a_restart(yard: Yard, tmp_path: Path) -> None:
    yard.files.append(upload_of(NAME), 0, CONTENT)
    second = Yard(tmp_path / "blobs")
    there = second.put(b"", NAME)
    assert there == ValueReceived(b"c", 5, NAME.encode(), 0, received=2048)
    assert bytes(second.files.load(NAME)) == CONTENT


def test_content_of_another_name_is_refused_and_can_be_sent_again(yard: Yard) -> None:
    reply = yard.put(CONTENT[1:] + b"x", NAME)
    assert isinstance(reply, Refused)
    assert reply.refusal is Refusal.CONFLICT
    assert "its content is another one" in reply.text
    assert not [*yard.files.walk()]
    yard.put_all()
    assert bytes(yard.files.load(NAME)) == CONTENT


@pytest.mark.parametrize("name", ["x", "../../x", f"{NAME}0000000000000000", "é"])
def test_names_of_no_value_are_refused(yard: Yard, name: str) -> None:
    assert isinstance(yard.put(b"x", name), Refused)
    yard.submit(b"t", b"")
    assert yard.read(name).problem == "not the name of a blob"


def test_full_disk_refuses_a_part_and_keeps_those_before(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.put(CONTENT[:1000], NAME)
    pwrite = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data[:5], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        refused = yard.put(CONTENT[1000:], NAME, 1000)
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.FULL
    assert refused.text.endswith("of 2,048 bytes: No space left on device")
    there = yard.put(b"", NAME)
    assert there == ValueReceived(b"c", 5, NAME.encode(), 0, received=1005)
    yard.put(CONTENT[1005:], NAME, 1005)
    assert bytes(yard.files.load(NAME)) == CONTENT


def test_quota_refuses_more(yard: Yard) -> None:
    yard.put_all()
    yard.limits = BlobLimits(quota_bytes=3000, grace_ns=GRACE_NS)
    assert yard.sweep() == [NAME]
    refused = yard.put(b"x" * 1000)
    assert isinstance(refused, Refused)
    assert "blobs.quota leaves 952 (raise it" in refused.text
    of_worker = yard.process(ValueSent(0, b"c", NAME.encode(), 0, CONTENT[:1], 5, b"w"))[0]
    assert isinstance(of_worker, ValueReceived)
    assert isinstance(yard.put(b"x" * 900), ValueReceived)
    yard.limits = BlobLimits(quota_bytes=2000, grace_ns=GRACE_NS)
    yard.sweep()
    refused = yard.put(b"y" * 10)
    assert isinstance(refused, Refused)
    assert "bytes reach the quota of 2,000 (remove some" in refused.text
    terms = yard.files.terms()
    assert terms is not None
    assert terms.problem  # for those that use the directory


def test_full_disk_stops_no_sweep_for_good(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    yard.put_all()
    yard.limits = BlobLimits(quota_bytes=3000, grace_ns=GRACE_NS)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(blob_files, "create_private", full)
        assert yard.sweep() == [NAME]
    assert yard.sweep() == [NAME]
    terms = yard.files.terms()
    assert terms is not None
    assert terms.bytes_left == 952


@pytest.mark.parametrize(
    ("shared", "key", "is_named"),
    [(False, b"", True), (False, b"k", False), (True, b"", True), (True, b"k", True)],
)
def test_peer_with_a_key_gets_no_path_but_a_shared_one(
    tmp_path: Path, key: bytes, *, shared: bool, is_named: bool
) -> None:
    yard = Yard(tmp_path / "blobs", shared=shared)
    (reply,) = yard.process(StoreRequested(0, b"c", 7, key))
    assert isinstance(reply, StoreReply)
    found = msgspec.json.decode(reply.document, type=StoreDocument)
    assert found.directory == (str(tmp_path / "blobs") if is_named else "")
    assert found.identity == "me"


def test_directory_of_another_broker_is_refused(yard: Yard, tmp_path: Path) -> None:
    yard.put_all()
    with pytest.raises(UserError, match="has the blobs of another broker"):
        BrokerBlobs(BlobFiles(tmp_path / "blobs"), "you", BlobLimits)


# Workers.


def test_worker_reads_values_of_the_tasks_that_it_holds_and_no_others(yard: Yard) -> None:
    yard.put_all()
    yard.put_all(CONTENT[1:])
    yard.submit(b"t", header(NAME))
    asked: dict[str, Any] = {"worker": b"w", "held": b"t"}
    refused = yard.get(**asked)
    assert isinstance(refused, Refused)
    assert refused.text == "worker w does not hold task t"
    yard.process(TasksRequested(0, b"w", 9, request=4))
    assert yard.read(**asked).data == CONTENT
    other = yard.read(OTHER, **asked)
    assert (other.data, other.problem[-15:]) == (b"", ": not of task t")
    for wrong in ({"worker": b"x"}, {"held": b"u"}):
        assert isinstance(yard.get(**{**asked, **wrong}), Refused)


def test_worker_reads_values_of_results_that_its_task_needs(yard: Yard) -> None:
    yard.put_all()
    yard.submit(b"first", b"")
    yard.finish(b"first", header(NAME))
    yard.submit(b"second", header(results=["first"]))
    yard.submit(b"third", header(results=["other"]))
    yard.process(TasksRequested(0, b"w", 9, request=4))
    assert yard.read(worker=b"w", held=b"second").data == CONTENT
    assert yard.read(worker=b"w", held=b"third").problem


def test_client_reads_values_of_arguments_and_results_and_no_others(yard: Yard) -> None:
    yard.put_all()
    yard.put_all(CONTENT[1:])
    yard.submit(b"t", header(NAME))
    assert yard.read().data == CONTENT
    assert yard.read(OTHER).problem.endswith("not of task t")
    yard.finish(b"t", header(OTHER))
    assert yard.read(OTHER).data == CONTENT[1:]
    unknown = yard.read(task=b"nobody")
    assert (unknown.found, unknown.data) == (False, b"")


def test_key_has_to_send_what_no_task_names(tmp_path: Path) -> None:
    yard = Yard(tmp_path / "blobs")
    yard.put_all()  # of a client without a key

    def create(name: bytes) -> Effect:
        asked = SubmitRequested(0, b"c", Submission([name], [header(NAME)]), 3, by=b"key")
        return yard.process(asked)[0]

    def send(data: bytes, offset: int = 0, by: bytes = b"key") -> int:
        sent = ValueSent(0, b"c", NAME.encode(), offset, data, 5, by=by)
        (reply,) = yard.process(sent)
        assert isinstance(reply, ValueReceived)
        return reply.received

    refused = create(b"a")
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.BYTES_UNKNOWN
    assert send(b"") == 0
    assert send(CONTENT[:1000]) == 1000
    assert send(CONTENT[1000:], 1000, b"other") == 0  # the end alone proves nothing
    assert isinstance(create(b"a"), Refused)
    assert send(CONTENT[1000:], 1000) == len(CONTENT)
    assert [file.id for file in yard.files.walk()] == [NAME]
    assert isinstance(create(b"a"), Accepted)
    assert send(b"", by=b"third") == len(CONTENT)  # a task names it


def test_key_need_not_prove_what_a_shared_directory_shows(tmp_path: Path) -> None:
    yard = Yard(tmp_path / "blobs", shared=True)
    yard.put_all()
    asked = SubmitRequested(0, b"c", Submission([b"a"], [header(NAME)]), 3, by=b"key")
    assert isinstance(yard.process(asked)[0], Accepted)


def test_result_of_a_task_that_is_not_in_memory_is_found_outside_the_campaign(yard: Yard) -> None:
    terms = [Terms(campaign=b"k")]
    payload = header(results=["first"])
    yard.process(SubmitRequested(0, b"c", Submission([b"second"], [payload], terms), 3))
    task = yard.scheduler.ledger.tasks[b"k/second"]
    assert blobs_needed(task, {b"first": header(NAME)}.get) == {NAME}
    assert blobs_needed(task, {b"first": header(NAME), b"k/first": header(OTHER)}.get) == {OTHER}


@pytest.mark.parametrize(
    "line",
    [b'{"pickle":1,"results":["\xff"]}', b'{"pickle":1,"results":["a"],"x":' + b"[" * 200_000],
)
def test_first_line_of_another_kind_names_no_results(yard: Yard, line: bytes) -> None:
    yard.put_all()
    yard.submit(b"t", line + b"\n")
    yard.process(TasksRequested(0, b"w", 9, request=4))
    assert yard.read(worker=b"w", held=b"t").problem.endswith("not of task t")


def test_file_that_can_not_be_read_is_a_problem_of_its_reader(yard: Yard) -> None:
    yard.put_all()
    yard.submit(b"t", header(NAME))
    path = yard.files.path(NAME)
    path.unlink()
    path.symlink_to("/etc/passwd")
    part = yard.read()
    assert "a symbolic link" in part.problem
    assert not part.data


def test_part_that_is_a_link_is_refused(yard: Yard, tmp_path: Path) -> None:
    path = yard.files.path(upload_of(NAME))
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "other")
    refused = yard.put(CONTENT)
    assert isinstance(refused, Refused)
    assert not (tmp_path / "other").exists()


# Removal.


def test_unused_value_is_removed_after_its_grace(yard: Yard) -> None:
    yard.put_all()
    yard.age(50)
    assert yard.sweep() == [NAME]
    yard.age(100)
    assert yard.sweep() == []


def test_value_is_kept_while_its_task_may_run(yard: Yard) -> None:
    yard.put_all()
    yard.submit(b"t", header(NAME))
    yard.age(1000)
    assert yard.sweep() == [NAME]
    yard.store.trim(yard.store.head.sequence)
    assert yard.sweep() == [NAME]
    yard.process(CancelRequested(0, b"c", Scope(names=(b"t",)), 5))
    assert yard.sweep() == []


def test_argument_and_result_are_kept_by_the_records_that_name_them(yard: Yard) -> None:
    """No compaction has covered these records. It forgets arguments of ended tasks."""
    yard.put_all()
    yard.put_all(CONTENT[1:])
    yard.submit(b"t", header(NAME))
    yard.finish(b"t", header(OTHER))
    yard.age(1000)
    assert {*yard.sweep()} == {NAME, OTHER}
    yard.store.trim(yard.store.head.sequence)
    assert yard.sweep() == []


def test_age_removes_what_ended_tasks_name(yard: Yard) -> None:
    yard.put_all()
    yard.submit(b"t", b"")
    yard.finish(b"t", header(NAME))
    yard.limits = BlobLimits(grace_ns=GRACE_NS, keep_ns=2000 * SECOND_NS)
    yard.age(1000)
    assert yard.sweep() == [NAME]
    yard.age(2000)
    assert yard.sweep() == []


@pytest.mark.parametrize("done", ["before", "after", "in the same turn"])
def test_result_is_kept_while_a_task_that_needs_it_may_run(yard: Yard, done: str) -> None:
    yard.limits = BlobLimits(grace_ns=GRACE_NS, keep_ns=2000 * SECOND_NS)
    yard.put_all()
    yard.submit(b"first", b"")
    if done == "before":
        yard.finish(b"first", header(NAME))
        yard.submit(b"second", header(results=["first"]))
    elif done == "in the same turn":
        yard.process(TasksRequested(0, b"w", 9, request=4))
        second = Submission([b"second"], [header(results=["first"])])
        yard.process(
            TasksReported(0, b"w", [b"first"], [1], None, [header(NAME)], None, 8),
            SubmitRequested(0, b"c", second, 3),
        )
    else:
        yard.submit(b"second", header(results=["first"]), after=[[b"first"]])
        yard.finish(b"first", header(NAME))
    yard.age(4000)
    assert yard.sweep() == [NAME]
    yard.process(CancelRequested(0, b"c", Scope(names=(b"second",)), 5))
    assert yard.sweep() == []


def test_result_is_kept_for_a_task_that_waits_for_a_name_to_come(yard: Yard) -> None:
    yard.limits = BlobLimits(grace_ns=GRACE_NS, keep_ns=2000 * SECOND_NS)
    yard.put_all()
    waits = Submission([b"second"], [header(results=["first"])], after=[[b"first"]])
    yard.process(SubmitRequested(0, b"c", waits, 3, unknown=UnknownPolicy.WAIT))
    yard.submit(b"first", b"")
    yard.finish(b"first", header(NAME))
    yard.age(4000)
    assert yard.sweep() == [NAME]


def test_blob_that_is_named_again_meanwhile_is_not_removed(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task names it when the sweep has already seen all tasks."""
    yard.put_all()
    yard.age(1000)
    remove = yard.files.remove

    def late(name: str, unused_since_ns: int) -> bool:
        used_ns = yard.clock.now_ns
        os.utime(yard.files.path(name), ns=(used_ns, used_ns))
        return remove(name, unused_since_ns)

    monkeypatch.setattr(yard.files, "remove", late)
    assert yard.sweep() == [NAME]


def test_nothing_is_removed_soon_after_a_start(yard: Yard, tmp_path: Path) -> None:
    yard.put_all()
    second = Yard(tmp_path / "blobs")
    second.clock.now_ns += 10_000 * SECOND_NS
    second.retention = second.new_retention()
    assert second.sweep() == [NAME]
    second.age(100)
    assert second.sweep() == []


def test_unfinished_uploads_are_removed_after_the_grace(yard: Yard) -> None:
    yard.put(CONTENT[:10], NAME)
    assert len(yard.sweep()) == 1
    yard.age(1000)
    assert yard.sweep() == []


def test_directory_that_is_not_mounted_any_more_is_not_created(yard: Yard, tmp_path: Path) -> None:
    yard.put_all()
    (tmp_path / "blobs").rename(tmp_path / "away")
    (tmp_path / "blobs").mkdir()
    refused = yard.put(CONTENT[1:])
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.FULL
    assert not [*(tmp_path / "blobs").iterdir()]
    yard.sweep()
    (tmp_path / "blobs").rmdir()
    (tmp_path / "away").rename(tmp_path / "blobs")
    yard.put_all(CONTENT[1:])
    assert {*yard.sweep()} == {NAME, OTHER}


def test_submission_that_names_missing_bytes_is_refused_and_changes_nothing(yard: Yard) -> None:
    yard.put_all()
    names, head = [b"a", b"b", b"c"], yard.store.head
    payloads = [header(NAME), header(NAME, OTHER), b""]
    event = SubmitRequested(0, b"c", Submission(names, payloads), 3)
    (refused,) = yard.process(event)
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.BYTES_UNKNOWN
    assert [(one.index, one.name) for one in refused.tasks] == [(1, b"b")]
    assert refused.text.startswith("task b: names bytes that are not at the broker: ")
    assert yard.store.head == head
    yard.put_all(CONTENT[1:])
    yard.process(SubmitRequested(0, b"c", Submission(names, payloads), 4))
    assert yard.store.head != head


def test_result_that_names_missing_bytes_is_refused_and_its_task_runs_again(yard: Yard) -> None:
    names = [b"a", b"b", b"c"]
    both = header(NAME, OTHER)
    results: list[Content] = [header(NAME), both, b"short"]
    yard.put_all()
    for name in names:
        yard.submit(name, b"")
    yard.process(TasksRequested(0, b"w", 3, request=4))
    (reply,) = yard.process(TasksReported(0, b"w", names, [1, 1, 1], None, results, None, 8))
    assert isinstance(reply, ReportAck)
    assert not reply.missing
    tasks = [yard.scheduler.ledger.tasks[name] for name in names]
    assert [task.state for task in tasks] == [TaskState.DONE, TaskState.DELAYED, TaskState.DONE]
    assert tasks[1].failures == 0  # of the task
    assert yard.scheduler.ledger.reasons[b"b"] == (
        b"its result names bytes that are not at the broker: " + short_name(OTHER).encode()
    )
    yard.process(TasksRequested(0, b"w", 3, request=5))
    assert tasks[1].attempt == 1  # not at once
    yard.clock.now_ns += MISSING_RETRY_NS
    yard.put_all(CONTENT[1:])
    yard.finish(b"b", both)
    assert tasks[1].attempt == 2  # the report was of the first attempt
    yard.process(TasksReported(0, b"w", [b"b"], [2], None, [both], None, 9))
    assert [task.state for task in tasks] == [TaskState.DONE] * 3
