"""Agents and lanes: one lane at a time per agent, by the broker's rules."""

from __future__ import annotations

import logging
import shlex
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.rules import LaneOptions, Rule
from taskyard.worker.agents import rules as agent_rules
from taskyard.worker.agents.rules import AgentRules, AgentSettings, split_command
from taskyard.worker.agents.runner import AgentRunner
from taskyard.worker.jobs import JobResult
from taskyard.worker.limits import AGENT_IDLE_NOTICE_NS, AGENT_RESTART_NS
from tests.worker.agents_harness import (
    Clock,
    Gate,
    StillClock,
    a_pool,
    crashed,
    done,
    job,
    literal,
    refused,
    shell,
    until_fed,
    until_hungry,
)
from tests.worker.runner_harness import a_fifo, command, read_fifo, turns, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from taskyard.worker.jobs import Job

SAYS_WHO = shell("report $$ ok")

#: Sends #hungry three times, then does one task at each opening of the gate.
EATS_AHEAD = """
import sys
gate = open({gate!r})
print("#hungry\\n#hungry\\n#hungry", flush=True)
for line in sys.stdin:
    if line.strip() and line[0] != "#":
        id, lane, payload = line[:-1].split("\\t")
        print(f"# begins {{id}}", flush=True)
        gate.readline()
        print(f"{{id}}\\t{{lane}}\\tok\\n#hungry", flush=True)
"""


def of(lane: str, *numbers: int) -> list[Job]:
    """Return tasks of a lane."""
    return [job(f"{lane}{number}".encode(), lane=lane.encode()) for number in numbers]


def clause(match: str, argv: tuple[str, ...] | None = None, **rules: Any) -> Rule:
    line = b"" if argv is None else shlex.join(argv).encode()
    return Rule(match.encode(), match.encode(), LaneOptions(command=line, **rules))


@pytest.fixture
def host() -> Iterator[Callable[..., AgentRunner]]:
    """Return a function that makes runners with the given rules."""
    hosts: list[AgentRunner] = []

    def make(*clauses: Rule, slots: int = 1, clock: StillClock | None = None) -> AgentRunner:
        hosts.append(AgentRunner(slots, clock or Clock()))
        hosts[-1].set_rules(clauses)
        return hosts[-1]

    yield make
    for one in hosts:
        one.close()


def give(pool: AgentRunner, *jobs: Job) -> None:
    for one in jobs:
        pool.start(one)


def until(pool: AgentRunner, is_so: Callable[[], object]) -> None:
    """Turn until a condition holds, without results."""
    while True:
        assert pool.turn() == []
        if is_so():
            return
        wait(pool)


def names(found: list[JobResult]) -> list[bytes]:
    return [one.job.name for one in found]


# One lane at a time.


def test_no_two_agents_are_in_one_lane_and_its_order_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    notes = f'echo "begin $lane $id" >> {log}; echo "end $lane $id" >> {log}; report $$ ok'
    jobs = [one for number in range(8) for lane in "abcd" for one in of(lane, number)]
    with a_pool(shell(notes), slots=3) as pool:
        give(pool, *jobs)
        turns(pool, len(jobs))
    lines = [line.split() for line in log.read_text().splitlines()]
    for lane in "abcd":
        seen = [[what, task] for what, where, task in lines if where == lane]
        assert seen == [[what, f"{lane}{n}/1"] for n in range(8) for what in ("begin", "end")]


def test_agent_finishes_its_lane_before_it_takes_the_next() -> None:
    (a1, a2), (b1, b2), (c1,) = of("a", 1, 2), of("b", 1, 2), of("c", 1)
    with a_pool(SAYS_WHO) as pool:
        give(pool, a1, b1, c1, a2, b2)
        found = turns(pool, 5)
    assert names(found) == [b"a1", b"a2", b"b1", b"b2", b"c1"]
    assert len({one.text for one in found}) == 1


