"""The product's loops run in the simulated world, and their faults there are found."""

from __future__ import annotations

import pytest
from msgspec import structs

from simulator import plan, product_workers
from simulator.broker_host import BrokerHost
from simulator.decoders import decode
from simulator.listeners import Listener
from simulator.models import Violation
from simulator.plan import SECOND_NS, Faults
from simulator.processes import ProductWorker
from simulator.scenario import Scenario
from simulator.world import World
from taskyard.core import events


def quiet_world(kind: str) -> tuple[World, ProductWorker]:
    """Return a world without faults, with one worker of a kind and a client that submits."""
    drawn = plan.draw(7)
    size = structs.replace(
        drawn.size, workers=(kind,), tasks=6, clients=1, other_clients=(), slots=2
    )
    odds = type(drawn.odds)(*[0.0] * len(drawn.odds.__struct_fields__))
    drawn = structs.replace(drawn, size=size, odds=odds, faults=Faults(), clauses=())
    world = World(drawn, BrokerHost)
    scenario = Scenario(world)
    scenario.begin()
    worker = scenario.workers[0]
    assert isinstance(worker, ProductWorker)
    return world, worker


@pytest.mark.parametrize("kind", product_workers.KINDS)
def test_worker_of_every_kind_is_given_work(kind: str) -> None:
    world, worker = quiet_world(kind)
    world.timeline.run_until(20 * SECOND_NS)
    assert worker.alive
    assert worker.served_ns
    tales = [one for one in world.checker.model.tasks.values() if one.terms.service == b"default"]
    assert tales
    assert not [one for one in tales if one.worker]


@pytest.mark.parametrize("kind", product_workers.KINDS)
def test_worker_of_every_kind_survives_resets_and_kills(kind: str) -> None:
    world, worker = quiet_world(kind)
    for second in range(1, 30):
        world.timeline.run_until(second * SECOND_NS)
        if second % 7 == 0:
            world.host.crash("killed")
        elif second % 3 == 0:
            world.network.reset_all()
    world.timeline.run_until(60 * SECOND_NS)
    tales = world.checker.model.tasks.values()
    assert not [one for one in tales if one.worker]
    assert worker.alive


@pytest.mark.parametrize("kind", product_workers.KINDS)
def test_stopped_worker_leaves_and_comes_back(kind: str) -> None:
    world, worker = quiet_world(kind)
    world.timeline.run_until(2 * SECOND_NS)
    before = worker.process
    worker.stop()
    world.timeline.run_until(20 * SECOND_NS)
    assert worker.alive
    assert worker.process > before


def test_loop_that_never_rests_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world, worker = quiet_world("native")
    world.timeline.run_until(2 * SECOND_NS)
    monkeypatch.setattr(worker, "wake_at_ns", lambda: 0)
    worker.wake()
    with pytest.raises(Violation, match="busy loop"):
        world.timeline.run_until(4 * SECOND_NS)


def test_meaning_of_every_word_of_ping_pong() -> None:
    route = bytes([Listener.PING_BACKEND]) + b"w"
    words = ([b"", b"PING", b"3"], [b"", b"DISCONNECT"], [b"", b"a by w"], [b"", b"ERROR", b"a by"])
    kinds = [type(one) for frames in words for one in decode(route, frames)]
    assert kinds == [events.WorkerHeartbeat, events.WorkerExited, *[events.TasksReported] * 2]
