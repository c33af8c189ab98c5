"""Function objects as tasks: arguments, options, values and exceptions, in both clients."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import math
import pickle
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.client.client import AsyncClient
from taskyard.client.futures import Future, as_completed
from taskyard.client.internal import InternalClient
from taskyard.errors import NotEncodable, Refused, TaskFailed, UserError
from tests.cli.yard import Yard, running
from tests.client import function_calls as calls
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A service that no worker offers: its tasks wait.
UNSERVED = "unserved"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("functions"), worker=False) as running_yard:
        yield running_yard.start_worker("--allow-pickle", "--allow", "operator")


@pytest.fixture
def client(yard: Yard) -> Iterator[InternalClient]:
    with InternalClient(state=yard.state) as connected:
        yield connected


def value(future: Future) -> object:
    return future.result(PATIENCE_SECONDS)


def test_function_is_called_with_its_arguments(client: InternalClient) -> None:
    assert value(client.submit(calls.power, 3)) == 9
    assert value(client.submit(calls.power, 2, 5, negative=True)) == -32
    assert value(client.submit(calls.power, args=[2], kwargs={"exponent": 3})) == 8
    assert value(client.submit(partial(calls.power, exponent=3), 2)) == 8
    assert value(client.submit(math.hypot, 3, 4)) == 5.0
    assert value(client.submit(calls.pair, (1, {2}), None)) == ((1, {2}), None)


def test_path_of_a_function_takes_arguments_in_the_same_way(client: InternalClient) -> None:
    assert value(client.submit("operator:add", 1, 2)) == 3
    assert value(client.submit("operator:add", args=[1, 2])) == 3
    assert value(client.submit("operator:add", 1, 2, retries=1, priority=3)) == 3


def test_names_of_options_are_options_and_others_are_arguments(client: InternalClient) -> None:
    future = client.submit(calls.power, 3, exponent=3, name="cube", lane="l", retries=2)
    assert (value(future), future.name) == (27, "cube")
    assert client.show("cube")["lane"] == "l"
    named = client.submit(calls.keywords, kwargs={"name": 1, "lane": 2}, name="both", inputs=3)
    assert value(named) == {"name": 1, "lane": 2, "inputs": 3}
    power = client.submit(calls.power, 2)
    assert power.name.startswith("power-")
    lane = client.submit(calls.power, 5, exponent=2, lane="{0}-{exponent}", campaign="c")
    assert (value(lane), client.show(lane.full_name)["lane"]) == (25, "5-2")


def test_name_that_may_be_option_or_argument_is_refused(client: InternalClient) -> None:
    with pytest.raises(UserError, match="'name': both an option of a task and a parameter of gre"):
        client.submit(calls.greet, name="Ann")
    with pytest.raises(UserError, match="'lane': both an option"):
        client.map(calls.greet, ["Ann"], lane="l")
    both = client.submit(calls.greet, name="task", kwargs={"name": "Ann", "lane": "x"})
    assert value(both) == "hello Ann x"
    with pytest.raises(UserError, match=r"unexpected argument 'retrys' \(did you mean the option"):
        client.submit(calls.power, 2, retrys=2)
    with pytest.raises(UserError, match=r"unexpected argument 'key' \(name= names its task"):
        client.submit(calls.power, 2, key="two")
    with pytest.raises(UserError, match="did you mean the option 'retries'"):
        client.submit("operator:neg", 2, retires=2)
    with pytest.raises(UserError, match="argument 'a': given twice"):
        client.submit(calls.keywords, a=1, kwargs={"a": 2})
    with pytest.raises(UserError, match=r"either by args= or one by one"):
        client.submit(calls.power, 1, args=[2])
    with pytest.raises(UserError, match="at least one iterable"):
        client.map(calls.power)
    with pytest.raises(UserError, match="expected a function"):
        client.map(["echo"], ["a"])  # type: ignore[arg-type]


def test_named_call_of_a_program_that_is_run_again_is_the_same_task(client: InternalClient) -> None:
    assert value(client.submit(calls.power, 2, name="once")) == 4
    assert isinstance(client.submit(calls.fail, 7, name="odd").exception(), calls.Odd)
    with InternalClient(client.broker) as other:
        assert value(other.submit(calls.power, 2, name="once")) == 4
        assert isinstance(other.submit(calls.fail, 7, name="odd").exception(), calls.Odd)
        assert len([*other.tasks(match="once")]) == 1


def test_other_call_of_a_known_name_explains_the_conflict(client: InternalClient) -> None:
    assert value(client.submit(calls.power, 2, name="once")) == 4
    with InternalClient(client.broker) as other:
        error = other.submit(calls.power, 3, name="once").exception(PATIENCE_SECONDS)
        assert isinstance(error, Refused)
        assert "key='content'" in error.__notes__[0]
        assert value(other.future("once")) == 4


def test_map_calls_with_rows_of_iterables(client: InternalClient) -> None:
    assert [*map(value, client.map(calls.power, range(5)))] == [0, 1, 4, 9, 16]
    cubes = client.map(calls.power, iter([2, 3, 4]), [3, 3], negative=True, campaign="cubes")
    assert [*map(value, cubes)] == [-8, -27]
    big = bytes(5000)
    assert [*map(value, client.map(lambda x: x + len(big), [1, 2]))] == [5001, 5002]
    assert {one.campaign for one in cubes} == {"cubes"}
    assert client.map(calls.power, []) == []


def test_exception_is_the_functions_own(client: InternalClient) -> None:
    future = client.submit(calls.fail, 7)
    with pytest.raises(calls.Odd) as raised:
        value(future)
    assert raised.value.number == 7
    assert "in fail\n    raise Odd(number)" in str(raised.value.__cause__)
    assert future.exception() is raised.value
    assert future.state == "failed"
    assert future.why() == "it failed after 1 attempt: tests.client.function_calls.Odd: 7"
    # The task of another client has no token: its reason is the failure.
    with pytest.raises(TaskFailed, match=r"function_calls\.Odd: 7"):
        value(client.future(future.name))


def test_value_is_unpickled_once_in_the_thread_of_the_caller(client: InternalClient) -> None:
    future = client.submit(calls.pair, [], None)
    settled = threading.Event()
    future.add_done_callback(lambda _: settled.set())
    assert settled.wait(PATIENCE_SECONDS)
    assert vars(future)["_outcome"]  # settled, and not unpickled
    first = value(future)
    assert vars(future)["_outcome"] is None
    assert future.result() is first


def test_callback_may_ask_for_the_exception(client: InternalClient) -> None:
    seen: list[BaseException | None] = []
    done = threading.Event()

    def on_done(future: concurrent.futures.Future[Any]) -> None:
        seen.append(future.exception())
        done.set()

    client.submit(calls.fail, 3).add_done_callback(on_done)
    assert done.wait(PATIENCE_SECONDS)
    assert isinstance(seen[0], calls.Odd)


def test_future_of_another_client_has_the_value(client: InternalClient, yard: Yard) -> None:
    future = client.submit(calls.pair, 1, (2,), name="kept")
    assert value(future) == (1, (2,))
    with InternalClient(state=yard.state) as other:
        assert other.future("kept").result(PATIENCE_SECONDS) == (1, (2,))
        assert other.result("kept") == (1, (2,))
        assert pickle.loads(other.future("kept").bytes(PATIENCE_SECONDS)) == (1, (2,))  # noqa: S301
    assert future.bytes() == client.output("kept", "result")


@pytest.mark.parametrize("kind", ["value", "exit"])
def test_result_that_cannot_be_unpickled_is_a_failure(client: InternalClient, kind: str) -> None:
    future = client.submit(calls.unreadable, kind)
    with pytest.raises(TaskFailed, match=r"can't be unpickled: (ValueError|SystemExit)"):
        value(future)
    assert isinstance(future.exception(), TaskFailed)


def test_printed_text_that_looks_like_an_exception_is_not_unpickled(client: InternalClient) -> None:
    forged = base64.b64encode(pickle.dumps((calls.Unreadable(SystemExit(5)), "text"))).decode()
    future = client.submit(calls.die, f"[pickled exception]  {forged}", retries=0)
    assert isinstance(future.exception(PATIENCE_SECONDS), TaskFailed)


def test_argument_that_cannot_be_pickled_is_refused_at_once(client: InternalClient) -> None:
    with pytest.raises(NotEncodable, match="argument 1"):
        client.submit(calls.power, threading.Lock())


def test_many_failures_keep_their_exceptions(client: InternalClient) -> None:
    futures = client.map(calls.fail, range(200))
    for future in as_completed(futures, PATIENCE_SECONDS):
        assert isinstance(future.exception(), calls.Odd)
    assert [one.exception().number for one in futures] == [*range(200)]  # type: ignore[union-attr]


def test_async_client_calls_functions(yard: Yard) -> None:
    async def scenario() -> None:
        async with AsyncClient(state=yard.state) as client:
            assert await client.submit(calls.power, 3, exponent=3) == 27
            futures = await client.map(calls.power, range(4), range(4))
            assert await asyncio.gather(*futures) == [1, 1, 4, 27]
            failed = client.submit(calls.fail, 5)
            with pytest.raises(calls.Odd) as raised:
                await failed
            assert failed.exception() is raised.value
            assert pickle.loads(await client.submit(calls.power, 4).bytes()) == 16  # noqa: S301
            named = client.submit(calls.power, 4, name="async-kept")
            assert await named == 16
            assert await (await client.future("async-kept")) == 16

    asyncio.run(scenario())


def test_why_names_the_option_that_a_worker_needs(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        running(tmp_path_factory.mktemp("plain")) as plain,
        InternalClient(state=plain.state) as client,
    ):
        future = client.submit(lambda: 1)
        assert "--allow-pickle" in future.why()
