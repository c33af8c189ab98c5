"""A plain dwork peer: the published bytes, the table of requests, and the rules below it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from taskyard.core.events import DiskSpaceChanged
from taskyard.core.limits import SECOND_NS
from taskyard.core.records import Progressed
from taskyard.core.scheduler import Scheduler
from taskyard.core.states import TaskState
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.wire import dwork_pb2 as pb
from tests.kit.snapshots import reopened
from tests.wire.kit import WALL_NS, Counter

Q = pb.QueryMsg

STATUS = "0806"
CREATE_A = "080012080a01411203636c69"
CREATE_B_AND_C = "0800120d0a01421203636c6922030a014112120a01431203636c6922030a014122030a0142"
STEAL = "080132027731"
STEAL_3 = "0801200332027731"
COMPLETE_A = "080212080a01411203636c6932027731"
TRANSFER_A = "0803120d0a01411203636c6922030a015a32027731"
EXIT = "080732027731"
OK, NOT_FOUND, ERROR = "0806", "0805", "0808"


def task(name: str, *before: str) -> bytes:
    after = [pb.TaskMsg.Dep(name=one.encode()).SerializeToString() for one in before]
    return pb.TaskMsg(name=name.encode(), origin=b"cli", pred=after).SerializeToString()


def create(*tasks: bytes) -> bytes:
    return Q(type=Q.Create, task=tasks).SerializeToString()


def steal(counter: Counter, worker: str = "w1", n: int = 1) -> list[str] | int:
    """Return the names of the stolen tasks, or the type of another reply."""
    answer = Q.FromString(
        counter.ask(Q(type=Q.Steal, location=worker.encode(), n=n).SerializeToString())
    )
    if answer.type != Q.Transfer:
        return answer.type
    return [pb.TaskMsg.FromString(one).name.decode() for one in answer.task]


def complete(counter: Counter, *names: str, worker: str = "w1") -> Q:
    tasks = [task(name) for name in names]
    body = Q(type=Q.Complete, task=tasks, location=worker.encode()).SerializeToString()
    return Q.FromString(counter.ask(body))


def state(counter: Counter, name: str) -> TaskState:
    return counter.scheduler.ledger.tasks[name.encode()].state


def test_plain_worker_keeps_its_tasks_for_ten_minutes_after_a_restart() -> None:
    counter = Counter()
    counter.hex(CREATE_A)
    assert steal(counter) == ["A"]
    ledger = reopened(counter.scheduler.ledger)
    counter.scheduler = Scheduler(ledger)
    counter.scheduler.resume(counter.now_ns)
    counter.pass_time(599 * SECOND_NS)
    assert counter.hex(STATUS)
    assert state(counter, "A") is TaskState.LEASED
    counter.pass_time(SECOND_NS)
    assert state(counter, "A") is TaskState.READY
    assert counter.scheduler.ledger.tasks[b"A"].losses == 0
    assert complete(counter, "A").type == Q.NotFound
    assert steal(counter) == ["A"]
    counter.pass_time(10_000 * SECOND_NS)
    assert counter.hex(COMPLETE_A) == OK


def test_plain_worker_without_tasks_is_removed_after_ten_minutes_without_a_message() -> None:
    counter = Counter()
    counter.hex(CREATE_A)
    assert steal(counter) == ["A"]
    workers = counter.scheduler.ledger.workers
    counter.pass_time(10_000 * SECOND_NS)
    assert len(workers) == 1  # it may still run the task
    assert counter.hex(COMPLETE_A) == OK
    counter.pass_time(599 * SECOND_NS)
    assert len(workers) == 1
    counter.pass_time(SECOND_NS)
    assert not workers
    counter.hex(CREATE_B_AND_C)
    assert steal(counter) == ["B"]  # registered again
    assert len(workers) == 1


def test_plain_worker_that_reconnects_under_its_id_keeps_its_tasks_for_ten_minutes() -> None:
    counter = Counter()
    counter.hex(CREATE_A)
    assert steal(counter) == ["A"]
    counter.handle(counter.dialect.reconnected(b"peer", counter.now_ns))
    counter.pass_time(599 * SECOND_NS)
    assert state(counter, "A") is TaskState.LEASED
    counter.pass_time(SECOND_NS)
    assert state(counter, "A") is TaskState.READY


def test_published_bytes_are_sent_exactly() -> None:
    counter = Counter()
    assert counter.hex(CREATE_A) == OK
    assert counter.hex(CREATE_B_AND_C) == OK
    micro = (WALL_NS + counter.now_ns - SECOND_NS) // 1000
    stolen = Q.FromString(bytes.fromhex(counter.hex(STEAL)))
    (raw,) = stolen.task
    log = pb.TaskMsg.LogMsg(state=pb.TaskMsg.Stolen, time=micro).SerializeToString()
    assert raw == pb.TaskMsg(name=b"A", origin=b"cli", log=[log]).SerializeToString()
    assert stolen.ListFields()[0][1] == Q.Transfer
    assert len(stolen.ListFields()) == 2
    assert counter.hex(COMPLETE_A) == OK
    assert counter.hex(STEAL_3).startswith("080312")
    assert counter.hex(EXIT) == OK
    assert counter.hex(EXIT) == NOT_FOUND


def test_published_transfer_returns_the_task() -> None:
    counter = Counter()
    counter.hex(CREATE_A)
    counter.hex(STEAL)
    assert counter.hex(TRANSFER_A) == OK
    assert steal(counter) == ["A"]


def test_status_has_the_unfinished_and_ready_tasks() -> None:
    counter = Counter()
    empty = Q.FromString(bytes.fromhex(counter.hex(STATUS)))
    assert (empty.type, empty.name, empty.n) == (Q.OK, b"0 tasks unfinished, 0 ready", 0)
    assert empty.HasField("n")
    counter.hex(CREATE_A)
    counter.hex(CREATE_B_AND_C)
    status = Q.FromString(bytes.fromhex(counter.hex(STATUS)))
    assert (status.name, status.n) == (b"3 tasks unfinished, 1 ready", 1)


def test_worker_loop_ends_with_exit_when_all_is_done() -> None:
    counter = Counter()
    counter.hex(CREATE_A)
    counter.hex(CREATE_B_AND_C)
    done: list[str] = []
    while isinstance(names := steal(counter, n=3), list):
        done += names
        assert complete(counter, *names).type == Q.OK
    assert done == ["A", "B", "C"]
    assert names == Q.Exit


def test_steal_is_not_found_while_another_worker_holds_the_dependency() -> None:
    counter = Counter()
    counter.ask(create(task("A"), task("B", "A")))
    assert steal(counter, "w1", 5) == ["A"]
    assert steal(counter, "w2") == Q.NotFound


def test_complete_of_tasks_not_held_names_them_and_completes_the_rest() -> None:
    counter = Counter()
    counter.ask(create(task("A"), task("B"), task("C")))
    steal(counter, "w1", 2)
    answer = complete(counter, "A", "C", "X")
    assert answer.type == Q.NotFound
    assert [pb.TaskMsg.FromString(one).name for one in answer.task] == [b"C", b"X"]
    assert state(counter, "A") is TaskState.DONE
    assert state(counter, "C") is TaskState.READY


def test_transfer_of_tasks_not_held_changes_nothing() -> None:
    counter = Counter()
    counter.ask(create(task("A"), task("B")))
    steal(counter, "w1")
    body = Q(type=Q.Transfer, task=[task("A"), task("B")], location=b"w1").SerializeToString()
    assert counter.ask(body).hex() == NOT_FOUND
    assert state(counter, "A") is TaskState.LEASED


def test_transferred_task_goes_to_the_end_and_waits_for_its_new_predecessor() -> None:
    counter = Counter()
    counter.ask(create(task("A"), task("B"), task("Z")))
    steal(counter, "w1")
    body = Q(type=Q.Transfer, task=[task("A", "Z")], location=b"w1").SerializeToString()
    assert counter.ask(body).hex() == OK
    assert state(counter, "A") is TaskState.BLOCKED
    assert steal(counter, "w1", 9) == ["B", "Z"]
    complete(counter, "Z")
    assert steal(counter, "w1", 9) == ["A"]


def test_transfer_by_an_unknown_worker_is_not_found() -> None:
    counter = Counter()
    counter.ask(create(task("A")))
    assert counter.hex(TRANSFER_A) == NOT_FOUND


def test_exit_returns_held_tasks_newest_first() -> None:
    counter = Counter()
    counter.ask(create(task("A"), task("B"), task("C")))
    steal(counter, "w1", 2)
    assert counter.hex(EXIT) == OK
    assert steal(counter, "w2", 9) == ["A", "B", "C"]


def test_task_that_a_completion_made_ready_goes_first() -> None:
    counter = Counter()
    counter.ask(create(task("A"), task("X"), task("Y"), task("B", "A")))
    assert steal(counter) == ["A"]
    complete(counter, "A")
    assert steal(counter, n=9) == ["B", "X", "Y"]


def test_repeated_create_adds_dependencies_to_an_unfinished_task() -> None:
    counter = Counter()
    counter.ask(create(task("A"), task("B")))
    assert counter.ask(create(task("B", "A"))).hex() == OK
    assert state(counter, "B") is TaskState.BLOCKED
    assert steal(counter, n=9) == ["A"]


def test_repeated_create_can_not_add_dependencies_to_a_leased_task() -> None:
    counter = Counter()
    counter.ask(create(task("A"), task("B")))
    steal(counter)
    assert counter.ask(create(task("A", "B"))).hex() == ERROR


def test_repeated_create_of_a_finished_task_is_a_new_generation() -> None:
    counter = Counter()
    counter.hex(CREATE_A)
    steal(counter)
    complete(counter, "A")
    assert counter.hex(CREATE_A) == OK
    assert steal(counter) == ["A"]


def test_unknown_predecessor_counts_as_done() -> None:
    counter = Counter()
    counter.ask(create(task("B", "nobody")))
    assert steal(counter) == ["B"]


def names_of(counter: Counter) -> list[str]:
    return [name.decode() for name in counter.scheduler.ledger.tasks]


def test_create_refuses_a_cycle_and_accepts_other_tasks() -> None:
    counter = Counter()
    assert counter.ask(create(task("A", "B"), task("X"), task("B", "A"), task("Y", "X"))).hex() == (
        ERROR
    )
    assert counter.ask(create(task("A", "A"))).hex() == ERROR
    assert names_of(counter) == ["X", "Y"]
    assert steal(counter, n=9) == ["X"]


def test_create_refuses_dependents_of_a_refused_task() -> None:
    counter = Counter()
    body = create(task("C", "B"), task("D", "C"), task("A", "B"), task("B", "A"), task("E"))
    assert counter.ask(body).hex() == ERROR
    assert names_of(counter) == ["E"]


def test_create_refuses_a_cycle_through_existing_tasks() -> None:
    counter = Counter()
    counter.ask(create(task("A"), task("B", "A")))
    assert counter.ask(create(task("A", "C"), task("C", "B"), task("D", "B"))).hex() == ERROR
    assert names_of(counter) == ["A", "B", "D"]
    assert state(counter, "A") is TaskState.READY
    assert state(counter, "D") is TaskState.BLOCKED


def test_create_merges_tasks_of_one_name_with_all_dependencies() -> None:
    counter = Counter()
    body = create(task("C", "A"), task("A"), task("B"), task("C", "B"), task("C", "A"))
    assert counter.ask(body).hex() == OK
    assert names_of(counter) == ["C", "A", "B"]
    assert counter.scheduler.ledger.tasks[b"C"].waits == 2
    assert steal(counter, n=9) == ["A", "B"]
    complete(counter, "A")
    assert steal(counter) == Q.NotFound
    complete(counter, "B")
    assert steal(counter) == ["C"]


def test_create_accepts_dependencies_in_any_order() -> None:
    counter = Counter()
    assert counter.ask(create(task("C", "B"), task("B", "A"), task("A"))).hex() == OK
    assert [steal(counter), complete(counter, "A").type] == [["A"], Q.OK]
    assert [steal(counter), complete(counter, "B").type] == [["B"], Q.OK]
    assert steal(counter) == ["C"]


def test_create_with_a_leased_task_accepts_the_others() -> None:
    counter = Counter()
    counter.ask(create(task("A")))
    steal(counter)
    assert counter.ask(create(task("A"), task("B"), task("C", "A"))).hex() == ERROR
    assert names_of(counter) == ["A", "B"]


def test_create_with_a_cancelled_predecessor_accepts_the_others() -> None:
    counter = Counter()
    counter.ask(create(task("A")))
    cancel = Q(type=Q.Cancel, batch=pb.Batch(name=[b"A"])).SerializeToString()
    assert Q.FromString(counter.ask(cancel)).type == Q.OK
    assert counter.ask(create(task("B", "A"), task("C"))).hex() == ERROR
    assert names_of(counter) == ["A", "C"]


def test_refused_tasks_are_counted_and_the_latest_are_in_the_statistics() -> None:
    counter = Counter()
    counter.ask(create(task("X"), task("A", "A")))
    counter.ask(create(task("B", "C"), task("C", "B"), task("D", "C")))
    stats = msgspec.json.decode(
        Q.FromString(counter.ask(Q(type=Q.Stats).SerializeToString())).document
    )
    assert stats["refused"] == 4
    assert stats["refused_last"] == {
        "code": "cycle",
        "names": ["B", "C", "D"],
        "text": "task B would wait for itself",
    }


def test_create_refused_as_a_whole_is_counted() -> None:
    counter = Counter()
    counter.handle([DiskSpaceChanged(counter.now_ns, accepting=False)])
    assert counter.ask(create(task("A"), task("B"))).hex() == ERROR
    assert counter.scheduler.context.refused == 2


def test_create_of_an_extended_peer_is_all_or_nothing() -> None:
    counter = Counter()
    for batch in (
        pb.Batch(name=[b"A", b"A"]),
        pb.Batch(name=[b"X", b"A", b"B"], after=[b"B", b"A"], after_count=[0, 1, 1]),
    ):
        answer = Q.FromString(counter.ask(Q(type=Q.Create, batch=batch).SerializeToString()))
        assert answer.type == Q.Error
    assert names_of(counter) == []
    assert counter.scheduler.context.refused == 0


def test_lookup_returns_the_log_and_the_holder() -> None:
    counter = Counter()
    counter.hex(CREATE_A)
    steal(counter)
    answer = Q.FromString(counter.ask(Q(type=Q.Lookup, name=b"A").SerializeToString()))
    (raw,) = answer.task
    logs = [pb.TaskMsg.LogMsg.FromString(one) for one in pb.TaskMsg.FromString(raw).log]
    assert (answer.type, answer.location) == (Q.Transfer, b"w1")
    assert [log.state for log in logs] == [pb.TaskMsg.Pending, pb.TaskMsg.Stolen]
    complete(counter, "A")
    answer = Q.FromString(counter.ask(Q(type=Q.Lookup, name=b"A").SerializeToString()))
    logs = [pb.TaskMsg.LogMsg.FromString(one) for one in pb.TaskMsg.FromString(answer.task[0]).log]
    assert not answer.HasField("location")
    assert logs[-1].state == pb.TaskMsg.Done
    assert counter.ask(Q(type=Q.Lookup, name=b"nobody").SerializeToString()).hex() == NOT_FOUND


def test_replies_keep_the_order_of_pipelined_requests() -> None:
    counter = Counter()
    requests = [CREATE_A, "08", STEAL, STEAL, STATUS, EXIT]
    events = [
        event
        for body in requests
        for event in counter.dialect.receive(b"peer", [b"", bytes.fromhex(body)], counter.now_ns)
    ]
    counter.handle(events)
    answers = [Q.FromString(body).type for _, body in counter.sent]
    assert answers == [Q.OK, Q.Error, Q.Transfer, Q.NotFound, Q.OK, Q.OK]


def test_plain_leases_do_not_expire() -> None:
    counter = Counter()
    counter.hex(CREATE_A)
    steal(counter)
    assert counter.pass_time(10**6 * SECOND_NS) == []
    assert state(counter, "A") is TaskState.LEASED


def test_log_of_a_complete_is_kept_in_the_history() -> None:
    counter = Counter()
    counter.hex(CREATE_A)
    steal(counter)
    log = pb.TaskMsg.LogMsg(state=pb.TaskMsg.Started, time=5).SerializeToString()
    message = pb.TaskMsg(name=b"A", origin=b"cli", log=[log]).SerializeToString()
    body = Q(type=Q.Complete, task=[message], location=b"w1").SerializeToString()
    assert counter.ask(body).hex() == OK
    records = counter.scheduler.take_records()
    assert [one.texts for one in records if isinstance(one, Progressed)] == [[b"Started 5"]]


T = pb.TaskMsg
A = T(name=b"A", origin=b"x").SerializeToString()


def made(kind: Q.Type, **fields: Any) -> str:
    return Q(type=kind, **fields).SerializeToString().hex()


def of_one(kind: Q.Type = Q.Create, **fields: Any) -> str:
    """Return a request about one task with these fields."""
    task = T(**{"name": b"A", "origin": b"x", **fields}).SerializeToString()
    return made(kind, task=[task], **({} if kind == Q.Create else {"location": b"w"}))


MALFORMED = {
    "empty": "",
    "truncated": "0800120a0a01",
    "no type": "12080a01411203636c69",
    "unknown type": "0863",
    "an answer as request": "0805",
    "an error as request": "0808",
    "create without tasks": "0800",
    "create with a name": made(Q.Create, task=[A], name=b"n"),
    "create with n": made(Q.Create, task=[A], n=1),
    "create with a location": made(Q.Create, task=[A], location=b"w"),
    "create with an empty name": of_one(name=b""),
    "create without an origin": "080012030a0141",
    "create without a name": "080012051203636c69",
    "create with a truncated task": "080012030a0541",
    "a name that is no text": of_one(name=b"\xff"),
    "an origin that is no text": of_one(origin=b"\xc3"),
    "a name that is too long": of_one(name=b"n" * 1025),
    "a predecessor without a name": of_one(pred=[b""]),
    "a predecessor that is no text": of_one(pred=[T.Dep(name=b"\xff").SerializeToString()]),
    "a successor that is garbled": of_one(succ=[b"\x0a\x05"]),
    "a log without a time": of_one(Q.Complete, log=[b"\x08\x01"]),
    "too many log entries": of_one(Q.Complete, log=[b"\x08\x01\x10\x01"] * 101),
    "steal without a location": "0801",
    "steal with an empty location": "08013200",
    "steal with n of 0": "0801200032027731",
    "steal with n below 0": made(Q.Steal, n=-1, location=b"w"),
    "steal with a task": made(Q.Steal, location=b"w", task=[A]),
    "steal with a name": made(Q.Steal, location=b"w", name=b"n"),
    "a location that is no text": made(Q.Steal, location=b"\xfe"),
    "complete without tasks": made(Q.Complete, location=b"w"),
    "complete without a location": made(Q.Complete, task=[A]),
    "complete with n": made(Q.Complete, task=[A], location=b"w", n=1),
    "transfer without tasks": made(Q.Transfer, location=b"w"),
    "transfer without a location": made(Q.Transfer, task=[A]),
    "transfer with a name": made(Q.Transfer, task=[A], location=b"w", name=b"n"),
    "exit without a location": "0807",
    "exit with a task": made(Q.Exit, task=[A], location=b"w"),
    "status with a name": made(Q.OK, name=b"n"),
    "lookup without a name": "0804",
    "lookup with a location": made(Q.Lookup, name=b"n", location=b"w"),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_malformed_request_is_an_error_and_changes_nothing(body: str) -> None:
    counter = Counter()
    counter.ask(create(task("old"), task("new", "old")))
    before = ledger_fingerprint(counter.scheduler.ledger)
    assert counter.hex(body) == ERROR
    assert ledger_fingerprint(counter.scheduler.ledger) == before
    assert steal(counter, n=9) == ["old"]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x08\x06"],
        [b"x", b"\x08\x06"],
        [b"", b"\x08\x06", b""],
        [b"", b"", b"\x08\x06"],
    ],
)
def test_frames_other_than_delimiter_and_message_are_an_error(frames: list[bytes]) -> None:
    assert [body.hex() for body in Counter().frames(frames)] == [ERROR]


def test_unknown_fields_are_ignored() -> None:
    counter = Counter()
    assert counter.hex(CREATE_A + "2a0178") == OK  # field 5 is unused
    assert steal(counter) == ["A"]


def test_incomplete_character_is_not_completed_by_its_neighbour() -> None:
    halves = [T(name=b"\xc3", origin=b"x"), T(name=b"\xa9", origin=b"x")]
    body = Q(type=Q.Create, task=[one.SerializeToString() for one in halves]).SerializeToString()
    assert Counter().ask(body).hex() == ERROR
