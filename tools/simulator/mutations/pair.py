"""Planted bugs of two brokers over one database: fences, leases, rows in doubt, takeovers."""
# ruff: noqa: ANN401 - a broken function takes whatever the sound one takes
# ruff: noqa: SLF001 - bugs are planted inside

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from simulator.mutations.registry import mutation_for_pair, no_op, patched
from taskyard.journal import chain
from taskyard.postgresql import blobs, exports, leader, lease, store
from taskyard.postgresql.lease import Lease
from taskyard.postgresql.standby import Follower, Replica
from taskyard.postgresql.store import PostgresStore, Session, TermSession

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Locks the leader's row, whatever its term is.
UNCHECKED: Final = "WITH held AS (SELECT epoch FROM taskyard.leader FOR SHARE)"

#: The condition of statements that change the leader's row.
_TERM: Final = " WHERE epoch = %(epoch)s AND holder = %(holder)s"
_SEEN: Final = " WHERE epoch = %s AND holder = %s AND renewal = %s"


@contextmanager
def unfenced(module: Any, name: str, condition: str, replacement: str) -> Iterator[None]:
    """Remove a condition from a statement of the product."""
    sound = getattr(module, name)
    broken = sound.replace(condition, replacement)
    if broken == sound:
        raise AttributeError(f"{name} has no condition {condition!r}")
    with patched(module, name, broken):
        yield


# Statements without their condition.


@mutation_for_pair
def append_unfenced() -> Iterator[None]:
    """Append a row without a check of the epoch."""
    with unfenced(store, "_INSERT", leader.HELD, UNCHECKED):
        yield


@mutation_for_pair
def trim_unfenced() -> Iterator[None]:
    """Trim rows without a check of the epoch."""
    with unfenced(store, "_TRIM", leader.HELD, UNCHECKED):
        yield


@mutation_for_pair
def claim_unfenced() -> Iterator[None]:
    """Write files and blobs without a check of the epoch."""
    with (
        unfenced(blobs, "_APPEND", leader.HELD, UNCHECKED),
        unfenced(blobs, "_SEAL", leader.HELD, UNCHECKED),
    ):
        yield


@mutation_for_pair
def cover_unfenced() -> Iterator[None]:
    """Write the row that the index covers without a check of the epoch."""
    with unfenced(exports, "_COVER", leader.HELD, UNCHECKED):
        yield


@mutation_for_pair
def removal_unfenced() -> Iterator[None]:
    """Remove snapshots and blobs without a check of the epoch."""
    with unfenced(blobs, "_REMOVE", leader.HELD, UNCHECKED):
        yield


@mutation_for_pair
def renewal_unfenced() -> Iterator[None]:
    """Renew a term that may be over."""
    with unfenced(leader, "_RENEW", _TERM, ""):
        yield


@mutation_for_pair
def release_unfenced() -> Iterator[None]:
    """Release a term that may be another broker's."""
    with unfenced(leader, "_RELEASE", _TERM, ""):
        yield


@mutation_for_pair
def take_without_comparison() -> Iterator[None]:
    """Take over although the row has changed since it was read."""
    with unfenced(leader, "_TAKE", _SEEN, ""):
        yield


@mutation_for_pair
def epoch_stays() -> Iterator[None]:
    """Begin a term with the epoch of the one before."""
    with unfenced(leader, "_TAKE", "epoch = epoch + 1", "epoch = epoch"):
        yield


@mutation_for_pair
def anchor_goes_back() -> Iterator[None]:
    """Let a statement that is executed late set the anchor to a row that was trimmed before."""
    with unfenced(store, "_TRIM", "greatest(value, %(anchor)b)", "%(anchor)b"):
        yield


# The lease.


@mutation_for_pair
def lease_unchecked() -> Iterator[None]:
    """Reply without a check of the lease."""
    with patched(Lease, "check", no_op):
        yield


@mutation_for_pair
def lease_from_after_renewal() -> Iterator[None]:
    """Count the lease from the reply to a renewal."""

    def renew(self: Any) -> None:
        is_renewed = leader.renew(self._connection, self.term)
        usable_ns = self.lease_ns - self.lease_ns // lease._MARGIN
        self._ends_ns = leader.boottime_ns() + usable_ns if is_renewed else 0

    with patched(Lease, "_renew", renew):
        yield


@mutation_for_pair
def takeover_without_waiting() -> Iterator[None]:
    """Take over from a broker whose lease still runs."""
    with patched(leader.Vacancy, "is_due", lambda _self, _now_ns: True):
        yield


# Rows in doubt.


@mutation_for_pair
def doubt_taken_for_written() -> Iterator[None]:
    """Take a row for written after its connection was lost."""

    def settle(self: Any, row: Any, error: Any) -> None:
        self._row_in_doubt = row
        self._reconnect(float("inf"), error)
        self._row_in_doubt = None

    with patched(PostgresStore, "_settle", settle):
        yield


@mutation_for_pair
def doubt_taken_for_lost() -> Iterator[None]:
    """Take a row for lost after its connection was lost, and write its records again."""

    def settle(self: Any, row: Any, error: Any) -> None:
        self._row_in_doubt = row
        self._reconnect(float("inf"), error)
        count = row.record_last - row.record_first + 1
        again = chain.next_row(row.head, row.body, count) if self._is_written else row
        self._insert(again)

    with patched(PostgresStore, "_settle", settle):
        yield


@mutation_for_pair
def doubt_unconfirmed() -> Iterator[None]:
    """Reply about a row that the server's standby may not have."""
    with patched(TermSession, "_confirm", no_op):
        yield


@mutation_for_pair
def warning_ignored() -> Iterator[None]:
    """Reply although the server warned that its standby has not confirmed a row."""
    with patched(Session, "_note_warning", no_op):
        yield


# Takeovers.


@mutation_for_pair
def compaction_unpublished() -> Iterator[None]:
    """Trim rows without a copy of their history and snapshot in the database."""
    with patched(exports, "publish", no_op):
        yield


@mutation_for_pair
def exports_not_fetched() -> Iterator[None]:
    """Take over with the files of this machine alone."""
    with patched(exports, "fetch", lambda *_, **_more: iter(())):
        yield


@mutation_for_pair
def newest_row_missed() -> Iterator[None]:
    """Serve before the newest row is applied."""
    sound = store.PostgresRows._read

    def read(self: Any, after: int, last: int) -> Any:
        rows = [*sound(self, after, last)]
        return iter(rows[:-1] if after and len(rows) > 1 else rows)

    with patched(store.PostgresRows, "_read", read):
        yield


@mutation_for_pair
def standby_leads_early() -> Iterator[None]:
    """Apply the newest row with the next poll, and lead without that."""
    read, take, apply = Follower.poll, Follower.take, Replica.poll

    def read_late(self: Any) -> Any:
        polled = read(self)
        rows = [*getattr(self, "_late", []), *polled.rows]
        self._late = rows[-1:] if polled.rows else []
        return polled._replace(rows=rows[: len(rows) - len(self._late)])

    def note_term(self: Any, *arguments: Any) -> Any:
        self._term = take(self, *arguments)
        return self._term

    def apply_before(self: Any) -> Any:
        leads = getattr(self.follower, "_term", None) is not None
        self._before = self._before._replace(rows=[]) if leads else apply(self)
        return self._before

    with (
        patched(Follower, "poll", read_late),
        patched(Follower, "take", note_term),
        patched(Replica, "poll", apply_before),
    ):
        yield
