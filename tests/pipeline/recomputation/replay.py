"""A history played back event by event: generations of tasks, their attempts, stays of workers.

Plain loops over rows of `events` and `edges`. Written from the pages on the pipeline and on the
journal alone. It shares no code with the jobs that make the tables, and must not.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

Row = dict[str, Any]

#: Kinds of events that settle the open attempt of a task.
SETTLES = ("finished", "failed", "postponed", "returned", "expired", "cancelled")
#: The state of a task after these events. Others leave it waiting for tasks or for a time.
STATE_AFTER = {
    "ready": "READY",
    "leased": "LEASED",
    "finished": "DONE",
    "failed": "FAILED",
    "aged": "FAILED",
    "cancelled": "CANCELLED",
}
WAITS_AFTER = ("submitted", "postponed", "returned", "expired", "due", "retried", "extended")
#: Reasons of a return that the worker itself asked for.
RETURNED_BY_WORKER = ("refused", "transferred", "deferred_back")
ENDED = ("DONE", "FAILED", "CANCELLED")


class Attempt(Struct, eq=False):
    """One lease of a task. `settled` is the event that settled it."""

    generation: Generation
    leased: Row
    ready_ns: int
    settled: Row | None = None

    @property
    def outcome(self) -> str | None:
        return None if self.settled is None else str(self.settled["kind"])

    @property
    def run(self) -> tuple[int, int] | None:
        """Return when it ran, from start to end. None if it did not run, or that is unknown."""
        if self.settled is None:
            return None
        start_ns = self.settled["started_ns"]
        if start_ns is not None:
            return start_ns, start_ns + self.settled["run_ns"]
        if self.outcome in ("finished", "failed", "postponed") and not self.is_lost:
            begin_ns = self.leased["time_ns"]
            return begin_ns, max(begin_ns, self.settled["time_ns"])
        return None

    @property
    def is_lost(self) -> bool:
        """Return whether it was lost with its worker, so that it may never have started."""
        settled = self.settled
        if settled is None:
            return False
        if settled["kind"] == "returned":
            return settled["reason"] not in RETURNED_BY_WORKER
        return settled["kind"] == "expired" or (
            settled["kind"] == "failed" and not settled["own_fault"]
        )

    @property
    def run_ns(self) -> int | None:
        return None if self.run is None else self.run[1] - self.run[0]

    @property
    def queued_ns(self) -> int | None:
        if self.settled is None or self.settled["started_ns"] is None:
            return None
        return int(self.settled["started_ns"] - self.leased["time_ns"])

    @property
    def wait_ns(self) -> int:
        return max(0, int(self.leased["time_ns"]) - self.ready_ns)


class Generation(Struct, eq=False):
    """One submission of a name, with its events in order."""

    number: int
    submitted: Row
    #: Which generation of the key it is, over all campaigns that share it.
    events: list[Row] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    #: Names in `edges`, each once, and the generations that they stand for.
    after: dict[str, Generation | None] = field(default_factory=dict)
    #: The event that decided its state.
    last: Row = field(default_factory=dict)
    ready_ns: int | None = None

    @property
    def campaign(self) -> str:
        return str(self.submitted["campaign"])

    @property
    def task(self) -> str:
        return str(self.submitted["task"])

    @property
    def name(self) -> str:
        return self.task.removeprefix(f"{self.campaign}/") if self.campaign else self.task

    @property
    def befores(self) -> list[Generation]:
        return [one for one in self.after.values() if one is not None]

    @property
    def state(self) -> str:
        kind = self.last["kind"]
        if kind in STATE_AFTER:
            return STATE_AFTER[kind]
        is_open = any(one is None or one.state != "DONE" for one in self.after.values())
        return "BLOCKED" if is_open else "DELAYED"

    @property
    def ended_ns(self) -> int | None:
        return self.last["time_ns"] if self.state in ENDED else None


class Stay(Struct, eq=False):
    """One stay of a worker. `last` is its last event, `left` the event with which it left."""

    number: int
    joined: Row
    #: The latest facts.
    facts: Row
    last: Row
    left: Row | None = None
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def end_ns(self) -> int:
        last = self.left or self.last
        return max(int(self.joined["time_ns"]), int(last["time_ns"]))


class Replay:
    """All generations, attempts and stays of a history, in the order of their records."""

    def __init__(self, events: list[Row], edges: list[Row]) -> None:
        self.generations: list[Generation] = []
        self.attempts: list[Attempt] = []
        self.stays: list[Stay] = []
        #: The latest time of an event.
        self.last_ns = max((event["time_ns"] for event in events), default=0)
        self._newest: dict[str, Generation] = {}
        self._open: dict[str, Attempt] = {}
        self._registered: dict[str, Stay] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._stays: dict[str, int] = {}
        #: Edges to names that are not submitted yet.
        self._awaited: list[tuple[Generation, str]] = []
        self._edges: dict[int, list[Row]] = {}
        for edge in edges:
            self._edges.setdefault(edge["record"], []).append(edge)
        records: dict[int, list[Row]] = {}
        for event in events:
            records.setdefault(event["record"], []).append(event)
        for record in sorted(records):
            self._play(record, records[record])

    def _play(self, record: int, rows: list[Row]) -> None:
        for row in rows:
            if row["kind"] == "submitted":
                self._submit(row)
        for edge in self._edges.get(record, ()):
            self._wait(self._newest[edge["task"]], edge["after"])
        for row in rows:
            if row["worker"] is not None:
                self._visit(row)
            if row["task"] is not None and row["campaign"] is not None:
                self._step(row)

    def _submit(self, row: Row) -> None:
        key = (row["campaign"], row["task"])
        self._counts[key] = self._counts.get(key, 0) + 1
        generation = Generation(self._counts[key], row)
        self.generations.append(generation)
        self._newest[row["task"]] = generation
        still: list[tuple[Generation, str]] = []
        for waiting, after in self._awaited:
            if row["task"] in (after, after.removeprefix(f"{waiting.campaign}/")):
                waiting.after[after] = generation
            else:
                still.append((waiting, after))
        self._awaited = still

    def _wait(self, generation: Generation, after: str) -> None:
        before = self._newest.get(after)
        generation.after[after] = before
        if before is None:
            self._awaited.append((generation, after))

    def _step(self, row: Row) -> None:
        generation = self._newest[row["task"]]
        kind = row["kind"]
        if kind == "stale":
            return
        generation.events.append(row)
        was_failed = bool(generation.last) and generation.state == "FAILED"
        if kind in STATE_AFTER or (kind in WAITS_AFTER and not (kind == "extended" and was_failed)):
            generation.last = row
        if kind == "ready" and generation.ready_ns is None:
            generation.ready_ns = row["time_ns"]
        if kind == "leased":
            self._lease(generation, row)
        elif kind in SETTLES and row["task"] in self._open:
            self._open.pop(row["task"]).settled = row

    def _lease(self, generation: Generation, row: Row) -> None:
        ready = [one for one in generation.events if one["kind"] == "ready"]
        attempt = Attempt(generation, row, ready[-1]["time_ns"])
        self.attempts.append(attempt)
        generation.attempts.append(attempt)
        self._open[row["task"]] = attempt
        stay = self._registered.get(row["worker"])
        if stay is not None:
            stay.attempts.append(attempt)

    def _visit(self, row: Row) -> None:
        """Follow the events of a worker."""
        worker = row["worker"]
        stay = self._registered.get(worker)
        if row["kind"] == "worker_joined":
            if stay is None or stay.facts["incarnation"] != row["incarnation"]:
                self._stays[worker] = self._stays.get(worker, 0) + 1
                stay = Stay(self._stays[worker], row, row, row)
                self.stays.append(stay)
                self._registered[worker] = stay
            stay.facts = row
        if stay is not None:
            stay.last = row
            if row["kind"] == "worker_left":
                stay.left = row
                del self._registered[worker]
