"""Agents, as real programs: fed, silent, garrulous, mad and dead."""

from __future__ import annotations

import ast
import logging
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tracemalloc
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from taskyard.client.client import Client
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Result
from taskyard.core.records import Progressed
from taskyard.core.states import TaskState
from taskyard.errors import UserError
from taskyard.wire.hungry.frames import LINE_BYTES_MAX
from taskyard.wire.native import peer
from taskyard.worker.agents.pipes import StdinPipe
from taskyard.worker.agents.runner import AgentRunner, AgentSettings, read_command
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.limits import (
    AGENT_CLOSED_NS_MAX,
    AGENT_FINISH_NS_MAX,
    AGENT_HUNGER_NS_MAX,
    AGENT_IDLE_NOTICE_NS,
    AGENT_IDLE_NS_MAX,
    AGENT_LOG_LINES_MAX,
    AGENT_MALFORMED_LINES_MAX,
    AGENT_RESTART_NS,
    AGENT_RESTART_NS_MAX,
    CHILD_START_NS_MAX,
    KILL_GRACE_NS,
    OUTPUT_TAIL_BYTES,
    PROGRESS_BYTES_MAX,
    RESULT_BYTES_MAX,
)
from tests.kit.processes import Broker, Running, Worker, until
from tests.worker.agents_kit import (
    SHELL,
    WALL_NS,
    Clock,
    Gate,
    StillClock,
    a_pool,
    crashed,
    done,
    failed,
    job,
    refused,
    results_of,
    shell,
    until_fed,
    until_hungry,
    until_waiting_for,
)
from tests.worker.runner.test_programs import given_to_us_for_our_children
from tests.worker.running_kit import (
    a_fifo,
    has_ended,
    open_descriptors,
    told,
    turns,
    wait,
)
from tests.worker.test_native import Shop

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"


def awk() -> str:
    """As it has to be started here: mawk waits for more lines than there are, unless told."""
    command = ["awk", "-W", "interactive", "BEGIN {}"]
    tried = subprocess.run(command, capture_output=True, check=False)
    is_mawk = tried.returncode == 0 and not tried.stderr
    return "awk -W interactive -f" if is_mawk else "awk -f"


# Programs that behave.


def test_five_lines_of_shell_are_an_agent() -> None:
    agent = EXAMPLES / "count.sh"
    assert len(agent.read_text().splitlines()) == 5
    jobs = [job(b"one", b"hello"), job(b"two", b"a\tb\nc\\d"), job(b"three", b"")]
    assert results_of((str(agent),), *jobs) == [
        done(jobs[0], b"5"),
        done(jobs[1], b"7"),
        done(jobs[2], b"5"),  # its name
    ]


def test_agent_in_awk() -> None:
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


def test_there_are_as_many_agents_as_slots(gate: Gate) -> None:
    jobs = [job(b"%d" % number) for number in range(4)]
    with a_pool(shell(f"read _ < {gate.path}; report $$ ok"), slots=3) as pool:
        for one in jobs:
            pool.start(one)
        while pool.slots_used < 3:
            wait(pool)
            assert pool.turn() == []
        assert (pool.slots_used, pool.slots_free) == (3, 0)
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
    (found,) = results_of((sys.executable, "-c", agent), one)
    assert found == done(one, b"disk\n1\n" + one.payload.hex().encode())


@pytest.mark.parametrize("size", [200_000, RESULT_BYTES_MAX])
def test_what_is_larger_than_a_pipe_goes_both_ways(size: int) -> None:
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
    assert (found.outcome, found.text) == (Outcome.DONE, b"x" * RESULT_BYTES_MAX)
    assert (found.result_bytes_total, found.output, found.output_bytes_total) == (size, b"", 0)


