"""Settings for all tests: repeatable hypothesis examples, sampled sweeps, counts of the simulator.

`derandomize` makes a failure repeatable. `deadline` is off because a shared machine has no steady
speed. Sweeps over every byte of a file try a sample chosen by a seed. With --whole they try all of
them, and hypothesis looks for new examples, as it does with HYPOTHESIS_PROFILE=search.
"""

import gc
import logging
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.kit import fork_server, requirements

if TYPE_CHECKING:
    from tests.kit.postgres import Cluster

# Programs that a test starts should buffer their output as for a user.
os.environ.pop("PYTHONUNBUFFERED", None)
# Hundreds of processes are started here. None of them should compile the whole package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=15)
settings.register_profile("search", deadline=None, max_examples=2_000, print_blob=True)

#: Temporary files go to memory, where a sync costs nothing. No test can lose the power.
MEMORY_DISK = Path("/dev/shm")  # noqa: S108  # pytest makes a private directory in it
#: A whole run needs a tenth of that. A container may have far less.
MEMORY_DISK_BYTES_MIN = 4 * 2**30


def is_suitable(disk: Path) -> bool:
    """Return whether tests can write their files there, and run them as programs."""
    if not disk.is_dir() or os.statvfs(disk).f_flag & os.ST_NOEXEC:
        return False
    return shutil.disk_usage(disk).free >= MEMORY_DISK_BYTES_MIN


if is_suitable(MEMORY_DISK):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))

HERE = Path(__file__).parent
#: Coverage counts these packages by their own tests. Tracing others proves little more and is slow.
COVERED = ("core", "journal", "net", "wire")

#: Tests of these packages wait for processes most of the time.
WAITING = ("conformance", "system")

#: Python looks for garbage after 700 new objects. Tests make many that live until they end.
GARBAGE_OBJECTS_MIN = 20_000

#: A sweep tries one of this many neighbours.
SAMPLED_OF = 16


def pytest_addoption(parser: pytest.Parser) -> None:
    sweeps = parser.getgroup("sweeps")
    sweeps.addoption("--whole", action="store_true", help="try every case, not a sample")
    sweeps.addoption("--sample-seed", type=int, default=0, metavar="N", help="choose the sample")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs(name): skip the test without a row of requirements.py"
    )
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # From nohup: it may not end this process, but the programs of the tests.
        signal.signal(signal.SIGHUP, lambda *_: None)
    gc.disable()  # collection makes a hundred thousand objects, and none of them is garbage
    profile = "search" if config.getoption("--whole") else "repeatable"
    fork_server.install()
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", profile))
    stop_first_tracer(config)


def stop_first_tracer(config: pytest.Config) -> None:
    """Stop the tracer that pytest-cov starts in a process of xdist before the one that it uses.
    Without this, the first one would trace the tests that are left out of coverage."""
    coverage = config.pluginmanager.getplugin("_cov")
    if hasattr(config, "workerinput") and coverage is not None and coverage.cov_controller:
        coverage.cov_controller.pause()


def pytest_report_header(config: pytest.Config) -> str:
    whole, seed = config.getoption("--whole"), config.getoption("--sample-seed")
    return "sweeps: whole" if whole else f"sweeps: sample of 1 in {SAMPLED_OF}, seed {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests of other packages out of coverage, and cases for --whole out of other runs. Tests
    that wait for processes go first, beside those that compute."""
    if config.pluginmanager.hasplugin("_cov"):
        for item in items:
            if package_of(item) not in COVERED:
                item.add_marker(pytest.mark.no_cover)
    if not config.getoption("--whole"):
        config.hook.pytest_deselected(items=[one for one in items if is_for_whole_runs(one)])
        items[:] = [one for one in items if not is_for_whole_runs(one)]
    items.sort(key=lambda item: package_of(item) not in WAITING)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked with a requirement that is missing, before its fixtures."""
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            requirements.need(name)


def pytest_collection_finish() -> None:
    """Look for garbage from here on, but never among the tests and the imported modules."""
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS_MIN)
    gc.enable()


def package_of(item: pytest.Item) -> str:
    """Return the directory of tests, named for a package, that a test is in. "" if elsewhere."""
    return package_of_file(item.path)


@cache
def package_of_file(path: Path) -> str:
    return path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) else ""


def is_for_whole_runs(item: pytest.Item) -> bool:
    return item.get_closest_marker("whole") is not None


@pytest.fixture(scope="session")
def sample(pytestconfig: pytest.Config) -> Callable[[Sequence[int]], list[int]]:
    """Return a function that chooses one of every 16 neighbours, or all with --whole."""
    step = 1 if pytestconfig.getoption("--whole") else SAMPLED_OF
    seed = pytestconfig.getoption("--sample-seed")

    def choose(cases: Sequence[int]) -> list[int]:
        chance = random.Random(seed)
        groups = [cases[first : first + step] for first in range(0, len(cases), step)]
        return [chance.choice(group) for group in groups]

    return choose


@pytest.fixture(autouse=True)
def _fresh_loggers() -> None:
    """Remove handlers and levels that a verb called in this process has set."""
    logging.getLogger("taskyard").handlers.clear()
    for name in [one for one in logging.root.manager.loggerDict if one.startswith("taskyard")]:
        logging.getLogger(name).setLevel(logging.NOTSET)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts of the simulator: schedules, events, restarts, planted bugs. Keep what tests
    were skipped for, which `./yard test` lists at its end."""
    skipped = requirements.skipped(terminalreporter.getreports("skipped"))
    if skipped and (cached := getattr(terminalreporter.config, "cache", None)):
        cached.set("taskyard/skipped", skipped)
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name.startswith("simulated "):
                counts[name.removeprefix("simulated ")] += int(str(value))
    if counts:
        totals = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        terminalreporter.write_line(f"simulated: {totals}")


@pytest.fixture(scope="session")
def cluster() -> "Iterator[Cluster]":
    """Run a PostgreSQL cluster until the tests of this process end."""
    from tests.kit.postgres import Cluster  # noqa: PLC0415  # most tests need no database

    running = Cluster()
    yield running
    running.close()
