"""Access to blobs from real processes: directly, over TCP with keys, through a relay, resumed."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from taskyard.core.model import Submission
from taskyard.errors import BytesMissing, BytesNotStored
from taskyard.journal.blob_files import TERMS_FILE, BlobFiles
from taskyard.journal.blobs import name_of
from taskyard.net.channel import BlockingChannel
from taskyard.net.keyring import Keyring
from taskyard.net.keys import read_peer_key
from taskyard.process import value_access
from taskyard.process.value_access import CACHE_VARIABLE, ValueAccess
from taskyard.testing import broker as a_broker
from taskyard.wire.native import peer, task_contents
from taskyard.wire.roles import Role
from tests.kit.processes import Broker, Running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Three parts and a bit.
CONTENT = bytes(range(251)) * 13_000
NAME = name_of(CONTENT)

#: A task that names values, and never runs.
TASK = "t"


class Yard:
    """A broker with a local socket and one that requires keys. It can be restarted."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        ring = Keyring(directory / ".taskyard")
        for role in (Role.VIEWER, Role.PRODUCER, Role.WORKER):
            ring.create(role.value, {role}, directory / f"{role}.key")
        ring.create("relay", {Role.RELAY, Role.PRODUCER}, directory / "relay.key")
        self._stack = stack
        self.start("tcp://127.0.0.1:0")

    def start(self, endpoint: str) -> None:
        options = ("--secure", "--listen", f"dwork={endpoint}")
        self.broker = self._stack.enter_context(Broker(self.directory, *options))

    @property
    def endpoint(self) -> str:
        return self.broker.endpoints[1]

    @property
    def files(self) -> BlobFiles:
        return BlobFiles(self.directory / ".taskyard" / "blobs")

    def restart(self) -> None:
        endpoint = self.endpoint
        self.broker.kill()
        self.start(endpoint)

    def access(self, role: Role, worker: bytes = b"") -> ValueAccess:
        key = read_peer_key(self.directory / f"{role}.key")
        return ValueAccess(self.endpoint, key, 20, worker)

    def name(self, *values: str) -> None:
        """Submit the task that names values."""
        payload = b'{"pickle":1,"values":%b}' % msgspec.json.encode(values)
        submission = Submission([TASK.encode()], [payload])
        with BlockingChannel(self.broker.endpoint, None, 20) as channel:
            reply = channel.ask(partial(peer.create, submission=submission))
        assert reply.kind == peer.OK, reply.reason


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def yard(tmp_path: Path, stack: ExitStack) -> Yard:
    return Yard(tmp_path, stack)


def test_local_socket_uses_the_files_directly(yard: Yard, tmp_path: Path) -> None:
    local = ValueAccess(yard.broker.endpoint)
    assert local.has_store()
    assert local.put(memoryview(CONTENT)) == NAME
    (found,) = local.load([NAME], TASK)
    assert bytes(found) == CONTENT
    yard.broker.kill()
    assert BlobFiles(yard.files.directory).touch(NAME)
    assert bytes(local.load([NAME], TASK)[0]) == CONTENT  # without a broker
    assert not [*(tmp_path / "tmp").iterdir()]


def test_value_goes_through_the_broker_once(yard: Yard) -> None:
    producer, viewer = yard.access(Role.PRODUCER), yard.access(Role.VIEWER)
    assert producer.put(memoryview(CONTENT)) == NAME
    assert bytes(yard.files.load(NAME)) == CONTENT
    with pytest.raises(BytesMissing, match="its task is gone"):
        viewer.load([NAME], TASK)
    other = producer.put(memoryview(CONTENT[1:]))
    yard.name(NAME, other)
    assert bytes(viewer.load([NAME], TASK)[0]) == CONTENT
    for name in (NAME, other):
        yard.files.path(name).unlink()
    assert bytes(yard.access(Role.VIEWER).load([NAME], TASK)[0]) == CONTENT  # of the cache
    with pytest.raises(BytesMissing, match=r"bytes are missing \(`taskyard clean`"):
        viewer.load([other], TASK)


def test_altered_file_at_the_broker_is_never_a_value(yard: Yard) -> None:
    yard.access(Role.PRODUCER).put(memoryview(CONTENT))
    yard.name(NAME)
    yard.files.path(NAME).write_bytes(b"x" + CONTENT[1:])
    with pytest.raises(Exception, match="is damaged"):
        yard.access(Role.VIEWER).load([NAME], TASK)
    yard.files.path(NAME).write_bytes(CONTENT[:-1])
    with pytest.raises(BytesMissing, match="bytes are left"):
        yard.access(Role.VIEWER).load([NAME], TASK)


