"""A full disk: producers get an error, workers continue, and free space restores the broker."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission, Terms
from taskyard.errors import Refused
from taskyard.journal.store import DISK_RESERVE_BYTES
from tests.kit.disks import small_disk
from tests.kit.processes import until
from tests.system.kit import Broker, count
from tests.system.peers import Worker

DISK_BYTES = DISK_RESERVE_BYTES + 32 * 1024 * 1024


def _submit_until_refused(client: InternalClient) -> int:
    """Submit tasks of a mebibyte until one is refused. Return how many were accepted."""
    for number in range(1_000):
        payload = os.urandom(1024 * 1024)
        try:
            client.create(Submission([b"task-%d" % number], [payload], [Terms(service=b"load")]))
        except Refused as refused:
            assert "is nearly full" in str(refused)  # noqa: PT017  # the loop counts
            return number
    pytest.fail("a disk without end")


def test_full_disk_refuses_submissions_and_takes_completions() -> None:
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(DISK_BYTES))
        broker = stack.enter_context(Broker(disk))
        client = stack.enter_context(InternalClient(broker.endpoint))
        taken = _submit_until_refused(client)
        assert 5 < taken < 40
        worker = Worker(broker.endpoint, b"worker")
        worker.start()
        until(lambda: client.status()["counts"]["done"] == taken, "accepted tasks are done")
        assert not client.status()["accepting"]
        worker.finish()
        assert broker.terminate()[0] == 0
        tally, names = count(disk)
    assert len(names) == taken
    assert (tally.done, tally.completed_twice) == (taken, 0)
