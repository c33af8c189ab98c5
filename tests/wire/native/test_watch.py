"""Watches and streams of an extended peer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.core import effects
from taskyard.core.events import Scope
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import NEVER_NS
from taskyard.wire.dialect import request_numbers
from taskyard.wire.native import peer, task_contents
from taskyard.wire.native import requests as native_requests
from taskyard.wire.native.peer import Reply
from taskyard.wire.native.server import NativeServer
from tests.wire.kit import BROKER
from tests.wire.native.test_extended import Extended

if TYPE_CHECKING:
    from collections.abc import Callable


def test_watch_gets_its_reply_when_all_tasks_are_settled() -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    watch = peer.watch(6, [b"a", b"b"], wait_ns=30 * SECOND_NS)
    assert counter.frames([b"", watch], b"client") == []
    first = counter.take()
    counter.finish(first, texts=[b"one"])
    assert [route for route, _ in counter.sent] == [b"w"]
    counter.finish(counter.take(), texts=[b"two"])
    ((_, body),) = [one for one in counter.sent if one[0] == b"client"]
    reply = Reply(body)
    assert (reply.kind, reply.request, reply.count) == (peer.WATCH, 6, 0)
    assert list(zip(reply.names, reply.texts, strict=True)) == [(b"a", b"one"), (b"b", b"two")]
    assert reply.states == [TaskState.DONE] * 2


def test_watch_that_times_out_gets_settled_tasks_and_the_number_of_others() -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    counter.frames([b"", peer.watch(6, [b"a", b"b"], wait_ns=SECOND_NS)], b"client")
    counter.finish(counter.take())
    ((_, body),) = counter.pass_time(SECOND_NS)
    assert (Reply(body).names, Reply(body).count) == ([b"a"], 1)
    assert counter.scheduler.context.watchers == {}


def test_streaming_watch_gets_many_replies_and_heartbeats() -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    counter.frames([b"", peer.watch(6, [b"a", b"b"], stream=True)], b"client")
    counter.finish(counter.take())
    replies = [Reply(body) for route, body in counter.sent if route == b"client"]
    assert [(one.names, one.count) for one in replies] == [([b"a"], 1)]
    ((route, body),) = counter.pass_time(native_requests.STREAM_HEARTBEAT_NS)
    assert (route, Reply(body).names, Reply(body).count) == (b"client", [], 1)
    assert [
        Reply(body).count for _, body in counter.pass_time(native_requests.STREAM_HEARTBEAT_NS)
    ] == [1]
    counter.steal()
    counter.request(peer.command(5, peer.CANCEL, Scope(names=(b"b",))))
    replies = [Reply(body) for route, body in counter.sent if route == b"client"]
    assert [(one.states, one.count) for one in replies] == [([TaskState.CANCELLED], 0)]
    assert counter.dialect.timers.heap[0][0] == NEVER_NS


def test_streaming_create_continues_as_a_watch() -> None:
    counter = Extended()
    terms = [Terms(service=b"exec")]
    create = peer.create(6, Submission([b"a", b"b"], [b""], terms), stream=True)
    accepted = Reply(counter.ask(create, b"client"))
    assert (accepted.kind, accepted.request, accepted.count) == (peer.OK, 6, 2)
    counter.finish(counter.take(2), texts=[b"1", b"2"])
    ((_, body),) = [one for one in counter.sent if one[0] == b"client"]
    replies = Reply(body)
    assert (replies.kind, replies.request, replies.count) == (peer.WATCH, 6, 0)
    assert replies.texts == [b"1", b"2"]
    assert counter.dialect.timers.heap[0][0] == NEVER_NS
    again = [Reply(one) for one in counter.frames([b"", create], b"client")]
    assert [(one.kind, one.names) for one in again] == [(peer.OK, []), (peer.WATCH, [b"a", b"b"])]


def test_refused_streaming_create_watches_nothing() -> None:
    counter = Extended()
    twice = Submission([b"a", b"a"])
    assert Reply(counter.ask(peer.create(6, twice, stream=True))).kind == peer.ERROR
    assert counter.scheduler.context.watchers == {}
    assert counter.dialect.timers.heap[0][0] == NEVER_NS


def test_large_results_are_streamed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskyard.wire.native.replies.TEXT_BYTES_MAX", 10)
    counter = Extended()
    counter.create(b"a", b"b", b"c")
    counter.frames([b"", peer.watch(6, [b"a", b"b", b"c"], stream=True)], b"client")
    counter.finish(counter.take(3), texts=[b"12345678", b"12345678", b"1"])
    replies = [Reply(body) for route, body in counter.sent if route == b"client"]
    assert [(one.names, one.count) for one in replies] == [([b"a"], 2), ([b"b", b"c"], 0)]


#: The number of the first request in a dialect.
FIRST = next(request_numbers(0))


def owing(request: int, *texts: bytes | None) -> effects.Settled:
    """Return the results of tasks a, b…, and None where the journal has to read one."""
    names = [bytes([letter]) for letter in b"abcdef"[: len(texts)]]
    records = [number for number, text in enumerate(texts) if text is None]
    return effects.Settled(
        b"client", request, names, [TaskState.DONE] * len(names), [*texts], records
    )


def test_stream_sends_available_results_and_the_others_later() -> None:
    dialect = NativeServer(BROKER, lambda: 0)
    dialect.receive(b"client", [b"", peer.watch(6, [b"a", b"b", b"c"], stream=True)], 1)
    replies = owing(FIRST, b"1", None, b"3")
    ((_, frames),) = dialect.reply(replies)
    assert (Reply(frames[1]).names, Reply(frames[1]).count) == ([b"a", b"c"], 1)
    assert (replies.names, replies.texts, replies.records) == ([b"b"], [None], [1])
    assert dialect.reply(replies) == []
    replies.texts, replies.records = [b"2"], []
    ((_, frames),) = dialect.reply(replies)
    assert (Reply(frames[1]).names, Reply(frames[1]).count) == ([b"b"], 0)


@pytest.mark.parametrize("asks", [task_contents.results, peer.watch])
def test_results_that_do_not_fit_one_reply_are_left_out_and_counted(
    asks: Callable[[int, list[bytes]], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskyard.wire.native.replies.TEXT_BYTES_MAX", 10)
    dialect = NativeServer(BROKER, lambda: 0)
    dialect.receive(b"client", [b"", asks(6, [b"a", b"b", b"c", b"d"])], 1)
    replies = owing(FIRST, b"1234567", b"1234567", b"123", None)
    ((_, frames),) = dialect.reply(replies)
    reply = Reply(frames[1])
    assert (reply.names, reply.texts) == ([b"a", b"c"], [b"1234567", b"123"])
    assert (len(reply.states), reply.count) == (2, 2)
    assert replies.records == []


def test_result_larger_than_a_reply_is_sent_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskyard.wire.native.replies.TEXT_BYTES_MAX", 2)
    dialect = NativeServer(BROKER, lambda: 0)
    dialect.receive(b"client", [b"", task_contents.results(6, [b"a", b"b"])], 1)
    ((_, frames),) = dialect.reply(owing(FIRST, b"123", b"123"))
    assert (Reply(frames[1]).names, Reply(frames[1]).count) == ([b"a"], 1)


def test_watch_keeps_no_more_results_than_fit_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskyard.wire.native.replies.TEXT_BYTES_MAX", 10)
    counter = Extended()
    counter.create(b"a", b"b", b"c")
    counter.frames([b"", peer.watch(6, [b"a", b"b", b"c"], wait_ns=SECOND_NS)], b"client")
    for _ in range(2):
        counter.finish(counter.take(1), texts=[b"12345678"])
    ((_, body),) = counter.pass_time(SECOND_NS)
    assert (Reply(body).names, Reply(body).count) == ([b"a"], 2)


def test_results_without_a_request_are_not_read() -> None:
    replies = owing(FIRST, b"1", None)
    assert NativeServer(BROKER, lambda: 0).reply(replies) == []
    assert replies.records == []


def test_campaign_is_watched_as_a_whole() -> None:
    counter = Extended()
    counter.create(b"a", campaign=b"c")
    counter.frames([b"", peer.watch(6, campaign=b"c", wait_ns=SECOND_NS)], b"client")
    counter.finish(counter.take())
    ((_, body),) = [one for one in counter.sent if one[0] == b"client"]
    assert Reply(body).count == 0
