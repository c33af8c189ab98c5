"""The soak's load: clients of several dialects, one thread each, and the promises to them.

Each client submits tasks at a steady rate and notes acknowledgements and answers. The text of a
task is unique, so that an answer, a line of the workers' ledger and a task of the journal can be
matched. Clients survive kills of the broker and are never killed.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import zmq

import taskyard
from soak_kit.fleet import environment
from soak_kit.peers.lmq import EXEC, PING, PING_KEY, PONG, RESPONSE, TRACKEXEC, Portal
from soak_kit.peers.protobuf import CREATE, LOOKUP, OK, TRANSFER, query, task, type_of
from taskyard.process.child import taskyard_command
from taskyard.wire.round_robin import frames as lmq
from taskyard.wire.round_robin.peer import UNKNOWN_MESSAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from soak_kit.fleet import Fleet, Layout

#: A waiting request is sent again when a new broker has been up for this long.
SETTLING_SECONDS: Final = 3.0

#: A client with this many open requests sends no more, so as not to flood a broker that was down.
WAITING_MAX: Final = 60

#: A `taskyard map` that takes longer has failed.
MAP_SECONDS_MAX: Final = 250.0

#: The share of programs that run in a lane.
LANE_SHARE: Final = 0.2

#: Messages that are sent at once now and then, so that some are under way when the broker dies.
BURST: Final = 25
BURST_SHARE: Final = 0.03

#: Share of long programs: they run while other tasks lose their workers. Much longer tasks would
#: sometimes lose five workers themselves, and rightly fail.
LONG_SHARE: Final = 0.1
LONG_SECONDS: Final = (3.0, 6.0)

#: The exit code of a verb that finds no broker.
NO_BROKER: Final = 3

#: Tasks of one `taskyard map`.
MAP_LINES: Final = 20

#: The reply of Taskyard's own round-robin worker to anything but PING and STREAM.
NOT_MINE: Final = lmq.error(UNKNOWN_MESSAGE)


@dataclass
class Promises:
    """Promises to clients. A single instance is shared by all clients."""

    #: Names of tasks whose submission was acknowledged.
    names: set[str] = field(default_factory=set)
    #: Texts of acknowledged tasks without a name of ours.
    texts: set[bytes] = field(default_factory=set)
    #: Texts whose task was answered with the text itself: a worker has run it.
    answered: set[bytes] = field(default_factory=set)
    #: Answers that do not fit their task, and requests without an answer.
    wrong: list[str] = field(default_factory=list)
    #: Which task must not start before which.
    after: dict[str, str] = field(default_factory=dict)
    sent: int = 0


class Client(threading.Thread):
    """The base of all clients: a thread that submits until it is stopped."""

    rate = 1.0

    def __init__(self, place: Layout, fleet: Fleet, promises: Promises, seed: int) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self._place = place
        self._fleet = fleet
        self.promises = promises
        self._dice = random.Random(f"{seed} {self.name}")
        self._stopping = threading.Event()
        self._giving_up = threading.Event()
        self._count = 0

    def stop(self) -> None:
        """Submit no more. The thread ends when its answers are in."""
        self._stopping.set()

    def give_up(self) -> None:
        """Wait for no more answers, and report missing answers."""
        self._giving_up.set()

    def run(self) -> None:
        """Submit until stopped. An error that ends a client early is a failure of the soak."""
        try:
            self.work()
        except Exception as error:  # noqa: BLE001  # it is reported, whatever it is
            self.promises.wrong.append(f"{self.name}: {type(error).__name__}: {error}")

    def work(self) -> None:
        """Submit and wait for answers."""
        raise NotImplementedError

    def pause(self) -> bool:
        """Wait until the next task is due. Return False if there is to be none."""
        return not self._stopping.wait(self._dice.expovariate(self.rate))

    def text(self) -> str:
        """Return a text that no other task has."""
        self._count += 1
        self.promises.sent += 1
        return f"{self.name}-{self._count}"

    def check(self, text: str, answer: bytes) -> None:
        """Note an answer. A plain dwork worker gives none, and our round-robin worker an error."""
        encoded = text.encode()
        if answer == encoded:
            self.promises.answered.add(encoded)
        elif answer and not answer.startswith(NOT_MINE):
            self.promises.wrong.append(f"{text}: answered {answer[:80]!r}")

    def is_forgotten(self, sent_at: float) -> bool:
        """Return whether an open request was sent to a broker that is gone."""
        changed_at = self._fleet.broker_changed_at
        return sent_at < changed_at + 1 and time.monotonic() > changed_at + SETTLING_SECONDS


class NativeClient(Client):
    """Submits with `taskyard.Client`: programs, payloads, and tasks of agents in lanes."""

    rate = 10.0

    def work(self) -> None:
        """Submit until stopped, then wait for every future."""
        futures: dict[str, taskyard.Future] = {}
        with taskyard.Client(self._place.native, timeout=60) as client:
            while self.pause():
                self._collect(futures)
                if len(futures) >= WAITING_MAX:
                    continue
                text = self.text()
                futures[text] = self._dice.choice((self._program, self._payload, self._mail))(
                    client, text
                )
            while futures and not self._giving_up.wait(0.1):
                self._collect(futures)
        for text, future in futures.items():
            self.promises.wrong.append(f"{text}: its future is {future.state}, not settled")

    def _collect(self, futures: dict[str, taskyard.Future]) -> None:
        for text in [text for text, future in futures.items() if future.done()]:
            future = futures.pop(text)
            error = future.exception()
            if error is not None:
                self.promises.wrong.append(f"{text}: {type(error).__name__}: {error}")
                continue
            self.promises.names.add(text)
            result = future.result()
            self.check(text, result.encode() if isinstance(result, str) else result)

    def _program(self, client: taskyard.Client, text: str) -> taskyard.Future:
        is_long = self._dice.random() < LONG_SHARE
        seconds = self._dice.uniform(*LONG_SECONDS) if is_long else 0.1
        write = f"printf '0\\texec\\t%s\\n' {text} >> '{self._place.ledger}'"
        script = f"sleep {seconds:.1f}; {write}; printf {text}"
        options: dict[str, Any] = {}
        if self._dice.random() < LANE_SHARE:
            options["lane"] = f"lane-{self._dice.randrange(4)}"
        return client.submit(["sh", "-c", script], name=text, **options)

    def _payload(self, client: taskyard.Client, text: str) -> taskyard.Future:
        return client.submit(text.encode(), name=text, service="default")

    def _mail(self, client: taskyard.Client, text: str) -> taskyard.Future:
        lane = f"host-{self._dice.randrange(5)}"
        return client.submit(text.encode(), name=text, service="mail", lane=lane)


class DworkClient(Client):
    """Creates tasks as a plain dwork peer does, in short chains. Looks tasks up after a lost
    reply."""

    rate = 2.5
    #: The timeout of a request. The broker is never suspended for so long, so it has not read it.
    reply_seconds_max = 6.0

    def work(self) -> None:
        """Create until stopped."""
        self._context = zmq.Context()
        while self.pause():
            first, second = self.text(), self.text()
            made = query(
                CREATE,
                task(first.encode(), b"soak"),
                task(second.encode(), b"soak", first.encode()),
            )
            self._create(made, second)
            self.promises.names.update((first, second))
            self.promises.after[second] = first

    def _create(self, request: bytes, name: str) -> None:
        """Send a Create until it is known to have arrived. A finished name must not be sent again:
        it would be a new task."""
        while self._ask(request) != OK:
            found = self._ask(query(LOOKUP, name=name.encode()))
            while found is None:
                found = self._ask(query(LOOKUP, name=name.encode()))
            if found == TRANSFER:
                return

    def _ask(self, request: bytes) -> int | None:
        """Return the type of the reply, or None without one."""
        with self._context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.connect(self._place.dwork)
            socket.send(request)
            if not socket.poll(int(self.reply_seconds_max * 1000)):
                return None
            return type_of(socket.recv())


class RoundRobinClient(Client):
    """Sends TRACKEXEC and EXEC. An EXEC counts if a PONG came from the same broker after it."""

    rate = 3.0
    #: The share of messages that want an answer.
    tracked_share = 0.7

    def work(self) -> None:
        """Send until stopped, then wait for the answers."""
        portal = Portal(zmq.Context(), self._place.round_robin, f"client-{time.time_ns()}")
        #: By id: the text and when it was sent. For an EXEC's PING also the broker's process.
        waiting: dict[bytes, tuple[str, float]] = {}
        execs: dict[bytes, tuple[str, int | None]] = {}
        next_at = time.monotonic()
        while not self._giving_up.is_set() and not (self._stopping.is_set() and not waiting):
            now = time.monotonic()
            is_due = not self._stopping.is_set() and now >= next_at
            if is_due and len(waiting) < WAITING_MAX:
                next_at = now + self._dice.expovariate(self.rate)
                burst = BURST if self._dice.random() < BURST_SHARE else 1
                for _ in range(burst):
                    self._send_one(portal, waiting, execs)
            self._receive(portal, waiting, execs)
            self._send_again(portal, waiting)
        portal.close()
        self.promises.wrong += [f"{text}: no answer" for text, _ in waiting.values()]

    def _send_one(
        self,
        portal: Portal,
        waiting: dict[bytes, tuple[str, float]],
        execs: dict[bytes, tuple[str, int | None]],
    ) -> None:
        text = self.text()
        if self._dice.random() < self.tracked_share:
            by = portal.send(TRACKEXEC, PING_KEY, text.encode())
            waiting[by] = (text, time.monotonic())
        else:
            pid = self._fleet.broker_pid
            portal.send(EXEC, PING_KEY, text.encode())
            execs[portal.send(PING)] = (text, pid)

    def _receive(
        self,
        portal: Portal,
        waiting: dict[bytes, tuple[str, float]],
        execs: dict[bytes, tuple[str, int | None]],
    ) -> None:
        message = portal.receive(20)
        if message is None:
            return
        if message.command == PONG and message.id in execs:
            text, pid = execs.pop(message.id)
            if pid is not None and pid == self._fleet.broker_pid:
                self.promises.texts.add(text.encode())
        elif message.command == RESPONSE and message.id in waiting:
            text, _ = waiting.pop(message.id)
            self.check(text, b"".join(message.arguments))

    def _send_again(self, portal: Portal, waiting: dict[bytes, tuple[str, float]]) -> None:
        for by in [by for by, (_, sent_at) in waiting.items() if self.is_forgotten(sent_at)]:
            text, _ = waiting.pop(by)
            again = portal.send(TRACKEXEC, PING_KEY, text.encode())
            waiting[again] = (text, time.monotonic())


class PingPongClient(Client):
    """Sends jobs to the frontend, each by a socket of its own."""

    rate = 3.0

    def work(self) -> None:
        """Send until stopped, then wait for the answers."""
        self._context = zmq.Context()
        waiting: dict[zmq.Socket[bytes], tuple[str, float]] = {}
        while self.pause():
            self._collect(waiting)
            if len(waiting) < WAITING_MAX:
                self._send(self.text(), waiting)
        while waiting and not self._giving_up.wait(0.05):
            self._collect(waiting)
        self.promises.wrong += [f"{text}: no answer" for text, _ in waiting.values()]
        for socket in waiting:
            socket.close()

    def _send(self, text: str, waiting: dict[zmq.Socket[bytes], tuple[str, float]]) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self._place.frontend)
        socket.send_multipart([b"", text.encode()])
        waiting[socket] = (text, time.monotonic())

    def _collect(self, waiting: dict[zmq.Socket[bytes], tuple[str, float]]) -> None:
        for socket, (text, sent_at) in [*waiting.items()]:
            if socket.poll(0):
                _empty, *answer = socket.recv_multipart()
                self.check(text, b" ".join(answer))
            elif self.is_forgotten(sent_at):
                self._send(text, waiting)
            else:
                continue
            del waiting[socket]
            socket.close()


class MapClient(Client):
    """Runs `taskyard map` over a few lines, repeatedly, and compares its output."""

    rate = 1 / 15

    def work(self) -> None:
        """Run maps until stopped."""
        while self.pause():
            lines = [self.text() for _ in range(MAP_LINES)]
            script = f"printf '0\\tmap\\t%s\\n' {{}} >> '{self._place.ledger}'; echo {{}}"
            words = ("map", "--broker", self._place.native, "-q", "--", "sh", "-c", script)
            done = subprocess.run(
                taskyard_command(words),
                input="\n".join(lines) + "\n",
                capture_output=True,
                text=True,
                env=environment(),
                cwd=self._place.root,
                timeout=MAP_SECONDS_MAX,
                check=False,
            )
            if done.returncode == NO_BROKER and not done.stdout:
                continue  # the broker was down when it began
            if done.returncode or sorted(done.stdout.split()) != sorted(lines):
                found = f"exit {done.returncode}, {len(done.stdout.split())} of {MAP_LINES} lines"
                self.promises.wrong.append(f"map of {lines[0]}…: {found}: {done.stderr[-300:]}")


CLIENTS: Final[tuple[Callable[..., Client], ...]] = (
    NativeClient,
    DworkClient,
    RoundRobinClient,
    PingPongClient,
    MapClient,
)
