"""`map` and `run` without a running broker: their own one, shared, taken over, stopped, killed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from taskyard.campaign.shell_lines import line_name
from taskyard.cli.offline import OfflineClient
from taskyard.process.state_files import (
    LOCAL_FILE,
    LOCK_FILE,
    LocalLock,
    MapLock,
    is_orphaned,
    lock_holder,
)
from tests.kit.processes import (
    AT_THE_GATE,
    Broker,
    Running,
    all_children_of,
    campaign,
    is_alive,
    marking,
    marks,
    run_here,
    until,
)

if TYPE_CHECKING:
    from pathlib import Path

#: Marks a line, prints it, and waits for the gate if it is `slow`.
SCRIPT = f'echo $1 >> marks; echo $1; [ "$1" != slow ] || {AT_THE_GATE}'


def mapping(directory: Path, name: str, *options: str) -> Running:
    """Start a `map` of lines on its stdin."""
    words = ("map", "--campaign", name, "-j", "2", *options, "--", "sh", "-c", SCRIPT, "sh", "{}")
    return Running(directory, *words)


def is_free(directory: Path) -> bool:
    """Return whether no process uses the state."""
    files = (LOCAL_FILE, LOCK_FILE)
    return all(lock_holder(directory / ".taskyard" / file) is None for file in files)


def counts(directory: Path) -> dict[str, int]:
    """Return the counts of a stopped state without empty states."""
    with OfflineClient(directory / ".taskyard") as stopped:
        return {name: number for name, number in stopped.status()["counts"].items() if number}


def written(directory: Path, text: str) -> str:
    (directory / "lines").write_text(text)
    return "lines"


# Alone.


def test_map_starts_its_own_broker_and_stops_it(tmp_path: Path) -> None:
    words = ["map", "--lines", written(tmp_path, "a\nb\n"), "--campaign", "c", "--wait"]
    code, out, err = run_here(tmp_path, *words, "--workers", "2", "--", "echo", "{}")
    assert (code, out, err) == (0, "a\nb\n", "campaign c: 2 tasks: 2 done\n")
    assert is_free(tmp_path)
    assert not is_orphaned(tmp_path / ".taskyard")
    assert counts(tmp_path) == {"done": 2}
    (tmp_path / "sub").mkdir()
    code, out, _ = run_here(tmp_path / "sub", "show", line_name("a"))
    assert code == 0
    assert line_name("a") in out


def test_map_in_a_task_of_map_has_workers_of_its_own(tmp_path: Path) -> None:
    inner = f"{shlex.quote(sys.executable)} -m taskyard.cli map -q echo ::: p q"
    code, out, err = run_here(tmp_path, "map", "-q", "-j", "1", "--", "sh", "-c", inner, ":::", "1")
    assert (code, out, err) == (0, "p\nq\n", "")
    assert counts(tmp_path) == {"done": 1}


def test_interrupted_map_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    with mapping(tmp_path, "c") as running:
        running.write("a\nslow\n")
        assert running.line() == "a"
        until(lambda: len(marks(tmp_path)) == 2)
        code, _, err = running.send(signal.SIGINT).end()
    assert code == 130
    resume = "unfinished tasks are kept: the same command resumes"
    assert err.endswith(f"taskyard: interrupted; {resume}\n")
    assert is_free(tmp_path)
    (tmp_path / "gate").touch()
    lines = written(tmp_path, "a\nslow\n")
    words = ["map", "--campaign", "c", "--lines", lines, "-q", "--", "sh", "-c", SCRIPT, "sh", "{}"]
    assert run_here(tmp_path, *words) == (0, "a\nslow\n", "")
    assert sorted(marks(tmp_path)) == ["a", "slow", "slow"]


def test_hangup_cancels_the_tasks_of_a_map_without_a_name(tmp_path: Path) -> None:
    words = ("map", "-j", "1", "--", "sh", "-c", SCRIPT, "sh", "{}", ":::", "slow", "next")
    with Running(tmp_path, *words) as running:
        until(lambda: marks(tmp_path))
        code, _, err = running.send(signal.SIGHUP).end()
    assert (code, "cancelled 2 tasks\n" in err) == (130, True)
    assert (counts(tmp_path), is_free(tmp_path)) == ({"cancelled": 2}, True)


@pytest.mark.parametrize(
    ("options", "left", "message"),
    [
        ((), "cancelled", "unfinished tasks are cancelled (give --campaign to resume them later)"),
        (("--campaign", "c"), "ready", "unfinished tasks are kept: the same command resumes"),
    ],
)
def test_reader_that_stops_ends_map_like_an_interrupt(
    options: tuple[str, ...], left: str, message: str, tmp_path: Path
) -> None:
    # The line of `b` ends it, when `slow` runs.
    script = f'{SCRIPT}; [ "$1" != b ] || until grep -q slow marks; do sleep 0.02; done'
    words = ("map", "-j", "2", *options, "--", "sh", "-c", script, "sh", "{}")
    with Running(tmp_path, *words) as running:
        running.write("a\n")
        assert running.line() == "a"
        assert running.process.stdout is not None
        running.process.stdout.close()
        running.write("b\nslow\nlast\n")
        running.hang_up()
        code, _, err = running.end()
    assert code == 141
    assert f"taskyard: stdout was closed; {message}" in err
    assert is_free(tmp_path)
    assert counts(tmp_path).keys() == {"done", left}


def test_stopped_map_prints_tasks_that_finish_and_counts_the_others(tmp_path: Path) -> None:
    with mapping(tmp_path, "c", "--finish-running") as running:
        running.write("slow\nslow\nlast\n")
        until(lambda: marks(tmp_path) == ["slow", "slow"])
        running.send(signal.SIGINT)
        assert running.error_line() == "waiting for running tasks (Ctrl-C ends them)"
        (tmp_path / "gate").touch()
        code, out, err = running.end()
    assert (code, out) == (130, "slow\nslow\n")
    assert err.startswith("campaign c: 3 tasks: 2 done, 1 unfinished\n")
    script = '[ "$0" != bad ] || exit 1; exec sleep 600'
    words = ("--campaign", "d", "--max-failures", "1", "--json", "sh", "-c", script)
    code, out, _ = run_here(tmp_path, "map", *words, ":::", "slow", "bad", "last")
    assert (code, json.loads(out)["counts"]) == (1, {"failed": 1, "unfinished": 2})


def test_tasks_of_other_campaigns_run_too_and_are_reported(tmp_path: Path) -> None:
    with Broker(tmp_path):
        assert run_here(tmp_path, "submit", "--name", "old", "--", "true")[0] == 0
    file = campaign(tmp_path, [marking("new")])
    code, _, err = run_here(tmp_path, "run", file)
    assert code == 0
    assert "1 other unfinished task will run too (see `taskyard list`)\n" in err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--no-wait", "--", "echo", "{}"], 3, "no broker is running, and --no-wait leaves the "),
        (["--payload", "{}"], 3, "--payload needs a worker of your own (start `taskyard up`)"),
        (["--call", "math:sqrt"], 2, "--call math:sqrt: is not allowed (give --allow math)"),
        (["-j", "1", "--slots", "2", "--", "echo", "{}"], 2, "a local worker has 1 (give -j 2)"),
        (["--broker", "ipc://none", "--broker-timeout", "0.2s", "--", "echo", "{}"], 3, "no answ"),
    ],
)
def test_tasks_that_could_never_run_start_nothing(
    options: list[str], code: int, message: str, tmp_path: Path
) -> None:
    found, out, err = run_here(tmp_path, "map", "--lines", written(tmp_path, "a\n"), *options)
    assert (found, out) == (code, "")
    assert message in err
    assert not (tmp_path / ".taskyard").exists()


def test_broker_that_does_not_start_ends_map_with_its_exit_code(tmp_path: Path) -> None:
    state = tmp_path / ".taskyard"
    state.mkdir(mode=0o700)
    (state / "journal.sqlite").write_bytes(b"damaged" * 1000)
    words = ["map", "--lines", written(tmp_path, "a\n"), "--", "echo", "{}"]
    with Running(tmp_path, *words) as running:
        code, out, err = running.end()
    assert (code, out) == (6, "")
    assert "journal" in err
    assert is_free(tmp_path)


# Together.


def test_commands_that_start_at_once_share_a_broker(tmp_path: Path) -> None:
    with mapping(tmp_path, "a") as one, mapping(tmp_path, "b") as other:
        for running in (one, other):
            running.write("1\n2\n")
            running.hang_up()
        outcomes = [running.end() for running in (one, other)]
    assert [(code, out) for code, out, _ in outcomes] == [(0, "1\n2\n")] * 2
    assert counts(tmp_path) == {"done": 4}
    assert sorted(marks(tmp_path)) == ["1", "1", "2", "2"]


def test_broker_that_ends_with_its_command_is_replaced_by_another_command(tmp_path: Path) -> None:
    with mapping(tmp_path, "owner") as owner:
        owner.write("slow\n")
        until(lambda: marks(tmp_path))
        with mapping(tmp_path, "other") as other:
            other.write("before\n")
            assert other.line() == "before"
            (tmp_path / "gate").touch()
            owner.hang_up()
            assert owner.end()[0] == 0
            other.write("after\n")
            assert other.line() == "after"
            assert len(all_children_of(other)) == 2
            other.hang_up()
            code, _, err = other.end()
    assert code == 0
    assert err.startswith("using the running broker, without --jobs\n")
    assert "the broker has ended with its command, starting another\n" in err
    assert marks(tmp_path) == ["slow", "before", "after"]
    assert counts(tmp_path) == {"done": 3}


def test_killed_command_leaves_no_processes_and_another_one_continues(tmp_path: Path) -> None:
    file = campaign(tmp_path, [marking("task", AT_THE_GATE)])
    with mapping(tmp_path, "owner") as owner:
        owner.write("slow\n")
        until(lambda: marks(tmp_path))
        children = all_children_of(owner)
        assert len(children) == 2
        with Running(tmp_path, "run", file) as other:
            until(lambda: "task" in marks(tmp_path))
            owner.kill()
            until(lambda: not any(map(is_alive, children)))
            until(lambda: marks(tmp_path).count("task") == 2)
            (tmp_path / "gate").touch()
            assert other.end()[0] == 0
    assert is_free(tmp_path)
    words = ["map", "--campaign", "owner", "--lines", written(tmp_path, "slow\n"), "-q", "--"]
    assert run_here(tmp_path, *words, "sh", "-c", SCRIPT, "sh", "{}") == (0, "slow\n", "")


def test_tasks_of_a_killed_map_without_a_name_are_cancelled_by_the_next(tmp_path: Path) -> None:
    """Not those of a map that is alive, and not those that a broker was left with."""
    with Broker(tmp_path):
        assert run_here(tmp_path, "map", "-q", "--no-wait", "true", ":::", "kept")[0] == 0
    words = ("map", "-j", "3", "--", "sh", "-c", SCRIPT, "sh", "{}", ":::", "slow", "slow")
    with Running(tmp_path, *words) as killed:
        until(lambda: marks(tmp_path).count("slow") == 2)
        killed.kill()
    alive = MapLock(tmp_path / ".taskyard", "map-alive")
    code, out, err = run_here(tmp_path, "map", "echo", ":::", "x")
    alive.release()
    assert (code, out) == (0, "x\n")
    assert err.startswith("cancelled 2 tasks of an interrupted run\n")
    assert counts(tmp_path) == {"done": 2, "cancelled": 2}
    assert marks(tmp_path) == ["slow", "slow"]
    assert not [*(tmp_path / ".taskyard").glob("*.map")]


def test_broker_that_is_stopped_ends_all_commands_that_use_it(tmp_path: Path) -> None:
    with mapping(tmp_path, "owner") as owner:
        owner.write("slow\n")
        until(lambda: marks(tmp_path))
        with mapping(tmp_path, "other") as other:
            other.write("slow\n")
            until(lambda: len(marks(tmp_path)) == 2)
            assert run_here(tmp_path, "down", "--grace", "0.1s")[0] == 4
            for running in (owner, other):  # they wait for more input
                code, _, err = running.end()
                assert (code, "the broker has ended (run it again to resume)" in err) == (130, True)
    assert is_free(tmp_path)


# The lock.


def test_lock_has_one_holder_and_records_its_end(tmp_path: Path) -> None:
    lock = LocalLock.take(tmp_path)
    assert lock is not None
    lock.write_holder()
    assert LocalLock.take(tmp_path) is None
    assert lock_holder(tmp_path / LOCAL_FILE) == os.getpid()
    lock.close()  # as if it was killed
    assert is_orphaned(tmp_path)
    for is_stopped in (True, False):
        lock = LocalLock.take(tmp_path)
        assert lock is not None
        lock.release(stopped=is_stopped)
        assert not is_orphaned(tmp_path)
        again = LocalLock.take(tmp_path)
        assert again is not None
        assert again.was_stopped is is_stopped
        again.close()


def test_map_stops_after_too_many_failures_and_cancels_the_rest(tmp_path: Path) -> None:
    script = ("sh", "-c", 'eval "$1"', "sh", "{}")
    words = ["map", "-j", "1", "--max-failures", "1", "--", *script]
    values = [":::", "exit 3", "exec sleep 600", "true"]
    code, _, err = run_here(tmp_path, *words, *values)
    assert code == 1
    stopped = "taskyard: stopped: 1 task failed (--max-failures), the latest: task map-"
    lines = err.splitlines()
    assert [line[: len(stopped)] for line in lines].count(stopped) == 1
    assert "cancelled 2 tasks" in lines
    assert lines[-2].endswith(": 3 tasks: 1 failed, 2 cancelled")
    assert counts(tmp_path) == {"failed": 1, "cancelled": 2}
