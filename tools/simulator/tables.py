"""The tables of a simulated PostgreSQL, and the product's statements on them.

Statements are known by their text (`parse`). The conditions on the leader's row are read from the
text, so that a statement without one changes what it should not. Each write under a term is also
checked without them: a stale write is a violation.
"""

from __future__ import annotations

import re
from copy import copy
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from psycopg.errors import UniqueViolation

from simulator import blob_tables
from simulator.models import Violation
from taskyard.journal import chain
from taskyard.journal.chain import Head, Row
from taskyard.postgresql import database, standby, store
from taskyard.postgresql.leader import LeaderRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Values = Mapping[str, Any] | Sequence[Any] | None
    Rows = list[tuple[Any, ...]]

#: A condition on a column of the leader's row, and any placeholder.
_CONDITION: Final = re.compile(r"\b(epoch|holder|renewal) = %(?:\((\w+)\))?s")
_KEY: Final = re.compile(r"FROM taskyard\.meta WHERE key = '(\w+)'")
_PLACEHOLDER: Final = re.compile(r"%(?:\(\w+\))?[sb]")


class Statement(Struct):
    """A statement as its text describes it."""

    kind: str
    #: The key of `taskyard.meta` that it reads, or empty.
    key: str
    #: Whether the epoch of the leader's row rises.
    is_new_term: bool
    #: Whether a value of `taskyard.meta` that is greater stays.
    keeps_greatest: bool
    #: Columns of the leader's row, and the names or positions of the values that they must have.
    conditions: list[tuple[str, str | int]]


#: Statements by a part of their text.
_KINDS: Final = {
    standby._POLL: "poll",  # noqa: SLF001  # executed as it is
    database.ONE_MOMENT: "snapshot",
    **blob_tables.KINDS,
    "INSERT INTO taskyard.journal ": "append",
    "DELETE FROM taskyard.journal ": "trim",
    "INSERT INTO taskyard.meta SELECT 'covered'": "cover",
    "INSERT INTO taskyard.meta SELECT 'files'": "set_files",
    "UPDATE taskyard.leader SET epoch = epoch": "take",
    "UPDATE taskyard.leader SET renewal = renewal + 1": "renew",
    "UPDATE taskyard.leader SET holder = ''": "release",
    "UPDATE taskyard.leader SET host = ": "show",
    "INSERT INTO taskyard.standbys ": "report_standby",
    "DELETE FROM taskyard.standbys ": "remove_standby",
    "FROM taskyard.standbys ORDER BY": "read_standbys",
    "INSERT INTO taskyard.ended ": "upsert_ended",
    "COPY taskyard.ended ": "copy_ended",
    "SELECT * FROM taskyard.ended ": "read_ended",
    "SELECT value FROM taskyard.meta WHERE key = ": "read_meta",
    "SELECT name, content FROM taskyard.keys": "read_keys",
    "to_regclass('taskyard.meta')": "exists",
    "SELECT epoch, holder, renewal, lease_ns FROM taskyard.leader": "read_leader",
    store._PORTION: "read_portion",  # noqa: SLF001  # executed as it is
    store._BYTES: "read_bytes",  # noqa: SLF001
    store._HEAD: "read_head",  # noqa: SLF001
    store._HOLDING: "read_holding",  # noqa: SLF001
    store._NEWEST: "read_newest",  # noqa: SLF001
}


def parse(text: str) -> Statement:
    """Find out what a statement of the product does."""
    kind = next((kind for part, kind in _KINDS.items() if part in text), None)
    if kind is None:
        raise Violation("unknown statement", text)
    conditions: list[tuple[str, str | int]] = []
    where = text.find(" WHERE ") if "taskyard.leader" in text else -1
    for found in _CONDITION.finditer(text, where) if where > 0 else ():
        place = len(_PLACEHOLDER.findall(text[: found.start(0)]))
        conditions.append((found[1], found[2] or place))
    key = _KEY.search(text)
    is_new_term, keeps_greatest = "epoch = epoch + 1" in text, "greatest(" in text
    return Statement(kind, key[1] if key else "", is_new_term, keeps_greatest, conditions)


