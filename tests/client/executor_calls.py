"""Functions that the tests of the executor have called in other processes: it imports little."""

import ctypes
import logging
import os
import pickle
import sys
from pathlib import Path
from typing import Any, NoReturn

from taskyard import Executor


class Odd(Exception):
    """An exception that stores its argument under another name."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class OneWay(Exception):
    """Can be pickled, and can't be unpickled."""

    def __init__(self, _first: int, _second: int) -> None:
        super().__init__("one way")


class Unreadable:
    """Can be pickled, and raises its argument when another process unpickles it."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return _unpickle_unreadable, (os.getpid(), type(self), self.kind)


class Unpicklable:
    """Can't be pickled, by cloudpickle either."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("never")


class UnreadableError(Unreadable, Exception):
    """An exception that raises when another process unpickles it."""


class NoRepr(Exception):
    """Can't be shown."""

    def __repr__(self) -> str:
        raise SystemExit(4)


def _unpickle_unreadable(pid: int, kind: type[Any], raised: type[BaseException]) -> Any:
    if os.getpid() != pid:
        raise raised
    return kind(raised)


def give_unreadable(kind: type[BaseException]) -> Unreadable:
    return Unreadable(kind)


def raise_unreadable(kind: type[BaseException]) -> NoReturn:
    raise UnreadableError(kind)


def sorted_pairs(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], list[tuple[str, Any]]]:
    return args, sorted(kwargs.items())


def refuse_odd(number: int) -> int:
    if number % 2:
        raise Odd(number)
    return number


def raise_this(error: BaseException) -> NoReturn:
    raise error


def raise_one_way() -> NoReturn:
    raise OneWay(1, 2)


def raise_large() -> NoReturn:
    raise ValueError("x" * 200_000)


def task_and_process(_number: int) -> tuple[str, int]:
    return os.environ["TASKYARD_TASK"], os.getpid()


def read(fifo: str) -> str:
    """Read from a FIFO. Blocks until it has a writer."""
    return Path(fifo).read_text()


def write(fifo: str) -> str:
    """Write to a FIFO. Blocks until it has a reader."""
    Path(fifo).write_text("met")
    return "met"


def begin_and_read(begun: str, fifo: str) -> str:
    """Tells that it has begun, then waits."""
    with Path(begun).open("a") as file:
        file.write("x")
    return read(fifo)


def crash() -> None:
    os._exit(7)


def fault() -> None:
    ctypes.string_at(0)


def size(content: bytes) -> int:
    return len(content)


def make(bytes_count: int) -> bytes:
    return bytes(bytes_count)


def print_and_double(number: int) -> int:
    sys.stdout.write("doubling\n")
    sys.stderr.write("here\n")
    return 2 * number


def sum_elsewhere(numbers: list[int]) -> int:
    """Sum numbers with another executor."""
    with Executor(slots=1) as executor:
        return executor.submit(sum, numbers).result()


def print_and_exit(text: str) -> None:
    """Act like a program that logs its input and crashes."""
    print(text, flush=True)  # noqa: T201
    os._exit(3)


#: Standard files, the socket and three pipes to the worker, the directory, files of measurements,
#: and this listing.
DESCRIPTORS_MAX = 11


def open_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def log_handlers() -> list[str]:
    loggers = [logging.getLogger(), logging.getLogger("taskyard"), logging.getLogger("asyncio")]
    return [repr(one) for logger in loggers for one in logger.handlers]


def print_to_both(text: str) -> int:
    """Print to stdout, and log to stderr. Return how many."""
    print("to stdout:", text)  # noqa: T201 - it is about prints
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("to stderr: %(message)s"))
    logging.getLogger("pool").addHandler(handler)
    logging.getLogger("pool").warning(text)
    return 2


def print_and_read(text: str, fifo: str) -> str:
    print(text)  # noqa: T201 - it is about prints
    return Path(fifo).read_text()


#: Set by an initializer.
_kept: list[Any] = []


def keep(value: Any) -> None:
    _kept[:] = [value]


def kept() -> Any:
    return _kept[0]


def append_pid(file: str) -> None:
    with Path(file).open("a") as opened:
        opened.write(f"{os.getpid()}\n")


def pid_of(_number: int) -> int:
    return os.getpid()
