"""Payloads of commands, calls and bundles: decoding reverses encoding, and nonsense is refused."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.calls.payloads import (
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
from taskyard.errors import PeerError, UserError

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
word = text.filter(bool)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=20,
)  # fmt: skip


def test_payload_is_a_json_object_without_defaults() -> None:
    assert encode_command(["convert", "ä"]) == '{"argv":["convert","ä"]}'.encode()
    assert encode_call("m:f") == b'{"call":"m:f"}'
    assert encode_command(["a"], {"B": "c"}, "d") == b'{"argv":["a"],"env":{"B":"c"},"cwd":"d"}'
    assert json.loads(encode_call("m:f", [1], {"a": [None]}, {"B": "c"}, "d")) == {
        "call": "m:f", "args": [1], "kwargs": {"a": [None]}, "env": {"B": "c"}, "cwd": "d",
    }  # fmt: skip


@given(argv=st.lists(text, max_size=5), program=word, cwd=st.none() | text)
def test_command_is_decoded_as_encoded(argv: list[str], program: str, cwd: str | None) -> None:
    payload = encode_command([program, *argv], cwd=cwd)
    assert decode_payload(payload, EXEC) == Command([program, *argv], cwd=cwd)


@given(st.binary())
def test_stdin_of_a_command_is_decoded_as_encoded(stdin: bytes) -> None:
    payload = encode_command(["cat"], stdin=stdin)
    assert decode_payload(payload, EXEC) == Command(["cat"], stdin=stdin)


@pytest.mark.slow
@given(args=st.lists(json_values, max_size=4), kwargs=st.dictionaries(text, json_values))
def test_call_is_decoded_as_encoded(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert decode_payload(encode_call("m:f", args, kwargs), CALL) == Call("m:f", args, kwargs)


@given(json_values)
def test_value_is_decoded_as_encoded(value: object) -> None:
    assert decode_value(encode_value(value)) == value


def test_number_of_any_size_is_a_value() -> None:
    assert decode_value(encode_value(999**999)) == 999**999


def test_service_of_another_name_takes_both_kinds() -> None:
    assert decode_payload(encode_command(["a"]), b"cpu") == Command(["a"])
    assert decode_payload(encode_call("m:f"), b"cpu") == Call("m:f")


def test_tuple_is_sent_as_a_list() -> None:
    assert decode_payload(encode_call("m:f", (1, (2,))), CALL) == Call("m:f", [1, [2]])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"bytes", "value of type bytes can't be sent as JSON: Object of type bytes is not"),
        ([{1}], "value of type list can't be sent as JSON: Object of type set is not"),
        (float("nan"), "value of type float can't be sent as JSON: Out of range float"),
        ("\ud800", "value of type str can't be sent as JSON: .*surrogates not allowed"),
        (["\ud800", 1.0], "value of type list can't be sent as JSON: .*surrogates not allowed"),
        ({(1, 2): 3}, "value of type dict can't be sent as JSON: keys must be"),
    ],
)
def test_value_that_json_can_not_express_is_refused(value: object, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        encode_value(value)


def test_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UserError, match="Circular reference"):
        encode_value(value)


@pytest.mark.parametrize("argv", [[], "ls -l", ["sleep", 1], [b"ls"]])
def test_invalid_command_is_refused_before_it_is_sent(argv: Any) -> None:
    with pytest.raises(UserError, match=r"command .*: must be a list of strings"):
        encode_command(argv)


def test_command_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(UserError, match="can't be sent as JSON"):
        encode_command(["\udce4"])


def test_argument_that_json_can_not_express_is_named() -> None:
    with pytest.raises(UserError, match=r"^argument 2 of type set can't be sent as JSON: Object"):
        encode_call("m:f", [1, {1}])
    with pytest.raises(UserError, match=r"^argument 'b' of type list can't be sent as JSON"):
        encode_call("m:f", [], {"a": 1, "b": [b"x"]})
    with pytest.raises(UserError, match=r"^arguments of type dict can't be sent as JSON: keys"):
        encode_call("m:f", [], {(1, 2): 3})  # type: ignore[dict-item]  # no text is its name


NONSENSE = [
    (EXEC, b"", "payload is not valid for service exec: Input data was truncated"),
    (EXEC, b"[]", "Expected `object`, got `array`"),
    (EXEC, b'{"argv":[]}', "Expected `array` of length >= 1"),
    (EXEC, b'{"argv":["sleep",1]}', r"Expected `str`, got `int` - at `\$.argv\[1\]`"),
    (EXEC, b'{"argv":["a"],"cdw":"/"}', "contains unknown field `cdw`"),
    (EXEC, b'{"call":"m:f"}', "Object contains unknown field `call`"),
    (EXEC, b'{"argv":["a"],"env":{"A":1}}', "Expected `str`, got `int`"),
    (EXEC, b'{"argv":[""]}', "argv: the first word, the program, is empty"),
    (EXEC, b'{"argv":["a","b\\u0000"]}', r"'b\\x00': contains a NUL character"),
    (EXEC, b'{"argv":["a"],"cwd":"\\u0000"}', "contains a NUL character"),
    (EXEC, b'{"argv":["a"],"env":{"A":"\\u0000"}}', "contains a NUL character"),
    (EXEC, b'{"argv":["a"],"env":{"":"b"}}', "env: invalid variable name ''"),
    (EXEC, b'{"argv":["a"],"env":{"A=B":""}}', "env: invalid variable name 'A=B'"),
    (EXEC, b'{"argv":["a"],"stdin":"YQ==","stdin_file":"b"}', "exclude each other"),
    (EXEC, b'{"argv":["a"],"stdin":"no base64"}', "not valid for service exec"),
    (EXEC, b'{"argv":["a"],"stdin_file":""}', "stdin_file '': not a file name"),
    (EXEC, b'{"argv":["a"],"stdin_file":"b\\u0000"}', "not a file name"),
    (EXEC, b'{"argv":["\xff"]}', "payload is not valid for service exec"),
    (EXEC, b'{"argv":["\\ud800"]}', "payload is not valid for service exec"),
    (CALL, b'{"argv":["a"]}', "Object contains unknown field `argv`"),
    (CALL, b'{"call":"f"}', "call 'f': must be module:function"),
    (CALL, b'{"call":":f"}', "call ':f': must be module:function"),
    (CALL, b'{"call":"m:"}', "call 'm:': must be module:function"),
    (CALL, b'{"call":"m:f","args":' + b"[" * 100_000, "recursion"),
    (b"c\xffpu", b"{}", r"valid for service c\\xffpu: .* missing required field `call`"),
    (b"cpu", b"nonsense", "valid for service cpu: JSON is malformed"),
]


@pytest.mark.parametrize(("service", "payload", "reason"), NONSENSE)
def test_nonsense_is_refused_with_a_reason(service: bytes, payload: bytes, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        decode_payload(payload, service)


@given(st.binary(), st.sampled_from([EXEC, CALL, b"cpu"]))
def test_any_bytes_are_work_or_a_peer_error(payload: bytes, service: bytes) -> None:
    with contextlib.suppress(PeerError):
        assert isinstance(decode_payload(payload, service), Command | Call)


@pytest.mark.parametrize("encoded", [b"", b"NaN", b"[" * 100_000, b"\xff", b"1" * 5000])
def test_invalid_json_value_is_a_peer_error(encoded: bytes) -> None:
    with pytest.raises(PeerError, match="value is not valid JSON"):
        decode_value(encoded)


# Bundles.

BUNDLE = encode_bundle(b'{"text":"hi"}', b'["ann",{"to":"bob"}]')


def test_bundle_is_one_json_object() -> None:
    assert BUNDLE == b'{"body":{"text":"hi"},"recipients":["ann",{"to":"bob"}]}'


def test_part_is_identified_by_the_last_word_of_the_name() -> None:
    first = bundle_part("news/7/0", BUNDLE)
    assert first == ("news/7", 0, {"text": "hi"}, "ann")
    assert bundle_part("news/7/1", BUNDLE).recipient == {"to": "bob"}
    assert task_name("news/7", 1) == "news/7/1"


@pytest.mark.parametrize(
    "name", ["news", "news/2", "/0", "news/-1", "news/²", "news/", "n/" + "9" * 999]
)
def test_name_outside_the_bundle_is_refused(name: str) -> None:
    with pytest.raises(PeerError, match=r"not BUNDLE/N of a bundle with 2 recipients"):
        bundle_part(name, BUNDLE)


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b'{"body":1,"recipients":{}}', b"[" * 9999])
def test_payload_that_is_not_a_bundle_is_refused(payload: bytes) -> None:
    with pytest.raises(PeerError, match="payload is not a bundle"):
        bundle_part("news/0", payload)


@pytest.mark.slow
@given(st.text(), st.binary())
def test_any_bytes_are_a_part_or_refused(name: str, payload: bytes) -> None:
    with pytest.raises(PeerError):
        bundle_part(name, payload)
