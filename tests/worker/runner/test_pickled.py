"""Pickled calls in a runner's children: permission, scripts, results and exceptions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.calls import pickled
from taskyard.calls.pickled import PICKLE, CallHeader
from taskyard.core.events import Outcome
from taskyard.worker.jobs import PICKLED_BYTES_MAX, Job, JobResult
from taskyard.worker.runner import ProcessRunner
from tests.client import executor_calls as calls
from tests.worker.runner_harness import RealClock, turns

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessRunner]:
    """Yield a runner with one slot, in a directory of the test."""
    monkeypatch.chdir(tmp_path)
    running = ProcessRunner(1, [], RealClock(), allow_pickle=True)
    yield running
    running.close()


HERE = CallHeader(path=(os.getcwd(),))  # noqa: PTH109


def job(function: Any, *args: Any, header: CallHeader = HERE, service: bytes = PICKLE) -> Job:
    payload = pickled.encode_pickled_call(pickled.pickle_call(function, args, {}).pickle, header)
    return Job(b"t", 1, service, payload)


def done(runner: ProcessRunner, one: Job) -> JobResult:
    runner.start(one)
    (came,) = turns(runner)
    return came


def test_result_is_pickled(runner: ProcessRunner) -> None:
    came = done(runner, job(divmod, 7, 2))
    assert (came.outcome, pickled.unpickle(came.text)) == (Outcome.DONE, (3, 1))


@pytest.mark.parametrize("service", [PICKLE, b"cpu"])
def test_pickled_call_is_refused_unless_it_is_allowed(service: bytes) -> None:
    runner = ProcessRunner(1, ["builtins"], RealClock())
    try:
        came = done(runner, job(pow, 2, 3, service=service))
    finally:
        runner.close()
    assert came.outcome is Outcome.FAILED_FINAL
    assert b"start the worker with --allow-pickle" in came.text


def test_exception_is_last_in_the_output(runner: ProcessRunner) -> None:
    came = done(runner, job(calls.refuse_odd, 1))
    assert (came.outcome, came.text) == (Outcome.FAILED, b"tests.client.executor_calls.Odd: 1")
    assert came.output.startswith(b"Traceback")
    error, read_fifo = pickled.decode_exception(came.output)
    assert isinstance(error, calls.Odd)
    assert "raise Odd(number)" in read_fifo


def test_exit_is_an_exception_like_others(runner: ProcessRunner) -> None:
    came = done(runner, job(calls.raise_this, SystemExit(3)))
    error, _ = pickled.decode_exception(came.output)
    assert isinstance(error, SystemExit)
    first, second = (pickled.unpickle(done(runner, job(os.getpid)).text) for _ in range(2))
    assert first == second


def test_output_is_kept(runner: ProcessRunner) -> None:
    assert done(runner, job(calls.print_and_double, 1)).output == b"doubling\nhere\n"


def test_result_up_to_the_limit_is_taken(runner: ProcessRunner) -> None:
    frame = len(pickled.pickle_result(bytes(1 << 20))) - (1 << 20)
    assert done(runner, job(calls.make, PICKLED_BYTES_MAX - frame)).outcome is Outcome.DONE
    came = done(runner, job(calls.make, PICKLED_BYTES_MAX))
    assert came.outcome is Outcome.FAILED_FINAL
    assert f"at most {PICKLED_BYTES_MAX}".encode() in came.text


def test_directories_of_the_caller_are_searched(runner: ProcessRunner, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "beside.py").write_text("def double(number):\n    return 2 * number\n")
    call = b"cbeside\ndouble\n(K\x04t}\x87."
    lost = Job(b"t", 1, PICKLE, pickled.encode_pickled_call(call, CallHeader()))
    assert b"can't unpickle the call: ModuleNotFoundError" in done(runner, lost).text
    found = pickled.encode_pickled_call(call, CallHeader(path=(str(tmp_path / "there"),)))
    assert pickled.unpickle(done(runner, Job(b"t", 1, PICKLE, found)).text) == 8


def test_malformed_pickle_is_refused_and_the_child_survives(runner: ProcessRunner) -> None:
    first = pickled.unpickle(done(runner, job(os.getpid)).text)
    broken = Job(b"t", 1, PICKLE, pickled.encode_pickled_call(b"nonsense", CallHeader()))
    came = done(runner, broken)
    assert came.outcome is Outcome.FAILED_FINAL
    assert b"can't unpickle the call: " in came.text
    assert pickled.unpickle(done(runner, job(os.getpid)).text) == first
