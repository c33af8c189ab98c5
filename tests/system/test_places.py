"""A broker that continues at another place: clients, workers and relays of all dialects follow it.

Both places have the same state, one after the other. No database is needed for that.
"""

from __future__ import annotations

import shutil
import signal
import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final

import pytest

from taskyard.client.internal import InternalClient
from tests.conformance.ping_pong import FrontendClient
from tests.kit.processes import AT_THE_GATE, PATIENCE_SECONDS, Running, marks, run, run_here, until
from tests.system.kit import Broker, count
from tests.system.test_round_robin import Program

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS: Final = """\
[listen.ping-pong]
service = "pp"
expire = "2s"
timeout = "2s"

[listen.wmp]
service = "w"
expire = "2s"
"""

#: The endpoints of each dialect.
SIDES: Final = {"dwork": 1, "ping-pong": 2, "round-robin": 1, "wmp": 1}

#: Marks that it has begun, and ends when the file `gate` exists.
SCRIPT: Final = f"echo $$ >> marks; {AT_THE_GATE}; echo"


def free_ports(number: int) -> list[int]:
    """Return ports where no process listens."""
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [one.getsockname()[1] for one in opened]


class Pair:
    """Two places of one broker, and the processes around it."""

    def __init__(self, directory: Path, stack: ExitStack, dialects: list[str]) -> None:
        (directory / "taskyard.toml").write_text(SETTINGS)
        self.directory = directory
        self._stack = stack
        sides = [(name, side) for name in dialects for side in range(SIDES[name])]
        #: The endpoints of both places, by dialect and side.
        self._places = [dict(zip(sides, free_ports(len(sides)), strict=True)) for _ in range(2)]
        self._dialects = dialects
        self.broker = self.start(0)

    def start(self, place: int, directory: Path | None = None) -> Broker:
        """Start a broker at one of the places."""
        words = []
        for name in self._dialects:
            ports = [self._places[place][name, side] for side in range(SIDES[name])]
            found = ",".join(f"tcp://127.0.0.1:{port}" for port in ports)
            words += ["--listen", f"{name}={found}"]
        self.broker = self._stack.enter_context(Broker(directory or self.directory, *words))
        return self.broker

    def endpoint(self, dialect: str, side: int = 0) -> str:
        """Return the endpoint with both places."""
        return "+".join(f"tcp://127.0.0.1:{one[dialect, side]}" for one in self._places)

    def place(self, number: int) -> str:
        return self.endpoint("dwork").split("+")[number]

    def worker(self, *words: str) -> Running:
        words = ("worker", "--until-eof", *words)
        running = self._stack.enter_context(Running(self.directory, *words))
        assert " works for the " in running.error_line()
        return running

    def relay(self, dialect: str) -> str:
        """Start a relay, and return where it listens."""
        here = ",".join(["tcp://127.0.0.1:0"] * SIDES[dialect])
        above = ",".join(self.endpoint(dialect, side) for side in range(SIDES[dialect]))
        words = ("relay", "--until-eof", "--listen", f"{dialect}={here}", "--to")
        running = Running(self.directory, *words, f"{dialect}={above}", stderr=None)
        return self._stack.enter_context(running).line().split()[-1]


