"""Agents with their lane in the command: each serves one lane, and is replaced for another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.core.rules import LaneOptions, Rule
from taskyard.errors import UserError
from taskyard.worker.agents.rules import AgentRules, AgentSettings
from taskyard.worker.agents.runner import read_command
from tests.worker.agents_harness import a_pool, job, shell
from tests.worker.runner_harness import turns, wait

if TYPE_CHECKING:
    from taskyard.worker.agents.runner import AgentRunner

#: Reports the lane and the service of its command, the lane of the task, and the process.
SHOWS_PLACE = (*shell('report "$0 $lane $$" ok'), "{service}/{lane}")


def served(pool: AgentRunner, lane: str, name: str = "t") -> tuple[str, str, str]:
    """Run a task of a lane. Return the place in the agent's command, its lane and its process."""
    pool.start(job(name.encode(), lane=lane.encode()))
    (done,) = turns(pool)
    place, found, process = done.text.decode().rsplit(" ", 2)
    return place, found, process


def test_agent_is_replaced_for_another_lane_when_all_slots_have_agents() -> None:
    with a_pool(SHOWS_PLACE, slots=1) as pool:
        first = served(pool, "a")
        assert first[:2] == ("s/a", "a")
        assert served(pool, "a") == first
        second = served(pool, "b")
        assert second[:2] == ("s/b", "b")
        assert second[2] != first[2]
        while len(pool._agents()) > 1:  # noqa: SLF001  # the first one exits
            wait(pool)
            assert pool.turn() == []
        assert served(pool, "b") == second


def test_agents_of_several_lanes_stay_while_there_are_slots() -> None:
    with a_pool(SHOWS_PLACE, slots=2) as pool:
        first, second = served(pool, "a"), served(pool, "b")
        assert (served(pool, "a"), served(pool, "b")) == (first, second)
        third = served(pool, "c")  # replaces the one that was idle for longest
        assert third[:2] == ("s/c", "c")
        assert served(pool, "b") == second
        assert served(pool, "a")[2] != first[2]


def test_many_lanes_are_served_by_few_agents_and_all_tasks_end() -> None:
    with a_pool(SHOWS_PLACE, slots=2) as pool:
        jobs = [job(b"%d" % number, lane=b"lane %d" % (number % 5)) for number in range(15)]
        for one in jobs:
            pool.start(one)
        results = turns(pool, len(jobs))
        assert len(pool._agents()) <= 4  # noqa: SLF001
    for result in results:
        lane = result.job.lane.decode()
        assert result.text.decode().startswith(f"s/{lane} {lane} ")


def test_failed_start_for_one_lane_does_not_hold_up_another() -> None:
    fails = (*shell('report "$0 $lane $$" ok', after=""), "{lane}")
    picky = ("sh", "-c", '[ "$1" != bad ] || exit 3; shift; exec "$@"', "sh", "{lane}", *fails)
    with a_pool(picky, slots=1) as pool:
        pool.start(job(b"x", lane=b"bad"))
        (refused,) = turns(pool)
        assert b"died" in refused.text
        assert pool.agent_error
        assert served(pool, "good")[:2] == ("good", "good")
        assert not pool.agent_error


def test_rules_fill_in_the_command_of_each_lane() -> None:
    command = LaneOptions(command=b"agents/{service} --lane={lane} '{{x}}'", overfeed=2)
    rules = AgentRules([Rule(b"smtp", b"smtp/*", command)])
    template = ("agents/{service}", "--lane={lane}", "{{x}}")
    assert rules.commands == (template,)
    assert rules.agents_for((b"smtp", b"a.example")) == AgentSettings(
        ("agents/smtp", "--lane=a.example", "{x}"), template, overfeed=2
    )
    assert rules.agents_for((b"smtp", b"")) == AgentSettings(
        ("agents/smtp", "--lane=", "{x}"), template, overfeed=2
    )


@pytest.mark.parametrize(
    ("command", "problem"),
    [("sh {host}", "has other braces than"), ("{lane}", "has {lane} in the program")],
)
def test_agent_option_with_other_braces_is_refused(command: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"^--agent {command!r}: .*{problem}".replace("{", r"\{")):
        read_command(command)
    assert read_command("sh {lane}") == ("sh", "{lane}")
    assert read_command("agents/{service}") == ("agents/{service}",)
