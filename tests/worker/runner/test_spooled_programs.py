"""Programs whose output a spool takes: whole streams, pauses at the limit, and reasons."""

from __future__ import annotations

import hashlib
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from taskyard.core.blobs import Blob
from taskyard.core.events import Outcome
from taskyard.core.model import OutputColumns, Stream
from taskyard.worker.held_tasks import report_columns
from taskyard.worker.jobs import READ_BYTES_MAX, Job, JobResult
from taskyard.worker.output import SPOOL_BYTES_MAX, OutputSpool, stream_columns
from taskyard.worker.processes import DRAIN_BYTES_MAX
from taskyard.worker.runner import ProcessRunner
from tests.worker.runner_harness import RealClock, command, script, turns, wait

#: A pipe that is read is filled again sooner than this.
QUIET_SECONDS = 0.2

#: Writes 6 MB to stdout and prints their hash to stderr.
WRITE_MUCH = """
import hashlib, os, sys
data = os.urandom(6_000_000)
sys.stdout.buffer.write(data)
sys.stdout.flush()
sys.stderr.write(hashlib.sha256(data).hexdigest())
"""


@contextmanager
def spooling() -> Iterator[tuple[ProcessRunner, OutputSpool]]:
    spool = OutputSpool(time.monotonic_ns)
    runner = ProcessRunner(1, (), RealClock(), spool=spool)
    try:
        yield runner, spool
    finally:
        runner.close()


def result_of(job: Job) -> JobResult:
    with spooling() as (runner, spool):
        runner.start(job)
        (done,) = turns(runner)
        assert not spool.end(job.key)
        return done


def test_program_waits_while_the_spool_is_full_and_loses_nothing() -> None:
    job, received = script(WRITE_MUCH), {Stream.STDOUT: b"", Stream.STDERR: b""}
    with spooling() as (runner, spool):
        runner.start(job)
        while not spool.is_full():
            assert runner.turn() == []
            wait(runner)
        while select.select(runner.filenos(), [], [], QUIET_SECONDS)[0]:
            assert runner.turn() == []
        assert spool.bytes_kept < SPOOL_BYTES_MAX + 2 * READ_BYTES_MAX
        done: list[JobResult] = []
        while not done:
            _pump(spool, received)
            done = runner.turn()
        assert spool.bytes_kept < SPOOL_BYTES_MAX + DRAIN_BYTES_MAX
        spool.end(job.key)
        while spool.is_waiting(job.key):
            _pump(spool, received)
    assert len(received[Stream.STDOUT]) == 6_000_000
    reports, digest = report_columns(done, b""), hashlib.sha256(received[Stream.STDOUT])
    (result,), output = reports.texts, reports.streams
    assert isinstance(result, Blob)
    assert (result.digest, result.length) == (digest.digest(), 6_000_000)
    assert output == OutputColumns([b""], [digest.hexdigest().encode()])


def _pump(spool: OutputSpool, received: dict[Stream, bytes]) -> None:
    chunks = spool.take()
    for chunk in chunks:
        assert chunk.offset == len(received[chunk.stream])
        received[chunk.stream] += chunk.data
    spool.acknowledge(chunks, set())


def test_short_output_travels_with_the_report() -> None:
    done = result_of(command("sh", "-c", r"printf 'a\0'; printf '\377' >&2"))
    assert (done.outcome, done.content) == (Outcome.DONE, b"a\0")
    assert stream_columns([done]) == OutputColumns([b""], [b"\xff"])


def test_program_without_stderr_needs_no_streams() -> None:
    assert result_of(command("echo", "out")).streams is None
    assert result_of(command("true")).streams is None


def test_failed_program_keeps_both_streams() -> None:
    done = result_of(command("sh", "-c", "echo out; echo bad >&2; exit 3"))
    assert (done.outcome, done.text) == (Outcome.FAILED, b"exit status 3: bad")
    columns = stream_columns([done])
    assert (columns.stdouts, columns.stderrs) == ([b"out\n"], [b"bad\n"])


@pytest.mark.parametrize(
    ("code", "reason"),
    [("echo out; exit 3", b"exit status 3: out"), ("exit 3", b"exit status 3")],
)
def test_reason_has_the_last_line_of_stdout_if_stderr_is_empty(code: str, reason: bytes) -> None:
    assert result_of(command("sh", "-c", code)).text == reason
