"""Agents as real programs: tasks, reports, output, environment and idleness."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from taskyard.core.blobs import Blob, Content, length_of, text_of
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.worker.agents.rules import AgentSettings
from taskyard.worker.agents.runner import (
    AgentRunner,
    clean_environment,
    read_command,
    read_variables,
)
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.limits import (
    AGENT_IDLE_NOTICE_NS,
    PROGRESS_BYTES_MAX,
    RESULT_BYTES_MAX,
)
from tests.worker.agents_harness import (
    SHELL,
    WALL_NS,
    Clock,
    Gate,
    StillClock,
    a_pool,
    done,
    job,
    literal,
    read_fifo_while_turning,
    results_of,
    shell,
    until_hungry,
)
from tests.worker.runner.test_programs import inherited_descriptors
from tests.worker.runner_harness import (
    a_fifo,
    has_ended,
    open_descriptors,
    read_fifo,
    turns,
    wait,
)

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"


def awk() -> str:
    """Return the command of an awk program. mawk needs an option to read line by line."""
    command = ["awk", "-W", "interactive", "BEGIN {}"]
    tried = subprocess.run(command, capture_output=True, check=False)
    is_mawk = tried.returncode == 0 and not tried.stderr
    return "awk -W interactive -f" if is_mawk else "awk -f"


# Well-behaved programs.


def test_agent_can_be_five_lines_of_shell() -> None:
    agent = EXAMPLES / "count.sh"
    assert len(agent.read_text().splitlines()) == 5
    jobs = [job(b"one", b"hello"), job(b"two", b"a\tb\nc\\d"), job(b"three", b"")]
    assert results_of((str(agent),), *jobs) == [
        done(jobs[0], b"5"),
        done(jobs[1], b"7"),
        done(jobs[2], b"5"),  # its name
    ]


def test_agent_can_be_written_in_awk() -> None:
    argv = read_command(f"{awk()} {EXAMPLES / 'sums.awk'}")
    jobs = [job(b"one", b"1 2 3.5"), job(b"two", b"one")]
    assert results_of(argv, *jobs) == [
        done(jobs[0], b"6.5"),
        JobResult(jobs[1], Outcome.FAILED_FINAL, b"these are no numbers"),
    ]


def test_one_agent_is_fed_one_task_after_the_other() -> None:
    jobs = [job(b"%d" % number) for number in range(20)]
    found = results_of(shell("report $$ ok"), *jobs)
    assert [one.job for one in found] == jobs
    assert len({one.text for one in found}) == 1


def test_one_agent_runs_per_slot(gate: Gate) -> None:
    jobs = [job(b"%d" % number) for number in range(4)]
    with a_pool(shell(f"read _ < {gate.path}; report $$ ok"), slots=3) as pool:
        for one in jobs:
            pool.start(one)
        while pool.slots_used < 3:
            wait(pool)
            assert pool.turn() == []
        assert pool.slots_used == 3
        assert sorted(one.name for one in pool.running()) == [one.name for one in jobs]
        gate.open(4)
        assert len({one.text for one in turns(pool, 4)}) == 3


def test_lane_and_payload_reach_the_agent_as_they_are() -> None:
    one = job(b"a\tb", b"x\r\n\\y\t" + bytes(range(1, 256)), lane=b"disk\n1")
    agent = """
import sys
unescape = lambda text: text.encode("latin1").decode("unicode_escape").encode("latin1")
sys.stdin.reconfigure(encoding="latin1", newline="\\n")
print("#hungry", flush=True)
id, lane, payload = sys.stdin.readline()[:-1].split("\\t")
print(f"{id}\\t{lane}\\\\n{unescape(payload).hex()}\\tok", flush=True)
sys.stdin.readline()
"""
    (found,) = results_of(literal(sys.executable, "-c", agent), one)
    assert found == done(one, b"disk\n1\n" + one.payload.hex().encode())


@pytest.mark.parametrize("size", [200_000, RESULT_BYTES_MAX])
def test_data_larger_than_a_pipe_passes_both_ways(size: int) -> None:
    one = job(payload=b"x" * size)
    code = "import sys; print('#hungry', flush=True); id, _, payload = input().split('\\t')\n"
    code += "print(f'{id}\\t{payload}\\tok', flush=True); sys.stdin.read()"
    assert results_of((sys.executable, "-c", code), one) == [done(one, one.payload)]


def test_long_result_is_cut_and_reported_with_its_length() -> None:
    size = RESULT_BYTES_MAX + 10
    code = f"""
