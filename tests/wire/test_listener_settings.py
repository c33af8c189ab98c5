"""The settings of a listener: terms of its clients' tasks, services and timeouts of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Terms
from taskyard.core.states import TaskState
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.dialect import PING_PONG, ROUND_ROBIN, TaskDefaults, is_reserved, listener_prefix
from taskyard.wire.native.pending import plain_peers
from taskyard.wire.ping_pong import frames as ping_pong_frames
from taskyard.wire.round_robin import frames as round_robin_frames
from taskyard.wire.wmp import peer as wmp_peer
from taskyard.wire.wmp import server as wmp
from tests.wire import kit
from tests.wire.ping_pong import kit as ping_pong_kit
from tests.wire.round_robin import kit as round_robin_kit
from tests.wire.round_robin.kit import C1, W1, lmq
from tests.wire.wmp import kit as wmp_kit

if TYPE_CHECKING:
    from taskyard.core.scheduler import Scheduler

Q = pb.QueryMsg

RENDER = TaskDefaults(b"render", b"night")


def the_task(scheduler: Scheduler) -> tuple[Terms, bytes]:
    """Return the terms of the only task, without its time and its origin, and its lane."""
    (task,) = scheduler.ledger.tasks.values()
    terms = Terms(
        service=task.terms.service,
        dialect=task.terms.dialect,
    )
    return terms, task.lane.name


# Names of workers.


@pytest.mark.parametrize(
    ("name", "reserved"),
    [
        (b"ping-pong:01/w", True),
        (b"ping-pong@render:01/w", True),
        (b"round-robin@:x", True),
        (b"wmp@a:b:c", True),
        (b"wmp", False),
        (b"wmp@host", False),
        (b"wmp-2:x", False),
        (b"host:wmp:", False),
    ],
)
def test_prefixes_of_dialects_and_their_listeners_are_reserved(
    name: bytes, *, reserved: bool
) -> None:
    assert is_reserved(name) == reserved
    counter = kit.Counter()
    steal = Q(type=Q.Steal, location=name).SerializeToString()
    refused = Q.FromString(counter.ask(steal)).type == Q.Error
    assert refused == reserved


def test_no_chosen_identity_has_the_prefix_of_another_listener() -> None:
    prefix = listener_prefix(ROUND_ROBIN, b"render")
    assert prefix == b"round-robin@render:"
    assert listener_prefix(ROUND_ROBIN, b"") == ROUND_ROBIN
    assert not (ROUND_ROBIN + b"@render:w1").startswith(prefix)
    assert not (ROUND_ROBIN + b"render:w1").startswith(prefix)


# Ping-pong.


def test_ping_pong_job_has_the_terms_of_its_listener() -> None:
    settings = ping_pong_frames.Settings(
        services=(b"render",), tasks=RENDER, prefix=listener_prefix(PING_PONG, b"render")
    )
    harness = ping_pong_kit.Harness(settings)
    harness.client(b"c", b"job")
    terms = Terms(service=b"render", dialect=b"ping-pong")
    assert the_task(harness.scheduler) == (terms, b"night")
    assert harness.worker(b"named", b"READY") == [[b"PONG"], [b"job"]]
    assert [*harness.scheduler.ledger.workers] == [b"ping-pong@render:01/named"]


# Round-robin.


def test_round_robin_message_has_the_terms_of_its_listener_also_after_a_restart() -> None:
    settings = round_robin_frames.Settings(
        services=(b"render",), tasks=RENDER, prefix=listener_prefix(ROUND_ROBIN, b"r")
    )
    harness = round_robin_kit.Harness(settings)
    harness.send(C1, *lmq(4, b"i", b"key"))
    terms = Terms(service=b"render", dialect=b"round-robin")
    assert the_task(harness.scheduler) == (terms, b"night")
    harness.send(W1, *lmq(4, b"r", b"\x08", b"1"))
    assert [*harness.scheduler.ledger.workers] == [b"round-robin@r:" + W1]
    harness.restart()
    harness.send(W1, C1, *lmq(6, b"i", b"result"))
    (task,) = harness.scheduler.ledger.tasks.values()
    assert task.state is TaskState.DONE  # its worker was recalled by the prefix


@pytest.mark.parametrize("holds", [False, True])
def test_round_robin_worker_that_holds_a_message_has_the_longer_timeout(*, holds: bool) -> None:
    settings = round_robin_frames.Settings(expire_ns=60 * SECOND_NS, lease_ns=300 * SECOND_NS)
    harness = round_robin_kit.Harness(settings)
    harness.send(W1, *lmq(4, b"r", b"\x08", b"1"))
    if holds:
        harness.send(C1, *lmq(4, b"i", b"key"))
    harness.later(299)
    assert bool(harness.scheduler.ledger.workers) == holds
    harness.later(1)
    assert not harness.scheduler.ledger.workers


# Plain dwork.


def plain_counter() -> kit.Counter:
    """Return a broker whose socket 3 has settings of its own."""
    counter = kit.Counter()
    plain = plain_peers(service=b"render", lease_timeout_ns=5 * SECOND_NS, tasks=RENDER)
    counter.dialect.set_plain(3, plain)
    return counter


def ask(counter: kit.Counter, query: Q, socket: bytes) -> Q:
    return Q.FromString(counter.ask(query.SerializeToString(), socket + b"peer"))


def plain_create(name: bytes, payload: bytes | None = None) -> Q:
    task = pb.TaskMsg(name=name, origin=b"cli", payload=payload)
    return Q(type=Q.Create, task=[task.SerializeToString()])


def test_plain_dwork_task_has_the_terms_of_its_listener_and_an_extended_one_its_own() -> None:
    counter = plain_counter()
    ask(counter, plain_create(b"here"), b"\3")
    ask(counter, plain_create(b"elsewhere"), b"\0")
    ask(counter, plain_create(b"extended", payload=b"p"), b"\3")
    tasks = counter.scheduler.ledger.tasks
    found = {
        name: (task.terms.service, task.lane.name, task.terms.origin)
        for name, task in tasks.items()
    }
    assert found == {
        b"here": (b"render", b"night", b"cli"),
        b"elsewhere": (b"default", b"", b"cli"),
        b"extended": (b"default", b"", b"cli"),
    }


def test_plain_dwork_worker_serves_the_service_of_its_listener_and_times_out() -> None:
    counter = plain_counter()
    ask(counter, plain_create(b"here"), b"\3")
    steal = Q(type=Q.Steal, location=b"w")
    assert ask(counter, steal, b"\0").type == Q.Exit  # nothing of `default` is open
    assert ask(counter, steal, b"\3").type == Q.Transfer
    counter.pass_time(5 * SECOND_NS - 1)
    assert counter.scheduler.ledger.counts[TaskState.LEASED] == 1
    counter.pass_time(1)
    assert counter.scheduler.ledger.counts[TaskState.LEASED] == 0
    assert not counter.scheduler.ledger.workers
    assert ask(counter, steal, b"\3").type == Q.NotFound
    assert ask(counter, steal, b"\3").type == Q.Transfer  # it is registered again


# WMP.


def test_wmp_worker_that_names_no_service_serves_that_of_its_listener() -> None:
    settings = wmp.Settings((b"render",), SECOND_NS, 3 * SECOND_NS, prefix=b"wmp@r:")
    manager = wmp_kit.Manager(settings=settings)
    manager.handle(
        manager.dialect.receive(b"r", wmp_kit.frames("READY", {"worker": "w", "slots": 1}), 1)
    )
    (worker,) = manager.scheduler.ledger.workers.values()
    assert (worker.name, worker.facts.services) == (b"wmp@r:w", (b"render",))
    assert manager.dialect.timers.heap[0][0] == 1 + SECOND_NS


def test_wmp_listeners_are_managers_of_their_own() -> None:
    names = [wmp.manager_name(b"\x01", listener) for listener in ("", "a", "b")]
    assert names == ["01", "01@a", "01@b"]


def test_wmp_worker_of_ours_names_no_service_unless_it_has_some() -> None:
    for services, named in (((), None), ((b"default",), ["default"])):
        worker = wmp_peer.Worker(wmp_peer.Settings(b"w", services), wires=1, now_ns=0)
        ready = next(one for one in worker.time_passed(0) if isinstance(one, wmp_peer.Send))
        assert wmp_kit.read(ready.frames).headers.get("services") == named
