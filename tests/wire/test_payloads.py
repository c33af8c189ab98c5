"""Payloads of programs and calls: what goes in comes out, and nonsense is told as such."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.errors import PeerError, UserError
from taskyard.wire.payloads import (
    CALL,
    EXEC,
    Call,
    Command,
    bundle_part,
    decode_payload,
    decode_value,
    encode_bundle,
    encode_call,
    encode_command,
    encode_value,
    task_name,
)

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
word = text.filter(bool)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=20,
)  # fmt: skip


def test_payload_is_a_json_object_without_what_is_not_given() -> None:
    assert encode_command(["convert", "ä"]) == '{"argv":["convert","ä"]}'.encode()
    assert encode_call("m:f") == b'{"call":"m:f"}'
    assert encode_command(["a"], {"B": "c"}, "d") == b'{"argv":["a"],"env":{"B":"c"},"cwd":"d"}'
    assert json.loads(encode_call("m:f", [1], {"a": [None]}, {"B": "c"}, "d")) == {
        "call": "m:f", "args": [1], "kwargs": {"a": [None]}, "env": {"B": "c"}, "cwd": "d",
    }  # fmt: skip


@given(argv=st.lists(text, max_size=5), program=word, cwd=st.none() | text)
def test_command_comes_out_as_it_went_in(argv: list[str], program: str, cwd: str | None) -> None:
    payload = encode_command([program, *argv], cwd=cwd)
    assert decode_payload(payload, EXEC) == Command([program, *argv], cwd=cwd)


@pytest.mark.slow
@given(args=st.lists(json_values, max_size=4), kwargs=st.dictionaries(text, json_values))
def test_call_comes_out_as_it_went_in(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert decode_payload(encode_call("m:f", args, kwargs), CALL) == Call("m:f", args, kwargs)


@given(json_values)
def test_value_comes_out_as_it_went_in(value: object) -> None:
    assert decode_value(encode_value(value)) == value


def test_number_of_any_size_is_a_value() -> None:
    assert decode_value(encode_value(999**999)) == 999**999


def test_service_of_another_name_takes_both_kinds() -> None:
    assert decode_payload(encode_command(["a"]), b"cpu") == Command(["a"])
    assert decode_payload(encode_call("m:f"), b"cpu") == Call("m:f")


def test_tuple_is_sent_as_a_list() -> None:
    assert decode_payload(encode_call("m:f", (1, (2,))), CALL) == Call("m:f", [1, [2]])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"bytes", "value of type bytes can't be sent as JSON: Object of type bytes is not"),
        ([{1}], "value of type list can't be sent as JSON: Object of type set is not"),
        (float("nan"), "value of type float can't be sent as JSON: Out of range float"),
        ("\ud800", "value of type str can't be sent as JSON: .*surrogates not allowed"),
        (["\ud800", 1.0], "value of type list can't be sent as JSON: .*surrogates not allowed"),
        ({(1, 2): 3}, "value of type dict can't be sent as JSON: keys must be"),
    ],
)
def test_what_json_has_no_word_for_is_refused(value: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        encode_value(value)


def test_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UserError, match="Circular reference"):
        encode_value(value)


@pytest.mark.parametrize("argv", [[], "ls -l", ["sleep", 1], [b"ls"]])
def test_what_is_no_command_is_refused_before_it_is_sent(argv: Any) -> None:
    with pytest.raises(UserError, match="is no command: give a list of texts"):
        encode_command(argv)


def test_command_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(UserError, match="can't be sent as JSON"):
        encode_command(["\udce4"])


def test_arguments_that_are_no_json_are_refused() -> None:
    with pytest.raises(UserError, match="list of arguments of type list can't be sent as JSON"):
        encode_call("m:f", [{1}])
    with pytest.raises(UserError, match="set of named arguments of type dict can't be sent"):
        encode_call("m:f", [], {"a": {1}})


NONSENSE = [
    (EXEC, b"", "the payload is nothing that a worker of exec can do: Input data was truncated"),
    (EXEC, b"[]", "Expected `object`, got `array`"),
    (EXEC, b'{"argv":[]}', "Expected `array` of length >= 1"),
    (EXEC, b'{"argv":["sleep",1]}', r"Expected `str`, got `int` - at `\$.argv\[1\]`"),
    (EXEC, b'{"argv":["a"],"cdw":"/"}', "contains unknown field `cdw`"),
    (EXEC, b'{"call":"m:f"}', "Object contains unknown field `call`"),
    (EXEC, b'{"argv":["a"],"env":{"A":1}}', "Expected `str`, got `int`"),
    (EXEC, b'{"argv":[""]}', "the first word of argv is empty"),
    (EXEC, b'{"argv":["a","b\\u0000"]}', r"'b\\x00' must not have a NUL character"),
    (EXEC, b'{"argv":["a"],"cwd":"\\u0000"}', "must not have a NUL character"),
    (EXEC, b'{"argv":["a"],"env":{"A":"\\u0000"}}', "must not have a NUL character"),
    (EXEC, b'{"argv":["a"],"env":{"":"b"}}', "'' can't be the name of a variable; leave it out"),
    (EXEC, b'{"argv":["a"],"env":{"A=B":""}}', "'A=B' can't be the name of a variable"),
    (EXEC, b'{"argv":["\xff"]}', "the payload is nothing that a worker of exec can do"),
    (EXEC, b'{"argv":["\\ud800"]}', "the payload is nothing that a worker of exec can do"),
    (CALL, b'{"argv":["a"]}', "Object contains unknown field `argv`"),
    (CALL, b'{"call":"f"}', "'f' names no function: write module:function"),
    (CALL, b'{"call":":f"}', "':f' names no function"),
    (CALL, b'{"call":"m:"}', "'m:' names no function"),
    (CALL, b'{"call":"m:f","args":' + b"[" * 100_000, "recursion"),
    (b"c\xffpu", b"{}", r"a worker of c\\xffpu can do: .* missing required field `call`"),
    (b"cpu", b"nonsense", "a worker of cpu can do: JSON is malformed"),
]


@pytest.mark.parametrize(("service", "payload", "said"), NONSENSE)
def test_nonsense_is_told_as_such(service: bytes, payload: bytes, said: str) -> None:
    with pytest.raises(PeerError, match=said):
        decode_payload(payload, service)


@given(st.binary(), st.sampled_from([EXEC, CALL, b"cpu"]))
def test_any_bytes_are_work_or_a_peers_error(payload: bytes, service: bytes) -> None:
    with contextlib.suppress(PeerError):
        assert isinstance(decode_payload(payload, service), Command | Call)


@pytest.mark.parametrize("encoded", [b"", b"NaN", b"[" * 100_000, b"\xff", b"1" * 5000])
def test_value_that_is_no_json_is_a_peers_error(encoded: bytes) -> None:
    with pytest.raises(PeerError, match="a value is not JSON"):
        decode_value(encoded)


# Bundles.

BUNDLE = encode_bundle(b'{"text":"hi"}', b'["ann",{"to":"bob"}]')


def test_payload_is_one_json_object() -> None:
    assert BUNDLE == b'{"body":{"text":"hi"},"recipients":["ann",{"to":"bob"}]}'


def test_part_is_known_by_the_last_word_of_the_name() -> None:
    first = bundle_part("news/7/0", BUNDLE)
    assert first == ("news/7", 0, {"text": "hi"}, "ann")
    assert bundle_part("news/7/1", BUNDLE).recipient == {"to": "bob"}
    assert task_name("news/7", 1) == "news/7/1"


@pytest.mark.parametrize(
    "name", ["news", "news/2", "/0", "news/-1", "news/²", "news/", "n/" + "9" * 999]
)
def test_name_that_is_no_part_is_refused(name: str) -> None:
    with pytest.raises(PeerError, match=r"no part of its bundle, which has 2 recipients"):
        bundle_part(name, BUNDLE)


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b'{"body":1,"recipients":{}}', b"[" * 9999])
def test_payload_that_is_no_bundle_is_refused(payload: bytes) -> None:
    with pytest.raises(PeerError, match="the payload is no bundle's"):
        bundle_part("news/0", payload)


@given(st.text(), st.binary())
def test_whatever_comes_is_a_part_or_refused(name: str, payload: bytes) -> None:
    with pytest.raises(PeerError):
        bundle_part(name, payload)
