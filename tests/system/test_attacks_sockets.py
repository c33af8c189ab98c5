"""Attacks on a broker's sockets under a memory limit: it survives, serves, and loses nothing.

`-s` prints the measurements. Without the connection guard each attack would end the broker or take
its memory.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission
from taskyard.net.keys import read_peer_key
from tests.kit.processes import TASKYARD, Broker, Running, run_here, until
from tests.system.kit import count

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("Linux")

ATTACKERS = Path(__file__).with_name("socket_attackers.py")
RANDOM_ATTACKERS = Path(__file__).with_name("random_attackers.py")

MIB = 1 << 20
MEMORY_MAX = 512 * MIB

#: Other peers get replies within this time on a quiet machine.
SERVED_SECONDS = 10.0

#: Fail a test that waits longer, however busy the machine.
LONG_SECONDS = 120.0

#: Memory is back to normal below this: the test's own requests take some too.
LEFT_MAX = 24 * MIB

#: Runs a command with limits of address space and descriptors (0: unchanged).
LIMITED = """
import os, resource, sys
space, descriptors = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_AS, (space, space))
if descriptors:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
os.execv(sys.argv[3], sys.argv[3:])
"""


def patience() -> float:
    """Return how long peers may take, scaled by the load of the machine."""
    return SERVED_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def memory_of(pid: int, name: str) -> int:
    """Return resident memory now (VmRSS) or at its peak (VmHWM), in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":")]
    assert found, "the process has ended"
    return found[0]


@contextmanager
def limited_broker(directory: Path, *options: str, descriptors: int = 0) -> Iterator[Broker]:
    limits = (sys.executable, "-c", LIMITED, str(MEMORY_MAX), str(descriptors))
    with Broker(directory, *options, program=(*limits, *TASKYARD)) as broker, end_shown(broker):
        yield broker


@contextmanager
def end_shown(running: Running) -> Iterator[None]:
    """Add the exit status and stderr of a process to a failure, if the process has ended.

    ZeroMQ prints there which of its assertions has failed.
    """
    try:
        yield
    except BaseException as failure:
        if running.process.poll() is not None:
            code, _, err = running.end()
            failure.add_note(f"the process ended with {code}: {err}")
        raise


def assert_ends_well(running: Running) -> None:
    """Stop a process, and check its exit status."""
    code, _, err = running.terminate()
    assert code == 0, err


@contextmanager
def attack(kind: str, endpoint: str, number: int) -> Iterator[None]:
    """Attack from another process. Enter after its first full round."""
    with attacker(str(ATTACKERS), kind, endpoint, str(number)):
        yield


@contextmanager
def attacker(*words: str) -> Iterator[None]:
    """Run a program that attacks until its stdin ends. Enter when it has printed `ready`."""
    words = (sys.executable, *words)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.stdin.close()
        assert process.wait(60) == 0


def assert_felt(running: Running) -> None:
    """Check that the process has logged its defence."""
    assert running.process.stderr is not None
    assert select.select([running.process.stderr], [], [], LONG_SECONDS)[0]
    lines = [running.error_line()]
    while ": connections cut: " not in lines[-1] and ": peers held back: " not in lines[-1]:
        assert lines[-1], lines
        lines.append(running.error_line())


def client_of(endpoint: str) -> InternalClient:
    limit = patience()
    return InternalClient(endpoint, timeout=limit, report=lambda _: None)


def submit(client: InternalClient, name: bytes) -> bytes:
    """Submit a task, and return its name after the acknowledgement."""
    assert client.create(Submission([name])) == 1
    return name


def await_memory(pid: int, most: int) -> int:
    """Wait until the process has freed its memory. Return its size."""
    ends = time.monotonic() + LONG_SECONDS
    while memory_of(pid, "VmRSS") > most and time.monotonic() < ends:
        time.sleep(0.05)  # there is no event for freed memory
    return memory_of(pid, "VmRSS")


#: Kind, socket, number of connections, and the broker's descriptors.
ATTACKS = {
    "endless frames over TCP": ("endless", 1, 1, 0),
    "endless frames over ipc": ("endless", 0, 1, 0),
    "endless frames after a good message": ("endless-known", 1, 2, 0),
    "200 unfinished messages over TCP": ("unfinished", 1, 200, 0),
    "200 unfinished messages over ipc": ("unfinished", 0, 200, 0),
    "large frames that are announced": ("announced", 1, 30, 0),
    "silent connections": ("silent", 1, 2_000, 1_024),
    "silent connections, many descriptors": ("silent", 1, 4_000, 0),
    "half greetings": ("half-greeting", 1, 2_000, 1_024),
    "established connections": ("established", 1, 1_500, 0),
    "slow first messages": ("begun", 1, 1_500, 1_024),
    "large whole messages": ("whole", 1, 1, 0),
    "large whole messages of many": ("whole", 1, 12, 0),
}


#: Attacks like others, over another socket or with more connections.
REPEATED = (
    "endless frames over ipc",
    "200 unfinished messages over ipc",
    "silent connections, many descriptors",
    "slow first messages",
    "large whole messages of many",
)


