"""Explanations of lanes: a scenario for every reason."""

from collections.abc import Callable

import pytest

from taskyard.core.effects import LaneList, LaneView, Reason
from taskyard.core.events import (
    LanesRequested,
    Outcome,
    PauseRequested,
    RetryRequested,
    RulesSet,
    Scope,
    WorkerHeartbeat,
)
from taskyard.core.explain import LANE_REASONS, LANE_SENTENCES, explain
from taskyard.core.holds import HoldReason
from taskyard.core.limits import SECOND_NS
from taskyard.core.rules import LaneOptions, Rule
from tests.core.kit import Yard

ALL_IN_USE = "it is ready, but the one slot of its worker is in use"
BUSY = "it is ready, but no worker of service default with a free slot requests tasks"


def view(yard: Yard, lane: bytes = b"x") -> LaneView:
    replies = yard.handle(LanesRequested(0, b"client", lane=lane))
    assert isinstance(replies[0], LaneList)
    (found,) = replies[0].lanes
    return found


def submit(yard: Yard) -> None:
    yard.submit(b"a", b"b", lanes=[b"x", b"x"])


def rule(yard: Yard, **fields: object) -> None:
    yard.set_rules(Rule(b"rule", b"default/x", LaneOptions(**fields)))  # type: ignore[arg-type]


def pause_everything(yard: Yard) -> None:
    submit(yard)
    yard.handle(PauseRequested(0, b"client"))


def pause_service(yard: Yard) -> None:
    submit(yard)
    yard.handle(PauseRequested(0, b"client", b"default"))


def pause_lane(yard: Yard) -> None:
    submit(yard)
    yard.handle(PauseRequested(0, b"client", b"default", b"x"))


def hold(yard: Yard) -> None:
    yard.join(b"w")
    rule(yard, is_held=True)
    submit(yard)


def debounce(yard: Yard) -> None:
    yard.join(b"w")
    rule(yard, debounce_ns=3 * SECOND_NS)
    submit(yard)


def no_worker(yard: Yard) -> None:
    submit(yard)


def trouble(yard: Yard) -> None:
    yard.join(b"w")
    submit(yard)
    yard.handle(WorkerHeartbeat(0, b"w", trouble=b"agents/smtp: no such file"))


def silent(yard: Yard) -> None:
    yard.join(b"w", lease_timeout_ns=15 * SECOND_NS)
    submit(yard)
    yard.take(b"w")
    yard.later(6)


def silent_with_all_of_it(yard: Yard) -> None:
    yard.join(b"w", lease_timeout_ns=15 * SECOND_NS)
    yard.submit(b"a", lanes=[b"x"])
    yard.take(b"w")
    yard.later(6)


def broker_limit(yard: Yard) -> None:
    yard.join(b"w")
    yard.handle(RulesSet(0, workers_max=1))
    yard.submit(b"other")
    yard.take(b"w")
    submit(yard)


def service_limit(yard: Yard) -> None:
    yard.join(b"w")
    yard.set_rules(Rule(b"rule", b"*/*", LaneOptions(workers_max=1)))
    yard.submit(b"other", service=b"another", lanes=[b"y"])
    yard.join(b"v", services=(b"another",))
    yard.take(b"v")
    submit(yard)


def lane_limit(yard: Yard) -> None:
    yard.join(b"w")
    submit(yard)
    yard.take(b"w")


def rate(yard: Yard) -> None:
    yard.join(b"w")
    rule(yard, rate_interval_ns=10 * SECOND_NS, lane_workers_max=2)
    submit(yard)
    yard.take(b"w")


def lane_rate(yard: Yard) -> None:
    yard.join(b"w")
    rule(yard, lane_rate_interval_ns=SECOND_NS // 5, lane_workers_max=2)
    submit(yard)
    yard.take(b"w")
    yard.later(0.05)


def workers_busy_by_weight(yard: Yard) -> None:
    yard.set_rules(
        Rule(b"rule", b"*/x", LaneOptions(weight=2)), Rule(b"big", b"*/y", LaneOptions(weight=3))
    )
    yard.join(b"w", slots_total=1)
    yard.submit(b"out", lanes=[b"z"])
    yard.take(b"w")
    yard.submit(b"other", lanes=[b"y"])
    submit(yard)


def workers_busy(yard: Yard) -> None:
    yard.join(b"w")
    submit(yard)


def served(yard: Yard) -> None:
    yard.join(b"w")
    rule(yard, overfeed=1)
    submit(yard)
    yard.take(b"w", 2)


def time(yard: Yard) -> None:
    yard.submit(b"a", lanes=[b"x"], due_ns=5 * SECOND_NS)


def tasks(yard: Yard) -> None:
    yard.submit(b"before")
    yard.submit(b"a", after=[[b"before"]], lanes=[b"x"])


def failed(yard: Yard) -> None:
    yard.join(b"w")
    yard.submit(b"a", lanes=[b"x"])
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED_FINAL)


