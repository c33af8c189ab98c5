"""The agent runner: slots, the worker's loop, a worker process at a broker, and the page."""

from __future__ import annotations

import shlex
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard.client.client import Client
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.records import Progressed
from taskyard.core.states import TaskState
from taskyard.wire.native import peer
from taskyard.worker.jobs import (
    AGENT_FINISH_NS_MAX,
    AGENT_HUNGER_NS_MAX,
    AGENT_IDLE_NOTICE_NS,
    AGENT_IDLE_NS_MAX,
    AGENT_MALFORMED_LINES_MAX,
    AGENT_RESTART_NS,
    AGENT_RESTART_NS_MAX,
    CHILD_START_NS_MAX,
    KILL_GRACE_NS,
    OUTPUT_TAIL_BYTES,
    RESULT_BYTES_MAX,
    JobResult,
)
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, Worker, until
from tests.worker.agents_harness import (
    Gate,
    a_pool,
    job,
    shell,
    until_fed,
)
from tests.worker.runner_harness import (
    has_ended,
    turns,
    wait,
)
from tests.worker.test_native import WorkerHarness

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"


# Number of agents.


def test_wide_task_waits_for_its_slots_without_being_overtaken(gate: Gate) -> None:
    jobs = [job(b"one"), job(b"wide", slots=2), job(b"next")]
    with a_pool(shell(f"read _ < {gate.path}; report r ok"), slots=2) as pool:
        pool.start(job(b"first"))
        pool.start(job(b"second"))
        while pool.slots_used < 2:  # so that there are two agents
            wait(pool)
            assert pool.turn() == []
        gate.open(2)
        turns(pool, 2)
        while sum(agent.can_eat() for agent in pool._agents()) < 2:  # noqa: SLF001
            wait(pool)
            assert pool.turn() == []
        for one in jobs:
            pool.start(one)
        for done_now in jobs:
            until_fed(pool)
            assert pool.slots_used == done_now.slots
            gate.open()
            assert [one.job for one in turns(pool)] == [done_now]


def test_shutdown_returns_waiting_tasks_and_finishes_held_ones(gate: Gate) -> None:
    jobs = [job(b"one"), job(b"two")]
    with a_pool(shell(f"read _ < {gate.path}; report $$ ok")) as pool:
        for one in jobs:
            pool.start(one)
        until_fed(pool)
        assert pool.unstarted() == jobs[1:]
        gate.open()
        (found,) = turns(pool)
        assert found.job == jobs[0]
        while pool._agents():  # noqa: SLF001
            wait(pool)
            pool.turn()
        assert has_ended(int(found.text))


# With the worker's loop.


def test_newest_progress_is_sent_at_a_limited_rate() -> None:
    harness = WorkerHarness(slots=2)
    harness.create(b"a", b"b")
    harness.turn()
    first, second = harness.runner.jobs
    harness.loop.set_progress(first, b"one\n")
    harness.turn()
    assert harness.sent_kinds.count(peer.PROGRESS) == 1
    harness.loop.set_progress(first, b"one\ntwo\n")
    harness.loop.set_progress(first, b"one\ntwo\nthree\n")
    harness.loop.set_progress(second, b"x\n")
    harness.turn()
    assert harness.sent_kinds.count(peer.PROGRESS) == 1
    harness.pass_time(SECOND_NS)
    harness.turn()
    assert harness.sent_kinds.count(peer.PROGRESS) == 2
    records = [one for one in harness.scheduler.take_records() if isinstance(one, Progressed)]
    assert [record.texts for record in records] == [
        [b"one\n"],
        [b"one\ntwo\nthree\n", b"x\n"],
    ]


def test_no_progress_is_sent_for_finished_tasks() -> None:
    harness = WorkerHarness()
    harness.create(b"a")
    harness.turn()
    (one,) = harness.runner.jobs
    harness.loop.set_progress(one, b"first\n")
    harness.turn()
    harness.loop.set_progress(one, b"more\n")
    harness.runner.finish()
    harness.turn()
    harness.loop.set_progress(one, b"late\n")
    harness.pass_time(SECOND_NS)
    harness.turn()
    assert harness.sent_kinds.count(peer.PROGRESS) == 1


