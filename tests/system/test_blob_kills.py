"""A broker that is killed at each step of its blobs: its peers go on, and every byte is kept."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from soak_kit.blobs import audit_blobs
from taskyard.client.client import Client
from taskyard.journal.blob_files import BlobFiles
from taskyard.net.keyring import Keyring
from taskyard.net.keys import read_peer_key
from taskyard.process.value_access import ValueAccess
from taskyard.wire.roles import Role
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, until
from tests.system import value_calls as calls

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM: Final = str(Path(__file__).with_name("killed_broker.py"))

#: Of what arrives, is sealed and committed. `drop` is that of a short stream.
ARRIVALS: Final = ("append", "sync", "publish", "folder", "commit", "drop")
STEPS: Final = [f"{step}.{moment}" for step in ARRIVALS for moment in ("before", "after")]

#: Of a sweep.
REMOVALS: Final = ("hide.before", "hide.after", "remove.before", "remove.after")

#: A long stream, and a short one that is appended if the program takes a while.
OUTPUT: Final = "seq {0} {0} 3000000 | head -c 300000; echo short >&2; sleep {1}; echo end >&2"


class Yard:
    """A broker that requires keys, so all bytes go through it, and a worker."""

    def __init__(self, directory: Path, stack: ExitStack, settings: str = "") -> None:
        (directory / "taskyard.toml").write_text(settings)
        self.directory, self._stack = directory, stack
        ring = Keyring(directory / ".taskyard")
        for role in (Role.PRODUCER, Role.WORKER):
            ring.create(role.value, {role}, self.key(role))
        self._listen = "tcp://127.0.0.1:0"
        self.start()

    def key(self, role: Role) -> Path:
        return self.directory / f"{role}.key"

    @property
    def state(self) -> Path:
        return self.directory / ".taskyard"

    @property
    def blobs(self) -> Path:
        return self.state / "blobs"

    def files(self) -> list[str]:
        """Return all files of blobs but the terms."""
        found = [path for path in self.blobs.rglob("*") if path.is_file()]
        return [str(one.relative_to(self.blobs)) for one in found if one.parent != self.blobs]

    def start(self, step: str = "") -> Broker:
        """Start a broker that is killed at a step, if there is one. Its address stays."""
        program = {"program": (sys.executable, PROGRAM, step)} if step else {}
        options = ("--secure", "--listen", f"dwork={self._listen}")
        how: dict[str, Any] = {"stderr": None, **program}
        self.broker = self._stack.enter_context(Broker(self.directory, *options, **how))
        self._listen = self.broker.endpoints[1]
        return self.broker

    def work(self) -> Running:
        key = ("--key", str(self.key(Role.WORKER)))
        words = ("worker", "--broker", self._listen, *key, "--allow-pickle", "--slots", "2")
        worker = Running(self.directory, *words, "--until-eof", stderr=subprocess.DEVNULL)
        return self._stack.enter_context(worker)

    def client(self) -> Client:
        key = self.key(Role.PRODUCER)
        return self._stack.enter_context(Client(self._listen, key=key))

    def values(self) -> ValueAccess:
        return ValueAccess(self._listen, read_peer_key(self.key(Role.PRODUCER)), PATIENCE_SECONDS)

    @contextmanager
    def killed_at(self, step: str) -> Iterator[None]:
        """Start a broker that a step kills, and then another one. Meanwhile peers may wait."""
        self.broker.kill()
        killed = self.start(step).process
        codes: list[int] = []

        def start_again() -> None:
            codes.append(killed.wait(PATIENCE_SECONDS))
            self.start()

        thread = threading.Thread(target=start_again)
        thread.start()
        yield
        thread.join(PATIENCE_SECONDS)
        assert codes == [-signal.SIGKILL], step


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    with ExitStack() as stack:
        yield stack


def output_of(number: int) -> bytes:
    """Return what the command of a number prints."""
    text = "".join(f"{one}\n" for one in range(number, 3_000_001, number))
    return text[:300_000].encode()


@pytest.mark.slow
def test_broker_killed_at_each_step_of_a_blob_loses_nothing(
    tmp_path: Path, stack: ExitStack
) -> None:
    yard = Yard(tmp_path, stack)
    yard.work()
    client = yard.client()
    for number, step in enumerate(STEPS, start=1):
        big = np.full(30_000, number + 0.3)
        seconds, name = 1.2 if "drop" in step else 0, f"printed-{number}"
        command = ["sh", "-c", OUTPUT.format(number, seconds)]
        with yard.killed_at(step):
            printed = client.submit(command, name=name)
            doubled = client.submit(calls.double, big)
            assert np.array_equal(doubled.result(PATIENCE_SECONDS), big * 2), step
            assert printed.result(PATIENCE_SECONDS).encode() == output_of(number), step
        assert client.output(name, "stderr") == b"short\nend\n", step
    yard.broker.kill()
    found = audit_blobs(yard.state, yard.blobs)
    assert not found.wrong
    assert found.streams == []
    assert found.named == 3 * len(STEPS)


@pytest.mark.slow
def test_broker_killed_at_each_step_of_a_removal_removes_what_is_unused_and_no_more(
    tmp_path: Path, stack: ExitStack
) -> None:
    yard = Yard(tmp_path, stack, '[blobs]\ngrace = "0.3s"\n')
    for number, step in enumerate(REMOVALS):
        with yard.killed_at(step):
            name = yard.values().put(memoryview(bytes([number]) * 100_000))
        until(lambda: not yard.files(), f"{name} is removed after {step}")


@pytest.mark.slow
def test_blob_that_was_hidden_while_it_came_into_use_is_there_after_a_kill(
    tmp_path: Path, stack: ExitStack
) -> None:
    yard = Yard(tmp_path, stack, '[blobs]\ngrace = "0.3s"\n')
    yard.broker.kill()
    killed = yard.start("hide-used.after")
    content = bytes(200_000)
    name = yard.values().put(memoryview(content))
    assert killed.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert yard.files() == [f"unfinished/{name}.removed"]
    (tmp_path / "taskyard.toml").write_text("")
    yard.start()
    assert yard.files() == [f"{name[:2]}/{name}"]
    found = BlobFiles(yard.blobs).load(name)
    assert bytes(found) == content
