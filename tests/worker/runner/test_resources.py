"""Resources of tasks with real programs and calls: GPUs by id, variables, and memory limits."""

from pathlib import Path

import pytest

from taskyard.core.events import Outcome
from taskyard.core.resources import UNIT, Resources
from taskyard.worker.processes import MEMORY_CHECK_NS, ProcessRow, over_limit_text, process_tree
from taskyard.worker.programs import UNWATCHED_NS
from taskyard.worker.slots import DevicePool
from tests.worker.runner_harness import (
    HANG,
    SetClock,
    a_fifo,
    a_runner,
    call,
    command,
    has_ended,
    read_fifo,
    script,
    turn_until_quiet,
    turns,
)

ONE_GPU: Resources = ((b"gpus", UNIT),)

#: Touches memory in a child that left the session, beside some of its own. Then all hang.
ALLOCATE = """
import os, signal, sys
own = bytearray(30 << 20)
if not os.fork():
    os.setsid()
    more = bytearray(int(sys.argv[2]) << 20)
    with open(sys.argv[1], "w") as fifo:
        fifo.write(str(os.getpid()))
signal.pause()
"""


def memory(mebibytes: int) -> Resources:
    return ((b"memory", mebibytes << 20),)


def test_program_gets_its_resources_in_variables() -> None:
    needed = ((b"cpus", 15_000), (b"gpus", 2 * UNIT), (b"memory", 1 << 30))
    text = "$CUDA_VISIBLE_DEVICES/$TASKYARD_GPUS/$TASKYARD_CPUS/$TASKYARD_MEMORY"
    job = command("sh", "-c", f"echo {text}", resources=needed, env={"TASKYARD_CPUS": "9"})
    with a_runner(gpus=["3", "GPU-5", "7"]) as runner:
        runner.start(job)
        (done,) = turns(runner)
    assert done.text == b"3,GPU-5/3,GPU-5/1.5/1073741824\n"


def test_gpus_go_round_and_a_job_without_them_overtakes(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    show = ("sh", "-c", "echo $TASKYARD_GPUS")
    with a_runner(slots=3, gpus=["a", "b"]) as runner:
        runner.start(script(HANG, fifo, name=b"1", resources=ONE_GPU))
        runner.start(command(*show, name=b"both", resources=((b"gpus", 2 * UNIT),)))
        runner.start(command(*show, name=b"none"))
        runner.start(command(*show, name=b"2", resources=ONE_GPU))
        done = turns(runner, 2)
        assert sorted((one.job.name, one.text) for one in done) == [
            (b"2", b"b\n"),
            (b"none", b"\n"),
        ]
        read_fifo(fifo)
        runner.stop(b"1", 1)
        (last,) = turns(runner)
    assert (last.job.name, last.text) == (b"both", b"a,b\n")


@pytest.mark.usefixtures("home")
def test_call_with_gpus_has_a_process_of_its_own() -> None:
    with a_runner(allow=["yard"], gpus=["0"]) as runner:
        pids = []
        for resources in ((), ONE_GPU, (), ONE_GPU):
            runner.start(call("yard:look", "CUDA_VISIBLE_DEVICES", resources=resources))
            (done,) = turns(runner)
            assert done.text == (b'"0"' if resources else b"null")
            runner.start(call("yard:pid"))
            pids += [one.text for one in turns(runner)]
        turn_until_quiet(runner)
    assert len(set(pids)) == 1


def test_program_over_its_memory_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    with a_runner() as runner:
        runner.start(script(ALLOCATE, fifo, "50", resources=memory(70)))
        assert runner.turn() == []
        child = int(read_fifo(fifo))
        (done,) = turns(runner)
    assert done.outcome is Outcome.FAILED
    used, _, limit = done.text.decode().removeprefix("used ").partition(" MiB of ")
    assert (float(used) > 70, limit) == (True, "70 MiB")
    assert has_ended(child)


def test_program_within_its_memory_is_left_alone() -> None:
    """Each of eight processes shows 60 MiB, which they share."""
    code = """
import os, sys
own = bytearray(60 << 20)
for _ in range(7):
    if not os.fork():
        break
else:
    import time
    time.sleep(0.5)
    os.killpg(0, 9)
import signal
signal.pause()
"""
    with a_runner() as runner:
        runner.start(script(code, resources=memory(200)))
        (done,) = turns(runner)
    assert done.text == b"killed by SIGKILL"


@pytest.mark.usefixtures("home")
def test_call_over_its_memory_fails_and_the_next_one_runs() -> None:
    with a_runner(allow=["yard"]) as runner:
        runner.start(call("yard:hold", 60, resources=memory(50)))
        (done,) = turns(runner)
        assert done.text.startswith(b"used ")
        assert done.text.endswith(b" of 50 MiB")
        runner.start(call("yard:add", 1, 2))
        (done,) = turns(runner)
        assert done.text == b"3"


def test_memory_is_measured_only_with_a_limit(tmp_path: Path) -> None:
    fifo = a_fifo(tmp_path / "fifo")
    clock = SetClock()
    for resources, wait_ns in (((), None), (memory(900), MEMORY_CHECK_NS)):
        with a_runner(clock=clock) as runner:
            runner.start(script(HANG, fifo, resources=resources))
            runner.turn()
            read_fifo(fifo)
            clock.now_ns += UNWATCHED_NS
            runner.turn()
            wake_at_ns = runner.wake_at_ns()
            assert (wake_at_ns and wake_at_ns - clock.now_ns) == wait_ns


def test_used_memory_is_rounded_up() -> None:
    assert over_limit_text((4 << 30) + 1, 4 << 30) == b"used 4.1 GiB of 4 GiB"
    assert over_limit_text(4_509_715_661, 4 << 30) == b"used 4.3 GiB of 4 GiB"


def test_tree_has_the_session_and_its_children_anywhere() -> None:
    table = [(1, 0, 1, 0), (5, 1, 5, 0), (6, 5, 5, 0), (7, 1, 5, 0), (8, 7, 8, 0), (9, 1, 9, 0)]
    tree = process_tree([ProcessRow(*one) for one in table], 5)
    assert sorted(row.pid for row in tree) == [5, 6, 7, 8]


def test_fractions_share_the_fullest_device_that_has_room() -> None:
    pool = DevicePool(["a", "b", "c"])
    half, quarter = UNIT // 2, UNIT // 4
    assert pool.take(half) == {"a": half}
    assert pool.take(UNIT) == {"b": UNIT}
    assert pool.take(quarter) == {"a": quarter}
    assert pool.take(half) == {"c": half}
    assert not pool.has(UNIT)
    assert pool.take(2 * quarter) == {"c": half}
    pool.give_back({"b": UNIT, "c": UNIT})
    assert pool.take(UNIT + quarter) == {"b": UNIT, "a": quarter}


def test_more_than_the_pool_has_gets_all_of_it() -> None:
    pool = DevicePool(["a", "b"])
    assert pool.take(5 * UNIT) == {"a": UNIT, "b": UNIT}
    assert not pool.has(1)
    assert DevicePool().take(UNIT) == {}
