"""Connections to other servers, each in a few lines over a socket.

Owns the bytes of their protocols. A client library would cost more than some of the servers, and
its cost would be counted as theirs. Knows nothing about processes and measurements.
"""

import ctypes
import ctypes.util
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from bench.peers import BrokerLink
from taskyard.wire import dwork_pb2 as pb


class Link(Protocol):
    """A connection of a producer or a worker."""

    def submit(self, payloads: Sequence[bytes]) -> None:
        """Submit tasks and wait until the server has acknowledged all of them."""

    def exchange(self, done: Sequence[bytes], count: int) -> list[bytes]:
        """Report finished tasks and take at most `count` new tasks, in one round trip.

        Return the handles of the tasks taken. With a count of 0 wait until the reports are
        acknowledged.
        """


class Calls(Protocol):
    """A connection of a caller that waits for the result of one task, or of its worker."""

    def call(self, payload: bytes) -> None:
        """Submit a task and wait for its result."""

    def serve(self) -> None:
        """Wait for one task and send its result."""


class Takes(Protocol):
    """A connection of a worker that waits for single tasks."""

    def take(self, done: bytes) -> bytes:
        """Report a task, or none, and wait for the next. Return its handle."""

    def exchange(self, done: Sequence[bytes], count: int) -> list[bytes]:
        """Report the last task, with a count of 0."""


class Stream:
    """A TCP connection with a buffer for replies."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb", buffering=1 << 18)
        self.send = self._socket.sendall
        self.line = self._file.readline

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        if len(data) < size:
            raise ConnectionError("the server closed the connection")
        return data

    def expect(self, start: bytes) -> bytes:
        """Return the next line, which must start with these bytes."""
        line = self.line()
        if not line.startswith(start):
            raise RuntimeError(f"expected {start!r}, received {line!r}")
        return line


class Gearman:
    """gearmand's binary protocol. Batches are written at once: it has no message for many jobs."""

    CAN_DO, PRE_SLEEP, NOOP, SUBMIT_JOB, JOB_CREATED, GRAB_JOB = 1, 4, 6, 7, 8, 9
    NO_JOB, JOB_ASSIGN, WORK_COMPLETE, ECHO_REQ, ECHO_RES, SUBMIT_JOB_BG = 10, 11, 13, 16, 17, 18
    _HEAD: Final = struct.Struct(">4sII")

    def __init__(self, port: int, *, works: bool) -> None:
        self._stream = Stream(port)
        if works:
            self._stream.send(self._packet(self.CAN_DO, b"work"))

    def _packet(self, kind: int, data: bytes = b"") -> bytes:
        return self._HEAD.pack(b"\0REQ", kind, len(data)) + data

    def _receive(self) -> tuple[int, bytes]:
        _, kind, size = self._HEAD.unpack(self._stream.read(self._HEAD.size))
        return kind, self._stream.read(size) if size else b""

    def _expect(self, expected: int) -> bytes:
        kind, data = self._receive()
        if kind != expected:
            raise RuntimeError(f"expected packet {expected}, received {kind}: {data!r}")
        return data

    def submit(self, payloads: Sequence[bytes]) -> None:
        kind = self.SUBMIT_JOB_BG
        jobs = [self._packet(kind, b"work\0%b\0%b" % (payload, payload)) for payload in payloads]
        self._stream.send(b"".join(jobs))
        for _ in payloads:
            self._expect(self.JOB_CREATED)

    def exchange(self, done: Sequence[bytes], count: int) -> list[bytes]:
        # A report has no reply. The reply to a later packet shows that it has been read.
        packets = [self._packet(self.WORK_COMPLETE, handle + b"\0") for handle in done]
        packets += [self._packet(self.GRAB_JOB)] * count or [self._packet(self.ECHO_REQ, b"end")]
        self._stream.send(b"".join(packets))
        if not count:
            self._expect(self.ECHO_RES)
        replies = [self._receive() for _ in range(count)]
        return [data.split(b"\0", 1)[0] for kind, data in replies if kind == self.JOB_ASSIGN]

    def call(self, payload: bytes) -> None:
        self._stream.send(self._packet(self.SUBMIT_JOB, b"work\0\0" + payload))
        self._expect(self.JOB_CREATED)
        self._expect(self.WORK_COMPLETE)

    def serve(self) -> None:
        while not (taken := self.exchange([], 1)):
            self._stream.send(self._packet(self.PRE_SLEEP))
            self._expect(self.NOOP)
        self._stream.send(self._packet(self.WORK_COMPLETE, taken[0] + b"\0done"))