print('#hungry', flush=True)
id = input().split('\t')[0]
print(f'{{id}}\t{{"x" * {size}}}\tok')
"""
    (found,) = results_of((sys.executable, "-c", code), job())
    assert found.content == Blob(b"", size, b"x" * RESULT_BYTES_MAX)
    assert (found.outcome, found.printed) == (Outcome.DONE, b"")


@pytest.mark.parametrize(
    ("line_sent", "outcome", "text", "retry_at_ns"),
    [
        ("ok", Outcome.DONE, b"detail", 0),
        ("ok3 accepted", Outcome.DONE, b"detail", 0),
        ("error no such user", Outcome.FAILED_FINAL, b"no such user", 0),
        ("error2", Outcome.FAILED_FINAL, b"detail", 0),
        ("deferred try later", Outcome.FAILED, b"try later", 0),
        ("deferall host down", Outcome.DEFER_ALL, b"host down", 0),
        ("deferback", Outcome.DEFER_BACK, b"detail", 0),
        ("retryat +90 greylisted", Outcome.RETRY_AT, b"greylisted", WALL_NS + 90 * SECOND_NS),
        ("retryat 7 once", Outcome.RETRY_AT, b"once", 7 * SECOND_NS),
        ("fine", Outcome.FAILED, b"agent's report: unknown status 'fine'", 0),
    ],
)
def test_status_of_a_report_becomes_an_outcome(
    line_sent: str, outcome: Outcome, text: bytes, retry_at_ns: int
) -> None:
    (found,) = results_of(shell(f"report detail '{line_sent}'"), job())
    assert (found.outcome, found.text, found.retry_at_ns) == (outcome, text, retry_at_ns)


def test_stderr_and_comments_are_the_output_of_the_task(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "taskyard.worker"):
        jobs = [job(b"one"), job(b"two")]
        talks = shell("echo \"# begins $id\"; echo aside >&2; report r 'ok quite well'")
        first, second = results_of(talks, *jobs)
    # They arrive through two pipes, in any order.
    assert sorted(first.output.split(b"\n")) == [b"aside", b"begins one/1", b"quite well"]
    assert sorted(second.output.split(b"\n")) == [b"aside", b"begins two/1", b"quite well"]
    assert [text.split(": ", 1)[1] for text in caplog.messages].count("aside") == 2
    assert any(text.endswith(": begins two/1") for text in caplog.messages)


def test_output_before_a_task_does_not_belong_to_it() -> None:
    agent = ("sh", "-c", f"echo starts >&2; {SHELL}")
    with_words = ("env", "DO=report r ok", *agent)
    assert results_of(with_words, job()) == [done(job(), b"r")]


def test_comment_is_sent_as_progress() -> None:
    heard: list[tuple[Job, Content]] = []
    one = job()
    with a_pool(shell("echo '# a quarter'; echo '# half'; report r ok")) as pool:
        pool.on_output = lambda about, printed: heard.append((about, printed))
        pool.start(one)
        turns(pool)
    assert heard == [(one, b"a quarter\n"), (one, b"a quarter\nhalf\n")]


def test_progress_is_the_end_of_the_output() -> None:
    heard: list[Content] = []
    with a_pool(shell('for n in $(seq 1000); do echo "# step $n"; done; report r ok')) as pool:
        pool.on_output = lambda _, printed: heard.append(printed)
        pool.start(job())
        turns(pool)
    assert text_of(heard[-1]).endswith(b"step 999\nstep 1000\n")
    assert max(len(text_of(printed)) for printed in heard) == PROGRESS_BYTES_MAX
    printed_bytes = sum(len(f"step {number}\n") for number in range(1, 1001))
    assert (heard[0], length_of(heard[-1])) == (b"# step 1\n"[2:], printed_bytes)


def test_agents_get_basic_variables_and_those_of_env_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OF_THE_WORKER", "TASKYARD_KEY", "LC_TIME", "TZ"):
        monkeypatch.setenv(name, f"its {name}")
    code = """
import os
print("#hungry", flush=True)
id = input().split("\\t")[0]
print(f"{id}\\t{sorted(os.environ.items())}\\tok")
"""
    one = job()
    agents = AgentSettings((sys.executable, "-c", code))
    with closing(AgentRunner(1, Clock(), agents, env={"GIVEN": "by the user"})) as pool:
        pool.start(one)
        (found,) = turns(pool)
    found_there = dict(ast.literal_eval(found.text.decode()))
    assert {"OF_THE_WORKER", "TASKYARD_KEY"}.isdisjoint(found_there)
    assert found_there["LC_TIME"] == "its LC_TIME"
    assert (found_there["TZ"], found_there["PATH"]) == ("its TZ", os.environ["PATH"])
    assert found_there["GIVEN"] == "by the user"


def test_agent_leads_its_own_session_and_inherits_its_three_files() -> None:
    code = """
