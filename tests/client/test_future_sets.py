"""Many futures of functions: gathered, scattered, as completed, with output and tracebacks."""

from __future__ import annotations

import asyncio
from concurrent.futures import FIRST_COMPLETED
from typing import TYPE_CHECKING, NamedTuple

import pytest

import taskyard
from taskyard.client.client import AsyncClient
from taskyard.client.futures import as_completed, wait
from taskyard.client.internal import InternalClient
from taskyard.errors import UserError
from tests.cli.yard import Yard, running
from tests.client import function_calls as calls
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A service that no worker offers: its tasks wait.
UNSERVED = "unserved"


class Pair(NamedTuple):
    left: object
    right: object


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("sets"), worker=False) as running_yard:
        yield running_yard.start_worker("--allow-pickle", "--allow", "statistics")


@pytest.fixture
def client(yard: Yard) -> Iterator[InternalClient]:
    with InternalClient(state=yard.state) as connected:
        yield connected


def test_gather_returns_results_in_the_same_collections(client: InternalClient) -> None:
    one, two, three = client.map(calls.power, [1, 2, 3])
    assert client.gather(one) == 1
    assert client.gather([one, two, three]) == [1, 4, 9]
    assert client.gather(iter((one, two))) == [1, 4]
    nested = {"a": [one, (two, {three})], "b": Pair(one, "x"), "c": None}
    assert client.gather(nested) == {"a": [1, (4, {9})], "b": Pair(1, "x"), "c": None}
    assert client.gather([]) == []
    with taskyard.Executor(broker=client.broker) as executor:
        assert client.gather([executor.submit(calls.power, 4), one]) == [16, 1]


def test_gather_raises_or_skips_failures(client: InternalClient) -> None:
    good: taskyard.Future = client.submit(calls.power, 2)
    bad: taskyard.Future = client.submit(calls.fail, 5)
    with pytest.raises(calls.Odd):
        client.gather([good, bad])
    assert client.gather([good, bad], errors="skip") == [4]
    assert client.gather({"good": good, "bad": bad}, "skip") == {"good": 4}
    assert client.gather(bad, errors="skip") is None
    with pytest.raises(UserError, match="expected 'raise' or 'skip'"):
        client.gather([good], errors="ignore")  # type: ignore[call-overload]


def test_as_completed_yields_results(client: InternalClient) -> None:
    futures = client.map(calls.power, range(4))
    pairs = dict(as_completed(futures, PATIENCE_SECONDS, with_results=True))
    assert [pairs[one] for one in futures] == [0, 1, 4, 9]
    assert [*as_completed([], with_results=True)] == []
    failed = client.submit(calls.fail, 1)
    with pytest.raises(calls.Odd):
        list(as_completed([failed], PATIENCE_SECONDS, with_results=True))


def test_wait_returns_at_the_first_one(client: InternalClient) -> None:
    never = client.submit(b"", service=UNSERVED)
    first = client.submit(calls.power, 3)
    done, not_done = wait([never, first], PATIENCE_SECONDS, FIRST_COMPLETED)
    assert (done, not_done) == ({first}, {never})
    assert never.cancel()


def test_traceback_is_that_of_the_function(client: InternalClient) -> None:
    failed = client.submit(calls.fail, 5)
    text = failed.traceback(PATIENCE_SECONDS)
    assert text
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("function_calls.Odd: 5\n")
    assert failed.output() == f"before the failure\n{text}"
    assert client.submit(calls.power, 2).traceback(PATIENCE_SECONDS) is None
    # Of another client's task, a function by path and a program: as printed.
    assert client.future(failed.name).traceback(PATIENCE_SECONDS) == text
    by_path = client.submit("statistics:mean", "x").traceback(PATIENCE_SECONDS)
    assert by_path
    assert by_path.endswith("TypeError: can't convert type 'str' to numerator/denominator\n")
    program = client.submit(["python3", "-c", "print(1); 1 / 0"])
    text = program.traceback(PATIENCE_SECONDS)
    assert text
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert client.submit(["false"]).traceback(PATIENCE_SECONDS) is None


def test_output_is_what_the_task_printed(client: InternalClient) -> None:
    talk = client.submit(calls.talk, "hey")
    assert (talk.result(PATIENCE_SECONDS), talk.output()) == (3, "hey\nHEY\n")
    program = client.submit(["sh", "-c", r"echo a; printf '\377\n' >&2"])
    assert (program.result(PATIENCE_SECONDS), program.output()) == ("a\n", "a\n\ufffd\n")
    assert client.submit(b"", service=UNSERVED, name="waits").output() == ""
    assert client.cancel(["waits"]) == 1


def test_progress_draws_until_all_are_settled(
    client: InternalClient, capsys: pytest.CaptureFixture[str]
) -> None:
    futures = client.map(calls.power, range(5))
    taskyard.progress(futures, client.submit(calls.fail, 1), iter(futures))
    assert all(one.done() for one in futures)
    assert capsys.readouterr().out == ""


def test_async_client_gathers_and_scatters(yard: Yard) -> None:
    async def scenario() -> None:
        async with AsyncClient(state=yard.state) as client:
            futures = await client.map(calls.power, range(3))
            assert await client.gather({"a": futures}) == {"a": [0, 1, 4]}
            failed = client.submit(calls.fail, 5)
            with pytest.raises(calls.Odd):
                await client.gather([*futures, failed])
            assert await client.gather([*futures, failed], "skip") == [0, 1, 4]
            text = await failed.traceback()
            assert text
            assert await failed.output() == f"before the failure\n{text}"
            found = [pair async for pair in as_completed(futures, with_results=True)]
            assert sorted(value for _, value in found) == [0, 1, 4]

    asyncio.run(scenario())
