"""Output at the broker: files, parts of streams for replies, the quota and removal by age."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.broker import output_store, results, rows
from taskyard.broker.database_files import OutputRows
from taskyard.broker.environment import DISK_CHECK_BYTES
from taskyard.broker.output_retention import (
    AGE_CHECK_NS,
    FULL_CHECK_NS,
    OutputLimits,
    OutputRetention,
)
from taskyard.broker.output_store import OutputFiles, OutputMemory, OutputStore, StreamKey
from taskyard.broker.turn import Broker
from taskyard.core.effects import OutputWritten, Refused, Settled, TaskOutput
from taskyard.core.events import (
    Outcome,
    OutputAppended,
    OutputRequested,
    SubmitRequested,
    TasksReported,
    TasksRequested,
    WatchRequested,
    WorkerLost,
    WorkerRegistered,
)
from taskyard.core.ledger import Ledger
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import EndedTask, Refusal, Result, Submission, Terms, WorkerFacts
from taskyard.core.output import OutputChunk, OutputColumns, Stream
from taskyard.core.records import Progressed
from taskyard.core.scheduler import Scheduler
from taskyard.journal.recovery import decode, outputs_in
from taskyard.journal.store import Head, MemoryStore
from taskyard.wire.dialect import DIALECTS_MAX, NATIVE_NUMBER, partial_result_reason
from tests.worker.runner_harness import SetClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from taskyard.core.effects import Effect
    from taskyard.core.events import Event

OUT = Stream.STDOUT
LONG = b"head middle tail"
KEY = StreamKey(b"c", b"a/b", 2, OUT)


def chunk(offset: int, data: bytes, key: StreamKey = KEY) -> OutputChunk:
    return OutputChunk(key.campaign, key.name, key.attempt, key.stream, offset, data)


@pytest.fixture(params=["files", "memory", "rows"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutputStore]:
    if request.param == "rows":
        from tests.broker.test_database_files import open_blobs  # noqa: PLC0415  # an extra

        with open_blobs(request.getfixturevalue("cluster").database()) as blobs:
            yield OutputRows(blobs)
    else:
        files = OutputFiles(tmp_path / "outputs")
        yield files if request.param == "files" else OutputMemory()


class TestStore:
    def test_chunks_are_written_by_offset_and_again_without_effect(
        self, store: OutputStore
    ) -> None:
        for offset, data in ((0, b"abc"), (3, b"def"), (0, b"abc"), (3, b"def")):
            assert store.write(chunk(offset, data))
        store.flush()
        assert store.read(KEY, 0, 100) == (b"abcdef", 6)
        assert store.read(KEY, 4, 1) == (b"e", 6)
        assert store.read(KEY._replace(attempt=1), 0, 1) is None

    def test_chunk_behind_a_gap_is_refused(self, store: OutputStore) -> None:
        assert store.write(chunk(0, b"abc"))
        assert not store.write(chunk(4, b"x"))
        store.flush()
        assert store.read(KEY, 0, 100) == (b"abc", 3)

    def test_end_returns_the_length_and_cuts_bytes_beyond(self, store: OutputStore) -> None:
        store.write(chunk(0, b"abcdef"))
        assert store.end(KEY, 4) == 4
        assert store.end(KEY, 9) == 4
        assert store.read(KEY, 0, 9) == (b"abcd", 4)

    def test_dropped_stream_is_gone(self, store: OutputStore) -> None:
        store.write(chunk(0, b"abc"))
        store.drop(KEY)
        store.drop(KEY)
        store.flush()
        assert store.read(KEY, 0, 1) is None


class TestFiles:
    def test_files_are_private_and_named_by_campaign_task_and_attempt(self, tmp_path: Path) -> None:
        store = OutputFiles(tmp_path / "outputs")
        store.write(chunk(0, b"abc"))
        path = tmp_path / "outputs" / "c" / "a%2Fb" / "2.out"
        assert path.read_bytes() == b"abc"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for directory in (path.parent, path.parent.parent, tmp_path / "outputs"):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700

    def test_bytes_are_counted_once(self, tmp_path: Path) -> None:
        store = OutputFiles(tmp_path)
        store.write(chunk(0, b"abc"))
        store.write(chunk(1, b"bcd"))
        assert store.bytes_used == 4
        store.drop(KEY)
        assert store.bytes_used == 0
        assert list(tmp_path.iterdir()) == []

    def test_many_streams_need_few_descriptors(self, tmp_path: Path) -> None:
        store = OutputFiles(tmp_path)
        keys = [KEY._replace(attempt=number) for number in range(output_store.OPEN_FILES_MAX + 9)]
        for key in (*keys, *keys):
            assert store.write(chunk(0, b"%d" % key.attempt, key))
        assert len(store._open) == output_store.OPEN_FILES_MAX  # noqa: SLF001  # not visible elsewhere
        for key in keys:
            data = b"%d" % key.attempt
            assert store.read(key, 0, 9) == (data, len(data))
        store.close()

    def test_walk_finds_names_that_were_cut(self, tmp_path: Path) -> None:
        store, name = OutputFiles(tmp_path), b"\xff" * 300
        for key in (KEY, StreamKey(b"", name, 1, Stream.STDERR)):
            store.write(chunk(0, b"abc", key))
        (tmp_path / "c" / "stray").write_text("")
        found = [
            (file.campaign, file.name, file.bytes_total) for file in output_store.walk(tmp_path)
        ]
        assert found == [(b"", name, 3), (b"c", b"a/b", 3)]
        for file in output_store.walk(tmp_path):
            output_store.remove(file)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


class TestRetention:
    def retention(
        self, store: OutputFiles, clock: SetClock, **limits: Any
    ) -> tuple[OutputRetention, Ledger]:
        ledger = Ledger()
        return OutputRetention(store, ledger, clock, lambda: OutputLimits(**limits)), ledger

    def run(self, retention: OutputRetention) -> None:
        while retention.run_step() == 0:
            pass

    def test_quota_counts_files_of_former_processes(self, tmp_path: Path) -> None:
        OutputFiles(tmp_path).write(chunk(0, bytes(1000)))
        store, clock = OutputFiles(tmp_path), SetClock()
        retention, _ = self.retention(store, clock, quota_bytes=1500)
        self.run(retention)
        assert (store.bytes_used, retention.problem()) == (1000, "")
        assert retention.run_step() is None
        store.write(chunk(1000, bytes(500)))
        assert retention.problem() == (
            "output: 1,500 bytes in files reach the quota of 1,500 (remove some with `taskyard "
            "clean`, or raise output.quota)"
        )

    def test_room_that_another_process_made_is_noticed(self, tmp_path: Path) -> None:
        store, clock = OutputFiles(tmp_path), SetClock()
        retention, _ = self.retention(store, clock, quota_bytes=10)
        store.write(chunk(0, bytes(10)))
        self.run(retention)
        assert retention.problem()
        output_store.remove(next(output_store.walk(tmp_path)))
        assert retention.run_step() == FULL_CHECK_NS
        clock.now_ns += FULL_CHECK_NS
        self.run(retention)
        assert retention.problem() == ""

    def test_old_output_is_removed_and_new_one_stays(self, tmp_path: Path) -> None:
        store, clock = OutputFiles(tmp_path), SetClock()
        new = KEY._replace(attempt=3)
        for key, age_ns in ((KEY, 60 * SECOND_NS), (new, 0)):
            store.write(chunk(0, b"abc", key))
            written_ns = clock.now_ns - age_ns
            os.utime(store.path(key), ns=(written_ns, written_ns))
        retention, _ = self.retention(store, clock, keep_ns=30 * SECOND_NS)
        self.run(retention)
        assert store.read(KEY, 0, 9) is None
        assert store.read(new, 0, 9) == (b"abc", 3)

    def test_old_output_of_a_task_that_may_run_stays(
        self, tmp_path: Path, harness: OutputHarness
    ) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, b"abc")
        os.utime(tmp_path / "@" / "a" / "1.out", (0, 0))
        ledger, clock = harness.broker.scheduler.ledger, SetClock()
        limits = OutputLimits(keep_ns=SECOND_NS)
        retention = OutputRetention(harness.outputs, ledger, clock, lambda: limits)
        self.run(retention)
        assert harness.page(b"a").text == b"abc"
        harness.report(b"a", Outcome.FAILED_FINAL, texts=[b"bad"])
        clock.now_ns += AGE_CHECK_NS
        self.run(retention)
        assert harness.page(b"a").text == b""


def test_disk_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = OutputFiles(tmp_path)
    store.write(chunk(0, b"abc"))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(chunk(3, b"def"))
    monkeypatch.undo()
    assert store.write(chunk(3, b"def"))
    assert store.read(KEY, 0, 9) == (b"abcdef", 6)


class OutputHarness:
    """A broker with files for output. Implements `EventTransport`."""

    def __init__(self, directory: Path) -> None:
        self.sent: list[Effect] = []
        self.store = MemoryStore()
        self.outputs = OutputFiles(directory)
        self.index = HarnessIndex()
        self.broker = Broker(
            Scheduler(), self, self.store, SetClock(), self.index, outputs=self.outputs
        )
        self.process(WorkerRegistered(0, b"w", WorkerFacts(slots_total=0)))

    def receive(self, _wait_ns: int | None) -> list[Event]:
        return []

    def send(self, effects: Sequence[Effect]) -> list[Event]:
        self.sent += effects
        return []

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
    ) -> TaskOutput:
        event = OutputRequested(0, b"client", name, 1, stream, attempt, offset)
        (effect,) = self.process(event)
        assert isinstance(effect, TaskOutput)
        return effect

    def trim(self) -> None:
        """Move output to the index and drop all rows, as a compaction does."""
        for row in [*self.store.rows(0)]:
            for record in decode(row.body):
                if isinstance(record, Progressed):
                    for name, attempt, *streams in outputs_in(record):
                        self.index.outputs[name, attempt] = streams
        self.store.trim(self.store.head.sequence)
        self.broker.completer._rows.clear()  # noqa: SLF001  # as after a restart


class HarnessIndex:
    """An index of output only."""

    has_any = False

    def __init__(self) -> None:
        self.outputs: dict[tuple[bytes, int], list[Result]] = {}

    def find(self, _names: list[bytes]) -> list[EndedTask]:
        return []

    def result(self, _name: bytes) -> Result | None:
        return Result(b"result")

    def cause(self, _name: bytes) -> bytes | None:
        return None

    def output(self, name: bytes, attempt: int, stream: Stream) -> Result | None:
        found = self.outputs.get((name, attempt))
        return None if found is None else found[stream - 1]


def columns(out: Result, err: Result, files: int = 0) -> OutputColumns:
    return OutputColumns([out.text], [err.text], [out.bytes_total], [err.bytes_total], [files])


@pytest.fixture
def harness(tmp_path: Path) -> OutputHarness:
    return OutputHarness(tmp_path)


class TestPages:
    def test_output_is_read_while_the_attempt_runs(self, harness: OutputHarness) -> None:
        harness.lease(b"a")
        empty = harness.page(b"a")
        assert (empty.text, empty.text_bytes_total, empty.live) == (b"", 0, True)
        harness.append(b"a", 1, 0, b"abc")
        page = harness.page(b"a", offset=1)
        assert (page.text, page.text_bytes_total, page.attempt, page.live) == (b"bc", 3, 1, True)

    def test_output_of_every_attempt_is_found_also_after_trimming(
        self, harness: OutputHarness
    ) -> None:
        harness.lease(b"a", retry_delays_ns=(0, 0))
        for attempt in (1, 2):
            output = columns(Result(b"out %d" % attempt), Result(b"err %d" % attempt))
            harness.report(b"a", Outcome.FAILED, texts=[b"bad"], output=output)
            harness.process(TasksRequested(0, b"w", 1, parks=False))
        output = columns(Result(b""), Result(b"e"))
        harness.report(b"a", Outcome.DONE, texts=[b"result"], output=output)
        for _ in range(2):
            texts = [
                [harness.page(b"a", stream, attempt).text for stream in Stream]
                for attempt in (1, 2, 3)
            ]
            assert texts == [[b"out 1", b"err 1"], [b"out 2", b"err 2"], [b"result", b"e"]]
            harness.trim()

    def test_long_result_is_read_from_its_file_until_it_is_removed(
        self, harness: OutputHarness
    ) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, LONG)
        output = columns(Result(b""), Result(b""), OUT)
        harness.report(b"a", Outcome.DONE, texts=[b"ends"], result_bytes_total=[16], output=output)
        page = harness.page(b"a", offset=5)
        assert (page.text, page.text_bytes_total, page.problem) == (b"middle tail", 16, "")
        harness.outputs.drop(StreamKey(b"", b"a", 1, OUT))
        assert harness.page(b"a").problem == (
            "task a, attempt 1: output file outputs/@/a/1.out of 16 bytes is missing "
            "(`taskyard clean` and output.keep remove files)"
        )

    def test_file_of_a_short_stream_is_removed_when_the_journal_has_it(
        self, harness: OutputHarness, tmp_path: Path
    ) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, b"abc")
        harness.report(
            b"a", Outcome.DONE, texts=[b"abc"], output=columns(Result(b""), Result(b""), OUT)
        )
        assert list(tmp_path.iterdir()) == []
        assert harness.page(b"a").text == b"abc"

    def test_output_of_a_lost_attempt_stays_readable(self, harness: OutputHarness) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, b"so far")
        harness.process(WorkerLost(0, b"w"))
        page = harness.page(b"a", attempt=1)
        assert (page.text, page.live) == (b"so far", False)


class TestWholeResults:
    """For clients of dialects without a request for output."""

    REQUEST = DIALECTS_MAX + NATIVE_NUMBER + 1

    def settle(self, harness: OutputHarness, name: bytes, request: int, result: bytes) -> Settled:
        """Finish a task with a long result. Return the reply to a client that watches it."""
        harness.lease(name)
        harness.process(WatchRequested(0, b"client", [name], request=request))
        harness.append(name, 1, 0, result)
        output = columns(Result(b""), Result(b""), OUT)
        report = TasksReported(0, b"w", [name], outcomes=[Outcome.DONE], texts=[b"ends"])
        report.result_bytes_total, report.output = [len(result)], output
        return next(one for one in harness.process(report) if isinstance(one, Settled))

    def test_long_result_is_sent_whole_to_all_but_native_clients(
        self, harness: OutputHarness
    ) -> None:
        plain = self.settle(harness, b"a", self.REQUEST, LONG)
        assert (plain.texts, plain.truncated) == ([LONG], {})
        assert partial_result_reason(plain) is None
        native = self.settle(harness, b"b", DIALECTS_MAX, LONG)
        assert (native.texts, native.truncated) == ([b"ends"], {b"b": 16})

    def test_result_longer_than_a_payload_is_refused_with_a_hint(
        self, harness: OutputHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(results, "PAYLOAD_BYTES_MAX", 15)
        reply = self.settle(harness, b"a", self.REQUEST, LONG)
        assert reply.texts == [b"ends"]
        reason = b"result too long: 16 of at most 16777216 bytes (see `taskyard log a`)"
        assert partial_result_reason(reply) == reason

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
    def test_stale_attempt_can_not_write(self, harness: OutputHarness, tmp_path: Path) -> None:
        harness.lease(b"a")
        effect = harness.append(b"a", 2, 0, b"abc")
        assert effect == OutputWritten(b"w", 9, [], [(b"a", 2)])
        assert list(tmp_path.iterdir()) == []

    def test_full_disk_delays_the_worker_and_loses_nothing(
        self, harness: OutputHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        harness.lease(b"a")
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            text = "output of tasks can't be written: No space left on device"
            refused = Refused(b"w", 9, Refusal.RETRY_LATER, text)
            assert harness.append(b"a", 1, 0, b"abc") == refused
        assert harness.append(b"a", 1, 0, b"abc") == OutputWritten(b"w", 9, [], [])
        assert harness.page(b"a").text == b"abc"

    def test_output_leaves_the_reserve_of_the_disk_to_the_journal(
        self, harness: OutputHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness.lease(b"a")
        harness.append(b"a", 1, 0, bytes(DISK_CHECK_BYTES))  # the next turn checks the disk
        with monkeypatch.context() as patched:
            patched.setattr(harness.store, "disk_free_bytes", lambda: 0)
            refused = harness.append(b"a", 1, DISK_CHECK_BYTES, b"x")
            assert isinstance(refused, Refused)
            assert refused.refusal is Refusal.RETRY_LATER
            assert harness.page(b"a", offset=DISK_CHECK_BYTES).text == b""
            harness.report(b"a", Outcome.FAILED, texts=[b"bad"])
        assert harness.broker.scheduler.ledger.tasks[b"a"].state.name == "FAILED"

    def test_gap_is_reported_to_the_worker(self, harness: OutputHarness) -> None:
        harness.lease(b"a")
        assert harness.append(b"a", 1, 7, b"abc") == OutputWritten(b"w", 9, [], [(b"a", 1)])

    def test_file_is_synced_before_the_commit_that_refers_to_it(
        self, harness: OutputHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[str] = []
        end, commit = harness.outputs.end, harness.store.commit

        def noted_end(key: StreamKey, bytes_total: int) -> int:
            steps.append("sync")
            return end(key, bytes_total)

        def noted_commit(body: bytes, records: int) -> Head:
            steps.append("commit")
            return commit(body, records)

        monkeypatch.setattr(harness.outputs, "end", noted_end)
        monkeypatch.setattr(harness.store, "commit", noted_commit)
        harness.lease(b"a")
        harness.append(b"a", 1, 0, bytes(20))
        steps.clear()
        harness.report(
            *(b"a", Outcome.DONE),
            texts=[b"ends"],
            result_bytes_total=[20],
            output=columns(Result(b""), Result(b""), OUT),
        )
        assert steps == ["sync", "commit"]