class Tables(blob_tables.BlobTables):
    """The tables as of one moment. Methods without a docstring execute the statement of their name,
    and return its rows, or as many as it changed."""

    def __init__(self, identity: bytes) -> None:
        super().__init__()
        self.leader = LeaderRow(0, "", 0, 0)
        #: Where the leader listens.
        self.place: tuple[str, list[str]] = ("", [])
        self.rows: dict[int, Row] = {}
        self.meta = {
            "format": database.FORMAT,
            "anchor": chain.seal(identity, Head(0, 0, chain.origin(identity))),
        }
        self.ended: dict[tuple[bytes, int], tuple[Any, ...]] = {}
        self.standbys: dict[str, tuple[Any, ...]] = {}

    def copied(self) -> Tables:
        """Return the tables as they are now."""
        made = copy(self)
        for name, table in vars(self).items():
            setattr(made, name, copy(table))
        return made

    def execute(self, statement: Statement, values: Values) -> Rows:
        """Execute a statement, if the leader's row is as it requires."""
        if not self._meets(statement.conditions, values):
            return [*blob_tables.UNHELD.get(statement.kind, ())]
        if statement.kind == "read_meta":
            return self.read_meta(values, statement.key)
        before = dict(self.meta) if statement.keeps_greatest else {}
        found: Rows = getattr(self, statement.kind)(values)
        self.meta |= {key: max(value, self.meta[key]) for key, value in before.items()}
        if statement.kind == "take":
            self._begin_term(self.leader.epoch + statement.is_new_term)
            return [(self.leader.epoch,)]
        return found

    def _begin_term(self, epoch: int) -> None:
        if epoch <= self.leader.epoch:
            raise Violation("epoch", f"epoch {epoch} follows epoch {self.leader.epoch}")
        self.leader = self.leader._replace(epoch=epoch)

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

    def append(self, values: Mapping[str, Any]) -> Rows:
        sequence = values["sequence"]
        if sequence in self.rows:
            raise UniqueViolation(f"row {sequence} exists")
        self._check_term(values, "append")
        newest = max([self.anchor.sequence, *self.rows])
        # A statement that was executed late may have been repeated, and its row trimmed meanwhile.
        if sequence != newest + 1 and sequence > self.anchor.sequence:
            raise Violation("chain", f"row {sequence} follows row {newest}")
        fields = [values[name] for name in Row.__struct_fields__]
        self.rows[sequence] = Row(*fields)
        if sequence <= self.anchor.sequence:
            self.rows = dict(sorted(self.rows.items()))
        return [()]

    def trim(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "trim")
        gone = [sequence for sequence in self.rows if sequence <= values["through"]]
        size = sum(len(self.rows.pop(sequence).body) for sequence in gone)
        self.meta["anchor"] = values["anchor"]
        return [(size,)]

    def cover(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "cover")
        self.meta["covered"] = values["covered"]
        return [()]

    def set_files(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "place of files")
        self.meta["files"] = values["location"]
        return [()]

    def take(self, values: Sequence[Any]) -> Rows:
        holder, lease_ns, *seen = values
        if seen != [*self.leader[:3]]:
            raise Violation("stale write", f"a take of {seen}, but the row is {self.leader[:3]}")
        renewal = self.leader.renewal + 1
        self.leader = LeaderRow(self.leader.epoch, holder, renewal, lease_ns)
        self.place = ("", [])
        return []

    def show(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "location")
        self.place = (values["host"], values["endpoints"])
        return [()]

    def renew(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "renewal")
        self.leader = self.leader._replace(renewal=self.leader.renewal + 1)
        return [()]

    def release(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "release")
        self.leader = self.leader._replace(holder="", renewal=self.leader.renewal + 1)
        return [()]

    # Other writes.

    def upsert_ended(self, values: Sequence[Any]) -> Rows:
        known = self.ended.get((values[0], values[1]))
        if known is None or values[2] >= known[2]:
            self.ended[values[0], values[1]] = tuple(values)
        return [()]

    def copy_ended(self, rows: Sequence[Any]) -> Rows:
        found = {(row[0], row[1]): tuple(row) for row in rows}
        if len(found) < len(rows) or not self.ended.keys().isdisjoint(found):
            raise UniqueViolation("a name exists")
        self.ended.update(found)
        return [()] * len(rows)

    def report_standby(self, values: Mapping[str, Any]) -> Rows:
        known = self.standbys.get(values["name"])
        columns = [values[name] for name in ("name", "host", "endpoints", "sequence", "behind_ns")]
        renewal = 0 if known is None else known[-1] + 1
        self.standbys[values["name"]] = (*columns, renewal)
        return [()]

    def remove_standby(self, values: Sequence[Any]) -> Rows:
        found = self.standbys.get(values[0])
        if found is None or [found[-1]] != [*(values[1:] or [found[-1]])]:
            return []
        del self.standbys[values[0]]
        return [()]

    # Reads.

    @property
    def anchor(self) -> Head:
        sealed = chain.unseal(self.meta["anchor"])
        if sealed is None:
            raise Violation("chain", "the anchor is damaged")
        return sealed[1]

    def snapshot(self, _values: Values) -> Rows:
        return []

    def exists(self, _values: Values) -> Rows:
        return [(True,)]

    def read_meta(self, _values: Values, key: str) -> Rows:
        return [(self.meta[key],)] if key in self.meta else []

    def read_keys(self, _values: Values) -> Rows:
        return []

    def read_leader(self, _values: Values) -> Rows:
        return [tuple(self.leader)]

    def read_standbys(self, _values: Values) -> Rows:
        return sorted(self.standbys.values(), key=lambda row: (row[1], row[0]))

    def poll(self, values: Mapping[str, Any]) -> Rows:
        """Return the leader's row beside each of the next rows, or beside none."""
        after = values["after"]
        own = self.rows[after].chain if after in self.rows else None
        first = (*self.leader, *self.place, self.meta["format"], self.meta["anchor"], own)
        later = [_columns(row) for sequence, row in self.rows.items() if sequence > after]
        return [(*first, *columns) for columns in later[: values["count"]] or [(None,) * 5]]

    def read_portion(self, values: Mapping[str, Any]) -> Rows:
        found = [
            _columns(row)
            for sequence, row in self.rows.items()
            if values["after"] < sequence <= values["last"]
        ]
        return found[: values["count"]]

    def read_bytes(self, values: Mapping[str, Any]) -> Rows:
        last = values["sequence"]
        return [(sum(len(row.body) for row in self.rows.values() if row.sequence <= last),)]

    def read_head(self, values: Mapping[str, Any]) -> Rows:
        row = self.rows.get(values["sequence"])
        return [] if row is None else [(row.record_last, row.chain)]

    def read_holding(self, values: Mapping[str, Any]) -> Rows:
        found = [row for row in self.rows.values() if row.record_last >= values["record"]]
        return [(found[0].sequence,)] if found else []

    def read_newest(self, values: Mapping[str, Any]) -> Rows:
        newest = next(reversed(self.rows.values()), None)
        if newest is None or newest.sequence <= values["anchor"]:
            return []
        return [(newest.sequence, newest.record_last, newest.chain)]

    def read_ended(self, values: Sequence[Any]) -> Rows:
        return [row for row in self.ended.values() if row[2] > values[0]]


WRITES: Final = (
    *blob_tables.UNHELD,
    *("append", "trim", "cover", "take", "renew", "release"),
    *("show", "set_files", "report_standby", "remove_standby"),
    *("upsert_ended", "copy_ended"),
)


OF_LEASE: Final = ("renew", "release")
OF_COMPACTION: Final = ("trim", "cover", "remove_blobs")


def _columns(row: Row) -> tuple[Any, ...]:
    return (row.sequence, row.record_first, row.record_last, row.chain, row.body)
