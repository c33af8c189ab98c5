"""Soak large values and long output: kill a loaded broker, and compare every byte.

    python tools/large_soak.py --kills 60

A broker requires keys, so that all bytes go through it. The workers run calls with large arguments
and results, calls that submit calls, and programs with long output. Meanwhile the broker is killed
at random and started again, and sometimes a worker. Clients wait for each result and compare it.
Then the blobs on the disk are compared with the names in the journal.

The seed is printed first. Exit code 0 only if all holds. The directory with state and logs is kept
if not.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from soak_kit.blobs import audit_blobs
from taskyard.client.client import Client
from taskyard.net.keyring import Keyring
from taskyard.process.child import (
    ChildProcess,
    environment_without_settings,
    taskyard_command,
)
from taskyard.wire.roles import Role

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS: Final = """
[lease]
expire = "3s"
"""

WORKERS: Final = 2
CLIENTS: Final = 4

#: Between two kills, and how long the broker stays down.
PAUSE_SECONDS_MAX: Final = 4.0
AWAY_SECONDS_MAX: Final = 0.5

#: A worker is killed with every so many kills of the broker.
WORKER_SHARE: Final = 5

#: Kills between two lines of progress.
PROGRESS_KILLS: Final = 10

#: Everything submitted has to be there so long after the last kill.
SETTLE_SECONDS: Final = 240.0

#: Of values and of output. Some are short, so that they are in records.
BYTES_MAX: Final = 3_000_000

_LAST_NUMBER: Final = 9_999_999


# Functions of the calls.


def reversed_bytes(content: bytes) -> bytes:
    return content[::-1]


def reversed_by_others(content: bytes) -> bytes:
    """Reverse a content in two calls that this call submits."""
    middle = len(content) // 2
    with Client() as client:
        parts = [
            client.submit(reversed_bytes, part) for part in (content[middle:], content[:middle])
        ]
        return b"".join(part.result() for part in parts)


# What is submitted.


@dataclass
class Report:
    """The findings of a soak."""

    kills: int = 0
    workers_killed: int = 0
    #: Tasks by kind, whose results were compared.
    compared: Counter[str] = field(default_factory=Counter)
    bytes_compared: int = 0
    blobs: int = 0
    streams_of_lost_attempts: int = 0
    problems: list[str] = field(default_factory=list)


class Load(threading.Thread):
    """A client that submits one task after another, and compares each result."""

    def __init__(self, client: Client, seed: int, report: Report) -> None:
        super().__init__(name=f"load {seed}", daemon=True)
        self._client, self._report = client, report
        self._dice = random.Random(seed)
        self.stopping = threading.Event()

    def run(self) -> None:
        kinds: list[Callable[[Client], int]] = [self.call, self.chain, self.nested, self.output]
        with self._client as client:
            while not self.stopping.is_set():
                kind = self._dice.choice(kinds)
                name = kind.__name__
                try:
                    size = kind(client)
                except Exception as error:  # noqa: BLE001  # each is a finding
                    self._report.problems.append(f"{name}: {type(error).__name__}: {error}")
                else:
                    self._report.compared[name] += 1
                    self._report.bytes_compared += size

    def call(self, client: Client) -> int:
        """Compare the large result of a call with a large argument."""
        content = self._content()
        result = client.submit(reversed_bytes, content).result(SETTLE_SECONDS)
        return self._compare("call", result, content[::-1])

    def chain(self, client: Client) -> int:
        """Pass a large result on to another call."""
        content = self._content()
        first = client.submit(reversed_bytes, content)
        result = client.submit(reversed_bytes, first).result(SETTLE_SECONDS)
        return self._compare("chain", result, content)

    def nested(self, client: Client) -> int:
        """Compare the result of a call that submits two."""
        content = self._content()
        result = client.submit(reversed_by_others, content).result(SETTLE_SECONDS)
        return self._compare("nested", result, content[::-1])

    def output(self, client: Client) -> int:
        """Compare stdout and stderr of a program that prints for some time."""
        step, size = self._dice.randrange(1, 50), self._size()
        command = (
            f"seq {step} {step} {_LAST_NUMBER} | head -c {size}; sleep 0.{step:02}; echo {step} >&2"
        )
        task = client.submit(["sh", "-c", command])
        task.exception(SETTLE_SECONDS)
        numbers = range(step, _LAST_NUMBER, step)
        expected = bytearray()
        for number in numbers:
            expected += b"%d\n" % number
            if len(expected) >= size:
                break
        found = client.output(task.full_name, "stdout")
        self._compare("stderr", client.output(task.full_name, "stderr"), b"%d\n" % step)
        return self._compare("stdout", found, bytes(expected[:size]))

    def _size(self) -> int:
        return self._dice.randrange(1_000, BYTES_MAX)

    def _content(self) -> bytes:
        return self._dice.randbytes(self._size())

    def _compare(self, what: str, found: bytes, expected: bytes) -> int:
        if found != expected:
            digests = [hashlib.sha256(one).hexdigest()[:12] for one in (found, expected)]
            lengths = f"{len(found):,} of {len(expected):,} bytes"
            self._report.problems.append(f"{what}: other bytes: {lengths}, {digests}")
        return len(found)


# The broker and its workers.


class Yard:
    """The processes, in a directory."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._stack = stack
        self._environment = {**environment_without_settings(), "TMPDIR": str(directory / "tmp")}
        (directory / "tmp").mkdir()
        (directory / "taskyard.toml").write_text(SETTINGS)
        ring = Keyring(directory / ".taskyard")
        for role in (Role.PRODUCER, Role.WORKER):
            ring.create(role.value, {role, Role.PRODUCER}, self.key(role))
        self.endpoint = "tcp://127.0.0.1:0"
        self.broker = self.start_broker()
        self.workers = [self.start_worker() for _ in range(WORKERS)]

    def client(self) -> Client:
        key = self.key(Role.PRODUCER)
        return Client(self.endpoint, key=key, report=lambda _line: None)

    def key(self, role: Role) -> Path:
        return self.directory / f"{role}.key"

    def start_broker(self) -> ChildProcess:
        words = ("broker", "--secure", "--listen", f"dwork={self.endpoint}")
        process = self._start(words)
        _, (_, self.endpoint) = process.read_endpoints(2)  # the first is a socket of this machine
        return process

    def start_worker(self) -> ChildProcess:
        key = ("--key", str(self.key(Role.WORKER)))
        return self._start(
            ("worker", "--broker", self.endpoint, *key, "--allow-pickle", "--slots", "2")
        )

    def _start(self, words: tuple[str, ...]) -> ChildProcess:
        log = self._stack.enter_context((self.directory / f"{words[0]}.log").open("ab"))
        process = ChildProcess(
            taskyard_command(words),
            stdout=subprocess.PIPE if words[0] == "broker" else subprocess.DEVNULL,
            cwd=self.directory,
            env=self._environment,
            stderr=log,
        )
        self._stack.callback(kill, process)
        return process


