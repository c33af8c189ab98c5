"""STREAM in LStore's packing, byte by byte, at a worker and at a client."""

from __future__ import annotations

import zlib

import pytest

from taskyard.errors import Malformed
from taskyard.wire.round_robin.frames import StreamReader, pack_stream
from taskyard.wire.round_robin.peer import ANSWER_NS
from tests.wire.round_robin.test_peer_client import SRV, WRK
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
    assert pack_stream([b"\x0a", b"id", b"1024"]) == b"2R\x08" + bytes(8) + data


@pytest.mark.parametrize("size", [0, 1, 1023, 1025, 100_000])
def test_stream_of_any_size_is_one_message_with_all_data(size: int) -> None:
    reader = StreamReader(size)
    reader.add(pack_stream([b"\x0a", b"id", b"%d" % size]))
    assert (reader.state, reader.received) == (b"2", size)


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


def test_worker_answers_a_stream_in_one_message_and_frees_its_slot() -> None:
    stage = WorkerStage().registered()
    sent = stage.reply_to(*lmq(4, b"id", b"\x0a", b"STREAM_ID", b"20000"), CLI)
    reader = StreamReader(20_000)
    reader.add(sent[0][5])
    assert sent == [[CLI, *lmq(6, b"id", sent[0][5])], lmq(3, b"3", INCREMENT)]


def test_request_for_more_is_an_error_and_frees_no_slot() -> None:
    """The request has taken no slot."""
    stage = WorkerStage().registered()
    sent = stage.reply_to(*lmq(4, b"2", *more(HANDLE)), CLI)
    assert sent == [[CLI, *lmq(6, b"2", b"ERROR mqs_more: unknown stream")]]


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
