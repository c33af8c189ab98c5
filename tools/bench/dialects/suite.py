"""The cost of a task in each dialect, one at a time, beside the native dialect.

A client of the dialect if it has clients, else a native client, one worker with one slot, and one
broker that listens to all of them with its journal on disk. The measure is CPU time of all
processes together. Tasks per second are shown beside it.
"""

import shlex
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Final, Self

import msgspec

from bench.dialects.peers import WINDOW, PeerTask
from bench.peers import PeerProgress
from bench.processes import Process
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import Target

#: Each case: client and worker.
CASES: Final = {
    "dwork extended": ("dwork-extended", "dwork-extended"),
    "dwork plain": ("dwork-plain", "dwork-plain"),
    "round-robin": ("round-robin", "round-robin"),
    "ping-pong": ("ping-pong", "ping-pong"),
    "wmp, native client": ("dwork-extended", "wmp"),
    "hungry, native client": ("dwork-extended", "hungry"),
}

COUNT: Final = 3_000

#: From a worker's INCREMENT to its next message, in milliseconds. The original takes up to 1,000.
INCREMENT_MS: Final = Target(50, 5)

#: The broker's listeners for each dialect.
_LISTEN_DIALECTS: Final = {
    "dwork": "tcp://127.0.0.1:0",
    "round-robin": "tcp://127.0.0.1:0",
    "ping-pong": "tcp://127.0.0.1:0,tcp://127.0.0.1:0",
    "wmp": "tcp://127.0.0.1:0",
}

#: The smallest agent: reads a task, reports it done, requests the next.
_AGENT: Final = (
    "echo '#hungry'; while IFS='\t' read -r id _; do case $id in '#idle') ;; '') exit ;; "
    "*) printf '%s\\t\\tok\\n#hungry\\n' \"$id\" ;; esac; done"
)


class MeasuredPeer(Process):
    """A peer that prints its progress."""

    def __init__(self, peer_task: PeerTask) -> None:
        encoded = msgspec.json.encode(peer_task).decode()
        super().__init__("bench.dialects.peers", encoded, environment={})

    def done(self) -> PeerProgress:
        return msgspec.json.decode(self.line(), type=PeerProgress)


class AgentWorkerProcess(Process):
    """The product's own worker with an agent."""

    def __init__(self, endpoint: str) -> None:
        agent = shlex.join(["sh", "-c", _AGENT])
        words = ("--broker", endpoint, "--service", "default", "--slots", "1", "--agent", agent)
        super().__init__("taskyard.cli", "worker", "--until-eof", "-q", *words, environment={})

    def cpu_ns(self) -> int:
        """Return its CPU time and that of its agent."""
        children = [
            int(pid)
            for thread in Path(f"/proc/{self.pid}/task").iterdir()
            for pid in (thread / "children").read_text().split()
        ]
        return super().cpu_ns() + sum(time.clock_gettime_ns(~pid << 3 | 2) for pid in children)


class DialectFigures(msgspec.Struct):
    rate: float
    cost_us: float
    broker_us: float
    #: round-robin: from each INCREMENT to the next message.
    waits_ns: list[int]


class DialectBench:
    """A broker with the listeners that a client and a worker need, and these. All end with it."""

    def __init__(self, client_dialect: str, worker_dialect: str) -> None:
        self._asks = client_dialect
        self._works = worker_dialect

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        doors = dict.fromkeys(_listen_dialect(kind) for kind in (self._asks, self._works))
        listen = [
            word for name in doors for word in ("--listen", f"{name}={_LISTEN_DIALECTS[name]}")
        ]
        words = ("broker", "--until-eof", "--state", str(Path(directory) / "state"), *listen)
        self.broker = Process("taskyard.cli", *words, environment={})
        self.broker.line()
        lines = [self.broker.line().decode().split() for _ in doors]
        self._places = {name: places for _, name, places in lines}
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            self.broker.terminate()

    def _place(self, kind: str, side: int) -> str:
        """Return the endpoint of a peer. In a dialect with two sides clients have the second."""
        return self._places[_listen_dialect(kind)].split(",")[side if kind == "ping-pong" else 0]

    def measure(self, count: int) -> DialectFigures:
        worker = self._worker(self._works)
        client = MeasuredPeer(PeerTask(f"ask {self._asks}", self._place(self._asks, 1), count))
        client.done()
        everybody = (self.broker, client, worker)
        cpu_ns, broker_ns = sum(one.cpu_ns() for one in everybody), self.broker.cpu_ns()
        client.send_go()
        done = client.done()
        broker_ns = self.broker.cpu_ns() - broker_ns
        cpu_ns = sum(one.cpu_ns() for one in everybody) - cpu_ns
        client.end()
        waits_ns: list[int] = []
        if isinstance(worker, MeasuredPeer):
            worker.send_go()  # makes it end
            waits_ns = worker.done().waits_ns
        worker.end()
        rate = count * 1e9 / (done.end_ns - done.start_ns)
        return DialectFigures(rate, cpu_ns / count / 1e3, broker_ns / count / 1e3, waits_ns)

    def _worker(self, kind: str) -> MeasuredPeer | AgentWorkerProcess:
        if kind == "hungry":
            return AgentWorkerProcess(self._place(kind, 0))
        worker = MeasuredPeer(PeerTask(f"work {kind}", self._place(kind, 0)))
        worker.done()
        worker.send_go()
        return worker


def run(settings: Settings) -> list[TableLine]:
    """Run all cases and return the lines of the table."""
    lines: list[TableLine] = []
    for what, (client_dialect, worker_dialect) in CASES.items():
        settings.say(what)
        runs = [
            _run(client_dialect, worker_dialect, settings.count(COUNT)) for _ in settings.times()
        ]
        lines.append(table_line(what, "tasks/s", [one.rate for one in runs], higher_is_better=True))
        lines.append(table_line("  all processes", "µs/task", [one.cost_us for one in runs]))
        lines.append(table_line("  of it the broker", "µs/task", [one.broker_us for one in runs]))
        waits_ms = [[wait / 1e6 for wait in one.waits_ns] for one in runs if len(one.waits_ns) > 1]
        if waits_ms:
            name = "  INCREMENT to next message"
            lines.append(table_line(f"{name}, p50", "ms", map(median, waits_ms), INCREMENT_MS))
            slowest = [quantiles(waits, n=100)[-1] for waits in waits_ms]
            lines.append(table_line(f"{name}, p99", "ms", slowest, INCREMENT_MS))
    return lines


def _run(client_dialect: str, worker_dialect: str, count: int) -> DialectFigures:
    with DialectBench(client_dialect, worker_dialect) as stage:
        return stage.measure(max(count, WINDOW))


def _listen_dialect(kind: str) -> str:
    """Return the dialect of the listener for a kind of peer."""
    return "dwork" if kind.startswith(("dwork", "hungry")) else kind