def restarting(yard: Yard, build: Callable[..., bytes], count: int) -> Callable[..., bytes]:
    """Return a builder of requests that restarts the broker before one of them."""
    calls = 0

    def build_later(*args: Any, **more: Any) -> bytes:
        nonlocal calls
        calls += 1
        if calls == count:
            yard.restart()
        return build(*args, **more)

    return build_later


def test_upload_goes_on_after_a_restart(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    put_value = task_contents.put_blob

    def counting(
        number: int, value: bytes, offset: int = 0, data: bytes = b"", location: bytes = b""
    ) -> bytes:
        sent.append(len(data))
        return put_value(number, value, offset, data, location)

    monkeypatch.setattr(task_contents, "put_blob", restarting(yard, counting, 4))
    assert yard.access(Role.PRODUCER).put(memoryview(CONTENT)) == NAME
    assert sum(sent) == len(CONTENT)
    assert bytes(yard.files.load(NAME)) == CONTENT


def test_download_goes_on_after_a_restart(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    yard.access(Role.PRODUCER).put(memoryview(CONTENT))
    yard.name(NAME)
    monkeypatch.setattr(task_contents, "blob_part", restarting(yard, task_contents.blob_part, 3))
    assert bytes(yard.access(Role.VIEWER).load([NAME], TASK)[0]) == CONTENT


def test_keys_permit_what_their_roles_need(yard: Yard) -> None:
    yard.access(Role.PRODUCER).put(memoryview(CONTENT))
    with pytest.raises(BytesNotStored, match="a viewer may not store values"):
        yard.access(Role.VIEWER).put(memoryview(CONTENT[1:]))
    yard.name(NAME)
    worker = yard.access(Role.WORKER)
    with pytest.raises(BytesMissing, match="a worker may not read results and output"):
        worker.load([NAME], TASK)
    with pytest.raises(BytesMissing, match="worker worker does not hold task t"):
        yard.access(Role.WORKER, b"worker").load([NAME], TASK)
    with pytest.raises(BytesMissing, match="workers must be named worker"):
        yard.access(Role.WORKER, b"other").load([NAME], TASK)
    assert worker.put(memoryview(CONTENT[1:])) == name_of(CONTENT[1:])


def test_values_pass_a_relay(yard: Yard, tmp_path: Path) -> None:
    options = ("--to", f"dwork={yard.endpoint}", "--key", str(tmp_path / "relay.key"))
    words = ("relay", "--listen", "dwork=tcp://127.0.0.1:0", *options)
    with Running(tmp_path, *words) as relay:
        relayed = ValueAccess(relay.line().split()[2], None, 20)
        assert relayed.put(memoryview(CONTENT)) == NAME
        yard.name(NAME)
        assert bytes(relayed.load([NAME], TASK)[0]) == CONTENT
    assert bytes(yard.files.load(NAME)) == CONTENT


def test_shared_directory_is_used_over_tcp(tmp_path: Path, stack: ExitStack) -> None:
    (tmp_path / "taskyard.toml").write_text('[blobs]\ndirectory = "mounted"\n')
    yard = Yard(tmp_path, stack)
    viewer = yard.access(Role.VIEWER)  # the directory's owner needs no permission to write
    assert viewer.put(memoryview(CONTENT)) == NAME
    assert BlobFiles(tmp_path / "mounted").touch(NAME)
    assert bytes(viewer.load([NAME], TASK)[0]) == CONTENT
    assert not yard.files.directory.exists()
    (tmp_path / "mounted" / TERMS_FILE).write_text('{"identity": "of another broker"}')
    with pytest.raises(BytesNotStored, match="a viewer may not store values"):
        yard.access(Role.VIEWER).put(memoryview(CONTENT[1:]))


def test_broker_without_values_has_none() -> None:
    with a_broker() as broker:
        access = ValueAccess(broker.endpoint, None, 20)
        assert not access.has_store()
        with pytest.raises(BytesMissing, match="the broker keeps none"):
            access.load([NAME], TASK)


def test_cache_keeps_the_values_that_were_used_last(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_access, "_CACHE_NS_MIN", 0)
    monkeypatch.setenv(CACHE_VARIABLE, "3M")
    contents = [bytes([number]) * (1 << 20) for number in range(4)]
    local = ValueAccess(yard.broker.endpoint)
    names = [local.put(memoryview(content)) for content in contents]
    viewer = yard.access(Role.VIEWER)
    yard.name(*names)
    for name in (*names[:3], names[0], names[3]):
        viewer.load([name], TASK)
    (cache,) = (tmp_path / "tmp").glob("taskyard-blobs-*/*")
    kept = [str(file.id) for file in BlobFiles(cache).walk()]
    assert sorted(kept) == sorted([names[0], names[2], names[3]])