def test_idle_agent_prefers_the_lane_that_it_served_last(gate: Gate) -> None:
    waits = shell(f"[ $payload = wait ] && read _ < {gate.path}; report $$ ok")
    with a_pool(waits, slots=2) as pool:
        give(pool, job(b"a", b"wait", lane=b"a"), job(b"b", b"wait", lane=b"b"))
        until(pool, lambda: pool.slots_used == 2)
        gate.open(2)
        served = {one.job.lane: one.text for one in turns(pool, 2)}
        assert len(set(served.values())) == 2
        until(pool, lambda: sum(agent.can_eat() for agent in pool._agents()) == 2)  # noqa: SLF001
        for lane in (b"b", b"a", b"a", b"b"):
            pool.start(job(b"next", lane=lane))
            assert [one.text for one in turns(pool)] == [served[lane]]
            until(pool, lambda: sum(one.can_eat() for one in pool._agents()) == 2)  # noqa: SLF001


def test_agent_stays_with_its_lane_while_another_takes_earlier_tasks(gate: Gate) -> None:
    """Both agents become free at once. The task of lane b is older."""
    waits = shell(f"[ $payload = wait ] && read _ < {gate.path}; report $$ ok")
    with a_pool(waits, slots=2) as pool:
        give(pool, job(b"a", b"wait", lane=b"a"), job(b"x", b"wait", lane=b"x"))
        until(pool, lambda: pool.slots_used == 2)
        gate.open(2)
        served = {one.job.lane: one.text for one in turns(pool, 2)}
        until(pool, lambda: sum(agent.can_eat() for agent in pool._agents()) == 2)  # noqa: SLF001
        give(pool, *of("b", 1), *of("a", 1))
        then = {one.job.lane: one.text for one in turns(pool, 2)}
    assert then == {b"a": served[b"a"], b"b": served[b"x"]}


def test_tasks_without_a_lane_go_to_any_agent(gate: Gate) -> None:
    with a_pool(shell(f"read _ < {gate.path}; report $$ ok"), slots=3) as pool:
        give(pool, job(b"1"), job(b"2"), job(b"3"))
        until(pool, lambda: pool.slots_used == 3)
        gate.open(3)
        assert len({one.text for one in turns(pool, 3)}) == 3


def test_lane_is_served_by_as_many_agents_as_its_rules_allow(
    gate: Gate, host: Callable[..., AgentRunner]
) -> None:
    waits = shell(f"read _ < {gate.path}; report $$ ok")
    pool = host(clause("*", waits, lane_workers_max=2), slots=4)
    give(pool, *of("a", 1, 2, 3))
    until(pool, lambda: pool.slots_used == 2)
    until(pool, lambda: not any(one.is_larva() for one in pool._agents()))  # noqa: SLF001
    assert pool.slots_used == 2
    gate.open(3)
    assert len({one.text for one in turns(pool, 3)}) == 2


def test_agent_that_does_not_ask_again_leaves_its_lane_to_another_one() -> None:
    code = """
import sys
print("#hungry", flush=True)
id = input().split("\\t")[0]
print(f"{id}\\tr\\tok", flush=True)
sys.stdin.read()
"""
    clock, (first, second) = StillClock(), of("a", 1, 2)
    with a_pool((sys.executable, "-c", code), slots=2, clock=clock) as pool:
        give(pool, first, second)
        assert turns(pool) == [done(first, b"r")]
        assert len(pool._agents()) == 1  # noqa: SLF001
        assert pool.wake_at_ns() == clock.now_ns + AGENT_IDLE_NOTICE_NS
        clock.now_ns += AGENT_IDLE_NOTICE_NS
        assert turns(pool) == [done(second, b"r")]


# Overfeeding.


def test_agent_is_overfed_only_with_tasks_of_its_lane(gate: Gate) -> None:
    code = EATS_AHEAD.format(gate=gate.path)
    jobs = [*of("a", 1), *of("b", 1), *of("a", 2, 3, 4)]
    with a_pool(literal(sys.executable, "-c", code), overfeed=2) as pool:
        give(pool, *jobs)
        until_fed(pool)
        assert [one.name for one in pool._agents()[0].jobs()] == [b"a1", b"a2", b"a3"]  # noqa: SLF001
        gate.open(5)
        assert names(turns(pool, 5)) == [b"a1", b"a2", b"a3", b"a4", b"b1"]


