"""A WMP worker with one slot. It turns the payload of each task into capitals.

    pip install pyzmq
    python wmp_worker.py tcp://127.0.0.1:6014 [KEYFILE]

The protocol is docs/dialects/wmp.md. The endpoint is that of a broker or of a relay.
"""
# ruff: noqa: INP001  # it stands alone

import json
import os
import signal
import socket
import sys
import time
import tomllib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zmq

READY, WAKE, GIVE, TAKE, NO, DONE, STATUS, CANCEL, PING, PONG, BYE = (
    bytes([number]) for number in range(1, 12)
)
LOCK_SECONDS = 5
PING_SECONDS = 1

Headers = dict[str, Any]


def work(payload: bytes) -> bytes:
    """Return the result of a task. An exception is reported as its failure."""
    return payload.upper()


class Worker:
    """A connection, and the task that is held."""

    def __init__(self, endpoint: str, key: Headers) -> None:
        name = f"{socket.gethostname()}-{os.getpid()}"
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 1000
        if key:
            self.socket.curve_serverkey = key["broker"].encode()
            self.socket.curve_secretkey = key["secret"].encode()
            self.socket.curve_publickey = zmq.curve_public(key["secret"].encode())
            name = f"{key['name']}/{name}"  # a key is valid for names below its own
        self.refused = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self.socket.connect(endpoint)
        #: Part of every message. An incarnation is different for each process of a name.
        self.own: Headers = {"worker": name, "incarnation": time.time_ns()}
        self.pool = ThreadPoolExecutor(1)
        #: The end of a task wakes the loop up, through this pipe.
        self.task_ended, self.end_task = os.pipe()
        self.poller = zmq.Poller()
        for source in (self.socket, self.task_ended, self.refused):
            self.poller.register(source, zmq.POLLIN)
        #: The task with its route, and its result to come.
        self.held: tuple[Headers, Future[bytes]] | None = None
        #: The number of the last GIVE, and the time when its lock of the slot ends.
        self.request, self.locked_until = 0, 0.0
        #: The routes to the managers: one, or behind a relay one for each `back`.
        self.routes: dict[str, Headers] = {}
        self.ping_at = 0.0

    def send(self, command: bytes, *payload: bytes, **headers: object) -> None:
        text = json.dumps(self.own | headers).encode()
        self.socket.send_multipart([b"", b"WMP01", command, text, *payload])

    def send_held(self, command: bytes, route: Headers) -> None:
        """Send a heartbeat. A task of this manager that it does not list goes to another worker."""
        task = self.held[0] if self.held else {}
        is_its = bool(task) and task.get("back") == route.get("back")
        held = [[task["task"], task["attempt"]]] if is_its else []
        self.send(command, held=held, heartbeat_ms=1000 * PING_SECONDS, **route)

    def send_ready(self) -> None:
        self.send(READY, slots=1, heartbeat_ms=1000 * PING_SECONDS)

    def tick(self) -> None:
        """Report a task that has ended, and send a heartbeat if it is due."""
        if self.held and self.held[1].done():
            task, result = self.held
            self.held = None
            error = result.exception()
            status, payload = ("error", str(error).encode()) if error else ("ok", result.result())
            self.send(DONE, payload, status=status, **task)
            self.send_ready()
        if time.monotonic() >= self.ping_at:
            for route in list(self.routes.values()) or [{}]:  # without `back`: to all managers
                self.send_held(PING, route)
            self.ping_at = time.monotonic() + PING_SECONDS

    def receive(self, command: bytes, headers: Headers, payload: bytes) -> None:
        route: Headers = {name: headers[name] for name in ("back", "manager") if name in headers}
        self.routes[str(headers.get("back"))] = route
        task: Headers = {name: headers[name] for name in ("task", "attempt") if name in headers}
        task |= route
        if command == WAKE and not self.held and time.monotonic() >= self.locked_until:
            self.request, self.locked_until = self.request + 1, time.monotonic() + LOCK_SECONDS
            self.send(GIVE, request=self.request, **route)
        elif command in (TAKE, NO):
            self.locked_until = 0.0
        elif command == PING:
            self.send_held(PONG, route)
        elif command == CANCEL and self.held and self.held[0] == task:
            self.held = None  # a thread can't be stopped: its result is dropped
            self.send(DONE, status="cancelled", **task)
            self.send_ready()
        if command == TAKE and self.held:
            self.send(DONE, status="refused", **task)
        elif command == TAKE:
            result = self.pool.submit(work, payload)
            result.add_done_callback(lambda _: os.write(self.end_task, b"."))
            self.held = task, result
        elif headers.get("ready") is False and not self.held:
            self.locked_until = 0.0  # the manager was restarted: a GIVE is lost, too
            self.send_ready()

    def run(self) -> None:
        """Serve until a BYE. The connection outlives restarts of the broker."""
        self.send_ready()
        while True:
            self.tick()
            sources = dict(self.poller.poll(1000 * PING_SECONDS))
            if self.refused in sources:
                sys.exit("the broker refused the key")
            if self.task_ended in sources:
                os.read(self.task_ended, 100)
            if self.socket not in sources:
                continue
            _, _, command, text, *payload = self.socket.recv_multipart()
            headers = json.loads(text)
            if command == BYE and headers.get("code") != "name-held":
                sys.exit(headers.get("code") and headers.get("reason"))
            self.receive(command, headers, b"".join(payload))


def main(endpoint: str, key_file: str = "") -> None:
    worker = Worker(endpoint, tomllib.loads(Path(key_file).read_text()) if key_file else {})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        worker.run()
    except KeyboardInterrupt:
        worker.send(BYE, reason="the worker was stopped")  # its task goes to another worker


if __name__ == "__main__":
    main(*sys.argv[1:])
