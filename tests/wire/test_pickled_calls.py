"""Pickled calls: decoding reverses encoding, and errors name the part that can't be pickled."""

import contextlib
import pickle
import threading
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.calls import pickled, value_pickler
from taskyard.calls.payloads import EXEC, Call, decode_call, decode_payload, encode_call
from taskyard.calls.pickled import PICKLE, CallHeader, Pickled
from taskyard.core.limits import OUTPUT_BYTES_MAX
from taskyard.errors import PeerError, UserError
from taskyard.worker.jobs import OUTPUT_TAIL_BYTES
from tests.client.executor_calls import OneWay, raise_this

text = st.text(st.characters(exclude_categories=["Cs"]))
headers = st.builds(CallHeader, st.lists(text).map(tuple), text)


@given(st.binary(), headers)
def test_call_is_decoded_as_encoded(call: bytes, header: CallHeader) -> None:
    payload = pickled.encode_pickled_call(call, header)
    for service in (PICKLE, b"cpu"):
        assert decode_payload(payload, service) == Pickled(call, header)
    assert decode_call(payload) == Pickled(call, header)


def test_payload_is_a_line_of_json_and_a_pickle() -> None:
    payload = pickled.encode_pickled_call(b"\x80\x05", CallHeader(path=("/there",)))
    assert payload == b'{"pickle":1,"path":["/there"]}\n\x80\x05'
    assert pickled.encode_pickled_call(b"", CallHeader()) == b'{"pickle":1}\n'


def test_call_by_path_is_distinguished_from_a_pickled_one() -> None:
    payload = encode_call("m:f")
    assert decode_payload(payload, b"cpu") == decode_call(payload) == Call("m:f")


