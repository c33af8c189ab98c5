"""Malformed requests: any bytes get a reply, change nothing if malformed, and never raise."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from simulator import invariants
from taskyard.core.events import DrainRequested, Scope
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.wire.native import requests as native_requests
from taskyard.wire.native.server import NativeServer
from tests.wire.kit import Counter
from tests.wire.test_roles import requests

if TYPE_CHECKING:
    from collections.abc import Iterator

Q = pb.QueryMsg
WORKER = peer.worker_message(WorkerFacts(services=(b"s",)))

#: Valid requests, to be corrupted.
SEEDS = [
    bytes.fromhex("080012080a01411203636c69"),
    bytes.fromhex("0800120d0a01421203636c6922030a014112120a01431203636c6922030a014122030a0142"),
    bytes.fromhex("0801200332027731"),
    bytes.fromhex("080212080a01411203636c6932027731"),
    bytes.fromhex("0803120d0a01411203636c6922030a015a32027731"),
    bytes.fromhex("080732027731"),
    peer.create(1, Submission([b"a", b"b"], [b"x"], [Terms()], [0, 0], [b"l", b""], [[], [b"a"]])),
    peer.steal(2, b"w", WORKER, 3, 10**9),
    peer.complete(3, b"w", peer.ReportColumns([b"a"], [1], [], [b"r"], [b"o"]), WORKER, 2),
    peer.heartbeat(4, b"w", WORKER, [(b"a", 1)], 10**9),
    peer.watch(5, [b"a"], stream=True),
    peer.list_tasks(6, Scope(campaign=b"c"), b"m", 1, 5),
    peer.command(7, peer.CANCEL, Scope(names=(b"nobody",))),
    peer.create(8, Submission([b"a"], terms=[Terms(resources=((b"gpus", 5_000),))])),
]


def spoilt(count: int, seed: int) -> Iterator[bytes]:
    """Yield requests with bytes flipped, cut, doubled and inserted, and random bytes."""
    random_bits = random.Random(seed)
    for _ in range(count):
        body = bytearray(random_bits.choice(SEEDS))
        for _ in range(random_bits.randrange(1, 4)):
            at = random_bits.randrange(len(body) + 1)
            way = random_bits.randrange(5)
            if way == 0 and at < len(body):
                body[at] ^= 1 << random_bits.randrange(8)
            elif way == 1:
                del body[at:]
            elif way == 2:
                body[at:at] = random_bits.randbytes(random_bits.randrange(1, 5))
            elif way == 3:
                body[at:at] = body[at : at + random_bits.randrange(1, 20)]
            else:
                body[:] = random_bits.randbytes(random_bits.randrange(60))
        yield bytes(body)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(5))
def test_malformed_requests_get_an_error_and_change_nothing(seed: int) -> None:
    counter = Counter()
    errors = 0
    for body in spoilt(1_000, seed):
        before = ledger_fingerprint(counter.scheduler.ledger)
        records = counter.scheduler.ledger.record
        refused = counter.scheduler.context.refused
        answers = [Q.FromString(one) for one in counter.frames([b"", body])]
        if counter.scheduler.context.refused > refused:
            continue  # a plain Create, whose valid tasks are accepted
        if any(one.type == Q.Error for one in answers):
            errors += 1
            assert counter.scheduler.ledger.record == records
            assert ledger_fingerprint(counter.scheduler.ledger) == before
    invariants.check(counter.scheduler)
    assert errors > 500
    assert Q.FromString(counter.ask(bytes.fromhex("0806"))).type == Q.OK


def flipped(body: bytes) -> Iterator[bytes]:
    """Yield every message that differs from this one by a single bit."""
    for at in range(len(body)):
        for bit in range(8):
            other = bytearray(body)
            other[at] ^= 1 << bit
            yield bytes(other)


def drains(body: bytes) -> list[bytes | None]:
    """Return the workers that a message drains, None for all of them with the broker."""
    dialect = NativeServer(1, lambda: 0)
    received = dialect.receive(b"peer", [b"", body], 0)
    found = [one.worker for one in received if isinstance(one, DrainRequested)]
    assert dialect.leaving == (None in found)
    return found


REQUESTS = {**requests(), "Drain": peer.drain(2, b"w"), "Drain the broker": peer.drain(3, None)}


def test_requests_to_be_flipped_have_every_type() -> None:
    kinds = {Q.FromString(body).type for body in (*SEEDS, *REQUESTS.values())}
    # The table of all requests, and the messages of relays, which contain others.
    assert kinds == {*native_requests._DECODERS, Q.Relay}  # noqa: SLF001


@pytest.mark.parametrize("name", REQUESTS)
def test_no_flipped_bit_drains_what_the_request_did_not(name: str) -> None:
    body = REQUESTS[name]
    meant = drains(body)
    assert bool(meant) == name.startswith("Drain")
    for other in flipped(body):
        assert None not in drains(other) or None in meant, other.hex()
        assert not drains(other) or meant, other.hex()


def test_no_flipped_bit_of_a_seed_drains_anything() -> None:
    for body in SEEDS:
        for other in flipped(body):
            assert not drains(other), other.hex()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"everything": False},
        {"everything": True, "location": b"w"},
        {"everything": True, "name": b"n"},
        {"everything": True, "n": 1},
        {"everything": True, "batch": {}},
    ],
)
def test_drain_needs_exactly_one_target(fields: dict[str, Any]) -> None:
    counter = Counter()
    answer = Q.FromString(counter.ask(Q(type=Q.Drain, **fields).SerializeToString()))
    assert answer.type == Q.Error
    assert not counter.dialect.leaving


def test_millions_of_empty_messages_are_counted_not_decoded() -> None:
    counter = Counter()
    assert Q.FromString(counter.ask(b"\x08\x00" + b"\x12\x00" * 1_000_000)).type == Q.Error
    terms = pb.Batch(name=[b"a"]).SerializeToString() + b"\x1a\x00" * 1_000_000
    length = len(terms)
    size = bytes(
        [length & 127 | 128, length >> 7 & 127 | 128, length >> 14 & 127 | 128, length >> 21]
    )
    assert Q.FromString(counter.ask(b"\x08\x00\x9a\x01" + size + terms)).type == Q.Error
    deps = b"\x0a\x01A\x12\x01x" + b"\x22\x00" * 200_000
    assert (
        Q.FromString(counter.ask(Q(type=Q.Create, task=[deps]).SerializeToString())).type == Q.Error
    )
