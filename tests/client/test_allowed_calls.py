"""Function objects for workers with `--allow MODULE` alone, with a real broker and worker."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import re
from typing import TYPE_CHECKING, Any

import pytest

import taskyard
from taskyard.calls.pickled import RemoteTraceback, pickle_call
from taskyard.calls.plain_pickles import is_plain_call
from taskyard.client.client import AsyncClient, Client
from taskyard.client.results import decode_whole_result
from taskyard.core.blobs import Result
from taskyard.errors import TaskFailed, UserError
from tests.cli.yard import Yard, running
from tests.kit.processes import PATIENCE_SECONDS
from tests.wire.test_plain_pickles import HOSTILE

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("allowed"), worker=False) as running_yard:
        yield running_yard.start_worker("--allow", "math")


@pytest.fixture
def client(yard: Yard) -> Iterator[Client]:
    with Client(state=yard.state) as connected:
        yield connected


def value(future: Any) -> Any:
    return future.result(PATIENCE_SECONDS)


def test_allowed_module_is_enough_for_function_objects(client: Client) -> None:
    assert value(client.submit(math.factorial, 5)) == 120
    assert client.gather(client.map(math.gcd, [4, 6], [6, 9])) == [2, 3]
    assert value(client.submit(math.frexp, 8.0, retries=1)) == (0.5, 4)
    assert value(client.submit(math.frexp, 8.0, key="content")) == (0.5, 4)
    assert value(client.submit(math.floor, 2.5, name="floor")) == 2
    assert client.show("floor")["service"] == "call"


def test_large_arguments_are_loaded(client: Client) -> None:
    assert value(client.submit(math.fsum, [0.5] * 200_000)) == 100_000
    with pytest.raises(TypeError, match="must be real number"):
        value(client.submit(math.sqrt, b"x" * 2_000_000))


def test_results_go_into_allowed_calls(client: Client) -> None:
    first = client.submit(math.frexp, 8.0, name="first")
    assert value(client.submit(math.fsum, first)) == 4.5
    assert value(client.submit(math.fsum, taskyard.result("first"))) == 4.5
    assert value(client.submit("math:fsum", first)) == 4.5


def test_exceptions_come_back(client: Client) -> None:
    with pytest.raises(ValueError, match="math domain error") as raised:
        value(client.submit(math.sqrt, -1))
    assert isinstance(raised.value.__cause__, RemoteTraceback)


def test_other_modules_are_refused_for_good(client: Client) -> None:
    with pytest.raises(TaskFailed, match=r"module posix is not allowed .*--allow posix, or with"):
        value(client.submit(os.getpid, name="pid", retries=3))
    assert len(client.show("pid")["attempts"]) == 1


def test_functions_by_value_wait_for_a_worker_that_allows_pickle(client: Client) -> None:
    future = client.submit(lambda: 1)
    assert client.show(future.full_name)["service"] == "pickle"
    assert "start one with --allow-pickle" in future.why()
    future.cancel()


def test_other_clients_read_the_value(yard: Yard, client: Client) -> None:
    value(client.submit(math.frexp, 8.0, name="shared"))
    with Client(state=yard.state) as other:
        assert other.result("shared") == (0.5, 4)
        assert value(other.future("shared")) == (0.5, 4)


def test_async_client_submits_allowed_calls(yard: Yard) -> None:
    async def run() -> object:
        async with AsyncClient(state=yard.state) as client:
            return await client.submit(math.frexp, 8.0)

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE_SECONDS)) == (0.5, 4)


@pytest.mark.parametrize(
    "header",
    [b'{"pickle":1,"setup_file":"/x"}', b'{"pickle":1,"setup":"eA=="}'],
)
def test_headers_that_run_code_are_refused(client: Client, header: bytes) -> None:
    payload = header + b"\n" + pickle.dumps((math.sqrt, (4,), {}), 5)
    with pytest.raises(TaskFailed, match="pickled functions are not allowed"):
        value(client.submit(payload, service="call"))


def test_search_path_of_a_client_is_not_used(client: Client, tmp_path: Any) -> None:
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "evil.py").write_text("def run(): return 1\n")
    header = b'{"pickle":1,"path":["%b"]}\n' % bytes(tmp_path)
    body = b"\x80\x05\x8c\x09math.evil\x8c\x03run\x93)}\x87."
    with pytest.raises(TaskFailed, match="'math' is not a package"):
        value(client.submit(header + body, service="call"))


def test_worker_survives_hostile_pickles(client: Client) -> None:
    header = b'{"pickle":1}\n'
    futures = [client.submit(header + one, service="call") for one in HOSTILE.values()]
    for name, future in zip(HOSTILE, futures, strict=True):
        with pytest.raises(TaskFailed) as failed:
            pytest.fail(f"{name}: {value(future)}")
        # Not that the process has ended.
        assert re.search(
            "not allowed|pickle|only plain data|not a class|not fetched", str(failed.value)
        ), name
        assert len(client.show(future.full_name)["attempts"]) == 1, name
    assert value(client.submit(math.factorial, 5)) == 120


@taskyard.task
def double(number: int) -> int:
    return 2 * number


def test_task_of_a_module_is_plain() -> None:
    assert is_plain_call(pickle_call(double, [1], {}).pickle)


def test_pickle_in_place_of_json_is_not_loaded(yard: Yard) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(yard.state / "evil"),)

    with pytest.raises(UserError, match=r"result of x is pickled \(read it by"):
        decode_whole_result("x", b"call", Result(pickle.dumps(Evil(), 5)))
    assert not (yard.state / "evil").exists()
