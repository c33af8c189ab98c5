"""A broker and its peers as processes, with the CPU time of each and the broker's memory.

Owns their start and end, and reads the kernel's clocks. The suites own measurements and targets.
"""

import os
import pstats
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

import msgspec

from bench.broker.host import PROFILE_VARIABLE, encode_rules
from bench.peers import PeerProgress, PeerTask
from bench.settings import Kind
from taskyard.broker.compaction import CompactionLimits
from taskyard.core.events import RulesSet
from taskyard.net import endpoints
from taskyard.process.child import ChildProcess, status_text

#: Seconds between checks that all processes live while none prints.
POLL_S: Final = 1.0

#: Functions in a profile.
PROFILE_LINES: Final = 30


class Process(ChildProcess):
    """A module as a child process. `output` is its stdout, unbuffered so that it can be polled."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: dict[str, str],
        before: Sequence[str] = (),
    ) -> None:
        """`before` are the words of a program that runs Python, such as strace."""
        reader, writer = os.pipe()
        self.output = os.fdopen(reader, "rb", buffering=0)
        with os.fdopen(writer, "wb") as stdout:
            super().__init__(
                [*before, sys.executable, "-m", module, *arguments],
                stdout=stdout,
                env=os.environ | environment,
            )
        self.what = f"{module} {' '.join(arguments)}"

    def line(self) -> bytes:
        """Return the next line that it prints."""
        line = self.output.readline()
        if not line:
            raise RuntimeError(f"{self.what} ended early: {status_text(self.wait())}")
        return line

    @property
    def has_ended(self) -> bool:
        return self.poll() is not None

    def check(self) -> None:
        if (status := self.poll()) is not None:
            raise RuntimeError(f"{self.what} ended early: {status_text(status)}")

    def send_go(self) -> None:
        """Let it continue."""
        self.write("\n")

    def cpu_ns(self) -> int:
        """Return the CPU time of all its threads so far, user and system, in nanoseconds."""
        return time.clock_gettime_ns(~self.pid << 3 | 2)  # Linux's number for a process's clock

    def end(self) -> None:
        """Close its input, at which a peer ends, and wait for it."""
        if self.output.closed:
            return
        self.close_stdin()
        self.output.readall()  # a full pipe would stop it
        self.output.close()
        self.wait()

    def terminate(self) -> None:
        """Send SIGTERM and wait for the process."""
        self.signal(signal.SIGTERM)
        self.end()

    def kill(self) -> int:
        """Kill the process. Return its exit status."""
        self.output.close()
        return super().kill()


class Peer(Process):
    def __init__(self, peer_task: PeerTask) -> None:
        super().__init__("bench.peers", msgspec.json.encode(peer_task).decode(), environment={})
        self.peer_task = peer_task

    def done(self) -> PeerProgress:
        """Return its next progress."""
        return msgspec.json.decode(self.line(), type=PeerProgress)


class Broker(Process):
    """A broker that listens once it is made."""

    def __init__(
        self,
        state: Path,
        kind: Kind,
        profile: Path | None = None,
        rules: RulesSet | None = None,
        limits: CompactionLimits | None = None,
    ) -> None:
        environment = {} if profile is None else {PROFILE_VARIABLE: str(profile)}
        words = [str(state), kind, "" if rules is None else encode_rules(rules)]
        if limits is not None:
            words.append(msgspec.json.encode(limits).decode())
        start_ns = time.monotonic_ns()
        super().__init__("bench.broker.host", *words, environment=environment)
        self.line()
        #: From its start until it listens.
        self.started_ns = time.monotonic_ns() - start_ns

    def resident_bytes(self) -> int:
        return memory_bytes(self.pid, "VmRSS")


def memory_bytes(pid: int, measure: str) -> int:
    """Return a measure of a process from its status: `VmRSS`, or `VmHWM` for the peak."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{measure}:"))
    return int(line.split()[1]) * 1024


class BrokerBench:
    """A broker with its own state, and its peers. All of them end with it."""

    def __init__(
        self,
        kind: Kind,
        *,
        profile: bool = False,
        rules: RulesSet | None = None,
        limits: CompactionLimits | None = None,
    ) -> None:
        self._kind = kind
        self._limits = limits
        self._rules = rules
        self._profiled = profile and kind != "echo"
        self._stack = ExitStack()
        self.peers: list[Peer] = []

    def __enter__(self) -> Self:
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self.state = directory / "state"
        self._profile = directory / "profile" if self._profiled else None
        self.endpoint = endpoints.native_endpoint(self.state)
        self.broker = self._start_broker()
        return self

    def _start_broker(self) -> Broker:
        return Broker(self.state, self._kind, self._profile, self._rules, self._limits)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            for peer in self.peers:
                peer.end()
            self.broker.terminate()
            if self._profile is not None and kind is None:
                _print_profile(self._profile)

    def restart_broker(self, limits: CompactionLimits | None = None) -> None:
        """Kill the broker and start it again, with other limits if given."""
        self._limits = limits or self._limits
        self.broker.kill()
        self.broker = self._start_broker()

    def start_peers(self, *parts: PeerTask) -> list[Peer]:
        """Start peers. Return them when all are ready."""
        started = [Peer(peer_task) for peer_task in parts]
        self.peers += started
        for peer in started:
            peer.done()
        return started

    def end_peer(self, peer: Peer) -> None:
        """End a peer before the other peers."""
        self.peers.remove(peer)
        peer.end()

    def cpu_ns(self) -> int:
        """Return the CPU time of the broker and all peers."""
        return self.broker.cpu_ns() + sum(peer.cpu_ns() for peer in self.peers)

    def read_progress(self, workers: Sequence[Peer], seconds: float) -> None:
        """Read the progress of workers for a time. A full pipe would stop them."""
        ends = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            while (left := ends - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    key.data.done()
        for process in (self.broker, *self.peers):
            process.check()

    def wait_for(self, workers: Sequence[Peer], count: int) -> int:
        """Wait until workers have done a number of tasks in all. Return the time of the last."""
        done = {worker: PeerProgress() for worker in workers}
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            while sum(one.count for one in done.values()) < count:
                for key, _ in selector.select(POLL_S):
                    done[key.data] = key.data.done()
                for process in (self.broker, *workers):
                    process.check()
        return max(one.end_ns for one in done.values())


def _print_profile(file: Path) -> None:
    print("the broker's profile; times are inflated by taking it")
    pstats.Stats(str(file)).sort_stats("tottime").print_stats(PROFILE_LINES)
