"""Tasks that differ only in their names are decoded like any others, but faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import frames, raw_messages

if TYPE_CHECKING:
    from collections.abc import Callable

DECODERS = (frames.submission_of, frames.report_of)

names = st.binary(max_size=6) | st.sampled_from([b"a", b"t1", b"\xff", b"n" * 127, b"n" * 128])

logs = st.lists(
    st.builds(
        lambda state, time: pb.TaskMsg.LogMsg(state=state, time=time).SerializeToString(),
        st.sampled_from(list(pb.TaskMsg.State.values())),
        st.integers(0, 5_000_000),
    ),
    max_size=2,
)
messages = st.builds(
    pb.TaskMsg,
    name=names,
    origin=st.sampled_from([b"", b"o", b"origin"]),
    log=logs,
    pred=st.sampled_from([[], [pb.TaskMsg.Dep(name=b"p").SerializeToString()]]),
    text=st.sampled_from([None, b"", b"text"]),
    attempt=st.sampled_from([None, 0, 7]),
    outcome=st.sampled_from([None, pb.Failed]),
    output=st.sampled_from([None, b"printed"]),
    started_ns=st.sampled_from([None, 5]),
    lane=st.sampled_from([None, b"l"]),
    payload=st.sampled_from([None, b"p"]),
)


@st.composite
def tasks_of_one_shape(draw: st.DrawFn) -> list[bytes]:
    """Encode a message several times with other names, and perhaps add something else."""
    message: Any = draw(messages)
    encoded = []
    for name in draw(st.lists(names, min_size=1, max_size=5)):
        message.name = name
        encoded.append(message.SerializeToString())
    if draw(st.booleans()):
        encoded[draw(st.integers(0, len(encoded) - 1))] += draw(st.binary(max_size=8))
    return encoded


def outcome(decode: Callable[[pb.QueryMsg], object], query: pb.QueryMsg) -> object:
    try:
        return decode(query)
    except Malformed as error:
        return str(error)


@given(st.one_of(tasks_of_one_shape(), st.lists(st.binary(max_size=12), max_size=4)))
@example([b"\n\x01a\x12\x00\n\x01b"] * 2)  # two names: the last one counts
@example([b"\n\x01a\x12\x01o", b"\n\x01b\x12\x01x"])
@example([b"\n\x00\x12\x01o"] * 2)
def test_quick_and_long_way_give_the_same(encoded: list[bytes]) -> None:
    query = pb.QueryMsg(type=pb.QueryMsg.Create, task=encoded)
    for decode in DECODERS:
        quick = outcome(decode, query)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(raw_messages, "split_alike", lambda _: None)
            assert quick == outcome(decode, query)


def test_usual_messages_take_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    task = pb.TaskMsg(origin=b"client", log=[b"\x08\x05\x10\x01"])
    encoded = []
    for number in range(100):
        task.name = b"t%d" % number
        encoded.append(task.SerializeToString())
    query = pb.QueryMsg(type=pb.QueryMsg.Create, task=encoded)
    parsed: list[bytes] = []

    def parse(kind: type[pb.TaskMsg], raw: bytes, parse: Any = frames.parse_counted) -> Any:
        parsed.append(raw)
        return parse(kind, raw)

    monkeypatch.setattr(frames, "parse_counted", parse)
    for decode in DECODERS:
        decode(query)
    assert len(parsed) == len(DECODERS)
