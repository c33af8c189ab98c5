"""An extended peer, with our fields and types, as our own clients and workers send them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from taskyard.core.events import (
    Outcome,
    Scope,
    UnknownPolicy,
    WorkerHeartbeat,
    WorkerLost,
    WorkerRegistered,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import NEVER_NS
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.wire.native import pending as native_pending
from taskyard.wire.native import requests as native_requests
from taskyard.wire.native.peer import Reply
from taskyard.wire.native.pending import WAITING_MAX
from tests.wire.kit import BROKER, Counter

Q = pb.QueryMsg
FACTS = WorkerFacts(
    services=(b"exec",), slots_total=4, lease_timeout_ns=15 * SECOND_NS, incarnation=9
)
WORKER = peer.worker_message(FACTS)
HEARTBEAT_NS = SECOND_NS


class Extended(Counter):
    """A broker with extended peers."""

    flushes = True

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


def test_request_without_a_number_is_served() -> None:
    extended = Q(type=Q.Steal, location=b"w", worker=WORKER).SerializeToString()
    (reply,) = Extended().frames([b"", extended])
    assert Q.FromString(reply).type == Q.NotFound


def test_restarted_tasks_run_again_and_dependents_wait_for_them() -> None:
    counter = Extended()
    counter.create(b"a", b"b", after=[[], [b"a"]])
    counter.finish(counter.take())
    columns = Submission([b"a", b"b"], [b"1"], [Terms(service=b"exec")], after=[[], [b"a"]])
    assert counter.request(peer.create(1, columns)).kind == peer.ERROR
    restarted = counter.request(peer.create(1, columns, restart=True))
    assert (restarted.kind, restarted.count) == (peer.OK, 1)
    again = counter.take(2)
    assert (again.names, again.attempts, again.payloads) == ([b"a"], [2], [b"1"])


def test_resources_of_tasks_and_workers_arrive_unchanged() -> None:
    counter = Extended()
    needed = ((b"gpus", 5_000), (b"memory", 1 << 40))
    submission = Submission([b"a"], terms=[Terms(service=b"exec", resources=needed)])
    counter.request(peer.create(1, submission))
    (nothing,) = counter.steal()
    assert nothing.kind == peer.NOT_FOUND
    facts = structs.replace(FACTS, resources=needed)
    (body,) = counter.frames([b"", peer.steal(2, b"v", peer.worker_message(facts), 1)], b"v")
    assert Reply(body).assigned().terms_of(0).resources == needed
    assert counter.scheduler.ledger.workers[b"v"].facts.resources == needed


@pytest.mark.parametrize(("count", "amount"), [(33, 1), (1, 0), (1, 1 << 63)])
def test_invalid_resources_are_refused(count: int, amount: int) -> None:
    resources = tuple((b"%02d" % number, amount) for number in range(count))
    submission = Submission([b"a"], terms=[Terms(resources=resources)])
    reply = Extended().request(peer.create(1, submission))
    assert reply.kind == peer.ERROR
    assert "resources" in reply.reason


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
    assert counter.dialect.timers.heap[0][0] == counter.now_ns + SECOND_NS
    ((_, body),) = counter.pass_time(SECOND_NS)
    assert (Reply(body).kind, Reply(body).request) == (peer.NOT_FOUND, 2)
    assert counter.dialect.timers.heap[0][0] == NEVER_NS
    counter.create(b"a")
    assert [route for route, _ in counter.sent] == [b"peer"]


def test_steal_waits_while_heartbeats_name_it() -> None:
    counter = Extended()
    minute_ns = native_requests.WAIT_NS_MAX

    def beat(waiting: int, times: int) -> list[int]:
        """Send a heartbeat every 10 s. Return the Steals that are confirmed as waiting."""
        confirmed = []
        for _ in range(times):
            assert counter.pass_time(minute_ns // 6) == []
            body = peer.heartbeat(3, b"w", WORKER, [], HEARTBEAT_NS, seen=0, waiting=waiting)
            confirmed.append(counter.request(body, b"w").waiting)
        return confirmed

    counter.steal(wait_ns=minute_ns)
    assert beat(2, 20) == [2] * 20
    assert beat(1, 1) == [0]  # another one
    assert beat(2, 1) == [2]
    (silent,) = counter.pass_time(16 * SECOND_NS)  # the worker is lost
    assert Reply(silent[1]).kind == peer.NOT_FOUND
    assert (
        counter.request(peer.heartbeat(4, b"w", WORKER, [], HEARTBEAT_NS, waiting=2), b"w").waiting
        == 0
    )
    counter.steal(wait_ns=minute_ns)
    beat(2, 1)
    assert beat(0, 4) == [0] * 4
    replies = counter.pass_time(minute_ns // 6 + native_requests.STEAL_STEP_NS)
    assert [Reply(body).kind for _, body in replies] == [peer.NOT_FOUND]  # no longer named


def test_steal_of_a_worker_without_a_timeout_ends_although_heartbeats_name_it() -> None:
    counter, facts = Extended(), peer.worker_message(WorkerFacts(slots_total=1, incarnation=1))
    counter.frames([b"", peer.steal(2, b"w", facts, 1, SECOND_NS)], b"w")
    counter.request(peer.heartbeat(3, b"w", facts, [], HEARTBEAT_NS, waiting=2), b"w")
    replies = counter.pass_time(SECOND_NS)
    assert [Reply(body).kind for _, body in replies] == [peer.NOT_FOUND]


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


def parked_report(
    counter: Extended, assigned: peer.Assigned, wait_ns: int = SECOND_NS
) -> list[Reply]:
    """Send a Complete that waits for a task. Return the replies in this turn."""
    reports = peer.ReportColumns(assigned.names, assigned.attempts)
    body = peer.complete(3, b"w", reports, WORKER, 1, wait_ns=wait_ns)
    return [Reply(one) for one in counter.frames([b"", body], b"w")]


def test_complete_that_waits_is_acknowledged_at_once_and_gets_tasks_later() -> None:
    counter = Extended()
    counter.create(b"a")
    (acknowledged,) = parked_report(counter, counter.take())
    assert (acknowledged.kind, acknowledged.request) == (peer.OK, 3)
    assert counter.scheduler.ledger.counts[TaskState.DONE] == 1
    counter.create(b"b")
    ((_, body),) = [one for one in counter.sent if one[0] == b"w"]
    assert (Reply(body).request, Reply(body).assigned().names) == (3, [b"b"])


def test_complete_that_waits_has_one_reply_if_tasks_are_ready() -> None:
    counter = Extended()
    counter.create(b"a", b"b", after=[[], [b"a"]])
    (reply,) = parked_report(counter, counter.take())
    assert (reply.request, reply.assigned().names) == (3, [b"b"])
    assert counter.dialect.timers.heap[0][0] == NEVER_NS


def test_complete_that_waits_lists_tasks_not_held_once() -> None:
    counter = Extended()
    counter.create(b"a")
    assigned = counter.take()
    counter.finish(assigned)
    (acknowledged,) = parked_report(counter, assigned)
    assert (acknowledged.kind, acknowledged.reason) == (peer.OK, "not held: a")
    ((_, body),) = counter.pass_time(SECOND_NS)
    assert (Reply(body).kind, Reply(body).reason) == (peer.NOT_FOUND, "")


def test_complete_waits_while_heartbeats_name_it() -> None:
    counter = Extended()
    counter.create(b"a")
    parked_report(counter, counter.take())
    for _ in range(20):
        body = peer.heartbeat(4, b"w", WORKER, [], HEARTBEAT_NS, seen=0, waiting=3)
        assert counter.request(body, b"w").waiting == 3
        assert counter.pass_time(10 * SECOND_NS) == []


def test_complete_that_waits_and_is_repeated_waits_once() -> None:
    counter = Extended()
    counter.create(b"a")
    assigned = counter.take()
    parked_report(counter, assigned)
    former, again = parked_report(counter, assigned)
    assert (former.kind, again.kind, again.reason) == (peer.NOT_FOUND, peer.OK, "not held: a")
    counter.create(b"b", b"c")
    assert [Reply(body).assigned().names for to, body in counter.sent if to == b"w"] == [[b"b"]]


def test_complete_of_a_route_that_is_gone_waits_no_longer() -> None:
    counter = Extended()
    counter.create(b"a")
    parked_report(counter, counter.take())
    counter.handle(counter.dialect.disconnected(b"w"))
    counter.create(b"b")
    assert counter.scheduler.ledger.tasks[b"b"].state is TaskState.READY


def test_complete_of_a_drained_worker_gets_an_exit() -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    first, second = counter.take(), counter.take()
    counter.request(peer.drain(9, b"w"))
    (acknowledged,) = parked_report(counter, first)
    assert acknowledged.kind == peer.OK
    counter.sent = []
    reports = peer.ReportColumns(second.names, second.attempts)
    replies = counter.frames([b"", peer.complete(4, b"w", reports, WORKER)], b"w")
    assert {Reply(one).request: Reply(one).kind for one in replies} == {3: peer.EXIT, 4: peer.OK}


def test_complete_beyond_the_limit_of_waiting_requests_is_accepted_and_does_not_wait() -> None:
    counter = Extended()
    counter.create(b"a")
    assigned = counter.take()
    for number in range(WAITING_MAX):
        counter.frames([b"", peer.watch(10 + number, [b"b"], wait_ns=SECOND_NS)], b"w")
    (reply,) = parked_report(counter, assigned)
    assert reply.kind == peer.NOT_FOUND
    assert counter.scheduler.ledger.counts[TaskState.DONE] == 1


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


def test_requests_of_a_disconnected_peer_are_dropped() -> None:
    counter = Extended()
    counter.create(b"a")
    counter.frames([b"", peer.watch(6, [b"a"], stream=True)], b"gone")
    counter.frames(
        [b"", peer.steal(2, b"v", peer.worker_message(WorkerFacts()), 1, SECOND_NS)], b"gone"
    )
    counter.handle(counter.dialect.disconnected(b"gone"))
    assert counter.scheduler.context.watchers == {}
    assert counter.dialect.timers.heap[0][0] == NEVER_NS
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
        *registered, heartbeat = native_requests.decode_request(pending, request)
        assert isinstance(heartbeat, WorkerHeartbeat)
        appeared = registered[0] if registered else heartbeat.registration
        assert isinstance(appeared, WorkerRegistered)
        return [*pending.facts]

    kept = [beat(worker) for worker in (b"u", b"v", b"u", b"w")]
    assert kept == [[b"u"], [b"u", b"v"], [b"u", b"v"], [b"w"]]


# Refusals.


def test_refused_create_lists_the_tasks_at_fault() -> None:
    counter = Extended()
    counter.create(b"a", campaign=b"c")
    terms = [Terms(service=b"exec", campaign=b"c")]
    batch = Submission([b"b", b"a", b"d"], [b"1", b"2", b"3"], terms, after=[[], [], [b"no"]])
    reply = counter.request(peer.create(5, batch))
    conflict = "task c/a is known with another payload (choose another name)"
    assert (reply.kind, reply.request, reply.code) == (peer.ERROR, 5, "conflict")
    assert reply.reason == conflict
    unknown = "unknown predecessor no (submit it first, or in the same batch)"
    assert reply.refused_tasks() == [
        peer.RefusedTask(1, "c/a", "conflict", conflict),
        peer.RefusedTask(2, "c/d", "unknown", unknown),
    ]
    assert [*counter.scheduler.ledger.tasks] == [b"c/a"]


def test_refusal_of_a_whole_request_lists_no_tasks() -> None:
    reply = Extended().request(peer.create(5, Submission([b"a", b"b"], terms_at=[0, 9])))
    assert (reply.code, reply.refused_tasks()) == ("malformed", [])


def test_request_beyond_a_limit_is_refused_as_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_pending, "WAITING_MAX", 2)
    counter = Extended()
    for number in range(2):
        counter.frames([b"", peer.steal(number, b"w%d" % number, WORKER, 1, SECOND_NS)])
    (refused,) = counter.frames([b"", peer.steal(1, b"w", WORKER, 1, SECOND_NS)])
    assert Reply(refused).code == "too-many"


def test_check_only_counts_new_tasks_and_accepts_none() -> None:
    counter = Extended()
    counter.create(b"known")
    before = counter.scheduler.ledger.record
    batch = Submission([b"known", b"a", b"b"], [b"p-known", b"1", b"2"], [Terms(service=b"exec")])
    body = peer.create(6, batch, check_only=True, stream=True)
    answers = [Reply(one) for one in counter.frames([b"", body])]
    assert [(one.kind, one.request, one.count) for one in answers] == [(peer.OK, 6, 2)]
    assert counter.scheduler.ledger.record == before
    assert [*counter.scheduler.ledger.tasks] == [b"known"]
    assert counter.dialect.timers.heap[0][0] == NEVER_NS  # nothing is watched
    assert counter.request(peer.create(7, batch)).count == 2


def test_check_only_lists_the_tasks_at_fault() -> None:
    reply = Extended().request(peer.create(6, Submission([b"a", b"a"]), check_only=True))
    assert [(task.index, task.code) for task in reply.refused_tasks()] == [(1, "duplicate")]


def test_check_only_makes_a_request_extended() -> None:
    counter = Extended()
    query = Q(type=Q.Create, check_only=True)
    query.task.append(pb.TaskMsg(name=b"a", origin=b"me").SerializeToString())
    answer = Q.FromString(counter.ask(query.SerializeToString()))
    assert (answer.type, answer.n, answer.broker) == (Q.OK, 1, BROKER)
    assert counter.scheduler.ledger.tasks == {}
