"""Functions that the tests of a client's function calls have called in other processes."""

import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn


class Odd(Exception):
    """An exception that needs its argument to be unpickled."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Unreadable:
    """Can be pickled, and raises its argument when it is unpickled in another process."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _raise, (self.error,)


def _raise(error: BaseException) -> NoReturn:
    raise error


def power(base: int, exponent: int = 2, *, negative: bool = False) -> int:
    result: int = base**exponent
    return -result if negative else result


def greet(name: str, lane: str = "none") -> str:
    return f"hello {name} {lane}"


def keywords(**named: object) -> dict[str, object]:
    return named


def pair(left: object, right: object) -> tuple[object, object]:
    return left, right


def fail(number: int) -> NoReturn:
    print("before the failure")  # noqa: T201  # output of a task
    raise Odd(number)


def unreadable(kind: str) -> Unreadable:
    return Unreadable({"value": ValueError("not here"), "exit": SystemExit(9)}[kind])


def die(line: str) -> NoReturn:
    """Print a line and end the process, as a crash would."""
    print(line, flush=True)  # noqa: T201  # output of a task
    os.kill(os.getpid(), 9)
    time.sleep(60)
    raise AssertionError


def talk(text: str) -> int:
    print(text)  # noqa: T201  # output of a task
    print(text.upper(), file=sys.stderr)  # noqa: T201  # output of a task
    return len(text)


def note(path: str, line: str) -> str:
    """Append a line to a file: a call leaves a trace."""
    with Path(path).open("a") as file:
        file.write(f"{line}\n")
    return line
