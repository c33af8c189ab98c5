"""Agents that die, hang, send garbage or can't be started."""

from __future__ import annotations

import selectors
import sys
import tracemalloc
from pathlib import Path

import pytest

from taskyard.core.blobs import Blob, Content, text_of
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.wire.hungry import LINE_BYTES_MAX
from taskyard.worker.agents.process import StdinPipe
from taskyard.worker.agents.runner import read_command
from taskyard.worker.jobs import (
    AGENT_CLOSED_NS_MAX,
    AGENT_LOG_LINES_MAX,
    AGENT_MALFORMED_LINES_MAX,
    AGENT_RESTART_NS,
    AGENT_RESTART_NS_MAX,
    CHILD_START_NS_MAX,
    KILL_GRACE_NS,
    OUTPUT_TAIL_BYTES,
)
from tests.worker.agents_harness import (
    Gate,
    StillClock,
    a_pool,
    crashed,
    done,
    failed,
    job,
    read_fifo_while_turning,
    refused,
    results_of,
    shell,
    until_fed,
    until_waiting_for,
)
from tests.worker.runner_harness import a_fifo, has_ended, turns, wait


def test_agent_that_dies_costs_an_attempt_and_is_replaced() -> None:
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


def test_signal_that_killed_an_agent_is_in_the_reason() -> None:
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
        pid = read_fifo_while_turning(pool, fifo)
        assert pool.wake_at_ns() == clock.now_ns + 60 * SECOND_NS
        clock.now_ns += 60 * SECOND_NS - 1
        assert pool.turn() == []
        clock.now_ns += 1
        assert pool.turn() == []  # SIGTERM is sent
        assert pool.wake_at_ns() == clock.now_ns + KILL_GRACE_NS
        clock.now_ns += KILL_GRACE_NS
        assert turns(pool) == [crashed(one, b"the agent sent nothing for 60 s")]
        assert has_ended(pid)


def test_comment_counts_as_activity(gate: Gate) -> None:
    clock, one = StillClock(), job()
    works = shell(f"read _ < {gate.path}; echo '# still at it'; read _ < {gate.path}; report r ok")
    heard: list[Content] = []
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
        read_fifo_while_turning(pool, fifo)
        clock.now_ns += 5 * SECOND_NS
        assert turns(pool, 2) == [failed(one, b"time limit of 5 s exceeded"), done(other, b"r")]


def test_report_after_sigterm_is_ignored(tmp_path: Path) -> None:
    clock, fifo = StillClock(), a_fifo(tmp_path / "fifo")
    one = job(time_limit_ns=5 * SECOND_NS)
    late = f"trap 'report r ok; exit 0' TERM; echo $$ > {fifo}; sleep 1000 & wait"
    with a_pool(shell(late), clock=clock) as pool:
        pool.start(one)
        read_fifo_while_turning(pool, fifo)
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
        pid = read_fifo_while_turning(pool, fifo)
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
        pool.on_output = lambda _, printed: shown.append(text_of(printed))
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


def test_agent_that_sends_only_garbage_is_ended() -> None:
    one = job()
    (found,) = results_of(("sh", "-c", "echo '#hungry'; read _; exec yes"), one)
    assert found.outcome is Outcome.CRASHED
    assert found.text == (
        b"too many malformed lines from the agent: 'y': neither a report nor a comment"
    )
    at_the_limit = f"for n in $(seq {AGENT_MALFORMED_LINES_MAX}); do echo y; done; report r ok"
    assert results_of(shell(at_the_limit), one, job(b"two"))[1].text == b"r"


@pytest.mark.parametrize(("where", "size"), [("1", 1_000_000_000), ("2", 30_000_000)])
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
        assert found == done(one, b"r", Blob(b"", size, bytes(OUTPUT_TAIL_BYTES)))


def test_log_lines_per_second_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    with a_pool(shell("seq 1000 >&2; report r ok"), clock=StillClock()) as pool:
        pool.start(job())
        turns(pool)
    assert len(caplog.messages) == AGENT_LOG_LINES_MAX + 1
    assert caplog.messages[-1].endswith(f"{1000 - AGENT_LOG_LINES_MAX} more lines not logged")


def test_agent_that_closes_its_stdout_is_ended() -> None:
    clock, one = StillClock(), job()
    with a_pool(shell("exec >&-; sleep 1000"), clock=clock) as pool:
        pool.start(one)
        until_fed(pool)
        until_waiting_for(pool, clock.now_ns + AGENT_CLOSED_NS_MAX)
        clock.now_ns += AGENT_CLOSED_NS_MAX
        assert turns(pool) == [crashed(one, b"the agent closed its stdin or stdout")]


def test_agent_that_is_never_hungry_is_ended_and_waiting_tasks_are_returned() -> None:
    clock, one = StillClock(), job()
    with a_pool(("sleep", "1000"), clock=clock) as pool:
        pool.start(one)
        pool.turn()
        assert pool.wake_at_ns() == clock.now_ns + CHILD_START_NS_MAX
        clock.now_ns += CHILD_START_NS_MAX
        assert turns(pool) == [refused(one, b"the agent sent no #hungry within 60 s of its start")]


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


def test_agent_that_is_hungry_and_exits_counts_as_failed() -> None:
    """Its task is charged if the agent may have read it. Either way it does not wait for ever."""
    one = job()
    (found,) = results_of(("sh", "-c", "exec <&-; echo '#hungry'"), one)
    assert found.outcome in (Outcome.CRASHED, Outcome.REFUSED)
    assert found.text == b"the agent died: exit status 0"


def test_unread_task_of_an_agent_goes_to_the_next_agent(tmp_path: Path) -> None:
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


def test_task_returns_from_an_agent_that_does_not_read() -> None:
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


def test_tasks_of_an_agent_that_can_not_start_are_returned(tmp_path: Path) -> None:
    one, missing = job(), str(tmp_path / "missing")
    reason = f"can't start agent {missing}: No such file or directory".encode()
    assert results_of((missing,), one) == [refused(one, reason)]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("", "--agent: empty command"),
        ("'", ": No closing quotation"),
        ("no-such-program --fast", "program 'no-such-program' not found or not executable"),
        ("./no-such-program", "program './no-such-program' not found or not executable"),
    ],
)
def test_invalid_agent_command_is_refused(command: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_command(command)


def test_command_is_split_like_in_a_shell() -> None:
    assert read_command("sh -c 'echo  x'") == ("sh", "-c", "echo  x")
