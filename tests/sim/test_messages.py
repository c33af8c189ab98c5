"""The checker of messages that their receivers can't check alone."""

from __future__ import annotations

import json

import pytest

from simulator import plan
from simulator.checkers.messages import MessageChecker
from simulator.checkers.submissions import SubmissionChecker
from simulator.listeners import Listener
from simulator.models import Violation
from simulator.reference_model import ReferenceModel
from taskyard.core import records
from taskyard.core.model import Submission, Terms, WorkerFacts

NOW_NS = 1_000_000_000_000

SERVICE = b"s0"


class WokenWorkers:
    """A checker of a turn in which one task is ready and two workers wait for a WAKE."""

    def __init__(self) -> None:
        model = ReferenceModel(plan.draw(0))
        self.checker = MessageChecker(model, SubmissionChecker(model))
        submission = Submission([b"a"], terms=[Terms(service=SERVICE)])
        model.apply(records.Submitted(NOW_NS, submission), 0)
        facts = WorkerFacts((SERVICE,), slots_total=1, wants_wake=True)
        for name in (b"w0", b"w1"):
            model.apply(records.WorkerJoined(NOW_NS, name, facts), 0)
        self.checker.on_received([])

    def wake(self, worker: bytes) -> None:
        headers = json.dumps({"service": SERVICE.decode()}).encode()
        route = bytes([Listener.WMP]) + worker
        self.checker.on_sent(route, [b"", b"WMP01", b"\x02", headers])


def test_two_workers_must_not_be_woken_for_one_task() -> None:
    woken = WokenWorkers()
    woken.wake(b"w0")
    with pytest.raises(Violation, match="2 workers are woken for 1 tasks"):
        woken.wake(b"w1")


def test_worker_that_is_lost_in_the_turn_of_its_wake_is_replaced_by_another() -> None:
    woken = WokenWorkers()
    woken.checker.on_record(records.WorkerLeft(NOW_NS, b"w0", b"silent"))
    woken.wake(b"w0")
    woken.wake(b"w1")
