"""Entries of native messages are counted as the parser would, and too many are refused."""

from __future__ import annotations

import contextlib
import resource
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.core.limits import TASKS_PER_MESSAGE_MAX
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import raw_messages
from taskyard.wire.native.frames import parse_counted
from tests.wire.kit import Counter

if TYPE_CHECKING:
    from collections.abc import Callable

Q = pb.QueryMsg

#: Numbers of fields of a QueryMsg.
BATCH, WORKER, SCOPE = (
    Q.DESCRIPTOR.fields_by_name[name].number for name in ("batch", "worker", "scope")
)

MEGABYTE = 1 << 20

NAMES = st.lists(st.binary(max_size=200), max_size=30) | st.builds(
    lambda size, count: [b"n" * size] * count, st.integers(0, 200), st.integers(0, 100)
)
NUMBERS = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)
OUTCOMES = st.lists(st.sampled_from(pb.Outcome.values()), max_size=40)
BATCHES = st.builds(
    pb.Batch,
    name=NAMES,
    payload=NAMES,
    after=NAMES,
    after_count=NUMBERS,
    attempt=NUMBERS,
    outcome=OUTCOMES,
    memory_max_bytes=NUMBERS,
)
TASKS = st.builds(
    pb.TaskMsg,
    name=st.binary(max_size=9),
    origin=st.binary(max_size=9),
    pred=NAMES,
    succ=NAMES,
    log=NAMES,
)
QUERIES = st.builds(
    Q,
    type=st.sampled_from(Q.Type.values()),
    task=NAMES,
    name=st.binary(max_size=300),
    batch=st.none() | BATCHES,
    worker=st.none() | st.builds(pb.WorkerMsg, service=NAMES),
    scope=st.none() | st.builds(pb.ScopeMsg, standing=st.lists(st.just(pb.Blocked), max_size=9)),
)


