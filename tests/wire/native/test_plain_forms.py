"""Plain requests of a known form give the same events as if they were decoded.

Replies to them are the same bytes as if they were encoded by protobuf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.core import effects, events
from taskyard.core.model import Terms
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.dialect import TaskDefaults
from taskyard.wire.native import plain
from taskyard.wire.native import requests as native_requests
from taskyard.wire.native import server as native_server
from taskyard.wire.native.pending import plain_peers
from taskyard.wire.native.server import NativeServer
from taskyard.wire.roles import AuthenticatedPeer, Role

if TYPE_CHECKING:
    from collections.abc import Sequence
Q = pb.QueryMsg

#: Two peers at a socket without terms of their own, and one at a socket with some. They chose their
#: routing ids, so the workers behind them are noted.
ROUTES = (b"\0one", b"\0two", b"\1three")
WORKER, VIEWER = AuthenticatedPeer("w", (Role.WORKER,)), AuthenticatedPeer("v", (Role.VIEWER,))
PEERS = (None, WORKER, VIEWER)


def task(name: bytes, origin: bytes = b"o") -> bytes:
    return pb.TaskMsg(name=name, origin=origin).SerializeToString()


def request(kind: int, *tasks: bytes, **fields: Any) -> bytes:
    return Q(type=kind, task=tasks, **fields).SerializeToString()  # type: ignore[arg-type]


USUAL = (
    *(request(Q.Create, task(b"a", origin), task(b"b", origin)) for origin in (b"o", b"p")),
    *(request(Q.Steal, location=worker, n=5) for worker in (b"w", b"v")),
    request(Q.Complete, task(b"a"), location=b"w"),
)

#: The bytes between two names of this length.
BETWEEN = b"\x12\x01o\x12\x0e\n\x09"

UNUSUAL = {
    "tasks that differ": request(Q.Create, task(b"a", b"p"), task(b"bb")),
    "a name with other bytes": request(Q.Create, task(b"x" + BETWEEN + b"x"), task(b"y" * 9)),
    "no text": request(Q.Create, task(b"a"), task(b"\xff")),
    "text in two names": request(Q.Create, task(b"\xc3"), task(b"\xa4")),
    "text": request(Q.Create, task("ä".encode()), task("ö".encode())),
    "an empty name": request(Q.Complete, task(b""), location=b"w"),
    "no origin": request(Q.Create, b"\n\x01a", b"\n\x01b"),
    "two names": request(Q.Create, task(b"a") + b"\n\x01z", task(b"b") + b"\n\x01z"),
    "a request number": request(Q.Complete, task(b"a"), location=b"w", request=3),
    "tasks and columns": request(Q.Complete, task(b"a"), location=b"w", batch=pb.Batch()),
    "tasks after the location": USUAL[-1] + request(Q.Steal, task(b"z"))[2:],
    "another location": USUAL[-1] + b"2\x01v",
    "an extended worker": request(Q.Steal, location=b"w", n=5, worker=pb.WorkerMsg(slots=1)),
    "no location": request(Q.Complete, task(b"a")),
    "no tasks": request(Q.Create),
    "a Steal with tasks": request(Q.Steal, task(b"a"), location=b"w"),
    "many lengths": request(Q.Create, *(task(b"n" * number) for number in range(1, 8))),
    "a long name": request(Q.Create, task(b"n" * 130)),
    "a long origin": request(Q.Create, *(task(one, b"o" * 130) for one in (b"a", b"b"))),
    "a log": request(Q.Complete, task(b"a") + b"2\x04\x08\x05\x10\x01", location=b"w"),
    "an endless type": b"\x08\x80" + USUAL[0][2:],
    **{f"{cut} bytes": USUAL[0][:cut] for cut in range(len(USUAL[0]))},
}

names = st.sampled_from([b"a", b"b", b"t9", b"t10", b"\xc3\xa4", b"\xff", b"", b"n" * 127])
names_in_a_row = st.builds(
    lambda first, count: [b"t%d" % number for number in range(first, first + count)],
    st.integers(0, 12),
    st.integers(0, 12),
)
tails = st.sampled_from(
    [b"", b"\x10", b"\n\x01z", b"\x1a\x02xx", b"2\x01w", b"\x82\x01\x02", b"\xff"]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Return a request of a plain peer, nearly always valid and of a usual form."""
    kind = draw(st.sampled_from([Q.Create, Q.Steal, Q.Complete, Q.Transfer, Q.Exit]))
    message: Any = Q(type=kind)
    if kind != Q.Create or draw(st.integers(0, 9)) == 0:
        message.location = draw(st.sampled_from([b"w", b"v", b"wmp:1", b""]))
    if kind == Q.Steal or draw(st.integers(0, 9)) == 0:
        message.n = draw(st.sampled_from([1, 100, 0]))
    if kind != Q.Steal or draw(st.integers(0, 9)) == 0:
        one: Any = pb.TaskMsg(origin=draw(st.sampled_from([b"o", b"", b"2\x01w"])))
        if draw(st.integers(0, 4)) == 0:
            one.log.append(b"\x08\x05\x10\x01")
        if draw(st.integers(0, 9)) == 0:
            one.payload = b"ours"
        for name in draw(names_in_a_row | st.lists(names, max_size=5)):
            one.name = name
            message.task.append(one.SerializeToString() + draw(st.just(b"") | tails))
    encoded: bytes = message.SerializeToString()
    return encoded + draw(st.just(b"") | tails)


