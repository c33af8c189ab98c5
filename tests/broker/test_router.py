"""The router: the dialect of a message, and the dialect of an effect."""

from collections.abc import Sequence

import pytest

from taskyard.broker.transport import DialectRouter
from taskyard.core.effects import Accepted, Effect, Wake
from taskyard.core.events import Event, ReplyDue
from taskyard.core.timer_heap import TimerHeap
from taskyard.wire.dialect import DIALECTS_MAX, Reply, request_numbers
from taskyard.wire.roles import AuthenticatedPeer, Role


class Echo:
    """A dialect that records its calls."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix, self.timers = prefix, TimerHeap()
        self.peers: list[AuthenticatedPeer | None] = []

    def receive(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: AuthenticatedPeer | None = None,
    ) -> Sequence[Event]:
        self.peers.append(peer)
        return [ReplyDue(now_ns, self.prefix + route, len(frames))]

    def reply(self, effect: Effect) -> Sequence[Reply]:
        return [(self.prefix, [type(effect).__name__.encode()])]

    def disconnected(self, route: bytes) -> Sequence[Event]:
        return [ReplyDue(0, self.prefix + route, 0)]

    cut = disconnected

    def reconnected(self, route: bytes, now_ns: int) -> Sequence[Event]:
        return [ReplyDue(now_ns, self.prefix + route, 0)]


@pytest.fixture
def board() -> DialectRouter:
    return DialectRouter([Echo(b""), Echo(b"a:"), Echo(b"b:")], [0, 2, 1, 1])


def test_message_goes_to_the_dialect_of_its_socket(board: DialectRouter) -> None:
    assert board.receive(b"\0x", [b""], 5) == [ReplyDue(5, b"\0x", 1)]
    assert board.receive(b"\1x", [b""], 5) == [ReplyDue(5, b"b:\1x", 1)]
    assert board.disconnected(b"\3x") == board.cut(b"\3x") == [ReplyDue(0, b"a:\3x", 0)]
    assert board.reconnected(b"\3x", 5) == [ReplyDue(5, b"a:\3x", 0)]


def test_peer_of_a_message_is_passed_to_its_dialect() -> None:
    echoes = [Echo(b""), Echo(b"a:")]
    guest = AuthenticatedPeer("guest", (Role.VIEWER,))
    router = DialectRouter(echoes, [0, 1])
    router.receive(b"\1x", [b""], 5, guest)
    router.receive(b"\0x", [b""], 5)
    assert [one.peers for one in echoes] == [[None], [guest]]


@pytest.mark.parametrize(("dialect", "prefix"), [(0, b""), (1, b"a:"), (2, b"b:")])
def test_reply_is_sent_by_the_dialect_that_numbered_the_request(
    board: DialectRouter, dialect: int, prefix: bytes
) -> None:
    given = request_numbers(dialect)
    for number in (next(given), next(given)):
        assert board.reply(Accepted(b"whoever", number, 1, 0)) == [(prefix, [b"Accepted"])]


@pytest.mark.parametrize(
    ("worker", "prefix"), [(b"a:w", b"a:"), (b"b:w", b"b:"), (b"host-1", b""), (b"", b"")]
)
def test_effect_without_a_request_is_routed_by_the_workers_name(
    board: DialectRouter, worker: bytes, prefix: bytes
) -> None:
    assert board.reply(Wake(worker, b"default")) == [(prefix, [b"Wake"])]


def test_deadlines_of_all_dialects_are_in_one_heap() -> None:
    echoes = [Echo(b""), Echo(b"a:"), Echo(b"b:")]
    for number, echo in enumerate(echoes):
        echo.timers.add(9 - number, "before", echo.prefix)
    router = DialectRouter(echoes, [0, 1, 2])
    for echo in echoes:
        echo.timers.add(8, "after", echo.prefix)
    assert router.timers.heap[0][0] == 7
    assert router.timers.pop_due(8) == [
        *(("before", b"b:"), ("before", b"a:")),
        *(("after", prefix) for prefix in (b"", b"a:", b"b:")),
    ]
    assert [echo.timers.pop_due(9) for echo in echoes] == [[("before", b"")], [], []]


def test_numbers_of_dialects_never_meet() -> None:
    seen = [next(given) for given in map(request_numbers, range(DIALECTS_MAX)) for _ in range(3)]
    assert len(set(seen)) == len(seen)
    assert 0 not in seen
    with pytest.raises(ValueError, match="must be below"):
        request_numbers(DIALECTS_MAX)
