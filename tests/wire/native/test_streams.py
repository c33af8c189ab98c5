"""Output in native messages: Append, Output of a stream, and the streams in a Complete."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from taskyard.core.blobs import Blob, Content, Result
from taskyard.core.effects import Part as PartEffect
from taskyard.core.events import Outcome, OutputAppended, PartRequested, TasksReported
from taskyard.core.limits import PART_BYTES_MAX
from taskyard.core.model import OutputColumns, Stream, Submission, Terms, WorkerFacts
from taskyard.errors import BytesDamaged, BytesTruncated
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import attempt_columns, peer, task_contents
from taskyard.wire.native.attempt_columns import StreamChunk
from taskyard.wire.native.server import NativeServer
from taskyard.wire.native.task_contents import Part, StreamPages
from tests.wire.kit import Counter

Q = pb.QueryMsg
OUT, ERR = Stream.STDOUT, Stream.STDERR

DIGEST = bytes(range(32))
LONG = Blob(DIGEST, 90_000, b"ends")


def decoded(body: bytes) -> Any:
    (event,) = NativeServer(1, lambda: 0).receive(b"peer", [b"", body], 0)
    return event


def holding() -> Counter:
    counter = Counter()
    counter.ask(peer.create(1, Submission([b"a"], [b""], [Terms()])))
    counter.ask(peer.steal(2, b"w", peer.worker_message(WorkerFacts(slots_total=1)), 1))
    return counter


def test_append_is_decoded_as_sent() -> None:
    chunks = [StreamChunk(b"a", 1, OUT, 0, b"x\0"), StreamChunk(b"b", 2, ERR, 7, b"")]
    event = decoded(attempt_columns.append(3, b"w", chunks, incarnation=9))
    assert isinstance(event, OutputAppended)
    assert (event.names, event.attempts, event.streams) == ([b"a", b"b"], [1, 2], [OUT, ERR])
    assert (event.offsets, event.data, event.incarnation) == ([0, 7], [b"x\0", b""], 9)


def test_written_chunks_are_acknowledged_and_stale_ones_are_listed() -> None:
    counter = holding()
    good, stale = (StreamChunk(b"a", attempt, OUT, 0, b"x") for attempt in (1, 2))
    reply = peer.Reply(counter.ask(attempt_columns.append(3, b"w", [good])))
    assert (reply.kind, reply.names) == (peer.OK, [])
    reply = peer.Reply(counter.ask(attempt_columns.append(4, b"w", [good, stale])))
    assert (reply.kind, reply.names, reply.attempts) == (peer.NOT_FOUND, [b"a"], [2])


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"name": [b"a"], "attempt": [1], "stream": [1], "offset": [0]},
        {"name": [b"a"], "attempt": [1], "stream": [3], "offset": [0], "output": [b"x"]},
        {"name": [b"a"], "attempt": [1], "stream": [1], "offset": [1 << 63], "output": [b"x"]},
        {"name": [b"\xff"], "attempt": [1], "stream": [1], "offset": [0], "output": [b"x"]},
    ],
)
def test_malformed_append_is_refused(columns: dict[str, Any]) -> None:
    counter = holding()
    query = Q(type=Q.Append, request=5, location=b"w", batch=columns)
    reply = peer.Reply(counter.ask(query.SerializeToString()))
    assert (reply.kind, reply.code) == (peer.ERROR, "malformed")


def test_request_for_a_stream_is_decoded_and_bounded() -> None:
    event = decoded(task_contents.part(3, b"a", ERR, 5, attempt=2, count=1 << 30))
    assert isinstance(event, PartRequested)
    assert (event.stream, event.offset, event.attempt) == (ERR, 5, 2)
    assert event.count == PART_BYTES_MAX
    assert decoded(task_contents.part(3, b"a", OUT)).attempt is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": b"a", "stream_number": 3},
        {"name": b"a", "stream_number": 1, "n": 0},
        {"name": b"a", "stream_number": 1, "offset": (1 << 63) - 1},
        {"name": b"a", "value": b"x" * 85},
        {"name": b"a", "value": b"x", "held": b"b"},
        {"batch": {"name": [b"\xff"]}},
        {"batch": {"name": [b"a"]}, "held": b""},
    ],
)
def test_malformed_read_is_refused_before_anything_is_read(fields: dict[str, Any]) -> None:
    query = Q(type=Q.Read, request=5, **fields)
    reply = peer.Reply(holding().ask(query.SerializeToString()))
    assert (reply.kind, reply.code) == (peer.ERROR, "malformed")


def test_reply_has_the_part_of_the_stream() -> None:
    server = NativeServer(1, lambda: 0)
    (event,) = server.receive(b"peer", [b"", task_contents.part(3, b"a", OUT, 2)], 0)
    effect = PartEffect(b"peer", event.request, b"a", found=True, stream=OUT)  # type: ignore[attr-defined]
    effect.data, effect.bytes_total = b"cd", 9
    effect.attempt, effect.live, effect.digest = 4, True, DIGEST
    ((_, frames),) = server.reply(effect)
    assert peer.Reply(frames[-1]).part == Part(b"cd", 9, 4, live=True, digest=DIGEST)


def test_streams_of_a_report_arrive_as_columns() -> None:
    output = OutputColumns([b"", LONG], [b"e", Blob(b"", 9, b"end")])
    texts: list[Content] = [LONG, b"reason"]
    reports = peer.ReportColumns([b"a", b"b"], [1, 1], [Outcome.DONE, Outcome.FAILED], texts)
    reports.streams = output
    event = decoded(peer.complete(3, b"w", reports))
    assert isinstance(event, TasksReported)
    assert (event.texts, event.output) == (texts, output)


@pytest.mark.parametrize(
    "columns",
    [
        {"stderr": [b"", b""]},
        {"text": [b"", b""], "text_bytes_total": [1, 1]},
        {"text": [b"x"], "text_bytes_total": [1, 1]},
        {"text": [b"x"], "text_bytes_total": [1 << 63]},
        {"text": [b"x"], "text_bytes_total": [9], "text_digest": [b"short"]},
        {"text": [b"x"], "text_bytes_total": [9], "text_digest": [b"", b""]},
        {"text": [b"x"], "text_bytes_total": [9], "outcome": ["Failed"]},
        {"output": [b"x"], "output_bytes_total": [1, 1]},
        {"stdout": [b"x"], "stdout_bytes_total": [9], "stdout_digest": [b"short"]},
    ],
)
def test_malformed_streams_of_a_report_are_refused(columns: dict[str, Any]) -> None:
    batch = {"name": [b"a"], "attempt": [1], **columns}
    query = Q(type=Q.Complete, request=1, location=b"w", batch=batch)
    reply = peer.Reply(holding().ask(query.SerializeToString()))
    assert (reply.kind, reply.code) == (peer.ERROR, "malformed")


def test_long_result_is_a_blob_in_the_reply_to_a_watch() -> None:
    counter = holding()
    reports = peer.ReportColumns(names=[b"a"], attempts=[1], texts=[LONG])
    watch = peer.watch(5, [b"a"], wait_ns=10**9)
    assert counter.frames([b"", watch], b"client") == []
    counter.ask(peer.complete(6, b"w", reports))
    (body,) = [body for route, body in counter.sent if route == b"client"]
    assert peer.Reply(body).results == [Result(LONG)]


class TestPages:
    DATA = (b"first ", b"second")
    WHOLE = b"".join(DATA)

    def pages(self, *data: bytes, total: int = len(WHOLE), digest: bytes = b"") -> StreamPages:
        """Return pages to which parts were added."""
        found = StreamPages("c/a")
        for part in data:
            assert found.add(Part(part, total, 2, live=False, digest=digest)) == (
                found.offset == total
            )
        return found

    def test_last_page_ends_the_stream(self) -> None:
        pages = self.pages(*self.DATA, digest=sha256(self.WHOLE).digest())
        assert (pages.offset, pages.attempt) == (len(self.WHOLE), 2)

    def test_running_stream_may_go_on_after_all_that_is_there(self) -> None:
        pages = StreamPages("c/a")
        assert not pages.add(Part(b"x", 1, 1, live=True))
        assert pages.add(Part(b"", 1, 1, live=True))
        assert pages.add(Part(b"y", 2, 1, live=False, digest=sha256(b"xy").digest()))

    def test_flipped_byte_is_an_error_that_names_the_task(self) -> None:
        with pytest.raises(BytesDamaged, match="task c/a: its output of 12 bytes is damaged"):
            self.pages(b"first ", b"sfcond", digest=sha256(self.WHOLE).digest())

    def test_missing_bytes_are_an_error_with_the_length(self) -> None:
        pages = self.pages(b"first ")
        with pytest.raises(BytesTruncated, match="task c/a: only 6 of 12 bytes") as raised:
            pages.add(Part(b"", 12, 2, live=False))
        assert raised.value.bytes_total == 12