@pytest.mark.parametrize(
    ("said", "outcome", "text", "retry_at_ns"),
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
def test_status_is_reported_as(said: str, outcome: Outcome, text: bytes, retry_at_ns: int) -> None:
    (found,) = results_of(shell(f"report detail '{said}'"), job())
    assert (found.outcome, found.text, found.retry_at_ns) == (outcome, text, retry_at_ns)


def test_what_it_says_on_the_side_is_the_tasks_output(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "taskyard.worker"):
        jobs = [job(b"one"), job(b"two")]
        talks = shell("echo \"# begins $id\"; echo aside >&2; report r 'ok quite well'")
        first, second = results_of(talks, *jobs)
    # They come by two pipes: in which order is anybody's guess.
    assert sorted(first.output.split(b"\n")) == [b"aside", b"begins one/1", b"quite well"]
    assert sorted(second.output.split(b"\n")) == [b"aside", b"begins two/1", b"quite well"]
    assert [text.split(": ", 1)[1] for text in caplog.messages].count("aside") == 2
    assert any(text.endswith(": begins two/1") for text in caplog.messages)


def test_what_it_says_before_its_task_is_not_the_tasks_output() -> None:
    agent = ("sh", "-c", f"echo starts >&2; {SHELL}")
    with_words = ("env", "DO=report r ok", *agent)
    assert results_of(with_words, job()) == [done(job(), b"r")]


def test_comment_is_told_as_progress() -> None:
    heard: list[tuple[Job, Result]] = []
    one = job()
    with a_pool(shell("echo '# a quarter'; echo '# half'; report r ok")) as pool:
        pool.on_output = lambda about, printed: heard.append((about, printed))
        pool.start(one)
        turns(pool)
    assert heard == [(one, Result(b"a quarter\n")), (one, Result(b"a quarter\nhalf\n"))]


def test_progress_is_the_end_of_what_was_said() -> None:
    heard: list[Result] = []
    with a_pool(shell('for n in $(seq 1000); do echo "# step $n"; done; report r ok')) as pool:
        pool.on_output = lambda _, printed: heard.append(printed)
        pool.start(job())
        turns(pool)
    assert heard[-1].text.endswith(b"step 999\nstep 1000\n")
    assert max(len(printed.text) for printed in heard) == PROGRESS_BYTES_MAX
    printed_bytes = sum(len(f"step {number}\n") for number in range(1, 1001))
    assert (heard[0].bytes_total, heard[-1].bytes_total) == (0, printed_bytes)


def test_environment_is_what_every_program_needs_and_what_the_user_gives(
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
            # Its lifeline, and what it has open to look.
            assert len(more - given_to_us_for_our_children()) <= 2


# Idle ones.


def test_agent_with_nothing_to_do_is_told_so_once_and_is_fed_when_there_is_something(
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
        assert told(fifo) == "idle\n"
        pool.start(job(b"two"))
        (second,) = turns(pool)
        assert first.text == second.text


def test_agent_that_is_idle_for_long_is_let_go_and_another_one_started(tmp_path: Path) -> None:
    fifo, clock = a_fifo(tmp_path / "fifo"), StillClock()
    with a_pool(shell("report $$ ok", after=f"echo bye > {fifo}"), clock=clock) as pool:
        pool.start(job(b"one"))
        (first,) = turns(pool)
        until_hungry(pool)
        clock.now_ns += 180 * SECOND_NS
        pool.turn()  # says that there is nothing
        pool.turn()
        assert told(fifo) == "bye\n"
        assert has_ended(int(first.text))
        pool.start(job(b"two"))
        (second,) = turns(pool)
        assert first.text != second.text
        told_by = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # so that it need not wait for us
        pool.close()
        os.close(told_by)


def test_end_of_its_input_tells_it_to_finish_too(tmp_path: Path) -> None:
    waits = shell("report r ok", after=f"cat > /dev/null; echo bye > {tmp_path}/bye")
    with a_pool(waits) as pool:
        pool.start(job())
        turns(pool)
    assert (tmp_path / "bye").read_text() == "bye\n"


def test_agent_that_does_not_finish_when_told_is_ended(tmp_path: Path) -> None:
    fifo, clock = a_fifo(tmp_path / "fifo"), StillClock()
    stays = shell("report $$ ok", after=f"echo bye > {fifo}; sleep 1000")
    with a_pool(stays, clock=clock) as pool:
        pool.start(job())
        (found,) = turns(pool)
        until_hungry(pool)
        pool.unstarted()
        assert told(fifo) == "bye\n"
        clock.now_ns += 10 * SECOND_NS
        while pool._agents():  # noqa: SLF001
            pool.turn()
            wait(pool)
            pool.turn()
        assert has_ended(int(found.text))


def test_closing_lets_those_finish_that_hold_nothing(tmp_path: Path) -> None:
    before = open_descriptors()
    with a_pool(shell("report r ok", after=f"echo bye > {tmp_path}/bye"), slots=2) as pool:
        pool.start(job(b"one"))
        turns(pool)
    assert (tmp_path / "bye").read_text() == "bye\n"
    assert open_descriptors() == before


def test_closing_kills_those_that_are_at_work(tmp_path: Path) -> None:
    fifo, before = a_fifo(tmp_path / "fifo"), open_descriptors()
    with a_pool(shell(f"echo $$ > {fifo}; sleep 1000")) as pool:
        pool.start(job())
        pid = told_while_turning(pool, fifo)
    assert has_ended(pid)
    assert open_descriptors() == before


def told_while_turning(pool: AgentRunner, fifo: str) -> int:
    """The number that an agent writes there when it was fed."""
    until_fed(pool)
    return int(told(fifo))


# Those that don't behave.


def test_agent_that_dies_takes_an_attempt_with_it_and_the_next_one_goes_on() -> None:
    jobs = [job(b"good"), job(b"bad", b"die"), job(b"next")]
    dies = '[ "$payload" = die ] && { echo oh >&2; exit 3; }; report $$ ok'
    first, second, third = results_of(shell(dies), *jobs)
    assert (first.outcome, third.outcome) == (Outcome.DONE, Outcome.DONE)
    assert first.text != third.text
    assert second == crashed(jobs[1], b"the agent died: exit status 3: oh", b"oh\n")


def test_agent_that_dies_of_its_first_task_leaves_the_others_to_the_next_one() -> None:
    jobs = [job(b"bad", b"die"), job(b"next")]
    first, second = results_of(shell('[ "$payload" = die ] && exit 3; report r ok'), *jobs)
    assert first == crashed(jobs[0], b"the agent died: exit status 3")
    assert second == done(jobs[1], b"r")


def test_agent_that_is_killed_by_a_signal_is_told_so() -> None:
    one = job()
    assert results_of(shell("kill -SEGV $$"), one) == [
        crashed(one, b"the agent died: killed by SIGSEGV")
    ]


def test_report_before_its_death_counts() -> None:
    one = job()
    assert results_of(shell("report r ok; exit 1"), one) == [done(one, b"r")]


def test_half_a_line_before_its_death_does_not_count() -> None:
    one = job()
    assert results_of(shell("printf '%s\\tr\\tok' \"$id\"; exit 0"), one) == [
        crashed(one, b"the agent died: exit status 0")
    ]


def test_all_that_an_overfed_agent_held_is_charged() -> None:
    jobs = [job(b"one"), job(b"two")]
    code = "print('#hungry\\n#hungry', flush=True); input(); input(); raise SystemExit(2)"
    reason = b"the agent died: exit status 2"
    found = results_of((sys.executable, "-c", code), *jobs, overfeed=1)
    assert found == [crashed(one, reason) for one in jobs]


def test_agent_that_is_silent_for_too_long_with_a_task_is_ended(tmp_path: Path) -> None:
    clock, fifo, one = StillClock(), a_fifo(tmp_path / "fifo"), job()
    hangs = shell(f"trap '' TERM; sleep 1000 & echo $! > {fifo}; wait; wait")
    with a_pool(hangs, clock=clock, hunger_ns_max=60 * SECOND_NS) as pool:
        pool.start(one)
        pid = told_while_turning(pool, fifo)
        assert pool.wake_at_ns() == clock.now_ns + 60 * SECOND_NS
        clock.now_ns += 60 * SECOND_NS - 1
        assert pool.turn() == []
        clock.now_ns += 1
        assert pool.turn() == []  # it is asked to end
        assert pool.wake_at_ns() == clock.now_ns + KILL_GRACE_NS
        clock.now_ns += KILL_GRACE_NS
        assert turns(pool) == [crashed(one, b"the agent said nothing for 60 s")]
        assert has_ended(pid)


def test_comment_is_a_sign_of_life(gate: Gate) -> None:
    clock, one = StillClock(), job()
    works = shell(f"read _ < {gate.path}; echo '# still at it'; read _ < {gate.path}; report r ok")
    heard: list[Result] = []
    with a_pool(works, clock=clock, hunger_ns_max=60 * SECOND_NS) as pool:
        pool.on_output = lambda _, printed: heard.append(printed)
        pool.start(one)
        until_fed(pool)
        clock.now_ns += 59 * SECOND_NS
        gate.open()
        while not heard:
            wait(pool)
            assert pool.turn() == []
        clock.now_ns += 59 * SECOND_NS
        assert pool.turn() == []
        gate.open()
        assert turns(pool) == [done(one, b"r", b"still at it\n")]


def test_task_that_exceeds_its_time_limit_ends_its_agent(tmp_path: Path) -> None:
    clock, fifo = StillClock(), a_fifo(tmp_path / "fifo")
    one, other = job(b"slow", b"slow", time_limit_ns=5 * SECOND_NS), job(b"other")
    slow = f"[ $payload = slow ] && {{ echo $$ > {fifo}; sleep 1000; }}; report r ok"
    with a_pool(shell(slow), clock=clock) as pool:
        pool.start(one)
        pool.start(other)
        told_while_turning(pool, fifo)
        clock.now_ns += 5 * SECOND_NS
        assert turns(pool, 2) == [failed(one, b"time limit of 5 s exceeded"), done(other, b"r")]


def test_report_after_it_was_told_to_end_does_not_count(tmp_path: Path) -> None:
    clock, fifo = StillClock(), a_fifo(tmp_path / "fifo")
    one = job(time_limit_ns=5 * SECOND_NS)
    late = f"trap 'report r ok; exit 0' TERM; echo $$ > {fifo}; sleep 1000 & wait"
    with a_pool(shell(late), clock=clock) as pool:
        pool.start(one)
        told_while_turning(pool, fifo)
        clock.now_ns += 5 * SECOND_NS
        assert turns(pool) == [failed(one, b"time limit of 5 s exceeded")]


def test_cancelled_task_ends_its_agent_and_is_not_reported(tmp_path: Path) -> None:
    fifo, other = a_fifo(tmp_path / "fifo"), job(b"other")
    with a_pool(
        shell(f'[ "$id" = t/1 ] && {{ echo $$ > {fifo}; sleep 1000; }}; report r ok')
    ) as pool:
        pool.start(job())
        pool.start(job(b"waits"))
        pool.start(other)
        pid = told_while_turning(pool, fifo)
        pool.stop(b"waits", 1)
        pool.stop(b"t", 1)
        pool.stop(b"nobody", 1)
        assert pool.running() == [other]
        assert turns(pool) == [done(other, b"r")]
        assert has_ended(pid)


def test_cancelled_task_of_an_overfed_agent_leaves_it_the_others(gate: Gate) -> None:
    one = job(b"one")
    code = f"""
print('#hungry\\n#hungry', flush=True)
ids = [input().split('\\t')[0] for _ in range(2)]
open({gate.path!r}).readline()
print(f'{{ids[0]}}\\tr\\tok\\n{{ids[1]}}\\tr\\tok', flush=True)
input()
"""
    with a_pool((sys.executable, "-c", code), overfeed=1) as pool:
        pool.start(job(b"cancelled"))
        pool.start(one)
        while len(pool._waiting):  # noqa: SLF001
            wait(pool)
            pool.turn()
        pool.stop(b"cancelled", 1)
        assert pool.running() == [one]
        gate.open()
        assert turns(pool) == [done(one, b"r")]


def test_malformed_lines_are_logged_counted_and_shown_in_the_output(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, shown = job(), []
    reasons = [f"'{word}': neither a report nor a comment" for word in ("hello", "you")]
    with a_pool(shell("echo hello; echo you; report r ok")) as pool:
        pool.on_output = lambda _, printed: shown.append(printed.text)
        pool.start(one)
        (found,) = turns(pool)
        assert pool.malformed == 2
    assert (found.outcome, found.text) == (Outcome.DONE, b"r")
    assert found.output.decode() == "".join(f"malformed line: {one}\n" for one in reasons)
    assert shown[-1] == found.output
    assert [text.split(": ", 1)[1] for text in caplog.messages][:2] == reasons


def test_malformed_lines_of_an_agent_that_has_ended_are_counted() -> None:
    with a_pool(shell("echo hello; exit 3")) as pool:
        pool.start(job())
        turns(pool)
        assert pool.running() == []
        assert pool.malformed == 1


def test_agent_that_says_nothing_but_garbage_is_ended() -> None:
    one = job()
    (found,) = results_of(("sh", "-c", "echo '#hungry'; read _; exec yes"), one)
    assert found.outcome is Outcome.CRASHED
    assert found.text == (
        b"the agent does not speak the language: 'y': neither a report nor a comment"
    )
    at_the_limit = f"for n in $(seq {AGENT_MALFORMED_LINES_MAX}); do echo y; done; report r ok"
    assert results_of(shell(at_the_limit), one, job(b"two"))[1].text == b"r"


@pytest.mark.parametrize(("where", "size"), [("1", 1_000_000_000), ("2", 100_000_000)])
def test_gigabyte_without_a_newline_is_not_kept(where: str, size: int) -> None:
    one = job()
    floods = shell(f"head -c {size} /dev/zero >&{where}; report r ok")
    tracemalloc.start()
    (found,) = results_of(floods, one)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * LINE_BYTES_MAX
    if where == "1":
        reason = b"the agent wrote a line of more than %d bytes" % LINE_BYTES_MAX
        assert found == crashed(one, reason)
    else:
        whole = done(one, b"r", bytes(OUTPUT_TAIL_BYTES))
        assert found == structs.replace(whole, output_bytes_total=size)


def test_only_so_many_lines_a_second_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with a_pool(shell("seq 1000 >&2; report r ok"), clock=StillClock()) as pool:
        pool.start(job())
        turns(pool)
    assert len(caplog.messages) == AGENT_LOG_LINES_MAX + 1
    assert caplog.messages[-1].endswith(f"{1000 - AGENT_LOG_LINES_MAX} more lines were not logged")


def test_agent_that_closes_its_stdout_is_ended() -> None:
    clock, one = StillClock(), job()
    with a_pool(shell("exec >&-; sleep 1000"), clock=clock) as pool:
        pool.start(one)
        until_fed(pool)
        until_waiting_for(pool, clock.now_ns + AGENT_CLOSED_NS_MAX)
        clock.now_ns += AGENT_CLOSED_NS_MAX
        assert turns(pool) == [crashed(one, b"the agent closed its stdin or stdout")]


def test_agent_that_never_asks_is_ended_and_what_waits_is_given_back() -> None:
    clock, one = StillClock(), job()
    with a_pool(("sleep", "1000"), clock=clock) as pool:
        pool.start(one)
        pool.turn()
        assert pool.wake_at_ns() == clock.now_ns + CHILD_START_NS_MAX
        clock.now_ns += CHILD_START_NS_MAX
        assert turns(pool) == [
            refused(one, b"the agent did not say #hungry within 60 s of its start")
        ]


def test_agent_that_dies_at_once_is_started_less_and_less_often(tmp_path: Path) -> None:
    clock, one = StillClock(), job()
    dies = ("sh", "-c", f"echo >> {tmp_path}/starts; echo no key >&2; exit 1")
    delays_ns = []
    with a_pool(dies, slots=4, clock=clock) as pool:
        for _ in range(10):
            pool.start(one)
            assert turns(pool) == [refused(one, b"the agent died: exit status 1: no key")]
            pool.start(one)
            assert pool.turn() == []
            wake_ns = pool.wake_at_ns()
            assert wake_ns is not None
            delays_ns.append(wake_ns - clock.now_ns)
            assert pool.unstarted() == [one]
            pool._is_leaving = False  # noqa: SLF001  # it only took the task back
            clock.now_ns = wake_ns
    doubling = [AGENT_RESTART_NS << step for step in range(10)]
    assert delays_ns == [min(delay_ns, AGENT_RESTART_NS_MAX) for delay_ns in doubling]
    assert len((tmp_path / "starts").read_text()) == 10


def test_liar_that_asks_and_leaves_is_no_use_either() -> None:
    """Its task is charged if it may have seen it; either way it does not wait for ever."""
    one = job()
    (found,) = results_of(("sh", "-c", "exec <&-; echo '#hungry'"), one)
    assert found.outcome in (Outcome.CRASHED, Outcome.REFUSED)
    assert found.text == b"the agent died: exit status 0"


def test_task_of_which_an_agent_has_not_got_a_byte_goes_to_the_next_one(tmp_path: Path) -> None:
    jobs, clock = [job(b"one"), job(b"two")], StillClock()
    deaf = f"touch {tmp_path}/x; exec <&-; echo '#hungry'; exec sleep 1000"
    once = f"report $$ ok; [ -e {tmp_path}/x ] || {{ {deaf}; }}"
    with a_pool(shell(once), clock=clock) as pool:
        for one in jobs:
            pool.start(one)
        (first,) = turns(pool)
        until_waiting_for(pool, clock.now_ns + AGENT_CLOSED_NS_MAX)
        clock.now_ns += AGENT_CLOSED_NS_MAX
        (second,) = turns(pool)
    assert [(one.job, one.outcome) for one in (first, second)] == [
        (jobs[0], Outcome.DONE),
        (jobs[1], Outcome.DONE),
    ]
    assert first.text != second.text


def test_deaf_agent_gives_its_task_back() -> None:
    one, clock = job(), StillClock()
    with a_pool(("sh", "-c", "exec <&-; echo '#hungry'; exec sleep 1000"), clock=clock) as pool:
        pool.start(one)
        until_fed(pool)
        until_waiting_for(pool, clock.now_ns + AGENT_CLOSED_NS_MAX)
        clock.now_ns += AGENT_CLOSED_NS_MAX
        assert turns(pool) == [refused(one, b"the agent closed its stdin or stdout")]


def test_task_that_an_agent_has_begun_to_read_is_not_untouched() -> None:
    with selectors.DefaultSelector() as selector:
        feed = StdinPipe(selector)
        with feed.reading_end():
            feed.send(b"x" * (1 << 20), (b"begun", 1))
            feed.send(b"y", (b"next", 1))
            assert feed.unsent_keys() == [(b"next", 1)]
            feed.close()
            assert not feed.is_open()


def test_program_that_can_not_be_started_gives_its_tasks_back(tmp_path: Path) -> None:
    one, missing = job(), str(tmp_path / "missing")
    reason = f"can't start the agent {missing}: No such file or directory".encode()
    assert results_of((missing,), one) == [refused(one, reason)]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("", "--agent is empty"),
        ("'", "is no command: No closing quotation"),
        ("no-such-program --fast", "there is no program 'no-such-program' that can be run here"),
        ("./no-such-program", "give its path, and see that it is executable"),
    ],
)
def test_wrong_command_is_told(command: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_command(command)


def test_command_is_words_as_in_a_shell() -> None:
    assert read_command("sh -c 'echo  x'") == ("sh", "-c", "echo  x")


# How many there are.


def test_wide_task_waits_for_its_slots_and_nobody_goes_before_it(gate: Gate) -> None:
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


def test_leaving_gives_back_what_waits_and_finishes_what_is_held(gate: Gate) -> None:
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


def test_loop_tells_the_newest_progress_and_not_too_often() -> None:
    shop = Shop(slots=2)
    shop.create(b"a", b"b")
    shop.turn()
    first, second = shop.runner.jobs
    shop.loop.set_progress(first, Result(b"one\n"))
    shop.turn()
    assert shop.said.count(peer.PROGRESS) == 1
    shop.loop.set_progress(first, Result(b"one\ntwo\n"))
    shop.loop.set_progress(first, Result(b"one\ntwo\nthree\n"))
    shop.loop.set_progress(second, Result(b"x\n"))
    shop.turn()
    assert shop.said.count(peer.PROGRESS) == 1
    shop.pass_time(SECOND_NS)
    shop.turn()
    assert shop.said.count(peer.PROGRESS) == 2
    records = [one for one in shop.scheduler.take_records() if isinstance(one, Progressed)]
    assert [record.texts for record in records] == [
        [b"one\n"],
        [b"one\ntwo\nthree\n", b"x\n"],
    ]


def test_loop_tells_no_progress_of_what_is_over() -> None:
    shop = Shop()
    shop.create(b"a")
    shop.turn()
    (one,) = shop.runner.jobs
    shop.loop.set_progress(one, Result(b"first\n"))
    shop.turn()
    shop.loop.set_progress(one, Result(b"more\n"))
    shop.runner.finish()
    shop.turn()
    shop.loop.set_progress(one, Result(b"late\n"))
    shop.pass_time(SECOND_NS)
    shop.turn()
    assert shop.said.count(peer.PROGRESS) == 1


def test_loop_reports_when_to_try_again() -> None:
    shop = Shop()
    shop.create(b"a")
    shop.turn()
    one = shop.runner.jobs.pop()
    at_ns = shop.scheduler.at_ns + 90 * SECOND_NS
    shop.runner._done.append(JobResult(one, Outcome.RETRY_AT, b"later", b"", at_ns))  # noqa: SLF001
    shop.turn()
    task = shop.scheduler.ledger.tasks[b"a"]
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


def test_tasks_of_a_service_are_done_by_its_agents(tmp_path: Path) -> None:
    with a_host(tmp_path, str(EXAMPLES / "count.sh")) as (client, _):
        names = ["plain", "# odd \\name/1", "#hungry"]
        futures = [client.submit(name.encode() * 3, name=name, service="s") for name in names]
        assert [future.result(30) for future in futures] == [b"15", b"39", b"21"]


def test_what_an_agent_reports_is_what_the_broker_knows(tmp_path: Path) -> None:
    agent = command_of(shell('report "$lane" "$payload"'))
    with a_host(tmp_path, agent) as (client, _):
        said = {"lost": b"error no such user", "later": b"retryat +3600 greylisted"}
        for name, status in said.items():
            client.submit(status, name=name, service="s", retries=5)
        assert client.submit(b"ok", service="s", lane="disk-1").result(30) == b"disk-1"
        assert "no such user" in str(client.future("lost").exception(30))
        until(lambda: client.show("later")["state"] == "delayed")
        later, lost = client.show("later"), client.show("lost")
        assert (later["failures"], lost["failures"], lost["state"]) == (0, 1, "failed")


def test_comment_shows_while_the_task_runs(tmp_path: Path, gate: Gate) -> None:
    agent = command_of(shell(f"echo '# half of it'; read _ < {gate.path}; report r ok"))
    with a_host(tmp_path, agent) as (client, _):
        future = client.submit(b"x", name="a", service="s")
        until(lambda: client.show("a")["state"] == "leased")
        until(lambda: client.output("a") == b"half of it\n")
        gate.open()
        assert future.result(30) == b"r"


def test_agents_end_with_their_host_however_it_ends(tmp_path: Path) -> None:
    agent = command_of(shell("echo $$ > pid; sleep 1000"))
    with a_host(tmp_path, agent) as (client, host):
        client.submit(b"x", name="a", service="s")
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        host.kill()
        assert has_ended(int((tmp_path / "pid").read_text()))


def test_sigterm_lets_agents_finish_and_say_goodbye(tmp_path: Path, gate: Gate) -> None:
    agent = command_of(
        shell(f"echo > begun; read _ < {gate.path}; report r ok", after="echo > bye")
    )
    with a_host(tmp_path, agent) as (client, host):
        future = client.submit(b"x", name="a", service="s")
        until((tmp_path / "begun").exists)
        host.send(signal.SIGTERM)
        assert "leaves when 1 task is done" in host.error_line()
        gate.open()
        assert host.end()[0] == 0
        assert future.result(30) == b"r"
    assert (tmp_path / "bye").exists()


# The page.

PAGE = (EXAMPLES.parents[1] / "docs" / "dialects" / "hungry.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        f"within {CHILD_START_NS_MAX // SECOND_NS} s of its start",
        f"More than {AGENT_MALFORMED_LINES_MAX} such lines",
        f"the last {OUTPUT_TAIL_BYTES >> 10} KiB of it",
        f"the result, at most {RESULT_BYTES_MAX >> 20} MiB",
        f"told to finish has {AGENT_FINISH_NS_MAX // SECOND_NS} s",
        f"itself ends it has {KILL_GRACE_NS // SECOND_NS} s",
        f"nothing to do for {AGENT_IDLE_NS_MAX // SECOND_NS // 60} minutes",
        f"each time, up to {AGENT_RESTART_NS_MAX // SECOND_NS} s",
    ],
)
def test_figures_of_the_page_are_those_of_the_code(text: str) -> None:
    assert text in PAGE
    assert AGENT_HUNGER_NS_MAX == 3600 * SECOND_NS
    assert AGENT_RESTART_NS == AGENT_IDLE_NOTICE_NS == SECOND_NS // 10