def kill(child: ChildProcess) -> None:
    child.process.kill()
    child.process.wait()
    for pipe in (child.process.stdin, child.process.stdout):
        if pipe is not None:
            pipe.close()


def soak(directory: Path, kills: int, seed: int, log: Callable[[str], None] = print) -> Report:
    """Run a soak in an empty directory."""
    report, dice = Report(), random.Random(seed)
    with ExitStack() as stack:
        yard = Yard(directory, stack)
        loads = [Load(yard.client(), seed + number, report) for number in range(CLIENTS)]
        for load in loads:
            load.start()
        for number in range(1, kills + 1):
            time.sleep(dice.uniform(0, PAUSE_SECONDS_MAX))
            kill(yard.broker)
            report.kills += 1
            if not number % WORKER_SHARE:
                kill(yard.workers.pop(0))
                report.workers_killed += 1
                yard.workers.append(yard.start_worker())
            time.sleep(dice.uniform(0, AWAY_SECONDS_MAX))
            yard.broker = yard.start_broker()
            if not number % PROGRESS_KILLS:
                log(f"{number} kills, {report.compared.total()} results compared")
        _settle(loads, report)
        with yard.client() as client:
            latest = {view["name"]: view["attempt"] for view in client.tasks()}
        kill(yard.broker)
    _audit(directory, latest, report)
    return report


def _settle(loads: list[Load], report: Report) -> None:
    """Wait for the last result of each client."""
    for load in loads:
        load.stopping.set()
    for load in loads:
        load.join(SETTLE_SECONDS)
        if load.is_alive():
            report.problems.append(f"{load.name}: its last result is lost")


def _audit(directory: Path, latest: dict[str, int], report: Report) -> None:
    """Compare blobs with the journal. Streams of lost attempts are kept, for users to read."""
    state = directory / ".taskyard"
    found = audit_blobs(state, state / "blobs")
    report.blobs = found.named
    report.problems += found.wrong
    for stream in found.streams:
        # A long id is in several directories. The tasks have no campaign.
        attempt, _, _, name = stream.removesuffix(".stream").replace("/", "").split(".", 3)
        if int(attempt) < latest[name]:
            report.streams_of_lost_attempts += 1
        else:
            report.problems.append(f"{stream} is not sealed")


def main() -> int:
    """Run a soak by the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="taskyard-large-"))
    print(f"seed {options.seed}, in {directory}", flush=True)
    report = soak(directory, options.kills, options.seed, partial(print, flush=True))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.compared.items()))
    print(
        f"{report.kills} kills of the broker, {report.workers_killed} of workers\n"
        f"{report.compared.total()} results compared ({kinds}), {report.bytes_compared:,} bytes\n"
        f"{report.blobs} blobs named and found, "
        f"{report.streams_of_lost_attempts} streams of attempts whose workers were killed"
    )
    for problem in report.problems:
        print(f"PROBLEM: {problem}")
    if not report.problems:
        shutil.rmtree(directory)
    print("good" if not report.problems else "BAD")
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
