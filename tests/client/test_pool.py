"""An executor takes the arguments of a `ProcessPoolExecutor`, and fails as one."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from taskyard import ClientClosed, Executor, ExecutorBroken, TaskFailed, UserError, testing
from taskyard.process import cluster
from tests.client import executor_calls as calls
from tests.kit.processes import PATIENCE_SECONDS, is_alive, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(2) as shared:
        yield shared


# Arguments.


def test_first_argument_is_the_number_of_processes(executor: Executor) -> None:
    assert executor._max_workers == 2  # noqa: SLF001


@pytest.mark.parametrize("number", [0, -1])
def test_pool_without_processes_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="max_workers must be greater than 0"):
        Executor(number)


@pytest.mark.parametrize("number", [True, np.int64(1)])
def test_number_of_processes_is_any_integer(number: Any) -> None:
    with Executor(number) as own:
        assert own._max_workers == 1  # noqa: SLF001
        assert own.submit(abs, -1).result(PATIENCE_SECONDS) == 1


def test_number_of_processes_has_a_limit() -> None:
    with pytest.raises(ValueError, match="max_workers must be <= 100000"):
        Executor(100_001)


def test_number_of_processes_is_given_once() -> None:
    with pytest.raises(TypeError, match="max_workers: given twice"):
        Executor(2, max_workers=2)


def test_fork_context_is_a_warning_because_no_memory_is_inherited() -> None:
    with pytest.warns(RuntimeWarning, match="do not inherit the memory"):
        Executor(1, multiprocessing.get_context("fork")).shutdown()


# Map.


def counted(numbers: range, taken: list[int]) -> Iterator[int]:
    """Yield numbers, and add them to `taken` when they are taken."""
    for number in numbers:
        taken.append(number)
        yield number


def test_map_with_a_buffer_takes_arguments_as_values_are_read(executor: Executor) -> None:
    taken: list[int] = []
    values = executor.map(abs, counted(range(10), taken), buffersize=2)
    assert taken == [0, 1]
    assert next(values) == 0
    assert taken == [0, 1, 2]
    assert list(values) == [*range(1, 10)]


def test_buffer_counts_chunks(executor: Executor) -> None:
    taken: list[int] = []
    values = executor.map(abs, counted(range(7), taken), chunksize=2, buffersize=1)
    assert taken == [0, 1]
    assert list(values) == [*range(7)]


@pytest.mark.parametrize(("buffersize", "error"), [(0, ValueError), ("2", TypeError)])
def test_invalid_buffer_is_refused(
    executor: Executor, buffersize: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="buffersize must be"):
        executor.map(abs, [1], buffersize=buffersize)


# Failures.


def test_call_that_ends_its_process_is_a_broken_pool_for_its_caller(executor: Executor) -> None:
    error = executor.submit(os._exit, 3).exception(PATIENCE_SECONDS)
    assert isinstance(error, BrokenProcessPool)
    assert isinstance(error, TaskFailed)
    assert executor.submit(abs, -1).result(PATIENCE_SECONDS) == 1


def test_broken_executor_is_a_broken_pool() -> None:
    assert issubclass(ExecutorBroken, BrokenProcessPool)


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_call_that_can_not_be_unpickled_is_a_broken_pool_for_its_caller(
    executor: Executor, kind: type[BaseException]
) -> None:
    future = executor.submit(calls.size, calls.Unreadable(kind))  # type: ignore[arg-type]
    error = future.exception(PATIENCE_SECONDS)
    assert isinstance(error, BrokenProcessPool)
    assert f"can't unpickle the call: {kind.__name__}" in str(error)


def test_what_can_not_be_pickled_is_a_pickling_error(executor: Executor) -> None:
    argument = executor.submit(calls.sorted_pairs, calls.Unpicklable()).exception(PATIENCE_SECONDS)
    result = executor.submit(calls.Unpicklable).exception(PATIENCE_SECONDS)
    assert isinstance(argument, pickle.PicklingError)
    assert isinstance(result, pickle.PicklingError)
    assert "result of type Unpicklable can't be pickled: never" in str(result)


def test_cause_of_an_exception_has_the_traceback_as_text(executor: Executor) -> None:
    error = executor.submit(calls.refuse_odd, 3).exception(PATIENCE_SECONDS)
    assert error is not None
    assert "raise Odd(number)" in error.__cause__.tb  # type: ignore[union-attr]


# Processes.


def test_process_is_replaced_after_its_last_task() -> None:
    with Executor(1, max_tasks_per_child=2) as own:
        pids = [own.submit(os.getpid).result(PATIENCE_SECONDS) for _ in range(5)]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 1]
        until(lambda: not any(map(is_alive, {*pids} - {pids[-1]})))


def test_replaced_process_exits_in_order(tmp_path: Path) -> None:
    left = tmp_path / "left"
    with Executor(1, max_tasks_per_child=1) as own:
        own.submit(os.getpid).result(PATIENCE_SECONDS)  # the next process is a new interpreter
        own.submit(atexit.register, left.touch).exception(PATIENCE_SECONDS)
        until(left.exists)


@pytest.mark.parametrize(
    ("calls_max", "context", "error", "text"),
    [
        (0, "spawn", ValueError, "must be >= 1"),
        ("1", "spawn", TypeError, "must be an integer"),
        (1, "fork", ValueError, "incompatible with the 'fork' start method"),
    ],
)
@pytest.mark.filterwarnings("ignore:mp_context 'fork'")
def test_invalid_number_of_tasks_is_refused(
    calls_max: Any, context: str, error: type[Exception], text: str
) -> None:
    mp_context = multiprocessing.get_context(context)
    with pytest.raises(error, match=text):
        Executor(1, mp_context, max_tasks_per_child=calls_max)


def test_tasks_of_processes_that_are_not_its_own_are_not_limited(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only for an executor that starts its own broker"):
        Executor(state=tmp_path, max_tasks_per_child=1)


# Initializers.


def test_initializer_is_called_once_in_each_process(tmp_path: Path) -> None:
    with Executor(2, None, calls.append_pid, (str(tmp_path / "pids"),)) as own:
        own.submit(os._exit, 1).exception(PATIENCE_SECONDS)
        pids = {*own.map(calls.pid_of, range(20))}
    called = (tmp_path / "pids").read_text().split()
    assert len(called) == len({*called})
    assert pids <= {*map(int, called)}


SCRIPT = """
    import os, taskyard

    DATA = None
    CACHE = {}

    def initialize(value):
        global DATA, LATER
        DATA, LATER = value, value + 1
        CACHE["value"] = value

    def double():
        return 2 * DATA

    def work(_):
        return DATA, LATER, CACHE["value"], double()

    with taskyard.Executor(1, initializer=initialize, initargs=(5,)) as executor:
        print(list(executor.map(work, range(2))), executor.submit(lambda: DATA).result())
        executor.submit(os._exit, 1).exception()
        print(executor.submit(work, 0).result())
