"""Parts of the runner without processes: frames, tails, last lines."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import DecodeError

from taskyard.core.events import Outcome
from taskyard.core.limits import REASON_BYTES_MAX
from taskyard.worker import call_frames
from taskyard.worker.call_frames import CallFrame, ResultFrame
from taskyard.worker.jobs import LAST_LINE_BYTES_MAX, Tail, cut_reason, last_line
from taskyard.worker.processes import task_env

orders = st.lists(
    st.builds(
        CallFrame,
        *(st.binary(max_size=20), st.integers(0, 2**63)),
        *(st.binary(max_size=50), st.binary(max_size=9)),
        st.dictionaries(st.sampled_from(["A", "B"]), st.sampled_from(["", "1", "x=y"])),
    )
)


def pieces(content: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    return [content[start:end] for start, end in pairwise(places)]


@given(orders, st.lists(st.integers(0, 1000)))
def test_calls_arrive_whole_however_they_are_split(sent: list[CallFrame], cuts: list[int]) -> None:
    inbox = call_frames.FrameBuffer()
    stream = b"".join(map(call_frames.pack, sent))
    arrived = [frame for piece in pieces(stream, cuts) for frame in inbox.add(piece)]
    assert [call_frames.decode_call(frame) for frame in arrived] == sent
    assert inbox.bytes_pending() == 0


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.FAILED, Outcome.FAILED_FINAL])
@pytest.mark.parametrize("printed", [False, True])
def test_answer_arrives_as_it_was_sent(outcome: Outcome, *, printed: bool) -> None:
    sent = ResultFrame(outcome, b"text", b"end", printed=printed)
    (frame,) = call_frames.FrameBuffer().add(call_frames.pack(sent))
    assert call_frames.decode_result(frame) == sent


def test_first_frame_of_a_ready_child_is_empty() -> None:
    assert call_frames.FrameBuffer().add(call_frames.READY) == [b""]


@pytest.mark.parametrize("frame", [b"", b"\xff", b"\xff\0\0\0\0", b"\x92\xcc\xff\xc4\0"])
def test_malformed_result_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(DecodeError):
        call_frames.decode_result(frame)


@given(st.lists(st.binary(max_size=30)), st.integers(1, 20))
def test_tail_keeps_the_last_bytes(chunks: list[bytes], bytes_max: int) -> None:
    tail = Tail(bytes_max)
    for chunk in chunks:
        tail.add(chunk)
    everything = b"".join(chunks)
    assert tail.value() == everything[-bytes_max:]
    assert tail.bytes_total == len(everything)
    assert tail.is_cut() == (len(everything) > bytes_max)
    tail.clear()
    assert (tail.value(), tail.bytes_total) == (b"", 0)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (b"", b""),
        (b"\n \n", b""),
        (b"one\ntwo", b"two"),
        (b"one\r\ntwo\r\n\r\n", b"two"),
        (b"50%\r100%\n", b"50% 100%"),
        (b"\x1b[1mbold\x1b[0m\n", b"[1mbold [0m"),
        (b"\xff\n", "\ufffd".encode()),
        (b"x" * 10_000, b"[...] " + b"x" * LAST_LINE_BYTES_MAX),
    ],
)
def test_last_line_skips_blank_lines(output: bytes, line: bytes) -> None:
    assert last_line(output) == line


@given(st.text(min_size=REASON_BYTES_MAX // 4, max_size=REASON_BYTES_MAX + 10))
def test_reason_is_cut_between_letters(text: str) -> None:
    reason = cut_reason(text.encode(errors="replace"))
    assert len(reason) <= REASON_BYTES_MAX
    assert text.startswith(reason.decode().removesuffix(" [...]"))


def test_name_of_any_bytes_fits_the_environment() -> None:
    assert task_env(b"a\0b", 3) == {
        "TASKYARD_TASK": "a\\0b",
        "TASKYARD_CAMPAIGN": "",
        "TASKYARD_ATTEMPT": "3",
    }
    read_fifo = task_env(b"nightly/a/b", 1, b"nightly")
    assert (read_fifo["TASKYARD_TASK"], read_fifo["TASKYARD_CAMPAIGN"]) == ("a/b", "nightly")
