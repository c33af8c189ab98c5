"""SIGKILL of a loaded broker, again and again: acknowledged tasks are kept, and done once."""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest

from taskyard.client.client import Client
from tests.kit.processes import TASKYARD, until
from tests.system.kit import SLOW_DISK, Broker, count
from tests.system.peers import PlainProducer, PlainWorker, Producer, Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KILLS = 8
KILLS_WHOLE = 20
#: Enough to outlast the kills.
BATCHES_A_KILL = 30
PLAIN_TASKS_A_KILL = 20
TASKS_A_LIFE_MAX = 1_000


def test_broker_killed_repeatedly_under_load_loses_and_doubles_nothing(
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    pytestconfig: pytest.Config,
) -> None:
    kills = KILLS_WHOLE if pytestconfig.getoption("--whole") else KILLS
    luck = random.Random(3)
    with Broker(tmp_path, "--listen", "dwork=tcp://127.0.0.1:0") as broker:
        # The system chooses the port once. Then it is fixed, because plain peers use no other.
        native, plain = broker.endpoints
        broker.terminate()
    options = ("--listen", f"dwork={plain}")
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path, *options))
        producer = Producer(native, kills * BATCHES_A_KILL)
        plain_producer = PlainProducer(plain, kills * PLAIN_TASKS_A_KILL)
        workers = [Worker(native, b"worker-%d" % index) for index in range(2)]
        plain_worker = PlainWorker(plain, b"plain")
        peers = [producer, plain_producer, *workers, plain_worker]
        for peer in peers:
            peer.start()
        for kill in range(kills):
            tasks = luck.randrange(20, TASKS_A_LIFE_MAX if kill % 2 == 0 else 20 * 10)
            goal = len(producer.acknowledged) + tasks
            until(partial(_has_sent, producer, goal), f"kill {kill}: {goal} tasks acknowledged")
            broker.kill()
            program = SLOW_DISK if kill % 2 == 0 else TASKYARD
            broker = stack.enter_context(Broker(tmp_path, *options, program=program))
        for peer in (producer, plain_producer):
            peer.join(120)
            assert not peer.is_alive()
        wanted = len(producer.acknowledged) + len(plain_producer.acknowledged)
        plain_worker.finish()
        until(lambda: _done(native) == wanted, "all tasks done")
        for peer in peers:
            peer.finish()
        assert broker.terminate()[0] == 0
    tally, names = count(tmp_path)
    lost = {*producer.acknowledged, *plain_producer.acknowledged} - names
    record_property("system lost", len(lost))
    record_property("system killed brokers", kills)
    assert not lost
    assert (tally.submitted, tally.done) == (wanted, wanted)
    assert (tally.completed_twice, tally.dependencies_broken, tally.unknown) == (0, 0, 0)


def _has_sent(producer: Producer, goal: int) -> bool:
    return len(producer.acknowledged) >= goal or not producer.is_alive()


def _done(endpoint: str) -> int:
    with Client(endpoint) as client:
        return int(client.status()["counts"]["done"])
