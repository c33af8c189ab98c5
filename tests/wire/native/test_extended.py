"""An extended peer, with our fields and types, as our own clients and workers send them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from taskyard.core import effects, old_snapshots
from taskyard.core.events import Outcome, Scope, UnknownPolicy, WorkerLost, WorkerRegistered
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Result, Submission, Terms
from taskyard.core.records import Progressed
from taskyard.core.states import TaskState
from taskyard.core.workers import WorkerFacts
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.dialect import request_numbers
from taskyard.wire.native import peer
from taskyard.wire.native import pending as native_pending
from taskyard.wire.native import requests as native_requests
from taskyard.wire.native.peer import Reply
from taskyard.wire.native.pending import WAITING_MAX
from taskyard.wire.native.server import NativeServer
from tests.wire.kit import BROKER, Counter

if TYPE_CHECKING:
    from collections.abc import Callable

Q = pb.QueryMsg
FACTS = WorkerFacts(
    services=(b"exec",), slots_total=4, lease_timeout_ns=15 * SECOND_NS, incarnation=9
)
WORKER = peer.worker_message(FACTS)
HEARTBEAT_NS = SECOND_NS


class Extended(Counter):
    """A broker with extended peers."""

    def request(self, body: bytes, route: bytes = b"peer") -> Reply:
        return Reply(self.ask(body, route))

    def create(self, *names: bytes, campaign: bytes = b"", **columns: object) -> Reply:
        submission = Submission(
            list(names),
            payloads=[b"p-" + name for name in names],
            terms=[Terms(service=b"exec", campaign=campaign)],
            **columns,  # type: ignore[arg-type]
        )
        return self.request(peer.create(1, submission))

    def steal(self, count: int = 1, wait_ns: int = 0, name: bytes = b"w") -> list[Reply]:
        answers = self.frames([b"", peer.steal(2, name, WORKER, count, wait_ns)], name)
        return [Reply(one) for one in answers]

    def take(self, count: int = 1, name: bytes = b"w") -> peer.Assigned:
        (reply,) = self.steal(count, name=name)
        assert reply.kind == peer.TRANSFER
        return reply.assigned()

    def finish(self, assigned: peer.Assigned, count: int = 0, **columns: Any) -> Reply:
        reports = peer.ReportColumns(names=assigned.names, attempts=assigned.attempts, **columns)
        return self.request(peer.complete(3, b"w", reports, WORKER, count), b"w")


def test_reply_carries_the_numbers_of_the_request_and_of_the_broker() -> None:
    reply = Extended().request(peer.query(41, peer.OK))
    assert (reply.kind, reply.request, reply.broker) == (peer.OK, 41, BROKER)


def test_created_tasks_arrive_unchanged_at_a_worker() -> None:
    counter = Extended()
    terms = [
        Terms(service=b"exec", campaign=b"c", priority=-5, time_limit_ns=7, slots=2, origin=b"me"),
        Terms(service=b"exec", retry_delays_ns=(), lease_ns=10**12, crashes_max=9),
    ]
    columns = Submission([b"a", b"b"], [b"1", b"2"], terms, [0, 1], [b"", b"lane"], [[], []])
    assert counter.request(peer.create(1, columns)).count == 2
    assigned = counter.take(9)
    replies = {
        name: (assigned.payloads[index], assigned.terms_of(index), (assigned.lanes or [])[index])
        for index, name in enumerate(assigned.names)
    }
    for index, name in enumerate([b"c/a", b"b"]):
        payload, known, lane = replies[name]
        assert payload == columns.payloads[index]
        assert lane == (columns.lanes or [])[index]
        for field in ("campaign", "service", "priority", "time_limit_ns", "slots", "lease_ns"):
            assert getattr(known, field) == getattr(terms[index], field)
    assert replies[b"b"][1].retry_delays_ns == ()
    assert replies[b"c/a"][1].retry_delays_ns is None


def test_repeated_create_is_harmless_even_for_a_finished_task() -> None:
    counter = Extended()
    assert counter.create(b"a", b"b").count == 2
    counter.finish(counter.take(9))
    assert counter.create(b"a", b"b").count == 0
    assert counter.scheduler.ledger.tasks[b"a"].state is TaskState.DONE


def test_unknown_predecessor_is_refused_awaited_or_done() -> None:
    counter = Extended()
    after = Submission([b"x"], after=[[b"missing"]])
    refused = counter.request(peer.create(1, after))
    assert refused.kind == peer.ERROR
    assert "missing" in refused.reason
    assert counter.request(peer.create(1, after, UnknownPolicy.WAIT)).kind == peer.OK
    assert counter.scheduler.ledger.tasks[b"x"].state is TaskState.BLOCKED
    later = Submission([b"y"], after=[[b"missing too"]])
    assert counter.request(peer.create(1, later, UnknownPolicy.DONE)).kind == peer.OK
    assert counter.scheduler.ledger.tasks[b"y"].state is TaskState.READY


def test_large_payload_that_all_tasks_share_is_sent_once() -> None:
    counter = Extended()
    payload = b"shared" * 100
    terms = [Terms(service=b"exec")]
    counter.request(peer.create(1, Submission([b"a", b"b"], [payload], terms, lanes=[b"1", b"2"])))
    counter.request(peer.create(2, Submission([b"c"], [b"own" * 100], terms, lanes=[b"3"])))
    (raw,) = counter.frames([b"", peer.steal(2, b"w", WORKER, 2)], b"w")
    assert [*Q.FromString(raw).batch.payload] == [payload]
    both = Reply(raw).assigned()
    assert (both.names, both.payloads) == ([b"a", b"b"], [payload, payload])
    counter.request(peer.transfer(3, b"w", [b"a", b"b"]))
    three = counter.take(3)
    expected = {b"a": payload, b"b": payload, b"c": b"own" * 100}
    assert dict(zip(three.names, three.payloads, strict=True)) == expected


def test_error_to_an_extended_peer_has_a_reason() -> None:
    body = Q(type=Q.Create, request=5).SerializeToString()
    reply = Extended().request(body)
    assert (reply.kind, reply.request, reply.reason) == (peer.ERROR, 5, "a Create needs tasks")


def test_steal_waits_until_there_is_work() -> None:
    counter = Extended()
    assert counter.steal(2, wait_ns=SECOND_NS) == []
    counter.create(b"a")
    ((route, body),) = [one for one in counter.sent if one[0] == b"w"]
    assert Reply(body).assigned().names == [b"a"]
    assert route == b"w"


def test_steal_that_times_out_is_not_found() -> None:
    counter = Extended()
    counter.steal(wait_ns=SECOND_NS)
    assert counter.dialect.wake_at_ns() == counter.now_ns + SECOND_NS
    ((_, body),) = counter.pass_time(SECOND_NS)
    assert (Reply(body).kind, Reply(body).request) == (peer.NOT_FOUND, 2)
    assert counter.dialect.wake_at_ns() is None
    counter.create(b"a")
    assert [route for route, _ in counter.sent] == [b"peer"]


def test_second_steal_replies_to_the_first_with_nothing() -> None:
    counter = Extended()
    counter.steal(wait_ns=SECOND_NS)
    (former,) = counter.steal(wait_ns=SECOND_NS)
    assert former.kind == peer.NOT_FOUND
    counter.create(b"a", b"b")
    assert [Reply(body).kind for route, body in counter.sent if route == b"w"] == [peer.TRANSFER]


def test_steal_in_the_same_turn_as_an_assignment_loses_nothing() -> None:
    counter = Extended()
    counter.steal(wait_ns=SECOND_NS)
    create = peer.create(1, Submission([b"a", b"b"], [b""], [Terms(service=b"exec")]))
    again = peer.steal(8, b"w", WORKER, 1, SECOND_NS)
    events = [
        *counter.dialect.receive(b"peer", [b"", create], counter.now_ns),
        *counter.dialect.receive(b"w", [b"", again], counter.now_ns),
    ]
    counter.sent = []
    counter.handle(events)
    replies = [Reply(body) for route, body in counter.sent if route == b"w"]
    assert [(one.request, one.assigned().names) for one in replies] == [(2, [b"a"]), (8, [b"b"])]


def test_extended_steal_never_gets_an_exit_when_everything_is_settled() -> None:
    counter = Extended()
    body = Q(type=Q.Steal, location=b"w", wait_ms=0).SerializeToString()
    assert Reply(counter.ask(body)).kind == peer.NOT_FOUND


def test_steal_without_facts_gets_task_messages_with_payload_and_attempt() -> None:
    counter = Extended()
    counter.request(peer.create(1, Submission([b"a"], [b"payload"])))
    body = Q(type=Q.Steal, location=b"w", wait_ms=0).SerializeToString()
    (raw,) = Q.FromString(counter.ask(body)).task
    message = pb.TaskMsg.FromString(raw)
    assert (message.name, message.payload, message.attempt) == (b"a", b"payload", 1)
    done = pb.TaskMsg(name=b"a", origin=b"", attempt=1, text=b"result").SerializeToString()
    complete = Q(type=Q.Complete, location=b"w", task=[done], request=3).SerializeToString()
    assert Reply(counter.ask(complete)).kind == peer.OK


def test_complete_with_a_steal_gets_tasks_or_an_empty_reply_at_once() -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    reply = counter.finish(counter.take(), count=1)
    assert reply.assigned().names == [b"b"]
    last = counter.finish(reply.assigned(), count=1)
    assert last.kind == peer.NOT_FOUND
    assert counter.scheduler.ledger.counts[TaskState.DONE] == 2


def test_complete_of_an_old_attempt_is_not_found_and_changes_nothing() -> None:
    counter = Extended()
    counter.create(b"a")
    assigned = counter.take()
    counter.request(peer.leave(4, b"w"), b"w")
    counter.take(name=b"v")
    reply = counter.finish(assigned)
    assert reply.kind == peer.NOT_FOUND
    assert counter.scheduler.ledger.tasks[b"a"].state is TaskState.LEASED
    both = counter.finish(assigned, count=1)
    assert (both.kind, both.reason) == (peer.NOT_FOUND, "not held: a")


def test_complete_with_a_steal_of_an_expired_worker_lists_tasks_not_held() -> None:
    counter = Extended()
    counter.create(b"a")
    assigned = counter.take()
    counter.scheduler.handle(WorkerLost(counter.now_ns, b"w"))
    lost = counter.finish(assigned, count=1)
    assert (lost.kind, lost.reason) == (peer.NOT_FOUND, "not held: a")


def test_complete_with_a_steal_of_a_draining_worker_lists_tasks_not_held() -> None:
    counter = Extended()
    counter.create(b"a")
    assigned = counter.take()
    counter.request(peer.command(1, peer.CANCEL, Scope(names=(b"a",))))
    counter.request(peer.drain(1, b"w"))
    home = counter.finish(assigned, count=1)
    assert (home.kind, home.reason) == (peer.EXIT, "not held: a")


def test_failed_task_is_retried_by_its_schedule() -> None:
    counter = Extended()
    terms = Terms(service=b"exec", retry_delays_ns=(SECOND_NS,))
    counter.request(peer.create(1, Submission([b"a"], terms=[terms])))
    assigned = counter.take()
    failed: dict[str, Any] = {
        "outcomes": [Outcome.FAILED],
        "texts": [b"exit status 1"],
        "outputs": [b"oh no"],
    }
    counter.finish(assigned, **failed)
    assert counter.scheduler.ledger.tasks[b"a"].state is TaskState.DELAYED
    counter.pass_time(SECOND_NS)
    assert counter.take().attempts == [2]


def test_heartbeat_renews_listed_tasks_and_returns_tasks_to_stop() -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    assigned = counter.take(2)
    held = list(zip(assigned.names, assigned.attempts, strict=True))
    for _ in range(20):
        counter.pass_time(SECOND_NS)
        reply = counter.request(peer.heartbeat(7, b"w", WORKER, held, HEARTBEAT_NS), b"w")
        assert (reply.kind, reply.names) == (peer.HEARTBEAT, [])
    counter.request(peer.command(5, peer.CANCEL, Scope(names=(b"b",))))
    reply = counter.request(peer.heartbeat(7, b"w", WORKER, held, HEARTBEAT_NS), b"w")
    assert (reply.names, reply.attempts) == ([b"b"], [1])


def test_lost_assignment_returns_to_ready() -> None:
    counter = Extended()
    counter.create(b"a")
    counter.take()
    counter.pass_time(2 * HEARTBEAT_NS)
    counter.request(peer.heartbeat(7, b"w", WORKER, [], HEARTBEAT_NS), b"w")
    assert counter.scheduler.ledger.tasks[b"a"].state is TaskState.READY


def test_silent_worker_loses_its_tasks_and_registers_again_when_it_is_back() -> None:
    counter = Extended()
    counter.create(b"a")
    assigned = counter.take()
    counter.pass_time(16 * SECOND_NS)
    assert counter.scheduler.ledger.tasks[b"a"].state is TaskState.READY
    held = list(zip(assigned.names, assigned.attempts, strict=True))
    reply = counter.request(peer.heartbeat(7, b"w", WORKER, held, HEARTBEAT_NS), b"w")
    assert reply.names == [b"a"]
    assert counter.take().attempts == [2]


def test_steal_of_an_expired_worker_is_not_found_once() -> None:
    counter = Extended()
    counter.steal()
    counter.pass_time(16 * SECOND_NS)
    counter.create(b"a")
    (reply,) = counter.steal()
    assert reply.kind == peer.NOT_FOUND
    assert counter.take().names == [b"a"]


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
    assert counter.scheduler.watchers == {}


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
    assert counter.dialect.wake_at_ns() is None


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
    assert counter.dialect.wake_at_ns() is None
    again = [Reply(one) for one in counter.frames([b"", create], b"client")]
    assert [(one.kind, one.names) for one in again] == [(peer.OK, []), (peer.WATCH, [b"a", b"b"])]


def test_refused_streaming_create_watches_nothing() -> None:
    counter = Extended()
    twice = Submission([b"a", b"a"])
    assert Reply(counter.ask(peer.create(6, twice, stream=True))).kind == peer.ERROR
    assert counter.scheduler.watchers == {}
    assert counter.dialect.wake_at_ns() is None


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


@pytest.mark.parametrize("asks", [peer.results, peer.watch])
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
    dialect.receive(b"client", [b"", peer.results(6, [b"a", b"b"])], 1)
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


def test_requests_of_a_disconnected_peer_are_dropped() -> None:
    counter = Extended()
    counter.create(b"a")
    counter.frames([b"", peer.watch(6, [b"a"], stream=True)], b"gone")
    counter.frames(
        [b"", peer.steal(2, b"v", peer.worker_message(WorkerFacts()), 1, SECOND_NS)], b"gone"
    )
    counter.handle(counter.dialect.disconnected(b"gone"))
    assert counter.scheduler.watchers == {}
    assert counter.dialect.wake_at_ns() is None
    submission = Submission([b"default"])
    counter.request(peer.create(1, submission))
    assert counter.scheduler.ledger.tasks[b"default"].state is TaskState.READY


def test_worker_that_does_not_repeat_its_facts_keeps_them() -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    assigned = counter.take()
    report = pb.Batch(name=assigned.names, attempt=assigned.attempts)
    body = Q(type=Q.Complete, location=b"w", batch=report, request=3, n=1).SerializeToString()
    assert counter.request(body, b"w").assigned().names == [b"b"]
    held = pb.Batch(name=[b"b"], attempt=[1])
    body = Q(type=Q.Heartbeat, location=b"w", batch=held, request=4).SerializeToString()
    assert counter.request(body, b"w").names == []
    assert counter.scheduler.ledger.tasks[b"b"].state is TaskState.LEASED
    assert counter.scheduler.ledger.tasks[b"a"].state is TaskState.DONE


def test_repeated_watch_replaces_the_former() -> None:
    counter = Extended()
    counter.create(b"a")
    for _ in range(WAITING_MAX + 1):
        assert counter.frames([b"", peer.watch(6, [b"a"], stream=True)]) == []
    counter.finish(counter.take())
    assert [Reply(body).request for route, body in counter.sent if route == b"peer"] == [6]


@pytest.mark.slow
def test_create_is_accepted_however_many_requests_wait() -> None:
    counter = Extended()
    for number in range(WAITING_MAX):
        counter.frames([b"", peer.watch(number + 10, [b"x"], wait_ns=SECOND_NS)])
    create = peer.create(6, Submission([b"a"], terms=[Terms(service=b"exec")]), stream=True)
    assert counter.request(create).kind == peer.OK


def test_heartbeat_reply_has_the_last_record_sent_before_it() -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    counter.take()
    first = counter.request(peer.heartbeat(7, b"w", WORKER, [], HEARTBEAT_NS, seen=0), b"w")
    assert counter.scheduler.ledger.tasks[b"a"].state is TaskState.LEASED
    counter.take()
    counter.request(peer.heartbeat(7, b"w", WORKER, [], HEARTBEAT_NS, seen=first.seen), b"w")
    states = [counter.scheduler.ledger.tasks[name].state for name in (b"a", b"b")]
    assert states == [TaskState.READY, TaskState.LEASED]


@pytest.mark.slow
def test_waiting_requests_are_limited() -> None:
    counter = Extended()
    for number in range(WAITING_MAX):
        counter.frames([b"", peer.watch(number + 10, [b"a"], wait_ns=SECOND_NS)])
    assert counter.request(peer.watch(6, [b"a"], wait_ns=SECOND_NS)).kind == peer.ERROR


def test_watched_names_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_pending, "WATCHED_NAMES_MAX", 3)
    counter = Extended()
    counter.create(b"a", b"b")
    assert counter.frames([b"", peer.watch(6, [b"a", b"b"], stream=True)]) == []
    refused = counter.request(peer.watch(7, [b"c", b"d"], stream=True))
    assert (refused.kind, refused.request) == (peer.ERROR, 7)
    assert "wait until others are settled" in refused.reason
    assert counter.frames([b"", peer.watch(7, [b"c", b"d"], stream=True)], b"another") == []
    counter.finish(counter.take())
    assert counter.frames([b"", peer.watch(7, [b"c", b"d"], stream=True)]) == []


def test_repeated_watch_with_too_many_names_leaves_the_former(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_pending, "WATCHED_NAMES_MAX", 2)
    counter = Extended()
    counter.create(b"a")
    for names in ([b"a"], [b"a", b"b"], [b"a"]):
        assert counter.frames([b"", peer.watch(6, names, stream=True)]) == []
    assert counter.request(peer.watch(6, [b"a", b"b", b"c"], stream=True)).kind == peer.ERROR
    counter.finish(counter.take())
    replies = [Reply(body) for route, body in counter.sent if route == b"peer"]
    assert [(one.request, one.names) for one in replies] == [(6, [b"a"])]


def test_create_is_accepted_however_many_names_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_pending, "WATCHED_NAMES_MAX", 2)
    counter = Extended()
    terms = [Terms(service=b"exec")]
    for number, name in enumerate((b"a", b"b", b"c")):
        create = peer.create(number, Submission([name], terms=terms), stream=True)
        assert counter.request(create).kind == peer.OK
    counter.finish(counter.take(3))
    assert [Reply(body).request for route, body in counter.sent if route == b"peer"] == [0, 1]


def test_facts_are_kept_of_a_limited_number_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_pending, "FACTS_MAX", 2)
    pending = native_pending.PendingRequests(BROKER, lambda: 0)

    def beat(worker: bytes) -> list[bytes]:
        query = Q.FromString(peer.heartbeat(7, worker, WORKER, [], HEARTBEAT_NS, seen=0))
        request = native_pending.Request(b"r", query, True, 1)  # noqa: FBT003
        appeared, _ = native_requests.decode_request(pending, request)
        assert isinstance(appeared, WorkerRegistered)
        return [*pending.facts]

    kept = [beat(worker) for worker in (b"u", b"v", b"u", b"w")]
    assert kept == [[b"u"], [b"u", b"v"], [b"u", b"v"], [b"w"]]


def test_documents() -> None:
    counter = Extended()
    counter.create(b"a", b"b", after=[[], [b"a"]])
    stats = counter.request(peer.query(1, peer.STATS)).document()
    assert (stats["counts"]["ready"], stats["counts"]["blocked"]) == (1, 1)
    assert counter.request(peer.query(1, peer.SHOW, b"b")).document()["after"] == ["a"]
    assert counter.request(peer.query(1, peer.SHOW, b"x")).kind == peer.NOT_FOUND
    assert (
        "waits for 1 task"
        in counter.request(peer.query(1, peer.EXPLAIN, b"b")).document()["sentence"]
    )
    counter.take()
    (worker,) = counter.request(peer.query(1, peer.WORKERS)).document()
    assert (worker["name"], worker["services"], worker["tasks"]) == ("w", ["exec"], 1)


def worker_of(counter: Extended, *keys: str) -> list[object]:
    (worker,) = counter.request(peer.query(1, peer.WORKERS)).document()
    return [worker[key] for key in keys]


def test_worker_is_idle_running_full_or_draining_whether_it_is_parked_or_not() -> None:
    counter = Extended()
    assert counter.steal(wait_ns=SECOND_NS) == []
    assert worker_of(counter, "state", "parked") == ["idle", True]
    counter.create(*[b"t%d" % index for index in range(5)])
    assert worker_of(counter, "state", "parked", "tasks") == ["running", False, 1]
    counter.pass_time(SECOND_NS)
    held = counter.take(3)
    assert worker_of(counter, "state", "slots_used") == ["full", 4]
    counter.finish(held)
    assert worker_of(counter, "state", "slots_used") == ["running", 1]
    counter.request(peer.drain(1, b"w"))
    assert worker_of(counter, "state", "tasks") == ["draining", 1]


def test_parked_worker_with_a_task_is_running() -> None:
    counter = Extended()
    counter.create(b"a")
    counter.take()
    assert counter.steal(wait_ns=SECOND_NS) == []
    assert worker_of(counter, "state", "parked") == ["running", True]


def test_worker_reports_its_host_and_process() -> None:
    counter = Extended()
    facts = structs.replace(FACTS, host=b"node-7", pid=4711)
    counter.frames([b"", peer.steal(2, b"w", peer.worker_message(facts), 1)])
    assert worker_of(counter, "host", "pid") == ["node-7", 4711]


def test_plain_worker_has_no_host_and_process() -> None:
    counter = Extended()
    counter.ask(Q(type=Q.Steal, location=b"w").SerializeToString())
    assert worker_of(counter, "host", "pid", "state") == [None, None, "idle"]


@pytest.mark.parametrize("host", [b"\xff", b"h" * 1025])
def test_invalid_host_is_refused(host: bytes) -> None:
    worker = peer.worker_message(structs.replace(FACTS, host=host))
    assert Extended().request(peer.steal(2, b"w", worker, 1)).kind == peer.ERROR


def test_listing_continues_from_its_cursor() -> None:
    counter = Extended()
    counter.create(*[b"t%d" % index for index in range(5)], campaign=b"c")
    first = counter.request(peer.list_tasks(1, Scope(), count=3))
    rest = counter.request(peer.list_tasks(1, Scope(), cursor=first.cursor, count=3))
    assert [task["name"] for task in first.document() + rest.document()] == [
        f"t{index}" for index in range(5)
    ]
    assert rest.cursor == 0
    matched = counter.request(peer.list_tasks(1, Scope(campaign=b"c"), match=b"4")).document()
    assert [task["name"] for task in matched] == ["t4"]


def test_results_of_tasks() -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    reply = counter.request(peer.results(1, [b"a", b"missing"]))
    assert (reply.names, reply.states) == ([b"a"], [TaskState.READY])


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_result_is_sent_with_its_length(*, stream: bool) -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    counter.take(2)
    watch = peer.watch(6, [b"a", b"b"], wait_ns=SECOND_NS, stream=stream)
    counter.frames([b"", watch], b"client")
    reports = peer.ReportColumns(
        *([b"a", b"b"], [1, 1], [Outcome.DONE] * 2, [b"whole", b"end"], [b"", b"out"]),
        result_bytes_total=[0, 9],
        output_bytes_total=[0, 5],
    )
    counter.frames([b"", peer.complete(7, b"w", reports)], b"w")
    (replies,) = [Reply(body) for route, body in counter.sent if route == b"client"]
    assert replies.results == [Result(b"whole"), Result(b"end", 9)]
    records = counter.scheduler.take_records()
    (progressed,) = [one for one in records if isinstance(one, Progressed)]
    assert progressed.text_bytes_total == [0, 5]


def test_retry_pause_resume_and_drain() -> None:
    counter = Extended()
    counter.create(b"a")
    assert counter.request(peer.command(1, peer.PAUSE, Scope(service=b"exec"))).count == 1
    assert counter.steal()[0].kind == peer.NOT_FOUND
    counter.request(peer.command(1, peer.RESUME, Scope(service=b"exec")))
    assert counter.take().names == [b"a"]
    assert counter.request(peer.command(1, peer.RETRY, Scope(campaign=b"c"))).count == 0
    assert counter.create(b"b").kind == peer.OK
    assert counter.request(peer.drain(1, None)).count == 1
    assert counter.dialect.leaving
    assert counter.create(b"c").kind == peer.EXIT


def test_broker_that_shuts_down_assigns_no_tasks() -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    assigned = counter.take()
    counter.request(peer.drain(1, None))
    (reply,) = counter.steal(name=b"late")
    assert reply.kind == peer.EXIT
    assert counter.finish(assigned, count=1).kind == peer.EXIT
    assert counter.scheduler.ledger.tasks[b"a"].state is TaskState.DONE


def test_drained_worker_is_shut_down_when_it_holds_nothing() -> None:
    counter = Extended()
    counter.steal(wait_ns=SECOND_NS)
    counter.request(peer.drain(1, b"w"))
    ((_, body),) = [one for one in counter.sent if one[0] == b"w"]
    assert Reply(body).kind == peer.EXIT


def test_worker_of_another_dialect_is_drained_by_its_name() -> None:
    counter = Extended()
    facts = WorkerFacts(dialect=b"wmp")
    counter.scheduler.handle(WorkerRegistered(0, b"wmp:w", facts))
    assert counter.request(peer.drain(1, b"wmp:w")).count == 1


MALFORMED = {
    "create as tasks and as columns": Q(type=Q.Create, task=[b"x"], batch=pb.Batch(name=[b"a"])),
    "columns of different length": Q(type=Q.Create, batch=pb.Batch(name=[b"a"], lane=[b"x", b"y"])),
    "more terms than tasks": Q(type=Q.Create, batch=pb.Batch(name=[b"a"], terms=[b""] * 2)),
    "terms that are garbled": Q(type=Q.Create, batch=pb.Batch(name=[b"a"], terms=[b"\x0a"])),
    "terms that are not there": Q(type=Q.Create, batch=pb.Batch(name=[b"a"], terms_at=[3])),
    "after without counts": Q(type=Q.Create, batch=pb.Batch(name=[b"a"], after=[b"b"])),
    "counts that do not add up": Q(
        type=Q.Create, batch=pb.Batch(name=[b"a"], after=[b"b"], after_count=[2])
    ),
    "a lane that is no text": Q(type=Q.Create, batch=pb.Batch(name=[b"a"], lane=[b"\xff"])),
    "too many tasks": Q(type=Q.Create, batch=pb.Batch(name=[b"a"] * 100_001)),
    "report of different length": Q(
        type=Q.Complete, location=b"w", batch=pb.Batch(name=[b"a"], attempt=[1, 2])
    ),
    "an attempt beyond the journal": Q(
        type=Q.Complete, location=b"w", batch=pb.Batch(name=[b"a"], attempt=[2**63])
    ),
    "progress over 100": Q(
        type=Q.Progress, location=b"w", batch=pb.Batch(name=[b"a"], percent=[101])
    ),
    "progress of nothing": Q(type=Q.Progress, location=b"w"),
    "complete and steal of nothing": Q(
        type=Q.Complete, location=b"w", n=0, request=1, batch=pb.Batch(name=[b"a"])
    ),
    "heartbeat without attempts": Q(type=Q.Heartbeat, location=b"w", batch=pb.Batch(name=[b"a"])),
    "heartbeat without a location": Q(type=Q.Heartbeat),
    "watch of nothing": Q(type=Q.Watch),
    "watch of names and a campaign": Q(
        type=Q.Watch, batch=pb.Batch(name=[b"a"]), scope=pb.ScopeMsg(campaign=b"c")
    ),
    "watch of a name that is no text": Q(type=Q.Watch, batch=pb.Batch(name=[b"\xff"])),
    "cancel of everything": Q(type=Q.Cancel),
    "retry of everything": Q(type=Q.Retry, scope=pb.ScopeMsg()),
    "results of a campaign": Q(type=Q.Results, scope=pb.ScopeMsg(campaign=b"c")),
    "show without a name": Q(type=Q.Show),
    "explain without a name": Q(type=Q.Explain, name=b""),
    "list of none": Q(type=Q.List, n=0),
    "pause of a lane of no service": Q(type=Q.Pause, scope=pb.ScopeMsg(lane=b"x")),
    "a service without a name": Q(type=Q.Steal, location=b"w", worker=pb.WorkerMsg(service=[b""])),
    "a service that is no text": Q(
        type=Q.Steal, location=b"w", worker=pb.WorkerMsg(service=[b"\xff"])
    ),
    "too many services": Q(type=Q.Steal, location=b"w", worker=pb.WorkerMsg(service=[b"s"] * 1001)),
    "tasks with and without attempt": Q(
        type=Q.Complete,
        location=b"w",
        request=1,
        task=[
            pb.TaskMsg(name=b"a", origin=b"", attempt=1).SerializeToString(),
            pb.TaskMsg(name=b"b", origin=b"").SerializeToString(),
        ],
    ),
}


@pytest.mark.parametrize("query", MALFORMED.values(), ids=MALFORMED)
def test_malformed_request_is_an_error_with_a_reason_and_changes_nothing(query: Q) -> None:
    counter = Extended()
    counter.create(b"old")
    before = old_snapshots.fingerprint(counter.scheduler.ledger)
    reply = counter.request(query.SerializeToString())
    assert reply.kind == peer.ERROR
    assert reply.reason
    assert old_snapshots.fingerprint(counter.scheduler.ledger) == before
    assert counter.take().names == [b"old"]
