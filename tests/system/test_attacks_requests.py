"""Attacks by requests: whatever one peer requests, the broker survives and serves others.

Each runs with a broker of 512 MiB address space. `-s` prints the measurements.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import pytest

from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission, Terms
from tests.kit.processes import environment, until
from tests.system import memory_limited
from tests.system.kit import Broker, count
from tests.system.request_attackers import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITED = (sys.executable, str(Path(memory_limited.__file__)))
ATTACKERS = str(Path(__file__).with_name("request_attackers.py"))
MEGABYTE = 1 << 20

#: How long another peer may wait for a reply. More on a busy machine.
SERVED_SECONDS = 10.0

#: The longest turn, in CPU time: three times that of a quiet machine.
TURN_SECONDS = 1.0


def patience(seconds: float) -> float:
    """Scale a limit by the load of the machine."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def memory(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


class Watcher(threading.Thread):
    """Another peer, which requests the status repeatedly and samples the memory."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(daemon=True)
        self._broker = broker
        self._over = threading.Event()
        self.before = self.peak = memory(broker.pid, "VmRSS")
        self.waited = 0.0
        self.answers = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with InternalClient(self._broker.endpoint) as client:
                while not self._over.is_set():
                    began = time.monotonic()
                    client.status(timeout=10 * patience(SERVED_SECONDS))
                    self.waited = max(self.waited, time.monotonic() - began)
                    self.answers += 1
                    self.peak = max(self.peak, memory(self._broker.pid, "VmRSS"))
        except BaseException as error:  # noqa: BLE001 - raised where it is joined
            self.error = error

    def __enter__(self) -> Self:
        self.start()
        self.await_answers(1)
        return self

    def await_answers(self, more: int) -> None:
        """Wait for `count` more replies."""
        wanted = self.answers + more
        until(lambda: self._is_over() or self.answers >= wanted, "answers to others")
        assert not self._is_over(), (self.error, self._broker.process.poll())

    def _is_over(self) -> bool:
        return self.error is not None or self._broker.process.poll() is not None

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(20 * patience(SERVED_SECONDS))
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


@contextmanager
def attacked(broker: Broker, attack: str) -> Iterator[None]:
    """Run an attack until everything that the broker accepts is sent, with replies unread."""
    host, port = urlsplit(broker.endpoints[1]).netloc.split(":")
    with subprocess.Popen(
        [sys.executable, ATTACKERS, host, port, attack],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "sent\n"
            yield
        finally:
            program.communicate()


@contextmanager
def broker_with(directory: Path, tasks: int) -> Iterator[Broker]:
    """Run a memory-limited broker with `count` tasks. Check at the end that it stops with all."""
    names = [b"task-%07d" % number for number in range(tasks)]
    with Broker(directory, "--listen", "dwork=tcp://127.0.0.1:0", program=LIMITED) as broker:
        with InternalClient(broker.endpoint) as client:
            for start in range(0, tasks, 10_000):
                some = names[start : start + 10_000]
                # All wait for the first one, which never runs. So replies are long.
                after = [[names[0]] if name != names[0] else [] for name in some]
                terms = [Terms(service=b"nobody", campaign=b"held")]
                client.create(Submission(some, [b"payload"], terms, after=after))
        yield broker
        with InternalClient(broker.endpoint) as client:
            assert client.create(Submission([b"after the attack"])) == 1
        code, _, _ = broker.terminate()
        assert code == 0
    held = {b"held/" + name for name in names}
    assert count(directory)[1] == {*held, b"after the attack"}


def check(directory: Path, name: str, broker: Broker, watcher: Watcher, memory_max: int) -> None:
    """Compare measurements with the limits, and print them."""
    until(lambda: memory(broker.pid, "VmRSS") < watcher.before + memory_max, "memory given back")
    after = memory(broker.pid, "VmRSS")
    longest = float((directory / memory_limited.LONGEST).read_text())
    sizes = [size // MEGABYTE for size in (watcher.before, watcher.peak, after)]
    print(  # noqa: T201 - for who asks for the figures
        f"\n{name}: RSS {sizes[0]}, {sizes[1]}, {sizes[2]} MiB (before, peak, after); longest turn "
        f"{longest:.2f} CPU s; another peer waited {watcher.waited:.2f} s"
    )
    assert watcher.waited < patience(SERVED_SECONDS)
    assert longest < TURN_SECONDS


@pytest.mark.parametrize("attack", [*MESSAGES, "packed*4"])
def test_costly_message_is_refused_at_once(tmp_path: Path, attack: str) -> None:
    with broker_with(tmp_path, 1_000) as broker:
        with Watcher(broker) as watcher, attacked(broker, attack):
            watcher.await_answers(5)
        check(tmp_path, attack, broker, watcher, 20 * MEGABYTE)


@pytest.mark.parametrize(
    "attack",
    ["listings", pytest.param("listings-of-many", marks=pytest.mark.whole), "explanations"],
)
def test_unread_replies_delay_no_other_peer(tmp_path: Path, attack: str) -> None:
    with broker_with(tmp_path, 20_000) as broker:
        with Watcher(broker) as watcher, InternalClient(broker.endpoint) as client:
            with attacked(broker, attack):
                watcher.await_answers(20)
                began = time.monotonic()
                assert len(list(client.tasks())) == 20_000
                listed = time.monotonic() - began
            print(f"\nall tasks listed by another peer in {listed:.2f} s")  # noqa: T201
        check(tmp_path, attack, broker, watcher, 80 * MEGABYTE)


def test_commands_over_many_tasks_delay_no_other_peer(tmp_path: Path) -> None:
    tasks = 60_000
    with broker_with(tmp_path, tasks) as broker:
        with Watcher(broker) as watcher, InternalClient(broker.endpoint) as client:
            answers = watcher.answers
            assert client.move(campaign="held", to_lane="lane") == tasks
            assert client.expire(campaign="held") == tasks
            assert client.retry(campaign="held") == tasks
            assert client.cancel(campaign="held") == tasks
            assert watcher.answers > answers + 10
        check(tmp_path, "commands", broker, watcher, 120 * MEGABYTE)
