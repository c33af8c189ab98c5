"""The executor keeps the promises of `concurrent.futures`, over real processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import pickle
import signal
import threading
import weakref
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, as_completed, wait
from concurrent.futures.process import _RemoteTraceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from taskyard import Executor, ExecutorBroken, NoBroker, TaskFailed
from taskyard.calls import pickled
from taskyard.client.executor import CallFuture
from taskyard.client.internal import InternalClient
from taskyard.errors import UserError
from tests.client import executor_calls as calls
from tests.kit.processes import PATIENCE_SECONDS, Broker, Worker, is_alive, until

if TYPE_CHECKING:
    from collections.abc import Iterator

AnyFuture = concurrent.futures.Future[Any]

#: Between two looks at the clock that a test makes itself.
SOON = 0.05


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """With room for two calls at once."""
    with Executor(slots=2) as shared:
        yield shared


@contextmanager
def an_executor() -> Iterator[Executor]:
    """Make an executor with one slot. A failed test does not wait for its calls."""
    with Executor(slots=1) as own:
        try:
            yield own
        except BaseException:
            own._core._on_broken("the test failed")  # noqa: SLF001
            raise


class Gate:
    """Calls that have begun, and wait until the gate is opened, once for each."""

    def __init__(self, directory: Path) -> None:
        self._begun = directory / "begun"
        self._fifo = directory / "gate"
        os.mkfifo(self._fifo)
        self._begun.touch()

    def submit(self, executor: Executor) -> CallFuture[str]:
        """Return when the call has begun."""
        before = self.begun
        future = self.submit_later(executor)
        until(lambda: self.begun > before)
        return future

    def submit_later(self, executor: Executor) -> CallFuture[str]:
        return executor.submit(calls.begin_and_read, str(self._begun), str(self._fifo))

    @property
    def begun(self) -> int:
        return len(self._begun.read_text())

    def open(self) -> None:
        self._fifo.write_text("open")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def value(future: AnyFuture) -> Any:
    return future.result(PATIENCE_SECONDS)


def error_of(future: AnyFuture) -> BaseException:
    error = future.exception(PATIENCE_SECONDS)
    assert error is not None
    return error


def children() -> list[int]:
    """Return the child processes of this one."""
    threads = Path("/proc/self/task").iterdir()
    found = []
    for thread in threads:
        with suppress(OSError):
            found += [int(one) for one in (thread / "children").read_text().split()]
    return found


# Calls.


def test_it_is_an_executor_and_its_futures_are_futures(executor: Executor) -> None:
    assert isinstance(executor, concurrent.futures.Executor)
    assert isinstance(executor.submit(pow, 2, 3), concurrent.futures.Future)


def test_arguments_of_any_name_arrive(executor: Executor) -> None:
    future = executor.submit(calls.sorted_pairs, 1, "b", fn=2, self=3, timeout=4)
    assert value(future) == ((1, "b"), [("fn", 2), ("self", 3), ("timeout", 4)])


def test_call_runs_in_another_process(executor: Executor) -> None:
    assert value(executor.submit(os.getpid)) != os.getpid()


def test_future_has_the_name_and_state_of_its_task(executor: Executor) -> None:
    future = executor.submit(pow, 2, 3)
    assert future.name.startswith("pow-")
    assert value(future) == 8
    assert future.state == "done"
    assert "done" in future.why().lower()


def test_two_calls_run_at_once(executor: Executor, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    both = [executor.submit(calls.write, str(fifo)), executor.submit(calls.read, str(fifo))]
    assert [value(future) for future in both] == ["met", "met"]


def test_large_arguments_and_results_pass(executor: Executor) -> None:
    content = os.urandom(5 << 20)
    assert value(executor.submit(calls.size, content)) == len(content)
    assert value(executor.submit(calls.make, 5 << 20)) == bytes(5 << 20)


def test_call_over_the_size_of_a_message_passes(executor: Executor) -> None:
    assert value(executor.submit(calls.size, bytes(17 << 20))) == 17 << 20
    assert value(executor.submit(calls.make, 17 << 20)) == bytes(17 << 20)


def test_task_of_a_call_starts_another_executor(executor: Executor) -> None:
    assert value(executor.submit(calls.sum_elsewhere, [1, 2, 3])) == 6


def test_output_of_a_call_does_not_disturb_it(executor: Executor) -> None:
    assert value(executor.submit(calls.print_and_double, 4)) == 8


# Exceptions.


def test_exception_comes_back_with_its_traceback(executor: Executor) -> None:
    error = error_of(executor.submit(calls.refuse_odd, 3))
    assert isinstance(error, calls.Odd)
    assert error.number == 3
    assert isinstance(error.__cause__, _RemoteTraceback)
    traceback = str(error.__cause__)
    assert "raise Odd(number)" in traceback
    assert "Odd: 3" in traceback
    assert "taskyard/worker" not in traceback


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_exception_of_any_kind_comes_back(executor: Executor, kind: type[BaseException]) -> None:
    error = error_of(executor.submit(calls.raise_this, kind(3)))
    assert type(error) is kind
    assert error.args == (3,)
    assert value(executor.submit(pow, 2, 3)) == 8


def test_exception_that_can_not_be_unpickled_has_its_traceback(executor: Executor) -> None:
    error = error_of(executor.submit(calls.raise_one_way))
    assert isinstance(error, TaskFailed)
    assert "tests.client.executor_calls.OneWay: one way" in str(error)
    assert "raise OneWay(1, 2)" in str(error.__cause__)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, calls.NoRepr])
def test_result_whose_unpickling_raises_fails_alone(
    executor: Executor, kind: type[BaseException]
) -> None:
    error = error_of(executor.submit(calls.give_unreadable, kind))
    assert isinstance(error, TaskFailed)
    assert f"can't be unpickled: {kind.__name__}" in str(error)
    assert value(executor.submit(pow, 2, 3)) == 8


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, calls.NoRepr])
def test_exception_whose_unpickling_raises_fails_alone(
    executor: Executor, kind: type[BaseException]
) -> None:
    error = error_of(executor.submit(calls.raise_unreadable, kind))
    assert isinstance(error, TaskFailed)
    assert "UnreadableError" in str(error)
    assert value(executor.submit(pow, 2, 3)) == 8


def test_argument_whose_pickling_raises_an_exit_makes_no_call() -> None:
    class Exits:
        def __reduce__(self) -> Any:
            raise SystemExit(3)

    with an_executor() as own:
        with pytest.raises(SystemExit):
            own.submit(print, Exits())
        own.shutdown()  # nothing is waited for


def test_exception_that_is_too_large_has_its_traceback(executor: Executor) -> None:
    error = error_of(executor.submit(calls.raise_large))
    assert isinstance(error, TaskFailed)
    assert "ValueError: xxx" in str(error)
    assert isinstance(error.__cause__, _RemoteTraceback)


@pytest.mark.parametrize("crash", [calls.crash, calls.fault])
def test_call_that_ends_its_process_fails_alone(executor: Executor, crash: Any) -> None:
    futures = [executor.submit(pow, 2, 3), executor.submit(crash), executor.submit(pow, 2, 4)]
    error = error_of(futures[1])
    assert isinstance(error, TaskFailed)
    assert "the process died" in str(error)
    assert (value(futures[0]), value(futures[2])) == (8, 16)
    assert value(executor.submit(pow, 2, 5)) == 32


def test_future_names_the_argument_that_can_not_be_pickled(executor: Executor) -> None:
    lock = threading.Lock()
    failed: dict[str, AnyFuture] = {
        "function <function": executor.submit(lambda: lock),
        "argument 2, of type lock, can't": executor.submit(pow, 1, lock),  # type: ignore[arg-type]
        "argument 'key', of type lock, can't": executor.submit(calls.sorted_pairs, key=lock),
        "result of type lock can't": executor.submit(threading.Lock),
    }
    for text, future in failed.items():
        assert text in str(error_of(future))
        assert "can't be pickled" in str(error_of(future))
    assert value(executor.submit(pow, 2, 3)) == 8


# Map.


def test_map_keeps_the_order(executor: Executor) -> None:
    assert list(executor.map(pow, range(50), range(50))) == [n**n for n in range(50)]


def test_map_ends_with_the_shortest_iterable(executor: Executor) -> None:
    assert list(executor.map(pow, [2, 3, 4], [1, 2])) == [2, 9]
    assert list(executor.map(pow, [], [1])) == []


@pytest.mark.parametrize("chunksize", [1, 3, 1000])
def test_map_raises_where_the_exception_is_due(executor: Executor, chunksize: int) -> None:
    values = executor.map(calls.refuse_odd, [0, 2, 4, 1, 6], chunksize=chunksize)
    if chunksize < 4:
        assert [next(values) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(calls.Odd):
        next(values)
    with pytest.raises(StopIteration):
        next(values)


def test_map_submits_at_once_and_yields_lazily(executor: Executor) -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(3):
            taken.append(number)
            yield number

    values = executor.map(abs, items())
    assert taken == [0, 1, 2]
    assert next(values) == 0


def test_map_raises_after_its_timeout(executor: Executor, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    values = executor.map(calls.read, [str(fifo)], timeout=SOON)
    with pytest.raises(TimeoutError):
        next(values)
    fifo.write_text("")


def test_chunk_is_one_task(executor: Executor) -> None:
    done = list(executor.map(calls.task_and_process, range(10), chunksize=4))
    assert [done.count(one) for one in dict.fromkeys(done)] == [4, 4, 2]
    assert done[0][0].startswith("task_and_process-")


@pytest.mark.parametrize("chunksize", [1, 3])
def test_map_keeps_no_reference_to_yielded_values(executor: Executor, chunksize: int) -> None:
    for made in executor.map(calls.Odd, range(6), chunksize=chunksize):
        kept = weakref.ref(made)
        del made
        until(lambda kept=kept: kept() is None, "the value is gone")  # type: ignore[misc]


@pytest.mark.parametrize("chunksize", [0, -1])
def test_empty_chunk_is_refused(executor: Executor, chunksize: int) -> None:
    with pytest.raises(ValueError, match="chunksize must be >= 1"):
        executor.map(abs, [1], chunksize=chunksize)


def test_abandoned_map_cancels_waiting_calls(gate: Gate, tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    with an_executor() as own:
        held = gate.submit(own)
        values = own.map(marked.touch, [0o600] * 20, timeout=0)
        with pytest.raises(TimeoutError):
            next(values)
        gate.open()
        assert value(held) == "open"
        assert value(own.submit(pow, 2, 3)) == 8
    assert not marked.exists()


# Waiting.


def test_wait_returns_at_the_first_completed(executor: Executor, gate: Gate) -> None:
    slow: AnyFuture = gate.submit(executor)
    quick: AnyFuture = executor.submit(pow, 2, 3)
    done, left = wait([slow, quick], PATIENCE_SECONDS, return_when=FIRST_COMPLETED)
    assert (done, left) == ({quick}, {slow})
    gate.open()
    assert wait([slow], PATIENCE_SECONDS).not_done == set()


def test_wait_for_the_first_exception(executor: Executor, gate: Gate) -> None:
    slow: AnyFuture = gate.submit(executor)
    good, bad = executor.submit(pow, 2, 3), executor.submit(calls.refuse_odd, 1)
    several: list[AnyFuture] = [slow, good, bad]
    done, left = wait(several, PATIENCE_SECONDS, return_when=FIRST_EXCEPTION)
    assert bad in done
    assert slow in left
    gate.open()
    done, left = wait(several, PATIENCE_SECONDS, return_when=ALL_COMPLETED)
    assert (len(done), left) == (3, set())


def test_wait_returns_after_its_timeout(executor: Executor, gate: Gate) -> None:
    slow = gate.submit(executor)
    assert wait([slow], SOON).not_done == {slow}
    with pytest.raises(TimeoutError):
        slow.result(SOON)
    with pytest.raises(TimeoutError):
        slow.exception(SOON)
    gate.open()
    assert value(slow) == "open"


def test_as_completed_yields_each_future_once(executor: Executor, gate: Gate) -> None:
    slow: AnyFuture = gate.submit(executor)
    quick: AnyFuture = executor.submit(pow, 2, 3)
    coming = as_completed([slow, quick, quick, slow], PATIENCE_SECONDS)
    assert next(coming) is quick
    gate.open()
    assert list(coming) == [slow]


def test_as_completed_raises_after_its_timeout(executor: Executor, gate: Gate) -> None:
    slow, quick = gate.submit(executor), executor.submit(pow, 2, 3)
    assert value(quick) == 8
    both: list[AnyFuture] = [slow, quick]
    coming = as_completed(both, SOON)
    assert next(coming) is quick
    with pytest.raises(TimeoutError):
        next(coming)
    gate.open()
    assert value(slow) == "open"


def test_callback_is_called_with_its_future(executor: Executor) -> None:
    called: list[Any] = []
    seen = threading.Event()
    future = executor.submit(pow, 2, 3)
    future.add_done_callback(called.append)
    future.add_done_callback(lambda _: seen.set())
    assert seen.wait(PATIENCE_SECONDS)
    assert called == [future]


def test_callback_that_raises_disturbs_no_other_call(
    executor: Executor, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    seen = threading.Event()
    future = gate.submit(executor)
    future.add_done_callback(lambda _: calls.raise_this(ValueError("mine")))
    future.add_done_callback(lambda _: seen.set())
    gate.open()
    assert seen.wait(PATIENCE_SECONDS)
    assert value(executor.submit(pow, 2, 3)) == 8
    assert "mine" in caplog.text


def test_callback_may_use_the_executor(gate: Gate) -> None:
    with an_executor() as own:
        first = gate.submit(own)
        waiting = own.submit(pow, 2, 3)
        outcomes: list[Any] = []
        called = threading.Event()

        def ask(_: object) -> None:
            outcomes.extend((first.state, waiting.cancel(), own.submit(pow, 2, 4)))
            called.set()

        refused = own.submit(id, threading.Lock())
        assert refused.done()
        refused.add_done_callback(ask)
        assert called.wait(PATIENCE_SECONDS)
        assert outcomes[:2] == ["leased", True]
        done = threading.Event()
        first.add_done_callback(lambda _: done.set() if first.state == "done" else None)
        gate.open()
        assert done.wait(PATIENCE_SECONDS)
        assert value(outcomes[2]) == 16


# Asyncio.


def test_asyncio_runs_calls_in_it(executor: Executor) -> None:
    async def gathered() -> list[Any]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(
            *(loop.run_in_executor(executor, pow, 2, number) for number in range(5))
        )

    assert asyncio.run(gathered()) == [1, 2, 4, 8, 16]


def test_asyncio_gets_exceptions(executor: Executor) -> None:
    async def failing() -> None:
        await asyncio.get_running_loop().run_in_executor(executor, calls.refuse_odd, 1)

    with pytest.raises(calls.Odd):
        asyncio.run(failing())


def test_cancelled_asyncio_task_cancels_a_waiting_call(gate: Gate, tmp_path: Path) -> None:
    async def impatient(own: Executor) -> None:
        later = asyncio.get_running_loop().run_in_executor(own, (tmp_path / "marked").touch)
        await asyncio.wait_for(later, SOON)

    with an_executor() as own:
        held = gate.submit(own)
        with pytest.raises(TimeoutError):
            asyncio.run(impatient(own))
        gate.open()
        assert value(held) == "open"
    assert not (tmp_path / "marked").exists()


# Cancelling.


def test_waiting_call_can_be_cancelled_and_a_running_one_can_not(gate: Gate) -> None:
    with an_executor() as own:
        running, waiting = gate.submit(own), gate.submit_later(own)
        assert (running.running(), waiting.running()) == (True, False)
        assert not running.cancel()
        assert waiting.cancel()
        assert waiting.cancel()
        assert (waiting.cancelled(), waiting.done(), waiting.running()) == (True, True, False)
        assert wait([waiting], PATIENCE_SECONDS).done == {waiting}
        with pytest.raises(concurrent.futures.CancelledError):
            waiting.result()
        gate.open()
        assert value(running) == "open"
        assert not running.cancel()
    assert gate.begun == 1


def test_shutdown_with_cancel_futures_cancels_waiting_calls(gate: Gate) -> None:
    own = Executor(slots=1)
    running = gate.submit(own)
    waiting = [gate.submit_later(own) for _ in range(20)]
    own.shutdown(wait=False, cancel_futures=True)
    assert wait(waiting, PATIENCE_SECONDS).not_done == set()
    assert all(future.cancelled() for future in waiting)
    gate.open()
    assert value(running) == "open"
    own.shutdown()
    assert gate.begun == 1


# Starting and ending.


def test_shutdown_waits_for_all_calls(tmp_path: Path) -> None:
    own = Executor(slots=2)
    futures = [own.submit((tmp_path / str(number)).touch) for number in range(20)]
    own.shutdown()
    assert all(future.done() for future in futures)
    assert len(list(tmp_path.iterdir())) == 20


def test_calls_after_a_shutdown_are_refused() -> None:
    own = Executor(slots=1)
    own.shutdown()
    own.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        own.submit(pow, 2, 3)
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        own.map(abs, [1])


def test_shutdown_that_does_not_wait_lets_calls_finish(gate: Gate) -> None:
    before = children()
    own = Executor(slots=1)
    first, second = gate.submit(own), own.submit(pow, 2, 3)
    own.shutdown(wait=False)
    assert not first.done()
    gate.open()
    assert (value(first), value(second)) == ("open", 8)
    until(lambda: children() == before, "its processes end")


def test_call_can_be_inspected() -> None:
    with an_executor() as own:
        future = own.submit(pow, 2, 3)
        assert future.state in ("ready", "leased", "done")
        assert future.cancel() or value(future) == 8


def test_shutdown_leaves_no_process_or_file(executor: Executor) -> None:
    assert (
        value(executor.submit(pow, 2, 3)) == 8
    )  # resources that a process opens once are open now
    gc.collect()  # what earlier tests left
    before, held = children(), _threads_and_files()
    with Executor(workers=2, slots=1) as own:
        assert list(own.map(abs, range(20))) == list(range(20))
        state = own._core._supervisor.state  # type: ignore[union-attr]  # noqa: SLF001
        assert len(children()) == len(before) + 1  # which has forked the others
    gc.collect()
    assert children() == before
    # Clients of earlier tests may have ended meanwhile.
    assert all(now <= then for now, then in zip(_threads_and_files(), held, strict=True))
    assert not state.exists()


def _threads_and_files() -> tuple[int, int]:
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def test_garbage_collected_executor_ends_with_its_calls(gate: Gate) -> None:
    before = children()
    own = Executor(slots=1)
    future = gate.submit(own)
    del own
    gc.collect()
    gate.open()
    assert value(future) == "open"
    until(lambda: children() == before, "its processes end")


def test_garbage_collected_executor_ends_with_map_values_left() -> None:
    before = children()
    own = Executor(slots=1)
    values = own.map(abs, [-1, -2, -3])
    assert next(values) == 1
    del own
    gc.collect()
    until(lambda: children() == before, "its processes end")
    assert [*values] == [2, 3]


def test_interrupt_ends_running_calls_of_its_own_workers(gate: Gate) -> None:
    before = children()
    own = Executor(slots=1)
    running, waiting = gate.submit(own), gate.submit_later(own)
    with pytest.raises(KeyboardInterrupt), own:
        raise KeyboardInterrupt
    assert running.cancelled()
    assert waiting.cancelled()
    assert children() == before


def test_interrupt_during_shutdown_cancels_calls(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Executor(slots=1)
    running = gate.submit(own)
    waits = own._core._ended  # noqa: SLF001

    def interrupted() -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(waits, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        own.shutdown()
    assert running.cancelled()


def test_interrupt_cancels_the_tasks_at_a_shared_broker(tmp_path: Path, gate: Gate) -> None:
    with Broker(tmp_path) as broker, Worker(tmp_path, "--allow-pickle", "--slots", "1"):
        shared = Executor(broker.endpoint)
        futures = [gate.submit(shared), gate.submit_later(shared)]
        with pytest.raises(KeyboardInterrupt), shared:
            raise KeyboardInterrupt
        assert all(future.cancelled() for future in futures)
        with InternalClient(broker.endpoint) as client:
            states = {client.show(future.full_name)["state"] for future in futures}
            assert states == {"cancelled"}
            until(lambda: not client.workers()[0]["tasks"], "the worker stops the call")


def test_calls_fail_when_their_broker_does_not_answer_in_time(tmp_path: Path, gate: Gate) -> None:
    with Broker(tmp_path) as broker, Worker(tmp_path, "--allow-pickle"):
        shared = Executor(broker.endpoint, timeout=1.2)
        future = gate.submit(shared)
        broker.kill()
        assert isinstance(error_of(future), NoBroker)
        shared.shutdown()


def test_worker_that_is_killed_is_replaced_and_its_calls_are_done_again(gate: Gate) -> None:
    with an_executor() as own:
        future = gate.submit(own)
        _, worker = own._core._supervisor.pids()  # type: ignore[union-attr]  # noqa: SLF001
        os.kill(worker, signal.SIGKILL)
        until(lambda: gate.begun == 2)
        gate.open()
        assert value(future) == "open"


def test_executor_whose_broker_is_killed_is_broken(gate: Gate) -> None:
    with an_executor() as own:
        futures: list[AnyFuture] = [gate.submit(own), own.submit(pow, 2, 3)]
        broker, _ = own._core._supervisor.pids()  # type: ignore[union-attr]  # noqa: SLF001
        os.kill(broker, signal.SIGKILL)
        for future in futures:
            assert isinstance(error_of(future), ExecutorBroken)
            assert isinstance(error_of(future), concurrent.futures.BrokenExecutor)
        with pytest.raises(ExecutorBroken, match="the executor is broken: its broker died"):
            own.submit(pow, 2, 3)


@pytest.mark.parametrize("options", [{"workers": 0}, {"slots": 0}])
def test_executor_without_workers_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        Executor(**options)


# With a broker that is there.


def test_missing_broker_raises(tmp_path: Path) -> None:
    with pytest.raises(NoBroker):
        Executor(state=tmp_path, timeout=0.2)


def test_workers_with_a_broker_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only for an executor that starts its own broker"):
        Executor(state=tmp_path, slots=2)


def test_only_workers_that_allow_pickled_calls_get_them(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, Worker(tmp_path), Executor(broker.endpoint) as shared:
        future = shared.submit(pow, 2, 3)
        assert future.state == "ready"
        with Worker(tmp_path, "--allow-pickle"):
            assert value(future) == 8


def test_calls_outlive_a_broker_that_is_restarted(tmp_path: Path, gate: Gate) -> None:
    with Broker(tmp_path) as broker, Worker(tmp_path, "--allow-pickle", "--slots", "1"):
        shared = Executor(broker.endpoint)
        future, later = gate.submit(shared), shared.submit(pow, 2, 3)
        assert later.state == "ready"
        broker.kill()
        with Broker(tmp_path):
            gate.open()
            assert (value(future), value(later)) == ("open", 8)
            shared.shutdown()
    assert gate.begun == 1


def test_worker_of_another_service_refuses_what_it_does_not_allow(tmp_path: Path) -> None:
    with (
        Broker(tmp_path) as broker,
        Worker(tmp_path, "--service", "cpu"),
        Executor(broker.endpoint, service="cpu") as shared,
    ):
        error = error_of(shared.submit(pow, 2, 3))
    assert "start the worker with --allow-pickle" in str(error)


def test_worker_of_another_service_does_what_it_allows(tmp_path: Path) -> None:
    with (
        Broker(tmp_path) as broker,
        Worker(tmp_path, "--service", "cpu", "--allow-pickle"),
        Executor(broker.endpoint, service="cpu") as shared,
    ):
        assert value(shared.submit(pow, 2, 3)) == 8
        failed = error_of(shared.submit(calls.refuse_odd, 1))
        assert isinstance(failed, calls.Odd)


def test_failed_call_is_failed_at_the_broker(tmp_path: Path) -> None:
    """The state at a shared broker is that of the task."""
    with (
        Broker(tmp_path) as broker,
        Worker(tmp_path, "--allow-pickle"),
        Executor(broker.endpoint) as shared,
        InternalClient(broker.endpoint) as client,
    ):
        future = shared.submit(calls.refuse_odd, 1)
        assert isinstance(error_of(future), calls.Odd)
        assert client.show(future.full_name)["state"] == "failed"
        assert "raise Odd(number)" in client.output(future.full_name).decode()


def test_processes_of_the_local_cluster_live_as_long_as_the_executor() -> None:
    with an_executor() as own:
        pids = own._core._supervisor.pids()  # type: ignore[union-attr]  # noqa: SLF001
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))


def test_broker_workers_and_calls_of_the_local_cluster_need_one_new_interpreter() -> None:
    with an_executor() as own:
        own_host = own._core._supervisor._child.pid  # type: ignore[union-attr]  # noqa: SLF001
        process = value(own.submit(os.getpid))
        pids = [own_host, process, *own._core._supervisor.pids()]  # type: ignore[union-attr]  # noqa: SLF001
        commands = {Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        assert len(commands) == 1  # a forked process has the command line of its parent


def test_forked_process_of_calls_is_like_a_new_interpreter() -> None:
    with an_executor() as own:
        process = value(own.submit(os.getpid))
        assert value(own.submit(os.getsid, 0)) == process
        assert value(own.submit(calls.open_descriptors)) <= calls.DESCRIPTORS_MAX
        assert value(own.submit(calls.log_handlers)) == []
        assert value(own.submit(signal.getsignal, signal.SIGTERM)) == signal.SIG_DFL


def test_executor_breaks_when_the_process_that_supervises_its_cluster_is_killed() -> None:
    with an_executor() as own:
        assert value(own.submit(pow, 2, 3)) == 8
        cluster = own._core._supervisor  # noqa: SLF001
        assert cluster is not None
        pids = cluster.pids()
        os.kill(cluster._child.pid, signal.SIGKILL)  # noqa: SLF001
        with pytest.raises(ExecutorBroken, match="killed by SIGKILL"):
            until(lambda: own.submit(pow, 2, 3) is None)
    until(lambda: not any(map(is_alive, pids)))


def test_future_can_not_be_pickled_by_mistake(executor: Executor) -> None:
    future = executor.submit(pow, 2, 3)
    with pytest.raises(TypeError):
        pickle.dumps(future)
    assert value(future) == 8


def test_max_workers_sets_slots() -> None:
    with Executor(max_workers=2) as executor:
        assert executor.submit(pow, 2, 3).result(PATIENCE_SECONDS) == 8
    with pytest.raises(UserError, match="slots and max_workers: give only one"):
        Executor(max_workers=2, slots=2)


def test_output_of_a_call_is_never_unpickled(
    executor: Executor,
) -> None:
    line = pickled.encode_exception(ValueError("planted"), "nowhere")
    error = executor.submit(calls.print_and_exit, line.decode()).exception(PATIENCE_SECONDS)
    assert isinstance(error, TaskFailed)
    assert "planted" not in repr(error)
