"""Changes: how steps and attempts move the counts of a campaign or of a worker, moment by moment.

Steps are counted where they happen. An attempt is counted where it starts and where it ends, by the
measurements of its worker. Knows nothing of intervals.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field

from taskyard.pipeline.fold.attempts import Leases
from taskyard.pipeline.fold.columns import Array, Flags, Ints, Number, Text, is_first, number, text
from taskyard.pipeline.fold.steps import KINDS, STATE_NAMES, STATES, Steps, kind_flags

#: Reasons are cut here. A map keyed by whole tracebacks would be no summary.
REASON_CHARACTERS_MAX: Final = 120

_IS_FAILED: Final = kind_flags("failed", "aged")
_IS_RETRY: Final = kind_flags("postponed", "returned", "expired")
_IS_READY: Final = kind_flags(*(kind for kind, state in STATES.items() if state == "READY"))
_READY: Final = STATE_NAMES.index("READY")
_POSTPONED: Final = KINDS.index("postponed")


class Changes(Struct, frozen=True):
    """Changes at moments, as arrays of one length."""

    at_ns: Ints
    #: The number of the place that each belongs to.
    place: Ints
    #: Amounts by the name of the column. A missing column is 0 in every row.
    amounts: dict[str, Array] = field(default_factory=dict)
    #: The number of attempts that start, or end if it is negative.
    running: Ints | None = None
    #: The reason of a failure. Null for all other changes.
    reason: Text | None = None
    wait_ns: Number | None = None
    run_ns: Number | None = None


class QueueNumbers(Struct, frozen=True):
    """The number of the queue of each step, and of each of `Steps.queue_changes`."""

    of_step: Ints
    of_change: Ints


def step_changes(steps: Steps, rows: Ints, place: Ints) -> Changes:
    """Return the changes that some steps make to their campaign. Each step has a place."""
    kind, last_kind = steps.kind[rows], steps.last_kind[rows]
    was_leased = last_kind == KINDS.index("leased")
    own_fault = steps.number("own_fault", rows).is_true
    is_setback = _IS_FAILED[kind] | ((kind == _POSTPONED) & own_fault)
    is_ready = steps.state[rows] == _READY
    amounts: dict[str, Array] = {
        name: kind == KINDS.index(name) for name in ("submitted", "leased", "finished", "cancelled")
    }
    amounts["failed"] = _IS_FAILED[kind]
    amounts["retries"] = was_leased & _IS_RETRY[kind]
    amounts["depth_change"] = is_ready.astype(np.int64) - _IS_READY[last_kind]
    reason = _reasons(steps.text("reason", rows), is_setback)
    return Changes(steps.time_ns[rows], place[rows], amounts, reason=reason)


def depth_corrections(steps: Steps, record: int, queues: QueueNumbers) -> list[Changes]:
    """Return what `step_changes` of steps after a record leaves out of the depth of queues.

    There, a task leaves the queue of the step that ends its wait, at the time of that step. But it
    leaves the queue that it was moved to last. If the clock is set back, it leaves when it entered.
    """
    moves = steps.queue_changes
    ready = np.flatnonzero(moves.is_move & (steps.state[moves.after] == _READY))
    after, place = moves.after[ready], queues.of_change[ready]
    at_ns = steps.event_number("time_ns", moves.places[ready]).values
    is_new = steps.event_number("record", moves.places[ready]).values > record
    # Before its first move, a task is where its step put it.
    is_moved = ~is_first(after)
    from_ns = np.where(is_moved, np.roll(at_ns, 1), steps.time_ns[after])
    from_place = np.where(is_moved, np.roll(place, 1), queues.of_step[after])
    since_ns, since_place = steps.time_ns.copy(), queues.of_step.copy()
    since_ns[after], since_place[after] = at_ns, place
    is_left = _IS_READY[steps.last_kind] & (steps.state != _READY) & (steps.record > record)
    rows = np.flatnonzero(is_left)
    left_ns, left_place = steps.time_ns[rows], queues.of_step[rows]
    since_ns, since_place = since_ns[rows - 1], since_place[rows - 1]
    wrong = np.flatnonzero((since_place != left_place) | (since_ns > left_ns))
    return [
        _depth_change(np.maximum(at_ns, from_ns)[is_new], from_place[is_new], -1),
        _depth_change(at_ns[is_new], place[is_new], 1),
        _depth_change(left_ns[wrong], left_place[wrong], 1),
        _depth_change(np.maximum(left_ns, since_ns)[wrong], since_place[wrong], -1),
    ]


def _depth_change(at_ns: Ints, place: Ints, amount: int) -> Changes:
    return Changes(at_ns, place, {"depth_change": np.full(len(at_ns), amount)})


def run_changes(leases: Leases, chosen: Ints, place: Ints) -> list[Changes]:
    """Return the changes that runs of some leases make to their campaign. Each step has a place."""
    settled = leases.is_settled[chosen]
    leased_ns = leases.leased_ns[chosen]
    start_ns = leased_ns + leases.queued_ns.at(chosen).where(settled).filled(0)
    run_ns = leases.run_ns.at(chosen).where(settled)
    at = place[leases.rows[chosen]]
    # An open attempt may be running. A lost one counts as not running.
    on, ran = np.flatnonzero(run_ns.is_known | ~settled), np.flatnonzero(run_ns.is_known)
    return [
        Changes(leased_ns, at, wait_ns=leases.wait_ns.at(chosen)),
        Changes(start_ns[on], at[on], running=np.ones(len(on), np.int64)),
        Changes(
            start_ns[ran] + run_ns.values[ran],
            at[ran],
            running=np.full(len(ran), -1),
            run_ns=Number(run_ns.values[ran]),
        ),
    ]


def worker_changes(attempts: pa.Table, place: Ints) -> list[Changes]:
    """Return the changes that attempts make to their worker. Each attempt has a place."""
    leased_ns = number(attempts["leased_ns"]).values
    start_ns = leased_ns + number(attempts["queued_ns"]).filled(0)
    run_ns, settled = number(attempts["run_ns"]), number(attempts["settled"])
    # Without a run time, an attempt ends when it is settled.
    over_ns = np.where(settled.is_known, settled.values * 1000, start_ns)
    end_ns = np.where(run_ns.is_known, start_ns + run_ns.values, over_ns)
    running = (run_ns.is_known | ~settled.is_known).astype(np.int64)
    ends = np.flatnonzero(settled.is_known)
    outcome = text(attempts["outcome"]).at(ends)
    own_fault = number(attempts["own_fault"]).at(ends).is_true
    is_setback = outcome.is_any(("failed",)) | (outcome.is_any(("postponed",)) & own_fault)
    amounts: dict[str, Array] = {
        name: outcome.is_any((name,)) for name in ("finished", "failed", "cancelled")
    }
    amounts["retries"] = outcome.is_any(("postponed", "returned", "expired"))
    return [
        Changes(leased_ns, place, wait_ns=number(attempts["wait_ns"])),
        Changes(start_ns, place, {"leased": np.ones(len(place), bool)}, running=running),
        Changes(
            end_ns[ends],
            place[ends],
            amounts,
            running=-running[ends],
            reason=_reasons(text(attempts["reason"]).at(ends), is_setback),
            run_ns=run_ns.at(ends),
        ),
    ]


def _reasons(column: Text, is_setback: Flags) -> Text:
    """Return the first line of the reason of each setback, cut. Without a reason it is empty."""
    trimmed = pc.utf8_trim(column.values, characters=" ")
    lines = pc.list_element(pc.split_pattern(trimmed, "\n", max_splits=1), 0)
    short = pc.utf8_slice_codeunits(lines, 0, REASON_CHARACTERS_MAX)
    values = text(pa.concat_arrays([short, pa.array([""], pa.string())]))
    return Text(np.where(is_setback, values.codes[column.codes], -1), values.values)
