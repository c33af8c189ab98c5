"""Functions by value that are pickled once, and those that are pickled for each call."""

from types import FunctionType
from typing import Any

import pytest

from taskyard.calls.main_functions import RepeatedFunctions


class Pickling:
    """Counts the functions that were pickled."""

    def __init__(self, program: str) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(program, self.names)  # noqa: S102  # a program of the test
        self.repeated, self.count = RepeatedFunctions(), 0

    def pickle(self, _function: FunctionType) -> str:
        self.count += 1
        return f"pickle {self.count}"

    def substitute(self) -> Any:
        return self.repeated.substitute(self.names["f"], self.pickle)


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): return x",
        "import os, math\ndef f(x, y=2): return os.path.join(x, str(math.pi))",
        "from json import dumps\nlimit = 3\ndef f(x): return [dumps(y) for y in x if y < limit]",
    ],
)
def test_function_is_pickled_once(program: str) -> None:
    made = Pickling(program)
    assert [made.substitute() for _ in range(3)] == ["pickle 1"] * 3


@pytest.mark.parametrize(
    "program",
    [
        "known = []\ndef f(x): known.append(x)",
        "class Own: pass\ndef f(): return Own()",
        "def f(known=[]): return known",
        "def g(): return 1\ndef f(): return g()",
        "table = {}\ndef f(): return [lambda: table[1]]",
        "def make(x):\n    def f(): return x\n    return f\nf = make(1)",
        "def f(*, known=1): return known",
        "def f(): pass\nf.calls = []",
    ],
)
def test_function_that_may_change_is_pickled_for_each_call(program: str) -> None:
    made = Pickling(program)
    assert made.substitute() is made.names["f"]
    assert made.count == 0


@pytest.mark.parametrize(
    "change",
    [
        "limit = 4",
        "limit = []",
        "def f(): return limit + 1",
        "f.__code__ = (lambda: limit * 2).__code__",
        "f.calls = []",
    ],
)
def test_changed_function_is_pickled_again(change: str) -> None:
    made = Pickling("limit = 3\ndef f(): return limit")
    first = made.substitute()
    exec(change, made.names)  # noqa: S102  # as above
    assert made.substitute() != first


def test_function_of_a_module_is_left_alone() -> None:
    made = Pickling("from json import dumps as f")
    assert made.substitute() is made.names["f"]
