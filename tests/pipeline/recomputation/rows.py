"""Rows of attempts, tasks and workers, recomputed from a replay.

Each function returns one row as a dict with every column of its table, as the page defines them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.pipeline.recomputation.replay import Attempt, Generation, Replay, Row, Stay

EPOCH = datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None)


def time(time_ns: int | None) -> datetime | None:
    """Return a time as tables have it: to the microsecond, without a zone."""
    return None if time_ns is None else EPOCH + timedelta(microseconds=time_ns // 1000)


def _without_zone(value: datetime | None) -> datetime | None:
    return None if value is None else value.replace(tzinfo=None)


def attempt_row(attempt: Attempt) -> Row:
    generation, leased = attempt.generation, attempt.leased
    settled: Row = attempt.settled or {}
    started_ns = settled.get("started_ns")
    run = attempt.run if started_ns is not None else None
    return {
        **_identity(generation),
        **{name: leased[name] for name in ("attempt", "service", "lane", "priority")},
        **{name: leased[name] for name in ("worker", "dialect")},
        "submitted": time(generation.submitted["time_ns"]),
        "ready": time(attempt.ready_ns),
        "leased": time(leased["time_ns"]),
        "settled": time(settled.get("time_ns")),
        "leased_record": leased["record"],
        "outcome": attempt.outcome,
        "reason": settled.get("reason"),
        "own_fault": settled.get("own_fault"),
        "wait_ns": attempt.wait_ns,
        "run_ns": attempt.run_ns,
        "result_bytes": settled.get("result_bytes"),
        "leased_ns": leased["time_ns"],
        "started": time(started_ns),
        "ended": time(run[1]) if run else None,
        "queued_ns": attempt.queued_ns,
        **{name: settled.get(name) for name in ("exit_status", "signal", "host", "cpu_ns")},
        "memory_max_bytes": settled.get("memory_max_bytes"),
    }


def _identity(generation: Generation) -> Row:
    return {
        "campaign": generation.campaign,
        "task": generation.task,
        "name": generation.name,
        "generation": generation.number,
    }


def task_rows(replay: Replay) -> list[Row]:
    """Return one row for each generation."""
    graph = Graph()
    return [_task_row(one) | graph.row(one) for one in replay.generations]


def _task_row(generation: Generation) -> Row:
    submitted, latest, state = generation.submitted, generation.events[-1], generation.state
    attempts = generation.attempts
    runs_ns = [one.run_ns for one in attempts if one.run_ns is not None]
    return {
        **_identity(generation),
        **{name: latest[name] for name in ("service", "lane", "priority")},
        **{name: submitted[name] for name in ("dialect", "slots", "payload_bytes")},
        "due": _without_zone(submitted["due"]),
        "state": state,
        "attempts": len(attempts),
        "failures": sum(bool((one.settled or {}).get("own_fault")) for one in attempts),
        "losses": sum(one.is_lost for one in attempts),
        "submitted": time(submitted["time_ns"]),
        "submitted_record": submitted["record"],
        "ready": time(generation.ready_ns),
        "leased": time(attempts[0].leased["time_ns"]) if attempts else None,
        "ended": time(generation.ended_ns),
        "worker": attempts[-1].leased["worker"] if attempts else None,
        "reason": generation.last["reason"] if state == "FAILED" else None,
        "blocked_ns": _gap(submitted["time_ns"], generation.ready_ns),
        "wait_ns": sum(one.wait_ns for one in attempts),
        "queued_ns": sum(one.queued_ns or 0 for one in attempts),
        "run_ns": sum(runs_ns),
        "run_last_ns": runs_ns[-1] if runs_ns else None,
        "result_bytes": generation.last["result_bytes"] if state == "DONE" else None,
    }


def _gap(begin_ns: int, end_ns: int | None) -> int | None:
    return None if end_ns is None else max(0, end_ns - begin_ns)


class Graph:
    """Columns of tasks that depend on the tasks before them, by recursion."""

    def __init__(self) -> None:
        self.level = cache(self._level)
        self.path_ns = cache(self._path_ns)
        self.earliest_ns = cache(self._earliest_ns)
        self.can_run = cache(self._can_run)

    def row(self, generation: Generation) -> Row:
        is_blocked = generation.state == "BLOCKED"
        return {
            "is_behind_failure": is_blocked and not self.can_run(generation),
            "waits_for": len(generation.after),
            "level": self.level(generation),
            "path_ns": self.path_ns(generation),
            "earliest_end": time(self.earliest_ns(generation)),
        }

    def _level(self, generation: Generation) -> int:
        return max((1 + self.level(one) for one in generation.befores), default=0)

    def _path_ns(self, generation: Generation) -> int:
        before_ns = max((self.path_ns(one) for one in generation.befores), default=0)
        return before_ns + (run_last_ns(generation) or 0)

    def _earliest_ns(self, generation: Generation) -> int:
        due = _without_zone(generation.submitted["due"])
        submitted_ns = int(generation.submitted["time_ns"]) // 1000 * 1000
        begins_ns = [submitted_ns, *map(self.earliest_ns, generation.befores)]
        if due is not None:
            begins_ns.append((due - EPOCH) // timedelta(microseconds=1) * 1000)
        return max(begins_ns) + (run_last_ns(generation) or 0)

    def _can_run(self, generation: Generation) -> bool:
        """Return whether a task, or one that it waits for, can run without a command."""
        if generation.state != "BLOCKED":
            return generation.state in ("DELAYED", "READY", "LEASED")
        # A name that is not submitted yet may come.
        return any(one is None or self.can_run(one) for one in generation.after.values())


def run_last_ns(generation: Generation) -> int | None:
    known = [one.run_ns for one in generation.attempts if one.run_ns is not None]
    return known[-1] if known else None


def worker_row(stay: Stay) -> Row:
    runs = [one.run for one in stay.attempts if one.run is not None]
    outcomes = [one.outcome for one in stay.attempts]
    run_ns, slots = sum(end - start for start, end in runs), stay.facts["slots"]
    stay_ns = stay.end_ns - stay.joined["time_ns"]
    room_ns = stay_ns * slots
    return {
        "worker": stay.joined["worker"],
        "stay": stay.number,
        "incarnation": stay.joined["incarnation"],
        "dialect": stay.facts["dialect"],
        "services": stay.facts["services"],
        "slots": slots,
        "joined": time(stay.joined["time_ns"]),
        "joined_record": stay.joined["record"],
        "left": time(stay.left["time_ns"]) if stay.left else None,
        "reason": stay.left["reason"] if stay.left else None,
        "attempts": len(stay.attempts),
        "finished": outcomes.count("finished"),
        "failed": outcomes.count("failed") + outcomes.count("postponed"),
        "lost": outcomes.count("returned") + outcomes.count("expired"),
        "busy_ns": covered_ns(runs),
        "run_ns": run_ns,
        "stay_ns": stay_ns,
        "utilisation": run_ns / room_ns if room_ns > 0 else None,
    }


def covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of spans."""
    total, reached = 0, None
    for start, end in sorted(spans):
        begin = start if reached is None else max(start, reached)
        if end > begin:
            total += end - begin
            reached = end
    return total
