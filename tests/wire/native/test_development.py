"""Peers of a development version are refused, with an Error in their own fields."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor

from taskyard.core.model import WorkerFacts
from taskyard.errors import Refused
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.health_views import RefusedPeer
from taskyard.wire.native import peer, raw_messages
from taskyard.wire.native.raw_messages import MEASURED_BYTES_MIN
from tests.wire.kit import Counter
from tests.wire.native import development_messages as messages

Q = pb.QueryMsg

#: The fields by which messages of a development version are recognized.
SEEN = ("request", "broker", "envelope")


def error(code: str, request: int | None = None) -> bytes:
    """Return the Error that a development version reads, with the number of its request."""
    found = pb.DevelopmentMsg(type=Q.Error, code=code.encode(), request=request)
    found.reason = raw_messages.PEER_TEXT.encode()
    return found.SerializeToString()


REFUSED = [
    (messages.HEARTBEAT, error("forbidden", 3)),
    (messages.STEAL, error("forbidden", 2)),
    (messages.RELAYED_STEAL, error("forbidden")),
    (messages.RENEWED, error("wire-format", 6)),
    (messages.RULES, error("wire-format", 1)),
    (messages.STATS, error("wire-format", 1)),
    (messages.CREATE, error("wire-format", 4)),
    (messages.PING, error("wire-format", 5)),
]


@pytest.mark.parametrize(("body", "expected"), REFUSED)
def test_request_of_a_development_version_is_refused_in_its_own_fields(
    body: bytes, expected: bytes
) -> None:
    counter = Counter()
    before = ledger_fingerprint(counter.scheduler.ledger)
    for _ in range(2):
        assert counter.frames([b"", body]) == [expected]
    assert ledger_fingerprint(counter.scheduler.ledger) == before
    assert counter.dialect.malformed == 0
    assert counter.dialect.newcomers == [RefusedPeer(), RefusedPeer()]


def test_long_malformed_message_is_not_parsed_to_find_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[int] = []
    monkeypatch.setattr(raw_messages, "development_error", lambda body: parsed.append(len(body)))
    counter = Counter()
    entry = Q(type=Q.Relay, envelope=[b""]).SerializeToString()[2:]
    counter.frames([b"", Q(type=Q.Relay).SerializeToString() + entry * (MEASURED_BYTES_MIN // 2)])
    assert counter.dialect.malformed == 1
    assert parsed == []
    counter.frames([b"", b"\xff"])
    assert parsed == [1]


def test_error_has_the_numbers_of_the_development_version() -> None:
    reason = raw_messages.PEER_TEXT.encode()
    text = b"\x8a\x01" + bytes([len(reason)]) + reason
    code = b"\xa2\x02\x0bwire-format"
    assert len(reason) < 128
    assert error("wire-format", 4) == b"\x08\x08" + text + b"\x90\x01\x04" + code


def test_peer_of_a_development_version_behind_a_relay_gets_the_error_there() -> None:
    counter = Counter()
    envelope = pb.Envelope(peer=7, message=messages.STATS).SerializeToString()
    counter.frames([b"", Q(type=Q.Relay, envelope=[envelope]).SerializeToString()])
    (_, frames), *more = counter.dialect.flush()
    assert more == []
    (raw,) = Q.FromString(frames[1]).envelope
    assert pb.Envelope.FromString(raw) == pb.Envelope(peer=7, message=error("wire-format", 1))


def test_plain_peers_and_extended_ones_without_a_number_are_served() -> None:
    counter = Counter()
    worker = peer.worker_message(WorkerFacts(slots_total=1))
    extended = Q(type=Q.Steal, location=b"w", worker=worker).SerializeToString()
    plain = Q(type=Q.OK).SerializeToString()
    replies = [
        Q.FromString(one) for body in (extended, plain) for one in counter.frames([b"", body])
    ]
    assert [one.type for one in replies] == [Q.NotFound, Q.OK]
    assert counter.dialect.newcomers == []


@pytest.mark.parametrize(
    "body",
    [messages.HEARTBEAT_REPLY, messages.NOT_FOUND, messages.LIST_REPLY, messages.RELAY_ERROR],
)
def test_reply_of_a_development_version_raises(body: bytes) -> None:
    with pytest.raises(Refused, match="the broker has wire format 0") as caught:
        raw_messages.check_development_reply(body)
    assert (caught.value.code, caught.value.exit_code) == ("wire-format", 2)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        Q(type=Q.Error).SerializeToString(),
        Q(type=Q.Error, broker=7, code=b"too-many", reason=b"r").SerializeToString(),
        Q(type=Q.Rules, broker=7, rules=pb.RulesMsg(version=3)).SerializeToString(),
    ],
)
def test_other_replies_are_not_of_a_development_version(body: bytes) -> None:
    raw_messages.check_development_reply(body)


def test_numbers_of_a_development_version_are_those_of_fields_with_other_types() -> None:
    """So a message of this version never has them."""
    number, delimited = FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_BYTES
    former = pb.DevelopmentMsg.DESCRIPTOR.fields_by_name
    now = {field.number: field for field in Q.DESCRIPTOR.fields}
    kinds = {name: (former[name].type, now[former[name].number].type) for name in SEEN}
    assert kinds == {
        "request": (number, FieldDescriptor.TYPE_MESSAGE),
        "broker": (number, FieldDescriptor.TYPE_MESSAGE),
        "envelope": (delimited, FieldDescriptor.TYPE_UINT32),
    }
