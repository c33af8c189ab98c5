"""`@taskyard.task`, and tasks that are named by their content, with a real broker and worker."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import taskyard
from taskyard.client import task as task_module
from taskyard.client.client import AsyncClient, Client
from taskyard.core.states import TaskState
from taskyard.errors import NotEncodable, UserError
from tests.cli.yard import Yard, running
from tests.client import function_calls as calls
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(__file__).with_name("task_script.py")


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("tasks"), worker=False) as running_yard:
        yield running_yard.start_worker("--allow-pickle")


@pytest.fixture
def client(yard: Yard) -> Iterator[Client]:
    with Client(state=yard.state) as connected:
        yield connected


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def made(trace: Path) -> Counter[str]:
    """Return how many times each call was made."""
    return Counter(trace.read_text().splitlines() if trace.exists() else [])


@taskyard.task
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


class Scale:
    """Has a task as a method."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @taskyard.task
    def times(self, number: int) -> int:
        return self.factor * number


def fail_until(path: str, trace: str) -> str:
    calls.note(trace, "call")
    if not Path(path).exists():
        raise calls.Odd(1)
    return "fixed"


def test_task_is_the_plain_function_when_called() -> None:
    assert double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Double a number.")
    assert repr(double) == "<Task double>"
    assert Scale(3).times(4) == 12


def test_task_is_submitted(client: Client) -> None:
    task = double.options(client=client)
    assert task.submit(4).result(PATIENCE_SECONDS) == 8
    assert client.gather(task.map(range(3))) == [0, 2, 4]
    assert client.submit(double, 5).result(PATIENCE_SECONDS) == 10
    bound = Scale(3).times.options(client=client)
    assert bound.submit(4).result(PATIENCE_SECONDS) == 12
    half = taskyard.task(partial(pow, 2))
    assert half.options(client=client).submit(3).result(PATIENCE_SECONDS) == 8
    assert pickle.loads(pickle.dumps(double)) is double  # noqa: S301  # our own


def test_task_has_options(client: Client) -> None:
    greet = taskyard.task(campaign="hello", lane="l", retries=2, client=client)(calls.greet)
    future = greet.submit(name="Ann", lane="x")
    assert future.result(PATIENCE_SECONDS) == "hello Ann x"
    assert future.campaign == "hello"
    assert client.show(future.full_name)["lane"] == "l"
    with pytest.raises(UserError, match=r"unknown option 'retrys' of a task \(did you mean 'retri"):
        taskyard.task(retrys=1)
    with pytest.raises(UserError, match="key 'name': expected 'content'"):
        taskyard.task(key="name")
    with pytest.raises(UserError, match="version: only with key='content'"):
        double.options(version=1)


def test_default_client_is_found_as_client_finds_it(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "_clients", task_module.ProcessClients())
    monkeypatch.setenv("TASKYARD_STATE", str(yard.state))
    assert double.submit(4).result(PATIENCE_SECONDS) == 8
    first = task_module.default_client()
    assert task_module.default_client() is first
    first.close()


def test_program_that_is_run_again_repeats_no_call(tmp_path: Path, trace: Path) -> None:
    def run(limit: int) -> str:
        words = [sys.executable, str(SCRIPT), str(own.state), str(trace), str(limit)]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    with running(tmp_path / "run", worker=False) as own:
        own.start_worker("--allow-pickle")
        assert run(100) == f"{sum(n**2 for n in range(20))}\n"
        assert made(trace) == {str(n): 1 for n in range(20)}
        own.kill_broker()
        own.start_broker()
        assert run(100) == f"{sum(n**2 for n in range(20))}\n"
        assert made(trace) == {str(n): 1 for n in range(20)}
        run(10)  # a global that its helper uses
        assert made(trace) == {str(n): 2 for n in range(20)}
        with Client(state=own.state) as client:
            newest = [*client.tasks()][-1]["name"]
            assert "in what the function uses" in client.why(f"square/{newest}")


