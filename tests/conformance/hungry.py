"""The driver of a hungry worker: our worker as a process, and agents that the test drives."""

from __future__ import annotations

import selectors
import shlex
import signal
import socket
import sys
import tempfile
from pathlib import Path

from tests.conformance import dwork_plain
from tests.conformance.raw_sockets import KEYS, Deadline, unique
from tests.conformance.skills import Job, Worker
from tests.kit import processes

AGENT = Path(__file__).with_name("relay_agent.py")

_ESCAPES = ((b"\\", b"\\\\"), (b"\t", b"\\t"), (b"\n", b"\\n"), (b"\r", b"\\r"))


def escape(field: bytes) -> bytes:
    for raw, escaped in _ESCAPES:
        field = field.replace(raw, escaped)
    return field


def unescape(field: bytes) -> bytes:
    parts = field.split(b"\\\\")
    for raw, escaped in _ESCAPES[1:]:
        parts = [part.replace(escaped, raw) for part in parts]
    return b"\\".join(parts)


class Agent:
    """One agent, as its program sees it."""

    def __init__(self, pipe: socket.socket) -> None:
        self.pipe = pipe
        self._half = b""
        self.send(b"#hungry")

    def send(self, *lines: bytes) -> None:
        self.pipe.sendall(b"".join(line + b"\n" for line in lines))

    def lines(self) -> list[bytes] | None:
        """Return the lines received; None: the agent was asked to finish."""
        chunk = self.pipe.recv(1 << 20)
        *lines, self._half = (self._half + chunk).split(b"\n")
        return lines if chunk and b"" not in lines else None


class HungryWorker(Worker):
    kind = "hungry"
    cannot = {  # noqa: RUF012  # never changed
        "lists": "an agent does not list its tasks, its worker does",
        "heartbeat": "an agent sends no heartbeats, its worker does",
        "cancel": "an agent gets no cancellations, its worker ends it",
        "late reports": "an agent ends with its tasks, so it can't report late",
    }

    def __init__(self, endpoint: str, slots: int = 1) -> None:
        self._endpoint = endpoint
        self._name = unique("hungry")
        self._directory = tempfile.TemporaryDirectory()
        path = str(Path(self._directory.name) / "agents")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._agents: list[Agent] = []
        self._jobs: list[Job] = []
        agent = shlex.join([sys.executable, "-ISE", str(AGENT), path])
        self._host = processes.Worker(
            Path(self._directory.name),
            *("--broker", endpoint, "--service", "default", "--agent", agent),
            *("--slots", str(slots), "--name", self._name.decode()),
            *("--heartbeat", "200ms", "--lease", "1500ms"),
            *(("--key", KEYS[endpoint].file) if endpoint in KEYS else ()),
        )

    def take_soon(self, seconds: float) -> Job | None:
        deadline = Deadline(seconds)
        while not self._jobs:
            ready = self._selector.select(deadline.left)
            if not ready:
                return None
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._welcome()
                else:
                    self._receive(key.data)
        return self._jobs.pop(0)

    def _welcome(self) -> None:
        agent = Agent(self._listener.accept()[0])
        self._agents.append(agent)
        self._selector.register(agent.pipe, selectors.EVENT_READ, agent)

    def _receive(self, agent: Agent) -> None:
        lines = agent.lines()
        if lines is None:
            self._selector.unregister(agent.pipe)
            agent.pipe.close()
            self._agents.remove(agent)
            return
        for line in lines:
            if line != b"#idle":
                task, _lane, payload = line.split(b"\t")
                self._jobs.append(Job(unescape(payload), (agent, task)))

    def _report(self, job: Job, detail: bytes, status: bytes) -> None:
        agent, task = job.mark
        agent.send(task + b"\t" + escape(detail) + b"\t" + status, b"#hungry")

    def done(self, job: Job, result: bytes) -> None:
        self._report(job, result, b"ok")

    def fail(self, job: Job, reason: bytes) -> None:
        self._report(job, b"", b"deferred " + reason)

    def fail_final(self, job: Job, reason: bytes) -> None:
        self._report(job, b"", b"error " + reason)

    def return_task(self, job: Job) -> None:
        self._report(job, b"", b"deferback")

    def progress(self, job: Job, percent: int, text: bytes) -> None:
        del percent
        job.mark[0].send(b"# " + text)

    def dismissed(self, seconds: float) -> bool:
        deadline = Deadline(seconds)
        while deadline and self._host.process.poll() is None:
            self.take_soon(0.01)
        return self._host.process.poll() == 0

    def malform(self) -> None:
        """Send malformed lines from each agent."""
        for agent in self._agents:
            agent.send(b"\xff\xfe what?", b"no/1\tsuch\ttask", b"#HUNGRY?")

    def leave(self) -> None:
        """Send SIGTERM. A worker that holds tasks gets a second one, and returns them."""
        self._host.send(signal.SIGTERM)
        if self._host.error_line():
            self._host.send(signal.SIGTERM)
        self._host.end()

    def vanish(self) -> None:
        self._host.kill()

    def close(self) -> None:
        """Kill the worker, and send Exit for it, to save time."""
        with self._host, self._listener, self._selector, self._directory:
            for agent in self._agents:
                agent.pipe.close()
            if self._host.process.poll() is None:
                self._host.kill()
        line = dwork_plain.RequestSocket(self._endpoint)
        line.request(dwork_plain.number(1, dwork_plain.EXIT) + dwork_plain.text(6, self._name))
        line.bare.close()