def test_programs_take_no_pickle() -> None:
    with pytest.raises(PeerError):
        decode_payload(pickled.encode_pickled_call(b"", CallHeader()), EXEC)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "payload is not a pickled call, the only kind that this service takes"),
        (b'{"argv":["a"]}', "payload is not a pickled call, the only kind"),
        (b'{"pickle":', "not a pickled call of this version: Input data was truncated"),
        (b'{"pickle":2}\n', "Invalid value 2"),
        (b'{"pickle":1,"mian":"x"}\n', "unknown field `mian`"),
        (b'{"pickle":1,"path":"x"}\n', "Expected `array`"),
        (b'{"pickle":1,"token":"\xff"}\n', "payload is not a pickled call"),
    ],
)
def test_nonsense_is_refused_with_a_reason(payload: bytes, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        decode_payload(payload, PICKLE)


@given(st.binary())
def test_any_bytes_are_a_call_or_a_peer_error(payload: bytes) -> None:
    for begun in (payload, b'{"pickle":' + payload):
        with contextlib.suppress(PeerError):
            assert isinstance(decode_payload(begun, PICKLE), Pickled)


def test_path_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(UserError, match="search path can't be sent as JSON"):
        pickled.encode_pickled_call(b"", CallHeader(path=("\udce4",)))


def test_function_and_arguments_are_unpickled_as_pickled() -> None:
    body = pickled.pickle_call(pow, [2], {"exp": 3})
    assert pickled.unpickle(body.pickle) == (pow, (2,), {"exp": 3})


LOCK = threading.Lock()


class Refusing:
    """Raises an error in `__reduce__`, as a user's class may."""

    def __reduce__(self) -> str:
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            (lambda: LOCK, [], {}),
            r"function <function .* can't be pickled: .* \(it uses 'LOCK', of type lock: make",
        ),
        ((pow, [1, threading.Lock()], {}), "argument 2, of type lock, can't be pickled: cannot"),
        ((pow, [], {"exp": Refusing()}), "argument 'exp', of type Refusing, can't be pickled"),
        (
            (pickled.call_each, [pow, [(1, 2), (3, threading.Lock())]], {}),
            "^argument 2, of type lock, can't be pickled: cannot",
        ),
    ],
)
def test_part_that_can_not_be_pickled_is_named(call: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        pickled.pickle_call(*call)
    assert isinstance(caught.value, pickle.PicklingError)


def main_function(code: str) -> Any:
    """Return the last function that a program of `__main__` defines."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(code, variables)  # noqa: S102
    return [*variables.values()][-1]


def test_function_of_main_travels_by_value_and_mentions_no_script() -> None:
    body = pickled.pickle_call(main_function("def double(x): return 2 * x"), [2], {})
    function, args, _ = pickled.unpickle(body.pickle)
    assert function(*args) == 4


def test_function_pickled_once_is_in_every_call_and_loaded_once() -> None:
    double = main_function("def double(x): return 2 * x")
    shared = pickled.pickle_once(double)
    bodies = [pickled.pickle_call(pickled.call_each, (shared, [[n]]), {}) for n in (1, 2)]
    (_, one, _), (_, two, _) = [pickled.unpickle(body.pickle) for body in bodies]
    assert one[0] is two[0]
    assert [pickled.call_each(*one), pickled.call_each(*two)] == [[2], [4]]


def test_argument_of_main_beside_a_function_pickled_once_travels_by_value() -> None:
    shared = pickled.pickle_once(main_function("def double(x): return 2 * x"))
    body = pickled.pickle_call(shared, [main_function("class Point: x = 7")()], {})
    assert b"value_pickler" in body.pickle
    _, (point,), _ = pickled.unpickle(body.pickle)
    assert point.x == 7


def test_function_of_a_module_is_not_pickled_once() -> None:
    assert pickled.pickle_once(pow) is pow
    lock_user = main_function("import threading; lock = threading.Lock()\ndef use(): return lock")
    assert pickled.pickle_once(lock_user) is lock_user  # its calls raise


def test_result_that_can_not_be_pickled_is_named() -> None:
    with pytest.raises(UserError, match="result of type lock can't be pickled"):
        pickled.pickle_result(threading.Lock())


def test_result_of_an_async_function_says_what_to_do() -> None:
    async def answer() -> int:
        return 42

    with pytest.raises(UserError, match=r"the function is async: submit one that calls asyncio"):
        pickled.pickle_result(answer())


def raised(error: BaseException) -> bytes:
    """Return an exception as a line of a task's output."""
    try:
        raise_this(error)
    except BaseException as again:  # noqa: BLE001
        line = pickled.encode_exception(again, traceback.format_exc())
    assert OUTPUT_TAIL_BYTES + len(line) <= OUTPUT_BYTES_MAX
    return b"printed\n[pickled exception] by the task\n" + line


def test_exception_is_decoded_with_its_traceback() -> None:
    error, traceback = pickled.decode_exception(raised(KeyError("a", 1)))
    assert isinstance(error, KeyError)
    assert error.args == ("a", 1)
    assert "raise error" in traceback
    assert str(error.__cause__) == f'\n"""\n{traceback}"""'


@pytest.mark.parametrize(
    "error", [OneWay(1, 2), ValueError("x" * 100_000), ValueError(threading.Lock())]
)
def test_exception_that_can_not_be_pickled_leaves_its_traceback(error: Exception) -> None:
    came, traceback = pickled.decode_exception(raised(error))
    assert came is None
    assert traceback


def test_class_of_an_exception_that_can_not_be_unpickled_is_named() -> None:
    _, traceback = pickled.decode_exception(raised(OneWay(1, 2)))
    last = traceback.splitlines()[-1]
    assert last.startswith("OneWay can't be sent: TypeError(")
    assert last.endswith(
        "(give all arguments of its __init__ to super().__init__, or define __reduce__)"
    )


def test_endless_traceback_is_cut() -> None:
    line = pickled.encode_exception(ValueError("ä"), "ä" * 1_000_000)
    assert OUTPUT_TAIL_BYTES + len(line) <= OUTPUT_BYTES_MAX
    assert len(pickled.decode_exception(line)[1]) == pickled.TRACEBACK_CHARACTERS_MAX


@pytest.mark.parametrize(
    "output", [b"", b"printed\n", b"[pickled exception] ???\n", b"[pickled exception] gASV\n"]
)
def test_output_without_an_exception_has_none(output: bytes) -> None:
    assert pickled.decode_exception(output) == (None, "")


def test_code_of_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(value_pickler, "_PYTHON", (3, 99))
        body = pickled.pickle_call(lambda number: number + 1, [1], {})
    with pytest.raises(PeerError, match=r"function by value: of Python 3.99, but this process"):
        pickled.unpickle(body.pickle)


def test_exception_needs_the_token_of_its_call() -> None:
    line = pickled.encode_exception(ValueError("a"), "where", "0123")
    error, traceback = pickled.decode_exception(line, "0123")
    assert (repr(error), traceback) == ("ValueError('a')", "where")
    assert pickled.decode_exception(line, "4567") == (None, "")
    assert pickled.decode_exception(line) == (None, "")
