"""A simulated PostgreSQL, for the product's own store: a server, its sessions, and how they fail.

Each statement is executed at one instant (`tables`). It is delayed before and after. A connection
is lost before the statement, after it, or so that the server executes it later. A row may be
visible and not yet on the standby of the server: a failover loses it. Rows that no failover can
lose are reported to the checkers.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
from msgspec import Struct
from psycopg.errors import UniqueViolation

from simulator.blob_tables import UNHELD
from simulator.plan import MILLISECOND_NS
from simulator.tables import OF_COMPACTION, OF_LEASE, WRITES, Statement, Tables, parse
from simulator.threads import Event
from taskyard.journal import chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from random import Random

    from simulator.tables import Rows, Values
    from simulator.threads import ThreadedProcess, Threads
    from taskyard.journal.chain import Row

#: A round trip in a quick network.
LATENCY_NS: Final = MILLISECOND_NS // 4


class StoreFaults(Struct):
    """Probabilities per statement. All zero: no faults."""

    delay: float = 0.0
    delay_ns_max: int = 1
    #: Further delays of renewals and releases, and of statements of a compaction.
    renewal_delay: float = 0.0
    renewal_delay_ns_max: int = 1
    compaction_delay: float = 0.0
    #: The connection is lost at a trim, which the server executes later: perhaps after the next.
    trim_late: float = 0.0
    #: The longest of them, and when a statement is executed whose connection was lost.
    late_ns_max: int = 1
    #: The connection is lost: before the statement, after it, or the server executes it later.
    cut_before: float = 0.0
    cut_after: float = 0.0
    cut_late: float = 0.0
    #: An append of which the standby has nothing yet, if its connection is lost.
    unconfirmed: float = 0.0
    #: The same without a lost connection: an administrator cancelled the wait for the standby.
    warning: float = 0.0


class SimDatabase:
    """The tables, and the server that has them."""

    def __init__(
        self,
        threads: Threads,
        rng: Random,
        faults: StoreFaults,
        on_durable: Callable[[Row, Any], None],
    ) -> None:
        """`on_durable` gets each row that nothing can lose any more, with the turn it is of."""
        self.threads = threads
        self.rng = rng
        self.faults = faults
        self._on_durable = on_durable
        self.tables = Tables(rng.randbytes(chain.IDENTITY_BYTES))
        #: Rows that the standby of the server has not, and their turns.
        self._unconfirmed: list[tuple[Row, Any]] = []
        #: The newest row that is among them, or was.
        self._reported = 0
        #: When the last statement so far ends.
        self.busy_until_ns = 0
        self._statements: dict[str, Statement] = {}
        self._connections: list[SimConnection] = []
        #: Rises with each server. Statements of former servers are never executed.
        self.server = 0
        self.is_down = False
        #: Called with the epoch of each new term.
        self.on_taken: Callable[[int], None] = lambda _epoch: None
        #: Called in a process that is about to write.
        self.on_write: Callable[[ThreadedProcess], None] = lambda _process: None

    @property
    def head_chain(self) -> bytes:
        """Return the chain of the newest row."""
        newest = next(reversed(self.tables.rows.values()), None)
        return b"" if newest is None else newest.chain

    # Sessions.

    def connect(self, _url: str) -> SimConnection:
        process = self.threads.running().process
        process.check_alive()
        self.threads.running().wait_ns(LATENCY_NS)
        if self.is_down:
            raise psycopg.OperationalError("connection refused")
        connection = SimConnection(self, process)
        self._connections = [one for one in self._connections if not one.is_lost]
        self._connections.append(connection)
        return connection

    def cut(self, process: ThreadedProcess | None = None) -> None:
        """Cut all connections, or one process's."""
        for connection in self._connections:
            if process is None or connection.process is process:
                connection.cut()

    def stop(self) -> None:
        """End the server. Rows that its standby has not got are lost."""
        self.server += 1
        self.is_down = True
        for row, _ in self._unconfirmed:
            del self.tables.rows[row.sequence]
            self._reported = min(self._reported, row.sequence - 1)
        self._unconfirmed = []
        self.cut()

    def start(self) -> None:
        """Continue with the standby of the server."""
        self.is_down = False

    def note_delay(self, delay_ns: int) -> None:
        """Note how long a statement, or its reply, will be on the way."""
        self.busy_until_ns = max(self.busy_until_ns, self.threads.timeline.now_ns + delay_ns)

    # Statements.

    def parsed(self, text: str) -> Statement:
        found = self._statements.get(text)
        if found is None:
            found = self._statements[text] = parse(text)
        return found

    def execute(
        self, statement: Statement, values: Values, turn: object, *, confirms: bool
    ) -> Rows:
        """Execute a statement. Return its rows, or as many as it changed.

        `confirms` is whether the standby has it when that is done.
        """
        found = self.tables.execute(statement, values)
        if not found or statement.kind not in WRITES:
            return found
        if found == UNHELD.get(statement.kind):
            return found  # it changed nothing
        newest = next(reversed(self.tables.rows.values()), None)
        if statement.kind == "append" and newest is not None and newest.sequence > self._reported:
            self._reported = newest.sequence
            self._unconfirmed.append((newest, turn))
        if confirms:
            self.confirm()
        if statement.kind == "take":
            self.on_taken(self.tables.leader.epoch)
        return found

    def confirm(self) -> None:
        """Let the standby have everything."""
        confirmed, self._unconfirmed = self._unconfirmed, []
        for row, turn in confirmed:
            self._on_durable(row, turn)


