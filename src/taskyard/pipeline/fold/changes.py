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
from taskyard.pipeline.fold.columns import Array, Flags, Ints, Number, Text, text
from taskyard.pipeline.fold.steps import KINDS, STATE_NAMES, STATES, Steps, kind_flags

#: Reasons are cut here. A map keyed by whole tracebacks would be no summary.
REASON_CHARACTERS_MAX: Final = 120

_IS_FAILED: Final = kind_flags("failed", "aged")
_IS_RETRY: Final = kind_flags("postponed", "returned", "expired")
_IS_READY: Final = kind_flags(*(kind for kind, state in STATES.items() if state == "READY"))
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


def step_changes(steps: Steps, rows: Ints, place: Ints) -> Changes:
    """Return the changes that some steps make to their campaign. Each step has a place."""
    kind, last_kind = steps.kind[rows], steps.last_kind[rows]
    was_leased = last_kind == KINDS.index("leased")
    own_fault = steps.number("own_fault", rows).is_true
    is_setback = _IS_FAILED[kind] | ((kind == _POSTPONED) & own_fault)
    is_ready = steps.state[rows] == STATE_NAMES.index("READY")
    amounts: dict[str, Array] = {
        name: kind == KINDS.index(name) for name in ("submitted", "leased", "finished", "cancelled")
    }
    amounts["failed"] = _IS_FAILED[kind]
    amounts["retries"] = was_leased & _IS_RETRY[kind]
    amounts["depth_change"] = is_ready.astype(np.int64) - _IS_READY[last_kind]
    reason = _reasons(steps.text("reason", rows), is_setback)
    return Changes(steps.time_ns[rows], place[rows], amounts, reason=reason)


class _Runs(Struct, frozen=True):
    """When chosen leases began, started and ended, by the best known time."""

    leased_ns: Ints
    start_ns: Ints
    end_ns: Ints
    run_ns: Number
    #: It ran, or it is open and may be running. A lost attempt counts as not running.
    is_running: Flags
    is_settled: Flags


def _runs(leases: Leases, chosen: Ints) -> _Runs:
    settled = leases.is_settled[chosen]
    leased_ns = leases.leased_ns[chosen]
    start_ns = leased_ns + leases.queued_ns.at(chosen).where(settled).filled(0)
    run_ns = leases.run_ns.at(chosen).where(settled)
    settled_ns = leases.settled_ns.at(chosen).values
    # The table of attempts has this time to the microsecond.
    over_ns = np.where(settled, settled_ns // 1000 * 1000, start_ns)
    end_ns = np.where(run_ns.is_known, start_ns + run_ns.values, over_ns)
    return _Runs(leased_ns, start_ns, end_ns, run_ns, run_ns.is_known | ~settled, settled)


def run_changes(leases: Leases, chosen: Ints, place: Ints) -> list[Changes]:
    """Return the changes that runs of some leases make to their campaign. Each step has a place."""
    found = _runs(leases, chosen)
    at = place[leases.rows[chosen]]
    on, ran = np.flatnonzero(found.is_running), np.flatnonzero(found.run_ns.is_known)
    return [
        Changes(found.leased_ns, at, wait_ns=leases.wait_ns.at(chosen)),
        Changes(found.start_ns[on], at[on], running=np.ones(len(on), np.int64)),
        Changes(
            found.end_ns[ran],
            at[ran],
            running=np.full(len(ran), -1),
            run_ns=Number(found.run_ns.values[ran]),
        ),
    ]


def worker_changes(leases: Leases, chosen: Ints, place: Ints) -> list[Changes]:
    """Return the changes that some attempts make to their worker. Each lease has a place."""
    found = _runs(leases, chosen)
    at = place[chosen]
    running = found.is_running.astype(np.int64)
    ends = np.flatnonzero(found.is_settled)
    kind = leases.next_kind[chosen][ends]
    own_fault = leases.ending("own_fault").at(chosen[ends]).is_true
    is_setback = (kind == KINDS.index("failed")) | ((kind == _POSTPONED) & own_fault)
    amounts: dict[str, Array] = {
        name: kind == KINDS.index(name) for name in ("finished", "failed", "cancelled")
    }
    amounts["retries"] = _IS_RETRY[kind]
    return [
        Changes(found.leased_ns, at, wait_ns=leases.wait_ns.at(chosen)),
        Changes(found.start_ns, at, {"leased": np.ones(len(at), bool)}, running=running),
        Changes(
            found.end_ns[ends],
            at[ends],
            amounts,
            running=-running[ends],
            reason=_reasons(leases.ending_text("reason").at(chosen[ends]), is_setback),
            run_ns=found.run_ns.at(ends),
        ),
    ]


def _reasons(column: Text, is_setback: Flags) -> Text:
    """Return the first line of the reason of each setback, cut. Without a reason it is empty."""
    trimmed = pc.utf8_trim(column.values, characters=" ")
    lines = pc.list_element(pc.split_pattern(trimmed, "\n", max_splits=1), 0)
    short = pc.utf8_slice_codeunits(lines, 0, REASON_CHARACTERS_MAX)
    values = text(pa.concat_arrays([short, pa.array([""], pa.string())]))
    return Text(np.where(is_setback, values.codes[column.codes], -1), values.values)
