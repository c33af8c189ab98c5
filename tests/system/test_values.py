"""Large arguments and results of calls between real processes: mapped, fetched, kept, removed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from taskyard import AsyncClient, Executor
from taskyard.client.internal import InternalClient
from taskyard.errors import BytesMissing, BytesNotStored, TaskFailed
from taskyard.journal.blob_files import UNFINISHED_FOLDER, BlobFiles
from taskyard.journal.blobs import FOLDER
from taskyard.net.keyring import Keyring
from taskyard.wire.roles import Role
from tests.kit.disks import small_disk
from tests.kit.processes import Running, Worker, run_here, until
from tests.system import value_calls as calls
from tests.system.kit import Broker
from tests.system.test_full_disk import DISK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]

#: 64 MB.
COUNT = 8_000_000


def array(count: int = COUNT, first: float = 1) -> calls.Array:
    return np.arange(first, first + count, dtype=np.float64)


def blobs_of(directory: Path) -> BlobFiles:
    return BlobFiles(directory / ".taskyard" / FOLDER)


class Yard:
    """A broker, and a worker that calls pickled functions."""

    def __init__(self, directory: Path, stack: ExitStack, settings: str = "") -> None:
        (directory / "taskyard.toml").write_text(settings)
        self.directory, self._stack = directory, stack
        self.files = blobs_of(directory)
        self.start()
        options = ("--allow-pickle", "--slots", "1")
        self.worker = stack.enter_context(Worker(directory, *options))

    def start(self) -> None:
        self.broker = self._stack.enter_context(Broker(self.directory))

    def executor(self) -> Executor:
        return self._stack.enter_context(Executor(self.broker.endpoint))

    def client(self) -> InternalClient:
        return self._stack.enter_context(InternalClient(self.broker.endpoint))

    def age(self) -> None:
        """Make all blobs older, so that `clean` does not take them for those in use."""
        for path in self.paths():
            os.utime(path, (0, 0))

    def paths(self) -> list[Path]:
        return [self.files.path(file.id) for file in self.files.walk()]

    def kept(self) -> list[int]:
        """Return the sizes of all blobs."""
        return sorted(file.bytes_total for file in self.files.walk())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_array_is_mapped_by_the_worker_without_a_copy(tmp_path: Path, stack: ExitStack) -> None:
    yard = Yard(tmp_path, stack)
    executor, big = yard.executor(), array()
    small, before, pid = executor.submit(calls.sum_in_place, array(10)).result(60)
    total, after, same = executor.submit(calls.sum_in_place, big).result(60)
    assert (small, total) == (55, float(big.sum()))
    assert pid == same
    assert after - before < big.nbytes / 4
    assert [executor.submit(calls.change, big).result(60) for _ in range(2)] == [1, 1]
    assert len(yard.kept()) == 1
    twice = executor.submit(calls.double, big).result(60)
    assert np.array_equal(twice, big * 2)
    twice[0] = 5  # this process's own copy of a page
    assert len(yard.kept()) == 2
    content = bytes(20 << 20)  # beyond the limit of a message
    assert executor.submit(calls.length, content).result(60) == len(content)
    assert executor.submit(bytes, 20 << 20).result(60) == content


@pytest.mark.slow
@pytest.mark.whole
def test_array_of_a_gigabyte_goes_there_and_back(tmp_path: Path, stack: ExitStack) -> None:
    executor, big = Yard(tmp_path, stack).executor(), array(1 << 27)
    total, memory, _ = executor.submit(calls.sum_in_place, big).result(200)
    assert total == float(big.sum())
    assert memory < big.nbytes / 4
    assert float(executor.submit(calls.double, big).result(200)[-1]) == 2 * (1 << 27)


def test_clients_use_values_and_find_results_by_name(tmp_path: Path, stack: ExitStack) -> None:
    yard = Yard(tmp_path, stack)
    client, big = yard.client(), array(300_000)
    future = client.submit(calls.double, big, campaign="c", name="d")
    assert np.array_equal(future.result(60), big * 2)
    assert np.array_equal(client.result("c/d"), big * 2)
    assert [one.shape for one in client.gather([*client.map(calls.double, [big, big])])] == [
        big.shape,
        big.shape,
    ]

    async def from_a_loop() -> tuple[Any, Any]:
        async with AsyncClient(yard.broker.endpoint) as loop_client:
            return await loop_client.submit(calls.double, big), await loop_client.result("c/d")

    for found in asyncio.run(from_a_loop()):
        assert np.array_equal(found, big * 2)


def test_large_results_pass_from_task_to_task(tmp_path: Path, stack: ExitStack) -> None:
    yard = Yard(tmp_path, stack)
    client, executor, big = yard.client(), yard.executor(), array(300_000)
    doubled = client.submit(calls.double, big)
    parts = [client.submit(calls.double, doubled), client.submit(calls.double, array(10))]
    assert client.submit(sum, [client.submit(calls.last, one) for one in parts]).result(60) == (
        4 * 300_000 + 20
    )
    first: Any = executor.submit(calls.double, big)
    assert np.array_equal(executor.submit(calls.double, first).result(60), big * 4)
    scattered = client.submit(np.asarray, big)
    assert client.submit(calls.last, scattered).result(60) == 300_000
    assert len(yard.kept()) == 3


def test_executor_of_its_own_keeps_values_in_a_directory_that_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with Executor(1) as executor:
        assert np.array_equal(executor.submit(calls.double, array()).result(60), array() * 2)
        assert [*tmp_path.rglob(f"*-{COUNT * 8}")]
    assert not [*tmp_path.rglob(f"*-{COUNT * 8}")]


def test_altered_and_removed_values_fail_with_their_reason(
    tmp_path: Path, stack: ExitStack
) -> None:
    yard = Yard(tmp_path, stack)
    executor = yard.executor()
    future = executor.submit(calls.double, array(300_000))
    future.result(60)
    yard.worker.terminate()
    held = executor.submit(calls.length, os.urandom(2 << 20))
    until(lambda: len(yard.kept()) == 3, "the value of the call")
    (path,) = [path for path in yard.paths() if path.stat().st_size < 2_200_000]
    content = path.read_bytes()
    path.write_bytes(content[:99] + b"xy" + content[101:])
    stack.enter_context(Worker(tmp_path, "--allow-pickle"))
    with pytest.raises(TaskFailed, match="is damaged"):
        held.result(60)
    with InternalClient(yard.broker.endpoint) as client:
        for path in yard.paths():
            path.unlink()
        with pytest.raises(BytesMissing, match=r"and blobs.keep remove"):
            client.result(future.full_name)


def test_values_live_as_long_as_their_tasks(tmp_path: Path, stack: ExitStack) -> None:
    yard = Yard(tmp_path, stack, '[blobs]\ngrace = "0.2s"\n')
    client, big = yard.client(), array(300_000)
    assert client.submit(calls.length, bytes(2 << 20), name="length").result(60) == 2 << 20
    client.submit(calls.double, big, name="double").result(60)
    yard.worker.terminate()
    client.submit(calls.length, bytes(3 << 20), name="waits")
    client.close()
    assert len(yard.kept()) == 4
    yard.broker.kill()
    assert run_here(tmp_path, "journal", "compact")[0] == 0
    yard.start()
    client = yard.client()
    # Arguments of ended tasks are removed.
    until(lambda: len(yard.kept()) == 2, "the result and the argument that is needed are left")
    assert np.array_equal(client.result("double"), big * 2)
    stack.enter_context(Worker(tmp_path, "--allow-pickle"))
    assert client.futures(["waits"])[0].result(60) == 3 << 20


def inodes(cache: Path) -> set[int]:
    files = BlobFiles(cache)
    return {files.path(file.id).stat().st_ino for file in files.walk()}


def test_values_pass_between_machines_without_common_files(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, away = tmp_path / "broker", tmp_path / "away"
    for directory in (state, away):
        directory.mkdir()
    ring = Keyring(state / ".taskyard")
    ring.create("producer", {Role.PRODUCER}, away / "producer.key")
    ring.create("worker", {Role.WORKER}, away / "worker.key")
    listen = ("--secure", "--listen", "dwork=tcp://127.0.0.1:0")
    endpoint = stack.enter_context(Broker(state, *listen)).endpoints[1]
    monkeypatch.setenv("TMPDIR", str(away))
    monkeypatch.setattr(tempfile, "tempdir", None)
    key = ("--key", str(away / "worker.key"))
    words = ("worker", "--broker", endpoint, *key, "--allow-pickle", "--slots", "1")
    stack.enter_context(Running(away, *words, "--until-eof", stderr=subprocess.DEVNULL))
    big = array(1_000_000)
    with InternalClient(endpoint, key=away / "producer.key") as client:
        assert np.array_equal(client.submit(calls.double, big).result(60), big * 2)
        (cache,) = away.glob("taskyard-blobs-*/*")
        fetched = inodes(cache)
        assert len(fetched) == 2  # the worker's argument, and the client's result
        assert client.submit(calls.sum_in_place, big).result(60)[0] == float(big.sum())
        assert fetched == inodes(cache)
        first = client.submit(calls.double, big)
        assert np.array_equal(client.submit(calls.double, first).result(60), big * 4)
    assert len([*blobs_of(state).walk()]) == 3


def test_full_disk_stores_no_value_and_leaves_no_part(stack: ExitStack) -> None:
    disk = stack.enter_context(small_disk(DISK_BYTES))
    yard = Yard(disk, stack)
    executor = yard.executor()
    with pytest.raises(BytesNotStored, match="is nearly full"):
        executor.submit(calls.length, bytes(DISK_BYTES // 2)).result(60)
    client = yard.client()
    waits = client.submit(bytes, DISK_BYTES // 2)
    until(lambda: "is nearly full" in str(client.why(waits.name)), "no room for its result")
    assert not yard.kept()
    assert not [*(yard.files.directory / UNFINISHED_FOLDER).iterdir()]
    assert executor.submit(pow, 2, 3).result(60) == 8


def test_clean_keeps_a_result_that_a_task_waits_for(tmp_path: Path, stack: ExitStack) -> None:
    yard = Yard(tmp_path, stack)
    client = yard.client()
    first = client.submit(calls.double, array(300_000))
    first.result(60)
    yard.worker.terminate()
    second = client.submit(calls.double, first)
    client.show(second.full_name)
    yard.age()
    code, *_ = run_here(tmp_path, "clean", "--every-file", "--state", str(tmp_path / ".taskyard"))
    assert code == 0
    stack.enter_context(Worker(tmp_path, "--allow-pickle"))
    assert second.result(60)[0] == 4


def test_clean_removes_values_of_settled_tasks(tmp_path: Path, stack: ExitStack) -> None:
    yard = Yard(tmp_path, stack)
    client, big = yard.client(), array(300_000)
    client.submit(calls.double, big, name="d", campaign="c").result(60)
    yard.worker.terminate()
    waits = client.submit(calls.length, bytes(2 << 20), name="waits", campaign="c")
    client.show(waits.full_name)
    state = ("--state", str(tmp_path / ".taskyard"))
    assert len(yard.kept()) == 3
    code, out, _ = run_here(tmp_path, "clean", "--campaign", "c", *state)
    assert (code, out) == (0, "removed 0 files of 0 tasks, 0 B\n")  # they are in use
    yard.age()
    code, out, _ = run_here(tmp_path, "clean", "--campaign", "c", *state)
    assert (code, out) == (0, "removed 2 files of 1 task, 4.6 MiB\n")
    assert len(yard.kept()) == 1
    with pytest.raises(BytesMissing):
        client.result("c/d")