def test_agent_that_does_not_ask_ahead_is_fed_one_by_one() -> None:
    jobs = of("a", 1, 2, 3)
    with a_pool(shell("report r ok"), slots=2, overfeed=5) as pool:
        give(pool, *jobs)
        assert names(turns(pool, 3)) == [b"a1", b"a2", b"a3"]
        assert len(pool._agents()) == 1  # noqa: SLF001


def test_overfed_agent_that_dies_is_charged_only_for_tasks_it_read(tmp_path: Path) -> None:
    """The next agent takes the rest of the lane in order."""
    code = f"""
import os, sys
if os.path.exists({str(tmp_path / "died")!r}):
    print("#hungry", flush=True)
    for line in sys.stdin:
        if line.strip() and line[0] != "#":
            print(line.split("\\t")[0] + "\\tr\\tok\\n#hungry", flush=True)
else:
    open({str(tmp_path / "died")!r}, "w").close()
    print("#hungry\\n#hungry", flush=True)
    input(), input()
    os._exit(3)
"""
    a1, a2, a3, a4 = of("a", 1, 2, 3, 4)
    with a_pool((sys.executable, "-c", code), overfeed=1) as pool:
        give(pool, a1, a2, a3, a4)
        died = b"the agent died: exit status 3"
        assert turns(pool, 4) == [
            crashed(a1, died),
            crashed(a2, died),
            done(a3, b"r"),
            done(a4, b"r"),
        ]


# Reports about a lane.


def test_rest_of_a_deferred_lane_is_returned_unfed() -> None:
    """It returns before the report, so that the broker can defer it with the task."""
    (a1, a2, a3), (b1,) = of("a", 1, 2, 3), of("b", 1)
    puts_off = shell("[ $lane = a ] && report r 'deferall host down' || report r ok")
    with a_pool(puts_off) as pool:
        give(pool, a1, b1, a2, a3)
        reason = b"lane deferred"
        assert turns(pool, 4) == [
            JobResult(a2, Outcome.REFUSED, reason, healthy=True),
            JobResult(a3, Outcome.REFUSED, reason, healthy=True),
            JobResult(a1, Outcome.DEFER_ALL, b"host down", b"r"),
            done(b1, b"r"),
        ]


def test_deferred_task_without_a_lane_defers_no_others() -> None:
    jobs = [job(b"1", b"deferall"), job(b"2", b"ok")]
    with a_pool(shell('report r "$payload"')) as pool:
        give(pool, *jobs)
        assert [one.outcome for one in turns(pool, 2)] == [Outcome.DEFER_ALL, Outcome.DONE]


@pytest.mark.parametrize("status", ["deferback", "retryat +60", "deferred"])
def test_task_deferred_alone_does_not_stop_its_lane(status: str) -> None:
    jobs = [job(b"1", status.encode(), lane=b"a"), job(b"2", b"ok", lane=b"a")]
    with a_pool(shell('report r "$payload"')) as pool:
        give(pool, *jobs)
        assert names(turns(pool, 2)) == [b"1", b"2"]


# The broker's rules.


def test_command_is_chosen_by_the_lane_of_the_task(host: Callable[..., AgentRunner]) -> None:
    pool = host(
        clause("s/a", shell("report first ok")), clause("s/*", shell("report second ok")), slots=2
    )
    give(pool, *of("a", 1), *of("b", 1), job(b"open"))
    assert {one.job.name: one.text for one in turns(pool, 3)} == {
        b"a1": b"first",
        b"b1": b"second",
        b"open": b"second",
    }


def test_task_without_a_command_runs_by_its_payload(host: Callable[..., AgentRunner]) -> None:
    pool = host(clause("s/*", SAYS_WHO), clause("*"), slots=2)
    program = command("echo", "done", name=b"program")
    give(pool, program, job(b"fed"))
    found = {one.job.name: one for one in turns(pool, 2)}
    assert found[b"program"].text == b"done\n"
    assert found[b"fed"].text.isdigit()