def make_server() -> NativeServer:
    server = NativeServer(1, lambda: 5)
    defaults = TaskDefaults(b"render", b"lane")
    server.set_plain(1, plain_peers(service=b"render", tasks=defaults))
    return server


Message = tuple[bytes, bytes, AuthenticatedPeer | None]


def check_same(messages: Sequence[Message]) -> None:
    """Check that a server which knows forms behaves like one that decodes everything."""
    quick, long = make_server(), make_server()
    for route, body, peer in messages:
        found = quick.receive(route, [b"", body], 7, peer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain, "split", lambda *_: None)
            assert found == long.receive(route, [b"", body], 7, peer)
    assert quick.pending.entries == long.pending.entries
    assert [*quick.pending.workers.items()] == [*long.pending.workers.items()]
    assert (quick.malformed, quick.forbidden) == (long.malformed, long.forbidden)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(ROUTES),
            requests() | st.sampled_from([*USUAL, *UNUSUAL.values()]) | st.binary(max_size=24),
            st.sampled_from(PEERS),
        ),
        max_size=8,
    )
)
def test_known_forms_and_decoding_give_the_same(messages: list[Message]) -> None:
    check_same([message for message in messages for _ in range(2)])


@pytest.mark.parametrize("body", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_request_is_decoded_after_usual_ones(body: bytes) -> None:
    usual: list[Message] = [(route, one, None) for one in USUAL for route in ROUTES for _ in "12"]
    check_same([*usual, *[(route, body, None) for route in ROUTES for _ in "12"], *usual])


def test_usual_requests_are_subject_to_roles() -> None:
    check_same([(ROUTES[0], body, peer) for body in USUAL for peer in (None, *PEERS)])


def test_usual_requests_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def decode(pending: Any, incoming: Any, decode: Any = native_requests.decode_request) -> Any:
        decoded.append(incoming.query.type)
        return decode(pending, incoming)

    monkeypatch.setattr(native_requests, "decode_request", decode)
    for route in ROUTES:
        server = make_server()
        decoded.clear()
        steal = Q(type=Q.Steal, location=b"w%d" % route[-1], n=100)
        server.receive(route, [b"", steal.SerializeToString()], 7)  # registers the worker
        for first in (0, 100, 950):
            tasks = [task(b"t%d" % number) for number in range(first, first + 100)]
            for message in (
                Q(type=Q.Create, task=tasks),
                steal,
                Q(type=Q.Complete, location=b"w", task=tasks),
            ):
                server.receive(route, [b"", message.SerializeToString()], 7)
        assert decoded == [Q.Steal, Q.Create, Q.Steal, Q.Complete]


def test_forms_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "FORMS_MAX", 3)
    server = make_server()
    for number in range(10):
        body = request(Q.Create, task(b"t", b"%d" % number))
        assert len(server.receive(ROUTES[0], [b"", body], 7)) == 1
        assert len(server._plain._forms) <= 3  # noqa: SLF001


