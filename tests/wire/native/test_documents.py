"""Documents, listings, results and commands of an extended peer."""

from __future__ import annotations

import pytest
from msgspec import structs

from taskyard.core.blobs import Blob, Result
from taskyard.core.events import Outcome, Scope, WorkerRegistered
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.core.records import Progressed
from taskyard.core.states import TaskState
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer, task_contents
from taskyard.wire.native.peer import Reply
from tests.wire.native.test_extended import FACTS, Extended, Q


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
    reply = counter.request(task_contents.results(1, [b"a", b"missing"]))
    assert (reply.names, reply.states) == ([b"a"], [TaskState.READY])


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_result_is_sent_with_its_length(*, stream: bool) -> None:
    counter = Extended()
    counter.create(b"a", b"b")
    counter.take(2)
    watch = peer.watch(6, [b"a", b"b"], wait_ns=SECOND_NS, stream=stream)
    counter.frames([b"", watch], b"client")
    reports = peer.ReportColumns(
        *([b"a", b"b"], [1, 1], [Outcome.DONE] * 2),
        texts=[b"whole", Blob(b"", 9, b"end")],
        outputs=[b"", Blob(b"", 5, b"out")],
    )
    counter.frames([b"", peer.complete(7, b"w", reports)], b"w")
    (replies,) = [Reply(body) for route, body in counter.sent if route == b"client"]
    assert replies.results == [Result(b"whole"), Result(Blob(b"", 9, b"end"), has_stderr=True)]
    records = counter.scheduler.take_records()
    (progressed,) = [one for one in records if isinstance(one, Progressed)]
    assert progressed.texts == [b"", Blob(b"", 5, b"out")]


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
    "results of a campaign": Q(type=Q.Read, scope=pb.ScopeMsg(campaign=b"c")),
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
    before = ledger_fingerprint(counter.scheduler.ledger)
    reply = counter.request(query.SerializeToString())
    assert reply.kind == peer.ERROR
    assert reply.reason
    assert ledger_fingerprint(counter.scheduler.ledger) == before
    assert counter.take().names == [b"old"]
