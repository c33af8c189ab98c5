"""Relays between managers and workers as processes: killed and restarted, all tasks done once."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import zmq

from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission, Terms
from tests.kit.processes import Running, marks, until
from tests.system.kit import count
from tests.wire.wmp.kit import Sent, frames, read

HERE = Path(__file__).parent
ANY = "tcp://127.0.0.1:0"

KILLS = 8
MANAGERS = 2
WORKERS = 4
TASKS = 120

#: Each task appends one line when it begins.
MARKING = ("sh", "-c", "read line; echo $line >> marks; sleep 0.1; echo $line")


class Manager(Running):
    """A broker that listens for WMP, with a client."""

    def __init__(self, directory: Path, endpoint: str = ANY) -> None:
        directory.mkdir(exist_ok=True)
        (directory / ".taskyard").mkdir(exist_ok=True, mode=0o700)
        program = (sys.executable, str(HERE / "wmp_manager.py"))
        super().__init__(directory, ".taskyard", endpoint, program=program, stderr=None)
        native, wmp = self.line().split(), self.line().split()
        assert [native[1], wmp[1]] == ["native", "wmp"]
        self.native, self.endpoint = native[2], wmp[2]


class Relay(Running):
    """A relay that listens."""

    def __init__(self, directory: Path, *upstreams: str, endpoint: str = ANY) -> None:
        options = ["--until-eof", "--listen", endpoint]
        options += [word for one in upstreams for word in ("--to", one)]
        super().__init__(directory, "relay", *options, stderr=subprocess.DEVNULL)
        line = self.line().split()
        assert line[:2] == ["listening", "wmp"]
        self.upstreams = upstreams
        self.endpoint = line[2]

    def restarted(self, directory: Path) -> Relay:
        """Return another process in its place."""
        self.kill()
        return Relay(directory, *self.upstreams, endpoint=self.endpoint)


def worker(directory: Path, name: str, endpoints: str, *program: str, slots: int = 2) -> Running:
    words = (name, str(slots), "default", endpoints, *program)
    host = (sys.executable, str(HERE / "wmp_worker.py"))
    return Running(directory, *words, program=host, stderr=None)


def submit(client: InternalClient, manager: int, tasks: int) -> None:
    """Submit the managers' tasks: equal names, different payloads."""
    names = [b"task-%d" % number for number in range(tasks)]
    payloads = [b"%d-%d\n" % (manager, number) for number in range(tasks)]
    terms = [Terms(campaign=b"c", dialect=b"test")]
    client.create(Submission(names, payloads, terms))


def done(client: InternalClient) -> int:
    return int(client.status()["counts"]["done"])


def test_two_managers_two_chained_relays_four_workers_and_every_task_is_done_once(
    tmp_path: Path,
) -> None:
    luck = random.Random(11)
    with ExitStack() as stack:
        managers = [
            stack.enter_context(Manager(tmp_path / f"manager-{number}"))
            for number in range(MANAGERS)
        ]
        clients = [stack.enter_context(InternalClient(one.native)) for one in managers]
        upper = stack.enter_context(Relay(tmp_path, *[one.endpoint for one in managers]))
        relays = [upper, stack.enter_context(Relay(tmp_path, upper.endpoint))]
        crew = [
            stack.enter_context(worker(tmp_path, f"w{number}", relays[1].endpoint, *MARKING))
            for number in range(WORKERS)
        ]
        for number, client in enumerate(clients):
            submit(client, number, TASKS)
        for kill in range(1, KILLS + 1):
            goal = kill * MANAGERS * TASKS // (KILLS + 2)
            until(partial(_are_done, clients, goal), f"{goal} tasks done")
            place = luck.randrange(len(relays))
            relays[place] = stack.enter_context(relays[place].restarted(tmp_path))
        until(partial(_are_done, clients, MANAGERS * TASKS), "all tasks done")
        for number, client in enumerate(clients):
            results = [client.output(f"c/task-{index}", "result") for index in range(TASKS)]
            assert results == [b"%d-%d\n" % (number, index) for index in range(TASKS)]
        assert [one.terminate()[0] for one in crew] == [0] * WORKERS
        until(lambda: not any(client.workers() for client in clients), "the workers have left")
        assert [one.terminate()[0] for one in (*relays, *managers)] == [0] * 4
    for number in range(MANAGERS):
        tally, _ = count(tmp_path / f"manager-{number}")
        assert (tally.submitted, tally.done, tally.completed_twice) == (TASKS, TASKS, 0)
    # A report that was lost with a relay was sent again. No task ran twice.
    assert sorted(marks(tmp_path)) == sorted(set(marks(tmp_path)))
    assert len(marks(tmp_path)) == MANAGERS * TASKS


