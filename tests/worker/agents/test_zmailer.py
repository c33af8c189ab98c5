"""Agents with ZMailer's lines: shared lines, marks in control files, and locks of killed agents."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.rules import LaneOptions, Rule
from taskyard.worker.agents.rules import AgentRules, AgentSettings
from taskyard.worker.agents.runner import AgentRunner
from tests.worker import zmailer_agent
from tests.worker.agents_harness import WALL_NS, Clock, a_pool, job
from tests.worker.runner_harness import turns
from tests.worker.zmailer_agent import control_file

if TYPE_CHECKING:
    from taskyard.worker.jobs import Job, JobResult

AGENT = (sys.executable, "-S", "-E", zmailer_agent.__file__, "local")
INTERVAL_NS = 7 * SECOND_NS
RULE = Rule(b"s", b"s/*", LaneOptions(interval_ns=INTERVAL_NS))


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def jobs_of(number: int, *users: str, **terms: Any) -> list[Job]:
    """Write a control file, and return the tasks of its recipients."""
    text = control_file(*users)
    Path(str(number)).write_text(text)
    offsets = [text.index(f"r {'':10}local - {user} ") for user in users]
    names = [b"mail/%d/%d" % (number, offset) for offset in offsets]
    return [job(name, b"%d\t-" % number, lane=b"local/-", **terms) for name in names]


def offset_of(one: Job) -> int:
    return int(one.name.rpartition(b"/")[2])


def mark(one: Job, text: bytes) -> None:
    zmailer_agent.mark(one.payload.partition(b"\t")[0].decode(), offset_of(one), text)


def marks(number: int) -> list[str]:
    lines = Path(str(number)).read_text().splitlines()
    return [line[1] for line in lines if line.startswith("r")]


def deliveries(*users: str) -> list[int]:
    return [Path(user).read_text().count("delivered") for user in users]


def results_of(*jobs: Job, argv: tuple[str, ...] = AGENT) -> list[JobResult]:
    with a_pool(argv, lines="zmailer") as pool:
        pool.set_rules([RULE])
        for one in jobs:
            pool.start(one)
        return turns(pool, len(jobs))


def outcomes(found: list[JobResult], *jobs: Job) -> list[tuple[Outcome, bytes]]:
    by_job = {one.job.key: (one.outcome, one.text) for one in found}
    return [by_job[one.key] for one in jobs]


def test_tasks_of_a_file_are_one_line_and_each_is_settled_by_its_report() -> None:
    jobs = jobs_of(12, "a", "refuse-b", "defer-c")
    other = jobs_of(13, "d")
    found = results_of(*jobs, *other)
    assert outcomes(found, *jobs, *other) == [
        (Outcome.DONE, b"Ok"),
        (Outcome.FAILED_FINAL, b"no such user"),
        (Outcome.FAILED, b"mailbox is busy"),
        (Outcome.DONE, b"Ok"),
    ]
    by_name = {one.job.name: one.output for one in found}
    assert by_name[jobs[1].name] == b"refuse-b\1failed\1"[:-1]
    assert marks(12) == ["+", "-", " "]


def test_recipient_that_another_task_delivered_is_done_without_a_second_delivery() -> None:
    first, second = jobs_of(12, "a", "b")
    with a_pool(AGENT, lines="zmailer") as pool:
        pool.start(first)
        assert outcomes(turns(pool, 1), first) == [(Outcome.DONE, b"Ok")]
        pool.start(second)
        (found,) = turns(pool, 1)
    assert (found.outcome, found.output) == (Outcome.DONE, b"marked as delivered")
    assert deliveries("a", "b") == [1, 1]


def test_recipient_that_is_marked_as_failed_fails_for_good() -> None:
    (one,) = jobs_of(12, "a")
    mark(one, b"-")
    assert outcomes(results_of(one), one) == [(Outcome.FAILED_FINAL, b"marked as failed")]


@pytest.mark.parametrize("name", ["mail/12/5", "mail/12/9999", "mail/12/x"])
def test_task_of_no_recipient_is_returned_after_the_interval(name: str) -> None:
    jobs_of(12, "a")
    (found,) = results_of(job(name.encode(), b"12\tother.example"))
    assert (found.outcome, found.text) == (
        Outcome.RETRY_AT,
        b"12: not a transport control file",
    )
    assert found.retry_at_ns == WALL_NS + INTERVAL_NS


def test_task_whose_file_is_gone_is_returned_after_the_interval() -> None:
    agent = r"""
