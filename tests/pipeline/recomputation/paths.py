"""Check of critical paths against a replay.

Tasks may end at the same moment, so a campaign may have several critical paths. A path is right if
each of its steps is, so this follows the steps that a table has and recomputes their columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.pipeline.recomputation.rows import time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.pipeline.recomputation.replay import Generation, Replay, Row

#: A position, a column, the value that was found, and the right one.
Problem = tuple[int, str, Any, Any]

#: Each duration here is the difference of up to four truncated times.
DURATION_OFF_NS_MAX = 2000


class Paths:
    """The generations of a history, and the rows that their critical paths must have."""

    def __init__(self, replay: Replay) -> None:
        self._by_key = {(one.task, one.number): one for one in replay.generations}
        self._begins_ns: dict[str, int] = {}
        self._own: dict[str, list[Generation]] = {}
        for one in replay.generations:
            begin_ns = self._begins_ns.get(one.campaign, one.submitted["time_ns"])
            self._begins_ns[one.campaign] = min(begin_ns, one.submitted["time_ns"])
            self._own.setdefault(one.campaign, []).append(one)

    def campaigns(self) -> set[str]:
        """Return the campaigns that have a critical path: those with a task that ran and ended."""
        return {name for name, own in self._own.items() if any(map(_counts, own))}

    def problems(self, campaign: str, path: list[Row]) -> Iterator[Problem]:
        """Return what is wrong with the rows of one campaign, in the order of their positions."""
        chain = [self._by_key[row["task"], row["generation"]] for row in path]
        candidates = self._own[campaign]
        for position, one in reversed([*enumerate(chain, start=1)]):
            last = self._last_of(campaign, candidates)
            if one not in last:
                yield position, "task", one.task, [other.task for other in last]
            candidates = one.befores
        first = self._last_of(campaign, candidates)
        if first:
            yield 1, "after", None, [other.task for other in first]
        for index, (row, one) in enumerate(zip(path, chain, strict=True)):
            wanted = self._row(campaign, one, chain[index - 1] if index else None)
            wanted["position"] = index + 1
            for name, value in wanted.items():
                if not _is_equal(name, row[name], value):
                    yield index + 1, name, row[name], value

    def _last_of(self, campaign: str, candidates: list[Generation]) -> list[Generation]:
        """Return the candidates that ended last, to the microsecond."""
        begin_us = self._begins_ns[campaign] // 1000
        ended = [
            one
            for one in candidates
            if _counts(one) and (one.campaign == campaign or _ended_us(one) > begin_us)
        ]
        last_us = max(map(_ended_us, ended), default=0)
        return [one for one in ended if _ended_us(one) == last_us]

    def _row(self, campaign: str, one: Generation, before: Generation | None) -> Row:
        started_ns = self._begins_ns[campaign] if before is None else before.ended_ns
        ended_ns = one.ended_ns
        assert started_ns is not None
        assert ended_ns is not None
        row = one.submitted
        return {
            "campaign": campaign,
            "task": one.task,
            "name": one.name,
            "generation": one.number,
            "after": None if before is None else before.task,
            **{name: one.events[-1][name] for name in ("service", "lane", "priority")},
            "state": one.state,
            "attempts": len(one.attempts),
            "started": time(started_ns),
            "ready": time(one.ready_ns),
            "leased": time(one.attempts[0].leased["time_ns"]),
            "ended": time(ended_ns),
            **_parts(one, started_ns, ended_ns),
            "task_campaign": row["campaign"],
        }


def _is_equal(name: str, found: Any, wanted: Any) -> bool:
    """Compare two values. Durations are differences of times to the microsecond."""
    if name.endswith("_ns"):
        return abs(int(found) - int(wanted)) <= DURATION_OFF_NS_MAX
    return bool(found == wanted)


def _counts(one: Generation) -> bool:
    """Return whether a task ended, and had a worker."""
    return one.ended_ns is not None and bool(one.attempts)


def _ended_us(one: Generation) -> int:
    return (one.ended_ns or 0) // 1000


def _parts(one: Generation, started_ns: int, ended_ns: int) -> Row:
    """Divide the time of a step. What no other part explains was spent in the worker, or, with
    several attempts, in the unsuccessful ones."""
    total_ns = max(0, ended_ns - started_ns)
    held_ns = min(total_ns, max(0, (one.ready_ns or 0) - started_ns))
    run_ns = min(total_ns - held_ns, one.attempts[-1].run_ns or 0)
    wait_ns = sum(attempt.wait_ns for attempt in one.attempts)
    wait_ns = min(total_ns - held_ns - run_ns, wait_ns)
    rest_ns = total_ns - held_ns - run_ns - wait_ns
    queued_ns = rest_ns
    if len(one.attempts) > 1:
        queued_ns = min(rest_ns, sum(attempt.queued_ns or 0 for attempt in one.attempts))
    return {
        "total_ns": total_ns,
        "held_ns": held_ns,
        "wait_ns": wait_ns,
        "queued_ns": queued_ns,
        "retry_ns": rest_ns - queued_ns,
        "run_ns": run_ns,
        "gain_ns": total_ns - run_ns,
    }
