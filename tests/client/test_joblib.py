"""The joblib backend: calls of `joblib.Parallel` are tasks, and a campaign of them is resumed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib
import pytest
from joblib import delayed

from taskyard import Client, TaskFailed, testing
from taskyard.errors import NotEncodable
from taskyard.joblib import TaskyardBackend, content_key
from tests.client import joblib_search
from tests.kit.processes import Broker, Running, Worker, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.testing import InMemoryBroker

SEARCH = Path(joblib_search.__file__)


def square(number: int) -> int:
    return number * number


def append(path: str, text: str) -> int:
    """Return the size of the file after the text was appended."""
    with Path(path).open("a") as file:
        file.write(text)
        return file.tell()


def fail_once(path: str) -> str:
    if append(path, ".") == 1:
        raise LookupError("the first time")
    return "again"


def nested_backend(number: int) -> tuple[str, list[int]]:
    backend, _ = joblib.parallel.get_active_backend()
    return type(backend).__name__, joblib.Parallel(n_jobs=2)([delayed(square)(number)])


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    """With a worker that has one slot."""
    with testing.broker() as started, started.worker():
        yield started


def names_of(client: Client, campaign: str) -> Counter[str]:
    return Counter(view["state"] for view in client.tasks() if view["campaign"] == campaign)


def test_calls_run_in_an_own_cluster() -> None:
    with joblib.parallel_config("taskyard"):
        squares = joblib.Parallel(n_jobs=2)(delayed(square)(number) for number in range(300))
        assert squares == [square(number) for number in range(300)]
        backends = joblib.Parallel(n_jobs=2)(delayed(nested_backend)(number) for number in (3, 4))
        assert backends == [("ThreadingBackend", [9]), ("ThreadingBackend", [16])]
        unordered = joblib.Parallel(n_jobs=2, return_as="generator_unordered")
        assert sorted(unordered(delayed(square)(number) for number in range(4))) == [0, 1, 4, 9]
        with pytest.raises(ZeroDivisionError) as raised:
            joblib.Parallel(n_jobs=2)(delayed(divmod)(1, number) for number in (1, 0))
        with pytest.raises(TaskFailed, match=r"exit|status"):
            joblib.Parallel(n_jobs=2)(delayed(os._exit)(code) for code in (3, 3))
    assert "Traceback" in str(raised.value.__cause__)


def test_all_jobs_are_the_slots_of_workers(broker: InMemoryBroker) -> None:
    backend = TaskyardBackend(broker.endpoint, nesting_level=0)
    assert backend.effective_n_jobs(1) == 1
    assert backend.effective_n_jobs(5) == 5
    assert backend.effective_n_jobs(-1) == 2, "one would run in this process"
    with pytest.raises(ValueError, match="n_jobs == 0"):
        backend.effective_n_jobs(0)
    with broker.worker(), broker.worker():
        until(lambda: backend.effective_n_jobs(-1) == 3)
        assert backend.effective_n_jobs(-2) == 2


def test_campaign_repeats_no_call(broker: InMemoryBroker, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    for _ in range(2):
        with joblib.parallel_config("taskyard", broker=broker.endpoint, campaign="a"):
            sizes = joblib.Parallel()(delayed(append)(log, text) for text in ("a", "bb", "a"))
            assert sizes == [1, 3, 4], "equal calls are made each"
    assert Path(log).read_text() == "abba"
    assert names_of(broker.client(), "a") == {"done": 3}


def test_failed_and_cancelled_calls_of_an_earlier_run_start_again(
    broker: InMemoryBroker, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    with joblib.parallel_config("taskyard", broker=broker.endpoint, campaign="a"):
        with pytest.raises(LookupError, match="the first time"):
            joblib.Parallel()([delayed(fail_once)(log)])
        assert joblib.Parallel()([delayed(fail_once)(log)]) == ["again"]
        with pytest.raises(ZeroDivisionError) as raised:
            joblib.Parallel()([delayed(divmod)(1, 0)])
        with pytest.raises(ZeroDivisionError) as raised:
            joblib.Parallel()([delayed(divmod)(1, 0)])
    assert "Traceback" in str(raised.value.__cause__)


def test_later_run_waits_for_a_call_that_still_runs(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    with testing.broker() as broker:
        calls = joblib.parallel.BatchedCalls([delayed(append)(log, "a")], None)
        futures = []
        for _ in range(2):  # no worker has run the call when the second program starts
            backend = TaskyardBackend(broker.endpoint, campaign="a", nesting_level=0)
            assert backend.configure(2) == 2
            futures.append(backend.submit(calls))
        with broker.worker():
            assert [future.result() for future in futures] == [[1], [1]]
        assert names_of(broker.client(), "a") == {"done": 1}


def test_interrupt_cancels_all_calls(tmp_path: Path) -> None:
    log = str(tmp_path / "log")

    def calls() -> Iterator[Any]:
        yield delayed(append)(log, "a")
        yield delayed(append)(log, "b")
        raise KeyboardInterrupt

    with (
        testing.broker() as broker,
        broker.client() as client,
        joblib.parallel_config("taskyard", broker=broker.endpoint, campaign="a", n_jobs=2),
    ):
        with pytest.raises(KeyboardInterrupt):
            joblib.Parallel(batch_size=1, pre_dispatch="all")(calls())
        assert names_of(client, "a") == {"cancelled": 2}
        with broker.worker():
            sizes = joblib.Parallel()(delayed(append)(log, text) for text in "ab")
            assert sorted(sizes) == [1, 2]


def test_call_that_another_program_submits_at_once_is_run_once(
    broker: InMemoryBroker, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    sizes: list[Any] = []

    def run() -> None:
        backend = TaskyardBackend(broker.endpoint, campaign="a", nesting_level=0)
        sizes.extend(
            joblib.Parallel(backend=backend)(delayed(append)(log, text) for text in "abcd")
        )

    programs = [threading.Thread(target=run) for _ in range(3)]
    for program in programs:
        program.start()
    for program in programs:
        program.join()
    assert sorted(sizes) == sorted([1, 2, 3, 4] * 3)
    assert sorted(Path(log).read_text()) == [*"abcd"]


def test_unpicklable_call_raises_and_does_not_hang(broker: InMemoryBroker) -> None:
    with joblib.parallel_config("taskyard", broker=broker.endpoint, campaign="a"):
        with pytest.raises(NotEncodable, match="lock"):
            joblib.Parallel()([delayed(square)(threading.Lock())])
        many = [
            *[delayed(square)(number) for number in range(6)],
            delayed(square)(threading.Lock()),
        ]
        with pytest.raises(NotEncodable, match="lock"):
            joblib.Parallel()(many)


# Names by content.

KEYS = """
import sys
import numpy as np
from taskyard.errors import NotEncodable
from taskyard.joblib import content_key
LIMIT = 3
def helper(x): return x + %(helper)s
def work(x, y=%(default)s):
    def inner(): return {"a", "b", "c"} & {str(x)}
    return helper(x) < LIMIT and inner() in ({"p", "q"}, None) and recurse(x)