def test_peers_of_all_dialects_follow_a_killed_broker(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = Pair(tmp_path, stack, [*SIDES])
        relays = {dialect: pair.relay(dialect) for dialect in SIDES}
        native = stack.enter_context(InternalClient(pair.endpoint("dwork")))
        relayed = stack.enter_context(InternalClient(relays["dwork"]))
        front = stack.enter_context(closing(FrontendClient(relays["ping-pong"].split(",")[1])))
        pair.worker("--slots", "2", "--broker", pair.endpoint("dwork"))
        pair.worker("--slots", "2", "--broker", relays["dwork"])
        by_program = ("--command", f"sh -c 'cat; {SCRIPT}'", "--broker")
        pair.worker("--dialect", "ping-pong", *by_program, pair.endpoint("ping-pong"))
        pair.worker("--dialect", "ping-pong", *by_program, relays["ping-pong"].split(",")[0])
        for where in (pair.endpoint("wmp"), relays["wmp"]):
            pair.worker("--dialect", "wmp", "--slots", "1", *by_program, where)
        robin = [pair.endpoint("round-robin"), relays["round-robin"]]
        robin_worker = stack.enter_context(Program(tmp_path, "worker", "--endpoint", robin[0]))
        robin_client = stack.enter_context(Program(tmp_path, "client", "--endpoint", robin[1]))
        robin_worker.until("worker> ")
        robin_worker.answer_to("register")
        robin_client.types("pingt")
        robin_client.until("pingt: answered by")
        futures = [
            client.submit(["sh", "-c", SCRIPT], name=f"{name}{number}")
            for name, client in (("native", native), ("relayed", relayed))
            for number in range(2)
        ]
        futures += [
            native.submit(b"x", name=f"{service}{number}", service=service)
            for service in ("pp", "w")
            for number in range(2)
        ]
        until(lambda: len(marks(tmp_path)) == len(futures), "all tasks run")
        job = front.submit(b"later")
        pair.broker.kill()
        until(lambda: native.unanswered_since is not None or not native.address)
        pair.start(1)
        native.status()
        assert native.address == pair.place(1)
        (tmp_path / "gate").touch()
        for future in futures:
            future.result(PATIENCE_SECONDS)
        assert native.submit(["echo", "more"]).result(PATIENCE_SECONDS) == "more\n"
        assert relayed.submit(["echo", "more"]).result(PATIENCE_SECONDS) == "more\n"
        robin_client.types("pingt")
        robin_client.until("pingt: answered by")
        # As after a restart: a client that lost its connection sends its job again.
        until(lambda: front.answer(front.again(job), 1) is not None, "the job is answered")
        assert pair.broker.terminate()[0] == 0
        tally, _ = count(tmp_path)
        assert tally.completed_twice == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGSTOP])
def test_native_peers_follow_a_broker_that_ends_or_is_stopped(
    how: signal.Signals, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    with ExitStack() as stack:
        pair = Pair(one, stack, ["dwork"])
        first = pair.broker
        client = stack.enter_context(InternalClient(pair.endpoint("dwork")))
        pair.worker("--slots", "2", "--broker", pair.endpoint("dwork"))
        futures = [client.submit(["sh", "-c", SCRIPT]) for _ in range(2)]
        futures.append(client.submit(["echo", "after"], after=futures))
        until(lambda: len(marks(one)) == 2, "tasks run")
        first.send(how)
        if how is signal.SIGTERM:
            first.end()
        # A stopped broker holds the lock of its state.
        shutil.copytree(one, two, ignore=shutil.ignore_patterns("*.sock"))
        waiting = stack.enter_context(Running(one, "wait", "--broker", pair.endpoint("dwork")))
        pair.start(1, two)
        client.status()
        assert (client.address, client.broker) == (pair.place(1), pair.endpoint("dwork"))
        (one / "gate").touch()
        assert futures[-1].result(PATIENCE_SECONDS) == "after\n"
        assert waiting.end()[0] == 0
        code, out, _ = run(one, "status", "--broker", pair.endpoint("dwork"))
        assert (code, f"answered by {pair.place(1)}" in out) == (0, True)
        assert pair.broker.terminate()[0] == 0
        tally, _ = count(two)
        assert (tally.done, tally.completed_twice, len(marks(one))) == (3, 0, 2)


def test_error_names_all_places(tmp_path: Path) -> None:
    places = "+".join(f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    code, _, err = run_here(tmp_path, "status", "--broker", places, "--broker-timeout", "300ms")
    assert code == 3
    assert f"broker at {places}: no answer within 0.3 s" in err