SCENARIOS: list[tuple[Reason, Callable[[Yard], None], str]] = [
    (Reason.PAUSED, pause_everything, "everything is paused"),
    (Reason.PAUSED, pause_service, "its service is paused"),
    (Reason.PAUSED, pause_lane, "it is paused"),
    (
        Reason.HELD,
        hold,
        "it is held until it is released: taskyard retry --service default --lane x",
    ),
    (Reason.DEBOUNCED, debounce, "it collects more tasks before it starts (debounce): 3.0 s left"),
    (Reason.NO_WORKER, no_worker, "no worker of its service is connected"),
    (
        Reason.TROUBLE,
        trouble,
        "no worker of its service can start its agent: agents/smtp: no such file",
    ),
    (
        Reason.NO_HEARTBEAT,
        silent,
        "worker w, which serves it, has sent no heartbeat for 6 s; its leases expire in 9 s",
    ),
    (
        Reason.NO_HEARTBEAT,
        silent_with_all_of_it,
        "worker w, which serves it, has sent no heartbeat for 6 s; its leases expire in 9 s",
    ),
    (
        Reason.LIMIT_BROKER,
        broker_limit,
        "the broker's limit on workers is reached",
    ),
    (
        Reason.LIMIT_SERVICE,
        service_limit,
        "its service's limit on workers is reached",
    ),
    (Reason.LIMIT_LANE, lane_limit, "its limit on leased tasks is reached"),
    (Reason.RATE, rate, "its service's rate limit is reached"),
    (Reason.LANE_RATE, lane_rate, "its rate limit is reached: 5/s, next in 0.1 s"),
    (
        Reason.WORKERS_BUSY,
        workers_busy_by_weight,
        f"{ALL_IN_USE} (weight 2, beside waiting lanes of weight 3)",
    ),
    (Reason.WORKERS_BUSY, workers_busy, BUSY),
    (Reason.SERVED, served, "1 worker holds 2 of its tasks"),
    (Reason.TIME, time, "the next of its tasks is due in 5 s"),
    (Reason.TASKS, tasks, "its tasks wait for other tasks"),
    (Reason.FAILED, failed, "1 of its tasks failed, and no other waits"),
]


@pytest.mark.parametrize(("reason", "scenario", "sentence"), SCENARIOS)
def test_lane_is_explained(reason: Reason, scenario: Callable[[Yard], None], sentence: str) -> None:
    yard = Yard()
    scenario(yard)
    found = view(yard)
    assert (found.reason, found.sentence) == (reason, sentence)
    assert reason in LANE_REASONS


@pytest.mark.parametrize("scenario", [workers_busy, workers_busy_by_weight])
def test_lane_has_the_sentence_of_its_next_task(scenario: Callable[[Yard], None]) -> None:
    yard = Yard()
    scenario(yard)
    assert view(yard).sentence == explain(yard.scheduler.context, b"a").sentence


def test_a_story_leads_to_every_reason_of_a_lane_but_having_no_tasks() -> None:
    covered = dict.fromkeys(reason for reason, _, _ in SCENARIOS)
    assert [reason for reason in LANE_REASONS if reason not in covered] == [Reason.IDLE]


def test_paused_lane_without_tasks_is_listed_and_an_unpaused_one_is_not() -> None:
    yard = Yard()
    pause_lane(yard)
    yard.cancel(b"a", b"b")
    assert (view(yard).reason, view(yard).tasks) == (Reason.PAUSED, 0)


def test_every_hold_has_a_sentence_of_its_own() -> None:
    assert [*LANE_SENTENCES] == [*HoldReason]
    assert len(dict.fromkeys(LANE_SENTENCES.values())) == len(HoldReason)


@pytest.mark.parametrize(
    ("reason", "scenario", "sentence"),
    [
        (
            Reason.HELD,
            hold,
            (
                "but its lane is held until it is released: "
                "taskyard retry --service default --lane x (service default)"
            ),
        ),
        (
            Reason.DEBOUNCED,
            debounce,
            (
                "but its lane collects more tasks before it starts (debounce): "
                "3.0 s left (service default)"
            ),
        ),
        (
            Reason.TROUBLE,
            trouble,
            (
                "but no worker of its service can start its agent: "
                "agents/smtp: no such file (service default)"
            ),
        ),
        (
            Reason.NO_HEARTBEAT,
            silent,
            "and has sent no heartbeat for 6 s; its leases expire in 9 s",
        ),
    ],
)
def test_task_is_explained_by_its_lane(
    reason: Reason, scenario: Callable[[Yard], None], sentence: str
) -> None:
    yard = Yard()
    scenario(yard)
    found = explain(yard.scheduler.context, b"a")
    assert (found.reason, found.sentence.split(", ", 1)[1]) == (reason, sentence)


def test_malformed_lines_of_agents_are_shown_for_a_lane_and_its_task() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"a", lanes=[b"x"])
    yard.take(b"w")
    before = view(yard).sentence
    held = [(b"a", 1)]
    yard.handle(WorkerHeartbeat(0, b"w", held, malformed=1))
    suffix = "; its agents wrote 1 malformed line (see its log)"
    assert view(yard).sentence == before + suffix
    assert explain(yard.scheduler.context, b"a").sentence.endswith(suffix)
    yard.handle(WorkerHeartbeat(0, b"w", held))  # another process of that name
    assert view(yard).sentence == before


def test_worker_that_is_well_again_is_no_reason() -> None:
    yard = Yard()
    trouble(yard)
    yard.handle(WorkerHeartbeat(0, b"w"))
    assert view(yard).reason is Reason.TROUBLE
    yard.handle(WorkerHeartbeat(0, b"w", trouble=b""))
    assert view(yard).reason is Reason.WORKERS_BUSY


def test_trouble_of_one_worker_is_no_reason_while_another_is_healthy() -> None:
    yard = Yard()
    trouble(yard)
    yard.join(b"v")
    assert view(yard).reason is Reason.WORKERS_BUSY


def test_the_command_that_a_held_lane_names_lets_it_go() -> None:
    yard = Yard()
    hold(yard)
    yard.handle(RetryRequested(0, b"client", Scope(service=b"default", lane=b"x")))
    assert yard.take(b"w") == [b"a"]