class Beanstalk:
    """beanstalkd's text protocol. Batches are written at once. Results have a tube of their own."""

    def __init__(self, port: int, *, works: bool) -> None:
        self._stream = Stream(port)
        self._stream.send(b"use results\r\n" if works else b"use tasks\r\n")
        self._stream.expect(b"USING")
        self._stream.send(b"watch tasks\r\n" if works else b"watch results\r\n")
        self._stream.expect(b"WATCHING")
        self._works = works

    def submit(self, payloads: Sequence[bytes]) -> None:
        jobs = [b"put 0 0 600 %d\r\n%b\r\n" % (len(one), one) for one in payloads]
        self._stream.send(b"".join(jobs))
        for _ in payloads:
            self._stream.expect(b"INSERTED")

    def exchange(self, done: Sequence[bytes], count: int) -> list[bytes]:
        deletes = [b"delete %b\r\n" % handle for handle in done]
        self._stream.send(b"".join(deletes) + b"reserve-with-timeout 0\r\n" * count)
        for _ in done:
            self._stream.expect(b"DELETED")
        replies = [self._reserved() for _ in range(count)]
        return [handle for handle in replies if handle]

    def _reserved(self) -> bytes:
        """Return the number of a reserved job, or b"" if there was none."""
        words = self._stream.line().split()
        if words[0] != b"RESERVED":
            return b""
        self._stream.read(int(words[2]) + 2)
        return words[1]

    def call(self, payload: bytes) -> None:
        self.submit([payload])
        self.serve()

    def serve(self) -> None:
        self._stream.send(b"reserve\r\n")
        handle = self._reserved()
        if self._works:
            self.submit([b"done"])
        self.exchange([handle], 0)


class Redis:
    """Redis lists: LMOVE to a list of the worker, LREM when the task is done."""

    def __init__(self, port: int, *, works: bool) -> None:
        del works
        self._stream = Stream(port)
        self._own = b"taken:%d" % os.getpid()

    @staticmethod
    def _command(*words: bytes) -> bytes:
        body = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
        return b"*%d\r\n%b" % (len(words), b"".join(body))

    def _bulk(self) -> bytes:
        """Return a string, or b"" for none."""
        size = int(self._stream.expect(b"$")[1:])
        return self._stream.read(size + 2)[:-2] if size >= 0 else b""

    def submit(self, payloads: Sequence[bytes]) -> None:
        self._stream.send(self._command(b"LPUSH", b"tasks", *payloads))
        self._stream.expect(b":")

    def exchange(self, done: Sequence[bytes], count: int) -> list[bytes]:
        removes = [self._command(b"LREM", self._own, b"1", payload) for payload in done]
        move = self._command(b"LMOVE", b"tasks", self._own, b"RIGHT", b"RIGHT")
        self._stream.send(b"".join(removes) + move * count)
        for _ in done:
            self._stream.expect(b":1")
        replies = [self._bulk() for _ in range(count)]
        return [payload for payload in replies if payload]

    def call(self, payload: bytes) -> None:
        self.submit([payload])
        self._stream.send(self._command(b"BLPOP", b"results", b"0"))
        self._stream.expect(b"*2")
        self._bulk()
        self._bulk()

    def take(self, done: bytes) -> bytes:
        remove = self._command(b"LREM", self._own, b"1", done) if done else b""
        move = self._command(b"BLMOVE", b"tasks", self._own, b"RIGHT", b"RIGHT", b"0")
        self._stream.send(remove + move)
        if done:
            self._stream.expect(b":1")
        return self._bulk()

    def serve(self) -> None:
        payload = self.take(b"")
        self._stream.send(self._command(b"LPUSH", b"results", b"done"))
        self._stream.expect(b":")
        self.exchange([payload], 0)


