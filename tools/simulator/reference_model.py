"""The reference model: a second state machine that replays the journal.

Slow and simple: one object per task, rules checked record by record. Knows records and settings,
but no events, effects or scheduler, and shares no code with them. A broken rule is reported with
all states of the task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from msgspec import structs

from simulator.lane_model import WAITS, LaneModels, goes_before
from simulator.models import (
    BLOCKED,
    CANCELLED,
    DELAYED,
    DONE,
    ENDED,
    FAILED,
    LEASED,
    READY,
    WAITING,
    TaskModel,
    Violation,
    WorkerModel,
)
from taskyard.core import identity
from taskyard.core import records as r
from taskyard.core.records import ReturnReason
from taskyard.core.rules import LaneOptions
from taskyard.core.states import TaskState

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.plan import Plan

#: The delay before a task is retried whose program died, without a retry schedule.
CRASH_NS: Final = 1_000_000_000

#: The burst that a rate allows.
RATE_BURST_NS: Final = 100_000_000


_Ending: TypeAlias = r.Finished | r.Failed | r.Returned | r.LeaseExpired


class ReferenceModel:
    """All tasks and workers, by the records of the journal."""

    def __init__(self, plan: Plan) -> None:
        self.tasks: dict[bytes, TaskModel] = {}
        #: Lanes, by the settings that the broker received last.
        self.lanes = LaneModels(self.tasks)
        self.lanes.set_rules(plan.clauses, LaneOptions())
        self.broker_workers_max = plan.broker_workers_max
        #: Records have the time of the wall clock, which may jump.
        self._jumps = plan.faults.clock_jump > 0
        self.workers: dict[bytes, WorkerModel] = {}
        #: Tasks that workers take beyond their slots: the most in this turn, and the latest number.
        self.ahead: dict[bytes, int] = {}
        self.ahead_last: dict[bytes, int] = {}
        self.paused: dict[tuple[bytes, bytes | None], None] = {}
        self.records = self.now_ns = 0
        #: When tasks of each rule and of each lane were leased, since the broker's start.
        self.lease_times_ns: dict[bytes | tuple[bytes, bytes], list[int]] = {}
        #: (name, attempt) to the worker.
        self.leases: dict[tuple[bytes, int], bytes] = {}
        #: (name, worker) of all leases.
        self.leased_to: dict[tuple[bytes, bytes], None] = {}
        #: (name, state) of all states that tasks had.
        self.states_reached: dict[tuple[bytes, TaskState], None] = {}
        self._wide: dict[bytes, None] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            r.Submitted: self._submitted,
            r.Extended: self._extended,
            r.Leased: self._leased,
            r.Finished: self._finished,
            r.Failed: self._failed,
            r.Postponed: self._postponed,
            r.Returned: self._returned,
            r.LeaseExpired: self._expired,
            r.CameDue: self._came_due,
            r.TaskExpired: self._aged,
            r.Cancelled: self._cancelled,
            r.Retried: self._retried,
            r.Progressed: self._progressed,
            r.StaleReport: self._no_change,
            r.WorkerJoined: self._joined,
            r.WorkerLeft: self._left,
            r.SlotsFreed: self._slots_freed,
            r.Paused: self._paused,
            r.Resumed: self._resumed,
            r.Moved: self._moved,
            r.Edited: self._edited,
            r.ReportedLate: self._reported,
            r.Released: self._released,
            r.WorkerReplaced: self._replaced,
            r.Refunded: self._refunded,
        }

    def apply(self, record: r.AnyRecord, now_ns: int) -> None:
        """Apply the next record, decided at this virtual time."""
        self.records += 1
        self.now_ns = now_ns
        self._handlers[type(record)](record)

    def require(
        self,
        rule: bool,  # noqa: FBT001
        checker: str,
        text: str,
        task_model: TaskModel | None = None,
    ) -> None:
        if not rule:
            self.fail(checker, text, task_model)

    def fail(self, checker: str, text: str, task_model: TaskModel | None) -> NoReturn:
        """Report a broken rule, with all states of the task."""
        history = [] if task_model is None else [repr(task_model.name), *task_model.lines]
        raise Violation(checker, "\n  ".join([text, *history]))

    def settled(self) -> bool:
        """Return whether every task has ended, or can't run without a user's action."""
        return not self.unsettled()

    def unsettled(self) -> list[TaskModel]:
        """Return the tasks that should still reach a worker."""
        hopeless: dict[bytes, bool] = {}
        return [
            task_model
            for task_model in self.tasks.values()
            if not self._is_over(task_model, hopeless)
        ]

    def _is_over(self, task_model: TaskModel, hopeless: dict[bytes, bool]) -> bool:
        if task_model.state is not BLOCKED:
            return task_model.state in (DONE, FAILED, CANCELLED)
        known = hopeless.get(task_model.name)
        if known is None:
            hopeless[task_model.name] = False  # a cycle never ends, and is a violation
            known = hopeless[task_model.name] = any(
                name not in self.tasks or self._blocks(self.tasks[name], hopeless)
                for name in task_model.after
            )
        return known

    def _blocks(self, task_model: TaskModel, hopeless: dict[bytes, bool]) -> bool:
        return task_model.state is not DONE and self._is_over(task_model, hopeless)

    def awaits_unknown(self, task_model: TaskModel) -> bool:
        """Return whether a task waits, directly or not, for a name that was never submitted."""
        if task_model.state is not BLOCKED:
            return False
        return any(name not in self.tasks for name in self._all_dependencies(task_model))

    # Helpers.

    def _all_dependencies(self, task_model: TaskModel) -> list[bytes]:
        """Return all predecessors of a task, direct or not."""
        line = [*task_model.after]
        seen = dict.fromkeys(line)
        for name in line:  # grows during the loop
            for before in self.tasks[name].after if name in self.tasks else ():
                if before not in seen:
                    seen[before] = None
                    line.append(before)
        return line

    def _move(self, task_model: TaskModel, state: TaskState, why: str) -> None:
        task_model.state = state
        task_model.since_ns = self.now_ns
        task_model.lines.append(f"{self.now_ns} {state.name} {why}")
        self.states_reached[task_model.name, state] = None

    def _named(
        self, names: list[bytes], allowed: tuple[TaskState, ...], why: str
    ) -> list[TaskModel]:
        task_models = []
        for name in names:
            task_model = self.tasks.get(name)
            if task_model is None:
                raise Violation("record", f"{why} of {name!r}, which was never submitted")
            self.require(
                task_model.state in allowed,
                "record",
                f"{why} of a {task_model.state.name} task",
                task_model,
            )
            task_models.append(task_model)
        return task_models

    def _ready(  # noqa: PLR0913 - the facts of one record
        self,
        task_model: TaskModel,
        at_ns: int,
        why: str,
        *,
        front: bool,
        deferred: bool = False,
        is_due: bool = False,
    ) -> None:
        """Block, delay or queue a task."""
        if task_model.after:
            self._move(task_model, BLOCKED, why)
        elif not is_due and task_model.due_ns > at_ns:
            self._move(task_model, DELAYED, why)
        else:
            self.lanes.add_ready(task_model, at_ns, front=front, deferred=deferred)
            self._move(task_model, READY, why)

    def _move_from_lanes(self, task_models: list[TaskModel], state: TaskState, why: str) -> None:
        """Move tasks to another state, and remove ready tasks from the queues of their lanes."""
        ready = [task_model for task_model in task_models if task_model.state is READY]
        for task_model in task_models:
            self._move(task_model, state, why)
        self.lanes.count_removed(ready)
        self.lanes.cap_released([task_model.lane_key for task_model in ready])

    def _release(self, record: _Ending, task_models: list[TaskModel], why: str) -> None:
        """End leases, which must be of the record's worker and attempts."""
        for task_model, attempt in zip(task_models, record.attempts, strict=True):
            self._release_one(record.worker, task_model, attempt, why)

    def _release_one(self, worker: bytes, task_model: TaskModel, attempt: int, why: str) -> None:
        self.require(task_model.worker == worker, "fencing", f"{why} by another worker", task_model)
        self.require(
            task_model.attempt == attempt, "fencing", f"{why} of attempt {attempt}", task_model
        )
        self._release_slots(task_model)

    def _release_slots(self, task_model: TaskModel) -> None:
        worker_model = self.workers.get(task_model.worker)
        if worker_model is None:
            raise Violation(
                "record", f"{task_model.name!r} was held by an unknown worker {task_model.worker!r}"
            )
        self.lanes.attempt_ended(task_model)
        del worker_model.held[task_model.name]
        worker_model.lease_shortened_ns = self.now_ns
        if not worker_model.held:
            worker_model.lease_ns_max = 0
        task_model.worker = b""

    def _close_cycle(self, task_model: TaskModel) -> bool:
        return bool(task_model.after) and task_model.name in self._all_dependencies(task_model)

    # A method for each record.

    def _submitted(self, record: r.Submitted) -> None:
        submission = record.submission
        made = []
        for index, name in enumerate(submission.names):
            former = self.tasks.get(name)
            ended = former is None or former.state in ENDED
            self.require(ended, "twice", "a task that has not ended was made again", former)
            terms = structs.replace(submission.terms_of(index), environment=submission.environment)
            lane = submission.lanes[index] if submission.lanes is not None else b""
            after = submission.after[index] if submission.after is not None else []
            task_model = TaskModel(name, terms, lane, BLOCKED, dict.fromkeys(after), terms.due_ns)
            if former is not None:
                self._begin_again(record, index, task_model, former)
            if terms.slots != 1 or terms.resources:
                self._wide[terms.service] = None
            made.append(task_model)
        for task_model in made:
            self._find_waiting(task_model.name)
        for task_model in made:
            self.tasks[task_model.name] = task_model
        for task_model in made:
            self._ready(task_model, record.at_ns, "submitted", front=False)
            self.require(
                not self._close_cycle(task_model), "cycle", "a cycle was accepted", task_model
            )

    def _find_waiting(self, name: bytes) -> None:
        """Redirect tasks that wait for an unknown name of their own campaign to the task outside
        of it."""
        for task_model in self.tasks.values():
            if not task_model.after:
                continue
            own = identity.spelling(task_model.terms.campaign, name)
            if own != name and own in task_model.after and own not in self.tasks:
                del task_model.after[own]
                task_model.after[name] = None

    def _begin_again(
        self, record: r.Submitted, index: int, task_model: TaskModel, former: TaskModel
    ) -> None:
        same = record.attempts is not None and record.attempts[index] == former.attempt
        self.require(same, "attempt", "a new generation lost count of its attempts", former)
        task_model.attempt = former.attempt
        task_model.generation = former.generation + 1
        task_model.lines = former.lines

    def _extended(self, record: r.Extended) -> None:
        task_models = self._named(record.names, (*WAITING, FAILED), "an extension")
        for task_model, after in zip(task_models, record.after, strict=True):
            task_model.after.update(dict.fromkeys(after))
            self.require(
                not self._close_cycle(task_model), "cycle", "a cycle was accepted", task_model
            )
            if task_model.state is not FAILED:
                self._move_from_lanes([task_model], BLOCKED, "extended")

    def _leased(self, record: r.Leased) -> None:
        worker_model = self.workers.get(record.worker)
        if worker_model is None:
            raise Violation("record", f"a lease for an unknown worker {record.worker!r}")
        task_models = [self._leasable(name, worker_model) for name in record.names]
        if not worker_model.held:
            worker_model.leased_ns = self.now_ns
        self._check_suspects(worker_model, task_models)
        for task_model in task_models:
            expired = _is_expired(task_model, record.at_ns)
            self.require(
                task_model.retried_after_failure or not expired,
                "expiry",
                "leased after its expiry",
                task_model,
            )
        pairs = self._pairs()
        for task_model, attempt in zip(task_models, record.attempts, strict=True):
            self.require(
                attempt > task_model.attempt, "attempt", f"attempt {attempt} again", task_model
            )
            task_model.attempt = attempt
            task_model.worker, task_model.lease_record = record.worker, self.records
            worker_model.held[task_model.name] = task_model
            self.leases[task_model.name, attempt] = record.worker
            self.leased_to[task_model.name, record.worker] = None
            self._move(task_model, LEASED, f"{attempt} to {record.worker!r}")
        self._check_lanes(task_models, record.at_ns)
        worker_model.lease_ns_max = max(worker_model.lease_ns_max, record.lease_ns)
        self._check_slots(record.worker, worker_model, task_models)
        self._check_resources(record.worker, worker_model, task_models)
        if not self.lanes.fresh:  # else the first decisions of the turn followed other rules
            self._check_limits(pairs, task_models, record.worker)
            self._check_order(task_models)
            self._check_rate(task_models)
        self.lanes.count_removed(task_models)

    def _leasable(self, name: bytes, worker_model: WorkerModel) -> TaskModel:
        task_model = self.tasks.get(name)
        if task_model is None:
            raise Violation("record", f"a lease of {name!r}, which was never submitted")
        self.require(
            not task_model.after, "dependency", f"leased before {[*task_model.after]}", task_model
        )
        self.require(task_model.state is not DELAYED, "due", "leased before it was due", task_model)
        self.require(
            task_model.state not in ENDED,
            "ended",
            f"leased when {task_model.state.name}",
            task_model,
        )
        self.require(
            task_model.state is READY, "record", f"leased when {task_model.state.name}", task_model
        )
        offered = task_model.terms.service in worker_model.facts.services
        self.require(offered, "service", "leased to a worker of other services", task_model)
        for scope in ((b"", None), (task_model.terms.service, None), task_model.lane_key):
            self.require(
                scope not in self.paused, "paused", f"leased while {scope} is paused", task_model
            )
        return task_model

    def _check_lanes(self, task_models: list[TaskModel], at_ns: int) -> None:
        """Require that deferred tasks wait for the next run, held lanes for their release, and
        debouncing lanes for the end of their debounce."""
        for task_model in task_models:
            alone = task_model.place != WAITS or not self._is_fitting_before(task_model)
            self.require(alone, "run", "leased again in the same run", task_model)
        for key in dict.fromkeys(task_model.lane_key for task_model in task_models):
            lane, rules = self.lanes.of(key), self.lanes.rule(key).options
            out = self.lanes.count(key, LEASED)
            if rules.is_held and out > lane.released and not self.lanes.fresh:
                raise Violation("held", f"{key} is held, and {out} of {lane.released} are leased")
            early = rules.debounce_ns and lane.debounce_until_ns > at_ns and not self._jumps
            if early:
                raise Violation(
                    "debounce", f"{key} begins at {at_ns}, not {lane.debounce_until_ns}"
                )
            lane.debounce_until_ns = 0

    def _is_fitting_before(self, late: TaskModel) -> bool:
        """Return whether a task of this run could have been leased before a deferred task.

        Another task may wait for slots, or for a worker without other tasks.
        """
        worker_model = self.workers[late.worker]
        used = sum(task_model.terms.slots for task_model in worker_model.held.values()) + sum(
            worker_model.slots_kept
        )
        total = worker_model.facts.slots_total or used + late.terms.slots
        room = total - used + late.terms.slots
        return any(
            task_model.state is READY
            and task_model.lane_key == late.lane_key
            and task_model.place != WAITS
            and not task_model.losses
            and task_model.terms.slots <= room
            and not task_model.terms.resources  # the worker may have none free
            for task_model in self.tasks.values()
        )

    def _check_suspects(self, worker_model: WorkerModel, task_models: list[TaskModel]) -> None:
        """Require that suspects share a worker with fewer suspects the fewer losses they have left.
        The last attempt runs alone."""
        slots = worker_model.facts.slots_total
        left: dict[int, int] = {}
        for task_model in [*worker_model.held.values(), *task_models]:
            if task_model.losses:
                spare = min(3, task_model.terms.crashes_max - 1 - task_model.losses)
                left[spare] = left.get(spare, 0) + 1
                alone = len(worker_model.held) + len(task_models) == 1
                self.require(
                    spare > 0 or alone, "suspect", "its last attempt is not alone", task_model
                )
                # A worker without a limit of slots may have requested any number.
                few = not slots or (left[spare] - 1) ** 3 < slots ** max(1, spare)
                self.require(
                    few, "suspect", f"{left[spare]} of its kind share a worker", task_model
                )

    def _check_slots(
        self, worker: bytes, worker_model: WorkerModel, task_models: list[TaskModel]
    ) -> None:
        slots = worker_model.facts.slots_total
        if not slots:
            return
        used = sum(task_model.terms.slots for task_model in worker_model.held.values()) + sum(
            worker_model.slots_kept
        )
        if used > slots + self.ahead.get(worker, 0):
            raise Violation("slots", f"{worker!r} has {used} slots taken: {worker_model}")
        if any(task_model.terms.slots > slots for task_model in task_models):
            raise Violation(
                "slots", f"{worker!r} has {slots} slots, and gets wider tasks: {task_models}"
            )

    def _check_resources(
        self, worker: bytes, worker_model: WorkerModel, task_models: list[TaskModel]
    ) -> None:
        """Require that the tasks of a worker use no more of a resource than it has."""
        total = dict(worker_model.facts.resources)
        held = [resource for one in worker_model.held.values() for resource in one.terms.resources]
        for name in {name for one in task_models for name, _ in one.terms.resources}:
            used = sum(amount for other, amount in held if other == name)
            if used > total.get(name, 0):
                raise Violation("resources", f"{worker!r} has {used} of {name!r} taken: {total}")

    def _pairs(self) -> dict[tuple[bytes, bytes, bytes], int]:
        """Count the tasks of each lane by worker."""
        pairs: dict[tuple[bytes, bytes, bytes], int] = {}
        for worker, worker_model in self.workers.items():
            for task_model in worker_model.held.values():
                key = (*task_model.lane_key, worker)
                pairs[key] = pairs.get(key, 0) + 1
        return pairs

    def _check_limits(
        self,
        before: dict[tuple[bytes, bytes, bytes], int],
        task_models: list[TaskModel],
        worker: bytes,
    ) -> None:
        now = self._pairs()
        begun = [key for key in now if key not in before]
        broker_max = self.broker_workers_max
        if begun and broker_max and len(now) > broker_max:
            raise Violation(
                "limit", f"{len(now)} lanes are served, the broker's limit is {broker_max}"
            )
        for service, lane, _ in begun:
            rule = self.lanes.rule((service, lane))
            rules = rule.options
            serving = sum(self.lanes.rule(key[:2]).name == rule.name for key in now)
            if rules.workers_max and serving > rules.workers_max:
                raise Violation("limit", f"rule {rule.name!r} has {serving} workers")
            in_lane = sum(key[:2] == (service, lane) for key in now)
            if lane and in_lane > rules.lane_workers_max:
                raise Violation("limit", f"lane {lane!r} has {in_lane} workers")
        for service, lane in dict.fromkeys(task_model.lane_key for task_model in task_models):
            rules = self.lanes.rule((service, lane)).options
            out = sum(count for key, count in now.items() if key[:2] == (service, lane))
            if lane and out > rules.lane_workers_max * (1 + rules.overfeed):
                raise Violation(
                    "limit", f"lane {lane!r} has {out} tasks leased, the latest to {worker!r}"
                )

    def _check_order(self, task_models: list[TaskModel]) -> None:
        """Require that within a lane tasks go by priority, then returned tasks first, then by
        arrival."""
        lanes = dict.fromkeys(
            task_model.lane_key
            for task_model in task_models
            if task_model.terms.service not in self._wide
        )
        if not lanes:
            return
        left = [
            task_model
            for task_model in self.tasks.values()
            if task_model.state is READY and task_model.lane_key in lanes and not task_model.losses
            if task_model.place != WAITS
        ]
        for task_model in task_models:
            if task_model.losses:
                continue
            is_random = self.lanes.rules(task_model).is_random
            for other in left:
                same = other.lane_key == task_model.lane_key
                if same and goes_before(other, task_model, is_random=is_random):
                    self.fail("order", f"{other.name!r} was passed over by", task_model)

    def _check_rate(self, task_models: list[TaskModel]) -> None:
        for task_model in task_models:
            key = task_model.lane_key
            rule = self.lanes.rule(key)
            if rule.options.rate_interval_ns:
                self._count_lease(task_model, rule.name, rule.options.rate_interval_ns)
            if rule.options.lane_rate_interval_ns:
                self._count_lease(task_model, key, rule.options.lane_rate_interval_ns)

    def _count_lease(
        self, task_model: TaskModel, key: bytes | tuple[bytes, bytes], interval_ns: int
    ) -> None:
        """Require that a lease is within the rate of a rule or a lane."""
        times_ns = self.lease_times_ns.setdefault(key, [])
        times_ns.append(self.now_ns)
        checker = "rate" if isinstance(key, bytes) else "lane rate"
        for back, then_ns in enumerate(reversed(times_ns[-20:]), start=1):
            allowed = (self.now_ns - then_ns + RATE_BURST_NS) // interval_ns + 1
            text = f"{back} leases within too short a time"
            self.require(back <= allowed, checker, text, task_model)

    def _finished(self, record: r.Finished) -> None:
        task_models = self._named(record.names, (LEASED,), "completion")
        self._release(record, task_models, "completion")
        if record.keeps_slots:
            self.workers[record.worker].slots_kept += [
                task_model.terms.slots for task_model in task_models
            ]
        for task_model in task_models:
            self._move(task_model, DONE, "finished")
        for task_model in self.tasks.values():
            if task_model.after and not task_model.after.keys().isdisjoint(record.names):
                for name in record.names:
                    task_model.after.pop(name, None)
                if not task_model.after and task_model.state is BLOCKED:
                    self._ready(task_model, record.at_ns, "released", front=True)

    def _failed(self, record: r.Failed) -> None:
        task_models = self._named(record.names, (LEASED,), "failure")
        self._release(record, task_models, "failure")
        for task_model in task_models:
            if record.own_fault:
                task_model.failures += 1
            else:
                task_model.losses += 1
                enough = task_model.losses == task_model.terms.crashes_max
                self.require(
                    enough, "crashes", f"FAILED after {task_model.losses} lost workers", task_model
                )
            self._move(task_model, FAILED, "own fault" if record.own_fault else "lost workers")

    def _postponed(self, record: r.Postponed) -> None:
        task_models = self._named(record.names, (LEASED, READY), "postponement")
        for index, task_model in enumerate(task_models):
            if task_model.state is LEASED:
                self._release_one(record.worker, task_model, record.attempts[index], "postponement")
                if record.own_fault:
                    task_model.failures += 1
                    self._check_schedule(task_model, record.due_ns[index] - record.at_ns)
            task_model.due_ns = record.due_ns[index]
        self._move_from_lanes(task_models, DELAYED, "postponed")

    def _check_schedule(self, task_model: TaskModel, delay_ns: int) -> None:
        """Require that a retry follows the schedule, with a jitter that only adds. After a crash
        of its program without a schedule it follows a second later."""
        delays_ns = self.schedule(task_model)
        crashes_left = task_model.failures < task_model.terms.crashes_max
        crashed = task_model.failures > len(delays_ns) and delay_ns == CRASH_NS and crashes_left
        if crashed or self.lanes.fresh:
            return
        self.require(
            task_model.failures <= len(delays_ns), "retry", "retried too often", task_model
        )
        least_ns = delays_ns[task_model.failures - 1]
        jitter = self.lanes.rules(task_model).jitter_percent
        good = least_ns <= delay_ns <= least_ns + least_ns * jitter // 100
        self.require(good, "retry", f"deferred by {delay_ns}, not {least_ns}", task_model)

    def schedule(self, task_model: TaskModel) -> tuple[int, ...]:
        own = task_model.terms.retry_delays_ns
        return self.lanes.rules(task_model).retry_delays_ns if own is None else own

    def _returned(self, record: r.Returned) -> None:
        task_models = self._named(record.names, (LEASED,), "return")
        lanes = {
            task_model.lane_key: self.lanes.of(task_model.lane_key).released
            for task_model in task_models
        }
        self._release(record, task_models, "return")
        front = record.reason not in (ReturnReason.TRANSFERRED, ReturnReason.DEFERRED_BACK)
        if front and record.reason is not ReturnReason.RESTARTED:
            for key, released in lanes.items():
                self.lanes.of(key).released = released  # no attempt was made
        back = record.reason is ReturnReason.DEFERRED_BACK
        for index, task_model in enumerate(task_models):
            if record.after is not None:
                task_model.after.update(dict.fromkeys(record.after[index]))
                self.require(
                    not self._close_cycle(task_model), "cycle", "a cycle was accepted", task_model
                )
            if record.reason is ReturnReason.RESTARTED:
                self._lose(task_model)
            why = f"returned {record.reason.name}"
            self._ready(task_model, record.at_ns, why, front=front, deferred=back, is_due=True)
        self.lanes.cap_released([*lanes])

    def _lose(self, task_model: TaskModel) -> None:
        task_model.losses += 1
        few = task_model.losses < task_model.terms.crashes_max
        self.require(
            few, "crashes", f"not FAILED after {task_model.losses} lost workers", task_model
        )

    def _expired(self, record: r.LeaseExpired) -> None:
        task_models = self._named(record.names, (LEASED,), "expiry")
        self._release(record, task_models, "expiry")
        for task_model in task_models:
            self._lose(task_model)
            self._ready(task_model, record.at_ns, "expired", front=True, is_due=True)

    def _came_due(self, record: r.CameDue) -> None:
        for task_model in self._named(record.names, (DELAYED,), "coming due"):
            self.require(task_model.due_ns <= record.at_ns, "due", "came due too early", task_model)
            self._ready(task_model, record.at_ns, "came due", front=False, deferred=True)

    def _aged(self, record: r.TaskExpired) -> None:
        for task_model in self._named(record.names, WAITING, "aging"):
            expired = _is_expired(task_model, record.at_ns) or record.is_requested
            self.require(expired, "expiry", "expired too early", task_model)
            self._move_from_lanes([task_model], FAILED, "aged")

    def _cancelled(self, record: r.Cancelled) -> None:
        task_models = self._named(record.names, (*WAITING, LEASED, FAILED), "cancelling")
        for task_model in task_models:
            if task_model.state is LEASED:
                self._release_slots(task_model)
        self._move_from_lanes(task_models, CANCELLED, "cancelled")
        gone = dict.fromkeys(record.names)
        asked = len(task_models) - len(record.causes)
        for task_model, place in zip(task_models[asked:], record.causes, strict=True):
            waited = place < asked and any(name in gone for name in task_model.after)
            self.require(
                waited, "cause", "was cancelled with a task that it did not wait for", task_model
            )
        for task_model in self.tasks.values():
            waits = any(name in gone for name in task_model.after)
            orphan = waits and task_model.state is not CANCELLED
            self.require(not orphan, "orphan", "waits for a cancelled task", task_model)

    def _retried(self, record: r.Retried) -> None:
        for task_model in self._named(record.names, (DELAYED, FAILED), "a retry"):
            if task_model.state is FAILED:
                task_model.failures = task_model.losses = 0
                task_model.retried_after_failure = True
            task_model.due_ns = 0
            self._ready(task_model, record.at_ns, "retried", front=False)

    def _moved(self, record: r.Moved) -> None:
        for task_model in self._named(record.names, (*WAITING, FAILED), "a move"):
            state, terms = task_model.state, task_model.terms
            if state is READY:
                task_model.state = BLOCKED  # so that it is left out of the count
                self.lanes.count_removed([task_model])
                self.lanes.cap_released([task_model.lane_key])
            if record.service is not None:
                task_model.terms = structs.replace(terms, service=record.service)
            if record.lane is not None:
                task_model.lane = record.lane
            if terms.slots != 1 or terms.resources:
                self._wide[task_model.terms.service] = None
            if state is READY:
                self._ready(task_model, record.at_ns, "moved", front=False, is_due=True)
            else:
                self._move(task_model, state, "moved")

    def _edited(self, record: r.Edited) -> None:
        for task_model in self._named(record.names, WAITING, "an edit"):
            terms = record.changes.applied_to(task_model.terms)
            # A retry after its expiry has removed that, and an edit may set it again.
            is_new = terms != task_model.terms or task_model.retried_after_failure
            self.require(is_new, "edit", "changed nothing", task_model)
            state, moves = task_model.state, terms.priority != task_model.terms.priority
            if state is READY and moves:
                task_model.state = BLOCKED  # so that it is left out of the count
                self.lanes.count_removed([task_model])
                self.lanes.cap_released([task_model.lane_key])
            task_model.terms = terms
            if state is READY and moves:
                self._ready(task_model, record.at_ns, "edited", front=False, is_due=True)
            else:
                self._move(task_model, state, "edited")

    def _reported(self, record: r.ReportedLate) -> None:
        for task_model in self._named(record.names, (*WAITING, LEASED), "lateness"):
            late = 0 < task_model.terms.report_ns <= record.at_ns
            self.require(late, "lateness", "was reported late too early", task_model)
            self.require(not task_model.reported, "lateness", "was reported late again", task_model)
            task_model.reported = True

    def _released(self, record: r.Released) -> None:
        self.lanes.release(self._named(record.names, (READY,), "a release"))

    def _progressed(self, record: r.Progressed) -> None:
        for name, attempt in zip(record.names, record.attempts, strict=True):
            task_model = self.tasks[name]
            own = task_model.worker == record.worker and task_model.attempt == attempt
            self.require(own, "fencing", "progress of a lease that is over", task_model)

    def _no_change(self, record: r.StaleReport) -> None:
        """Do nothing: a stale report changes no state."""

    def _joined(self, record: r.WorkerJoined) -> None:
        worker_model = self.workers.get(record.worker)
        if worker_model is None:
            self.workers[record.worker] = WorkerModel(record.facts)
        else:
            worker_model.facts = record.facts

    def _left(self, record: r.WorkerLeft) -> None:
        worker_model = self.workers.pop(record.worker, None)
        if worker_model is None or worker_model.held:
            raise Violation(
                "record", f"{record.worker!r} left while unknown or holding tasks: {worker_model}"
            )

    def _replaced(self, record: r.WorkerReplaced) -> None:
        for name, attempt in zip(record.names, record.attempts, strict=True):
            task_model = self.tasks[name]
            own = self.leases.get((name, attempt)) == record.worker and task_model.losses > 0
            self.require(own, "charge", f"was not lost with {record.worker!r}", task_model)

    def _refunded(self, record: r.Refunded) -> None:
        """Refund a loss: the process that was taken for dead has sent a message."""
        for task_model in self._named(record.names, (*WAITING, LEASED), "a refund"):
            self.require(task_model.losses > 0, "charge", "was refunded without a loss", task_model)
            task_model.losses -= 1
            if task_model.state is READY:
                task_model.place = 0  # no longer a suspect, so it goes first

    def _slots_freed(self, record: r.SlotsFreed) -> None:
        worker_model = self.workers[record.worker]
        if record.tasks > len(worker_model.slots_kept):
            raise Violation("slots", f"{record.worker!r} freed more slots than it kept")
        del worker_model.slots_kept[: record.tasks]
        worker_model.kept_before = min(worker_model.kept_before, len(worker_model.slots_kept))

    def _paused(self, record: r.Paused) -> None:
        self.paused[record.service, record.lane if record.service else None] = None

    def _resumed(self, record: r.Resumed) -> None:
        self.paused.pop((record.service, record.lane if record.service else None), None)


def _is_expired(task_model: TaskModel, at_ns: int) -> bool:
    """Return whether the hard expiry of a task has passed, or the soft expiry of a tried task."""
    terms = task_model.terms
    is_tried = task_model.failures + task_model.losses > 0
    return 0 < terms.expires_hard_ns <= at_ns or (is_tried and 0 < terms.expires_ns <= at_ns)
