"""A reference model of tasks and workers in plain dicts and loops, slow and clear.

Written from the design, not from the core: it uses only enums of `taskyard.core`. It does not
predict policy (which ready task goes to which worker), but checks whether each assignment was
allowed.
"""

from typing import Any

from taskyard.core.events import Outcome
from taskyard.core.states import TaskState

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState


class ModelTask:
    """One generation of a name."""

    def __init__(self, waits: list[bytes], attempt: int, **terms: Any) -> None:
        self.waits = list(dict.fromkeys(waits))
        self.attempt = attempt
        self.terms = terms
        self.due_ns: int = terms["due_ns"]
        self.expires_ns: int = terms["expires_ns"]
        self.holder: bytes | None = None
        self.ended: TaskState | None = None
        self.failed = False
        self.delayed = False
        self.failures = 0
        self.losses = 0

    @property
    def losses_left(self) -> int:
        """How many workers more it may cost before its last attempt; many if it cost none."""
        return self.terms["crashes_max"] - 1 - self.losses if self.losses else 99

    @property
    def state(self) -> TaskState:
        if self.ended is not None:
            return self.ended
        if self.holder is not None:
            return LEASED
        if self.failed:
            return FAILED
        if self.waits:
            return BLOCKED
        return DELAYED if self.delayed else READY


class ModelWorker:
    def __init__(self, slots: int, timeout_ns: int, incarnation: int, now_ns: int) -> None:
        self.slots = slots
        self.timeout_ns = timeout_ns
        self.incarnation = incarnation
        self.last_seen_ns = now_ns
        self.parked = False