import os
print("#hungry", flush=True)
id = input().split("\\t")[0]
inherited = ",".join(os.listdir("/proc/self/fd"))
print(f"{id}\\t{os.getsid(0) == os.getpid()} {inherited}\\tok")
"""
    with a_pool((sys.executable, "-c", code), slots=2) as pool:
        pool.start(job(b"one"))
        pool.start(job(b"two"))
        for found in turns(pool, 2):
            leads, _, inherited = found.text.decode().partition(" ")
            assert leads == "True"
            more = set(map(int, inherited.split(","))) - {0, 1, 2}
            # Its parent pipe, and the directory that it lists.
            assert len(more - inherited_descriptors()) <= 2


# Idle agents.


def test_idle_agent_is_notified_once_and_fed_when_a_task_comes(
    tmp_path: Path,
) -> None:
    fifo, clock = a_fifo(tmp_path / "fifo"), StillClock()
    agent = shell("report $$ ok", idle=f"echo idle > {fifo}")
    with a_pool(agent, clock=clock) as pool:
        pool.start(job(b"one"))
        (first,) = turns(pool)
        until_hungry(pool)
        assert pool.wake_at_ns() == clock.now_ns + AGENT_IDLE_NOTICE_NS
        clock.now_ns += AGENT_IDLE_NOTICE_NS
        assert pool.turn() == []
        assert read_fifo(fifo) == "idle\n"
        pool.start(job(b"two"))
        (second,) = turns(pool)
        assert first.text == second.text


def test_agent_exits_after_long_idleness_and_another_starts_on_demand(tmp_path: Path) -> None:
    fifo, clock = a_fifo(tmp_path / "fifo"), StillClock()
    with a_pool(shell("report $$ ok", after=f"echo bye > {fifo}"), clock=clock) as pool:
        pool.start(job(b"one"))
        (first,) = turns(pool)
        until_hungry(pool)
        clock.now_ns += 180 * SECOND_NS
        pool.turn()  # sends #idle
        pool.turn()
        assert read_fifo(fifo) == "bye\n"
        assert has_ended(int(first.text))
        pool.start(job(b"two"))
        (second,) = turns(pool)
        assert first.text != second.text
        told_by = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # so that it does not block
        pool.close()
        os.close(told_by)


def test_end_of_stdin_makes_an_agent_finish(tmp_path: Path) -> None:
    waits = shell("report r ok", after=f"cat > /dev/null; echo bye > {tmp_path}/bye")
    with a_pool(waits) as pool:
        pool.start(job())
        turns(pool)
    assert (tmp_path / "bye").read_text() == "bye\n"


def test_agent_that_ignores_finish_is_ended(tmp_path: Path) -> None:
    fifo, clock = a_fifo(tmp_path / "fifo"), StillClock()
    stays = shell("report $$ ok", after=f"echo bye > {fifo}; sleep 1000")
    with a_pool(stays, clock=clock) as pool:
        pool.start(job())
        (found,) = turns(pool)
        until_hungry(pool)
        pool.unstarted()
        assert read_fifo(fifo) == "bye\n"
        clock.now_ns += 10 * SECOND_NS
        while pool._agents():  # noqa: SLF001
            pool.turn()
            wait(pool)
            pool.turn()
        assert has_ended(int(found.text))


def test_close_lets_idle_agents_finish(tmp_path: Path) -> None:
    before = open_descriptors()
    with a_pool(shell("report r ok", after=f"echo bye > {tmp_path}/bye"), slots=2) as pool:
        pool.start(job(b"one"))
        turns(pool)
    assert (tmp_path / "bye").read_text() == "bye\n"
    assert open_descriptors() == before


def test_close_kills_agents_that_hold_tasks(tmp_path: Path) -> None:
    fifo, before = a_fifo(tmp_path / "fifo"), open_descriptors()
    with a_pool(shell(f"echo $$ > {fifo}; sleep 1000")) as pool:
        pool.start(job())
        pid = read_fifo_while_turning(pool, fifo)
    assert has_ended(pid)
    assert open_descriptors() == before


# Environment.


def test_only_basic_variables_are_inherited() -> None:
    needed = {"PATH": "/bin", "HOME": "/", "LANG": "C", "LC_ALL": "C", "TZ": "UTC", "USER": "me"}
    others = {"TASKYARD_KEY": "secret", "AWS_SECRET": "secret", "PYTHONPATH": "x", "LCX": "x"}
    assert clean_environment(needed | {"TMPDIR": "/t"} | others) == needed | {"TMPDIR": "/t"}


def test_variable_has_a_given_value_or_that_of_the_worker() -> None:
    given = ["A=1", "B=", "C", "D=x=y"]
    assert read_variables(given, {"C": "3"}) == {"A": "1", "B": "", "C": "3", "D": "x=y"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("=x", "must be NAME=VALUE or NAME"),
        ("", "must be NAME=VALUE or NAME"),
        ("A=\0", "must be NAME=VALUE or NAME"),
        ("MISSING", "not set in the worker's environment"),
        ("TASKYARD_KEY=x", "variables are the worker's"),
    ],
)
def test_invalid_variable_is_refused(given: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_variables([given], {})
