"""Scenarios of the suite over CURVE: every peer works as it does without keys.

A part of the suite, to save time. All of it runs over CURVE with `CONFORMANCE_WITH_KEYS=1`.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import pytest

from tests.conformance import test_lost_workers, test_malformed, test_round_trips
from tests.conformance.scenario import NATIVE
from tests.conformance.yard import CLIENTS, WORKERS

if TYPE_CHECKING:
    from tests.conformance.yard import Yard

#: Every client and every worker once.
PAIRS = [*zip_longest(CLIENTS, reversed(WORKERS), fillvalue=NATIVE)]

each_worker = pytest.mark.parametrize("worker_kind", WORKERS)


@pytest.mark.parametrize(("client_kind", "worker_kind"), PAIRS)
def test_task_is_done_and_its_result_comes_back(
    secure_yard: Yard, client_kind: str, worker_kind: str
) -> None:
    test_round_trips.test_task_is_done_and_its_result_comes_back(
        secure_yard, client_kind, worker_kind
    )


@each_worker
def test_worker_that_sent_garbage_can_continue(secure_yard: Yard, worker_kind: str) -> None:
    test_malformed.test_worker_that_sent_garbage_can_continue(secure_yard, NATIVE, worker_kind)


@each_worker
def test_task_of_an_exiting_worker_is_reassigned(secure_yard: Yard, worker_kind: str) -> None:
    if "leave" in WORKERS[worker_kind].cannot:
        pytest.skip(WORKERS[worker_kind].cannot["leave"])
    test_lost_workers.test_task_of_an_exiting_worker_is_reassigned(secure_yard, NATIVE, worker_kind)