class Model:
    """The expected state of a scheduler with serial lanes and one service."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.tasks: dict[bytes, ModelTask] = {}
        self.workers: dict[bytes, ModelWorker] = {}
        self.paused = False

    def states(self) -> dict[bytes, TaskState]:
        return {name: task.state for name, task in self.tasks.items()}

    def unfinished(self, name: bytes) -> bool:
        return name in self.tasks and self.tasks[name].ended is None

    def held_by(self, worker: bytes) -> list[bytes]:
        return [name for name, task in self.tasks.items() if task.holder == worker]

    # Submitting.

    def submit(self, after: dict[bytes, list[bytes]], mode: str, terms: dict[str, Any]) -> bool:
        """Accept a batch, or return False and change nothing."""
        if mode == "extend":
            new = [name for name in after if not self.unfinished(name)]
            if any(self.unfinished(name) and self.tasks[name].holder for name in after):
                return False
        else:
            new = [name for name in after if name not in self.tasks]
            after = {name: after[name] for name in new}
        waits: dict[bytes, list[bytes]] = {}
        for name, befores in after.items():
            found = [self.stance(one, after, mode) for one in befores]
            if "refuse" in found:
                return False
            waits[name] = [
                one for one, stance in zip(befores, found, strict=True) if stance == "wait"
            ]
        if self.closes_cycle(waits, new):
            return False
        for name, befores in waits.items():
            if name in new:
                self.begin(name, befores, terms)
            elif befores:
                self.tasks[name].waits += befores
                self.tasks[name].delayed = False
        return True

    def stance(self, name: bytes, batch: dict[bytes, list[bytes]], mode: str) -> str:
        """Return how a predecessor is treated: wait, done or refuse."""
        if name in batch or self.unfinished(name):
            return "wait"
        if name not in self.tasks:
            return {"harmless": "refuse", "wait": "wait", "extend": "done"}[mode]
        return "done" if self.tasks[name].ended is DONE else "refuse"

    def closes_cycle(self, waits: dict[bytes, list[bytes]], new: list[bytes]) -> bool:
        edges = {name: list(task.waits) for name, task in self.tasks.items() if not task.ended}
        for name, befores in waits.items():
            edges[name] = befores + (edges.get(name, []) if name not in new else [])
        while free := [name for name in edges if not [b for b in edges[name] if b in edges]]:
            for name in free:
                del edges[name]
        return bool(edges)

    def begin(self, name: bytes, waits: list[bytes], terms: dict[str, Any]) -> None:
        attempt = self.tasks[name].attempt if name in self.tasks else 0
        self.tasks[name] = task = ModelTask(waits, attempt, **terms)
        task.delayed = task.due_ns > self.now_ns

    # Assignments: allowed or not.

    def assigned(self, worker: bytes, names: list[bytes], attempts: list[int]) -> None:
        assert not self.paused
        for name, attempt in zip(names, attempts, strict=True):
            task = self.tasks[name]
            assert task.state is READY, f"{name!r} was {task.state.name} when it was leased"
            assert attempt == task.attempt + 1
            assert not self.lane_is_out(task), f"the lane of {name!r} is served already"
            task.attempt, task.holder = attempt, worker
        held = self.held_by(worker)
        slots = self.workers[worker].slots
        assert not slots or len(held) <= slots, f"{worker!r} holds too much"
        if any(self.tasks[name].losses_left <= 0 for name in held):
            assert len(held) == 1, f"{worker!r} holds a task that must be alone"
        self.workers[worker].parked = False

    def lane_is_out(self, task: ModelTask) -> bool:
        lane = task.terms["lane"]
        others = [one for one in self.tasks.values() if one.terms["lane"] == lane]
        return bool(lane) and any(one.holder is not None for one in others)

    def neglected(self) -> list[tuple[bytes, bytes]]:
        """Return pairs of a ready task and a worker that waits for it: no pair may wait for a
        timer. Return none while a task has at most one loss left, as isolation and reservations
        may keep it waiting."""
        unended = [task for task in self.tasks.values() if task.ended is None]
        if self.paused or any(task.losses_left <= 1 for task in unended):
            return []
        ready = [name for name, task in self.tasks.items() if task.state is READY]
        ready = [name for name in ready if not self.lane_is_out(self.tasks[name])]
        waiting = [
            name
            for name, worker in self.workers.items()
            if worker.parked and (not worker.slots or len(self.held_by(name)) < worker.slots)
        ]
        return [(task, worker) for task in ready for worker in waiting]

    # Settling.

    def holds(self, worker: bytes, name: bytes, attempt: int) -> bool:
        task = self.tasks.get(name)
        return task is not None and (task.holder, task.attempt) == (worker, attempt)

    def settle(self, name: bytes, outcome: Outcome, retry_at_ns: int) -> None:
        task = self.tasks[name]
        task.holder = None
        if outcome is Outcome.DONE:
            task.ended = DONE
            self.release(name)
        elif outcome is Outcome.FAILED_FINAL:
            task.failed = True
        elif outcome is Outcome.FAILED:
            delays = task.terms["retry_delays_ns"]
            task.failed = task.failures >= len(delays)
            if not task.failed:
                task.due_ns, task.delayed = self.now_ns + delays[task.failures], True
            task.failures += 1
        elif outcome is Outcome.RETRY_AT or (outcome is Outcome.DEFER_BACK and retry_at_ns):
            task.due_ns, task.delayed = retry_at_ns, True

    def release(self, done: bytes) -> None:
        for task in self.tasks.values():
            if done in task.waits and task.ended is None:
                task.waits = [name for name in task.waits if name != done]
                if not task.waits:
                    task.delayed = task.due_ns > self.now_ns

    def lose(self, worker: bytes, *, blamed: bool) -> None:
        """Remove a worker. Its tasks return to the queue, or fail if they were lost too often."""
        for name in self.held_by(worker):
            task = self.tasks[name]
            task.holder = None
            task.losses += blamed
            task.failed = task.losses >= task.terms["crashes_max"]
        del self.workers[worker]

    def cancel(self, names: list[bytes]) -> None:
        line = [name for name in names if self.unfinished(name)]
        for gone in line:  # grows while it is walked
            behind = [name for name in self.tasks if gone in self.tasks[name].waits]
            line += [name for name in behind if self.unfinished(name) and name not in line]
        for name in line:
            self.tasks[name].ended, self.tasks[name].holder = CANCELLED, None

    def retry(self, names: list[bytes]) -> None:
        for name in names:
            task = self.tasks.get(name)
            if task is None or task.state not in (FAILED, DELAYED):
                continue
            if task.state is FAILED:
                task.failed, task.failures, task.losses = False, 0, 0
                if task.expires_ns <= self.now_ns:
                    task.expires_ns = 0
            task.due_ns, task.delayed = 0, False

    def time_passes(self, now_ns: int) -> None:
        self.now_ns = now_ns
        for task in self.tasks.values():
            if task.due_ns <= now_ns:
                task.delayed = False
            if task.state in (BLOCKED, DELAYED, READY) and 0 < task.expires_ns <= now_ns:
                task.failed = True
        for name, worker in [*self.workers.items()]:
            if worker.timeout_ns and worker.last_seen_ns + worker.timeout_ns <= now_ns:
                self.lose(name, blamed=True)

    # The end.

    def left_behind(self) -> list[bytes]:
        """Return unfinished tasks that wait, directly or not, only for unknown names."""
        behind: list[bytes] = []
        for _ in self.tasks:
            behind = [
                name
                for name, task in self.tasks.items()
                if any(one not in self.tasks or one in behind for one in task.waits)
            ]
        return [name for name in behind if self.unfinished(name)]
