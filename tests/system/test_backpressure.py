"""A broker whose compaction lags: producers wait, workers do not, and nothing is lost."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission, Terms
from tests.kit.processes import run_here, until
from tests.system import lagging_broker
from tests.system.kit import Broker
from tests.system.peers import Peer, Worker

if TYPE_CHECKING:
    from pathlib import Path

BATCH = 10
TERMS = Terms(service=b"load", campaign=b"load")


class Producer(Peer):
    """Submits batches one by one until it is stopped."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        self.acknowledged = 0

    def work(self) -> None:
        with InternalClient(self._endpoint) as client:
            while not self.stopping.is_set():
                first = self.acknowledged
                names = [b"task-%d" % number for number in range(first, first + BATCH)]
                client.create(Submission(names, [b"payload"], [TERMS]))
                self.acknowledged += BATCH


def test_producer_waits_for_a_lagging_compaction_and_continues(tmp_path: Path) -> None:
    program = (sys.executable, lagging_broker.__file__)
    with Broker(tmp_path, program=program) as broker, InternalClient(broker.endpoint) as client:
        producer, worker = Producer(broker.endpoint), Worker(broker.endpoint, b"worker")
        producer.start()
        worker.start()

        def lag() -> float:
            return float(client.status()["compaction_lag"])

        until(lambda: lag() >= 3, "compaction lags behind")
        until(lambda: client.status()["counts"]["ready"] == 0, "workers go on")
        waiting = producer.acknowledged
        code, out, err = run_here(tmp_path, "status")
        assert (code, err) == (0, "")
        assert "% of its threshold), submissions are refused" in out
        assert producer.acknowledged <= waiting + BATCH  # one reply may have been on its way
        (tmp_path / "go").touch()
        until(lambda: producer.acknowledged > waiting + 2 * BATCH, "the producer continues")
        producer.finish()
        done = producer.acknowledged
        until(lambda: client.status()["counts"]["done"] == done, "all tasks done")
        worker.finish()
        until(lambda: lag() < 2, "compaction has caught up")
        assert broker.terminate()[0] == 0
    assert run_here(tmp_path, "journal", "check", "--deep")[0] == 0
