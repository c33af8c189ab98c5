"""Round-robin at the broker, frame by frame, as in its docs."""

from __future__ import annotations

import pytest

from taskyard.core import events
from taskyard.core.effects import HeldTasks
from taskyard.core.limits import PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.model import QueueOrder, Submission, Terms, WorkerFacts
from taskyard.core.states import CANCELLED, DONE, FAILED, LEASED, READY
from taskyard.core.timer_heap import NEVER_NS
from taskyard.wire.round_robin import server as round_robin
from taskyard.wire.round_robin.frames import envelop, parse
from taskyard.wire.round_robin.server import RoundRobin, Settings
from tests.kit.timers import due_events
from tests.wire.round_robin.kit import C1, C2, KEY, LMQ, NATIVE, SERVER, SRV, W1, W2, Harness, lmq

# The exchanges of the docs.


def test_handshake_is_ping_and_pong(harness: Harness) -> None:
    assert harness.send(C1, *lmq(1, b"hand")) == [[b"", LMQ, b"\x02", b"hand", b"", SRV]]


def test_message_reaches_a_worker_and_its_response_the_client(harness: Harness) -> None:
    assert harness.register(W1) == []
    assert harness.send(C1, *lmq(4, b"id-1", KEY, b"stream", b"1024")) == []
    assert harness.received(W1) == [
        [b"", LMQ, b"\x04", b"id-1", KEY, b"stream", b"1024", b"", C1, SRV],
    ]
    assert harness.send(W1, C1, *lmq(6, b"id-1", b"data", b"more")) == []
    assert harness.received(C1) == [[b"", LMQ, b"\x06", b"id-1", b"data", b"more", b"", W1, SRV]]
    assert harness.states() == [DONE]
    assert harness.dialect.waiting == 0


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
        queue_order=QueueOrder.LIFO,
    )
    name = b"round-robin:" + W1
    assert dialect.receive(SERVER + W1, lmq(4, b"i", b"\x08", b"10"), now_ns) == [
        events.ReplyDue(0, SERVER + W1, 129),
        events.WorkerRegistered(0, name, facts),
    ]
    payload, envelope = envelop(parse(lmq(4, b"i", KEY, b"x")), C1)
    task = b"round-robin-0000000700000007-193"
    terms = [Terms(dialect=b"round-robin")]
    submission = Submission([task], [payload], terms, envelopes=[envelope])
    assert dialect.receive(SERVER + C1, lmq(4, b"i", KEY, b"x"), now_ns) == [
        events.SubmitRequested(0, SERVER + C1, submission, 193, watch=True)
    ]
    assert dialect.receive(SERVER + W1, lmq(2, b"pong"), now_ns) == []  # too soon for a heartbeat
    assert dialect.receive(SERVER + W1, lmq(2, b"pong"), 3 * now_ns) == [
        events.WorkerHeartbeat(0, name)
    ]
    assert dialect.receive(SERVER + W1, lmq(3, b"WORKER", b"\x09"), 3 * now_ns) == [
        events.WorkerExited(0, name, 257)
    ]
    assert dialect.receive(SERVER + W1, lmq(3, b"WORKER", b"\x09"), 3 * now_ns) == []
    assert dialect.receive(SERVER + C1, lmq(1, b"p"), now_ns) == [
        events.ReplyDue(0, SERVER + C1, 385)
    ]


def started() -> RoundRobin:
    """Return a dialect without workers of a former process."""
    dialect = RoundRobin(1, lambda: 7)
    assert due_events(dialect.timers, 0) == [events.HeldTasksRequested(0, b"", b"round-robin:", 65)]
    assert dialect.reply(HeldTasks(b"", 65, [])) == []
    assert dialect.timers.heap[0][0] == NEVER_NS
    return dialect