def test_equal_calls_are_one_task(client: Client, trace: Path) -> None:
    note: Any = taskyard.task(key="content", client=client)(calls.note)
    futures = [
        *note.map([str(trace)] * 3, ["a", "b", "a"]),
        note.submit(str(trace), "a"),
        note.submit(line="a", path=str(trace)),
    ]
    assert client.gather(futures) == ["a", "b", "a", "a", "a"]
    assert made(trace) == {"a": 1, "b": 1}
    assert {one.campaign for one in futures} == {"tests.client.function_calls.note"}
    assert client.submit(calls.note, str(trace), "a", key="content").result() == "a"
    assert made(trace) == {"a": 1, "b": 1}
    version = note.options(version=2).submit(str(trace), "a")
    assert version.result(PATIENCE_SECONDS) == "a"
    assert made(trace)["a"] == 2
    assert "in the function's code" in version.why()
    assert "no other task of its function has its arguments" in futures[1].why()


def test_failed_call_is_retried_and_raises_its_own_exception(
    yard: Yard, client: Client, tmp_path: Path, trace: Path
) -> None:
    arguments = (str(tmp_path / "fixed"), str(trace))
    with pytest.raises(calls.Odd):
        client.submit(fail_until, *arguments, key="content").result(PATIENCE_SECONDS)
    with Client(state=yard.state) as other:
        with pytest.raises(calls.Odd):
            other.submit(fail_until, *arguments, key="content").result(PATIENCE_SECONDS)
        Path(arguments[0]).touch()
        fixed = other.submit(fail_until, *arguments, key="content")
        assert fixed.result(PATIENCE_SECONDS) == "fixed"
    assert made(trace) == {"call": 3}
    assert client.submit(fail_until, *arguments, key="content").result() == "fixed"


def test_cancelled_call_starts_again(client: Client, trace: Path) -> None:
    client.pause(service="call")
    first = client.submit(calls.note, str(trace), "late", key="content")
    assert first.cancel()
    again = client.submit(calls.note, str(trace), "late", key="content")
    client.resume(service="call")
    assert again.result(PATIENCE_SECONDS) == "late"
    assert (made(trace), again.full_name) == ({"late": 1}, first.full_name)


def test_unsettled_call_of_another_client_is_awaited(
    yard: Yard, client: Client, trace: Path
) -> None:
    client.pause(service="call")
    one = client.submit(calls.note, str(trace), "once", key="content")
    with Client(state=yard.state) as other:
        two = other.submit(calls.note, str(trace), "once", key="content")
        assert other.show(two.full_name)["state"] == TaskState.READY.name.lower()
        client.resume(service="call")
        assert two.result(PATIENCE_SECONDS) == one.result(PATIENCE_SECONDS) == "once"
    assert made(trace) == {"once": 1}


def test_async_client_names_by_content(yard: Yard, trace: Path) -> None:
    async def scenario() -> None:
        for _ in range(2):
            async with AsyncClient(state=yard.state) as client:
                more: Any = {"key": "content"}
                assert await client.submit(calls.note, str(trace), "a", **more) == "a"
                futures = await client.map(calls.note, [str(trace)] * 2, "bc", **more)
                assert await client.gather(futures) == ["b", "c"]
        assert made(trace) == {"a": 1, "b": 1, "c": 1}

    asyncio.run(scenario())


def test_key_needs_content(client: Client) -> None:
    lock = threading.Lock()
    with pytest.raises(NotEncodable, match="key of function lambda: it uses 'lock', of type lock"):
        client.submit(lambda: lock, key="content")
    with pytest.raises(NotEncodable, match=r"key of argument 'x': a value of type generator has"):
        client.submit(lambda x: x, (number for number in [1]), key="content")
    with pytest.raises(UserError, match="name and key: give only one"):
        client.submit(calls.power, 2, key="content", name="two")
    with pytest.raises(UserError, match="key: only for function objects"):
        client.submit("operator:neg", 2, key="content")
    # Another value is an argument.
    assert client.submit(sorted, ["bb", "a"], key=len).result(PATIENCE_SECONDS) == ["a", "bb"]


def test_task_of_no_function_is_refused() -> None:
    with pytest.raises(UserError, match=r"task 3: must be a function \(options are given by name"):
        taskyard.task(3)  # type: ignore[call-overload]


def test_task_after_a_fork_has_its_own_client(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "_clients", task_module.ProcessClients())
    monkeypatch.setenv("TASKYARD_STATE", str(yard.state))
    ours = task_module.default_client()
    child = os.fork()
    if not child:
        status = 1
        try:
            theirs = task_module.default_client()
            status = int(theirs is ours or double.submit(4).result(PATIENCE_SECONDS) != 8)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    ours.close()
