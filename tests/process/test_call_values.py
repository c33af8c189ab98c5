"""Large parts of calls: which become values, and that shared ones are stored and kept once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from taskyard.calls import pickled
from taskyard.calls.pickled import CallHeader
from taskyard.client.functions import CallEncoder, marks_of_named
from taskyard.core.blobs import blobs_in
from taskyard.core.limits import BLOB_BYTES_MIN
from taskyard.errors import BytesMissing, PeerError
from taskyard.journal.blob_files import BlobFiles, StoreTerms
from taskyard.process import value_access
from taskyard.process.value_access import CallValues

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from taskyard.process.value_access import ValueAccess

MIN = BLOB_BYTES_MIN


class Access:
    """A `ValueAccess` to a directory, which counts."""

    def __init__(self, directory: Path) -> None:
        self.files = BlobFiles(directory / "blobs")
        self.files.create(StoreTerms("a"))
        self.puts = self.renewed = 0

    def has_store(self) -> bool:
        return True

    def put(self, content: memoryview) -> str:
        self.puts += 1
        return self.files.put(content)

    def renew(self, name: str) -> bool:
        self.renewed += 1
        return self.files.touch(name)

    def load(self, names: Sequence[str], _task: str) -> list[memoryview]:
        return [*map(self.files.load, names)]


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(tmp_path)


@pytest.fixture
def values(access: Access) -> CallValues:
    return CallValues(lambda: cast("ValueAccess", access))


def encoded(values: CallValues, *args: object) -> bytes:
    body = pickled.pickle_call(max, args, {}, is_large=values.is_large)
    return values.encode(body, CallHeader(path=("p",)))[0]


def test_small_call_has_no_values(access: Access, values: CallValues) -> None:
    plain = pickled.pickle_call(max, (1, 2), {}).pickle
    assert encoded(values, 1, 2) == pickled.encode_pickled_call(plain, CallHeader(path=("p",)))
    assert encoded(values, np.zeros(100)).count(b"values") == 0
    assert values.encode_result((1, "a")) == pickled.pickle_result((1, "a"))
    assert not access.puts


def test_buffers_and_long_pickles_are_values(access: Access, values: CallValues) -> None:
    array, text = np.arange(MIN // 8, dtype=np.int64), "x" * MIN
    payload = encoded(values, array, array + 1, text)
    call = pickled.decode_pickled_call(payload)
    assert call.call == b""
    assert len(call.header.values) == 2
    assert blobs_in(payload) == [*call.header.values, call.header.body]
    function, (one, other, same), _ = values.load_call(call, "t")
    assert function is max
    assert np.array_equal(one, array)
    assert np.array_equal(other, array + 1)
    assert same == text
    one[0] = 7
    assert values.load_call(call, "t")[1][0][0] == 0
    assert access.puts == 3


def test_array_that_can_not_be_changed_stays_so(values: CallValues) -> None:
    array = np.zeros(MIN)
    array.setflags(write=False)
    found = values.load_result(values.encode_result([array, np.zeros((MIN, 2))[:, 1]]), "t")
    assert [one.flags.writeable for one in found] == [False, True]
    assert [one.sum() for one in found] == [0, 0]


def test_result_with_values_needs_them(access: Access, values: CallValues) -> None:
    result = values.encode_result(np.zeros(MIN))
    with pytest.raises(PeerError, match="no broker"):
        pickled.unpickle(result)
    with pytest.raises(BytesMissing, match="no broker"):
        CallValues(None).load_result(result, "t")
    with pickled.large_results(partial(values.load_result, task="t")):
        assert pickled.unpickle(result).sum() == 0
    for file in access.files.walk():
        access.files.path(file.id).unlink()
    with pytest.raises(BytesMissing, match=r"blobs.keep remove them"):
        values.load_result(result, "t")


def test_without_a_broker_nothing_is_large() -> None:
    values = CallValues(None)
    assert values.encode_result(bytes(MIN)) == pickled.pickle_result(bytes(MIN))


def test_function_of_a_map_is_stored_once_and_kept(
    access: Access, values: CallValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(MIN)
    substitute = pickled.pickle_once(lambda x: (x, len(data)))

    def call(number: int) -> bytes:
        body = pickled.pickle_call(substitute, (number,), {}, is_large=values.is_large)
        return values.encode(body, CallHeader())[0]

    payloads = [call(number) for number in range(5)]
    assert access.puts == 1
    function, args, _ = values.load_call(pickled.decode_pickled_call(payloads[3]), "t")
    assert function(*args) == (3, MIN)
    assert max(map(len, payloads)) < 1000
    monkeypatch.setattr(value_access, "_RENEWED_SECONDS", 0)
    call(6)
    assert (access.puts, access.renewed) == (1, 1)
    for file in access.files.walk():  # as a sweep does, much later
        access.files.path(file.id).unlink()
    call(7)
    assert (access.puts, access.renewed) == (2, 2)
    assert [*access.files.walk()]


def test_token_of_a_named_call_is_of_its_whole_pickle(values: CallValues) -> None:
    calls = CallEncoder(values)
    encode = partial(calls.encode, len, kwargs={}, marks_of=marks_of_named)
    decoders = [encode(args=[f"{n}" * MIN]).decoder for n in (1, 1, 2)]
    assert len({one.token for one in decoders if one is not None}) == 2
