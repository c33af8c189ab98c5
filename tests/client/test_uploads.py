"""Arguments that the broker lost before it had their tasks: clients store them again themselves."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
import pytest

from taskyard import AsyncClient, Executor
from taskyard.client import discovery, session
from taskyard.client.internal import InternalClient
from taskyard.client.task_buffer import UPLOADS_MAX
from taskyard.core.limits import BLOB_BYTES_MIN
from taskyard.core.model import Terms
from taskyard.errors import BytesMissing, BytesNotStored
from taskyard.joblib import TaskyardBackend
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import name_of
from taskyard.process.value_access import ValueAccess
from tests.cli.yard import Yard, running
from tests.kit.processes import PATIENCE_SECONDS, until
from tests.system import value_calls as calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from taskyard.client.task_buffer import PendingTask

#: No worker serves it.
UNSERVED = "unserved"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("uploads"), worker=False) as running_yard:
        yield running_yard.start_worker("--allow-pickle")


@pytest.fixture
def client(yard: Yard) -> Iterator[InternalClient]:
    with InternalClient(state=yard.state) as connected:
        yield connected


def array(first: float = 1) -> calls.Array:
    return np.arange(first, first + BLOB_BYTES_MIN, dtype=np.float64)


def remove_blobs(state: Path) -> int:
    """Remove all blobs, as a sweep does. Return how many there were."""
    files = BlobFiles(state / "blobs")
    return sum(files.remove(file.id, 1 << 62) for file in [*files.walk()])


class Loss:
    """Removes all blobs just before the session gets a task: some were stored for it by then."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
        self.state = state
        #: Tasks that lost bytes, and how many more do so.
        self.tasks: list[PendingTask] = []
        self.left = times
        self._submit = session.Session.submit
        monkeypatch.setattr(session.Session, "submit", lambda *given: self.submit(*given))  # noqa: PLW0108  # a test replaces it

    def submit(self, own: session.Session, task: PendingTask) -> None:
        if self.left and remove_blobs(self.state):
            self.left -= 1
            self.tasks.append(task)
        self._submit(own, task)


def by_submit(state: Path, big: calls.Array) -> float:
    with InternalClient(state=state) as client:
        return float(client.submit(calls.last, big).result(PATIENCE_SECONDS))


def by_name(state: Path, big: calls.Array) -> float:
    with InternalClient(state=state) as client:
        future = client.submit(calls.last, big, name="named", campaign="c", retries=1)
        return float(future.result(PATIENCE_SECONDS))


def by_content(state: Path, big: calls.Array) -> float:
    with InternalClient(state=state) as client:
        return float(client.submit(calls.last, big, key="content").result(PATIENCE_SECONDS))


def by_map(state: Path, big: calls.Array) -> float:
    """Only the second task has a large argument, and the third one the same."""
    with InternalClient(state=state) as client:
        return float(client.gather([*client.map(calls.last, [big[:1], big, big])])[2])


def by_executor(state: Path, big: calls.Array) -> float:
    with Executor(discovery.endpoint(None, state)) as executor:
        return executor.submit(calls.last, big).result(PATIENCE_SECONDS)


def by_joblib(state: Path, big: calls.Array) -> float:
    with joblib.parallel_config(TaskyardBackend(campaign="loops", state=state)):
        return float(joblib.Parallel(n_jobs=2)([joblib.delayed(calls.last)(big)])[0])


def by_async(state: Path, big: calls.Array) -> float:
    async def call() -> float:
        async with AsyncClient(state=state) as client:
            return await client.submit(calls.last, big)

    return asyncio.run(asyncio.wait_for(call(), PATIENCE_SECONDS))


WAYS: list[Callable[[Path, calls.Array], float]] = [
    by_submit,
    by_name,
    by_content,
    by_map,
    by_executor,
    by_joblib,
    by_async,
]


@pytest.mark.parametrize("way", WAYS)
def test_lost_arguments_are_stored_again_and_the_task_runs(
    way: Callable[[Path, calls.Array], float], yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = array(WAYS.index(way))
    loss = Loss(yard.state, monkeypatch)
    assert way(yard.state, big) == big[-1]
    assert len(loss.tasks) == 1


def test_arguments_are_sent_again_where_the_directory_is_not_used(
    yard: Yard, client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ValueAccess, "_usable_directory", lambda *_: None)
    loss, content = Loss(yard.state, monkeypatch), bytes(range(256)) * 20_000
    assert client.submit(calls.length, content).result(PATIENCE_SECONDS) == len(content)
    assert len(loss.tasks) == 1


def test_task_that_waits_for_one_with_lost_arguments_is_sent_after_it(
    yard: Yard, client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Loss(yard.state, monkeypatch)
    doubled = client.submit(calls.double, array())
    assert client.submit(calls.last, doubled).result(PATIENCE_SECONDS) == 2 * array()[-1]
    assert len(loss.tasks) == 1


def test_argument_that_was_changed_meanwhile_is_an_error(
    yard: Yard, client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = array(7)
    loss = Loss(yard.state, monkeypatch)
    submit = loss.submit

    def change_then_submit(own: session.Session, task: PendingTask) -> None:
        big[0] = 0
        submit(own, task)

    loss.submit = change_then_submit  # type: ignore[method-assign]
    name = name_of(big.tobytes())
    with pytest.raises(BytesMissing, match="the argument was changed meanwhile") as raised:
        client.submit(calls.last, big, service=UNSERVED).result(PATIENCE_SECONDS)
    assert str(raised.value).startswith(name[:8])


def test_arguments_are_referred_to_until_the_broker_has_the_task(
    yard: Yard, client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, big = Loss(yard.state, monkeypatch), array(8)
    kept = weakref.ref(big)
    future = client.submit(calls.last, big, service=UNSERVED)
    del big
    assert kept() is not None
    until(lambda: future.state == "ready", "the task is at the broker")
    loss.tasks.clear()
    gc.collect()
    until(lambda: kept() is None, "the array is free")


def test_bytes_that_can_not_be_stored_again_are_missing(client: InternalClient) -> None:
    name = f"{'ab' * 32}-100000"
    payload = b'{"pickle":1,"values":["%s"]}\n' % name.encode()
    future = client.submit_encoded("gone", payload, Terms(service=b"pickle"))
    with pytest.raises(BytesMissing, match=f"task gone was refused: .*{name[:8]}"):
        future.result(PATIENCE_SECONDS)


def test_client_gives_up_if_bytes_that_it_stores_are_not_at_the_broker(
    client: InternalClient,
) -> None:
    stored: list[int] = []
    payload = b'{"pickle":1,"values":["%s-100000"]}\n' % (b"ab" * 32)
    terms = Terms(service=b"pickle")
    more: Any = {"restore": lambda: stored.append(1)}
    future = client.submit_encoded("elsewhere", payload, terms, **more)
    with pytest.raises(BytesMissing, match="task elsewhere was refused"):
        future.result(PATIENCE_SECONDS)
    assert len(stored) == UPLOADS_MAX


def test_full_disk_while_bytes_are_stored_again_fails_that_task_alone(
    client: InternalClient,
) -> None:
    def fail() -> None:
        raise BytesNotStored("full")

    payload = b'{"pickle":1,"values":["%s-100000"]}\n' % (b"ab" * 32)
    terms = Terms(service=UNSERVED.encode())
    future = client.submit_encoded("full", payload, terms, restore=fail)
    other = client.submit_encoded("other", b"", terms)
    with pytest.raises(BytesNotStored):
        future.result(PATIENCE_SECONDS)
    until(lambda: other.state == "ready", "the other one is there")
