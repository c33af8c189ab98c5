"""Plain dwork workers without work: dwork's own steal again as soon as they get NotFound."""

from __future__ import annotations

from taskyard.core.limits import SECOND_NS
from taskyard.core.states import PARKED
from taskyard.core.timer_heap import NEVER_NS
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import pending
from tests.wire.kit import Counter

Q = pb.QueryMsg
MILLISECOND_NS = SECOND_NS // 1000
STATUS = Q(type=Q.OK).SerializeToString()


def task(name: str, *before: str) -> bytes:
    after = [pb.TaskMsg.Dep(name=one.encode()).SerializeToString() for one in before]
    return pb.TaskMsg(name=name.encode(), origin=b"cli", pred=after).SerializeToString()


def create(name: str, *before: str) -> bytes:
    return Q(type=Q.Create, task=[task(name, *before)]).SerializeToString()


def complete(name: str, worker: str = "w") -> bytes:
    return Q(type=Q.Complete, task=[task(name)], location=worker.encode()).SerializeToString()


def steal(worker: str = "w") -> bytes:
    return Q(type=Q.Steal, location=worker.encode()).SerializeToString()


def kinds(counter: Counter) -> list[tuple[bytes, int]]:
    """Return the receivers and the types of the messages of the last turn."""
    return [(route, Q.FromString(body).type) for route, body in counter.sent]


def ask(counter: Counter, body: bytes, route: bytes = b"peer") -> list[tuple[bytes, int]]:
    counter.frames([b"", body], route)
    return kinds(counter)


def pass_time(counter: Counter, ns: int) -> list[tuple[bytes, int]]:
    counter.pass_time(ns)
    return kinds(counter)


def idle(*peers: bytes) -> Counter:
    """Return a broker with a task that another worker holds, and peers whose Steals are held."""
    counter = Counter()
    ask(counter, create("held"))
    assert ask(counter, steal("busy"), b"busy") == [(b"busy", Q.Transfer)]
    for peer in peers:
        assert ask(counter, steal(), peer) == [(peer, Q.NotFound)]
        assert ask(counter, steal(), peer) == []
    return counter


def test_second_not_found_in_a_row_comes_after_10_to_50_ms() -> None:
    counter = idle(b"peer")
    for _ in range(5):
        waited_ns = 0
        while not pass_time(counter, MILLISECOND_NS):
            waited_ns += MILLISECOND_NS
        assert kinds(counter) == [(b"peer", Q.NotFound)]
        assert 10 * MILLISECOND_NS <= waited_ns <= 50 * MILLISECOND_NS
        counter.now_ns += 7 * MILLISECOND_NS
        assert ask(counter, steal()) == []


def test_ready_task_goes_to_a_held_steal() -> None:
    counter = idle(b"peer")
    assert counter.scheduler.ledger.workers[b"w"].state is PARKED
    assert ask(counter, create("a"), b"cli") == [(b"cli", Q.OK), (b"peer", Q.Transfer)]
    assert pass_time(counter, SECOND_NS) == []
    assert ask(counter, steal()) == [(b"peer", Q.NotFound)]  # it was busy since


def test_worker_that_completes_a_task_between_two_steals_is_not_held() -> None:
    counter = Counter()
    ask(counter, create("a"))
    ask(counter, create("b", "a"))
    for name, reply in (("a", Q.Transfer), ("b", Q.Transfer)):
        assert ask(counter, steal()) == [(b"peer", reply)]
        if name == "a":
            assert ask(counter, steal()) == [(b"peer", Q.NotFound)]
        assert ask(counter, complete(name)) == [(b"peer", Q.OK)]
    assert ask(counter, steal()) == [(b"peer", Q.Exit)]


def test_any_later_request_ends_the_hold_first() -> None:
    counter = idle(b"peer")
    assert ask(counter, STATUS) == [(b"peer", Q.NotFound), (b"peer", Q.OK)]
    assert pass_time(counter, SECOND_NS) == []
    assert ask(counter, steal()) == [(b"peer", Q.NotFound)]
    assert ask(counter, steal()) == []
    assert ask(counter, steal()) == [(b"peer", Q.NotFound)]  # the former one; this one is held
    assert ask(counter, b"\xff") == [(b"peer", Q.NotFound), (b"peer", Q.Error)]


