"""Output at the broker: streams that are sealed, parts for replies, the quota, removal by age."""

from __future__ import annotations

import errno
import os
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.broker import results, rows
from taskyard.broker.blob_retention import SCAN_NS, BlobRetention
from taskyard.broker.blobs import BlobLimits, BrokerBlobs
from taskyard.broker.turn import CHECK_BYTES, Broker
from taskyard.core.blobs import Blob, Content
from taskyard.core.effects import OutputWritten, Part, Refused, Settled
from taskyard.core.events import (
    CancelRequested,
    Outcome,
    OutputAppended,
    PartRequested,
    Scope,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    WatchRequested,
    WorkerLost,
    WorkerRegistered,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import (
    EndedTask,
    OutputColumns,
    Refusal,
    Stream,
    Submission,
    Terms,
    WorkerFacts,
)
from taskyard.core.records import Progressed
from taskyard.core.scheduler import Scheduler
from taskyard.core.timer_heap import TimerHeap
from taskyard.journal.archive import END, Streams
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import StreamKey, name_of
from taskyard.journal.recovery import decode, outputs_in
from taskyard.journal.store import Head, MemoryStore
from taskyard.wire.dialect import DIALECTS_MAX, NATIVE_NUMBER, text_and_problem
from tests.worker.runner_harness import SetClock

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from taskyard.core.effects import Effect
    from taskyard.core.events import Event

OUT = Stream.STDOUT
LONG = b"head middle tail"
KEY = StreamKey(b"", b"a", 1, OUT)


class OutputHarness:
    """A broker with files for output. Implements `EventTransport`."""

    timers = TimerHeap()

    def __init__(self, directory: Path) -> None:
        self.sent: list[Effect] = []
        self.store = MemoryStore()
        self.clock = SetClock()
        self.clock.now_ns = time.time_ns()  # files have the system's time
        self.outputs = BlobFiles(directory / "blobs")
        self.limits = BlobLimits()
        self.blobs = BrokerBlobs(self.outputs, "me", lambda: self.limits)
        self.index = HarnessIndex()
        self.broker = Broker(
            Scheduler(), self, self.store, self.clock, self.index, blobs=self.blobs
        )
        self.process(WorkerRegistered(0, b"w", WorkerFacts(slots_total=0)))

    def receive(self, _wait_ns: int | None) -> list[Event]:
        return []

    def send(self, effects: Sequence[Effect]) -> list[Event]:
        self.sent += effects
        return []

    def is_reading(self, client: bytes) -> bool:
        del client
        return True

    def process(self, *events: Event) -> list[Effect]:
        """Run one turn on events. Return its effects."""
        self.sent = []
        self.broker.process(list(events))
        return self.sent

    def lease(self, name: bytes, **terms: Any) -> None:
        self.process(SubmitRequested(0, b"client", Submission([name], terms=[Terms(**terms)])))
        self.process(TasksRequested(0, b"w", 1, parks=False))

    def append(self, name: bytes, attempt: int, offset: int, data: bytes) -> Effect:
        event = OutputAppended(0, b"w", [name], [attempt], [OUT], [offset], [data], 9)
        (effect,) = self.process(event)
        return effect

    def report(self, name: bytes, outcome: Outcome, **fields: Any) -> None:
        self.process(TasksReported(0, b"w", [name], outcomes=[outcome], **fields))

    def page(
        self, name: bytes, stream: Stream = OUT, attempt: int | None = None, offset: int = 0
    ) -> Part:
        event = PartRequested(0, b"client", name, 1, stream, attempt, offset=offset)
        (effect,) = self.process(event)
        assert isinstance(effect, Part)
        return effect

    def trim(self) -> None:
        """Move output to the index and drop all rows, as a compaction does."""
        for row in [*self.store.rows(0)]:
            for record in decode(row.body):
                if isinstance(record, Progressed):
                    for name, attempt, out, err in outputs_in(record):
                        self.index.outputs[name, attempt] = (out, err)
        self.store.trim(self.store.head.sequence)
        self.broker.completer._rows.clear()  # noqa: SLF001  # as after a restart


class HarnessIndex:
    """An index of output only."""

    has_any = False

    def __init__(self) -> None:
        self.outputs: dict[tuple[bytes, int], Streams] = {}

    def find(self, _names: list[bytes]) -> list[EndedTask]:
        return []

    def streams(self, name: bytes, attempt: int = END) -> Streams | None:
        if attempt == END:
            return b"result", b""
        return self.outputs.get((name, attempt))


def columns(out: Content = b"", err: Content = b"") -> OutputColumns:
    return OutputColumns([out], [err])


def blob_of(whole: bytes, ends: bytes = b"ends") -> Blob:
    return Blob(sha256(whole).digest(), len(whole), ends)


@pytest.fixture
def harness(tmp_path: Path) -> OutputHarness:
    return OutputHarness(tmp_path)


class TestPages:
    def test_output_is_read_while_the_attempt_runs(self, harness: OutputHarness) -> None:
        harness.lease(b"a")
        empty = harness.page(b"a")
        assert (empty.data, empty.bytes_total, empty.live) == (b"", 0, True)
        harness.append(b"a", 1, 0, b"abc")
        page = harness.page(b"a", offset=1)
        assert (page.data, page.bytes_total, page.attempt, page.live) == (b"bc", 3, 1, True)

    def test_output_of_every_attempt_is_found_also_after_trimming(
        self, harness: OutputHarness
    ) -> None:
        harness.lease(b"a", retry_delays_ns=(0, 0))
        for attempt in (1, 2):
            output = columns(b"out %d" % attempt, b"err %d" % attempt)
            harness.report(b"a", Outcome.FAILED, texts=[b"bad"], output=output)
            harness.process(TasksRequested(0, b"w", 1, parks=False))
        output = columns(err=b"e")
        harness.report(b"a", Outcome.DONE, texts=[b"result"], output=output)
        for _ in range(2):
            texts = [
                [harness.page(b"a", stream, attempt).data for stream in Stream]
                for attempt in (1, 2, 3)
            ]
            assert texts == [[b"out 1", b"err 1"], [b"out 2", b"err 2"], [b"result", b"e"]]
            harness.trim()

    def test_long_result_is_read_from_its_file_until_it_is_removed(
        self, harness: OutputHarness
    ) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, LONG)
        harness.report(b"a", Outcome.DONE, texts=[blob_of(LONG)], output=columns())
        page = harness.page(b"a", offset=5)
        assert (page.data, page.bytes_total, page.problem) == (b"middle tail", 16, "")
        assert page.digest == sha256(LONG).digest()
        harness.outputs.path(name_of(LONG)).unlink()
        assert harness.page(b"a").problem == (
            "task a, attempt 1: 16 bytes of output are missing "
            "(`taskyard clean` and blobs.keep remove them)"
        )

    def test_file_of_a_short_stream_is_removed_when_the_journal_has_it(
        self, harness: OutputHarness
    ) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, b"abc")
        appended = blob_of(b"abc", b"abc")
        harness.report(b"a", Outcome.DONE, texts=[appended], output=columns())
        assert not [*harness.outputs.walk()]
        assert harness.page(b"a").data == b"abc"

    @pytest.mark.parametrize("offset", [0, 5])
    def test_chunk_that_comes_again_with_the_report_begins_no_other_stream(
        self, harness: OutputHarness, offset: int
    ) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, LONG)
        again = OutputAppended(0, b"w", [b"a"], [1], [OUT], [offset], [LONG[offset:]], 9)
        report = TasksReported(0, b"w", [b"a"], outcomes=[Outcome.DONE], texts=[blob_of(LONG)])
        report.output = columns()
        assert not any(isinstance(one, Refused) for one in harness.process(again, report))
        assert [file.id for file in harness.outputs.walk()] == [name_of(LONG)]

    def test_stream_that_a_killed_broker_left_behind_is_dropped_at_the_start(
        self, harness: OutputHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in (b"a", b"b"):
            harness.lease(name)
            harness.append(name, 1, 0, b"abc")
        with monkeypatch.context() as patch:
            patch.setattr(BlobFiles, "drop", lambda *_: None)
            appended = columns(blob_of(b"abc", b"abc"))
            harness.report(b"a", Outcome.FAILED, texts=[b"bad"], output=appended)
        assert len([*harness.outputs.walk()]) == 2
        harness.blobs.drop_ended(harness.store, harness.broker.scheduler.ledger)
        assert [file.id for file in harness.outputs.walk()] == [StreamKey(b"", b"b", 1, OUT)]

    def test_output_of_a_lost_attempt_stays_readable(self, harness: OutputHarness) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, b"so far")
        harness.process(WorkerLost(0, b"w"))
        page = harness.page(b"a", attempt=1)
        assert (page.data, page.live) == (b"so far", False)


