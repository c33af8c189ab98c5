"""Compares the tables of a run with the log of the API: python check.py DIRECTORY ROWS.

Prints a table of the statements that must hold, and exits 1 if one does not.
"""
# ruff: noqa: INP001, T201  # it stands alone, and prints

import sys
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

LOG = "requests.log"
SCORES, DEAD_LETTERS, BACKFILLED = "scores", "dead_letters", "backfilled"

#: What the API allows for each host in a second.
RATE_MAX = 30


class Request(NamedTuple):
    """A line of the log."""

    time: float
    host: str
    id: int
    status: int


class Run:
    """The log and the tables of a run."""

    def __init__(self, directory: Path, rows: int) -> None:
        self.rows = rows
        lines = (directory / LOG).read_text().splitlines()
        fields = [line.split() for line in lines]
        self.requests = [Request(float(a), b, int(c), int(d)) for a, b, c, d in fields]
        self.scores, self.dead, self.again = (
            read(directory / name) for name in (SCORES, DEAD_LETTERS, BACKFILLED)
        )


class Check(NamedTuple):
    """A statement, figures about it, and whether it holds."""

    text: str
    figures: str
    holds: bool


def read(directory: Path) -> dict[int, dict[str, Any]]:
    """Return a table's rows by key. Raises an error if a key is there twice."""
    rows = pq.read_table(directory).to_pylist()
    by_key = {row["key"]: row for row in rows}
    if len(by_key) < len(rows):
        raise ValueError(f"{directory.name}: {len(rows) - len(by_key)} keys are there twice")
    return by_key


def within_the_limit(run: Run) -> Check:
    """Count the requests of each host in every second, refused ones included."""
    most, recent = 0, defaultdict[str, deque[float]](deque)
    for request in run.requests:
        times = recent[request.host]
        times.append(request.time)
        while times[0] <= request.time - 1:
            times.popleft()
        most = max(most, len(times))
    refused = sum(request.status == 429 for request in run.requests)  # noqa: PLR2004
    figures = f"at most {most}, {refused:,} refused"
    return Check(f"requests of a host in any second: {RATE_MAX}", figures, most <= RATE_MAX)


def every_row_has_an_outcome(run: Run) -> Check:
    states = Counter(row["state"] for row in run.scores.values())
    figures = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))
    is_complete = run.scores.keys() == {*range(run.rows)} and not states.keys() - {"done", "failed"}
    return Check("every row is done or failed", figures, is_complete)


def failures_are_dead_letters(run: Run) -> Check:
    failed = {key for key, row in run.scores.items() if row["state"] == "failed"}
    explained = sum(bool(row["reason"]) for row in run.dead.values())
    holds = failed == run.dead.keys() and explained == len(run.dead)
    return Check("failed rows are dead letters with a reason", f"{len(run.dead):,}", holds)


def requests_are_attempts(run: Run) -> Check:
    """Compare requests with charged attempts, row by row."""
    made = Counter(request.id for request in run.requests)
    attempts = {key: row["attempts"] for key, row in (run.scores | run.again).items()}
    differing = sum(made[key] != count for key, count in attempts.items())
    figures = f"{made.total():,} requests, {sum(attempts.values()):,} attempts"
    return Check(
        "each attempt is one request", f"{figures}, {differing} rows differ", not differing
    )


def nothing_is_called_after_success(run: Run) -> Check:
    answered = Counter(request.id for request in run.requests if request.status == 200)  # noqa: PLR2004
    done = {key for key, row in (run.scores | run.again).items() if row["state"] == "done"}
    most = max(answered.values(), default=0)
    holds = most <= 1 and answered.keys() == done
    return Check("each done row has one answer", f"{len(done):,} done, most {most}", holds)


def backfill_runs_what_was_down(run: Run) -> Check:
    chosen = {key for key, row in run.dead.items() if "HTTP 503" in row["reason"]}
    done = sum(row["state"] == "done" for row in run.again.values())
    figures = f"{len(run.again):,} run again, {done:,} done"
    return Check("backfill runs the chosen rows again", figures, chosen == run.again.keys())


CHECKS = (
    within_the_limit,
    every_row_has_an_outcome,
    failures_are_dead_letters,
    requests_are_attempts,
    nothing_is_called_after_success,
    backfill_runs_what_was_down,
)


def main(directory: Path, rows: int) -> int:
    """Print the checks. Return 1 if one does not hold."""
    run = Run(directory, rows)
    checks = [check(run) for check in CHECKS]
    for one in checks:
        print(f"{one.text:44} {one.figures:52} {'yes' if one.holds else 'NO'}")
    return 0 if all(one.holds for one in checks) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
