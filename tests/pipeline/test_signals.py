"""A signal ends a pipeline command and its JVM: exit code, no stack trace, no process left.

Real Spark, one session at a time. The tests wait for a process or a task, never for a time.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard.pipeline import jvm
from tests.kit.processes import Broker, Running, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Lines of Java's and Python's stack traces.
TRACE = re.compile(r"^\s+at |Exception|Traceback|Error:|ERROR", re.MULTILINE)

FILE = "campaign.jsonl"

#: Each command, and the signal that ends it while its JVM starts. All have the same handler. Those
#: after the first two are run with --whole.
STARTING: tuple[tuple[Sequence[str], signal.Signals], ...] = (
    (("report", "--out", "report"), signal.SIGINT),
    (("fleet", "--workers", "1"), signal.SIGHUP),
    (("load", FILE, "--dry-run", "--spark", "local[*]"), signal.SIGTERM),
    (("sweep", FILE, "--workers", "1", "--run-time", "1s"), signal.SIGTERM),
)


#: Time limit for Spark, a worker and a task to start on a busy machine.
TIMEOUT_SECONDS = 280

pytestmark = [
    pytest.mark.needs("Linux"),
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("class_archive"),
]


def until(is_so: Callable[[], object], what: str) -> None:
    ends = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < ends, f"did not happen: {what}"
        time.sleep(0.2)  # a look at all processes of the machine takes 7 ms of CPU


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a campaign file and the state of a stopped broker."""
    directory = tmp_path_factory.mktemp("place")
    tasks = [{"name": f"t{number}", "argv": ["true"]} for number in range(2_000)]
    (directory / FILE).write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    with Broker(directory) as broker:
        assert run(directory, "submit", "--name", "a", "--", "true")[0] == 0
        assert broker.terminate()[0] == 0
    return directory


class Command(Running):
    """A running pipeline command and its processes."""

    def __init__(self, directory: Path, *words: str) -> None:
        group = () if words[0] in ("report", "load") else ("pipeline",)
        super().__init__(directory, *group, *words)
        self._seen: set[int] = set()

    def started(self, *parts: str) -> list[int]:
        """Return its processes whose command line has all these parts."""
        found = jvm.processes()
        below = {self.pid}
        while more := {pid for pid, one in found.items() if one.parent in below} - below:
            below |= more
        self._seen |= below
        return [pid for pid in below if all(part in command_of(pid) for part in parts)]

    def wait_for(self, *parts: str) -> None:
        until(lambda: self.process.poll() is not None or self.started(*parts), f"{parts} to start")
        assert self.process.poll() is None, self.end()

    def left(self) -> list[str]:
        """Return its processes, and those of their sessions, that still run."""
        found = jvm.processes().values()
        left = [one.pid for one in found if self._seen & {one.pid, one.session}]
        return [command_of(pid) for pid in left]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@contextmanager
def running(directory: Path, *words: str) -> Iterator[Command]:
    with Command(directory, *words) as command:
        yield command


def check_end(command: Command, number: signal.Signals, message: str = "") -> None:
    command.started()
    code, out, err = command.send(number).end()
    assert code == 128 + number, err
    until(lambda: not command.left(), "its processes have ended")
    assert TRACE.search(err) is None, err
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert f"taskyard: {word}\n" in err
    assert message in err
    assert out == ""


def skip_repetition(config: pytest.Config, *, is_repetition: bool) -> None:
    """Skip a command or signal with the same handler as another, unless --whole is given.

    Each costs a JVM.
    """
    if is_repetition and not config.getoption("--whole"):
        pytest.skip("only with --whole")


#: Ends by a signal. The function that interrupts queries at a server is called, and may fail.
SERVED = """
import os, signal
from taskyard.pipeline import jvm
jvm.before_end(lambda: print("interrupted", flush=True) or 1 / 0)
with jvm.end_jvm_on_signals():
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_signal_interrupts_the_queries_of_a_server(tmp_path: Path) -> None:
    with Running(tmp_path, program=(sys.executable, "-c", SERVED)) as running:
        code, out, err = running.end()
    assert (code, out, err) == (128 + signal.SIGTERM, "interrupted\n", "taskyard: terminated\n")


@pytest.mark.parametrize(("words", "number"), STARTING)
def test_command_is_ended_while_its_jvm_starts(
    place: Path, words: Sequence[str], number: signal.Signals, pytestconfig: pytest.Config
) -> None:
    skip_repetition(pytestconfig, is_repetition=(words, number) not in STARTING[:2])
    with running(place, *words) as command:
        command.wait_for("org.apache.spark")
        check_end(command, number)


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_command_with_running_tasks_ends_with_all_its_processes(
    place: Path, number: signal.Signals
) -> None:
    """Interrupt a sweep of many points while Spark's Python processes simulate them.

    A fleet, below, is ended while such processes run a task.
    """
    points = (
        "--workers",
        ",".join(map(str, range(1, 400))),
        "--run-time",
        "1s",
        "--master",
        "local[2]",
    )
    with running(place, "sweep", FILE, *points) as command:
        command.wait_for("pyspark.daemon")
        check_end(command, number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_fleet_is_ended_without_losing_tasks(
    tmp_path: Path, number: signal.Signals, pytestconfig: pytest.Config
) -> None:
    skip_repetition(pytestconfig, is_repetition=number == signal.SIGINT)
    with Broker(tmp_path), running(tmp_path, "fleet", "--workers", "1") as fleet:
        mark = f"print({tmp_path.name!r})"
        words = (sys.executable, "-c", f"{mark}; import time; time.sleep(1000)")
        assert run(tmp_path, "submit", "--name", "a", "--", *words)[0] == 0
        fleet.wait_for(mark)
        check_end(fleet, number, "1 worker of 1 slot for the broker")
        code, out, _ = run(tmp_path, "show", "--json", "a")
        assert code == 0
        assert json.loads(out)["task"]["state"] in ("leased", "ready")  # until its lease expires