def recurse(x): return recurse(x - 1) if x else 0
class Model:
    def __init__(self, n): self.n, self.words = n, {"one", "two", "three"}
    def fit(self): return %(method)s
def outer(depth): return lambda x: x + depth
args = (np.arange(5.0), Model(2), frozenset(["u", "v", "w"]), {None: 1, "k": 2}, sys)
print(content_key([(work, args, {"z": 1, "b": 2}), (outer(%(cell)s), (), {})]))
"""
PARTS = {"helper": "1", "default": "2", "method": "3", "cell": "4"}


def test_key_is_the_same_in_every_process() -> None:
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    words = ["env", f"PYTHONHASHSEED={seed}", sys.executable, "-c", KEYS % PARTS]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    assert done.stdout.strip() == changed("none")


def changed(part: str) -> str:
    """Return the key of calls with another part, made in this process as it is quicker."""
    space: dict[str, Any] = {"__name__": "__main__"}
    source = (KEYS % {**PARTS, part: "7"}).replace("print(", "key = (")
    code = compile(source, "keys", "exec", dont_inherit=True)  # without our `annotations`
    exec(code, space)  # noqa: S102  # a program of this file
    return str(space["key"])


def test_key_changes_with_code_defaults_and_closures() -> None:
    keys = {changed(part) for part in (*PARTS, "none")}
    assert len(keys) == len(PARTS) + 1


def test_key_changes_with_arguments() -> None:
    calls = [
        (square, (1,), {}),
        (square, (2,), {}),
        (square, (), {"number": 1}),
        (divmod, (1,), {}),
    ]
    assert len({content_key([call]) for call in calls}) == len(calls)


def test_variable_without_content_is_no_obstacle() -> None:
    def run(number: int) -> int:
        with lock:
            return number

    lock = threading.Lock()
    assert content_key([(run, (1,), {})]) == content_key([(run, (1,), {})])


# A grid search of scikit-learn.


class SearchRun:
    """The processes of a search, and its log."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        self.log.touch()

    def open_gates(self, *numbers: int) -> None:
        for number in numbers:
            Path(f"{self.log}.{number}").touch()

    def start_service(self, stack: ExitStack) -> list[Running]:
        broker = stack.enter_context(Broker(self.directory))
        worker = stack.enter_context(Worker(self.directory, "--allow-pickle", "--slots", "1"))
        return [broker, worker]

    def start_program(self, stack: ExitStack) -> Running:
        words = (str(SEARCH), str(self.directory / ".taskyard"), str(self.log))
        return stack.enter_context(Running(self.directory, *words, program=(sys.executable,)))

    def wait_for_done(self, count: int) -> None:
        with Client(state=self.directory / ".taskyard") as client:
            until(lambda: names_of(client, "search")["done"] == count)

    def fits(self, what: str) -> Counter[str]:
        lines = self.log.read_text().splitlines()
        return Counter(line.removeprefix(what) for line in lines if line.startswith(what))


def test_wider_search_makes_the_new_fits_alone(broker: InMemoryBroker, tmp_path: Path) -> None:
    search = SearchRun(tmp_path)
    search.open_gates(*range(4))
    for numbers in ([0, 1], [3, 0, 1, 2]):
        with joblib.parallel_config("taskyard", broker=broker.endpoint, campaign="a"):
            joblib_search.search(str(search.log), numbers)
    assert [*search.fits("begin").values()] == [1] * 4 * joblib_search.FOLDS


@pytest.mark.whole  # a dozen seconds of CPU, to import scikit-learn in each process
def test_grid_search_killed_and_resumed_repeats_no_fit(tmp_path: Path) -> None:
    search = SearchRun(tmp_path)
    with ExitStack() as stack:
        search.open_gates(0, 1)
        service = search.start_service(stack)
        program = search.start_program(stack)
        search.wait_for_done(4)
        until(lambda: sum(search.fits("begin").values()) == 5)
        for process in (program, *service):
            process.kill()
        search.open_gates(*range(joblib_search.NUMBERS))
        search.start_service(stack)
        code, out, err = search.start_program(stack).end()
        assert code == 0, err
        assert len(out.split()) == joblib_search.NUMBERS
    fits = joblib_search.NUMBERS * joblib_search.FOLDS
    assert [*search.fits("end").values()] == [1] * fits, "fits done twice"
    assert sum(search.fits("begin").values()) == fits + 1, "the one that ran when all was killed"
