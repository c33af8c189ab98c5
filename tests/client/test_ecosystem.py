"""Libraries that take any `concurrent.futures.Executor` take ours: dask and asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import dask.array
import dask.bag
import dask.base
import pytest
from dask.delayed import delayed as dask_delayed

from taskyard import Executor

if TYPE_CHECKING:
    from collections.abc import Iterator

# dask has few types.
compute: Any = dask.base.compute
delayed: Any = dask_delayed
from_sequence: Any = dask.bag.from_sequence


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(slots=1) as shared:
        yield shared


def add(*numbers: int) -> int:
    return sum(numbers)


def divide(one: int, other: int) -> float:
    return one / other


def test_dask_computes_collections(executor: Executor) -> None:
    array: Any = dask.array.arange(1000, chunks=250)
    bag: Any = from_sequence(range(20), npartitions=3)
    with dask.config.set(scheduler=executor):
        assert int((array**2).sum().compute()) == sum(number**2 for number in range(1000))
        assert bag.filter(lambda number: number % 2).sum().compute() == 100


def test_dask_raises_the_error_of_a_call(executor: Executor) -> None:
    with pytest.raises(ZeroDivisionError):
        delayed(add)(delayed(divide)(1, 0), 2).compute(scheduler=executor)


def test_asyncio_runs_calls_in_the_executor(executor: Executor) -> None:
    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(executor, add, number, 1) for number in range(5)]
        error = loop.run_in_executor(executor, divide, 1, 0)
        return [*await asyncio.gather(*calls), *await asyncio.gather(error, return_exceptions=True)]

    *sums, error = asyncio.run(main())
    assert sums == [1, 2, 3, 4, 5]
    assert isinstance(error, ZeroDivisionError)
