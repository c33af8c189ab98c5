"""Attempts: a row for each lease, with its end if there is one.

A task takes no other step between a lease and its end, so the end is the next step. A lease has no
`ready` before it only if older files are missing.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa

from taskyard.pipeline.fold.columns import Flags, Ints, Number, Text, constant
from taskyard.pipeline.fold.steps import KINDS, NO_KIND, OUTCOMES, Steps, kind_flags

_IS_OUTCOME: Final = kind_flags(*OUTCOMES)

#: Ends of attempts that the worker reported after a run.
_IS_REPORT: Final = kind_flags("finished", "postponed")
_FAILED: Final = KINDS.index("failed")


class Leases:
    """The leases of a share, as arrays. `rows` are their places among the steps."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.rows: Ints = np.flatnonzero(steps.kind == KINDS.index("leased"))
        self.next_kind = steps.next_kind[self.rows]
        #: A later step follows, so nothing can change the attempt any more.
        self.is_final: Flags = self.next_kind != NO_KIND
        #: The row of the next step. Its values are only used where there is one.
        self.next_rows: Ints = np.where(self.is_final, self.rows + 1, self.rows)
        #: The next step ends an attempt, whatever its number.
        self.is_over: Flags = _IS_OUTCOME[self.next_kind]
        #: The next step ends this very attempt.
        attempt, ending = self.column("attempt"), self.ending("attempt")
        is_same = attempt.is_known & ending.is_known & (attempt.values == ending.values)
        self.is_settled: Flags = self.is_over & is_same

    def column(self, name: str) -> Number:
        """Return a number of each lease."""
        return self.steps.number(name, self.rows)

    def ending(self, name: str) -> Number:
        """Return a number of the step after each lease. Null without one."""
        return self.steps.number(name, self.next_rows).where(self.is_final)

    def text(self, name: str) -> Text:
        return self.steps.text(name, self.rows)

    def ending_text(self, name: str) -> Text:
        return self.steps.text(name, self.next_rows).where(self.is_final)

    @cached_property
    def leased_ns(self) -> Ints:
        return self.steps.time_ns[self.rows]

    @cached_property
    def wait_ns(self) -> Number:
        """The wait for a worker, from `ready` to the lease."""
        is_ready = self.steps.last_kind[self.rows] == KINDS.index("ready")
        # A clock that is set back must not give negative times.
        waited = np.maximum(self.leased_ns - self.ready_ns.values, 0)
        return Number(waited, is_ready)

    @cached_property
    def ready_ns(self) -> Number:
        is_ready = self.steps.last_kind[self.rows] == KINDS.index("ready")
        return Number(self.steps.time_ns[np.maximum(self.rows - 1, 0)], is_ready)

    @cached_property
    def started_ns(self) -> Number:
        return self.ending("started_ns")

    @cached_property
    def measured_ns(self) -> Number:
        """The measured run time, if the start was measured too."""
        return self.ending("run_ns").where(self.started_ns.is_known)

    @cached_property
    def run_ns(self) -> Number:
        """The run time of each lease that is over.

        A worker that does not measure reports at the end of a run, so the run counts as long as its
        lease. An attempt that was lost, returned or cancelled may never have started.
        """
        own_fault = self.ending("own_fault").is_true
        is_report = _IS_REPORT[self.next_kind] | ((self.next_kind == _FAILED) & own_fault)
        held_ns = np.maximum(self.steps.time_ns[self.next_rows] - self.leased_ns, 0)
        is_measured = self.measured_ns.is_known
        found = np.where(is_measured, self.measured_ns.values, held_ns)
        return Number(found, (is_measured | is_report) & self.is_over)

    @cached_property
    def queued_ns(self) -> Number:
        """The wait inside the worker of each lease that is over."""
        waited = np.maximum(self.started_ns.values - self.leased_ns, 0)
        return Number(waited, self.started_ns.is_known & self.is_over)

    @cached_property
    def settled_ns(self) -> Number:
        return Number(self.steps.time_ns[self.next_rows], self.is_settled)


def attempts(leases: Leases, broker: str) -> pa.Table:
    """Return the table of attempts, in the order of the leases."""
    steps, settled = leases.steps, leases.is_settled
    names = steps.name[leases.rows]
    submission = steps.submission[leases.rows]
    started_ns = leases.started_ns.where(settled)
    run_ns = leases.measured_ns
    ended_ns = Number(started_ns.values + run_ns.values, started_ns.is_known & run_ns.is_known)
    outcome = Text(np.where(settled, leases.next_kind, -1).astype(np.int64), pa.array(KINDS))
    columns: dict[str, pa.Array | Ints] = {
        "broker": constant(broker, len(names)),
        "campaign": steps.campaigns.at(names).arrow,
        "task": steps.tasks.values.take(pa.array(steps.tasks.codes[names])),
        "name": steps.short_names.take(pa.array(names)),
        "generation": steps.generation[leases.rows],
        "submitted": Number(steps.time_ns[submission], submission >= 0).times,
        "ready": leases.ready_ns.times,
        "leased": Number(leases.leased_ns).times,
        "settled": leases.settled_ns.times,
        "leased_record": steps.record[leases.rows],
        "outcome": outcome.arrow,
        "reason": leases.ending_text("reason").where(settled).arrow,
        "own_fault": leases.ending("own_fault").where(settled).flags,
        "wait_ns": leases.wait_ns.arrow,
        "run_ns": leases.run_ns.where(settled).arrow,
        "leased_ns": leases.leased_ns,
        "started": started_ns.times,
        "ended": ended_ns.times,
        "queued_ns": leases.queued_ns.where(settled).arrow,
        "host": leases.ending_text("host").where(settled).arrow,
    }
    for name in ("attempt", "priority"):
        columns[name] = leases.column(name).arrow
    for name in ("service", "lane", "worker", "dialect"):
        columns[name] = leases.text(name).arrow
    for name in ("result_bytes", "exit_status", "signal", "cpu_ns", "memory_max_bytes"):
        columns[name] = leases.ending(name).where(settled).arrow
    return pa.table(columns)
