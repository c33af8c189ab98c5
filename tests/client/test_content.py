"""Names by content: equal in every process, and different where a part differs."""

from __future__ import annotations

import dataclasses
import enum
import functools
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

from taskyard.client.functions import ContentKeys, ContentName, campaign_of
from taskyard.errors import NotEncodable

SOURCE = """
import dataclasses, enum
LIMIT = 3
TABLE = {"b": [1, 2], "a": {"x", "y"}}
def helper(x): return x + LIMIT
def deep(x): return helper(x)
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
def f(x, y=2):
    'Add.'
    # a comment
    return deep(x) + y + len(TABLE)
@dataclasses.dataclass
class Point:
    x: int
    def norm(self): return abs(self.x)
class Color(enum.Enum):
    RED = 1
def g(p): return Point(p).norm() if p else Color.RED
def adder(n): return lambda x: x + n
"""


def names(source: str = SOURCE) -> dict[str, ContentName]:
    """Return the names of calls of the functions in a source."""
    space: dict[str, Any] = {"__name__": "content_source"}
    sys.modules["content_source"] = module = ModuleType("content_source")
    vars(module).update(space)
    exec(compile(source, "<source>", "exec"), vars(module))  # noqa: S102  # our own
    found = {name: vars(module)[name] for name in ("f", "g", "even", "odd")}
    found["adder"] = vars(module)["adder"](1)
    return {name: _name(one, 1) for name, one in found.items()}


def _name(function: Any, *args: object, **kwargs: object) -> ContentName:
    found = ContentName.of(ContentKeys(function).of(args, kwargs)[0])
    assert found is not None
    return found


def key(value: object) -> str:
    return _name(lambda x: x, value).arguments


def changed(old: str, new: str) -> dict[str, str]:
    """Return the parts of names that a change of the source changes."""
    assert old in SOURCE
    before, after = names(), names(SOURCE.replace(old, new))
    found = {
        name: " ".join(
            part for part in one._fields if getattr(one, part) != getattr(after[name], part)
        )
        for name, one in before.items()
    }
    return {name: parts for name, parts in found.items() if parts}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("# a comment", "# another one, and a line\n", {}),
        ("deep(x) + y", "deep(x) - y", {"f": "code"}),
        ("y=2", "y=3", {"f": "uses arguments"}),
        ("LIMIT = 3", "LIMIT = 4", {"f": "uses"}),
        ("x + LIMIT", "x - LIMIT", {"f": "uses"}),
        ("[1, 2]", "[2, 1]", {"f": "uses"}),
        ('{"b": [1, 2], "a": {"x", "y"}}', '{"a": {"y", "x"}, "b": [1, 2]}', {}),
        ("n == 0 or", "n < 1 or", {"even": "code", "odd": "uses"}),
        ("abs(self.x)", "self.x", {"g": "uses"}),
        ("RED = 1", "RED = 2", {"g": "uses"}),
        ("x + n", "n + x", {"adder": "code"}),
    ],
)
def test_change_of_the_source_changes_a_part(old: str, new: str, expected: dict[str, str]) -> None:
    assert changed(old, new) == expected


def test_closure_is_a_part() -> None:
    def adder(number: int) -> Any:
        return lambda x: x + number

    one, two = _name(adder(1), 1), _name(adder(2), 1)
    assert (one.code, one.arguments) == (two.code, two.arguments)
    assert one.uses != two.uses


@dataclasses.dataclass
class Pair:
    left: object
    right: object = None


class Kind(enum.Enum):
    A = 1
    B = 2


#: All differ, and none is equal to another in its content.
VALUES: list[Any] = [
    *(None, True, 1, 1.0, -0.0, 0.0, float("nan"), 1j, "1", b"1", "\udcff", 10**30),
    *([], (), {}, set(), [1], (1,), {1}, [[1]], [1, 2], [2, 1], {"a": 1}, {"a": 2}, [True], [1.0]),
    *(np.arange(3), np.arange(3.0), np.arange(3.0).reshape(1, 3), np.zeros(0), np.array(3)),
    *(np.float64(1.0), np.array(["a", None], dtype=object), np.arange(3.0, dtype=">f8")),
    *(Pair(1), Pair(2), Pair(1, 1), Kind.A, Kind.B, Pair, Kind, Path("a"), range(3), slice(1)),
    *(len, np.sum, functools.partial(int, base=2), functools.partial(int, base=3), bytearray(b"1")),
]


def test_values_of_other_content_have_other_keys() -> None:
    keys = [*map(key, VALUES)]
    assert len(set(keys)) == len(keys)


def test_values_of_equal_content_have_equal_keys() -> None:
    shared = [1]
    assert key([shared, shared]) == key([[1], [1]])
    assert key(np.arange(6.0)[::2]) == key(np.array([0.0, 2.0, 4.0]))
    assert key({"a": 1, "b": {2, 3}}) == key({"b": {3, 2}, "a": 1})
    assert key(Pair({"x", "y"})) == key(Pair({"y", "x"}))
    itself: list[Any] = [1]
    itself.append(itself)
    other: list[Any] = [1]
    other.append(other)
    assert key(itself) == key(other)


def test_keys_are_equal_in_another_process() -> None:
    program = textwrap.dedent("""
        from tests.client.test_content import VALUES, _name, key, names
        print([*map(key, VALUES)], [*map(str, names().values())])
    """)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": ":".join([*sys.path, "."]), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, two = (run.communicate()[0] for run in runs)
    assert one == two != ""


def test_arguments_are_compared_by_their_parameters() -> None:
    def f(x: int, y: int = 2, *more: int, z: int = 3) -> None: ...

    assert _name(f, 1) == _name(f, x=1) == _name(f, 1, 2) == _name(f, 1, z=3, y=2)
    assert len({_name(f, 1, 2, 3), _name(f, 1, 3), _name(f, 1, z=4)}) == 3
    assert _name(f, 1, 2, bad=3).arguments  # the call will raise it


def test_deeply_nested_value_has_no_key() -> None:
    value: list[Any] = []
    for _ in range(5_000):
        value = [value, None, value]
    with pytest.raises(NotEncodable, match="too deeply nested"):
        key(value)


def test_campaign_is_the_qualified_name_of_the_function() -> None:
    assert campaign_of(names) == "tests.client.test_content.names"
    assert campaign_of(functools.partial(np.sum, axis=1)) == "numpy.sum"
    own = FunctionType((lambda: None).__code__, {"__name__": "__main__"}, "fit")
    assert campaign_of(own).endswith("lambda")
