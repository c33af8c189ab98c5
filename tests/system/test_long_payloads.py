"""Payloads and results of a megabyte in one message, of peers that know nothing of blobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.scenario import await_answer, take_task
from tests.conformance.yard import Yard
from tests.kit.processes import until
from tests.system.test_attacks_requests import memory

if TYPE_CHECKING:
    from pathlib import Path

MEGABYTE = bytes(range(256)) * 4096
COUNT = 20
TOTAL = COUNT * len(MEGABYTE)


@pytest.mark.parametrize("kind", ["wmp", "ping-pong", "round-robin", "dwork-extended"])
def test_megabytes_survive_killed_brokers_outside_of_journal_and_memory(
    tmp_path: Path, kind: str
) -> None:
    with Yard(tmp_path) as yard:
        client = yard.client("dwork-extended")
        before = memory(yard.broker.pid, "VmRSS")
        submitted = [client.submit(b"%d " % number + MEGABYTE) for number in range(COUNT)]
        assert memory(yard.broker.pid, "VmRSS") - before < TOTAL / 2
        yard.restart()
        worker = yard.worker(kind)
        seen = {}
        for _ in submitted:
            job = take_task(worker)
            seen[job.payload] = job.payload[::-1]
            worker.done(job, seen[job.payload])
        until(lambda: not yard.control.unsettled(), "all results have arrived")
        assert memory(yard.broker.pid, "VmRSS") - before < TOTAL / 2
        yard.restart()
        assert {one.payload: await_answer(client, one).text for one in submitted} == seen
        files = [*tmp_path.rglob("journal.sqlite*")]
        assert 0 < sum(file.stat().st_size for file in files) < TOTAL / 10