def test_exec_gets_no_response_and_is_settled_by_increment(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(3, b"fire", b"\x01"))
    assert harness.received(W1) == [[b"", LMQ, b"\x03", b"fire", b"\x01", b"", C1, SRV]]
    assert harness.states() == [LEASED]
    assert harness.increment(W1) == []
    assert harness.states() == [DONE]
    assert harness.received(C1) == []
    assert harness.free(W1) == 1


def test_slot_stays_taken_after_the_response_until_increment(
    harness: Harness,
) -> None:
    harness.register(W1, b"1")
    for number in (b"1", b"2", b"3"):
        harness.send(C1, *lmq(4, number, KEY))
    assert [frames[3] for frames in harness.received(W1)] == [b"1"]
    assert harness.send(W1, C1, *lmq(6, b"1")) == []
    assert harness.states() == [DONE, READY, READY]
    assert [frames[3] for frames in harness.increment(W1)] == [b"2"]  # the backlog, in its order
    assert harness.free(W1) == 0


def test_response_to_register_goes_out_before_any_message(harness: Harness) -> None:
    harness.send(C1, *lmq(4, b"early", KEY))
    first, second = harness.send(W1, *lmq(4, b"reg", b"\x08", b"1"))
    assert first[2:4] == [b"\x06", b"reg"]
    assert second[2:4] == [b"\x04", b"early"]


