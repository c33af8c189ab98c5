"""The end of a term because a user asks for it: `taskyard failover`.

Decides whether a standby is ready. The server stops after the reply has left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core.limits import SECOND_NS

if TYPE_CHECKING:
    from taskyard.journal.postgres.lease import Lease


class Handover:
    """Decides whether the broker ends its term when a user asks for it. Implements `HandOver`."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.is_requested = False

    def __call__(self, epoch: int, *, force: bool) -> str:
        lease = self._lease
        if epoch < lease.term.epoch:
            return ""  # it is over: this request was sent again
        if epoch > lease.term.epoch:
            return f"epoch {epoch} has not begun, this broker leads in epoch {lease.term.epoch}"
        problem = "" if force else _standby_problem(lease)
        self.is_requested = self.is_requested or not problem
        return problem


def _standby_problem(lease: Lease) -> str:
    """Return why no standby can take over sooner than by waiting for the lease, or ""."""
    found = lease.standbys.seen()
    if not found:
        return "no standby has reported (start one with `taskyard broker --standby`)"
    behind_ns = min(row.behind_ns + lease.now_ns() - seen_ns for row, seen_ns, _ in found)
    if behind_ns <= lease.lease_ns:
        return ""
    return f"the standby is {behind_ns / SECOND_NS:.1f} s behind (use --force to hand over anyway)"
