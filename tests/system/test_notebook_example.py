"""The notebook of `examples/notebook`, in real kernels: killed, reopened, and no call made twice.

With --whole, it makes as many calls as the notebook says.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.kit.kernel import Kernel, cells_of
from tests.kit.processes import Running, all_children_of, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOTEBOOK: Final = Path(__file__).parents[2] / "examples" / "notebook" / "simulate.ipynb"

#: Calls of the notebook, and in an ordinary run.
CALLS: Final = 100_000
CALLS_QUICK: Final = 2_000

#: Seconds for the cell that waits for all calls, on a busy machine.
CELL_SECONDS_MAX: Final = 1_500.0


@contextmanager
def up(directory: Path) -> Iterator[Running]:
    """Run a broker and a worker, as the notebook says."""
    options = (*("--page", "none"), "-j", "2", "--allow-pickle")
    with Running(directory, "up", *options, stderr=None) as running:
        assert running.line().startswith("listening native ")
        yield running


def kill_broker(running: Running) -> None:
    """Kill the broker of `up`, which starts another one. The worker stays."""
    for child in all_children_of(running):
        if b"broker" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            os.kill(child, signal.SIGKILL)
            return
    raise AssertionError("no broker")


def kill_all(running: Running) -> None:
    """Kill `up` with all its processes, as a machine does that loses its power."""
    children = all_children_of(running)
    running.send(signal.SIGKILL)
    for child in children:
        os.kill(child, signal.SIGKILL)
    running.end()


def test_reopened_notebook_makes_no_call_twice(
    tmp_path: Path, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    calls = CALLS if pytestconfig.getoption("--whole") else CALLS_QUICK
    setup, function, submitting, report = cells_of(NOTEBOOK)
    assert f"CALLS = {CALLS:_}\n" in setup
    before = [setup.replace(f"{CALLS:_}", str(calls)), function]
    log = tmp_path / "calls.log"

    def calls_made() -> int:
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def opened_again(kernel: Kernel) -> float:
        """Run all cells to the end. Return how many seconds the waiting cell took."""
        for cell in before:
            kernel.run(cell)
        begin = time.monotonic()
        # The client may print that the broker is away.
        *_, mean = kernel.run(submitting, CELL_SECONDS_MAX).splitlines()
        assert mean.startswith("3.1")
        seconds = time.monotonic() - begin
        assert kernel.run(report) == f"{calls} results, {calls} calls, 0 made twice\n"
        return seconds

    with up(tmp_path) as running:
        with Kernel(tmp_path) as kernel:
            for cell in before:
                kernel.run(cell)
            kernel.begin(submitting)
            until(lambda: calls_made() > calls // 10, "a tenth of the calls")
            kernel.kill()
            kill_broker(running)
            assert calls_made() < calls
        with Kernel(tmp_path) as kernel:
            record_property("seconds resumed", round(opened_again(kernel), 1))
        kill_all(running)
    with up(tmp_path), Kernel(tmp_path) as kernel:
        record_property("seconds reopened", round(opened_again(kernel), 1))
    assert sorted(map(int, log.read_text().split())) == [*range(calls)]