echo '#hungry'; read -r line; echo "#resync 12"; echo '#hungry'; read -r line
"""
    one = job(b"12/93", b"12\t-")
    (found,) = results_of(one, argv=("sh", "-c", agent))
    assert (found.outcome, found.text) == (Outcome.RETRY_AT, b"12: No such file or directory")
    assert found.retry_at_ns == WALL_NS + INTERVAL_NS


def test_lock_of_a_process_that_ended_is_removed_and_that_of_another_stays() -> None:
    child = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], {})
    os.waitpid(child, 0)
    gone, kept = jobs_of(12, "a", "b")
    mark(gone, zmailer_agent.LOCK % child)
    mark(kept, zmailer_agent.LOCK % os.getpid())
    waits = (Outcome.RETRY_AT, b"the agent reported nothing")
    assert outcomes(results_of(gone, kept), gone, kept) == [waits, waits]
    assert marks(12) == [" ", "~"]
    assert outcomes(results_of(gone), gone) == [(Outcome.DONE, b"Ok")]


def test_tasks_of_a_killed_agent_are_delivered_by_the_next_one() -> None:
    jobs = jobs_of(12, "a", "die-b", "c")  # the last one is delivered first
    assert [one for one, _ in outcomes(results_of(*jobs), *jobs)] == [
        Outcome.CRASHED,
        Outcome.CRASHED,
        Outcome.DONE,
    ]
    assert marks(12) == ["~", "~", "+"]
    assert [one for one, _ in outcomes(results_of(*jobs[:2]), *jobs[:2])] == [Outcome.RETRY_AT] * 2
    assert [one for one, _ in outcomes(results_of(*jobs[:2]), *jobs[:2])] == [Outcome.DONE] * 2
    assert deliveries("a", "die-b", "c") == [1, 2, 1]  # it died before it could report


def test_payload_that_is_no_line_is_refused_and_the_agent_lives() -> None:
    (good,) = jobs_of(12, "a")
    bad = job(b"12/93", b"12\n13")
    assert outcomes(results_of(bad, good), bad, good) == [
        (Outcome.FAILED_FINAL, b"payload: not SPOOLFILE, or SPOOLFILE tab HOST, on one line"),
        (Outcome.DONE, b"Ok"),
    ]


def test_wider_task_does_not_share_the_line_of_a_narrower_one() -> None:
    narrow, wide = jobs_of(12, "a", "b")
    wide = job(wide.name, wide.payload, lane=wide.lane, slots=2)
    with a_pool(AGENT, 2, lines="zmailer") as pool:
        pool.start(narrow)
        pool.start(wide)
        assert [one.outcome for one in turns(pool, 2)] == [Outcome.DONE] * 2


def test_agent_gets_no_lines_of_the_rules_before_a_change() -> None:
    agent = r"""
echo '#hungry'
while read -r line && [ -n "$line" ]; do
    case $line in 12/93/1*) printf "12/93/1\t$$\tok\n";; 12*) printf "12/93\t\tok $$\n";; esac
    echo '#hungry'
done
"""
    one = job(b"12/93", b"12\t-")
    command = shlex.join(["sh", "-c", agent]).encode()
    rule = Rule(b"s", b"s/*", LaneOptions(command=command))
    pool = AgentRunner(1, Clock())
    with closing(pool):
        pool.set_rules([rule])
        pool.start(one)
        (first,) = turns(pool, 1)
        changed = structs.replace(rule.options, lines=b"zmailer")
        pool.set_rules([structs.replace(rule, options=changed)])
        pool.start(one)
        (second,) = turns(pool, 1)
    assert (first.outcome, second.outcome) == (Outcome.DONE, Outcome.DONE)
    assert first.text != second.text


def test_rule_names_the_lines_of_its_agents_unless_the_worker_does() -> None:
    rule = Rule(b"mail", b"mail/*", LaneOptions(command=b"x", lines=b"zmailer", interval_ns=9))
    by_rule = AgentRules([rule]).agents_for((b"mail", b""))
    assert by_rule == AgentSettings(("x",), lines="zmailer", interval_ns=9)
    for given, lines in (("", "zmailer"), ("hungry", "hungry")):
        own = AgentRules([rule], AgentSettings(("y",), lines=given))
        assert own.agents_for((b"mail", b"")) == AgentSettings(("y",), lines=lines, interval_ns=9)
        other = own.agents_for((b"other", b""))
        assert other is not None
        assert other.lines == "hungry"