def test_relays_side_by_side_and_one_of_them_is_lost_for_good(tmp_path: Path) -> None:
    with ExitStack() as stack:
        manager = stack.enter_context(Manager(tmp_path / "manager"))
        client = stack.enter_context(InternalClient(manager.native))
        relays = [stack.enter_context(Relay(tmp_path, manager.endpoint)) for _ in range(2)]
        endpoints = ",".join(one.endpoint for one in relays)
        stack.enter_context(worker(tmp_path, "w", endpoints, *MARKING, slots=4))
        submit(client, 0, TASKS)
        until(partial(_are_done, [client], TASKS // 3), "some tasks done")
        relays[0].kill()
        until(partial(_are_done, [client], TASKS), "all tasks done")
        assert manager.terminate()[0] == 0
    tally, _ = count(tmp_path / "manager")
    assert (tally.submitted, tally.done, tally.completed_twice) == (TASKS, TASKS, 0)
    assert sorted(marks(tmp_path)) == sorted(f"0-{number}" for number in range(TASKS))


def test_manager_that_is_killed_and_restarted_finds_its_workers_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        manager = stack.enter_context(Manager(tmp_path / "manager"))
        relay = stack.enter_context(Relay(tmp_path, manager.endpoint))
        for number, endpoint in enumerate((relay.endpoint, manager.endpoint)):
            stack.enter_context(worker(tmp_path, f"w{number}", endpoint, *MARKING))
        client = stack.enter_context(InternalClient(manager.native))
        until(lambda: len(client.workers()) == 2, "both workers are registered")
        manager.kill()
        manager = stack.enter_context(Manager(tmp_path / "manager", manager.endpoint))
        submit(client, 0, TASKS)
        until(partial(_are_done, [client], TASKS // 3), "some tasks done")
        manager.kill()
        manager = stack.enter_context(Manager(tmp_path / "manager", manager.endpoint))
        until(partial(_are_done, [client], TASKS), "all tasks done")
        assert manager.terminate()[0] == 0
    tally, _ = count(tmp_path / "manager")
    assert (tally.submitted, tally.done, tally.completed_twice) == (TASKS, TASKS, 0)
    assert sorted(marks(tmp_path)) == sorted(f"0-{number}" for number in range(TASKS))


def wakes(poller: zmq.Poller, wait_ms: int) -> list[tuple[zmq.Socket[bytes], Sent]]:
    """Return the workers that get a WAKE in time. A slow manager sends other messages too."""
    called = []
    for _ in range(max(1, wait_ms // 50)):
        for socket, _ in poller.poll(50):
            message = read(socket.recv_multipart())
            if message.command == "WAKE":
                called.append((socket, message))
    return called


def first_wakes(poller: zmq.Poller) -> list[tuple[zmq.Socket[bytes], Sent]]:
    while not (called := wakes(poller, 0)):
        pass
    return called


def test_hundred_ready_workers_and_one_task_make_one_wake(tmp_path: Path) -> None:
    with ExitStack() as stack:
        manager = stack.enter_context(Manager(tmp_path / "manager"))
        relay = stack.enter_context(Relay(tmp_path, manager.endpoint))
        client = stack.enter_context(InternalClient(manager.native))
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        poller = zmq.Poller()
        crowd = [context.socket(zmq.DEALER) for _ in range(100)]
        for number, socket in enumerate(crowd):
            stack.callback(socket.close, 0)
            socket.connect((relay.endpoint, manager.endpoint)[number % 2])
            socket.send_multipart(frames("READY", {"worker": f"w{number}"}))
            poller.register(socket, zmq.POLLIN)
        until(lambda: len(client.workers()) == 100, "all are registered")
        submit(client, 0, 1)
        ((woken, wake),) = first_wakes(poller)
        # The WAKE is answered, so no other worker gets one, even when the task is overdue.
        name = f"w{crowd.index(woken)}"
        back = {"back": wake.headers["back"]} if "back" in wake.headers else {}
        woken.send_multipart(frames("GIVE", {"worker": name, "request": 1, **back}))
        take = read(woken.recv_multipart())
        assert (take.command, take.payload) == ("TAKE", b"0-0\n")
        assert wakes(poller, 1_500) == []
        task = take.headers["task"]
        message = {"worker": name, "task": task, "attempt": 1, "status": "ok", **back}
        woken.send_multipart(frames("DONE", message, b"result"))
        until(partial(_are_done, [client], 1), "it is done")
        assert client.output(task, "result") == b"result"


def _are_done(clients: list[InternalClient], goal: int) -> bool:
    return sum(map(done, clients)) >= goal
