"""Blobs while workers die, brokers are replaced, directories are away, disks are full or rot."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from soak_kit.blobs import audit_blobs
from taskyard.client.client import Client
from taskyard.errors import BytesDamaged, TaskFailed
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, Worker, run_here, until
from tests.system import value_calls as calls
from tests.system.test_blob_kills import PROGRAM, Yard, output_of
from tests.system.test_database_files import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.postgres import Cluster

#: Writes 10 MB, the second half when the file `gate` is there.
WRITER: Final = """
import os, random, sys, time
for number in range(10):
    while number == 5 and not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    sys.stdout.buffer.write(random.Random(number).randbytes(1_000_000))
    sys.stdout.buffer.flush()
"""

#: Steps at which a leader is killed. `flush` is that of bytes that arrive, in the database.
STEPS: Final = [
    f"{step}.{moment}" for step in ("flush", "seal", "commit") for moment in ("before", "after")
]


def written() -> bytes:
    """Return what `WRITER` writes."""
    return b"".join(random.Random(number).randbytes(1_000_000) for number in range(10))


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    with ExitStack() as stack:
        yield stack


def writer(directory: Path) -> list[str]:
    """Write the program into a directory. Return its command."""
    program = directory / "writer.py"
    program.write_text(WRITER)
    return [sys.executable, "-S", str(program), str(directory / "gate")]


def streams(directory: Path) -> int:
    """Return the bytes of streams that arrive."""
    return sum(path.stat().st_size for path in directory.glob("streams/*.1.*.stream"))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Workers.


def test_worker_killed_in_a_long_stream_is_followed_by_another(
    tmp_path: Path, stack: ExitStack
) -> None:
    (tmp_path / "taskyard.toml").write_text('[blobs]\ngrace = "0.3s"\n')
    broker = stack.enter_context(Broker(tmp_path))
    first = stack.enter_context(Worker(tmp_path))
    blobs = tmp_path / ".taskyard" / "blobs"
    with Client(broker.endpoint) as client:
        task = client.submit(writer(tmp_path), name="long")
        until(lambda: streams(blobs) > 4_000_000, "most of the first half")
        os.kill(first.pid, signal.SIGKILL)
        (tmp_path / "gate").touch()
        stack.enter_context(Worker(tmp_path))
        task.exception(PATIENCE_SECONDS)
        assert digest(client.output("long", "stdout")) == digest(written())
        # What the lost attempt wrote stays readable, as a beginning.
        lost = client.output("long", "stdout", attempt=1)
        assert len(lost) > 4_000_000
        assert written().startswith(lost)
    broker.kill()
    found = audit_blobs(tmp_path / ".taskyard", blobs)
    assert (found.wrong, found.unfinished) == ([], [])
    assert found.streams == ["1.1.0.long.stream"]


class Keyed(Yard):
    """Bytes go through the broker. A worker keeps what it fetched in a cache."""

    def part(self) -> int:
        """Return the bytes of what is being fetched."""
        found = [*(self.directory / "tmp").glob("taskyard-blobs-*/*/unfinished/*")]
        return sum(path.stat().st_size for path in found)

    def kill_in_fetch(self, worker: Running, bytes_total: int) -> Running:
        """Kill a worker in the middle of a fetch. Return the next one."""
        until(lambda: self.part() > 0, "a part of the bytes")
        self.broker.send(signal.SIGSTOP)
        worker.kill()
        assert 0 < self.part() < bytes_total
        self.broker.send(signal.SIGCONT)
        for path in (self.directory / "tmp").glob("taskyard-blobs-*/*/unfinished/*"):
            path.unlink()
        return self.work()


def test_worker_killed_in_a_fetch_is_followed_by_another(tmp_path: Path, stack: ExitStack) -> None:
    yard, big = Keyed(tmp_path, stack), np.arange(8_000_000, dtype=np.float64)
    client = yard.client()
    first = client.submit(calls.double, big, name="first")
    worker = yard.kill_in_fetch(yard.work(), big.nbytes)
    until(lambda: client.show("first")["state"] == "done", "the argument is fetched again")
    second = client.submit(calls.sum_in_place, first)
    yard.kill_in_fetch(worker, big.nbytes)
    assert second.result(PATIENCE_SECONDS)[0] == 2 * float(big.sum())
    assert np.array_equal(first.result(PATIENCE_SECONDS), big * 2)


# Pairs.


class Pair:
    """The brokers of a store, each started as the standby of the one before."""

    def __init__(self, directory: Path, url: str, settings: str = "") -> None:
        self._directory, self._settings = directory, settings
        self._options = ("--standby", "--store", url)
        self._ports = free_port(), free_port()
        self._count = 0
        self.endpoint = "+".join(f"tcp://127.0.0.1:{port}" for port in self._ports)

    def start(self, step: str = "") -> Running:
        """Start the next broker, which a step kills, if there is one."""
        directory = self._directory / f"machine-{self._count % 2}"
        directory.mkdir(exist_ok=True)
        (directory / "taskyard.toml").write_text(f'[lease]\nstore = "1s"\n{self._settings}')
        listen = ("--listen", f"dwork=tcp://127.0.0.1:{self._ports[self._count % 2]}")
        self._count += 1
        program: Any = {"program": (sys.executable, PROGRAM, step)} if step else {}
        words = ("broker", "--until-eof", *self._options, *listen)
        return Running(directory, *words, stderr=None, **program)


def leads(broker: Running) -> None:
    while line := broker.line():
        if line.startswith("listening native "):
            return
    pytest.fail(f"the broker ended: {broker.process.poll()}")


@pytest.mark.slow
def test_leader_killed_at_each_step_of_a_blob_loses_nothing(
    tmp_path: Path, stack: ExitStack, cluster: Cluster
) -> None:
    url = cluster.database()
    pair = Pair(tmp_path, url)
    leader = stack.enter_context(pair.start(STEPS[0]))
    leads(leader)
    work = tmp_path / "work"
    work.mkdir()
    command = ["sh", "-c", "seq $0 $0 3000000 | head -c 300000"]
    stack.enter_context(Worker(work, "--broker", pair.endpoint, "--allow-pickle"))
    client = stack.enter_context(Client(pair.endpoint))
    for number, step in enumerate(STEPS, start=1):
        if number > 1:  # the one that led without a step ends
            armed = stack.enter_context(pair.start(step))
            assert armed.line().startswith("standby: following ")
            leader.kill()
            leads(armed)
            leader = armed
        standby = stack.enter_context(pair.start())
        assert standby.line().startswith("standby: following ")
        content = bytes([number]) * 200_000
        printed = client.submit([*command, str(number)], name=f"printed-{number}")
        value = client.submit(bytes.upper, content)  # it waits for the standby
        assert value.result(PATIENCE_SECONDS) == content.upper(), step
        printed.result(PATIENCE_SECONDS)
        assert leader.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL, step
        assert digest(client.output(f"printed-{number}", "stdout")) == digest(output_of(number)), (
            step
        )
        leads(standby)
        leader = standby
    leader.kill()
    state = tmp_path / "moved"
    until(lambda: run_here(tmp_path, "store", "move", url, str(state))[0] == 0, "the move")
    found = audit_blobs(state, state / "blobs")
    assert (found.wrong, found.streams) == ([], [])
    assert found.named == 3 * len(STEPS)


def test_directory_of_a_pair_that_is_away_for_a_while_loses_nothing(
    tmp_path: Path, stack: ExitStack, cluster: Cluster
) -> None:
    files, away, work = (tmp_path / name for name in ("files", "away", "work"))
    pair = Pair(tmp_path, cluster.database(), f'[blobs]\ndirectory = "{files}/blobs"\n')
    leader = stack.enter_context(pair.start())
    leads(leader)
    standby = stack.enter_context(pair.start())
    assert standby.line().startswith("standby: following ")
    work.mkdir()
    client = stack.enter_context(Client(pair.endpoint))
    before = client.submit(writer(work), name="before")
    stack.enter_context(Worker(work, "--broker", pair.endpoint, "--allow-pickle", "--slots", "2"))
    until(lambda: streams(files / "blobs") > 0, "the first bytes")
    files.rename(away)
    files.mkdir()
    client.submit(["sh", "-c", "touch begun; exec sh -c 'seq 1 100000'"], name="meanwhile")
    until((work / "begun").exists, "a program that begins meanwhile")
    assert not [*files.iterdir()]
    files.rmdir()
    away.rename(files)
    (work / "gate").touch()
    before.exception(PATIENCE_SECONDS)
    assert digest(client.output("before", "stdout")) == digest(written())
    leader.kill()
    leads(standby)
    assert client.submit(bytes, 100_000).result(PATIENCE_SECONDS) == bytes(100_000)
    until(lambda: client.show("meanwhile")["state"] == "done", "its end")
    text = "".join(f"{number}\n" for number in range(1, 100_001))
    assert client.output("meanwhile", "stdout") == text.encode()
    assert digest(client.output("before", "stdout")) == digest(written())


def test_end_of_a_task_while_the_directory_is_away_stops_the_broker_and_loses_nothing(
    tmp_path: Path, stack: ExitStack
) -> None:
    (tmp_path / "taskyard.toml").write_text('[blobs]\ndirectory = "mounted"\n')
    broker, mounted = stack.enter_context(Broker(tmp_path)), tmp_path / "mounted"
    stack.enter_context(Worker(tmp_path))
    client = stack.enter_context(Client(broker.endpoint))
    client.submit(["seq", "1", "50000"], name="known").result(PATIENCE_SECONDS)
    client.submit(writer(tmp_path), name="long")
    until(lambda: streams(mounted) > 4_000_000, "most of the first half")
    mounted.rename(tmp_path / "away")
    mounted.mkdir()
    (tmp_path / "gate").touch()
    assert broker.end()[0] == 6
    refused = stack.enter_context(Running(tmp_path, "broker", "--until-eof"))
    code, _, text = refused.end()
    assert (code, "has no store.json, but tasks name blobs (mount it" in text) == (2, True)
    assert not [*mounted.iterdir()]
    mounted.rmdir()
    (tmp_path / "away").rename(mounted)
    stack.enter_context(Broker(tmp_path))
    until(lambda: client.show("long")["state"] == "done", "the end of the task")
    assert digest(client.output("long", "stdout")) == digest(written())


# Bytes that rot.


def flip(blobs: Path, bytes_total: int) -> None:
    """Change a byte in the middle of the blob of a length."""
    (path,) = blobs.glob(f"*/*-{bytes_total}")
    content = bytearray(path.read_bytes())
    content[bytes_total // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("is_remote", [True, False])
def test_flipped_byte_is_an_error_that_names_the_task(
    tmp_path: Path, stack: ExitStack, *, is_remote: bool
) -> None:
    yard = Yard(tmp_path, stack)
    client = yard.client() if is_remote else stack.enter_context(Client(yard.broker.endpoint))

    def work() -> Running:
        if is_remote:
            return yard.work()
        return stack.enter_context(Worker(tmp_path, "--allow-pickle"))

    worker = work()
    client.submit(["seq", "1", "50000"], name="printed").result(PATIENCE_SECONDS)
    result = client.submit(bytes, 300_000, name="result")
    result.exception(PATIENCE_SECONDS)
    worker.terminate()
    argument = client.submit(calls.length, bytes(400_000), name="argument")
    needs = client.submit(calls.length, result, name="needs")
    client.show("needs")  # the broker has both
    for path in yard.blobs.glob("??/*"):
        flip(yard.blobs, path.stat().st_size)
    shutil.rmtree(tmp_path / "tmp")  # the cache
    (tmp_path / "tmp").mkdir()
    work()
    with pytest.raises(BytesDamaged, match=r"^task printed: its output of .* is damaged"):
        client.output("printed", "stdout")
    with pytest.raises(BytesDamaged, match=r"^result of task result: .* is damaged"):
        client.result("result")
    with pytest.raises(TaskFailed, match=r"^task argument failed: .* is damaged"):
        argument.result(PATIENCE_SECONDS)
    with pytest.raises(TaskFailed, match=r"^task needs failed: result of result can't be decoded"):
        needs.result(PATIENCE_SECONDS)