def test_agent_option_overrides_only_the_command_of_a_rule(
    tmp_path: Path,
) -> None:
    fifo, clock = a_fifo(tmp_path / "fifo"), StillClock()
    bye = shell("report own ok", after=f"echo bye > {fifo}")
    with a_pool(bye, clock=clock) as pool:
        pool.set_rules([clause("*", shell("report theirs ok"), idle_ns_max=7 * SECOND_NS)])
        give(pool, job())
        assert [one.text for one in turns(pool)] == [b"own"]
        until_hungry(pool)
        clock.now_ns += 7 * SECOND_NS
        pool.turn()  # sends #idle
        pool.turn()
        assert read_fifo(fifo) == "bye\n"


def test_agent_of_a_removed_command_finishes_and_exits(
    tmp_path: Path, gate: Gate, host: Callable[..., AgentRunner]
) -> None:
    old = shell(f"read _ < {gate.path}; report old ok", after=f"echo > {tmp_path}/bye")
    a1, a2 = of("a", 1, 2)
    pool = host(clause("*", old), slots=2)
    give(pool, a1, a2)
    until_fed(pool)
    pool.set_rules([clause("*", shell("report new ok"))])
    until(pool, lambda: True)
    assert len(pool._agents()) == 1  # noqa: SLF001  # its lane is served
    gate.open()
    assert turns(pool, 2) == [done(a1, b"old"), done(a2, b"new")]
    until(pool, lambda: len(pool._agents()) == 1)  # noqa: SLF001
    assert (tmp_path / "bye").exists()


def test_changed_rules_with_the_same_command_restart_no_agent(
    host: Callable[..., AgentRunner],
) -> None:
    pool = host(clause("*", SAYS_WHO))
    give(pool, job())
    (first,) = turns(pool)
    pool.set_rules([clause("*", SAYS_WHO, overfeed=3, idle_ns_max=60 * SECOND_NS)])
    give(pool, job())
    assert [one.text for one in turns(pool)] == [first.text]
    assert pool.overfeed_max == 3


def test_idle_agent_exits_by_the_current_rules(
    tmp_path: Path, host: Callable[..., AgentRunner]
) -> None:
    fifo, clock = a_fifo(tmp_path / "fifo"), StillClock()
    bye = shell("report r ok", after=f"echo bye > {fifo}")
    pool = host(clause("*", bye), clock=clock)
    give(pool, job())
    turns(pool)
    until_hungry(pool)
    pool.set_rules([clause("*", bye, idle_ns_max=7 * SECOND_NS)])
    clock.now_ns += 7 * SECOND_NS
    pool.turn()  # sends #idle
    pool.turn()
    assert read_fifo(fifo) == "bye\n"


def test_tasks_waiting_for_a_removed_command_run_by_their_payload(
    gate: Gate, host: Callable[..., AgentRunner]
) -> None:
    pool = host(clause("*", shell(f"read _ < {gate.path}; report fed ok")))
    fed, program = job(b"fed"), command("echo", "alone", name=b"program")
    give(pool, fed, program)
    until_fed(pool)
    pool.set_rules([clause("*")])
    gate.open()
    assert turns(pool, 2) == [done(fed, b"fed"), done(program, b"alone\n")]


def test_agents_of_two_commands_share_the_slots(
    gate: Gate, host: Callable[..., AgentRunner]
) -> None:
    waits = f"read _ < {gate.path}; report $0 ok"
    pool = host(clause("s/a*", shell(f": one; {waits}")), clause("*", shell(waits)), slots=2)
    give(pool, *of("a", 1), *of("a-2", 1), *of("b", 1))
    until(pool, lambda: pool.slots_used == 2)
    assert sorted(one.name for one in pool.running()) == [b"a-21", b"a1", b"b1"]
    until(pool, lambda: not any(one.is_larva() for one in pool._agents()))  # noqa: SLF001
    assert pool.slots_used == 2
    gate.open(3)
    turns(pool, 3)