class Postgres:
    """A table and `FOR UPDATE SKIP LOCKED`, through libpq. The lock lasts until the commit."""

    _OK: Final = (1, 2)  # PGRES_COMMAND_OK, PGRES_TUPLES_OK

    def __init__(self, port: int, *, works: bool) -> None:
        self._pq = libpq()
        conninfo = f"host=127.0.0.1 port={port} dbname=postgres user=postgres"
        self._connection = self._pq.PQconnectdb(conninfo.encode())
        if self._pq.PQstatus(self._connection):
            raise ConnectionError(self._pq.PQerrorMessage(self._connection).decode().strip())
        if works:
            self.execute(b"BEGIN")

    def execute(self, sql: bytes) -> list[bytes]:
        """Run statements and return the first column of the last one's rows."""
        result = self._pq.PQexec(self._connection, sql)
        if self._pq.PQresultStatus(result) not in self._OK:
            raise RuntimeError(self._pq.PQerrorMessage(self._connection).decode().strip())
        get = self._pq.PQgetvalue
        rows = [get(result, row, 0) for row in range(self._pq.PQntuples(result))]
        self._pq.PQclear(result)
        return rows

    def create_table(self) -> None:
        self.execute(b"CREATE TABLE tasks (id bigserial PRIMARY KEY, payload text NOT NULL)")

    def close(self) -> None:
        self._pq.PQfinish(self._connection)

    def submit(self, payloads: Sequence[bytes]) -> None:
        rows = b",".join(b"('%b')" % payload for payload in payloads)
        self.execute(b"INSERT INTO tasks (payload) VALUES " + rows)

    def exchange(self, done: Sequence[bytes], count: int) -> list[bytes]:
        del done  # the commit deletes them
        if not count:
            return self.execute(b"COMMIT")
        return self.execute(
            b"COMMIT; BEGIN; DELETE FROM tasks WHERE id IN (SELECT id FROM tasks ORDER BY id"
            b" LIMIT %d FOR UPDATE SKIP LOCKED) RETURNING payload" % count
        )


def libpq() -> ctypes.CDLL:
    """Load libpq with the types of the functions in use."""
    pq = ctypes.CDLL(ctypes.util.find_library("pq"))
    pointer = ctypes.c_void_p
    pq.PQconnectdb.restype = pq.PQexec.restype = pointer
    pq.PQexec.argtypes = [pointer, ctypes.c_char_p]
    pq.PQerrorMessage.restype = pq.PQgetvalue.restype = ctypes.c_char_p
    pq.PQgetvalue.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    for function in (
        pq.PQresultStatus,
        pq.PQntuples,
        pq.PQclear,
        pq.PQerrorMessage,
        pq.PQstatus,
        pq.PQfinish,
    ):
        function.argtypes = [pointer]
    return pq


class Dwork:
    """dwork's own messages, with one request at a time. A message has as many tasks as a batch."""

    _Q: Final = pb.QueryMsg

    def __init__(self, endpoint: str, *, works: bool) -> None:
        del works
        self._link = BrokerLink(endpoint)
        self._location = b"peer-%d" % os.getpid()

    def _request(self, message: pb.QueryMsg) -> pb.QueryMsg:
        self._link.send(message.SerializeToString())
        reply = self._Q.FromString(self._link.receive())
        if reply.type == self._Q.Error:
            raise RuntimeError(f"the server refused: {reply.reason!r}")
        return reply

    def _task(self, name: bytes) -> bytes:
        return pb.TaskMsg(name=name, origin=self._location).SerializeToString()

    def submit(self, payloads: Sequence[bytes]) -> None:
        # A plain task has a name and no payload.
        tasks = [self._task(payload) for payload in payloads]
        self._request(self._Q(type=self._Q.Create, task=tasks))

    def exchange(self, done: Sequence[bytes], count: int) -> list[bytes]:
        kind = self._Q
        if done:
            tasks = [self._task(name) for name in done]
            self._request(kind(type=kind.Complete, location=self._location, task=tasks))
        if not count:
            return []
        reply = self._request(kind(type=kind.Steal, location=self._location, n=count))
        return [pb.TaskMsg.FromString(task).name for task in reply.task]


LINKS: Final[dict[str, Callable[..., Link]]] = {
    "gearmand": Gearman,
    "beanstalkd": Beanstalk,
    "redis": Redis,
    "postgres": Postgres,
    "dwork": Dwork,
}
CALLS: Final[dict[str, Callable[..., Calls]]] = {
    "gearmand": Gearman,
    "beanstalkd": Beanstalk,
    "redis": Redis,
}
TAKES: Final[dict[str, Callable[..., Takes]]] = {"redis": Redis}
