"""The spool: which bytes are sent, when, and that memory is bounded."""

from __future__ import annotations

from hashlib import sha256

from taskyard.core.blobs import Blob, Content
from taskyard.core.limits import BLOB_BYTES_MIN, STREAM_END_BYTES
from taskyard.core.model import Stream
from taskyard.worker.jobs import Job
from taskyard.worker.output import (
    APPEND_BYTES_MAX,
    SPOOL_BYTES_DUE,
    SPOOL_BYTES_MAX,
    SPOOL_INTERVAL_NS,
    SPOOL_START_NS,
    OutputSpool,
    SpooledStream,
)

JOB = Job(b"a", 1, b"exec", b"")
BYTES = bytes(range(256)) * 1024
SHORT = BYTES[: BLOB_BYTES_MIN - 1]


def ends_of(whole: bytes) -> bytes:
    return whole[:STREAM_END_BYTES] + whole[-STREAM_END_BYTES:]


def blob_of(whole: bytes, ends: bytes | None = None, digest: bytes | None = None) -> Content:
    found = sha256(whole).digest() if digest is None else digest
    return Blob(found, len(whole), ends_of(whole) if ends is None else ends)


class SpoolHarness(OutputSpool):
    """A spool whose clock the test moves, and a broker that receives the chunks."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now_ns)
        self.now_ns = 1
        self.received = bytearray()

    def add_stream(self, job: Job = JOB, stream: Stream = Stream.STDOUT) -> SpooledStream:
        return self.stream(job, stream)

    def pump(self) -> int:
        """Send and acknowledge one message. Return its bytes."""
        chunks = self.take()
        for chunk in chunks:
            assert chunk.offset == len(self.received)
            self.received += chunk.data
        self.acknowledge(chunks, set())
        return sum(len(chunk.data) for chunk in chunks)


def test_short_stream_of_a_short_task_is_never_sent() -> None:
    spool = SpoolHarness()
    stream = spool.add_stream()
    stream.add(SHORT)
    assert spool.take() == []
    assert spool.wake_at_ns() == 1 + SPOOL_START_NS
    assert not spool.end(JOB.key)
    assert stream.content() == SHORT
    assert (spool.bytes_kept, spool.wake_at_ns()) == (0, None)


def test_stream_is_long_from_the_limit_on() -> None:
    spool = SpoolHarness()
    stream = spool.add_stream()
    stream.add(SHORT)
    stream.add(b"x")
    assert spool.end(JOB.key)
    assert stream.content() == blob_of(SHORT + b"x")


def test_output_of_a_running_task_is_sent_after_a_while() -> None:
    spool = SpoolHarness()
    stream = spool.add_stream()
    stream.add(b"one")
    spool.now_ns += SPOOL_START_NS
    assert spool.pump() == 3
    stream.add(b"two")
    assert spool.pump() == 0
    spool.now_ns += SPOOL_INTERVAL_NS
    assert spool.pump() == 3
    assert spool.received == b"onetwo"
    assert not spool.end(JOB.key)
    assert stream.content() == blob_of(b"onetwo", b"onetwo")


def test_long_stream_is_sent_whole_before_the_report() -> None:
    spool = SpoolHarness()
    stream = spool.add_stream()
    for start in range(0, len(BYTES), 1000):
        stream.add(BYTES[start : start + 1000])
    assert spool.pump() == len(BYTES) >= SPOOL_BYTES_DUE
    stream.add(b"end")
    assert spool.pump() == 0
    assert spool.end(JOB.key)
    assert spool.is_waiting(JOB.key)
    assert spool.pump() == 3
    assert not spool.is_waiting(JOB.key)
    assert spool.received == BYTES + b"end"
    assert stream.content() == blob_of(BYTES + b"end")
    assert spool.bytes_kept == 0


def test_stream_that_becomes_long_after_it_was_sent_continues_where_it_was() -> None:
    spool = SpoolHarness()
    stream = spool.add_stream()
    stream.add(BYTES[:100])
    spool.now_ns += SPOOL_START_NS
    chunks = spool.take()
    stream.add(BYTES[100:])
    spool.received += chunks[0].data
    spool.acknowledge(chunks, set())
    assert spool.end(JOB.key)
    while spool.pump():
        pass
    assert spool.received == BYTES
    assert stream.content() == blob_of(BYTES)


def test_full_spool_pauses_pipes_until_half_is_acknowledged() -> None:
    spool = SpoolHarness()
    stream = spool.add_stream()
    resumed: list[int] = []
    while not spool.is_full():
        stream.add(BYTES)
    spool.pause(lambda: resumed.append(spool.bytes_kept))
    assert spool.bytes_kept >= SPOOL_BYTES_MAX
    while not resumed:
        assert spool.pump() == APPEND_BYTES_MAX
    assert resumed[0] <= SPOOL_BYTES_MAX // 2
    assert not spool.is_full()
    stream.add(b"more")
    assert spool.end(JOB.key)
    while spool.pump():
        pass
    assert stream.content() == blob_of(bytes(spool.received))


def test_many_short_streams_that_fill_the_spool_are_sent_at_once() -> None:
    spool = SpoolHarness()
    jobs = [Job(b"%d" % number, 1, b"exec", b"") for number in range(SPOOL_BYTES_MAX >> 14)]
    for job in jobs:
        spool.add_stream(job).add(BYTES[: 1 << 14])
    assert spool.is_full()
    assert spool.wake_at_ns() == spool.now_ns
    assert len(spool.take()) == APPEND_BYTES_MAX >> 14


def test_refused_stream_keeps_its_ends_and_waits_for_nothing() -> None:
    spool = SpoolHarness()
    stream, resumed = spool.add_stream(), []
    stream.add(BYTES)
    spool.pause(lambda: resumed.append(1))
    spool.acknowledge(spool.take(), {JOB.key})
    stream.add(BYTES)
    assert (spool.bytes_kept, spool.take(), resumed) == (0, [], [1])
    assert not spool.end(JOB.key)
    assert stream.content() == blob_of(BYTES * 2, digest=b"")


def test_without_room_long_streams_of_running_programs_are_lost_and_others_wait() -> None:
    spool = SpoolHarness()
    running, ended, short = (Job(name, 1, b"exec", b"") for name in (b"r", b"e", b"s"))
    for job, content in ((running, BYTES), (ended, BYTES), (short, SHORT)):
        spool.add_stream(job).add(content)
    assert spool.end(ended.key)
    spool.now_ns += SPOOL_START_NS
    chunks = spool.take()
    assert spool.end(short.key)  # its first bytes are on their way
    assert spool.take_back(chunks) == [running.key]
    assert not spool.is_waiting(short.key)
    spool.drop(running.key)
    assert spool.take() == [chunk for chunk in chunks if chunk.name == b"e"]


def test_without_room_and_memory_no_stream_waits() -> None:
    spool = SpoolHarness()
    jobs = [Job(b"%d" % number, 1, b"exec", b"") for number in range(SPOOL_BYTES_MAX >> 14)]
    for job in jobs:
        spool.add_stream(job).add(BYTES[: 1 << 14])
    chunks = spool.take()
    assert spool.take_back(chunks) == [(chunk.name, 1) for chunk in chunks]


def test_stream_that_was_sent_in_part_goes_on_behind_the_part_that_was_written() -> None:
    spool = SpoolHarness()
    stream = spool.add_stream()
    for _ in range(8):
        stream.add(BYTES)
    assert spool.end(JOB.key)
    written = spool.pump()
    assert spool.take_back(spool.take()) == []
    assert spool.take()[0].offset == written
    assert stream.content() == blob_of(BYTES * 8)


def test_streams_take_turns_in_messages() -> None:
    spool = SpoolHarness()
    streams = [spool.add_stream(stream=stream) for stream in Stream]
    for stream in streams:
        for _ in range(8):
            stream.add(BYTES)
    first, second = spool.take(), spool.take()
    assert [chunk.stream for chunk in (*first, *second)] == [Stream.STDOUT, Stream.STDERR]


def test_lost_bytes_count_in_short_and_long_streams() -> None:
    spool = SpoolHarness()
    short, long = spool.add_stream(), spool.add_stream(stream=Stream.STDERR)
    short.add(b"short")
    long.add(BYTES)
    for stream in (short, long):
        stream.bytes_lost = 7
    assert short.content() == Blob(b"", 12, b"short")
    assert long.content() == Blob(b"", len(BYTES) + 7, ends_of(BYTES))
