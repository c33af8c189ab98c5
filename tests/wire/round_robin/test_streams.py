"""STREAM in LStore's packing, byte by byte, at a worker and at a client."""

from __future__ import annotations

import zlib

import pytest

from taskyard.errors import Malformed
from taskyard.wire.round_robin import frames
from taskyard.wire.round_robin.frames import StreamReader, StreamWriter
from taskyard.wire.round_robin.peer import ANSWER_NS
from tests.wire.round_robin.test_peer_client import LMQ, SRV, WRK
from tests.wire.round_robin.test_peer_client import Stage as ClientStage
from tests.wire.round_robin.test_peer_worker import CLI, lmq
from tests.wire.round_robin.test_peer_worker import Stage as WorkerStage

HANDLE = bytes.fromhex("c0a1007f10550000")

#: An original worker's answer to a STREAM of 1,024 bytes, in three blocks. The offsets of an
#: original worker are random, and its blocks may overlap.
THREE_BLOCKS = b"".join(
    (
        b"2R\x08" + HANDLE,
        bytes.fromhex("00020000 2c010000") + b"\x01" * 300,
        bytes.fromhex("00000000 c8020000") + b"\x01" * 712,
        bytes.fromhex("e8030000 0c000000") + b"\x01" * 12,
    )
)

INCREMENT = b"\x07"


def more(handle: bytes, mode: bytes = b"0", stream_id: bytes = b"STREAM_ID") -> list[bytes]:
    return [b"mqs_more", stream_id, handle, mode]


# The packing.


def test_golden_bytes_have_the_sizes_of_the_docs() -> None:
    assert len(THREE_BLOCKS) == 11 + 24 + 1024
    reader = StreamReader(1024)
    reader.add(THREE_BLOCKS)
    assert (reader.state, reader.handle, reader.received) == (b"2", HANDLE, 1024)


def test_worker_packs_1024_bytes_in_one_block() -> None:
    data = bytes.fromhex("00000000 00040000") + b"\x01" * 1024
    assert StreamWriter(HANDLE, 1024).next_message() == b"2R\x08" + HANDLE + data


@pytest.mark.parametrize("size", [0, 1, 1023, 1025, 8_100, 8_117, 8_118, 8_125, 8_126, 100_000])
def test_messages_are_short_and_have_all_data(size: int) -> None:
    writer, reader = StreamWriter(HANDLE, size), StreamReader(size)
    messages = [writer.next_message()]
    while not writer.is_finished:
        messages.append(writer.next_message())
    for message in messages:
        reader.add(message)
    assert max(map(len, messages)) <= 8192
    assert [one[:1] for one in messages] == [b"0"] * (len(messages) - 1) + [b"2"]
    assert reader.received == size


def test_compressed_stream_is_one_over_all_messages() -> None:
    packed = zlib.compress(THREE_BLOCKS[11:])
    reader = StreamReader(1024)
    for begin in range(0, len(packed), 7):
        state = b"0" if begin + 7 < len(packed) else b"2"
        reader.add(state + b"Z\x08" + HANDLE + packed[begin : begin + 7])
    assert reader.received == 1024


def test_pointer_of_a_smaller_machine_is_accepted() -> None:
    reader = StreamReader(1024)
    reader.add(b"2R\x04" + HANDLE[:4] + THREE_BLOCKS[11:])
    assert reader.handle == HANDLE[:4]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (b"", "not a message of a stream"),
        (bytes(1024), "not a message of a stream"),
        (b"2R", "not a message of a stream"),
        (b"2R\x08" + HANDLE[:7], "not a message of a stream"),
        (b"3R\x08" + HANDLE, "not a message of a stream"),
        (b"2X\x08" + HANDLE, "not a message of a stream"),
        (b"1R\x08" + HANDLE, "the worker has aborted the stream"),
        (b"2R\x08" + HANDLE, "got 0 bytes, expected 1024"),
        (THREE_BLOCKS[:-1], "got 1012 bytes, expected 1024"),
        (THREE_BLOCKS + b"\0", "got 1024 bytes, expected 1024"),
        (THREE_BLOCKS + THREE_BLOCKS[-20:], "got more than 1024 bytes"),
        (THREE_BLOCKS[:-1] + b"\x02", "wrong data in the block at 1000"),
        (b"2R\x08" + HANDLE + bytes(8), "block of 0 bytes at 0 of 1024"),
        (b"2R\x08" + HANDLE + b"\xff" * 8, "block of -1 bytes at -1 of 1024"),
        (b"0R\x08" + HANDLE + b"\1\0\0\0\0\4\0\0", "block of 1024 bytes at 1 of 1024"),
        (b"2Z\x08" + HANDLE + b"nonsense", "can't inflate the stream"),
        (b"2Z\x08" + HANDLE + zlib.compress(b"\x01" * (64 << 20)), "block of"),
    ],
)
def test_bad_stream_is_refused(message: bytes, problem: str) -> None:
    with pytest.raises(Malformed, match=problem):
        StreamReader(1024).add(message)


def test_stream_without_data_does_not_go_on_for_ever() -> None:
    reader = StreamReader(10)
    for _ in range(10 + 16):
        reader.add(b"0R\x08" + HANDLE)
    with pytest.raises(Malformed, match="too many messages"):
        reader.add(b"0R\x08" + HANDLE)


# The worker.


def streaming(size: bytes = b"20000") -> tuple[WorkerStage, bytes]:
    """Return a worker with an open stream, and its handle. Its slot is still taken."""
    stage = WorkerStage().registered()
    (reply,) = stage.reply_to(*lmq(4, b"id", b"\x0a", b"STREAM_ID", size), CLI)
    assert reply[:5] == [CLI, b"", LMQ, b"\x06", b"id"]
    assert reply[5][:3] == b"0R\x08"
    return stage, reply[5][3:11]


