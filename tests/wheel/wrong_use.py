"""Mistakes that a type checker finds. With `mypy --strict`, an ignored line without an error of its
kind is an error itself. It is never run."""

import taskyard


def cube(number: int) -> int:
    return number**3


@taskyard.task
def half(number: int) -> float:
    return number / 2


def mistakes(client: taskyard.Client, executor: taskyard.Executor) -> None:
    taskyard.Clinet()  # type: ignore[attr-defined]
    executor.submit(cube, "3")  # type: ignore[arg-type]
    executor.submit(cube, 1, 2)  # type: ignore[call-arg]
    text: str = executor.submit(cube, 3).result()  # type: ignore[assignment]
    text = client.submit(cube, 3).result()  # type: ignore[assignment]
    client.submit(3)  # type: ignore[arg-type]
    text = client.submit(cube, 3).result()  # type: ignore[assignment]
    half("3")  # type: ignore[arg-type]
    half.submit("3")  # type: ignore[arg-type]
    text = half.submit(3).result()  # type: ignore[assignment]
    taskyard.result(3)  # type: ignore[arg-type]
    client.show(text, timeout="1 s")  # type: ignore[arg-type]
    client.cuont("greetings")  # type: ignore[attr-defined]
    client.campaign(b"greetings")  # type: ignore[arg-type]
