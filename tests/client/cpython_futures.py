"""Run the tests of one class of CPython's `test_concurrent_futures` on `taskyard.Executor`.

Started as `python -m tests.client.cpython_futures CLASS [TEST]...`, with a `PYTHONPATH` in which
the package `test` is CPython's. Without a TEST, all of the class are run. Prints a line with the
name and the outcome of each test. The tests read private attributes of a process pool, which `Pool`
maps to those of an executor.
"""

# ruff: noqa: SLF001 - see above

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import time
import unittest
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import taskyard

cpython: Any = importlib.import_module("test.test_concurrent_futures")

#: Until the processes of an executor have started, or have ended.
_SECONDS_MAX = 60


class Process:
    """A process of calls, with the methods of `multiprocessing.Process` that the tests use."""

    def __init__(self, pid: int) -> None:
        self._pid, self._pidfd = pid, os.pidfd_open(pid)

    def terminate(self) -> None:
        os.kill(self._pid, signal.SIGTERM)

    def join(self) -> None:
        """Wait until it has ended. A pidfd is readable then."""
        assert select.select([self._pidfd], [], [], _SECONDS_MAX)[0]


class Pool(taskyard.Executor):
    """An executor with the private attributes of a process pool."""

    @property
    def _broken(self) -> str:
        return self._core._broken

    @property
    def _executor_manager_thread(self) -> Any:
        return self._core._settler

    @property
    def _call_queue(self) -> Any:
        """Return the thread that reads from the processes: it has to end with the executor."""
        assert self._core._supervisor is not None
        reader = self._core._supervisor._reader
        return SimpleNamespace(join_thread=partial(reader.join, _SECONDS_MAX))

    @property
    def _processes(self) -> dict[int, Process]:
        """The processes of calls, when all have started."""
        assert self._core._supervisor is not None
        worker = self._core._supervisor.pids()[1]
        until, found = time.monotonic() + _SECONDS_MAX, list[str]()
        while len(found) < self._max_workers and time.monotonic() < until:
            time.sleep(0.01)
            found = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        return {int(pid): Process(int(pid)) for pid in found}


class Outcomes(unittest.TestResult):
    """Prints the outcome of each test, and why it failed."""

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802  # unittest's
        _print(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802  # unittest's
        _print(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802  # unittest's
        _print(test, "failed", repr(err[1]))

    addError = addFailure  # noqa: N815  # unittest's


def _print(test: unittest.TestCase, outcome: str, reason: str = "") -> None:
    name = test.id().rpartition(".")[2]
    print(name, outcome, reason.replace("\n", " ")[:300], flush=True)  # noqa: T201 - its output


def run_on_pool(name: str, *tests: str) -> None:
    """Run these tests of a class, or all, with executors of Taskyard in place of process pools."""
    cpython.futures.ProcessPoolExecutor = Pool
    for mixin in ("Fork", "Forkserver", "Spawn"):
        getattr(cpython, f"ProcessPool{mixin}Mixin").executor_type = Pool
    run = cpython.assert_python_ok

    def assert_python_ok(*words: str) -> Any:
        """Run a program that imports our executor."""
        ours = "from taskyard import Executor as Pool"
        changed = [word.replace("from concurrent.futures import Pool", ours) for word in words]
        return run(*changed, __isolated=False, PYTHONPATH=os.environ["PYTHONPATH"])

    cpython.assert_python_ok = assert_python_ok
    cpython.support.verbose = False
    # It would wait for a daemon thread of ours, which ends with the program.
    cpython.threading_helper.threading_cleanup = lambda *_: None
    kind = getattr(cpython, name)
    chosen = tests or unittest.defaultTestLoader.getTestCaseNames(kind)
    unittest.TestSuite(map(kind, chosen)).run(Outcomes())


if __name__ == "__main__":
    run_on_pool(*sys.argv[1:])
