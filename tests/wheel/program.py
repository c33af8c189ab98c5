"""A user's program, run with the installed wheel: commands, calls and their types.

It needs a broker and a worker in its directory. `mypy --strict` checks the types that it asserts.
"""

from typing import Any, assert_type

import taskyard
from taskyard.client.exchanges import AwaitingRunner


def cube(number: int) -> int:
    return number**3


def types(client: taskyard.Client) -> None:
    """Assert the types of futures. It is never run."""
    assert_type(client.submit(cube, 3), taskyard.Future[int])
    assert_type(client.map(cube, range(3)), list[taskyard.Future[int]])
    assert_type(client.gather(client.map(cube, range(3))), list[int])
    assert_type(client.gather(client.submit(cube, 3)), int)
    assert_type(client.submit(["echo"]).result(), Any)
    for future, value in taskyard.as_completed(client.map(cube, [1]), with_results=True):
        assert_type(future, taskyard.Future[int])
        assert_type(value, int)


async def async_types(client: taskyard.AsyncClient) -> None:
    """Assert the types of awaited futures. It is never run."""
    assert_type(client.submit(cube, 3), taskyard.Future[int, AwaitingRunner])
    assert_type(await client.submit(cube, 3), int)
    assert_type(await client.map(cube, range(3)), list[taskyard.Future[int, AwaitingRunner]])


@taskyard.task(retries=1)
def half(number: int) -> float:
    return number / 2


def main() -> None:
    with taskyard.Executor(slots=1) as executor:
        assert_type(executor.submit(cube, 3).result(), int)
        assert [*executor.map(cube, range(3))] == [0, 1, 8]
    with taskyard.Client() as client:
        future = client.submit(["echo", "hello"], name="hello", campaign="greetings")
        assert future.result() == "hello\n"
        assert_type(client.show("greetings/hello"), dict[str, Any])
        assert client.submit("operator:add", args=[1, 2]).result() == 3
        called = client.submit(cube, 3)
        assert_type(called, taskyard.Future[int])
        assert called.result() == 27
        cubes = client.map(cube, range(3), campaign="cubes")
        assert_type(cubes, list[taskyard.Future[int]])
        assert_type(client.gather(cubes), list[int])
        assert client.gather(cubes) == [0, 1, 8]
        for done, value in taskyard.as_completed(cubes, with_results=True):
            assert_type(done, taskyard.Future[int])
            assert_type(value, int)
        total = client.submit(sum, cubes)
        assert total.result() == 9
        assert_type(half.map([1, 2]), list[taskyard.Future[float]])
        assert_type(half.submit(3), taskyard.Future[float])
        assert (half(3), half.submit(3).result()) == (1.5, 1.5)
        assert_type(client.campaign("greetings").status(), dict[str, int])
    try:
        client.status()
    except taskyard.TaskyardError as error:
        assert_type(error.code, str)


if __name__ == "__main__":
    main()