def test_programs_of_an_overfed_lane_run_one_after_the_other(
    tmp_path: Path, host: Callable[..., AgentRunner]
) -> None:
    pool = host(clause("*", overfeed=5), slots=4)
    log = tmp_path / "log"
    script = f"echo begin >> {log}; echo end >> {log}"
    give(pool, *(command("sh", "-c", script, name=b"%d" % n, lane=b"a") for n in range(4)))
    assert names(turns(pool, 4)) == [b"0", b"1", b"2", b"3"]
    assert log.read_text() == "begin\nend\n" * 4


def test_cache_of_lanes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_rules, "LANES_CACHE_SIZE", 1_000)
    rules = AgentRules([clause("s/1*", ("one",)), clause("*", ("other",))])
    for number in range(1_100):
        found = rules.agents_for((b"s", b"%d" % number))
        assert found == AgentSettings(("one" if str(number)[0] == "1" else "other",))
    assert rules._cached.cache_info().currsize == 1_000  # noqa: SLF001


def test_malformed_command_stays_one_word() -> None:
    assert split_command(b"agents/smtp --verbose 'a b'") == ("agents/smtp", "--verbose", "a b")
    assert split_command(b"agents/smtp '") == ("agents/smtp '",)


# Errors.


def test_agent_error_is_set_until_agents_can_be_started(
    tmp_path: Path, host: Callable[..., AgentRunner]
) -> None:
    clock, program = StillClock(), tmp_path / "agent"
    pool = host(Rule(b"s", b"s/*", LaneOptions(command=str(program).encode())), clock=clock)
    assert pool.agent_error == b""
    give(pool, job())
    reason = f"can't start agent {program}: No such file or directory".encode()
    assert turns(pool) == [refused(job(), reason)]
    assert pool.agent_error == reason
    program.write_text("#!/bin/sh\necho no key >&2; exit 1")
    program.chmod(0o700)
    clock.now_ns += AGENT_RESTART_NS
    give(pool, job())
    assert turns(pool) == [refused(job(), b"the agent died: exit status 1: no key")]
    assert pool.agent_error == b"the agent died: exit status 1: no key"
    program.write_text("#!/bin/sh\necho '#hungry'; read id; printf '%s\\tr\\tok\\n' \"${id%%\t*}\"")
    clock.now_ns += 2 * AGENT_RESTART_NS
    give(pool, job())
    assert turns(pool) == [done(job(), b"r")]
    assert pool.agent_error == b""


def test_agent_killed_by_its_task_is_no_agent_error() -> None:
    clock, one = StillClock(), job()
    with a_pool(shell("exit 1"), clock=clock) as pool:
        give(pool, one)
        assert turns(pool) == [crashed(one, b"the agent died: exit status 1")]
        assert pool.agent_error == b""


def test_command_that_fails_does_not_hold_up_another_one(
    tmp_path: Path, host: Callable[..., AgentRunner]
) -> None:
    pool = host(clause("s/a", (str(tmp_path / "missing"),)), clause("*", shell("report r ok")))
    give(pool, *of("a", 1), *of("b", 1))
    found = {one.job.name: one.outcome for one in turns(pool, 2)}
    assert found == {b"a1": Outcome.REFUSED, b"b1": Outcome.DONE}


def test_states_of_agents_are_logged_at_level_info(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "taskyard.worker"), closing(Idle()) as idle:
        idle.see()
    seen = [text.split(": ", 1)[1] for text in caplog.messages]
    assert seen == [
        *("LARVA", "STUFFING", "STUFFING in s/a", "FINISHING in s/a"),
        *("IDLE", "LEAVING"),
    ]


class Idle:
    """A runner whose agent has done one task, and was notified that no more wait."""

    def __init__(self) -> None:
        self._clock = StillClock()
        self._pool = AgentRunner(1, self._clock, AgentSettings(SAYS_WHO))

    def see(self) -> None:
        give(self._pool, *of("a", 1))
        turns(self._pool)
        until_hungry(self._pool)
        self._clock.now_ns += AGENT_IDLE_NOTICE_NS
        self._pool.turn()

    def close(self) -> None:
        self._pool.close()
