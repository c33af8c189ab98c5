"""Plain pickles: calls and data that are loaded from any sender, and pickles that are not."""

from __future__ import annotations

import datetime as dt
import math
import os
import pickle
import sys
from collections import OrderedDict
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.calls.inputs import Input, available, resolve
from taskyard.calls.pickled import guarded, pickle_call
from taskyard.calls.plain_pickles import PlainLoader, is_plain_call, looks_pickled
from taskyard.errors import UserError
from taskyard.worker.allow_list import AllowList

if TYPE_CHECKING:
    from collections.abc import Callable

DAY = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)


class Calls:
    """An object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


class Builds(Calls):
    """An object whose unpickling sets attributes of a function."""

    def __reduce__(self) -> Any:
        return (*self.reduced, (None, {"__doc__": "changed"}))


def call(function: object, *args: object) -> bytes:
    return pickle.dumps((function, args, {}), 5)


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def glob(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def load(pickled: bytes) -> tuple[Any, Any, Any]:
    loader = PlainLoader(AllowList(["math", "json"]).find_pickled)
    with guarded(loader.loads):
        return loader.load_call(lambda: loader.loads(pickled))


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, 2.5, "text", b"bytes", bytearray(b"x"), True, 2**90, -1, 1j),
        {"a": [{1, 2}, frozenset({3}), range(4)]},
        [DAY, DAY.date(), DAY.time(), DAY.date(), dt.timedelta(1), Decimal("1.5")],
        "x" * 70_000,
        [*range(3000)],
        "\x93R\x81",
        {(1, ("a", frozenset({2.5}))): [DAY] * 3, Decimal("-1e-9"): DAY.date(), DAY: {(1, 2): ()}},
        [{(*range(100),): number} for number in range(2000)],
        {(2**90, b"x", None): [range(2**70), 3 + 4j], "k" * 100_000: (dt.date, Decimal)},
    ],
)
def test_plain_data_is_loaded_with_its_types(value: object) -> None:
    pickled = pickle_call(math.sqrt, [value], {"x": value}).pickle
    assert is_plain_call(pickled)
    assert load(pickled) == (math.sqrt, (value,), {"x": value})


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda: 1, ()),
        (partial(math.pow, 2), (3,)),
        ("abc".upper, ()),
        (sorted, ([1], math.sqrt)),
        (math.sqrt, (OrderedDict(),)),
        (math.sqrt, (Path(),)),
    ],
)
def test_other_calls_are_not_plain(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert not is_plain_call(pickle_call(function, args, {}).pickle)


SYSTEM = glob("os", "system")
SQRT = glob("math", "sqrt")
END = b")}\x87."  # no arguments

RESOLVE = glob("taskyard.calls.inputs", "resolve")
LENGTH = (1 << 20).to_bytes(4, "little")
EVIL = RESOLVE + text("evil") + text("text") + b"\x86R"


def wide(count: int) -> bytes:
    """Return the opcodes of a tuple that has itself twice, and so on: 2 ** count parts."""
    return b")\x94" + b"".join(b"h%c\x86\x94" % number for number in range(count))


def decimal(opcodes: bytes) -> bytes:
    return b"\x80\x05" + SQRT + glob("decimal", "Decimal") + opcodes + b"\x85R\x85}\x87."


HOSTILE = {
    "another module": call(os.getpid),
    "a module that an allowed one imported": b"\x80\x05" + glob("json", "codecs.open") + END,
    "dunder of an allowed module": b"\x80\x05" + glob("math", "__loader__.load_module") + END,
    "a call of another function": call(math.sqrt, Calls(os.mkdir, "/nowhere/called")),
    "a call of eval": call(math.sqrt, Calls(eval, "1/0")),
    "a call of getattr": call(math.sqrt, Calls(getattr, "", "upper")),
    "a nested call of an allowed function": call(math.sqrt, Calls(math.factorial, 5)),
    "a call of the function itself": b"\x80\x05" + SQRT + b"\x94" + b"K\x01\x85R" + END,
    "the function twice": call(math.sqrt, math.sqrt),
    "attributes of a function": call(math.sqrt, Builds(math.factorial, 5)),
    "BUILD of the function": b"\x80\x05" + SQRT + b"}" + text("x") + b"K\x01sb" + END,
    "NEWOBJ": b"\x80\x05" + glob("datetime", "date") + b"K\x01\x85\x81" + END,
    "INST": b"(S'true'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'true'\no.",
    "GLOBAL": b"cos\nsystem\n(S'true'\ntR.",
    "EXT": b"\x80\x02\x82\x01.",
    "PERSID": b"Pabc\n.",
    "a memo of many gigabytes": b"\x80\x05Nr\xff\xff\xff\x7f.",
    "bytes of many gigabytes": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "a frame of many gigabytes": b"\x80\x05\x95" + (1 << 40).to_bytes(8, "little") + SQRT + END,
    "a list that is filled from a range": call(math.sqrt, slice(0, 0), range(10**12)),
    "a name that is made by a result": (
        b"\x80\x05" + SQRT + text("os") + glob("taskyard.calls.inputs", "resolve")
        # Its call returns a text, the second part of the next global.
        + text("evil") + text("text") + b"\x86R" + b"\x93)R\x85}\x87."
    ),
    "a result with a function": call(math.sqrt, Calls(resolve, "pickled", "pickle")),
    "a result in place of the function": call(Calls(resolve, "function", "pickle")),
    "the function that inserts results": call(math.sqrt, resolve, "called", "x"),
    "that function in the memo": (
        b"\x80\x05" + SQRT + RESOLVE + b"\x94" + text("evil") + text("text")
        + b"\x86Rh\x00\x86}\x87."
    ),
    "that function in a list": call(math.sqrt, [resolve]),
    "that function as a key": call(math.sqrt, {resolve: 1}),
    "that function as the call's function": call(resolve, "called", "x"),
    "that function in place of the arguments": b"\x80\x05" + SQRT + RESOLVE + b"}\x87.",
    "a result whose name is a tuple": b"\x80\x05" + SQRT + RESOLVE + b"))\x86R\x85}\x87.",
    "a result with one argument": b"\x80\x05" + SQRT + RESOLVE + text("evil") + b"\x85R\x85}\x87.",
    "a result of an unknown kind": call(math.sqrt, Calls(resolve, "called", "x")),
    "a result that needs a result": call(math.sqrt, Calls(resolve, "asks", "pickle")),
    "a result as a key": b"\x80\x05" + SQRT + b"}" + EVIL + b"Ns\x85}\x87.",
    "a result as a number of a range": (
        b"\x80\x05" + SQRT + glob("builtins", "range") + EVIL + b"\x85R\x85}\x87."
    ),
    # A list of the arguments gets the call itself, which has the function.
    "the call among its arguments": (
        b"\x80\x05" + SQRT + b"]\x94\x85}\x87\x94h\x00h\x01ah\x01."
    ),
    "a key that is deep": b"\x80\x05" + SQRT + b"})" + b"\x85" * 1_500_000 + b"Ns\x85}\x87.",
    "a deep list": b"\x80\x05" + SQRT + b"]" * 2000 + b"a" * 1999 + b"\x85}\x87.",
    "a key that is wide": b"\x80\x05" + SQRT + b"}" + wide(64) + b"Ns\x85}\x87.",
    "a set item that is wide": b"\x80\x05" + SQRT + b"\x8f(" + wide(64) + b"\x90\x85}\x87.",
    "a frozen set that is wide": b"\x80\x05" + SQRT + b"(" + wide(64) + b"\x91\x85}\x87.",
    "a decimal of a long number": decimal(b"\x8b" + LENGTH + b"\x7f" * (1 << 20)),
    "a decimal of a long text": decimal(b"X" + LENGTH + b"7" * (1 << 20)),
    "a range of long numbers": call(math.sqrt, range(0, 7 ** 400_000, 3 ** 300_000)),
    "main script": call(0).replace(b"K\x00", glob("__main__", "x")),
    "cloudpickle": pickle_call(lambda: 1, (), {}).pickle,
    "no call": pickle.dumps([1]),
    "no function": pickle.dumps(("x", (), {})),
    "truncated": call(math.sqrt, 1)[:-3],
    "empty": b"",
}  # fmt: skip

INPUTS = [
    Input("evil", b"exec", b"system"),
    Input("pickled", b"call", call(os.getpid)),
    Input("called", b"exec", call(Calls(os.mkdir, "/nowhere/called"))),
    Input("asks", b"call", pickle.dumps(Calls(resolve, "evil", "text"), 5)),
    Input("function", b"call", pickle.dumps(math.sqrt, 5)),
]


@pytest.mark.parametrize("pickled", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_are_refused_and_call_nothing(pickled: bytes) -> None:
    called: list[str] = []
    watched = ("exec", "os.system", "os.mkdir", "import", "marshal.loads", "subprocess.Popen")
    is_on = True
    sys.addaudithook(lambda event, _: called.append(event) if is_on and event in watched else None)
    with available(INPUTS), pytest.raises((UserError, pickle.UnpicklingError, TypeError)):
        load(pickled)
    is_on = False
    assert called == []
    assert math.factorial.__doc__ != "changed"


def test_result_of_an_unknown_kind_is_never_unpickled() -> None:
    hostile = Input("called", b"call", pickle.dumps(Calls(os.mkdir, "/nowhere/called"), 5))
    for kind in ("x", "Pickle", "pickle"):
        with pytest.raises(UserError):
            hostile.value(kind)
    given: list[tuple[Any, Any]] = [("called", 1), (("called",), "text"), ("called", None)]
    for name, kind in given:
        with available([hostile]), pytest.raises(UserError, match="must be texts"):
            resolve(name, kind)


def test_several_results_of_one_call_are_inserted() -> None:
    evil = [Calls(resolve, "evil", "text"), {"k": Calls(resolve, "evil", "")}, dt.date(2026, 1, 2)]
    with available(INPUTS):
        assert load(call(math.sqrt, *evil)) == (
            math.sqrt,
            ("system", {"k": "system"}, dt.date(2026, 1, 2)),
            {},
        )


def test_result_as_a_key_is_not_plain() -> None:
    reference = Calls(resolve, "evil", "text")
    assert is_plain_call(call(math.sqrt, {"k": reference}))
    assert not is_plain_call(call(math.sqrt, {reference: 1}))
    assert not is_plain_call(call(math.sqrt, {reference}))


def test_error_names_the_module_and_both_options() -> None:
    with pytest.raises(UserError) as refused:
        load(call(os.getpid))
    assert str(refused.value) == (
        "module posix is not allowed (start the worker with --allow posix, or with --allow-pickle "
        "if you trust every client of its broker)"
    )
    with pytest.raises(UserError, match=r"collections.OrderedDict: only plain data is allowed"):
        load(call(math.sqrt, OrderedDict()))


def test_json_does_not_look_pickled() -> None:
    assert looks_pickled(pickle.dumps(1))
    assert looks_pickled(b'{"pickle":1,"body":"x"}\n')
    assert not looks_pickled(b'{"pickle":1}')
    assert not looks_pickled(b"[1]")