def entries(message: Any) -> dict[str, int]:
    """Count the entries of a parsed message, by the names of fields."""
    found: dict[str, int] = {}
    for field, value in message.ListFields():
        if field.is_repeated:
            found[field.full_name.removeprefix("taskyard.dwork.")] = len(value)
        elif field.message_type is not None:
            found |= entries(value)
    return found


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def delimited(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def batch(columns: bytes, kind: pb.QueryMsg.Type = Q.Complete) -> bytes:
    """Return a request with these encoded columns of a Batch, and one name."""
    query = Q(type=kind, location=b"w", request=7)
    return query.SerializeToString() + delimited(BATCH, b"\x0a\x01a" + columns)


@given(QUERIES)
def test_counts_are_those_of_the_parser(message: pb.QueryMsg) -> None:
    assert raw_messages.count_entries(Q, message.SerializeToString()) == entries(message)


@given(TASKS)
def test_counts_in_a_task_are_those_of_the_parser(message: pb.TaskMsg) -> None:
    assert raw_messages.count_entries(pb.TaskMsg, message.SerializeToString()) == entries(message)


@given(st.lists(BATCHES, max_size=4))
def test_part_in_several_pieces_is_counted_as_a_whole(pieces: list[pb.Batch]) -> None:
    body = Q(type=Q.Create).SerializeToString()
    body += b"".join(delimited(BATCH, piece.SerializeToString()) for piece in pieces)
    assert raw_messages.count_entries(Q, body) == entries(Q.FromString(body))


@given(NUMBERS, st.booleans())
def test_numbers_are_counted_packed_or_not(numbers: list[int], packed: bool) -> None:  # noqa: FBT001
    encoded = [varint(number) for number in numbers]
    apart = b"".join(b"\x40" + one for one in encoded)
    body = batch(delimited(8, b"".join(encoded)) if packed else apart)
    assert raw_messages.count_entries(Q, body).get("Batch.attempt", 0) == len(numbers)


@given(st.binary(max_size=300))
def test_any_bytes_are_counted_or_refused(body: bytes) -> None:
    for kind in (Q, pb.TaskMsg, pb.Terms):
        for raw in (body, batch(body)):
            try:
                found = raw_messages.count_entries(kind, raw)
            except Malformed:
                continue
            assert sum(found.values()) <= len(raw)


@pytest.mark.slow
@given(QUERIES, st.data())
def test_corrupted_messages_are_counted_or_refused(message: pb.QueryMsg, data: Any) -> None:
    body = bytearray(message.SerializeToString())
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    del body[data.draw(st.integers(at, len(body))) :]
    with contextlib.suppress(Malformed):
        raw_messages.count_entries(Q, bytes(body))


MANY = 30 * MEGABYTE

#: Below the size from which messages are counted, these are cheap enough to accept.
IGNORE = ("one field again and again", "unknown fields", "pieces of a batch")

ATTACKS: dict[str, Callable[[int], bytes]] = {
    "packed numbers": lambda size: batch(delimited(8, b"\x01" * size)),
    "packed numbers in three columns": lambda size: batch(
        b"".join(delimited(number, b"\x01" * (size // 3)) for number in (8, 18, 19))
    ),
    "unpacked numbers": lambda size: batch(b"\x40\x01" * (size // 2)),
    "empty tasks": lambda size: b"\x08\x00" + b"\x12\x00" * (size // 2),
    "names to wait for": lambda size: batch(b"\x32\x01a" * (size // 3), Q.Create),
    "names to watch": lambda size: batch(b"\x0a\x01a" * (size // 3), Q.Watch),
    "names of growing length": lambda size: batch(
        b"".join(delimited(1, b"n" * length) for length in range(20)) * (size // 230), Q.Watch
    ),
    "terms": lambda size: batch(b"\x1a\x00" * (size // 2), Q.Create),
    "services": lambda size: (
        Q(type=Q.Steal, location=b"w").SerializeToString()
        + delimited(WORKER, b"\x0a\x01s" * (size // 3))
    ),
    "states": lambda size: b"\x08\x15" + delimited(SCOPE, delimited(4, b"\x00" * size)),
    "unknown fields": lambda size: b"\x08\x06" + b"\xf8\x7f\x01" * (size // 3),
    "one field again and again": lambda size: b"\x08\x06" * (size // 2),
    "pieces of a batch": lambda size: b"\x08\x00" + b"\x82\x01\x00" * (size // 3),
    "dependencies of one task": lambda size: (
        b"\x08\x00" + delimited(2, b"\x0a\x01a\x12\x01o" + b"\x22\x03\x0a\x01p" * (size // 5))
    ),
    "delays of retries": lambda size: batch(
        delimited(3, delimited(7, delimited(1, b"\x01" * size))), Q.Create
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("size", [3 * MEGABYTE, MANY])
def test_too_many_entries_are_refused_before_they_cost_memory(name: str, size: int) -> None:
    body = ATTACKS[name](size)
    counter = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = Q.FromString(counter.ask(body))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert answer.type == Q.Error or (name in IGNORE and size < MANY)
    assert not counter.scheduler.ledger.tasks
    assert grown < 150_000, "kilobytes"


@pytest.mark.slow
@pytest.mark.parametrize("size", [3 * MEGABYTE, MANY])
def test_refusal_names_the_request_and_the_field(size: int) -> None:
    for body in (
        batch(b"\x40\x01" * (size // 2)),
        b"\x08\x00" + b"\x12\x00" * size + b"\x88\x01\x07",
    ):
        answer = Q.FromString(Counter().ask(body))
        assert (answer.type, answer.request, answer.code) == (Q.Error, 7, b"too-many")
        assert b"in one message" in answer.reason


def test_messages_at_the_limits_are_accepted() -> None:
    names = [b"task-%d" % number for number in range(TASKS_PER_MESSAGE_MAX)]
    payloads = [b"%0100d" % number for number in range(TASKS_PER_MESSAGE_MAX)]
    message = Q(type=Q.Create, batch=pb.Batch(name=names, payload=payloads))
    body = message.SerializeToString()
    assert len(body) > raw_messages.COUNTED_BYTES_MIN
    assert len(parse_counted(Q, body).batch.name) == TASKS_PER_MESSAGE_MAX
    message.batch.name.append(b"one more")
    with pytest.raises(Malformed, match=r"^Batch.name: more than 100000 entries"):
        parse_counted(Q, message.SerializeToString())
