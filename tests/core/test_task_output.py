"""Output of attempts: fencing of parts, what the journal keeps, and which files stay."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.core import model
from taskyard.core.blobs import Blob, Content
from taskyard.core.effects import OutputEnded, OutputWritten, Part, Refused, ReportAck
from taskyard.core.events import (
    Outcome,
    OutputAppended,
    OutputSpaceChanged,
    PartRequested,
)
from taskyard.core.model import OutputChunk, OutputColumns, Refusal, Stream
from taskyard.core.records import Failed, Finished, Progressed
from tests.core.kit import Yard

OUT, ERR = Stream.STDOUT, Stream.STDERR

DIGEST = bytes(range(32))
LONG = Blob(DIGEST, 90_000, b"ends")


def holding(*names: bytes, **terms: Any) -> Yard:
    yard = Yard()
    yard.join(b"w")
    yard.submit(*names, **terms)
    yard.take(b"w", len(names))
    return yard


def printed(out: Content = b"", err: Content = b"") -> OutputColumns:
    return OutputColumns([out], [err])


def test_parts_of_held_attempts_are_written_and_others_are_refused() -> None:
    yard = holding(b"c/a", campaign=b"")
    yard.submit(b"idle")
    event = OutputAppended(
        0, b"w", [b"c/a", b"c/a", b"idle"], [1, 2, 1], [OUT, OUT, ERR], [5, 0, 0], [b"x"] * 3, 7
    )
    chunk = OutputChunk(b"", b"c/a", 1, OUT, 5, b"x")
    assert yard.handle(event) == [OutputWritten(b"w", 7, [chunk], [(b"c/a", 2), (b"idle", 1)])]
    assert yard.records == []


def test_part_names_the_campaign_apart() -> None:
    yard = holding(b"a", campaign=b"c")
    (written,) = yard.handle(OutputAppended(0, b"w", [b"c/a"], [1], [ERR], [0], [b"x"]))
    assert isinstance(written, OutputWritten)
    assert written.chunks == [OutputChunk(b"c", b"a", 1, ERR, 0, b"x")]


def test_parts_with_columns_of_different_length_are_refused() -> None:
    (refused,) = holding(b"a").handle(OutputAppended(0, b"w", [b"a"], [1], [OUT], [0], [], 3))
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.MALFORMED


def test_done_task_keeps_its_stderr_beside_its_result() -> None:
    yard = holding(b"a")
    effects = yard.finish(b"w", b"a", texts=[b"out"], output=printed(err=b"err"), request=4)
    assert effects == [ReportAck(b"w", 4, [])]
    assert yard.records == [
        Progressed(0, b"w", [b"a"], [1], [0], [b""], [b"err"]),
        Finished(0, b"w", [b"a"], [1], [b"out"]),
    ]


def test_long_result_is_a_blob_and_not_truncated() -> None:
    yard = holding(b"a", campaign=b"c")
    ended, _ack = yard.finish(b"w", b"c/a", texts=[LONG], output=printed())
    assert ended == OutputEnded(b"c", b"a", 1, [(OUT, LONG)], [])
    assert yard.records == [Finished(0, b"w", [b"c/a"], [1], [LONG])]
    assert yard.scheduler.ledger.campaigns[b"c"].truncated == 0


def test_result_of_which_the_worker_kept_a_part_is_truncated() -> None:
    yard = holding(b"a", campaign=b"c")
    yard.finish(b"w", b"c/a", texts=[Blob(b"", 90_000, b"end")])
    assert yard.scheduler.ledger.campaigns[b"c"].truncated == 1


def test_appended_streams_that_the_journal_has_whole_are_dropped() -> None:
    yard = holding(b"a")
    model = printed(Blob(DIGEST, 3, b"out"), LONG)
    ended, _ack = yard.report(b"w", b"a", Outcome.FAILED, texts=[b"bad"], output=model)
    assert ended == OutputEnded(b"", b"a", 1, [(ERR, LONG)], [OUT])
    progressed, failed = yard.records
    assert progressed == Progressed(0, b"w", [b"a"], [1], [0], [b"out"], [LONG])
    assert isinstance(failed, Failed)


def test_appended_short_result_is_in_its_record_and_is_dropped() -> None:
    yard = holding(b"a", b"b")
    texts = [Blob(DIGEST, 3, b"out"), b"other"]
    model = OutputColumns([b"", b""], [b"", b""])
    ended, _ack = yard.finish(b"w", b"a", b"b", texts=texts, output=model)
    assert ended == OutputEnded(b"", b"a", 1, [], [OUT])
    assert yard.records == [Finished(0, b"w", [b"a", b"b"], [1, 1], [b"out", b"other"])]


def test_refused_stream_is_dropped() -> None:
    yard = holding(b"a")
    cut = Blob(b"", 90_000, b"ends")
    ended, _ack = yard.finish(b"w", b"a", texts=[b"out"], output=printed(err=cut))
    assert ended == OutputEnded(b"", b"a", 1, [], [ERR])
    assert yard.records[0] == Progressed(0, b"w", [b"a"], [1], [0], [b""], [cut])


def test_output_of_a_stale_report_is_not_kept() -> None:
    yard = holding(b"a")
    yard.finish(b"w", b"a", attempts=[9], output=printed(LONG))
    assert not any(isinstance(record, Progressed) for record in yard.records)
    assert yard.scheduler.ledger.outputs == {}


def test_records_of_output_are_linked() -> None:
    yard = holding(b"a", retry_delays_ns=(0, 0))
    numbers: list[int] = []
    for attempt in (1, 2):
        model = printed(b"try %d" % attempt)
        yard.report(b"w", b"a", Outcome.FAILED, texts=[b""], output=model)
        (record,) = [record for record in yard.records if isinstance(record, Progressed)]
        assert record.previous == (None if attempt == 1 else [numbers[0]])
        numbers.append(yard.scheduler.ledger.outputs[b"a"])
        yard.later(1)
        yard.take(b"w")


def test_request_for_a_stream_names_the_attempt_and_its_record() -> None:
    yard = holding(b"a", b"b")
    yard.finish(b"w", b"a", texts=[b"out"])
    asked = PartRequested(0, b"client", b"a", 5, OUT, offset=3, count=4)
    (reply,) = yard.handle(asked)
    assert isinstance(reply, Part)
    assert (reply.attempt, reply.live, reply.offset, reply.count) == (1, False, 3, 4)
    assert reply.finished_record == yard.scheduler.ledger.record
    (running,) = yard.handle(PartRequested(0, b"client", b"b", 5, ERR))
    assert isinstance(running, Part)
    assert (running.attempt, running.live, running.finished_record) == (1, True, 0)
    (earlier,) = yard.handle(PartRequested(0, b"client", b"b", 5, ERR, attempt=0))
    assert isinstance(earlier, Part)
    assert not earlier.live


def test_submissions_are_refused_while_output_is_over_its_quota() -> None:
    yard = Yard()
    yard.handle(OutputSpaceChanged(0, "output: too much"))
    (refused,) = yard.submit(b"a")
    assert isinstance(refused, Refused)
    assert (refused.refusal, refused.text) == (Refusal.FULL, "output: too much")
    yard.handle(OutputSpaceChanged(0, ""))
    yard.submit(b"a")
    assert b"a" in yard.scheduler.ledger.tasks


class TestPaths:
    @pytest.mark.parametrize(
        ("name", "part"),
        [
            (b"fetch-a.1", "fetch-a.1"),
            (b"a/b", "a%2Fb"),
            (b"..", "%2E."),
            (b"@", "%40"),
            (b"a~b", "a%7Eb"),
            (b"\xff\n", "%FF%0A"),
        ],
    )
    def test_name_is_encoded(self, name: bytes, part: str) -> None:
        assert model.encode_name(name) == part

    def test_long_names_are_cut_and_stay_different(self) -> None:
        names = [b"x" * 300 + b"%d" % number for number in range(2)]
        parts = [model.encode_name(name) for name in names]
        assert parts[0] != parts[1]
        assert max(map(len, parts)) <= model.NAME_BYTES_MAX

    def test_task_outside_any_campaign_has_its_own_directory(self) -> None:
        assert model.directory_of(b"", b"a") == ("@", "a")
        assert model.directory_of(b"@", b"a") == ("%40", "a")
        assert model.file_name(3, ERR) == "3.err"