def test_loop_reports_when_to_try_again() -> None:
    harness = WorkerHarness()
    harness.create(b"a")
    harness.turn()
    one = harness.runner.jobs.pop()
    at_ns = harness.scheduler.context.at_ns + 90 * SECOND_NS
    harness.runner._done.append(JobResult(one, Outcome.RETRY_AT, b"later", b"", at_ns))  # noqa: SLF001
    harness.turn()
    task = harness.scheduler.ledger.tasks[b"a"]
    assert (task.state, task.due_ns, task.failures) == (TaskState.DELAYED, at_ns, 0)


# As a process, at a broker.


@contextmanager
def a_host(directory: Path, agent: str, *options: str) -> Iterator[tuple[Client, Running]]:
    command = ("--agent", agent, "--service", "s", *options)
    with (
        Broker(directory),
        Client(state=directory / ".taskyard") as client,
        Worker(directory, "--slots", "2", *command) as host,
    ):
        yield client, host


def command_of(argv: tuple[str, ...]) -> str:
    return shlex.join(argv)


def test_agents_run_the_tasks_of_their_service(tmp_path: Path) -> None:
    with a_host(tmp_path, str(EXAMPLES / "count.sh")) as (client, _):
        names = ["plain", "# odd \\name/1", "#hungry"]
        futures = [client.submit(name.encode() * 3, name=name, service="s") for name in names]
        assert [future.result(PATIENCE_SECONDS) for future in futures] == [b"15", b"39", b"21"]


def test_reports_of_agents_reach_the_broker(tmp_path: Path) -> None:
    agent = command_of(shell('report "$lane" "$payload"'))
    with a_host(tmp_path, agent) as (client, _):
        statuses = {"lost": b"error no such user", "later": b"retryat +3600 greylisted"}
        for name, status in statuses.items():
            client.submit(status, name=name, service="s", retries=5)
        assert (
            client.submit(b"ok", service="s", lane="disk-1").result(PATIENCE_SECONDS) == b"disk-1"
        )
        assert "no such user" in str(client.future("lost").exception(30))
        until(lambda: client.show("later")["state"] == "delayed")
        later, lost = client.show("later"), client.show("lost")
        assert (later["failures"], lost["failures"], lost["state"]) == (0, 1, "failed")


def test_agents_end_with_their_host_however_it_ends(tmp_path: Path) -> None:
    agent = command_of(shell("echo $$ > pid; sleep 1000"))
    with a_host(tmp_path, agent) as (client, host):
        client.submit(b"x", name="a", service="s")
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        host.kill()
        assert has_ended(int((tmp_path / "pid").read_text()))


def test_comment_shows_while_the_task_runs_and_sigterm_lets_agents_finish(
    tmp_path: Path, gate: Gate
) -> None:
    works = f"echo '# half of it'; read _ < {gate.path}; report r ok"
    agent = command_of(shell(works, after="echo > bye"))
    with a_host(tmp_path, agent) as (client, host):
        future = client.submit(b"x", name="a", service="s")
        until(lambda: client.show("a")["state"] == "leased")
        until(lambda: client.output("a") == b"half of it\n")
        host.send(signal.SIGTERM)
        assert "exits after 1 task (" in host.error_line()
        gate.open()
        assert host.end()[0] == 0
        assert future.result(PATIENCE_SECONDS) == b"r"
    assert (tmp_path / "bye").exists()


# The page.

PAGE = (EXAMPLES.parents[1] / "docs" / "dialects" / "hungry.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        f"within {CHILD_START_NS_MAX // SECOND_NS} s of its start",
        f"than {AGENT_MALFORMED_LINES_MAX} such lines",
        f"the last {OUTPUT_TAIL_BYTES >> 10} KiB of",
        f"the result, at most {RESULT_BYTES_MAX >> 20} MiB",
        f"was sent the empty line has {AGENT_FINISH_NS_MAX // SECOND_NS} s",
        f"itself ends it has {KILL_GRACE_NS // SECOND_NS} s",
        f"without a task for {AGENT_IDLE_NS_MAX // SECOND_NS // 60} minutes",
        f"each time, up to {AGENT_RESTART_NS_MAX // SECOND_NS} s",
    ],
)
def test_numbers_on_the_page_match_the_code(text: str) -> None:
    assert text in PAGE
    assert AGENT_HUNGER_NS_MAX == 3600 * SECOND_NS
    assert AGENT_RESTART_NS == AGENT_IDLE_NOTICE_NS == SECOND_NS // 10
