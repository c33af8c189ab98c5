"""Channel: numbers, replies and resending, with the test's own transport and clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from taskyard.core.limits import SECOND_NS
from taskyard.net.channel import (
    OVERDUE_NS,
    PING_NS,
    PING_OVERDUE_NS,
    RETRY_NS,
    RETRY_NS_MAX,
    Channel,
)
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer

Q = pb.QueryMsg


class Wall:
    """A transport that records sent messages, with a clock that stands still."""

    def __init__(self) -> None:
        self.now_ns = 100 * SECOND_NS
        self.there = True
        self.made = 1
        self.sent: list[Q] = []
        self.inbox: list[list[bytes]] = []
        self.line = Channel(self, self)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def connections(self) -> int:
        return self.made

    def receive(self) -> list[bytes] | None:
        return self.inbox.pop(0) if self.inbox else None

    def send(self, frames: Sequence[bytes]) -> bool:
        if self.there:
            assert frames[0] == b""
            self.sent.append(Q.FromString(frames[1]))
        return self.there

    def ask(self, wait_ns: int = 0, *, stream: bool = False) -> int:
        return self.line.request(
            lambda number: peer.query(number, peer.STATS), wait_ns, stream=stream
        )

    def answer(
        self, number: int, broker: int = 1, kind: Q.Type = Q.Stats, n: int | None = None
    ) -> None:
        query = Q(type=kind, request=number, broker=broker)
        if n is not None:
            query.n = n
        self.inbox.append([b"", query.SerializeToString()])

    def answered(self) -> list[int]:
        return [reply.request for reply in self.line.receive()]

    def pass_time(self, ns: int) -> list[int]:
        """Let time pass and return the numbers of the requests that are sent."""
        self.sent = []
        self.now_ns += ns
        self.line.turn()
        return [query.request for query in self.sent]


def test_requests_are_numbered_and_replies_may_arrive_in_any_order() -> None:
    wall = Wall()
    assert [wall.ask(), wall.ask()] == [1, 2]
    wall.answer(2)
    wall.answer(1)
    assert wall.answered() == [2, 1]
    assert wall.line.open_count == 0


def test_unexpected_and_malformed_replies_are_ignored() -> None:
    wall = Wall()
    wall.ask()
    wall.answer(99)
    wall.inbox.append([b"", b"\xff"])
    assert wall.answered() == []
    assert wall.line.open_count == 1


def test_second_reply_is_ignored() -> None:
    wall = Wall()
    wall.ask()
    wall.answer(1)
    wall.answer(1)
    assert wall.answered() == [1]


def test_unsent_request_is_sent_when_the_broker_connects() -> None:
    wall = Wall()
    wall.there = False
    wall.ask()
    wall.ask()
    assert not wall.sent
    assert wall.line.wake_at_ns() is not None
    wall.there = True
    assert wall.pass_time(1) == [1, 2]
    assert wall.pass_time(1) == []


def test_open_requests_are_sent_again_to_a_new_broker() -> None:
    wall = Wall()
    wall.ask()
    wall.answer(1, broker=1)
    assert wall.answered() == [1]
    wall.ask()
    wall.ask()
    wall.answer(3, broker=2)
    assert wall.answered() == [3]
    assert wall.pass_time(1) == [2]
    assert wall.pass_time(1) == []


def test_first_reply_causes_old_requests_to_be_sent_again_but_not_recent_ones() -> None:
    wall = Wall()
    wall.ask()
    wall.now_ns += PING_NS + 1
    wall.ask()
    wall.ask()
    wall.answer(3)
    assert wall.answered() == [3]
    assert wall.pass_time(1) == [1]


def test_ping_after_silence_detects_a_new_broker() -> None:
    wall = Wall()
    wall.ask()
    wall.answer(1, broker=1)
    wall.answered()
    wall.ask(60 * SECOND_NS)
    assert wall.pass_time(PING_NS) == []
    assert wall.pass_time(1) == [3]
    assert wall.sent[0].type == Q.OK
    assert wall.pass_time(PING_NS) == []  # one ping at a time
    wall.answer(3, broker=2, kind=Q.OK)
    assert wall.answered() == []
    assert wall.pass_time(1) == [2]


def test_overdue_request_is_sent_again_but_not_while_the_broker_may_hold_it() -> None:
    wall = Wall()
    wall.ask()
    wall.ask(60 * SECOND_NS)
    assert 1 in wall.pass_time(OVERDUE_NS + 1)
    assert 2 not in wall.pass_time(SECOND_NS)
    assert 2 in wall.pass_time(60 * SECOND_NS)


def test_all_requests_are_sent_again_after_a_reconnect() -> None:
    wall = Wall()
    first, second = wall.ask(30 * SECOND_NS), wall.ask(30 * SECOND_NS)
    ping = wall.pass_time(PING_NS + 1)[-1]
    wall.made += 1
    assert wall.pass_time(PING_NS) == [first, second, ping]
    wall.answer(ping)
    assert wall.answered() == []
    assert wall.pass_time(PING_NS) == []


def test_first_connection_is_not_a_reconnect() -> None:
    wall = Wall()
    wall.made = 0
    wall.ask(30 * SECOND_NS)
    wall.pass_time(PING_NS)
    wall.made = 1
    wall.answer(99)
    assert wall.answered() == []
    assert wall.pass_time(PING_NS) == []


def test_lost_ping_is_sent_again_long_before_other_requests() -> None:
    wall = Wall()
    wall.ask()
    (ping,) = wall.pass_time(PING_NS + 1)
    assert wall.pass_time(PING_OVERDUE_NS) == []
    assert wall.pass_time(1) == [ping]


def test_stream_stays_open_until_it_has_ended() -> None:
    wall = Wall()
    number = wall.ask(stream=True)
    wall.answer(number, kind=Q.Watch, n=2)
    wall.answer(number, kind=Q.Watch, n=1)
    assert wall.answered() == [number, number]
    wall.answer(number, kind=Q.Watch, n=0)
    assert wall.answered() == [number]
    assert wall.line.open_count == 0


def test_accepted_stream_continues_and_its_request_may_be_replaced() -> None:
    wall = Wall()
    number = wall.ask(stream=True)
    wall.answer(number, kind=Q.OK)
    assert wall.answered() == [number]
    wall.line.replace(number, peer.watch(number, [b"a"], stream=True))
    wall.ask()
    wall.answer(number + 1, broker=2)
    wall.answered()
    assert wall.pass_time(1) == [number]
    assert wall.sent[0].type == Q.Watch
    wall.answer(number, kind=Q.Watch, n=0)
    assert wall.answered() == [number]
    wall.line.replace(number, b"too late")
    assert wall.line.open_count == 0


def test_refused_stream_is_closed() -> None:
    wall = Wall()
    number = wall.ask(stream=True)
    wall.answer(number, kind=Q.Error)
    assert wall.answered() == [number]
    assert wall.line.open_count == 0


def test_dropped_request_is_neither_answered_nor_sent() -> None:
    wall = Wall()
    wall.there = False
    number = wall.ask()
    wall.line.drop(number)
    wall.there = True
    assert wall.pass_time(1) == []
    wall.answer(number)
    assert wall.answered() == []
    assert wall.line.wake_at_ns() is None


def refuse_for_now(wall: Wall, number: int, code: bytes = b"retry-later") -> None:
    query = Q(type=Q.Error, request=number, broker=1, reason=b"it lags", code=code)
    wall.inbox.append([b"", query.SerializeToString()])
    assert wall.answered() == []


def test_postponed_request_is_sent_again_after_a_growing_pause() -> None:
    wall = Wall()
    number = wall.ask()
    pauses: list[int] = []
    for _ in range(9):
        refuse_for_now(wall, number)
        assert wall.line.postponed == "it lags"
        wake_at_ns = wall.line.wake_at_ns()
        assert wake_at_ns is not None
        pauses.append(min(RETRY_NS << len(pauses), RETRY_NS_MAX))
        assert number not in wall.pass_time(pauses[-1] - 1)
        assert number in wall.pass_time(1)
    assert pauses[-1] == RETRY_NS_MAX
    wall.answer(number)
    assert wall.answered() == [number]
    assert wall.line.postponed == ""
    assert number not in wall.pass_time(2 * RETRY_NS_MAX)


@pytest.mark.parametrize("code", [b"retry-later", b"overloaded"])
def test_channel_wakes_for_a_postponed_request(code: bytes) -> None:
    wall = Wall()
    refuse_for_now(wall, wall.ask(), code)
    assert wall.line.wake_at_ns() == wall.now_ns + RETRY_NS


def test_postponed_request_can_be_dropped() -> None:
    wall = Wall()
    for number in (wall.ask(), wall.ask()):
        refuse_for_now(wall, number)
    wall.line.drop(number)
    assert wall.line.postponed
    wall.line.drop_all()
    assert not wall.line.postponed
    assert wall.pass_time(RETRY_NS_MAX) == []


def test_other_errors_are_replies() -> None:
    wall = Wall()
    number = wall.ask()
    wall.answer(number, kind=Q.Error)
    assert wall.answered() == [number]
