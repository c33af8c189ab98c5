"""A simulated PostgreSQL, for the product's own store: tables, sessions, and how they fail.

Executes the statements of `journal.postgres` by their text, each at one instant. The conditions on
the leader's row are read from the text, so that a statement without one changes what it should
not. A statement is delayed before and after that instant. A connection is lost before it, after
it, or so that the server executes it later. A row may be visible and not yet on the standby of the
server: a failover loses it. Rows that no failover can lose are reported to the checkers.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
from msgspec import Struct
from psycopg.errors import UniqueViolation

from simulator.models import Violation
from simulator.plan import MILLISECOND_NS
from simulator.threads import Event
from taskyard.journal import chain
from taskyard.journal.chain import Head, Row
from taskyard.journal.postgres import database as product_database
from taskyard.journal.postgres import store as product_store
from taskyard.journal.postgres.leader import LeaderRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from random import Random

    from simulator.threads import ThreadedProcess, Threads

    Values = Mapping[str, Any] | Sequence[Any] | None
    Rows = list[tuple[Any, ...]]

#: A round trip in a quick network.
LATENCY_NS: Final = MILLISECOND_NS // 4

#: A condition on a column of the leader's row, and any placeholder.
_CONDITION: Final = re.compile(r"\b(epoch|holder|renewal) = %(?:\((\w+)\))?s")
_PLACEHOLDER: Final = re.compile(r"%(?:\(\w+\))?[sb]")


class StoreFaults(Struct):
    """Probabilities per statement. All zero: no faults."""

    delay: float = 0.0
    delay_ns_max: int = 1
    #: Further delays of renewals and releases, and of statements of a compaction.
    renewal_delay: float = 0.0
    renewal_delay_ns_max: int = 1
    compaction_delay: float = 0.0
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


class Statement(Struct):
    """A statement as its text describes it."""

    kind: str
    #: Whether the epoch of the leader's row rises.
    is_new_term: bool
    #: Columns of the leader's row, and the names or places of the values that they must have.
    conditions: list[tuple[str, str | int]]


#: Statements by a part of their text.
_KINDS: Final = {
    "INSERT INTO taskyard.journal ": "append",
    "DELETE FROM taskyard.journal ": "trim",
    "INSERT INTO taskyard.claims ": "claim",
    "INSERT INTO taskyard.meta SELECT 'covered'": "cover",
    "DELETE FROM taskyard.claims ": "unclaim",
    "UPDATE taskyard.leader SET epoch = epoch": "take",
    "UPDATE taskyard.leader SET renewal = renewal + 1": "renew",
    "UPDATE taskyard.leader SET holder = ''": "release",
    "DELETE FROM taskyard.files WHERE upload NOT IN": "remove_unclaimed",
    "INSERT INTO taskyard.files ": "insert_part",
    "SELECT content FROM taskyard.files ": "read_part",
    "INSERT INTO taskyard.finished ": "upsert_finished",
    "INSERT INTO taskyard.outputs ": "upsert_output",
    "SELECT * FROM taskyard.finished ": "read_finished",
    "SELECT * FROM taskyard.outputs": "read_outputs",
    "FROM taskyard.claims ORDER BY name": "read_claims",
    "FROM taskyard.meta WHERE key = 'anchor'": "read_anchor",
    "FROM taskyard.meta WHERE key = 'covered'": "read_covered",
    "FROM taskyard.meta WHERE key = 'format'": "read_format",
    "to_regclass('taskyard.meta')": "exists",
    "SELECT epoch, holder, renewal, lease_ns FROM taskyard.leader": "read_leader",
    product_store._PORTION: "read_portion",  # noqa: SLF001  # executed as it is
    product_store._ONE: "read_one",  # noqa: SLF001
    product_store._HEAD: "read_head",  # noqa: SLF001
    product_store._HOLDING: "read_holding",  # noqa: SLF001
    product_store._NEWEST: "read_newest",  # noqa: SLF001
}


def parse(text: str) -> Statement:
    """Find out what a statement of the product does."""
    kind = next((kind for part, kind in _KINDS.items() if part in text), None)
    if kind is None:
        raise Violation("unknown statement", text)
    conditions: list[tuple[str, str | int]] = []
    where = text.find(" WHERE ")
    for found in _CONDITION.finditer(text, where) if where > 0 else ():
        place = len(_PLACEHOLDER.findall(text[: found.start(0)]))
        conditions.append((found[1], found[2] or place))
    return Statement(kind, "epoch = epoch + 1" in text, conditions)


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
        identity = rng.randbytes(chain.IDENTITY_BYTES)
        self.leader = LeaderRow(0, "", 0, 0)
        self.rows: dict[int, Row] = {}
        self.meta = {
            "format": b"%d" % product_database.FORMAT,
            "anchor": chain.seal(identity, Head(0, 0, chain.origin(identity))),
        }
        self._claims: dict[str, tuple[Any, ...]] = {}
        self._files: dict[tuple[str, int], bytes] = {}
        self._finished: dict[bytes, tuple[Any, ...]] = {}
        self._outputs: dict[tuple[bytes, int], tuple[Any, ...]] = {}
        #: Rows that the standby of the server has not, and their turns.
        self._unconfirmed: list[tuple[Row, Any]] = []
        self._statements: dict[str, Statement] = {}
        self._connections: list[SimConnection] = []
        #: Rises with each server. Statements of former ones are never executed.
        self.server = 0
        self.is_down = False
        #: Called with the epoch of each new term.
        self.on_taken: Callable[[int], None] = lambda _epoch: None
        #: Called in a process that is about to write.
        self.on_write: Callable[[ThreadedProcess], None] = lambda _process: None

    @property
    def head_chain(self) -> bytes:
        """Return the chain of the newest row."""
        newest = next(reversed(self.rows.values()), None)
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
        """Cut all connections, or those of one process."""
        for connection in self._connections:
            if process is None or connection.process is process:
                connection.cut()

    def stop(self) -> None:
        """End the server. Rows that its standby has not got are lost."""
        self.server += 1
        self.is_down = True
        for row, _ in self._unconfirmed:
            del self.rows[row.sequence]
        self._unconfirmed = []
        self.cut()

    def start(self) -> None:
        """Continue with the standby of the server."""
        self.is_down = False

    # Statements.

    def parsed(self, text: str) -> Statement:
        found = self._statements.get(text)
        if found is None:
            found = self._statements[text] = parse(text)
        return found

    def execute(
        self, statement: Statement, values: Values, turn: object, *, confirms: bool
    ) -> tuple[Rows, int]:
        """Execute a statement. Return its rows and how many it changed.

        `confirms` is whether the standby has it when that is done.
        """
        if not self._meets(statement.conditions, values):
            return [], 0
        found = getattr(self, f"_{statement.kind}")(values)
        if statement.kind == "append":
            self._unconfirmed.append((next(reversed(self.rows.values())), turn))
        if statement.kind == "take":
            self._begin_term(self.leader.epoch + statement.is_new_term)
            found = [(self.leader.epoch,)]
        if confirms and statement.kind in _WRITES:
            self.confirm()
        return found, len(found)

    def confirm(self) -> None:
        """Let the standby have everything."""
        confirmed, self._unconfirmed = self._unconfirmed, []
        for row, turn in confirmed:
            self._on_durable(row, turn)

    def _meets(self, conditions: list[tuple[str, str | int]], values: Values) -> bool:
        row = self.leader._asdict()
        return all(row[column] == values[key] for column, key in conditions)  # type: ignore[index]

    def _check_term(self, values: Mapping[str, Any], kind: str) -> None:
        """Require that the writer has the term, whatever its statement checked."""
        term = (values["epoch"], values["holder"])
        if term != (self.leader.epoch, self.leader.holder):
            raise Violation(
                "stale write",
                f"{kind} of epoch {term[0]} in epoch {self.leader.epoch} of "
                f"{self.leader.holder or 'no holder'}",
            )

    # Writes under a term. Each returns as many rows as it changed.

    def _append(self, values: Mapping[str, Any]) -> Rows:
        sequence = values["sequence"]
        if sequence in self.rows:
            raise UniqueViolation(f"row {sequence} exists")
        self._check_term(values, "append")
        newest = max(self.rows, default=self._anchor.sequence)
        if sequence != newest + 1:
            raise Violation("chain", f"row {sequence} follows row {newest}")
        fields = [values[name] for name in Row.__struct_fields__]
        self.rows[sequence] = Row(*fields)
        return [()]

    def _trim(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "trim")
        gone = [sequence for sequence in self.rows if sequence <= values["through"]]
        size = sum(len(self.rows.pop(sequence).body) for sequence in gone)
        self.meta["anchor"] = values["anchor"]
        return [(size,)]

    def _claim(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "claim")
        columns = (values[name] for name in ("names", "uploads", "sizes", "digests"))
        found = [*zip(*columns, strict=True)]
        self._claims.update({claim[0]: claim for claim in found})
        return found

    def _cover(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "cover")
        self.meta["covered"] = values["covered"]
        return [()]

    def _unclaim(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "unclaim")
        return [self._claims.pop(values["name"])]

    def _take(self, values: Sequence[Any]) -> Rows:
        holder, lease_ns, *seen = values
        if seen != [*self.leader[:3]]:
            raise Violation("stale write", f"a take of {seen}, but the row is {self.leader[:3]}")
        renewal = self.leader.renewal + 1
        self.leader = LeaderRow(self.leader.epoch, holder, renewal, lease_ns)
        return []

    def _begin_term(self, epoch: int) -> None:
        if epoch <= self.leader.epoch:
            raise Violation("epoch", f"epoch {epoch} follows epoch {self.leader.epoch}")
        self.leader = self.leader._replace(epoch=epoch)
        self.confirm()
        self.on_taken(epoch)

    def _renew(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "renewal")
        self.leader = self.leader._replace(renewal=self.leader.renewal + 1)
        return [()]

    def _release(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "release")
        self.leader = self.leader._replace(holder="", renewal=self.leader.renewal + 1)
        return [()]

    # Other writes.

    def _remove_unclaimed(self, _values: Values) -> Rows:
        uploads = {claim[1] for claim in self._claims.values()}
        self._files = {key: part for key, part in self._files.items() if key[0] in uploads}
        return []

    def _insert_part(self, values: Sequence[Any]) -> Rows:
        self._files[values[0], values[1]] = values[2]
        return [()]

    def _upsert_finished(self, values: Sequence[Any]) -> Rows:
        known = self._finished.get(values[0])
        if known is None or values[6] > known[6]:
            self._finished[values[0]] = tuple(values)
        return [()]

    def _upsert_output(self, values: Sequence[Any]) -> Rows:
        self._outputs[values[0], values[1]] = tuple(values)
        return [()]

    # Reads.

    @property
    def _anchor(self) -> Head:
        sealed = chain.unseal(self.meta["anchor"])
        if sealed is None:
            raise Violation("chain", "the anchor is damaged")
        return sealed[1]

    def _exists(self, _values: Values) -> Rows:
        return [(True,)]

    def _meta(self, key: str) -> Rows:
        return [(self.meta[key],)] if key in self.meta else []

    def _read_anchor(self, _values: Values) -> Rows:
        return self._meta("anchor")

    def _read_covered(self, _values: Values) -> Rows:
        return self._meta("covered")

    def _read_format(self, _values: Values) -> Rows:
        return self._meta("format")

    def _read_leader(self, _values: Values) -> Rows:
        return [tuple(self.leader)]

    def _read_portion(self, values: Mapping[str, Any]) -> Rows:
        found = [
            _columns(row)
            for sequence, row in self.rows.items()
            if values["after"] < sequence <= values["last"]
        ]
        return found[: values["count"]]

    def _read_one(self, values: Mapping[str, Any]) -> Rows:
        row = self.rows.get(values["sequence"])
        return [] if row is None else [_columns(row)]

    def _read_head(self, values: Mapping[str, Any]) -> Rows:
        row = self.rows.get(values["sequence"])
        return [] if row is None else [(row.record_last, row.chain)]

    def _read_holding(self, values: Mapping[str, Any]) -> Rows:
        found = [row for row in self.rows.values() if row.record_last >= values["record"]]
        return [(found[0].sequence,)] if found else []

    def _read_newest(self, _values: Values) -> Rows:
        newest = next(reversed(self.rows.values()), None)
        return [] if newest is None else [(newest.sequence, newest.record_last, newest.chain)]

    def _read_claims(self, _values: Values) -> Rows:
        return [self._claims[name] for name in sorted(self._claims)]

    def _read_part(self, values: Sequence[Any]) -> Rows:
        found = self._files.get((values[0], values[1]))
        return [] if found is None else [(found,)]

    def _read_finished(self, values: Sequence[Any]) -> Rows:
        return [row for row in self._finished.values() if row[6] > values[0]]

    def _read_outputs(self, _values: Values) -> Rows:
        return [*self._outputs.values()]


_WRITES: Final = (
    *("append", "trim", "claim", "cover", "unclaim", "take", "renew", "release"),
    *("remove_unclaimed", "insert_part", "upsert_finished", "upsert_output"),
)


_OF_LEASE: Final = ("renew", "release")
_OF_COMPACTION: Final = ("trim", "claim", "cover", "unclaim")


def _columns(row: Row) -> tuple[Any, ...]:
    return (row.sequence, row.record_first, row.record_last, row.chain, row.body)


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
        self.rows: Rows = []
        self.rowcount = 0
        self.error: psycopg.Error | None = None
        self.answered = Event(connection.database.threads)

    def perform(self) -> None:
        """Execute the statement, unless the server has ended."""
        if self.database.server == self._server:
            try:
                self.rows, self.rowcount = self.database.execute(
                    self.statement, self._values, self._turn, confirms=self._confirms
                )
            except UniqueViolation as error:
                self.error = error
        self.answered.set()

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

    def transaction(self) -> nullcontext[None]:
        return nullcontext()

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
        if kind in _WRITES:
            database.on_write(self.process)
        fate = database.rng.random()
        is_late = fate < faults.cut_late and kind in _WRITES
        is_cut_before = not is_late and fate < faults.cut_late + faults.cut_before
        is_cut_after = database.rng.random() < faults.cut_after
        is_append = kind == "append"
        is_unconfirmed = is_cut_after and is_append and self._chance(faults.unconfirmed)
        is_warned = is_append and not is_cut_after and self._chance(faults.warning)
        confirms = not (is_unconfirmed or is_warned)
        request = _Request(self, text, values, confirms=confirms)
        if is_late:
            delay_ns = database.rng.randrange(faults.late_ns_max) + 1
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
            for notify in self._notify:
                notify(SimpleNamespace(severity_nonlocalized="WARNING"))
        return request

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
        if kind in _OF_LEASE and self._chance(faults.renewal_delay):
            delay_ns += rng.randrange(faults.renewal_delay_ns_max)
        if kind in _OF_COMPACTION and self._chance(faults.compaction_delay):
            delay_ns += rng.randrange(faults.late_ns_max)
        return delay_ns

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.database.rng.random() < probability

    def _check_lost(self) -> None:
        if self.is_lost:
            self.closed = True
            raise psycopg.OperationalError("the connection is lost")


class _Cursor:
    """A cursor. Its rows are those of its last statement."""

    def __init__(self, connection: SimConnection) -> None:
        self._connection = connection
        self._rows: Rows = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows = []

    def execute(self, text: str, values: Values = None) -> None:
        self._rows = self._connection.execute(text, values).fetchall()

    def executemany(self, text: str, rows: Sequence[Values]) -> None:
        for values in rows:
            self._connection.execute(text, values)

    def fetchmany(self, count: int) -> Rows:
        found, self._rows = self._rows[:count], self._rows[count:]
        return found