def test_peers_of_one_name_are_held_and_served_one_by_one() -> None:
    counter = idle(b"p1", b"p2", b"p3")
    assert ask(counter, create("a"), b"cli") == [(b"cli", Q.OK), (b"p1", Q.Transfer)]
    assert ask(counter, create("b"), b"cli") == [(b"cli", Q.OK), (b"p2", Q.Transfer)]
    assert ask(counter, steal(), b"p4") == [(b"p4", Q.NotFound)]  # p3 goes on waiting
    assert pass_time(counter, 50 * MILLISECOND_NS) == [(b"p3", Q.NotFound)]
    assert counter.scheduler.ledger.workers[b"w"].requests_behind == {}


def test_tasks_that_become_ready_together_go_to_all_held_peers_of_a_name() -> None:
    counter = idle(b"p1", b"p2", b"p3")
    body = Q(type=Q.Create, task=[task("a"), task("b")]).SerializeToString()
    expected = [(b"p1", Q.Transfer), (b"p2", Q.Transfer)]
    assert sorted(ask(counter, body, b"cli")) == [(b"cli", Q.OK), *expected]


def test_hold_of_the_first_peer_ends_without_those_behind_it() -> None:
    counter = idle(b"p1", b"p2")
    assert ask(counter, STATUS, b"p1") == [(b"p1", Q.NotFound), (b"p1", Q.OK)]
    assert ask(counter, create("a"), b"cli") == [(b"cli", Q.OK), (b"p2", Q.Transfer)]


def test_steal_is_not_held_when_exit_is_due_or_its_worker_drains() -> None:
    counter = idle(b"peer")
    assert ask(counter, STATUS) == [(b"peer", Q.NotFound), (b"peer", Q.OK)]
    assert ask(counter, steal()) == [(b"peer", Q.NotFound)]
    assert ask(counter, complete("held", "busy"), b"busy") == [(b"busy", Q.OK)]
    assert ask(counter, steal()) == [(b"peer", Q.Exit)]
    counter = idle(b"peer")
    drain = Q(type=Q.Drain, everything=True).SerializeToString()
    assert (b"peer", Q.Exit) in ask(counter, drain, b"admin")
    assert ask(counter, steal()) == [(b"peer", Q.Exit)]


def test_held_steal_of_a_renewed_connection_gets_no_reply() -> None:
    counter = idle(b"peer")
    counter.sent = []
    counter.handle([*counter.dialect.reconnected(b"peer", counter.now_ns)])
    assert counter.sent == []
    assert ask(counter, create("a"), b"cli") == [(b"cli", Q.OK)]
    assert ask(counter, steal()) == [(b"peer", Q.Transfer)]


def test_held_steal_of_a_peer_that_left_takes_no_task() -> None:
    counter = idle(b"peer")
    counter.handle(counter.dialect.disconnected(b"peer"))
    assert ask(counter, create("a"), b"cli") == [(b"cli", Q.OK)]
    assert pass_time(counter, SECOND_NS) == []


def test_all_holds_share_one_timer() -> None:
    counter = idle(*(b"p%d" % number for number in range(20)))
    first_ns = counter.dialect.timers.heap[0][0]
    assert first_ns is not None
    assert len(pass_time(counter, first_ns - counter.now_ns)) == 20
    assert counter.dialect.timers.heap[0][0] == NEVER_NS


def test_idle_peers_are_limited() -> None:
    requests = pending.PendingRequests(1, lambda: 0)
    for number in range(pending.IDLE_MAX + 1):
        steal = pending.PendingRequest(b"%d" % number, Q.Steal, None, extended=False)
        requests.note_idle(0, steal)
    assert len(requests.idle) == pending.IDLE_MAX
    assert b"0" not in requests.idle
