"""Random histories that a broker could have written: graphs, retries, generations, several days.

Tasks move to other lanes, priorities change, and workers change their slots.
"""

from __future__ import annotations

from itertools import count
from random import Random

import pyarrow as pa
from msgspec import Struct

from tests.pipeline.event_log import EventLog, arrow_table, measured

HOUR_S = 3600.0


class RandomHistory(Struct):
    """Events and edges in the order of the journal."""

    events: pa.Table
    edges: pa.Table


class _Task(Struct):
    log: EventLog
    name: str
    before: list[str]
    state: str = "BLOCKED"
    leased: float = 0.0
    worker: str = ""


class _Broker:
    """Writes events of tasks that it moves at random, by the rules of the states."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        numbers = count(1)
        self._logs = [EventLog(name, numbers) for name in ("a", "b", "")]
        self._workers = EventLog("", numbers)
        self._tasks: dict[str, _Task] = {}
        #: The number of processes of each worker, and those that are registered.
        self._joined: dict[str, int] = {}
        self._present: set[str] = set()
        self._now = 0.0

    def write(self, moves: int) -> RandomHistory:
        for _ in range(moves):
            # Some hours pass between days of work. A clock may be set back.
            pause = self._rng.choice((0.01, 1, 40, 40, 400, 9 * HOUR_S, -30))
            self._now += pause * self._rng.random()
            moves_of = (self._submit,) * 3 + (self._move,) * 9 + (self._member, self._change)
            self._rng.choice(moves_of)()
        logs = [*self._logs, self._workers]
        tables = []
        for name in ("events", "edges"):
            rows = [row for log in logs for row in getattr(log, name)]
            ordered = sorted(rows, key=lambda row: row["record"])
            tables.append(arrow_table(name, ordered))
        return RandomHistory(*tables)

    def _submit(self) -> None:
        log = self._rng.choice(self._logs)
        name = f"{log.campaign or 'none'}/{self._rng.randrange(60)}"
        old = self._tasks.get(name)
        if old is not None and old.state not in ("DONE", "FAILED", "CANCELLED"):
            return
        others = [one for one in self._tasks if one != name]
        after = self._rng.sample(others, min(len(others), self._rng.choice((0, 0, 1, 2, 3))))
        if self._rng.random() < 0.02:
            after = [*after, "never-submitted"]
        is_timed = self._rng.random() < 0.1
        log.service, more = self._rng.choice(("exec", "mail")), self._now + 100
        log.submit(self._now, name, *after, due=more if is_timed else None)
        if after and not is_timed and all(map(self._is_done, after)):
            log.ready(self._now, name, "submitted")
        state = "READY" if not is_timed and all(map(self._is_done, after)) else "BLOCKED"
        self._tasks[name] = _Task(log, name, after, state)

    def _is_done(self, name: str) -> bool:
        return name in self._tasks and self._tasks[name].state == "DONE"

    def _move(self) -> None:
        if not self._tasks:
            return
        active = [one for one in self._tasks.values() if one.state in ("READY", "LEASED")]
        is_any = not active or self._rng.random() < 0.15
        task = self._rng.choice([*self._tasks.values()] if is_any else active)
        if self._rng.random() < 0.04 and task.state in ("BLOCKED", "READY", "LEASED"):
            task.log.add(self._now, "cancelled", task.name, reason="a user")
            task.state = "CANCELLED"
        elif task.state == "READY":
            if not self._present:
                return
            task.worker = self._rng.choice(sorted(self._present))
            task.log.lease(self._now, task.name, task.worker)
            task.state, task.leased = "LEASED", self._now
        elif task.state == "LEASED":
            self._end(task)
        elif task.state == "FAILED" and self._rng.random() < 0.3:
            task.log.add(self._now, "retried", task.name)
            task.log.ready(self._now, task.name, "retried")
            task.state = "READY"
        elif task.state == "BLOCKED" and all(map(self._is_done, task.before)):
            task.log.add(self._now, "due", task.name)
            task.log.ready(self._now, task.name, "due")
            task.state = "READY"

    def _change(self) -> None:
        """Move a task to another lane, change its priority, or free a slot of a worker."""
        waiting = [one for one in self._tasks.values() if one.state in ("BLOCKED", "READY")]
        if waiting and self._rng.random() < 0.7:
            task = self._rng.choice(waiting)
            if self._rng.random() < 0.6:
                task.log.change(self._now, "moved", task.name, lane=self._rng.choice("xyz"))
            else:
                task.log.change(self._now, "edited", task.name, priority=self._rng.randrange(5))
        elif self._present:
            worker = self._rng.choice(sorted(self._present))
            self._workers.add(self._now, "slots_freed", worker=worker, slots=1)

    def _end(self, task: _Task) -> None:
        took = max(self._now - task.leased, 0.0)
        more = measured(task.leased + took / 4, took / 2) if self._rng.random() < 0.5 else {}
        kind = self._rng.choice(("finished",) * 5 + ("failed", "postponed", "expired", "returned"))
        own: dict[str, object] = {"worker": task.worker, **more}
        if kind in ("failed", "postponed"):
            own |= {"reason": "it broke\nhere", "own_fault": self._rng.random() < 0.7}
        if kind == "returned":
            own["reason"] = "refused"
        task.log.add(self._now, kind, task.name, **own)
        if kind == "returned":
            task.log.ready(self._now, task.name, "returned")
        task.state = {"finished": "DONE", "failed": "FAILED", "postponed": "BLOCKED"}.get(
            kind, "READY"
        )
        if kind == "expired":
            task.log.ready(self._now, task.name, "expired")
        if kind == "finished":
            self._release()

    def _release(self) -> None:
        for task in self._tasks.values():
            if task.state == "BLOCKED" and task.before and all(map(self._is_done, task.before)):
                task.log.add(self._now, "due", task.name)
                task.log.ready(self._now, task.name)
                task.state = "READY"

    def _member(self) -> None:
        """Let a worker join again, leave, or join as another process.

        Leases of a process that is gone are returned first.
        """
        worker, slots = f"w{self._rng.randrange(3)}", self._rng.randrange(1, 4)
        if worker in self._present and self._rng.random() < 0.3:
            self._workers.join(self._now, worker, self._joined[worker], slots)
            return
        for task in self._tasks.values():
            if task.state == "LEASED" and task.worker == worker:
                task.log.add(self._now, "returned", task.name, worker=worker, reason="left")
                task.log.ready(self._now, task.name, "returned")
                task.state = "READY"
        if self._rng.random() < 0.4 and worker in self._present:
            self._workers.add(self._now, "worker_left", worker=worker, reason="left")
            self._present.discard(worker)
        else:
            self._joined[worker] = self._joined.get(worker, 0) + 1
            self._workers.join(self._now, worker, self._joined[worker], slots)
            self._present.add(worker)


def random_history(seed: int, moves: int = 400) -> RandomHistory:
    return _Broker(seed).write(moves)
