"""Tasks: a row for each generation of a name, with the columns that follow from its own steps.

A generation is the run of steps from its submission to the next one of the name. Steps before the
first submission of a name belong to no task.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
from msgspec import Struct

from taskyard.pipeline.fold.attempts import Leases
from taskyard.pipeline.fold.columns import (
    INT_MIN,
    Array,
    Flags,
    Ints,
    Number,
    Text,
    constant,
)
from taskyard.pipeline.fold.steps import (
    ENDED,
    FINAL,
    KINDS,
    STATE_NAMES,
    Steps,
    kind_flags,
    state_codes,
)

#: Reasons of a return that mean that the worker was lost. For others the worker returned the task.
LOSSES: Final = ("unlisted", "left", "restarted", "broker_restarted")

_IS_FAILURE: Final = kind_flags("failed", "postponed")

#: Columns that the submission has.
_NUMBERS: Final = ("slots", "payload_bytes")

#: Columns of the latest event.
_LATEST: Final = ("service", "lane")


class Generations(Struct, frozen=True):
    """The generations in a share: the first and the last step of each, and if it is final."""

    begins: Ints
    lasts: Ints
    #: The first step is a submission.
    is_task: Flags
    #: No later event can change it, because of its state or because a later one replaced it.
    is_final: Flags

    def sums(self, values: Array) -> Ints:
        """Add up a column of the steps by generation."""
        found: Ints = np.add.reduceat(values, self.begins, dtype=np.int64)
        return found

    def firsts(self, values: Ints, is_wanted: Flags) -> Number:
        """Return the first of the wanted values of each generation, in the order of steps."""
        rows = np.where(is_wanted, np.arange(len(is_wanted)), len(is_wanted))
        found = np.minimum.reduceat(rows, self.begins)
        return Number(np.append(values, 0)[found], found < len(is_wanted))

    def largest(self, values: Ints, is_wanted: Flags) -> Number:
        """Return the largest of the wanted values of each generation."""
        found = np.maximum.reduceat(np.where(is_wanted, values, INT_MIN), self.begins)
        return Number(found, found != INT_MIN)

    def last_rows(self, is_wanted: Flags) -> Ints:
        """Return the last wanted step of each generation, -1 if there is none."""
        rows = np.where(is_wanted, np.arange(len(is_wanted)), -1)
        found: Ints = np.maximum.reduceat(rows, self.begins)
        return found

    def is_in_open(self, count: int) -> Flags:
        """Return whether each of the steps is in a generation that is not final."""
        return np.repeat(~self.is_final, np.diff(np.append(self.begins, count)))


def generations(steps: Steps) -> Generations:
    """Divide the steps of each task by its submissions."""
    is_submission = steps.kind == KINDS.index("submitted")
    begins = np.flatnonzero(steps.is_first | is_submission)
    lasts = np.append(begins, steps.count)[1:] - 1
    is_replaced = steps.next_kind[lasts] == KINDS.index("submitted")
    is_final = is_replaced | np.isin(steps.state[lasts], state_codes(*FINAL))
    return Generations(begins, lasts, is_submission[begins], is_final)


class _LeaseSums(Struct, frozen=True):
    """Values of leases, spread over the steps: 0 in every other row."""

    failures: Array
    losses: Array
    wait_ns: Ints
    run_ns: Ints
    queued_ns: Ints
    #: The step is a lease whose run time is known.
    has_run: Flags


def _lease_sums(leases: Leases) -> _LeaseSums:
    count = leases.steps.count
    kind, over = leases.next_kind, leases.is_over
    own_fault = leases.ending("own_fault")
    is_failed = kind == KINDS.index("failed")
    is_given_back = (kind == KINDS.index("returned")) & leases.ending_text("reason").is_any(LOSSES)
    is_lost = (kind == KINDS.index("expired")) | is_given_back
    is_lost |= is_failed & own_fault.is_known & ~own_fault.is_true

    def spread(values: Array) -> Array:
        found = np.zeros(count, values.dtype)
        found[leases.rows] = values
        return found

    return _LeaseSums(
        spread(over & _IS_FAILURE[kind] & own_fault.is_true),
        spread(over & is_lost),
        spread(leases.wait_ns.filled(0)),
        spread(leases.run_ns.filled(0)),
        spread(leases.queued_ns.filled(0)),
        spread(leases.run_ns.is_known),
    )


def tasks_without_graph(steps: Steps, leases: Leases, found: Generations, broker: str) -> pa.Table:
    """Return the table of tasks, in the order of campaign, task and generation."""
    begins, lasts = found.begins, found.lasts
    is_lease = steps.kind == KINDS.index("leased")
    lease_sums = _lease_sums(leases)
    state = steps.state[lasts].astype(np.int64)
    is_ended = np.isin(state, state_codes(*ENDED))
    ready_ns = found.firsts(steps.time_ns, steps.kind == KINDS.index("ready"))
    submitted_ns = steps.time_ns[begins]
    last_lease, last_run = found.last_rows(is_lease), found.last_rows(lease_sums.has_run)
    is_finish = steps.kind == KINDS.index("finished")
    size = steps.number("result_bytes")
    is_failed = state == STATE_NAMES.index("FAILED")
    names = steps.name[begins]
    columns: dict[str, pa.Array | Ints] = {
        "broker": constant(broker, len(begins)),
        "campaign": steps.campaigns.at(names).arrow,
        "task": steps.tasks.values.take(pa.array(steps.tasks.codes[names])),
        "name": steps.short_names.take(pa.array(names)),
        "generation": steps.generation[begins],
        "dialect": steps.text("dialect", begins).arrow,
        "state": Text(state, pa.array(STATE_NAMES)).arrow,
        "attempts": found.sums(is_lease),
        "failures": found.sums(lease_sums.failures),
        "losses": found.sums(lease_sums.losses),
        "submitted": Number(submitted_ns).times,
        "submitted_record": steps.record[begins],
        "ready": ready_ns.times,
        "leased": found.firsts(steps.time_ns, is_lease).times,
        "ended": Number(steps.time_ns[lasts], is_ended).times,
        "due": steps.number("due", begins).micros,
        "worker": steps.text("worker", last_lease).where(last_lease >= 0).arrow,
        "reason": steps.text("reason", lasts).where(is_failed).arrow,
        "blocked_ns": _blocked_ns(ready_ns, submitted_ns).arrow,
        "wait_ns": found.sums(lease_sums.wait_ns),
        "queued_ns": found.sums(lease_sums.queued_ns),
        "run_ns": found.sums(lease_sums.run_ns),
        "is_last_run_unknown": last_run != last_lease,
        "run_last_ns": Number(lease_sums.run_ns[last_run], last_run >= 0).arrow,
        "result_bytes": found.largest(size.values, is_finish & size.is_known).arrow,
    }
    columns |= {name: steps.number(name, begins).arrow for name in _NUMBERS}
    latest = steps.latest_places[lasts]
    columns |= {name: steps.event_text(name, latest).arrow for name in _LATEST}
    columns["priority"] = steps.event_number("priority", latest).arrow
    return pa.table(columns)


def _blocked_ns(ready_ns: Number, submitted_ns: Ints) -> Number:
    """Return the time from the submission to the first `ready`."""
    waited = np.where(ready_ns.is_known, ready_ns.values, submitted_ns) - submitted_ns
    return Number(np.maximum(waited, 0), ready_ns.known)