def test_workers_take_turns_and_a_full_one_is_skipped(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.register(W2, b"3")
    got = []
    for number in range(5):
        harness.send(C1, *lmq(4, b"%d" % number, KEY))
        got.append([len(harness.received(W1)), len(harness.received(W2))])
    assert got == [[0, 1], [1, 0], [0, 1], [0, 1], [0, 0]]  # the last to register is first


def test_deregistered_worker_gets_nothing_and_its_messages_go_to_others(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(4, b"m", KEY))
    harness.received(W1)
    harness.register(W2, b"1")
    harness.send(W1, *lmq(3, b"WORKER", b"\x09"))
    assert [frames[3] for frames in harness.received(W2)] == [b"m"]
    harness.send(W1, C1, *lmq(6, b"m", b"late"))
    assert harness.received(C1) == []
    assert harness.dialect.stale == 1
    harness.send(W2, C1, *lmq(6, b"m", b"good"))
    assert [frames[4:] for frames in harness.received(C1)] == [[b"good", b"", W2, SRV]]


def test_ongoing_gets_a_response_and_renews_the_worker(harness: Harness) -> None:
    harness.register(W1)
    harness.later(59)
    harness.received(W1)
    assert harness.send(W1, *lmq(4, b"alive", b"ongoing")) == [
        [b"", LMQ, b"\x06", b"alive", b"", SRV],
    ]
    harness.later(59)
    assert harness.workers() == [b"round-robin:" + W1]


def test_ongoing_of_an_unregistered_peer_is_an_error(harness: Harness) -> None:
    ((*_, argument, _, _),) = harness.send(C1, *lmq(4, b"alive", b"ongoing"))
    assert argument == b"ERROR register first"


@pytest.mark.parametrize("command", [3, 4, 5, 1, 2])
def test_message_with_an_address_on_top_is_forwarded_unchanged(
    harness: Harness, command: int
) -> None:
    harness.send(W1, C1, *lmq(command, b"id", b"\x08", b"", b"x"))
    frames = [b"", LMQ, bytes([command]), b"id", b"\x08", b"", b"x", b"", W1, SRV]
    assert harness.received(C1) == [frames]
    assert harness.states() == []


def test_response_between_two_peers_is_forwarded(harness: Harness) -> None:
    harness.send(C1, C2, *lmq(4, b"q", b"hello"))
    assert harness.received(C2) == [[b"", LMQ, b"\x04", b"q", b"hello", b"", C1, SRV]]
    harness.send(C2, C1, *lmq(6, b"q", b"world"))
    assert harness.received(C1) == [[b"", LMQ, b"\x06", b"q", b"world", b"", C2, SRV]]


def test_response_without_a_forwarded_message_is_stale(harness: Harness) -> None:
    """A worker that was lost before a restart sends its RESPONSE after it."""
    harness.send(W1, C1, *lmq(6, b"q", b"world"))
    assert (harness.received(C1), harness.dialect.stale) == ([], 1)
    harness.send(C1, W1, *lmq(4, b"q", b"hello"))
    harness.send(W1, C1, *lmq(6, b"r", b"world"))
    harness.send(W2, C1, *lmq(6, b"q", b"world"))
    assert (harness.received(C1), harness.dialect.stale) == ([], 3)


def test_oldest_forwarded_messages_are_forgotten(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_robin, "PASSED_MAX", 1)
    harness.send(C1, C2, *lmq(4, b"q", b"hello"))
    harness.send(C1, C2, *lmq(4, b"r", b"hello"))
    harness.send(C2, C1, *lmq(6, b"q", b"world"))
    assert harness.received(C1) == []
    harness.send(C2, C1, *lmq(6, b"r", b"world"))
    assert len(harness.received(C1)) == 1


def test_addresses_are_removed_one_by_one(harness: Harness) -> None:
    harness.send(W1, C1, b"beyond", *lmq(5, b"id"), b"behind")
    frames = [b"beyond", b"", LMQ, b"\x05", b"id", b"", b"behind", W1, SRV]
    assert harness.received(C1) == [frames]


def test_client_behind_other_servers_gets_its_response_by_its_route(harness: Harness) -> None:
    harness.register(W1)
    harness.send(C1, *lmq(4, b"far", KEY), b"client", b"server")
    assert harness.received(W1) == [
        [b"", LMQ, b"\x04", b"far", KEY, b"", b"client", b"server", C1, SRV],
    ]
    harness.send(W1, C1, b"server", b"client", *lmq(6, b"far", b"x"))
    assert harness.received(C1) == [
        [b"server", b"client", b"", LMQ, b"\x06", b"far", b"x", b"", W1, SRV],
    ]
    assert harness.states() == [DONE]


# Refusals.


@pytest.mark.parametrize(
    "slots",
    [[], [b""], [b"0"], [b"-1"], [b"ten"], [b"1.5"], [b"1001"], [b"9" * 99], [b"1", b"2"], [b" 1"]],
)
def test_register_with_bad_slots_is_refused_and_changes_nothing(
    harness: Harness, slots: list[bytes]
) -> None:
    harness.register(W1, b"2")
    for worker in (W1, W2):
        (answer,) = harness.send(worker, *lmq(4, b"reg", b"\x08", *slots))
        assert answer[4].startswith(b"ERROR REGISTER needs the number of slots")
    assert harness.workers() == [b"round-robin:" + W1]
    assert harness.free(W1) == 2


def test_second_register_sets_the_slots_and_a_full_worker_gets_nothing(harness: Harness) -> None:
    harness.register(W1, b"1")
    for number in (b"1", b"2", b"3"):
        harness.send(C1, *lmq(4, number, KEY))
    harness.received(W1)
    assert harness.register(W1, b"1") == []
    assert [frames[3] for frames in harness.register(W1, b"2")] == [b"2"]


def test_deregister_and_increment_of_an_unknown_worker_are_ignored(harness: Harness) -> None:
    assert harness.send(W1, *lmq(3, b"WORKER", b"\x09")) == []
    assert harness.increment(W1) == []
    assert harness.workers() == []


def test_control_keys_as_arguments_are_data(harness: Harness) -> None:
    harness.register(W1)
    for word in (b"\x07", b"\x08", b"\x09", b"ongoing"):
        harness.send(C1, *lmq(4, b"m", b"key", word))
    assert [frames[5] for frames in harness.received(W1)] == [b"\x07", b"\x08", b"\x09", b"ongoing"]


def test_past_the_limit_a_trackexec_is_refused_at_once_and_an_exec_is_counted() -> None:
    harness = Harness(Settings(queue_max=2))
    harness.send(C1, *lmq(4, b"1", KEY))
    harness.send(C1, *lmq(3, b"2", KEY))
    ((*_, argument, _, _),) = harness.send(C2, *lmq(4, b"3", KEY))
    assert argument == b"ERROR the queue is full; try again later"
    assert harness.send(C2, *lmq(3, b"4", KEY)) == []
    assert harness.dialect.refused == 1
    assert harness.states() == [READY, READY]
    harness.register(W1)
    harness.received(W1)
    harness.send(W1, C1, *lmq(6, b"1"))
    assert harness.send(C2, *lmq(4, b"5", KEY)) == []
    assert len(harness.states()) == 3


def test_exec_counts_for_the_limit_until_it_is_settled() -> None:
    harness = Harness(Settings(queue_max=1))
    harness.register(W1)
    harness.send(C1, *lmq(3, b"1", KEY))
    harness.send(C1, *lmq(3, b"2", KEY))
    assert harness.dialect.refused == 1
    harness.increment(W1)
    harness.send(C1, *lmq(3, b"3", KEY))
    assert harness.dialect.refused == 1


def test_full_disk_refuses_with_an_error(harness: Harness) -> None:
    harness.handle([events.DiskSpaceChanged(0, accepting=False)])
    ((*_, argument, _, _),) = harness.send(C1, *lmq(4, b"1", KEY))
    assert argument.startswith(b"ERROR the disk is nearly full")
    harness.send(C1, *lmq(3, b"2", KEY))
    assert harness.dialect.refused == 1


def test_message_without_a_key_or_too_large_is_an_error(harness: Harness) -> None:
    large = bytes(PAYLOAD_BYTES_MAX + 1)
    for arguments in ([], [large], [KEY, large], [b"k" * 1025, b"x"]):
        (answer,) = harness.send(C1, *lmq(4, b"1", *arguments))
        assert answer[4].startswith(b"ERROR ")
        assert harness.send(C1, *lmq(3, b"1", *arguments)) == []
    assert harness.states() == []
    assert harness.dialect.malformed == 8
    assert harness.dialect.waiting == 0


def test_failed_and_cancelled_tasks_are_errors(harness: Harness) -> None:
    harness.send(C1, *lmq(4, b"1", b"payload"))
    (name,) = harness.scheduler.ledger.tasks
    harness.handle([events.CancelRequested(0, NATIVE, events.Scope(names=(name,)), 64)])
    assert [frames[4] for frames in harness.received(C1)] == [b"ERROR it was cancelled"]
    harness.send(C1, *lmq(4, b"2", b"payload"))
    *_, name = harness.scheduler.ledger.tasks
    harness.handle(
        [events.WorkerRegistered(0, b"w", WorkerFacts()), events.TasksRequested(0, b"w")]
    )
    failed = [events.Outcome.FAILED_FINAL]
    harness.handle([events.TasksReported(0, b"w", [name], None, failed, [b"broken"])])
    assert [frames[4] for frames in harness.received(C1)] == [b"ERROR broken"]


def test_too_large_a_result_is_a_failure_and_its_slot_stays_taken(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(4, b"1", KEY))
    harness.send(C1, *lmq(4, b"2", KEY))
    harness.received(W1)
    assert harness.send(W1, C1, *lmq(6, b"1", bytes(PAYLOAD_BYTES_MAX), b"")) == []
    assert [frames[4][:21] for frames in harness.received(C1)] == [b"ERROR result of 16777"]
    assert harness.states() == [FAILED, READY]
    assert [frames[3] for frames in harness.increment(W1)] == [b"2"]


# Slots are never freed by other messages.


def test_increment_frees_answered_slots_before_it_settles_an_exec(harness: Harness) -> None:
    harness.register(W1, b"2")
    harness.send(C1, *lmq(3, b"exec", KEY))
    harness.send(C1, *lmq(4, b"track", KEY))
    harness.received(W1)
    harness.send(W1, C1, *lmq(6, b"track"))
    harness.increment(W1)
    assert harness.states() == [LEASED, DONE]
    assert harness.free(W1) == 1
    harness.increment(W1)
    assert harness.states() == [DONE, DONE]
    assert harness.free(W1) == 2


def test_increment_before_its_response_frees_the_slot_with_the_response(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(4, b"1", KEY))
    harness.send(C1, *lmq(4, b"2", KEY))
    harness.received(W1)
    assert harness.increment(W1) == []
    assert [frames[3] for frames in harness.send(W1, C1, *lmq(6, b"1"))] == [b"2"]
    assert harness.states() == [DONE, LEASED]


def test_increments_without_a_message_free_nothing(harness: Harness) -> None:
    harness.register(W1, b"1")
    for _ in range(5):
        harness.increment(W1)
    assert harness.dialect.stale == 5
    harness.send(C1, *lmq(4, b"1", KEY))
    harness.send(C1, *lmq(4, b"2", KEY))
    assert len(harness.received(W1)) == 1
    harness.send(W1, C1, *lmq(6, b"1"))
    assert harness.free(W1) == 0


@pytest.mark.parametrize("command", [3, 4])
def test_cancelled_message_keeps_its_slot_until_the_worker_has_finished_it(
    harness: Harness, command: int
) -> None:
    harness.register(W1, b"2")
    harness.send(C1, *lmq(command, b"cancelled", KEY))
    harness.send(C1, *lmq(command, b"good", KEY))
    harness.received(W1)
    first, _ = harness.scheduler.ledger.tasks
    harness.handle([events.CancelRequested(0, NATIVE, events.Scope(names=(first,)), 64)])
    harness.send(C1, *lmq(4, b"next", KEY))
    assert harness.received(W1) == []
    harness.send(W1, C1, *lmq(6, b"cancelled", b"late"))
    assert harness.states() == [CANCELLED, LEASED, READY]
    assert [frames[3] for frames in harness.increment(W1)] == [b"next"]
    assert harness.states() == [CANCELLED, LEASED, LEASED]


def test_response_that_crosses_a_cancellation_keeps_its_slot(harness: Harness) -> None:
    harness.register(W1, b"1")
    harness.send(C1, *lmq(4, b"1", KEY))
    harness.send(C1, *lmq(4, b"2", KEY))
    harness.received(W1)
    first, _ = harness.scheduler.ledger.tasks
    cancel = events.CancelRequested(0, NATIVE, events.Scope(names=(first,)), 64)
    late = harness.board.receive(SERVER + W1, [C1, *lmq(6, b"1", b"late")], harness.now_ns)
    harness.handle([cancel, *late])
    assert harness.states() == [CANCELLED, LEASED]  # for a turn its slot looked free
    assert harness.free(W1) == -1
    harness.increment(W1)
    assert harness.free(W1) == 0


def test_responses_with_one_id_are_matched_oldest_first(harness: Harness) -> None:
    harness.register(W1)
    harness.send(C1, *lmq(4, b"same", b"a"))
    harness.send(C1, *lmq(4, b"same", b"b"))
    harness.received(W1)
    harness.send(W1, C1, *lmq(6, b"same", b"x"))
    assert harness.states() == [DONE, LEASED]
    harness.send(W1, C1, *lmq(6, b"same", b"y"))
    assert [frames[4] for frames in harness.received(C1)] == [b"x", b"y"]


def test_ids_of_two_clients_are_not_confused(harness: Harness) -> None:
    harness.register(W1)
    harness.send(C1, *lmq(4, b"same", b"a"))
    harness.send(C2, *lmq(4, b"same", b"b"))
    harness.send(W1, C2, *lmq(6, b"same", b"for two"))
    harness.send(W1, C1, *lmq(6, b"same", b"for one"))
    assert [frames[4] for frames in harness.received(C1)] == [b"for one"]
    assert [frames[4] for frames in harness.received(C2)] == [b"for two"]
