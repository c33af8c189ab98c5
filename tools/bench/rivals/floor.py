"""Measure what sockets and the disk alone cost: a round trip, and a commit on a warm log.

From submit to result a durable task needs two of each, in memory two round trips. So the latency of
a broker over these is the part that is its own, on any machine.
"""

import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Final

from msgspec import Struct

from bench.peers import BrokerLink
from bench.processes import BrokerBench
from taskyard.wire import dwork_pb2 as pb

#: Rows of a turn with one task have about so many bytes.
_ROW_BYTES: Final = 300
#: Commits before the log is warm: it is overwritten from then on.
_COLD: Final = 3_000
_WARM: Final = 2_000


class Floor(Struct, frozen=True):
    """Medians in milliseconds."""

    round_trip: float
    commit: float

    @property
    def durable(self) -> float:
        return 2 * (self.round_trip + self.commit)

    @property
    def in_memory(self) -> float:
        return 2 * self.round_trip


def measure(count: int) -> Floor:
    """Measure both, one after the other."""
    return Floor(_round_trip(count), _commit(min(count, _WARM)))


def _round_trip(count: int) -> float:
    body = pb.QueryMsg(type=pb.QueryMsg.Steal, location=b"peer").SerializeToString()
    waits_ns = []
    with BrokerBench("echo") as bench, closing(BrokerLink(bench.endpoint)) as link:
        for _ in range(count):
            since_ns = time.perf_counter_ns()
            link.send(body)
            link.receive()
            waits_ns.append(time.perf_counter_ns() - since_ns)
    return median(waits_ns) / 1e6


def _commit(count: int) -> float:
    waits_ns, row = [], bytes(_ROW_BYTES)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        path = Path(directory) / "log.sqlite"
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for pragma in ("journal_mode=wal", "synchronous=full", "wal_autocheckpoint=0"):
                connection.execute(f"pragma {pragma}").fetchall()
            connection.execute("create table rows (number integer primary key, body blob)")
            for number in range(_COLD + count):
                if number == _COLD:
                    connection.execute("pragma wal_checkpoint(restart)").fetchall()
                since_ns = time.perf_counter_ns()
                connection.execute("insert into rows (body) values (?)", (row,))
                waits_ns.append(time.perf_counter_ns() - since_ns)
    return median(waits_ns[_COLD:]) / 1e6
