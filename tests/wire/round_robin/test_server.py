"""Round-robin at the broker, frame by frame, as in its docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from taskyard.core import events
from taskyard.core.effects import HeldTasks
from taskyard.core.limits import PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.states import CANCELLED, DONE, FAILED, LEASED, READY
from taskyard.core.workers import WorkerFacts
from taskyard.wire.round_robin import server as round_robin
from taskyard.wire.round_robin import workers as round_robin_workers
from taskyard.wire.round_robin.frames import envelop, parse
from taskyard.wire.round_robin.peers import identity_of, name_of
from taskyard.wire.round_robin.server import Settings, make_server
from tests.wire.round_robin.kit import C1, C2, LMQ, NATIVE, SERVER, SRV, W1, W2, Hall, lmq

if TYPE_CHECKING:
    from taskyard.wire.round_robin.server import RoundRobin

KEY = b"\x0a"


@pytest.fixture
def hall() -> Hall:
    return Hall()


# The exchanges of the docs.


def test_handshake_is_ping_and_pong(hall: Hall) -> None:
    assert hall.says(C1, *lmq(1, b"hand")) == [[b"", LMQ, b"\x02", b"hand", b"", SRV]]


def test_message_reaches_a_worker_and_its_response_the_client(hall: Hall) -> None:
    assert hall.register(W1) == []
    assert hall.says(C1, *lmq(4, b"id-1", KEY, b"stream", b"1024")) == []
    assert hall.hears(W1) == [
        [b"", LMQ, b"\x04", b"id-1", KEY, b"stream", b"1024", b"", C1, SRV],
    ]
    assert hall.says(W1, C1, *lmq(6, b"id-1", b"data", b"more")) == []
    assert hall.hears(C1) == [[b"", LMQ, b"\x06", b"id-1", b"data", b"more", b"", W1, SRV]]
    assert hall.states() == [DONE]
    assert hall.dialect.waiting == 0


def test_events_of_the_exchanges() -> None:
    dialect = started()
    now_ns = SECOND_NS
    facts = WorkerFacts(
        (b"default",),
        10,
        65 * SECOND_NS,
        always_ready=True,
        dialect=b"round-robin",
        restart_lease_ns=60 * SECOND_NS,
    )
    name = b"round-robin:" + W1
    assert dialect.receive(SERVER + W1, lmq(4, b"i", b"\x08", b"10"), now_ns) == [
        events.ReplyDue(0, SERVER + W1, 33),
        events.WorkerRegistered(0, name, facts),
    ]
    payload, envelope = envelop(parse(lmq(4, b"i", KEY, b"x")), C1)
    task = b"round-robin-0000000700000007-49"
    terms = [Terms(dialect=b"round-robin")]
    submission = Submission([task], [payload], terms, envelopes=[envelope])
    assert dialect.receive(SERVER + C1, lmq(4, b"i", KEY, b"x"), now_ns) == [
        events.SubmitRequested(0, SERVER + C1, submission, 49, watch=True)
    ]
    assert dialect.receive(SERVER + W1, lmq(2, b"pong"), now_ns) == []  # too soon for a heartbeat
    assert dialect.receive(SERVER + W1, lmq(2, b"pong"), 3 * now_ns) == [
        events.WorkerHeartbeat(0, name)
    ]
    assert dialect.receive(SERVER + W1, lmq(3, b"WORKER", b"\x09"), 3 * now_ns) == [
        events.WorkerExited(0, name, 65)
    ]
    assert dialect.receive(SERVER + W1, lmq(3, b"WORKER", b"\x09"), 3 * now_ns) == []
    assert dialect.receive(SERVER + C1, lmq(1, b"p"), now_ns) == [
        events.ReplyDue(0, SERVER + C1, 97)
    ]


def started() -> RoundRobin:
    """Return a dialect without workers of a former process."""
    dialect = make_server(1, lambda: 7)
    assert dialect.wake_at_ns() == 0
    assert dialect.time_passed(0) == [events.HeldTasksRequested(0, b"", b"round-robin:", 17)]
    assert dialect.reply(HeldTasks(b"", 17, [])) == []
    assert dialect.wake_at_ns() is None
    return dialect


def test_exec_gets_no_response_and_is_settled_by_increment(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(3, b"fire", b"\x01"))
    assert hall.hears(W1) == [[b"", LMQ, b"\x03", b"fire", b"\x01", b"", C1, SRV]]
    assert hall.states() == [LEASED]
    assert hall.increment(W1) == []
    assert hall.states() == [DONE]
    assert hall.hears(C1) == []
    assert hall.free(W1) == 1


def test_slot_stays_taken_after_the_response_until_increment(
    hall: Hall,
) -> None:
    hall.register(W1, b"1")
    for number in (b"1", b"2", b"3"):
        hall.says(C1, *lmq(4, number, KEY))
    assert [frames[3] for frames in hall.hears(W1)] == [b"1"]
    assert hall.says(W1, C1, *lmq(6, b"1")) == []
    assert hall.states() == [DONE, READY, READY]
    assert [frames[3] for frames in hall.increment(W1)] == [b"2"]  # the backlog, in its order
    assert hall.free(W1) == 0


def test_response_to_register_goes_out_before_any_message(hall: Hall) -> None:
    hall.says(C1, *lmq(4, b"early", KEY))
    first, second = hall.says(W1, *lmq(4, b"reg", b"\x08", b"1"))
    assert first[2:4] == [b"\x06", b"reg"]
    assert second[2:4] == [b"\x04", b"early"]


def test_workers_take_turns_and_a_full_one_is_skipped(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.register(W2, b"3")
    got = []
    for number in range(5):
        hall.says(C1, *lmq(4, b"%d" % number, KEY))
        got.append([len(hall.hears(W1)), len(hall.hears(W2))])
    assert got == [[0, 1], [1, 0], [0, 1], [0, 1], [0, 0]]  # the last to register is first


def test_deregistered_worker_gets_nothing_and_its_messages_go_to_others(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(4, b"m", KEY))
    hall.hears(W1)
    hall.register(W2, b"1")
    hall.says(W1, *lmq(3, b"WORKER", b"\x09"))
    assert [frames[3] for frames in hall.hears(W2)] == [b"m"]
    hall.says(W1, C1, *lmq(6, b"m", b"late"))
    assert hall.hears(C1) == []
    assert hall.dialect.stale == 1
    hall.says(W2, C1, *lmq(6, b"m", b"good"))
    assert [frames[4:] for frames in hall.hears(C1)] == [[b"good", b"", W2, SRV]]


def test_ongoing_gets_a_response_and_renews_the_worker(hall: Hall) -> None:
    hall.register(W1)
    hall.later(59)
    hall.hears(W1)
    assert hall.says(W1, *lmq(4, b"alive", b"ongoing")) == [
        [b"", LMQ, b"\x06", b"alive", b"", SRV],
    ]
    hall.later(59)
    assert hall.workers() == [b"round-robin:" + W1]


def test_ongoing_of_an_unregistered_peer_is_an_error(hall: Hall) -> None:
    ((*_, argument, _, _),) = hall.says(C1, *lmq(4, b"alive", b"ongoing"))
    assert argument == b"ERROR register first"


@pytest.mark.parametrize("command", [3, 4, 5, 1, 2])
def test_message_with_an_address_on_top_is_forwarded_unchanged(hall: Hall, command: int) -> None:
    hall.says(W1, C1, *lmq(command, b"id", b"\x08", b"", b"x"))
    frames = [b"", LMQ, bytes([command]), b"id", b"\x08", b"", b"x", b"", W1, SRV]
    assert hall.hears(C1) == [frames]
    assert hall.states() == []


def test_response_between_two_peers_is_forwarded(hall: Hall) -> None:
    hall.says(C1, C2, *lmq(4, b"q", b"hello"))
    assert hall.hears(C2) == [[b"", LMQ, b"\x04", b"q", b"hello", b"", C1, SRV]]
    hall.says(C2, C1, *lmq(6, b"q", b"world"))
    assert hall.hears(C1) == [[b"", LMQ, b"\x06", b"q", b"world", b"", C2, SRV]]


def test_response_without_a_forwarded_message_is_stale(hall: Hall) -> None:
    """A worker that was lost before a restart sends its RESPONSE after it."""
    hall.says(W1, C1, *lmq(6, b"q", b"world"))
    assert (hall.hears(C1), hall.dialect.stale) == ([], 1)
    hall.says(C1, W1, *lmq(4, b"q", b"hello"))
    hall.says(W1, C1, *lmq(6, b"r", b"world"))
    hall.says(W2, C1, *lmq(6, b"q", b"world"))
    assert (hall.hears(C1), hall.dialect.stale) == ([], 3)


def test_oldest_forwarded_messages_are_forgotten(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_robin, "PASSED_MAX", 1)
    hall.says(C1, C2, *lmq(4, b"q", b"hello"))
    hall.says(C1, C2, *lmq(4, b"r", b"hello"))
    hall.says(C2, C1, *lmq(6, b"q", b"world"))
    assert hall.hears(C1) == []
    hall.says(C2, C1, *lmq(6, b"r", b"world"))
    assert len(hall.hears(C1)) == 1


def test_addresses_are_removed_one_by_one(hall: Hall) -> None:
    hall.says(W1, C1, b"beyond", *lmq(5, b"id"), b"behind")
    frames = [b"beyond", b"", LMQ, b"\x05", b"id", b"", b"behind", W1, SRV]
    assert hall.hears(C1) == [frames]


def test_client_behind_other_servers_gets_its_response_by_its_route(hall: Hall) -> None:
    hall.register(W1)
    hall.says(C1, *lmq(4, b"far", KEY), b"client", b"server")
    assert hall.hears(W1) == [
        [b"", LMQ, b"\x04", b"far", KEY, b"", b"client", b"server", C1, SRV],
    ]
    hall.says(W1, C1, b"server", b"client", *lmq(6, b"far", b"x"))
    assert hall.hears(C1) == [
        [b"server", b"client", b"", LMQ, b"\x06", b"far", b"x", b"", W1, SRV],
    ]
    assert hall.states() == [DONE]


# Refusals.


@pytest.mark.parametrize(
    "slots",
    [[], [b""], [b"0"], [b"-1"], [b"ten"], [b"1.5"], [b"1001"], [b"9" * 99], [b"1", b"2"], [b" 1"]],
)
def test_register_with_bad_slots_is_refused_and_changes_nothing(
    hall: Hall, slots: list[bytes]
) -> None:
    hall.register(W1, b"2")
    for worker in (W1, W2):
        (answer,) = hall.says(worker, *lmq(4, b"reg", b"\x08", *slots))
        assert answer[4].startswith(b"ERROR REGISTER needs the number of slots")
    assert hall.workers() == [b"round-robin:" + W1]
    assert hall.free(W1) == 2


def test_second_register_sets_the_slots_and_a_full_worker_gets_nothing(hall: Hall) -> None:
    hall.register(W1, b"1")
    for number in (b"1", b"2", b"3"):
        hall.says(C1, *lmq(4, number, KEY))
    hall.hears(W1)
    assert hall.register(W1, b"1") == []
    assert [frames[3] for frames in hall.register(W1, b"2")] == [b"2"]


def test_deregister_and_increment_of_an_unknown_worker_are_ignored(hall: Hall) -> None:
    assert hall.says(W1, *lmq(3, b"WORKER", b"\x09")) == []
    assert hall.increment(W1) == []
    assert hall.workers() == []


def test_control_keys_as_arguments_are_data(hall: Hall) -> None:
    hall.register(W1)
    for word in (b"\x07", b"\x08", b"\x09", b"ongoing"):
        hall.says(C1, *lmq(4, b"m", b"key", word))
    assert [frames[5] for frames in hall.hears(W1)] == [b"\x07", b"\x08", b"\x09", b"ongoing"]


def test_past_the_limit_a_trackexec_is_refused_at_once_and_an_exec_is_counted() -> None:
    hall = Hall(Settings(queue_max=2))
    hall.says(C1, *lmq(4, b"1", KEY))
    hall.says(C1, *lmq(3, b"2", KEY))
    ((*_, argument, _, _),) = hall.says(C2, *lmq(4, b"3", KEY))
    assert argument == b"ERROR the queue is full; try again later"
    assert hall.says(C2, *lmq(3, b"4", KEY)) == []
    assert hall.dialect.refused == 1
    assert hall.states() == [READY, READY]
    hall.register(W1)
    hall.hears(W1)
    hall.says(W1, C1, *lmq(6, b"1"))
    assert hall.says(C2, *lmq(4, b"5", KEY)) == []
    assert len(hall.states()) == 3


def test_exec_counts_for_the_limit_until_it_is_settled() -> None:
    hall = Hall(Settings(queue_max=1))
    hall.register(W1)
    hall.says(C1, *lmq(3, b"1", KEY))
    hall.says(C1, *lmq(3, b"2", KEY))
    assert hall.dialect.refused == 1
    hall.increment(W1)
    hall.says(C1, *lmq(3, b"3", KEY))
    assert hall.dialect.refused == 1


def test_full_disk_refuses_with_an_error(hall: Hall) -> None:
    hall.handle([events.DiskSpaceChanged(0, accepting=False)])
    ((*_, argument, _, _),) = hall.says(C1, *lmq(4, b"1", KEY))
    assert argument.startswith(b"ERROR the disk is nearly full")
    hall.says(C1, *lmq(3, b"2", KEY))
    assert hall.dialect.refused == 1


def test_message_without_a_key_or_too_large_is_an_error(hall: Hall) -> None:
    large = bytes(PAYLOAD_BYTES_MAX + 1)
    for arguments in ([], [large], [KEY, large], [b"k" * 1025, b"x"]):
        (answer,) = hall.says(C1, *lmq(4, b"1", *arguments))
        assert answer[4].startswith(b"ERROR ")
        assert hall.says(C1, *lmq(3, b"1", *arguments)) == []
    assert hall.states() == []
    assert hall.dialect.malformed == 8
    assert hall.dialect.waiting == 0


def test_failed_and_cancelled_tasks_are_errors(hall: Hall) -> None:
    hall.says(C1, *lmq(4, b"1", b"payload"))
    (name,) = hall.scheduler.ledger.tasks
    hall.handle([events.CancelRequested(0, NATIVE, events.Scope(names=(name,)), 16)])
    assert [frames[4] for frames in hall.hears(C1)] == [b"ERROR it was cancelled"]
    hall.says(C1, *lmq(4, b"2", b"payload"))
    *_, name = hall.scheduler.ledger.tasks
    hall.handle([events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")])
    failed = [events.Outcome.FAILED_FINAL]
    hall.handle([events.TasksReported(0, b"w", [name], None, failed, [b"broken"])])
    assert [frames[4] for frames in hall.hears(C1)] == [b"ERROR broken"]


def test_too_large_a_result_is_a_failure_and_its_slot_stays_taken(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(4, b"1", KEY))
    hall.says(C1, *lmq(4, b"2", KEY))
    hall.hears(W1)
    assert hall.says(W1, C1, *lmq(6, b"1", bytes(PAYLOAD_BYTES_MAX), b"")) == []
    assert [frames[4][:21] for frames in hall.hears(C1)] == [b"ERROR result of 16777"]
    assert hall.states() == [FAILED, READY]
    assert [frames[3] for frames in hall.increment(W1)] == [b"2"]


# Slots are never freed by other messages.


def test_increment_frees_answered_slots_before_it_settles_an_exec(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.says(C1, *lmq(3, b"exec", KEY))
    hall.says(C1, *lmq(4, b"track", KEY))
    hall.hears(W1)
    hall.says(W1, C1, *lmq(6, b"track"))
    hall.increment(W1)
    assert hall.states() == [LEASED, DONE]
    assert hall.free(W1) == 1
    hall.increment(W1)
    assert hall.states() == [DONE, DONE]
    assert hall.free(W1) == 2


def test_increment_before_its_response_frees_the_slot_with_the_response(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(4, b"1", KEY))
    hall.says(C1, *lmq(4, b"2", KEY))
    hall.hears(W1)
    assert hall.increment(W1) == []
    assert [frames[3] for frames in hall.says(W1, C1, *lmq(6, b"1"))] == [b"2"]
    assert hall.states() == [DONE, LEASED]


def test_increments_without_a_message_free_nothing(hall: Hall) -> None:
    hall.register(W1, b"1")
    for _ in range(5):
        hall.increment(W1)
    assert hall.dialect.stale == 5
    hall.says(C1, *lmq(4, b"1", KEY))
    hall.says(C1, *lmq(4, b"2", KEY))
    assert len(hall.hears(W1)) == 1
    hall.says(W1, C1, *lmq(6, b"1"))
    assert hall.free(W1) == 0


@pytest.mark.parametrize("command", [3, 4])
def test_cancelled_message_keeps_its_slot_until_the_worker_has_finished_it(
    hall: Hall, command: int
) -> None:
    hall.register(W1, b"2")
    hall.says(C1, *lmq(command, b"cancelled", KEY))
    hall.says(C1, *lmq(command, b"good", KEY))
    hall.hears(W1)
    first, _ = hall.scheduler.ledger.tasks
    hall.handle([events.CancelRequested(0, NATIVE, events.Scope(names=(first,)), 16)])
    hall.says(C1, *lmq(4, b"next", KEY))
    assert hall.hears(W1) == []
    hall.says(W1, C1, *lmq(6, b"cancelled", b"late"))
    assert hall.states() == [CANCELLED, LEASED, READY]
    assert [frames[3] for frames in hall.increment(W1)] == [b"next"]
    assert hall.states() == [CANCELLED, LEASED, LEASED]


def test_response_that_crosses_a_cancellation_keeps_its_slot(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(4, b"1", KEY))
    hall.says(C1, *lmq(4, b"2", KEY))
    hall.hears(W1)
    first, _ = hall.scheduler.ledger.tasks
    cancel = events.CancelRequested(0, NATIVE, events.Scope(names=(first,)), 16)
    late = hall.board.receive(SERVER + W1, [C1, *lmq(6, b"1", b"late")], hall.now_ns)
    hall.handle([cancel, *late])
    assert hall.states() == [CANCELLED, LEASED]  # for a turn its slot looked free
    assert hall.free(W1) == -1
    hall.increment(W1)
    assert hall.free(W1) == 0


def test_responses_with_one_id_are_matched_oldest_first(hall: Hall) -> None:
    hall.register(W1)
    hall.says(C1, *lmq(4, b"same", b"a"))
    hall.says(C1, *lmq(4, b"same", b"b"))
    hall.hears(W1)
    hall.says(W1, C1, *lmq(6, b"same", b"x"))
    assert hall.states() == [DONE, LEASED]
    hall.says(W1, C1, *lmq(6, b"same", b"y"))
    assert [frames[4] for frames in hall.hears(C1)] == [b"x", b"y"]


def test_ids_of_two_clients_are_not_confused(hall: Hall) -> None:
    hall.register(W1)
    hall.says(C1, *lmq(4, b"same", b"a"))
    hall.says(C2, *lmq(4, b"same", b"b"))
    hall.says(W1, C2, *lmq(6, b"same", b"for two"))
    hall.says(W1, C1, *lmq(6, b"same", b"for one"))
    assert [frames[4] for frames in hall.hears(C1)] == [b"for one"]
    assert [frames[4] for frames in hall.hears(C2)] == [b"for two"]


# Timeouts and unreachable routes.


def test_silent_worker_is_pinged_every_period_and_lost_in_the_end(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(4, b"m", KEY))
    hall.hears(W1)
    pings = 0
    for _ in range(11):
        hall.later(5)
        ((empty, version, command, *_),) = hall.hears(W1)
        assert [empty, version, command] == [b"", LMQ, b"\x01"]
        pings += 1
    hall.later(4)
    hall.register(W2, b"1")
    hall.later(1)
    assert hall.workers() == [b"round-robin:" + W2]
    assert [frames[3] for frames in hall.hears(W2)] == [b"m"]
    assert pings == 11


def test_pong_keeps_a_worker_registered(hall: Hall) -> None:
    hall.register(W1)
    for _ in range(30):
        hall.later(5)
        assert hall.hears(W1)
        hall.says(W1, *lmq(2, b"PING"))
    assert hall.workers() == [b"round-robin:" + W1]


def test_task_with_a_longer_lease_extends_its_worker_s_timeout(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.create(Submission([b"slow"], terms=[Terms(lease_ns=200 * SECOND_NS)]))
    for _ in range(39):
        hall.later(5)
    assert hall.workers() == [b"round-robin:" + W1]
    hall.later(5)
    assert hall.workers() == []


def test_late_response_of_a_lost_worker_is_stale_and_the_client_gets_one(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(4, b"m", KEY))
    hall.later(60)
    hall.register(W2, b"1")
    hall.hears(W2)
    hall.says(W1, C1, *lmq(6, b"m", b"late"))
    assert hall.hears(C1) == []
    hall.says(W2, C1, *lmq(6, b"m", b"good"))
    assert [frames[4] for frames in hall.hears(C1)] == [b"good"]
    assert hall.dialect.stale == 1


def test_worker_that_left_is_forgotten_after_a_while(hall: Hall) -> None:
    hall.register(W1)
    hall.says(W1, *lmq(3, b"WORKER", b"\x09"))
    hall.later(600)
    assert hall.board.wake_at_ns() is None


def test_message_that_can_not_be_sent_goes_to_the_next_worker(hall: Hall) -> None:
    hall.register(W2, b"1")
    hall.register(W1, b"2")
    hall.dead = [W1]
    hall.says(C1, *lmq(4, b"m", KEY))
    assert [frames[3] for frames in hall.hears(W2)] == [b"m"]
    hall.says(C1, *lmq(4, b"n", KEY))
    assert hall.hears(W1) == []  # it gets nothing until it sends a message
    hall.dead = []
    assert [frames[3] for frames in hall.says(W1, *lmq(2, b"PING"))] == [b"n"]
    hall.says(W1, C1, *lmq(6, b"n", b"x"))
    assert [frames[4] for frames in hall.hears(C1)] == [b"x"]


def test_response_to_a_reassigned_message_is_not_forwarded(hall: Hall) -> None:
    hall.register(W2, b"1")
    hall.register(W1, b"1")
    hall.dead = [W1]
    hall.says(C1, *lmq(4, b"m", KEY))  # for W1, delivered although it seems undelivered
    hall.dead = []
    hall.says(W1, C1, *lmq(6, b"m", b"late"))
    assert hall.hears(C1) == []
    hall.says(W2, C1, *lmq(6, b"m", b"good"))
    assert [frames[4] for frames in hall.hears(C1)] == [b"good"]
    assert hall.dialect.stale == 1


def test_late_response_to_an_earlier_attempt_leaves_the_worker_the_next_one(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.dead = [W1]
    hall.create(Submission([b"task"], [b"payload"]))  # delivered although it seems undelivered
    hall.dead = []
    assert [frames[3] for frames in hall.says(W1, *lmq(2, b"PING"))] == [b"2/task"]
    hall.says(W1, *lmq(6, b"1/task", b"late"))
    assert (hall.states(), hall.dialect.stale) == ([LEASED], 1)
    hall.says(W1, *lmq(6, b"2/task", b"good"))
    assert hall.states() == [DONE]
    assert results(hall, b"task") == [b"good"]


@pytest.mark.parametrize("leaves", ["cut", "silent"])
def test_message_that_a_worker_gets_again_has_a_new_id(hall: Hall, leaves: str) -> None:
    hall.register(W1, b"2")
    hall.dead = [W1] if leaves == "cut" else []
    hall.says(C1, *lmq(4, b"m", KEY, b"x"))
    hall.dead = []
    if leaves == "cut":
        (again,) = hall.says(W1, *lmq(2, b"PING"))
    else:
        hall.later(60)
        hall.hears(W1)
        (again,) = hall.register(W1, b"2")
    (name,) = hall.scheduler.ledger.tasks
    assert again == [b"", LMQ, b"\x04", b"2/" + name, KEY, b"x", b"", SRV]
    hall.says(W1, C1, *lmq(6, b"m", b"late"))
    assert (hall.hears(C1), hall.states()) == ([], [LEASED])
    hall.says(W1, *lmq(6, b"2/" + name, b"good", b"more"))
    assert hall.hears(C1) == [[b"", LMQ, b"\x06", b"m", b"good", b"more", b"", W1, SRV]]
    assert hall.dialect.stale == 1


def test_increment_for_a_message_that_is_sent_again_settles_no_exec(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.dead = [W1]
    hall.says(C1, *lmq(3, b"m", KEY))
    hall.dead = []
    (again,) = hall.says(W1, *lmq(2, b"PING"))
    hall.increment(W1)  # for the message that seemed undelivered
    assert hall.states() == [LEASED]
    hall.says(W1, *lmq(6, again[3]))
    assert hall.states() == [DONE]


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_client_gets_the_valid_response_even_with_a_late_one_in_the_same_turn(
    hall: Hall, places: tuple[int, int]
) -> None:
    hall.register(W2, b"1")
    hall.register(W1, b"1")
    hall.dead = [W1]
    hall.says(C1, *lmq(4, b"m", KEY))
    hall.dead = []
    answers = (
        (SERVER + W1, [C1, *lmq(6, b"m", b"late", b"x")]),
        (SERVER + W2, [C1, *lmq(6, b"m", b"good", b"y")]),
    )
    taken = [hall.board.receive(*answers[place], hall.now_ns) for place in places]
    hall.handle([event for events in taken for event in events])
    assert hall.hears(C1) == [[b"", LMQ, b"\x06", b"m", b"good", b"y", b"", W2, SRV]]


def test_unreachable_worker_keeps_its_messages(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.says(C1, *lmq(4, b"held", KEY))
    hall.hears(W1)
    hall.dead = [W1]
    hall.later(5)  # a PING does not reach it
    hall.says(C1, *lmq(4, b"new", KEY))
    assert hall.states() == [LEASED, READY]
    hall.dead = []
    hall.says(W1, C1, *lmq(6, b"held", b"x"))
    assert [frames[4] for frames in hall.hears(C1)] == [b"x"]
    assert hall.states() == [DONE, LEASED]


def test_worker_that_becomes_unreachable_in_the_turn_of_a_cancellation_gets_nothing(
    hall: Hall,
) -> None:
    """The scheduler must get the slot of the cancelled message first, and the lost route last.
    Otherwise it would lease the second message again and again."""
    hall.register(W1, b"3")
    hall.says(C1, *lmq(4, b"cancelled", KEY))
    (first,) = hall.scheduler.ledger.tasks
    hall.dead = [W1]
    cancel = events.CancelRequested(0, NATIVE, events.Scope(names=(first,)), 16)
    second = hall.board.receive(SERVER + C1, lmq(4, b"new", KEY), hall.now_ns)
    hall.handle([cancel, *second])
    assert hall.states() == [CANCELLED, READY]
    assert hall.free(W1) < 0


def test_response_to_a_disconnected_client_is_dropped_and_counted(hall: Hall) -> None:
    hall.register(W1)
    hall.says(C1, *lmq(4, b"1", KEY))
    hall.says(C1, *lmq(4, b"2", KEY))
    hall.dead = [C1]
    hall.says(W1, C1, *lmq(6, b"1"))
    assert hall.dialect.dropped == 1
    assert hall.states() == [DONE, LEASED]
    hall.dead = []  # it is back, under its name
    hall.says(W1, C1, *lmq(6, b"2", b"x"))
    assert [frames[3:5] for frames in hall.hears(C1)] == [[b"2", b"x"]]


def test_drained_worker_gets_no_more_and_is_removed_when_it_holds_nothing(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.says(C1, *lmq(4, b"1", KEY))
    hall.hears(W1)
    hall.handle([events.DrainRequested(0, NATIVE, None, 16)])
    hall.says(C1, *lmq(4, b"2", KEY))
    hall.says(W1, C1, *lmq(6, b"1"))
    assert hall.workers() == []
    assert hall.says(W1, *lmq(4, b"o", b"ongoing")) == [[b"", LMQ, b"\x06", b"o", b"", SRV]]
    hall.increment(W1)
    assert [frames[3] for frames in hall.register(W1)] == [b"2"]  # it wants more


def test_broker_that_shuts_down_refuses_register(hall: Hall) -> None:
    hall.dialect.leaving = True
    (answer,) = hall.says(W1, *lmq(4, b"r", b"\x08", b"1"))
    assert answer[4] == b"ERROR the server is shutting down"


def test_table_is_bounded_and_a_worker_that_left_makes_room(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_robin_workers, "PEERS_MAX", 2)
    hall.register(W1)
    hall.register(W2)
    (answer,) = hall.says(C1, *lmq(4, b"r", b"\x08", b"1"))
    assert answer[4] == b"ERROR too many workers are registered"
    hall.says(W1, *lmq(3, b"WORKER", b"\x09"))
    hall.register(C1)


# Other dialects.


def test_task_of_another_dialect_is_sent_to_a_worker_and_its_result_kept(hall: Hall) -> None:
    hall.register(W1)
    hall.create(Submission([b"task", b"bare"], [b"payload", b""]))
    one, two = hall.hears(W1)
    assert one == [b"", LMQ, b"\x04", b"1/task", b"payload", b"", SRV]
    assert two == [b"", LMQ, b"\x04", b"1/bare", b"bare", b"", SRV]
    hall.says(W1, *lmq(6, b"1/task", b"result"))
    hall.says(W1, *lmq(6, b"1/bare", b"a", b"b"))
    assert hall.states() == [DONE, DONE]
    assert results(hall, b"task", b"bare") == [b"result", msgspec.msgpack.encode([b"a", b"b"])]


def results(hall: Hall, *names: bytes) -> list[bytes]:
    """Return the results in the records of this broker."""
    return [hall.results[name] for name in names]


def test_task_of_another_dialect_with_a_long_name_has_a_short_id(hall: Hall) -> None:
    hall.register(W1)
    hall.create(Submission([b"n" * 1024], [b"payload"]))
    ((_, _, _, number, *_),) = hall.hears(W1)
    assert len(number) <= 255
    hall.says(W1, *lmq(6, number, b"x"))
    assert hall.states() == [DONE]


@pytest.mark.parametrize(
    ("arguments", "payload"),
    [
        ([b"key"], b"key"),
        ([b"key", b"one"], b"one"),
        ([b"key", b""], b""),
        ([b"key", b"one", b"two"], msgspec.msgpack.encode([b"one", b"two"])),
    ],
)
def test_message_is_a_payload_to_other_dialects(
    hall: Hall, arguments: list[bytes], payload: bytes
) -> None:
    hall.says(C1, *lmq(4, b"1", *arguments))
    (task,) = hall.scheduler.ledger.tasks.values()
    assert task.payload == payload
    hall.handle([events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")])
    hall.handle([events.TasksReported(0, b"w", [task.name], texts=[b"result"])])
    assert hall.hears(C1) == [[b"", LMQ, b"\x06", b"1", b"result", b"", SRV]]


def test_empty_result_of_another_worker_is_a_response_without_arguments(hall: Hall) -> None:
    hall.says(C1, *lmq(4, b"1", KEY))
    (name,) = hall.scheduler.ledger.tasks
    hall.handle([events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")])
    hall.handle([events.TasksReported(0, b"w", [name])])
    assert hall.hears(C1) == [[b"", LMQ, b"\x06", b"1", b"", SRV]]


def test_truncated_result_of_another_worker_is_an_error(hall: Hall) -> None:
    hall.says(C1, *lmq(4, b"1", KEY))
    (name,) = hall.scheduler.ledger.tasks
    hall.handle([events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")])
    hall.handle([events.TasksReported(0, b"w", [name], texts=[b"end"], result_bytes_total=[9])])
    ((*_, error, _, _),) = hall.hears(C1)
    assert error.endswith(b"result truncated: only the last 3 of 9 bytes are kept")


def test_task_of_another_dialect_with_its_own_envelope_is_foreign(hall: Hall) -> None:
    hall.register(W1)
    terms = [Terms(dialect=b"round-robin")]
    envelopes = [b"", b"\xc1", msgspec.msgpack.encode(["x"]), b"\x91" * 100_000]
    names = [b"%d" % number for number in range(len(envelopes))]
    submission = Submission(names, [b"p"], terms, envelopes=envelopes)
    hall.handle([events.SubmitRequested(0, b"", submission)])
    assert [frames[3:5] for frames in hall.hears(W1)] == [[b"1/" + name, b"p"] for name in names]


# After a restart.

#: The server's PING to a worker that has not registered since the restart.
RESTARTED = [b"", LMQ, b"\x01", b"RESTARTED", b"", SRV]


@pytest.mark.parametrize(
    "arguments", [[b"key"], [b""], [b"key", b""], [b"key", b"one"], [b"k", b"1", b"", b"\xff"]]
)
@pytest.mark.parametrize("command", [3, 4])
def test_worker_gets_the_original_message_after_a_restart(
    hall: Hall, arguments: list[bytes], command: int
) -> None:
    hall.says(C1, *lmq(command, b"id", *arguments))
    hall.restart()
    assert hall.register(W1) == [
        [b"", LMQ, bytes([command]), b"id", *arguments, b"", C1, SRV],
    ]


def test_responses_and_increments_for_messages_of_a_former_broker_count(hall: Hall) -> None:
    hall.register(W1, b"4")
    hall.says(C1, *lmq(4, b"answered", KEY))
    hall.says(C1, *lmq(4, b"open", KEY))
    hall.says(C1, *lmq(3, b"exec", KEY))
    hall.create(Submission([b"foreign"]))
    hall.says(W1, C1, *lmq(6, b"answered"))
    hall.restart()
    assert hall.says(W1, C1, *lmq(6, b"open", b"x")) == [RESTARTED]
    assert hall.says(W1, *lmq(6, b"1/foreign", b"y")) == []
    assert hall.hears(C1) == []  # the client sends its message again
    assert hall.states() == [DONE, DONE, LEASED, DONE]
    assert hall.free(W1) == 0
    for free in (1, 2, 3):
        hall.increment(W1)
        assert hall.free(W1) == free
    assert hall.states() == [DONE, DONE, LEASED, DONE]
    hall.increment(W1)
    assert hall.states() == [DONE] * 4
    assert hall.free(W1) == 4


def test_idle_worker_is_pinged_after_a_restart_and_continues_when_it_replies(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.restart()
    hall.says(C1, *lmq(4, b"m", KEY))
    assert hall.hears(W1) == []
    hall.dead = [W1]
    hall.later(0.25)  # it has not reconnected
    assert hall.hears(W1) == []
    hall.dead = []
    hall.later(0.25)
    assert hall.hears(W1) == [RESTARTED]
    assert [frames[3] for frames in hall.says(W1, *lmq(2, b"RESTARTED"))] == [b"m", b"RESTARTED"]


def keep_alive(hall: Hall, seconds: int, *identities: bytes) -> None:
    """Let time pass while these workers reply to every PING."""
    for _ in range(seconds):
        hall.later(1)
        for identity in identities:
            for frames in hall.hears(identity):
                assert frames[2] == b"\x01"
                hall.says(identity, *lmq(2, frames[3]))
            hall.hears(identity)


def test_lease_from_before_a_restart_ends_after_a_minute_even_if_its_worker_replies(
    hall: Hall,
) -> None:
    hall.register(W1, b"2")
    hall.says(C1, *lmq(4, b"tracked", KEY))
    hall.says(C1, *lmq(3, b"exec", KEY))
    hall.restart()
    hall.says(W1, *lmq(2, b"pong"))
    hall.hears(W1)
    keep_alive(hall, 59, W1)
    assert (hall.states(), hall.free(W1)) == ([LEASED, LEASED], 0)
    hall.register(W2, b"2")
    hall.later(1)
    assert [frames[3] for frames in hall.hears(W2)] == [b"tracked", b"exec"]
    assert hall.free(W1) == 2
    tasks = hall.scheduler.ledger.tasks.values()
    assert [(task.attempt, task.losses) for task in tasks] == [(2, 0), (2, 0)]


def test_worker_that_dies_with_the_server_is_not_charged_to_its_messages(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(4, b"m", KEY))
    hall.restart()
    hall.later(60)
    (task,) = hall.scheduler.ledger.tasks.values()
    assert (task.state, task.losses) == (READY, 0)
    assert hall.workers() == []


@pytest.mark.parametrize("rounds", [0, 5])
def test_slots_whose_increments_a_restart_lost_are_free_after_a_minute(
    hall: Hall, rounds: int
) -> None:
    hall.register(W1, b"4")
    for number in (b"1", b"2"):
        hall.says(C1, *lmq(4, number, KEY))
        hall.says(W1, C1, *lmq(6, number))
    hall.restart()
    hall.says(W1, *lmq(2, b"pong"))
    for turn in range(rounds):  # each INCREMENT frees the oldest slot, and the newest leaks
        hall.says(C1, *lmq(4, b"n%d" % turn, KEY))
        hall.says(W1, C1, *lmq(6, b"n%d" % turn))
        hall.increment(W1)
    assert hall.free(W1) == 2
    keep_alive(hall, 60, W1)
    assert hall.free(W1) == 4
    for number in (b"3", b"4", b"5", b"6"):
        hall.says(C1, *lmq(4, number, KEY))
    assert hall.free(W1) == 0
    hall.says(W1, C1, *lmq(6, b"3"))
    assert hall.free(W1) == 0
    hall.increment(W1)
    assert hall.free(W1) == 1


def test_slots_freed_since_a_restart_are_not_freed_again(hall: Hall) -> None:
    hall.register(W1, b"2")
    hall.says(C1, *lmq(4, b"1", KEY))
    hall.says(W1, C1, *lmq(6, b"1"))
    hall.restart()
    hall.increment(W1)
    hall.says(C1, *lmq(4, b"2", KEY))
    hall.says(W1, C1, *lmq(6, b"2"))  # it keeps this slot for longer
    keep_alive(hall, 90, W1)
    assert hall.free(W1) == 1
    hall.increment(W1)
    assert hall.free(W1) == 2


def test_slot_of_a_message_that_was_cancelled_after_a_restart_is_free_after_a_minute(
    hall: Hall,
) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(4, b"m", KEY))
    hall.restart()
    hall.says(W1, *lmq(2, b"pong"))
    (name,) = hall.scheduler.ledger.tasks
    hall.handle([events.CancelRequested(0, b"", events.Scope(names=(name,)))])
    keep_alive(hall, 59, W1)
    assert hall.free(W1) == 0
    keep_alive(hall, 2, W1)
    assert hall.free(W1) == 1


def test_late_response_to_a_message_that_was_taken_back_after_a_restart_is_stale(
    hall: Hall,
) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(4, b"m", KEY))
    hall.restart()
    hall.says(W1, *lmq(2, b"pong"))
    hall.register(W2, b"1")
    keep_alive(hall, 59, W1, W2)
    hall.later(1)
    assert b"m" in [frames[3] for frames in hall.hears(W2)]
    hall.says(W1, C1, *lmq(6, b"m", b"late"))
    assert hall.states() == [LEASED]
    assert hall.dialect.stale == 1
    assert hall.hears(C1) == []


def test_worker_with_messages_at_a_restart_is_sent_tracked_messages_until_it_registers(
    hall: Hall,
) -> None:
    hall.register(W1, b"2")
    hall.says(C1, *lmq(3, b"old", KEY))
    hall.restart()
    hall.says(W1, *lmq(2, b"pong"))
    hall.hears(W1)
    hall.says(C1, *lmq(3, b"new", b"do", b"it"))
    new = [*hall.scheduler.ledger.tasks][1]
    (message,) = hall.hears(W1)
    tracked = message[3]
    assert message == [b"", LMQ, b"\x04", tracked, b"do", b"it", b"", SRV]
    hall.increment(W1)  # for an unknown one of them
    assert hall.states() == [LEASED, LEASED]
    hall.says(W1, *lmq(6, tracked, b"done"))
    assert hall.states() == [LEASED, DONE]
    assert hall.results[new] == b"done"
    assert hall.hears(C1) == []
    keep_alive(hall, 59, W1)
    hall.later(1)
    (again,) = [frames for frames in hall.hears(W1) if frames[2] != b"\x01"]
    assert again[2] == b"\x04"
    hall.says(W1, *lmq(6, again[3]))
    hall.increment(W1)
    assert hall.states() == [DONE, DONE]
    hall.register(W1, b"2")
    hall.says(C1, *lmq(3, b"last", KEY))
    assert hall.hears(W1) == [[b"", LMQ, b"\x03", b"last", KEY, b"", C1, SRV]]


def test_increment_settles_no_message_that_a_restart_may_have_lost(hall: Hall) -> None:
    hall.register(W1, b"3")
    for number in (b"1", b"2"):
        hall.says(C1, *lmq(3, number, KEY))
    hall.says(C1, *lmq(4, b"tracked", KEY))
    hall.restart()
    hall.increment(W1)  # its RESPONSE may be lost
    assert hall.states() == [LEASED, LEASED, LEASED]
    hall.says(W1, C1, *lmq(6, b"tracked"))
    assert hall.free(W1) == 1
    hall.increment(W1)
    assert hall.states() == [LEASED, LEASED, DONE]


def test_message_sent_as_tracked_is_matched_by_its_response_after_another_restart(
    hall: Hall,
) -> None:
    hall.register(W1, b"2")
    hall.says(C1, *lmq(3, b"old", KEY))
    hall.restart()
    hall.says(W1, *lmq(2, b"pong"))
    hall.hears(W1)
    hall.says(C1, *lmq(3, b"new", KEY))
    ((_, _, _, tracked, *_),) = hall.hears(W1)
    hall.restart()
    hall.says(W1, *lmq(6, tracked, b"done"))
    assert hall.states() == [LEASED, DONE]


def test_worker_that_leaves_and_registers_again_has_free_slots_at_once(hall: Hall) -> None:
    hall.register(W1, b"1")
    hall.says(C1, *lmq(3, b"m", KEY))
    hall.restart()
    hall.says(W1, *lmq(3, b"WORKER", b"\x09"))
    hall.hears(W1)
    assert hall.register(W1, b"1") == [[b"", LMQ, b"\x03", b"m", KEY, b"", C1, SRV]]
    hall.later(5)
    (ping,) = hall.hears(W1)
    assert ping[3] == b"PING"
    assert hall.increment(W1) == []
    assert hall.states() == [DONE]


def test_assignment_that_crosses_a_deregister_is_not_sent_after_a_new_register() -> None:
    hall = Hall()
    hall.register(W1, b"1")
    frames = lmq(3, b"m", KEY), lmq(3, b"WORKER", b"\x09"), lmq(4, b"reg", b"\x08", b"1")
    routes = SERVER + C1, SERVER + W1, SERVER + W1
    taken = [
        hall.board.receive(route, one, hall.now_ns)
        for route, one in zip(routes, frames, strict=True)
    ]
    hall.handle([event for events in taken for event in events])
    assert [one[2] for one in hall.hears(W1)] == [b"\x06", b"\x03"]
    hall.increment(W1)
    assert hall.states() == [DONE]


def test_worker_that_never_reconnects_after_a_restart_is_pinged_less_and_less(
    hall: Hall,
) -> None:
    hall.register(W1, b"1")
    hall.restart()
    pings = []
    for quarter in range(1, 240):
        hall.later(0.25)
        pings += [quarter / 4] * len(hall.hears(W1))
    assert pings[:8] == [0.25, 0.5, 1, 2, 4, 8, 13, 18]
    assert hall.workers()
    hall.later(0.25)
    assert hall.workers() == []


def test_messages_before_the_table_is_restored_are_handled_after_it() -> None:
    hall = Hall()
    hall.register(W1, b"1")
    hall.says(C1, *lmq(4, b"m", KEY))
    hall.sent = []
    hall.dialect = make_server(1, lambda: 9, socket_numbers=[1])
    hall.board._dialects[1] = hall.board._dialect_of_socket[1] = hall.dialect  # noqa: SLF001  # a restart
    hall.board._prefixes = [(hall.dialect.prefix, hall.dialect)]  # noqa: SLF001
    hall.handle(
        [
            *hall.board.receive(SERVER + W1, [C1, *lmq(6, b"m", b"x")], hall.now_ns),
            *hall.board.receive(SERVER + W1, lmq(3, b"inc", b"\x07"), hall.now_ns),
        ]
    )
    assert hall.states() == [DONE]
    assert hall.free(W1) == 1


@pytest.mark.parametrize("identity", [b"tcp://x:1:a", b"\0\1\2", b"0xff", b"a b", "é".encode()])
def test_identities_are_names_and_names_are_identities(identity: bytes) -> None:
    assert identity_of(name_of(identity)) == identity
    assert name_of(identity).isascii()