def commands(sent: list[list[bytes]]) -> list[bytes]:
    """Return the state of each stream message, and the key of other ones."""
    return [frames[5][:1] if frames[0] == CLI else frames[4] for frames in sent]


def test_long_stream_is_sent_in_parts_and_then_frees_its_slot() -> None:
    stage, handle = streaming()
    assert commands(stage.reply_to(*lmq(4, b"2", *more(handle)), CLI)) == [b"0"]
    assert commands(stage.reply_to(*lmq(4, b"3", *more(handle)), CLI)) == [b"2", INCREMENT]
    assert stage.worker.messages == 1
    assert stage.reply_to(*lmq(4, b"4", *more(handle)), CLI) == [
        [CLI, *lmq(6, b"4", b"ERROR mqs_more: unknown stream")]
    ]


@pytest.mark.parametrize("mode", [b"1", b"", b"00"])
def test_aborted_stream_ends_and_frees_its_slot(mode: bytes) -> None:
    stage, handle = streaming()
    last = b"1R\x08" + handle
    sent = stage.reply_to(*lmq(4, b"2", *more(handle, mode)), CLI)
    assert sent == [[CLI, *lmq(6, b"2", last)], lmq(3, b"3", INCREMENT)]


def test_stream_that_no_client_continues_is_dropped_and_frees_its_slot() -> None:
    stage, handle = streaming()
    assert stage.worker.wake_at_ns() is not None
    assert [frames[-2] for frames in stage.later(frames.STREAM_NS)][-1:] == [INCREMENT]
    sent = stage.reply_to(*lmq(4, b"2", *more(handle)), CLI)
    assert sent[-1][-2] == b"ERROR mqs_more: unknown stream"


@pytest.mark.parametrize(
    "arguments",
    [[b"mqs_more"], more(b"12345678"), more(b"\1\0\0\0\0\0\0\0", stream_id=b"other")],
)
def test_request_for_another_stream_is_an_error(arguments: list[bytes]) -> None:
    stage, handle = streaming()
    assert handle == b"\1\0\0\0\0\0\0\0"
    sent = stage.reply_to(*lmq(4, b"2", *arguments), CLI)
    assert sent == [[CLI, *lmq(6, b"2", b"ERROR mqs_more: unknown stream")]]


def test_stream_of_a_worker_that_has_registered_again_frees_no_slot() -> None:
    """The server has freed all slots, and an INCREMENT would be for another message."""
    stage, handle = streaming()
    stage.reply_to(*lmq(1, b"RESTARTED"))
    assert commands(stage.reply_to(*lmq(4, b"2", *more(handle)), CLI)) == [b"0"]
    assert commands(stage.reply_to(*lmq(4, b"3", *more(handle)), CLI)) == [b"2"]


# The client.


def test_client_requests_1024_bytes_as_the_original_does() -> None:
    stage = ClientStage()
    assert stage.streams(1) == [lmq(4, b"2", b"\x0a", b"STREAM_ID", b"1024")]
    assert stage.hears(b"2", THREE_BLOCKS) == []
    assert stage.printed == [f"data: answered by {WRK.decode()}"]


def test_client_requests_the_rest_from_the_worker() -> None:
    stage = ClientStage()
    stage.streams(1)
    assert stage.hears(b"2", b"0" + THREE_BLOCKS[1:400]) == [[WRK, *lmq(4, b"3", *more(HANDLE))]]
    assert stage.later(ANSWER_NS - 1) == []
    rest = b"2" + THREE_BLOCKS[1:11] + THREE_BLOCKS[400:]
    assert stage.hears(b"3", rest) == []
    assert stage.printed == [f"data: answered by {WRK.decode()}"]


def test_client_aborts_a_bad_stream() -> None:
    stage = ClientStage()
    stage.streams(1)
    bad = b"0R\x08" + HANDLE + bytes(8)
    assert stage.hears(b"2", bad) == [[WRK, *lmq(4, b"3", *more(HANDLE, b"1"))]]
    assert stage.printed == ["data failed: block of 0 bytes at 0 of 1024"]
    assert stage.hears(b"3", b"1R\x08" + HANDLE) == []
    assert not stage.client.is_busy


def test_rest_of_a_stream_that_does_not_arrive_is_a_failure() -> None:
    stage = ClientStage()
    stage.streams(1)
    stage.hears(b"2", b"0" + THREE_BLOCKS[1:400])
    stage.later(ANSWER_NS)
    assert stage.printed == [f"data failed: no answer from {SRV.decode()}"]


def test_stream_of_a_worker_of_another_dialect_has_no_rest() -> None:
    stage = ClientStage()
    stage.streams(1)
    frames = [SRV, *lmq(6, b"2", b"0" + THREE_BLOCKS[1:400])]
    assert stage.does(stage.client.take(frames, stage.now_ns)) == []
    assert stage.printed == ["data failed: the stream has more data, but its worker has no address"]


def test_our_client_reads_the_stream_of_our_worker() -> None:
    client, (worker, handle) = ClientStage(), streaming()
    client.does(client.client.start_streams("data", 1, client.now_ns, 20_000))
    sent = worker.reply_to(*lmq(4, b"9", b"\x0a", b"STREAM_ID", b"20000"), CLI)
    number = b"2"
    while client.client.is_busy:
        requested = client.hears(number, sent[0][5])
        if requested:
            number = requested[0][4]
            sent = worker.reply_to(*requested[0][1:], CLI)
    assert client.printed == [f"data: answered by {WRK.decode()}"]
    assert handle