"""


@pytest.mark.parametrize("is_session", [False, True])
def test_calls_see_what_an_initializer_set(tmp_path: Path, *, is_session: bool) -> None:
    """In a script, and in a session, which has no file."""
    script = tmp_path / "script.py"
    script.write_text(dedent(SCRIPT))
    argv = [sys.executable, "-" if is_session else str(script)]
    with script.open() as stdin:
        done = subprocess.run(argv, stdin=stdin, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == "[(5, 6, 5, 10), (5, 6, 5, 10)] 5\n(5, 6, 5, 10)\n"


def test_functions_registered_by_calls_are_called_at_the_end(tmp_path: Path) -> None:
    with Executor(1) as own:
        own.submit(atexit.register, (tmp_path / "left").touch).result(PATIENCE_SECONDS)
    assert (tmp_path / "left").exists()


def test_initializer_that_raises_breaks_the_executor(capfd: pytest.CaptureFixture[str]) -> None:
    with Executor(2, initializer=calls.refuse_odd, initargs=(3,)) as own:
        futures = [own.submit(abs, n) for n in range(3)]
        for future in futures:
            error = future.exception(PATIENCE_SECONDS)
            assert isinstance(error, BrokenProcessPool)
            assert "its initializer raised Odd: 3" in str(error)
        with pytest.raises(BrokenProcessPool):
            own.submit(abs, 1)
    assert "Exception in initializer:" in capfd.readouterr().err


def test_initializer_is_called_by_the_workers_of_a_broker() -> None:
    with testing.broker() as broker, broker.worker():
        with Executor(broker.endpoint, None, calls.keep, (7,)) as own:
            assert own.submit(calls.kept).result(PATIENCE_SECONDS) == 7
        with Executor(broker.endpoint, None, calls.refuse_odd, (3,)) as own:
            error = own.submit(calls.kept).exception(PATIENCE_SECONDS)
            assert isinstance(error, BrokenProcessPool)


@pytest.mark.parametrize(
    ("initializer", "initargs", "error"),
    [("abs", (), TypeError), (abs, (calls.Unpicklable(),), pickle.PicklingError)],
)
def test_initializer_that_can_not_be_called_is_refused(
    initializer: Any, initargs: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Executor(1, initializer=initializer, initargs=initargs)


# Output.


def test_prints_and_logs_of_calls_arrive_at_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Executor(1) as own:
        future = own.submit(calls.print_to_both, "hello")
        assert future.result(PATIENCE_SECONDS) == 2
        assert capfd.readouterr() == ("to stdout: hello\n", "to stderr: hello\n")


def test_output_arrives_before_the_call_ends(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with Executor(1) as own:
        future = own.submit(calls.print_and_read, "now", str(fifo))
        printed = ""
        while not printed:
            printed = capfd.readouterr().out
        assert (printed, future.done()) == ("now\n", False)
        fifo.write_text("")
        future.result(PATIENCE_SECONDS)


def test_programs_of_a_call_print_and_its_traceback_is_not_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Executor(1) as own:
        assert own.submit(os.system, "echo out; echo err >&2").result(PATIENCE_SECONDS) == 0
        assert own.submit(calls.refuse_odd, 3).exception(PATIENCE_SECONDS) is not None
    assert capfd.readouterr() == ("out\n", "err\n")


def test_output_of_a_call_in_a_new_interpreter_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    with Executor(1) as own:
        own.submit(os._exit, 1).exception(PATIENCE_SECONDS)
        assert own.submit(calls.print_to_both, "again").result(PATIENCE_SECONDS) == 2
    assert capfd.readouterr() == ("to stdout: again\n", "to stderr: again\n")


# Forks of the program.


def test_forked_process_does_not_delay_the_end_of_the_executor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "KILL_SECONDS", PATIENCE_SECONDS)
    executor = Executor(1)
    with multiprocessing.get_context("fork").Manager():  # its process lives on
        began = time.monotonic()
        executor.shutdown()
        assert time.monotonic() - began < PATIENCE_SECONDS


def test_executor_in_a_forked_process_refuses_calls_and_ends_nothing() -> None:
    with Executor(1) as executor:
        assert executor.submit(pow, 2, 3).result(PATIENCE_SECONDS) == 8
        child = os.fork()
        if not child:
            status = 1
            try:
                signal.alarm(int(PATIENCE_SECONDS))
                with pytest.raises(ClientClosed, match="before this process was forked"):
                    executor.submit(pow, 2, 4).result(PATIENCE_SECONDS)
                executor.shutdown()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert executor.submit(pow, 2, 5).result(PATIENCE_SECONDS) == 32
