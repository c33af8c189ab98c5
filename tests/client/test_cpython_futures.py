"""CPython's own tests of process pools pass on an executor, except for those that are listed.

They are those of Debian's package libpython3.11-testsuite. The 59 tests are those of
the seven classes for process pools, with processes that are started by `spawn`. A skipped test does
not count as one that passes. They take 45 s of CPU, so `./yard test` runs one of each class. With
`--whole` all are run, and `-s` prints the table that docs/executor.md has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.kit.processes import environment
from tests.kit.requirements import need

ROOT: Final = Path(__file__).parents[2]

#: What they test, in the order of their durations.
CLASSES: Final = {
    "ProcessPoolSpawnProcessPoolExecutorTest": "`submit`, `map`, processes, tracebacks",
    "ProcessPoolSpawnWaitTest": "`wait`",
    "ProcessPoolSpawnExecutorDeadlockTest": "crashes, exits and errors of pickling",
    "ProcessPoolSpawnProcessPoolShutdownTest": "`shutdown`, `del`, exit of the interpreter",
    "ProcessPoolSpawnAsCompletedTest": "`as_completed`",
    "ProcessPoolSpawnFailingInitializerTest": "an initializer that raises",
    "ProcessPoolSpawnInitializerTest": "an initializer",
}

#: The test of each class that is run without `--whole`.
SAMPLE: Final = {
    "ProcessPoolSpawnProcessPoolExecutorTest": "test_traceback",
    "ProcessPoolSpawnWaitTest": "test_20369",
    "ProcessPoolSpawnExecutorDeadlockTest": "test_crash_during_func_exec_on_worker",
    "ProcessPoolSpawnProcessPoolShutdownTest": "test_submit_after_interpreter_shutdown",
    "ProcessPoolSpawnAsCompletedTest": "test_duplicate_futures",
    "ProcessPoolSpawnInitializerTest": "test_initializer",
}

_ALL_AT_ONCE: Final = "all processes are forked at the start, which takes a tenth of the time"

_NOT_CHILDREN: Final = "managers and queues are for children of the program"

#: Tests that fail, and why they should.
DIFFERENT: Final = {
    "test_killed_child": "a process that dies fails its own call, and is replaced",
    "test_processes_terminate": _ALL_AT_ONCE,
    "test_idle_process_reuse_one": _ALL_AT_ONCE,
    "test_idle_process_reuse_multiple": _ALL_AT_ONCE,
    "test_ressources_gced_in_workers": _NOT_CHILDREN,
}

#: The class whose only test fails, too. A test of its name passes in another class.
FAILING_CLASS: Final = "ProcessPoolSpawnFailingInitializerTest"

#: Tests that CPython skips.
SKIPPED: Final = {
    "test_max_workers_too_large": "of Windows",
    "test_hang_gh83386": "a process pool hangs in it",
}

#: Classes at once. They sleep for most of the time.
AT_ONCE: Final = 3

#: Many times the longest class.
SECONDS_MAX: Final = 240


class Outcome(NamedTuple):
    test: str
    outcome: str
    reason: str


@pytest.fixture
def package_directory(tmp_path: Path) -> Path:
    """Return a directory in which the package `test` is CPython's."""
    (tmp_path / "test").symlink_to(need("CPython's tests"))
    return tmp_path


def outcomes(package_directory: Path, name: str, *tests: str) -> list[Outcome]:
    """Run these tests of a class, or all of them, in a process."""
    path = os.pathsep.join([str(package_directory), str(ROOT / "src"), str(ROOT)])
    argv = [sys.executable, "-m", "tests.client.cpython_futures", name, *tests]
    done = subprocess.run(
        argv,
        env=environment(PYTHONPATH=path),
        cwd=package_directory,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
    return [Outcome(*line.split(" ", 2)) for line in done.stdout.splitlines()]


def table(found: dict[str, list[Outcome]]) -> str:
    """Return the table of docs/executor.md."""
    rows = ["| CPython's tests of | tests | pass | differ | skipped |", "|---|---|---|---|---|"]
    total: Counter[str] = Counter()
    for name, what in CLASSES.items():
        counts = Counter(one.outcome for one in found[name])
        total += counts
        rows.append(_row(what, counts))
    return "\n".join([*rows, _row("**all**", total), ""])


def _row(what: str, counts: Counter[str]) -> str:
    cells = (counts.total(), counts["passed"], counts["failed"], counts["skipped"])
    return f"| {what} | {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize("name", SAMPLE)
def test_one_test_of_each_class_passes(name: str, package_directory: Path) -> None:
    assert outcomes(package_directory, name, SAMPLE[name]) == [(SAMPLE[name], "passed", "")]


@pytest.mark.whole
def test_tests_of_process_pools_pass_except_those_listed(package_directory: Path) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        each = threads.map(lambda name: outcomes(package_directory, name), CLASSES)
        found = dict(zip(CLASSES, each, strict=True))
    shown = table(found)
    print(shown)  # noqa: T201 - for -s
    (initializer,) = found.pop(FAILING_CLASS)
    assert "through inheritance" in initializer.reason
    run = [one for one_class in found.values() for one in one_class]
    assert {one.test for one in run if one.outcome == "skipped"} == SKIPPED.keys()
    failed = [one for one in run if one.outcome == "failed"]
    assert [one for one in failed if one.test not in DIFFERENT] == []
    assert {one.test for one in failed} == DIFFERENT.keys(), "a listed test passes"
    assert shown in (ROOT / "docs/executor.md").read_text()