def test_draining_broker_refuses_known_forms() -> None:
    server = make_server()
    create, drain = [b"", USUAL[0]], [b"", request(Q.Drain, everything=True)]
    kinds = [type(server.receive(ROUTES[0], one, 7)[0]) for one in (create, create, drain, create)]
    submits = events.SubmitRequested
    assert kinds == [submits, submits, events.DrainRequested, events.ReplyDue]


def assign(tasks: list[tuple[bytes, bytes]], at_ns: int) -> effects.Assign:
    """Assign tasks of these names and origins."""
    count, blank = len(tasks), [b""] * len(tasks)
    terms = [Terms(origin=origin, submitted_ns=place) for place, (_, origin) in enumerate(tasks)]
    return effects.Assign(
        b"w", [name for name, _ in tasks], [1] * count, blank, terms, blank, 0, at_ns
    )


reply_effects = st.one_of(
    st.builds(
        assign,
        st.lists(
            st.tuples(
                st.sampled_from([b"a", b"b", b"t10", b"n" * 90, b"n" * 110, b"n" * 130]),
                st.sampled_from([b"o", b"o", b"o", b"p", b"", b"o" * 100, b"o" * 130]),
            ),
            min_size=1,
            max_size=4,
        ),
        st.integers(0, 1 << 61),
    ),
    st.builds(effects.Accepted, st.just(b""), st.just(0), st.just(1), refused=st.integers(0, 1)),
    st.builds(effects.NoWork, st.just(b"w"), st.booleans()),
    st.builds(effects.ReportAck, st.just(b"w"), st.just(0), st.sampled_from([[], [b"a"]])),
)


def check_reply(effect: Any, body: bytes) -> None:
    """Check the reply to a request against the one that protobuf encodes."""
    found = []
    for is_quick in (True, False):
        server = make_server()
        (*_, event) = server.receive(ROUTES[0], [b"", body], 7)
        effect.request = event.request  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            if not is_quick:
                patch.setattr(native_server, "reply_to", lambda *_: None)
            found.append((server.reply(effect), server.pending.entries))
    assert found[0] == found[1]


EXTENDED = request(Q.Complete, task(b"a"), location=b"w", request=3)


@given(reply_effects, st.sampled_from([*USUAL, EXTENDED]))
def test_replies_have_the_bytes_of_protobuf(effect: Any, body: bytes) -> None:
    check_reply(effect, body)


def test_replies_at_the_limits_have_the_bytes_of_protobuf() -> None:
    for length in range(100, 130):
        check_reply(assign([(b"n" * length, b"o"), (b"m", b"o")], 10**18), USUAL[2])
    for settled in (False, True):
        check_reply(effects.NoWork(b"w", settled), USUAL[2])
    for missing in ([], [b"a"]):
        check_reply(effects.ReportAck(b"w", 0, missing), USUAL[4])


def test_usual_replies_are_not_encoded_by_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_server, "REPLIES", {})
    server = make_server()
    for names in ([b"t%03d" % number for number in range(100)], [b"t", b"uu"] * 50):
        assigned = assign([(name, b"o") for name in names], 5)
        for message, effect in (
            (USUAL[0], effects.Accepted(ROUTES[0], 0, 100)),
            (USUAL[2], assigned),
            (USUAL[4], effects.ReportAck(b"w", 0, [])),
        ):
            (*_, event) = server.receive(ROUTES[0], [b"", message], 7)
            effect.request = event.request  # type: ignore[attr-defined]
            ((_, frames),) = server.reply(effect)
            assert Q.FromString(frames[1]).type == (Q.Transfer if effect is assigned else Q.OK)