class _Request:
    """A statement on its way to the server and back."""

    def __init__(
        self, connection: SimConnection, text: str, values: Values, *, confirms: bool
    ) -> None:
        self.database = connection.database
        self.statement = self.database.parsed(text)
        self._values = values
        self._confirms = confirms
        self._server = self.database.server
        self._turn = getattr(connection.process, "turn", None)
        #: Tables of one moment, if the statement is in a transaction that reads them.
        self._tables = connection.snapshot
        self.rows: Rows = []
        #: Stands for the columns, which every statement has here.
        self.description = ("column",)
        self.error: psycopg.Error | None = None
        self.answered = Event(connection.database.threads)

    def perform(self) -> None:
        """Execute the statement, unless the server has ended."""
        if self._tables is not None:
            self.rows = self._tables.execute(self.statement, self._values)
        elif self.database.server == self._server:
            try:
                self.rows = self.database.execute(
                    self.statement, self._values, self._turn, confirms=self._confirms
                )
            except UniqueViolation as error:
                self.error = error
        self.answered.set()

    @property
    def rowcount(self) -> int:
        return len(self.rows)

    def fetchall(self) -> Rows:
        return self.rows

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.rows)


class SimConnection:
    """A session of one process. Implements the product's part of psycopg's connection."""

    def __init__(self, database: SimDatabase, process: ThreadedProcess) -> None:
        self.database = database
        self.process = process
        self.closed = False
        #: Lost, which this side may not have noticed.
        self.is_lost = False
        #: The tables as of the start of a transaction, if it reads those.
        self.snapshot: Tables | None = None
        self._transactions = 0
        self._notify: list[Callable[[Any], None]] = []
        #: Ends what a call waits for.
        self._waits_for: Event | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = self.is_lost = True

    def cut(self) -> None:
        """Lose the connection. A call that waits for the server fails."""
        self.is_lost = True
        if self._waits_for is not None:
            self._waits_for.set()

    def add_notice_handler(self, notify: Callable[[Any], None]) -> None:
        self._notify.append(notify)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep a snapshot until the outermost transaction ends. Nothing is rolled back."""
        self._transactions += 1
        try:
            yield
        finally:
            self._transactions -= 1
            if not self._transactions:
                self.snapshot = None

    def cursor(self, _name: str = "", **_named: object) -> _Cursor:
        return _Cursor(self)

    def execute(
        self,
        text: str,
        values: Values = None,
        *,
        prepare: bool | None = None,
        binary: bool | None = None,
    ) -> _Request:
        """Run a statement, for as long as the faults of the server make it last."""
        del prepare, binary
        self.process.check_alive()
        self._check_lost()
        database, faults = self.database, self.database.faults
        kind = database.parsed(text).kind
        if kind == "snapshot":
            self.snapshot = database.tables.copied()
        if kind in WRITES:
            database.on_write(self.process)
        fate = database.rng.random()
        is_late = self._is_late(kind, fate)
        is_cut_before = not is_late and fate < faults.cut_late + faults.cut_before
        is_cut_after = database.rng.random() < faults.cut_after
        is_append = kind == "append"
        is_unconfirmed = is_cut_after and is_append and self._chance(faults.unconfirmed)
        is_warned = is_append and not is_cut_after and self._chance(faults.warning)
        confirms = not (is_unconfirmed or is_warned)
        request = _Request(self, text, values, confirms=confirms)
        if is_late:
            delay_ns = database.rng.randrange(faults.late_ns_max) + 1
            database.note_delay(delay_ns)
            database.threads.timeline.after(delay_ns, request.perform)
        if is_late or is_cut_before:
            self.is_lost = True
            self._check_lost()
        self._send(request, self._delay_ns(kind))
        if is_cut_after:
            self.is_lost = True
        self._wait(Event(database.threads), self._delay_ns(kind))
        self._check_lost()
        if request.error is not None:
            raise request.error
        if is_warned:
            # Every second session ends then, as after a crash of another process of the server.
            self.is_lost = isinstance(values, dict) and bool(values["sequence"] % 2)
            state = "57P02" if self.is_lost else "01000"
            for notify in self._notify:
                notify(SimpleNamespace(severity_nonlocalized="WARNING", sqlstate=state))
        return request

    def _is_late(self, kind: str, fate: float) -> bool:
        """Return whether the connection is lost and the server executes the statement later."""
        faults = self.database.faults
        is_late = fate < faults.cut_late and kind in WRITES
        if kind in OF_COMPACTION and self._chance(faults.compaction_delay / 2):
            is_late = True
        if kind == "trim" and self._chance(faults.trim_late):
            is_late = True
        return is_late

    def _send(self, request: _Request, delay_ns: int) -> None:
        """Let the server execute a statement, also if this process is killed meanwhile."""
        timeline = self.database.threads.timeline
        if timeline.skip_to(timeline.now_ns + delay_ns):
            request.perform()
            return
        timeline.after(delay_ns, request.perform)
        self._wait(request.answered, None)
        self._check_lost()

    def _wait(self, event: Event, delay_ns: int | None) -> None:
        """Wait for the server, until the connection is lost."""
        self._waits_for = event
        event.wait_ns(delay_ns)
        self._waits_for = None

    def _delay_ns(self, kind: str) -> int:
        faults, rng = self.database.faults, self.database.rng
        delay_ns = rng.randrange(LATENCY_NS) + 1
        if self._chance(faults.delay):
            delay_ns += rng.randrange(faults.delay_ns_max)
        if kind in OF_LEASE and self._chance(faults.renewal_delay):
            delay_ns += rng.randrange(faults.renewal_delay_ns_max)
        if kind in OF_COMPACTION and self._chance(faults.compaction_delay):
            delay_ns += rng.randrange(faults.late_ns_max)
        self.database.note_delay(delay_ns)
        return delay_ns

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.database.rng.random() < probability

    def _check_lost(self) -> None:
        if self.is_lost:
            self.closed = True
            raise psycopg.OperationalError("the connection is lost")


class _Cursor:
    """A cursor. The rows belong to its last statement."""

    def __init__(self, connection: SimConnection) -> None:
        self._connection = connection
        self._rows: Rows = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._rows = []

    def execute(self, text: str, values: Values = None) -> None:
        self._rows = self._connection.execute(text, values).fetchall()

    def executemany(self, text: str, rows: Sequence[Values]) -> None:
        for values in rows:
            self._connection.execute(text, values)

    @contextmanager
    def copy(self, text: str) -> Iterator[_Copy]:
        """Add rows at once, at the end."""
        made = _Copy()
        yield made
        self._connection.execute(text, made.rows)

    def fetchmany(self, count: int) -> Rows:
        found, self._rows = self._rows[:count], self._rows[count:]
        return found


class _Copy:
    """The rows of a COPY."""

    def __init__(self) -> None:
        self.rows: list[Sequence[Any]] = []

    def set_types(self, _types: Sequence[str]) -> None:
        pass

    def write_row(self, row: Sequence[Any]) -> None:
        self.rows.append(row)
