"""An executor takes the arguments of a `ProcessPoolExecutor`, and fails as one."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

import pytest

from taskyard import Executor, ExecutorBroken, TaskFailed, UserError
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


# Output.


def test_prints_and_logs_of_calls_arrive_at_once_and_are_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Executor(1) as own:
        future = own.submit(calls.print_to_both, "hello")
        assert future.result(PATIENCE_SECONDS) == 2
        assert capfd.readouterr() == ("to stdout: hello\n", "to stderr: hello\n")
        kept = own._core.client.output(future.full_name)  # noqa: SLF001
        assert kept == b"to stdout: hello\nto stderr: hello\n"


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
