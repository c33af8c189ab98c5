"""Output in native messages: Append, Output of a stream, and the streams in a Complete."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.core.effects import TaskOutput
from taskyard.core.events import OutputAppended, OutputRequested, TasksReported
from taskyard.core.limits import OUTPUT_PAGE_BYTES_MAX
from taskyard.core.model import Result, Submission, Terms, WorkerFacts
from taskyard.core.output import OutputColumns, Stream
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer, streams
from taskyard.wire.native.server import NativeServer
from taskyard.wire.native.streams import OutputPage, StreamChunk
from tests.wire.kit import Counter

Q = pb.QueryMsg
OUT, ERR = Stream.STDOUT, Stream.STDERR


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
    event = decoded(streams.append(3, b"w", chunks, incarnation=9))
    assert isinstance(event, OutputAppended)
    assert (event.names, event.attempts, event.streams) == ([b"a", b"b"], [1, 2], [OUT, ERR])
    assert (event.offsets, event.data, event.incarnation) == ([0, 7], [b"x\0", b""], 9)


def test_written_chunks_are_acknowledged_and_stale_ones_are_listed() -> None:
    counter = holding()
    good, stale = (StreamChunk(b"a", attempt, OUT, 0, b"x") for attempt in (1, 2))
    reply = peer.Reply(counter.ask(streams.append(3, b"w", [good])))
    assert (reply.kind, reply.names) == (peer.OK, [])
    reply = peer.Reply(counter.ask(streams.append(4, b"w", [good, stale])))
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
    event = decoded(streams.output(3, b"a", ERR, 5, attempt=2, count=1 << 30))
    assert isinstance(event, OutputRequested)
    assert (event.stream, event.offset, event.attempt) == (ERR, 5, 2)
    assert event.count == OUTPUT_PAGE_BYTES_MAX
    assert decoded(streams.output(3, b"a", OUT)).attempt is None
    assert decoded(peer.query(3, kind=peer.OUTPUT, name=b"a")).stream is None


def test_reply_has_the_part_of_the_stream() -> None:
    server = NativeServer(1, lambda: 0)
    (event,) = server.receive(b"peer", [b"", streams.output(3, b"a", OUT, 2)], 0)
    effect = TaskOutput(b"peer", event.request, b"a", found=True, record=0)  # type: ignore[attr-defined]
    effect.stream, effect.text, effect.text_bytes_total = OUT, b"cd", 9
    effect.attempt, effect.live = 4, True
    ((_, frames),) = server.reply(effect)
    assert peer.Reply(frames[-1]).page == OutputPage(b"cd", 9, 4, live=True)


def test_streams_of_a_report_arrive_as_columns() -> None:
    output = OutputColumns([b"", b"o"], [b"e", b""], [0, 70_000], [0, 0], [0, 1])
    reports = peer.ReportColumns(names=[b"a", b"b"], attempts=[1, 1], streams=output)
    event = decoded(peer.complete(3, b"w", reports))
    assert isinstance(event, TasksReported)
    assert event.output == output


def test_streams_of_single_tasks_arrive_too() -> None:
    task = pb.TaskMsg(name=b"a", origin=b"", stderr=b"e", files=2, outcome="Failed")
    query = Q(type=Q.Complete, request=1, location=b"w", task=[task.SerializeToString()])
    event = decoded(query.SerializeToString())
    assert event.output == OutputColumns([b""], [b"e"], [0], [0], [2])


@pytest.mark.parametrize("columns", [{"files": [4]}, {"stderr": [b"", b""]}])
def test_malformed_streams_of_a_report_are_refused(columns: dict[str, Any]) -> None:
    batch = {"name": [b"a"], "attempt": [1], **columns}
    query = Q(type=Q.Complete, request=1, location=b"w", batch=batch)
    reply = peer.Reply(holding().ask(query.SerializeToString()))
    assert (reply.kind, reply.code) == (peer.ERROR, "malformed")


def test_long_result_is_marked_in_the_reply_to_a_watch() -> None:
    counter = holding()
    output = OutputColumns([b""], [b""], [0], [0], [OUT])
    reports = peer.ReportColumns(
        names=[b"a"], attempts=[1], texts=[b"ends"], result_bytes_total=[90_000], streams=output
    )
    watch = peer.watch(5, [b"a"], wait_ns=10**9)
    assert counter.frames([b"", watch], b"client") == []
    counter.ask(peer.complete(6, b"w", reports))
    (body,) = [body for route, body in counter.sent if route == b"client"]
    assert peer.Reply(body).results == [Result(b"ends", 90_000, in_file=True)]