@pytest.mark.parametrize(
    ("kind", "socket", "number", "descriptors"),
    [
        pytest.param(*how, id=name, marks=[pytest.mark.whole] if name in REPEATED else [])
        for name, how in ATTACKS.items()
    ],
)
def test_attack_leaves_the_broker_to_others(
    tmp_path: Path, kind: str, socket: int, number: int, descriptors: int
) -> None:
    options = ("--listen", "dwork=tcp://127.0.0.1:0")
    with limited_broker(tmp_path, *options, descriptors=descriptors) as broker, ExitStack() as held:
        known = [held.enter_context(client_of(endpoint)) for endpoint in broker.endpoints]
        acknowledged = {submit(client, b"before %d" % at) for at, client in enumerate(known)}
        before = memory_of(broker.pid, "VmRSS")
        with attack(kind, broker.endpoints[socket], number):
            assert_felt(broker)
            began = time.monotonic()
            acknowledged |= {submit(client, b"during %d" % at) for at, client in enumerate(known)}
            for at, endpoint in enumerate(broker.endpoints):
                with client_of(endpoint) as fresh:
                    acknowledged.add(submit(fresh, b"fresh %d" % at))
            served = time.monotonic() - began
        after = await_memory(broker.pid, before + LEFT_MAX)
        peak = memory_of(broker.pid, "VmHWM")
        figures = [f"{value // MIB} MiB" for value in (before, peak, after)]
        sys.stdout.write(f"\n{kind}: memory {' → '.join(figures)}, served in {served:.2f} s\n")
        assert after <= before + LEFT_MAX
        if kind != "whole":
            assert sum(known[0].status()["connections_cut"].values()) > 0
        held.close()
        assert_ends_well(broker)
    assert count(tmp_path)[1] == acknowledged


@pytest.mark.parametrize("dialect", ["ping-pong", "round-robin", "wmp"])
def test_endless_frames_in_any_dialect(tmp_path: Path, dialect: str) -> None:
    places = "tcp://127.0.0.1:0"
    if dialect == "ping-pong":
        places = f"{places},{places}"
    with limited_broker(tmp_path, "--listen", f"{dialect}={places}") as broker:
        place = broker.endpoints[1].split(",")[0]
        before = memory_of(broker.pid, "VmRSS")
        with attack("endless", place, 1):
            assert_felt(broker)
            with client_of(broker.endpoint) as fresh:
                submit(fresh, b"fresh")
        assert await_memory(broker.pid, before + LEFT_MAX) <= before + LEFT_MAX
        assert_ends_well(broker)


def test_endless_frames_at_a_relay(tmp_path: Path) -> None:
    with limited_broker(tmp_path, "--listen", "wmp=tcp://127.0.0.1:0") as broker:
        words = ("relay", "--until-eof", "--listen", "tcp://127.0.0.1:0")
        limits = (sys.executable, "-c", LIMITED, str(MEMORY_MAX), "0")
        upstream = ("--to", broker.endpoints[1])
        program = (*limits, *TASKYARD)
        running = Running(tmp_path, *words, *upstream, program=program)
        with running as relay, end_shown(relay):
            place = relay.line().split()[2]
            before = memory_of(relay.pid, "VmRSS")
            with attack("endless", place, 1):
                assert_felt(relay)
            assert await_memory(relay.pid, before + LEFT_MAX) <= before + LEFT_MAX
            assert_ends_well(relay)
        assert_ends_well(broker)


def test_idle_worker_is_not_cut_while_others_attack(tmp_path: Path) -> None:
    options = ("--listen", "dwork=tcp://127.0.0.1:0")
    with limited_broker(tmp_path, *options) as broker, client_of(broker.endpoint) as client:
        words = ("worker", "--broker", broker.endpoints[1], "--until-eof")
        with Running(tmp_path, *words) as worker:
            assert " works for the broker at " in worker.error_line()
            until(client.workers, "the worker's first request")
            before = client.workers()
            with attack("unfinished", broker.endpoints[1], 100):
                assert_felt(broker)
                assert client.submit(["echo", "hello"]).result(patience()) is not None
            assert [one["name"] for one in client.workers()] == [one["name"] for one in before]
            code, _, err = worker.terminate()
            assert code == 0
            assert "no answer" not in err
        assert_ends_well(broker)


#: Another one makes other attacks.
SEED = 6125

#: Listeners of all dialects, and two that require keys.
LISTENERS = (
    "dwork=tcp://127.0.0.1:0",
    "wmp=tcp://127.0.0.1:0",
    "round-robin=tcp://127.0.0.1:0",
    "ping-pong=tcp://127.0.0.1:0,tcp://127.0.0.1:0",
    "dwork=tcp://0.0.0.0:0",
    "wmp=tcp://0.0.0.0:0",
)


@pytest.mark.slow
def test_random_attacks_on_all_listeners(tmp_path: Path) -> None:
    assert run_here(tmp_path, "keys", "new", "me", "--role", "admin")[0] == 0
    key = tmp_path / "me.key"
    options = [word for one in LISTENERS for word in ("--listen", one)]
    with limited_broker(tmp_path, *options, descriptors=1_024) as broker:
        places = [
            place.replace("//0.0.0.0:", "//127.0.0.1:")
            for endpoint in broker.endpoints
            for place in endpoint.split(",")
        ]
        descriptors = Path(f"/proc/{broker.pid}/fd")
        before = len([*descriptors.iterdir()])
        words = (str(SEED), "300", read_peer_key(key).broker, *places)
        with attacker(str(RANDOM_ATTACKERS), *words), client_of(broker.endpoint) as owner:
            submit(owner, b"local")
            with InternalClient(places[-2], key=key, timeout=patience()) as remote:
                submit(remote, b"remote")
        until(lambda: len([*descriptors.iterdir()]) <= before, "descriptors are freed")
        assert_ends_well(broker)
    assert {b"local", b"remote"} <= count(tmp_path)[1]
