"""The suite itself: no combination is missing, and every skip has a reason."""

from __future__ import annotations

import inspect

import pytest

from tests.conformance import (
    test_assignment,
    test_failures,
    test_lost_workers,
    test_malformed,
    test_round_trips,
)
from tests.conformance.scenario import SCENARIOS
from tests.conformance.skills import CLIENT_SKILLS, WORKER_SKILLS
from tests.conformance.yard import CLIENTS, WORKERS

FILES = (test_round_trips, test_failures, test_assignment, test_lost_workers, test_malformed)

#: The number of combinations: pairs, workers, clients, workers of two dialects.
COUNTS = {
    len(CLIENTS) * len(WORKERS),
    len(WORKERS),
    len(CLIENTS),
    len(WORKERS) * (len(WORKERS) - 1) // 2,
}

#: Tests of a feature that only one dialect has.
EXCLUSIVE = {
    "test_round_robin_slot_is_taken_until_its_increment",
    "test_untracked_message_is_handled_by_any_worker",
    "test_protocol_word_is_refused_as_a_job_and_delays_no_other",
    "test_job_of_a_ping_pong_worker_runs_again_after_a_restart",
    "test_lease_from_before_a_restart_expires_despite_heartbeats",
    "test_stopping_broker_sends_exit_in_every_dialect",
}


def test_every_test_is_a_scenario_or_about_one_dialect_alone() -> None:
    tests = {name for file in FILES for name, _ in inspect.getmembers(file, inspect.isfunction)}
    assert {name for name in tests if name.startswith("test_")} == SCENARIOS.keys() | EXCLUSIVE
    assert len(SCENARIOS) >= 30


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_combination_of_a_scenario_is_missing(name: str) -> None:
    scenario = SCENARIOS[name]
    assert len(scenario.run) + len(scenario.skipped) in COUNTS
    assert not set(scenario.run) & scenario.skipped.keys()
    assert scenario.run, "no dialect has it"


@pytest.mark.parametrize("peer", [*CLIENTS.values(), *WORKERS.values()])
def test_missing_skill_of_a_dialect_has_a_reason(peer: type) -> None:
    known = CLIENT_SKILLS if peer in CLIENTS.values() else WORKER_SKILLS
    cannot: dict[str, str] = peer.cannot  # type: ignore[attr-defined]
    assert cannot.keys() <= set(known)
    assert all(len(reason.split()) > 3 for reason in cannot.values())


def test_native_peers_can_do_everything() -> None:
    assert CLIENTS["dwork-extended"].cannot == WORKERS["dwork-extended"].cannot == {}