class TestWholeResults:
    """For clients of dialects without a request for output."""

    REQUEST = DIALECTS_MAX + NATIVE_NUMBER + 1

    def settle(self, harness: OutputHarness, name: bytes, request: int, result: bytes) -> Settled:
        """Finish a task with a long result. Return the reply to a client that watches it."""
        harness.lease(name)
        harness.process(WatchRequested(0, b"client", [name], request=request))
        harness.append(name, 1, 0, result)
        report = TasksReported(0, b"w", [name], outcomes=[Outcome.DONE], texts=[blob_of(result)])
        report.output = columns()
        return next(one for one in harness.process(report) if isinstance(one, Settled))

    def test_long_result_is_sent_whole_to_all_but_native_clients(
        self, harness: OutputHarness
    ) -> None:
        plain = self.settle(harness, b"a", self.REQUEST, LONG)
        assert plain.texts == [LONG]
        assert text_and_problem(plain) == (LONG, None)
        native = self.settle(harness, b"b", DIALECTS_MAX, LONG)
        assert native.texts == [blob_of(LONG)]

    def test_result_longer_than_a_payload_is_refused_with_a_hint(
        self, harness: OutputHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(results, "PAYLOAD_BYTES_MAX", 15)
        reply = self.settle(harness, b"a", self.REQUEST, LONG)
        assert reply.texts == [blob_of(LONG)]
        problem = b"result too long: 16 of at most 16777216 bytes (see `taskyard log a`)"
        assert text_and_problem(reply) == (b"ends", problem)

    def test_replies_beyond_the_room_of_a_turn_follow_in_the_next(
        self, harness: OutputHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rows, "READ_COST", 0)
        monkeypatch.setattr(rows, "READ_BYTE_COST", 0)
        monkeypatch.setattr(rows, "TURN_COST_MAX", 24 * rows.REPLY_BYTE_COST)
        for name in (b"a", b"b", b"c"):
            self.settle(harness, name, self.REQUEST, LONG)
        names = [b"a", b"b", b"c"]
        sent = harness.process(WatchRequested(0, b"other", names, request=self.REQUEST))
        assert [one.texts for one in sent if isinstance(one, Settled)] == [[LONG] * 3]
        waiting = [
            WatchRequested(0, b"other", [name], request=self.REQUEST + DIALECTS_MAX * number)
            for number, name in enumerate(names, start=1)
        ]
        sent = harness.process(*waiting)
        assert [one.names for one in sent if isinstance(one, Settled)] == [[b"a"], [b"b"]]
        assert harness.broker.wait_ns() == 0
        assert [one.names for one in harness.process() if isinstance(one, Settled)] == [[b"c"]]
        assert harness.broker.wait_ns() != 0


class TestWriting:
    def test_stale_attempt_can_not_write(self, harness: OutputHarness) -> None:
        harness.lease(b"a")
        effect = harness.append(b"a", 2, 0, b"abc")
        assert effect == OutputWritten(b"w", 9, [], [(b"a", 2)])
        assert not [*harness.outputs.walk()]

    def test_chunk_that_can_not_be_written_is_refused_and_changes_nothing(
        self, harness: OutputHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        harness.lease(b"a")
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            text = "the broker can't write its output: No space left on device"
            refused = Refused(b"w", 9, Refusal.FULL, text)
            assert harness.append(b"a", 1, 0, b"abc") == refused
        assert harness.append(b"a", 1, 0, b"abc") == OutputWritten(b"w", 9, [], [])
        assert harness.page(b"a").data == b"abc"

    def test_output_leaves_the_reserve_of_the_disk_to_the_journal(
        self, harness: OutputHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, bytes(CHECK_BYTES))  # the next turn checks the disk
        with monkeypatch.context() as patched:
            patched.setattr(harness.store, "disk_free_bytes", lambda: 0)
            refused = harness.append(b"a", 1, CHECK_BYTES, b"x")
            assert isinstance(refused, Refused)
            assert refused.refusal is Refusal.FULL
            assert harness.page(b"a", offset=CHECK_BYTES).data == b""
            harness.report(b"a", Outcome.FAILED, texts=[b"bad"])
        assert harness.broker.scheduler.ledger.tasks[b"a"].state.name == "FAILED"

    def test_gap_is_reported_to_the_worker(self, harness: OutputHarness) -> None:
        harness.lease(b"a")
        assert harness.append(b"a", 1, 7, b"abc") == OutputWritten(b"w", 9, [], [(b"a", 1)])

    def test_blob_is_sealed_before_the_commit_that_refers_to_it(
        self, harness: OutputHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[str] = []
        seal, commit = harness.outputs.seal, harness.store.commit

        def noted_seal(key: StreamKey, name: str) -> bool:
            steps.append("seal")
            return seal(key, name)

        def noted_commit(body: bytes, records: int) -> Head:
            steps.append("commit")
            return commit(body, records)

        monkeypatch.setattr(harness.outputs, "seal", noted_seal)
        monkeypatch.setattr(harness.store, "commit", noted_commit)
        harness.lease(b"a")
        harness.append(b"a", 1, 0, LONG)
        steps.clear()
        harness.report(b"a", Outcome.DONE, texts=[blob_of(LONG)], output=columns())
        assert steps == ["seal", "commit"]
        assert [file.id for file in harness.outputs.walk()] == [name_of(LONG)]

    def test_report_that_is_sent_again_finds_its_blob(self, harness: OutputHarness) -> None:
        """The broker was killed between sealing and its commit."""
        harness.lease(b"a")
        harness.append(b"a", 1, 0, LONG)
        assert harness.outputs.seal(KEY, name_of(LONG))
        harness.report(b"a", Outcome.DONE, texts=[blob_of(LONG)], output=columns())
        assert harness.page(b"a").data == LONG

    def test_stream_of_a_backup_is_replaced(self, harness: OutputHarness) -> None:
        """An older journal was restored beside newer streams of the same attempts."""
        harness.outputs.append(KEY, 0, b"of another history")
        harness.lease(b"a")
        assert harness.append(b"a", 1, 0, LONG[:5]) == OutputWritten(b"w", 9, [], [])
        harness.append(b"a", 1, 5, LONG[5:])
        harness.report(b"a", Outcome.DONE, texts=[blob_of(LONG)], output=columns())
        assert harness.page(b"a").data == LONG

    def test_other_bytes_at_a_known_offset_are_refused(self, harness: OutputHarness) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, LONG)
        assert harness.append(b"a", 1, 5, b"x") == OutputWritten(b"w", 9, [], [(b"a", 1)])

    def test_other_digest_than_that_of_the_bytes_is_a_loss_that_is_said(
        self, harness: OutputHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, LONG)
        harness.report(b"a", Outcome.DONE, texts=[blob_of(LONG[1:] + b"x")], output=columns())
        assert "task a, attempt 1: its stdout is lost, but for head and tail" in caplog.text
        assert "bytes of output are missing" in harness.page(b"a").problem


class TestRetention:
    def scan(self, harness: OutputHarness, seconds: int = 0) -> None:
        """Run a scan, after some time, and one second after the start of the broker."""
        broker = harness.broker
        retention = BlobRetention(
            *(harness.blobs, broker.scheduler.ledger, harness.clock, harness.store, None),
            broker.completer.result_of,
        )
        harness.clock.now_ns += SCAN_NS + seconds * SECOND_NS
        while retention.run_step() == 0:
            pass

    def test_quota_counts_bytes_of_former_processes(self, harness: OutputHarness) -> None:
        BlobFiles(harness.outputs.directory).append(KEY, 0, bytes(1000))
        harness.limits = BlobLimits(1500)
        self.scan(harness)
        assert (harness.outputs.bytes_used, harness.blobs.problem()) == (1000, "")
        harness.outputs.append(KEY, 1000, bytes(500))
        assert harness.blobs.problem() == (
            "blobs: 1,500 bytes reach the quota of 1,500 (remove some with `taskyard clean`, or "
            "raise blobs.quota)"
        )
        harness.outputs.path(KEY).unlink()  # by another process
        self.scan(harness)
        assert harness.blobs.problem() == ""

    def test_stream_of_a_lost_attempt_goes_by_age_when_its_task_has_settled(
        self, harness: OutputHarness
    ) -> None:
        harness.limits = BlobLimits(keep_ns=30 * SECOND_NS, grace_ns=0)
        harness.lease(b"a")
        harness.append(b"a", 1, 0, b"abc")
        self.scan(harness, 100)
        assert harness.page(b"a").data == b"abc"
        harness.process(WorkerLost(0, b"w"))
        harness.process(CancelRequested(0, b"c", Scope(names=(b"a",)), 5))
        self.scan(harness)
        assert not [*harness.outputs.walk()]
