"""Rows of metrics, recomputed from a replay, one interval at a time.

`Intervals` collects counts, spans and durations for each scope. `row` counts those of one interval.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, field

from tests.pipeline.recomputation.rows import time

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from tests.pipeline.recomputation.replay import Attempt, Generation, Replay, Row

#: Events that end a task, and the column that counts them.
ENDS = {"finished": "finished", "failed": "failed", "aged": "failed", "cancelled": "cancelled"}
#: Outcomes of attempts after which the task goes on.
RETRIES = ("postponed", "returned", "expired")
#: A task is no longer ready after these. A moved task is ready elsewhere.
LEAVES_QUEUE = ("leased", "aged", "cancelled", "postponed", "extended", "moved")

COUNTS = ("submitted", "leased", "finished", "failed", "cancelled", "retries")

#: Reasons are cut here.
REASON_CHARACTERS_MAX = 120

#: Begin and end. None: it has not ended.
Span = tuple[int, int | None]


class Scope(NamedTuple):
    """The campaign, service, lane or worker of a row of metrics."""

    scope: str
    campaign: str | None = None
    service: str | None = None
    lane: str | None = None
    worker: str | None = None


class Activity(Struct):
    """All that happened in one scope."""

    #: Times of what each column counts.
    times: dict[str, list[int]] = field(default_factory=dict)
    reasons: list[tuple[int, str]] = field(default_factory=list)
    queued: list[Span] = field(default_factory=list)
    runs: list[Span] = field(default_factory=list)
    #: Durations, with the time at which each is counted.
    wait: list[tuple[int, int]] = field(default_factory=list)
    run: list[tuple[int, int]] = field(default_factory=list)
    #: Presence of a worker, with its slots.
    stays: list[tuple[int, int, int]] = field(default_factory=list)

    def count(self, column: str, time_ns: int) -> None:
        self.times.setdefault(column, []).append(time_ns)


class Intervals:
    """The activities of all scopes of a history."""

    def __init__(self, replay: Replay) -> None:
        self.scopes: dict[Scope, Activity] = {}
        self._last_ns = replay.last_ns
        for generation in replay.generations:
            for row in generation.events:
                self._add_event(generation, row)
            self._add_queue(generation)
        for attempt in replay.attempts:
            for activity in self._of_task(attempt.generation.campaign, attempt.leased):
                _add_attempt(activity, attempt)
            self._add_to_worker(attempt)
        for stay in replay.stays:
            activity = self._at(Scope("worker", worker=stay.joined["worker"]))
            activity.stays.append((stay.joined["time_ns"], stay.end_ns, stay.facts["slots"]))

    def _at(self, scope: Scope) -> Activity:
        return self.scopes.setdefault(scope, Activity())

    def _of_task(self, campaign: str, row: Row) -> Iterator[Activity]:
        service, lane = row["service"], row["lane"]
        yield self._at(Scope("campaign", campaign))
        yield self._at(Scope("service", campaign, service))
        if lane:
            yield self._at(Scope("lane", campaign, service, lane))

    def _add_event(self, generation: Generation, row: Row) -> None:
        kind = row["kind"]
        column = "submitted" if kind == "submitted" else ENDS.get(kind)
        is_failure = kind in ("failed", "aged") or (kind == "postponed" and row["own_fault"])
        for activity in self._of_task(generation.campaign, row):
            if column:
                activity.count(column, row["time_ns"])
            if is_failure:
                activity.reasons.append((row["time_ns"], _first_line(row["reason"])))

    def _add_queue(self, generation: Generation) -> None:
        """Add the spans in which a task was ready, each in its lane."""
        since: Row | None = None
        for row in generation.events:
            kind = row["kind"]
            if since is not None and kind in LEAVES_QUEUE:
                self._close(generation, since, row["time_ns"])
                since = row if kind == "moved" else None
            elif kind == "ready":
                since = row
        if since is not None:
            self._close(generation, since, None)

    def _close(self, generation: Generation, since: Row, end_ns: int | None) -> None:
        """Add a span. If the clock was set back in it, it has no length."""
        if end_ns is not None:
            end_ns = max(end_ns, since["time_ns"])
        for activity in self._of_task(generation.campaign, since):
            activity.queued.append((since["time_ns"], end_ns))

    def _add_to_worker(self, attempt: Attempt) -> None:
        """Count an attempt where it started and where it ended, as its worker measured."""
        activity = self._at(Scope("worker", worker=attempt.leased["worker"]))
        activity.count("leased", attempt.leased["time_ns"] + (attempt.queued_ns or 0))
        _add_durations(activity, attempt)
        settled, outcome = attempt.settled, attempt.outcome
        if settled is None:
            return
        end_ns = settled["time_ns"] if attempt.run is None else attempt.run[1]
        column = "retries" if outcome in RETRIES else ENDS[str(outcome)]
        activity.count(column, end_ns)
        if outcome == "failed" or settled["own_fault"]:
            activity.reasons.append((end_ns, _first_line(settled["reason"])))

    def begins(self, scope: Scope, bucket_ns: int) -> set[datetime | None]:
        """Return when the intervals begin in which something changes."""
        activity = self.scopes[scope]
        times_ns = [one for times in activity.times.values() for one in times]
        times_ns += [at_ns for span in activity.queued for at_ns in span if at_ns is not None]
        times_ns += [at_ns for span in activity.runs for at_ns in span if at_ns is not None]
        return {time(at_ns // bucket_ns * bucket_ns) for at_ns in times_ns}

    def row(self, scope: Scope, begin_ns: int, bucket_ns: int) -> Row:
        """Return the row of one interval."""
        activity, end_ns = self.scopes[scope], begin_ns + bucket_ns
        within = range(begin_ns, end_ns)
        counts = {
            name: sum(at_ns in within for at_ns in activity.times.get(name, ())) for name in COUNTS
        }
        reasons: dict[str, int] = {}
        for at_ns, reason in activity.reasons:
            if at_ns in within:
                reasons[reason] = reasons.get(reason, 0) + 1
        # An open attempt is known to run until the last event.
        runs = [(start, self._last_ns if stop is None else stop) for start, stop in activity.runs]
        busy_ns = sum(overlap_ns(*run, begin_ns, end_ns) for run in runs)
        return {
            **scope._asdict(),
            "bucket": time(begin_ns),
            "bucket_ns": bucket_ns,
            **counts,
            "throughput": counts["finished"] * 1e9 / bucket_ns,
            "depth": None
            if scope.worker is not None
            else sum(_holds(span, end_ns) for span in activity.queued),
            "running": sum(_holds(span, end_ns) for span in activity.runs),
            "busy_ns": busy_ns,
            "utilisation": _utilisation(activity, busy_ns, begin_ns, end_ns),
            **_quantiles("wait", [ns for at_ns, ns in activity.wait if at_ns in within]),
            **_quantiles("run", [ns for at_ns, ns in activity.run if at_ns in within]),
            "reasons": reasons or None,
        }


def _add_attempt(activity: Activity, attempt: Attempt) -> None:
    """Count an attempt where the broker decided on it."""
    activity.count("leased", attempt.leased["time_ns"])
    if attempt.settled is not None and attempt.outcome in RETRIES:
        activity.count("retries", attempt.settled["time_ns"])
    _add_durations(activity, attempt)


def _add_durations(activity: Activity, attempt: Attempt) -> None:
    leased_ns = attempt.leased["time_ns"]
    activity.wait.append((leased_ns, attempt.wait_ns))
    if attempt.settled is None:  # it may be running
        activity.runs.append((leased_ns, None))
    elif attempt.run is not None:
        activity.runs.append(attempt.run)
        activity.run.append((attempt.run[1], attempt.run[1] - attempt.run[0]))


def _first_line(reason: str | None) -> str:
    return (reason or "").strip(" ").split("\n", 1)[0][:REASON_CHARACTERS_MAX]


def _holds(span: Span, end_ns: int) -> bool:
    """Return whether a span contains the last moment of an interval."""
    start_ns, stop_ns = span
    return start_ns < end_ns and (stop_ns is None or stop_ns >= end_ns)


def overlap_ns(start_ns: int, stop_ns: int, begin_ns: int, end_ns: int) -> int:
    """Return how much of a span is in an interval."""
    return max(0, min(stop_ns, end_ns) - max(start_ns, begin_ns))


def _utilisation(activity: Activity, busy_ns: int, begin_ns: int, end_ns: int) -> float | None:
    """Return the share of the slot time of a whole interval, by the slots of the latest stay."""
    all_slots = [slots for _, _, slots in activity.stays]
    known = [slots for joined_ns, _, slots in activity.stays if joined_ns < end_ns]
    slots = (known[-1:] or all_slots[:1] or [0])[0]
    return busy_ns / (slots * (end_ns - begin_ns)) if slots else None


def _quantiles(name: str, durations_ns: list[int]) -> Row:
    """Return the values of the ranks, exactly."""
    ordered = sorted(durations_ns)
    ranks = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {
        f"{name}_{part}_ns": ordered[max(1, ceil(share * len(ordered))) - 1] if ordered else None
        for part, share in ranks.items()
    }
