"""A bundle's payload, and which part of it a task is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.errors import PeerError
from taskyard.wire import bundles

PAYLOAD = bundles.encode_bundle(b'{"text":"hi"}', b'["ann",{"to":"bob"}]')


def test_payload_is_one_json_object() -> None:
    assert PAYLOAD == b'{"body":{"text":"hi"},"recipients":["ann",{"to":"bob"}]}'


def test_part_is_known_by_the_last_word_of_the_name() -> None:
    first = bundles.bundle_part("news/7/0", PAYLOAD)
    assert first == ("news/7", 0, {"text": "hi"}, "ann")
    assert bundles.bundle_part("news/7/1", PAYLOAD).recipient == {"to": "bob"}
    assert bundles.task_name("news/7", 1) == "news/7/1"


@pytest.mark.parametrize(
    "name", ["news", "news/2", "/0", "news/-1", "news/²", "news/", "n/" + "9" * 999]
)
def test_name_that_is_no_part_is_refused(name: str) -> None:
    with pytest.raises(PeerError, match=r"no part of its bundle, which has 2 recipients"):
        bundles.bundle_part(name, PAYLOAD)


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b'{"body":1,"recipients":{}}', b"[" * 9999])
def test_payload_that_is_no_bundle_is_refused(payload: bytes) -> None:
    with pytest.raises(PeerError, match="the payload is no bundle's"):
        bundles.bundle_part("news/0", payload)


@given(st.text(), st.binary())
def test_whatever_comes_is_a_part_or_refused(name: str, payload: bytes) -> None:
    with pytest.raises(PeerError):
        bundles.bundle_part(name, payload)
