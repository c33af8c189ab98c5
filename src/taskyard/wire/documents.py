r"""What is looked at as JSON: tasks, workers, statistics, explanations.

Owns the names of the fields, which scripts rely on: one may be added, none renamed or removed.
Names are text; a byte that is none is shown as \x and its number. Times are in seconds since the
epoch, to the millisecond, and null where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.core.tasks import shown

if TYPE_CHECKING:
    from taskyard.core.effects import Stats, TaskView, WorkerView
    from taskyard.core.explain import Explanation

_MILLISECOND_NS: Final = SECOND_NS // 1000

encode = msgspec.json.Encoder().encode


def seconds(ns: int) -> float | None:
    return ns // _MILLISECOND_NS / 1000 if ns else None


def counts(values: list[int]) -> dict[str, int]:
    return {state.name.lower(): values[state] for state in TaskState}


def task(view: TaskView) -> dict[str, Any]:
    return {
        "name": shown(view.name),
        "state": view.state.name.lower(),
        "campaign": shown(view.campaign),
        "service": shown(view.service),
        "lane": shown(view.lane),
        "priority": view.priority,
        "slots": view.slots,
        "attempt": view.attempt,
        "failures": view.failures,
        "losses": view.losses,
        "waits_for": view.waits,
        "dependents": view.dependents,
        "after": [shown(name) for name in view.after],
        "worker": shown(view.worker) or None,
        "reason": shown(view.reason),
        "submitted": seconds(view.submitted_ns),
        "due": seconds(view.due_ns),
        "leased": seconds(view.leased_ns),
        "ended": seconds(view.ended_ns),
    }


def stats(told: Stats) -> dict[str, Any]:
    return {
        "counts": counts(told.counts),
        "behind_failure": told.stuck,
        "workers": told.workers,
        "records": told.records,
        "accepting": told.accepting,
        "paused": told.paused,
        "campaigns": [{"name": shown(name), "counts": counts(of)} for name, of in told.campaigns],
        "services": [
            {"name": shown(name), "counts": counts(of), "workers": workers}
            for name, of, workers in told.services
        ],
    }


def worker(view: WorkerView) -> dict[str, Any]:
    return {
        "name": shown(view.name),
        "state": view.state.name.lower(),
        "dialect": shown(view.dialect),
        "services": [shown(name) for name in view.services],
        "slots": view.slots_total,
        "slots_used": view.slots_used,
        "tasks": view.held,
        "heard_ago": seconds(view.heard_ns_ago) or 0.0,
        "silence_max": seconds(view.silence_ns),
    }


def explanation(name: bytes, told: Explanation) -> dict[str, Any]:
    return {
        "name": shown(name),
        "reason": told.reason.value,
        "sentence": told.sentence,
        "after": [shown(one) for one in told.after],
    }
