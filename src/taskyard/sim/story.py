"""The story that a journal tells, read by somebody who shares no code with who wrote it.

A second, slow and simple machine: one object a task, rules that are checked record by record. It
knows records and settings, nothing of events, effects or the scheduler. Whoever breaks a rule is
told with the task's whole story.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from msgspec import Struct, field, structs

from taskyard.core import identity
from taskyard.core import records as r
from taskyard.core.events import LaneOptions
from taskyard.core.records import ReturnReason
from taskyard.core.states import TaskState
from taskyard.core.tasks import Terms
from taskyard.core.workers import WorkerFacts
from taskyard.sim.lane_story import WAITS, LaneStory, goes_before

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.sim.plan import Plan

BLOCKED, DELAYED, READY, LEASED, DONE, FAILED, CANCELLED = TaskState
ENDED: Final = (DONE, CANCELLED)
WAITING: Final = (BLOCKED, DELAYED, READY)

#: When a task is tried again that its program died with, if no schedule says so.
CRASH_NS: Final = 1_000_000_000

#: What a rate may save up.
RATE_SAVED_NS: Final = 100_000_000


_Ending: TypeAlias = r.Finished | r.Failed | r.Returned | r.LeaseExpired


class Violation(Exception):
    """A promise was broken."""

    def __init__(self, checker: str, text: str) -> None:
        super().__init__(f"{checker}: {text}")
        self.checker = checker


class Tale(Struct):
    """One task, as told so far."""

    name: bytes
    terms: Terms
    lane: bytes
    state: TaskState
    #: Names that it still waits for.
    after: dict[bytes, None]
    due_ns: int
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    worker: bytes = b""
    #: LEASED: the record that gave it.
    lease_record: int = 0
    #: READY: its place at the back of its queue; 0 for at the front, -1 for in the next run.
    place: int = 0
    generation: int = 1
    #: It ended FAILED and was asked to be tried again all the same, however old it is.
    forgiven: bool = False
    #: It was said to be late.
    reported: bool = False
    #: When it came to its state, in virtual time.
    since_ns: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def queue(self) -> tuple[bytes, bytes, int]:
        return self.terms.service, self.lane, self.terms.priority

    @property
    def lane_key(self) -> tuple[bytes, bytes]:
        return self.terms.service, self.lane


class Hand(Struct):
    """One worker, as told so far."""

    facts: WorkerFacts
    #: What it holds, by name.
    held: dict[bytes, Tale] = field(default_factory=dict)
    #: Slots of the tasks that it has answered and not yet freed, oldest first.
    slots_kept: list[int] = field(default_factory=list)
    #: The fewest of these since the broker's start: as many may never be freed.
    kept_before: int = 0
    #: The longest lease since it last held nothing.
    patience_ns: int = 0
    #: When that became shorter: a silence that was allowed until then may be too long at once.
    eased_ns: int = 0


class Story:
    """All tasks and workers, as the journal tells them."""

    def __init__(self, plan: Plan) -> None:
        self.tasks: dict[bytes, Tale] = {}
        #: Lanes, by the settings that the broker was told last.
        self.lanes = LaneStory(self.tasks)
        self.lanes.set_rules(plan.clauses, LaneOptions())
        self.broker_workers_max = plan.broker_workers_max
        #: When tasks were decided on is told by the wall clock, which may jump.
        self._jumps = plan.faults.clock_jump > 0
        self.workers: dict[bytes, Hand] = {}
        #: How many tasks workers take beyond their slots: the most in this turn, and the last.
        self.ahead: dict[bytes, int] = {}
        self.ahead_last: dict[bytes, int] = {}
        self.paused: dict[tuple[bytes, bytes | None], None] = {}
        self.records = 0
        #: When each clause's tasks were leased, since the broker's start.
        self.lease_times_ns: dict[bytes, list[int]] = {}
        #: (name, attempt) to the worker.
        self.leases: dict[tuple[bytes, int], bytes] = {}
        #: (name, worker) of the same.
        self.lent: dict[tuple[bytes, bytes], None] = {}
        #: (name, state) that were ever so.
        self.been: dict[tuple[bytes, TaskState], None] = {}
        self._wide: dict[bytes, None] = {}
        self.now_ns = 0
        self._tell: dict[type, Callable[[Any], None]] = {
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
            r.StaleReport: self._nothing,
            r.WorkerJoined: self._joined,
            r.WorkerLeft: self._left,
            r.SlotsFreed: self._slots_freed,
            r.Paused: self._paused,
            r.Resumed: self._resumed,
            r.Moved: self._moved,
            r.ReportedLate: self._reported,
            r.Released: self._released,
            r.WorkerReplaced: self._replaced,
            r.Refunded: self._refunded,
        }

    def tell(self, record: r.AnyRecord, now_ns: int) -> None:
        """Go on with the next record, decided at this virtual time."""
        self.records += 1
        self.now_ns = now_ns
        self._tell[type(record)](record)

    def require(self, rule: bool, checker: str, text: str, tale: Tale | None = None) -> None:  # noqa: FBT001 - it reads as an assertion
        if not rule:
            told = "" if tale is None else "\n  " + "\n  ".join([repr(tale.name), *tale.lines])
            raise Violation(checker, text + told)

    def settled(self) -> bool:
        """Nothing can run any more without somebody's help."""
        return not self.unsettled()

    def unsettled(self) -> list[Tale]:
        """Tasks that should still come to a worker: not ended, failed, or stuck behind that."""
        hopeless: dict[bytes, bool] = {}
        return [tale for tale in self.tasks.values() if not self._over(tale, hopeless)]

    def _over(self, tale: Tale, hopeless: dict[bytes, bool]) -> bool:
        if tale.state is not BLOCKED:
            return tale.state in (DONE, FAILED, CANCELLED)
        known = hopeless.get(tale.name)
        if known is None:
            hopeless[tale.name] = False  # a cycle has no hope, and is a failure of ours
            known = hopeless[tale.name] = any(
                name not in self.tasks or self._blocks(self.tasks[name], hopeless)
                for name in tale.after
            )
        return known

    def _blocks(self, tale: Tale, hopeless: dict[bytes, bool]) -> bool:
        return tale.state is not DONE and self._over(tale, hopeless)

    def awaits_unknown(self, tale: Tale) -> bool:
        """It waits, directly or not, for something that nobody has submitted."""
        if tale.state is not BLOCKED:
            return False
        return any(name not in self.tasks for name in self._befores(tale))

    # Helpers.

    def _befores(self, tale: Tale) -> list[bytes]:
        """All that a task waits for, directly or not."""
        line = [*tale.after]
        seen = dict.fromkeys(line)
        for name in line:  # grows while it is walked
            for before in self.tasks[name].after if name in self.tasks else ():
                if before not in seen:
                    seen[before] = None
                    line.append(before)
        return line

    def _move(self, tale: Tale, state: TaskState, why: str) -> None:
        tale.state = state
        tale.since_ns = self.now_ns
        tale.lines.append(f"{self.now_ns} {state.name} {why}")
        self.been[tale.name, state] = None

    def _named(self, names: list[bytes], allowed: tuple[TaskState, ...], why: str) -> list[Tale]:
        tales = []
        for name in names:
            tale = self.tasks.get(name)
            if tale is None:
                raise Violation("story", f"{why} of {name!r}, which was never submitted")
            self.require(tale.state in allowed, "story", f"{why} of a {tale.state.name} task", tale)
            tales.append(tale)
        return tales

    def _ready(  # noqa: PLR0913 - all that there is to be said of it
        self,
        tale: Tale,
        at_ns: int,
        why: str,
        *,
        front: bool,
        deferred: bool = False,
        is_due: bool = False,
    ) -> None:
        """It waits for tasks, for time (unless that has come before), or for a worker."""
        if tale.after:
            self._move(tale, BLOCKED, why)
        elif not is_due and tale.due_ns > at_ns:
            self._move(tale, DELAYED, why)
        else:
            self.lanes.came(tale, at_ns, front=front, deferred=deferred)
            self._move(tale, READY, why)

    def _leave(self, tales: list[Tale], state: TaskState, why: str) -> None:
        """They come to another state, and those that were ready leave their lanes' queues, though
        nobody tries them."""
        ready = [tale for tale in tales if tale.state is READY]
        for tale in tales:
            self._move(tale, state, why)
        self.lanes.count_removed(ready)
        self.lanes.cap_released([tale.lane_key for tale in ready])

    def _release(self, record: _Ending, tales: list[Tale], why: str) -> None:
        """Leases are over: they must be the record's worker's, by the record's attempts."""
        for tale, attempt in zip(tales, record.attempts, strict=True):
            self._release_one(record.worker, tale, attempt, why)

    def _release_one(self, worker: bytes, tale: Tale, attempt: int, why: str) -> None:
        self.require(tale.worker == worker, "fencing", f"{why} by another worker", tale)
        self.require(tale.attempt == attempt, "fencing", f"{why} of attempt {attempt}", tale)
        self._let_go(tale)

    def _let_go(self, tale: Tale) -> None:
        hand = self.workers.get(tale.worker)
        if hand is None:
            raise Violation("story", f"{tale.name!r} was held by {tale.worker!r}, who is unknown")
        self.lanes.tried(tale)
        del hand.held[tale.name]
        hand.eased_ns = self.now_ns
        if not hand.held:
            hand.patience_ns = 0
        tale.worker = b""

    def _close_cycle(self, tale: Tale) -> bool:
        return bool(tale.after) and tale.name in self._befores(tale)

    # One function a record.

    def _submitted(self, record: r.Submitted) -> None:
        submission = record.submission
        made = []
        for index, name in enumerate(submission.names):
            former = self.tasks.get(name)
            ended = former is None or former.state in ENDED
            self.require(ended, "twice", "a task that has not ended was made again", former)
            terms = submission.terms_of(index)
            lane = submission.lanes[index] if submission.lanes is not None else b""
            after = submission.after[index] if submission.after is not None else []
            tale = Tale(name, terms, lane, BLOCKED, dict.fromkeys(after), terms.due_ns)
            if former is not None:
                self._begin_again(record, index, tale, former)
            if terms.slots != 1:
                self._wide[terms.service] = None
            made.append(tale)
        for tale in made:
            self._find_waiting(tale.name)
        for tale in made:
            self.tasks[tale.name] = tale
        for tale in made:
            self._ready(tale, record.at_ns, "submitted", front=False)
            self.require(not self._close_cycle(tale), "cycle", "a cycle was accepted", tale)

    def _find_waiting(self, name: bytes) -> None:
        """Let tasks that wait for this name in their own campaign, where it is not known, wait for
        the task that has it now."""
        for tale in self.tasks.values():
            own = identity.spelling(tale.terms.campaign, name)
            if own != name and own in tale.after and own not in self.tasks:
                del tale.after[own]
                tale.after[name] = None

    def _begin_again(self, record: r.Submitted, index: int, tale: Tale, former: Tale) -> None:
        same = record.attempts is not None and record.attempts[index] == former.attempt
        self.require(same, "attempt", "a new generation lost count of its attempts", former)
        tale.attempt = former.attempt
        tale.generation = former.generation + 1
        tale.lines = former.lines

    def _extended(self, record: r.Extended) -> None:
        tales = self._named(record.names, (*WAITING, FAILED), "an extension")
        for tale, after in zip(tales, record.after, strict=True):
            tale.after.update(dict.fromkeys(after))
            self.require(not self._close_cycle(tale), "cycle", "a cycle was accepted", tale)
            if tale.state is not FAILED:
                self._leave([tale], BLOCKED, "extended")

    def _leased(self, record: r.Leased) -> None:
        hand = self.workers.get(record.worker)
        if hand is None:
            raise Violation("story", f"a lease for {record.worker!r}, who is not there")
        tales = [self._leasable(name, hand) for name in record.names]
        self._check_suspects(hand, tales)
        pairs = self._pairs()
        for tale, attempt in zip(tales, record.attempts, strict=True):
            self.require(attempt > tale.attempt, "attempt", f"attempt {attempt} again", tale)
            tale.attempt = attempt
            tale.worker, tale.lease_record = record.worker, self.records
            hand.held[tale.name] = tale
            self.leases[tale.name, attempt] = record.worker
            self.lent[tale.name, record.worker] = None
            self._move(tale, LEASED, f"{attempt} to {record.worker!r}")
        self._check_lanes(tales, record.at_ns)
        hand.patience_ns = max(hand.patience_ns, record.lease_ns)
        self._check_slots(record.worker, hand, tales)
        if not self.lanes.fresh:  # else what was decided first in the turn followed other rules
            self._check_limits(pairs, tales, record.worker)
            self._check_order(tales)
            self._check_rate(tales)
        self.lanes.count_removed(tales)

    def _leasable(self, name: bytes, hand: Hand) -> Tale:
        tale = self.tasks.get(name)
        if tale is None:
            raise Violation("story", f"a lease of {name!r}, which was never submitted")
        self.require(not tale.after, "dependency", f"leased before {[*tale.after]}", tale)
        self.require(tale.state is not DELAYED, "due", "leased before it was due", tale)
        self.require(tale.state not in ENDED, "ended", f"leased when {tale.state.name}", tale)
        self.require(tale.state is READY, "story", f"leased when {tale.state.name}", tale)
        offered = tale.terms.service in hand.facts.services
        self.require(offered, "service", "leased to a worker of other services", tale)
        for scope in ((b"", None), (tale.terms.service, None), tale.lane_key):
            self.require(
                scope not in self.paused, "paused", f"leased while {scope} is paused", tale
            )
        return tale

    def _check_lanes(self, tales: list[Tale], at_ns: int) -> None:
        """What is put off waits for the next run, what is held until it is let go, and a lane
        that gathers tasks until it has done so for long enough."""
        for tale in tales:
            alone = tale.place != WAITS or not self._is_fitting_before(tale)
            self.require(alone, "run", "leased again in the same run", tale)
        for key in dict.fromkeys(tale.lane_key for tale in tales):
            lane, rules = self.lanes.of(key), self.lanes.clause(key).rules
            out = self.lanes.count(key, LEASED)
            if rules.is_held and out > lane.released and not self.lanes.fresh:
                raise Violation("held", f"{key} is held, and {out} of {lane.released} are out")
            early = rules.debounce_ns and lane.begins_ns > at_ns and not self._jumps
            if early:
                raise Violation("gathering", f"{key} begins at {at_ns}, not {lane.begins_ns}")
            lane.begins_ns = 0

    def _is_fitting_before(self, late: Tale) -> bool:
        """Return whether a lane had a task of this run that could have gone in place of a late one:
        others may wait for slots, or for a worker of their own."""
        hand = self.workers[late.worker]
        used = sum(tale.terms.slots for tale in hand.held.values()) + sum(hand.slots_kept)
        total = hand.facts.slots_total or used + late.terms.slots
        room = total - used + late.terms.slots
        return any(
            tale.state is READY
            and tale.lane_key == late.lane_key
            and tale.place != WAITS
            and not tale.losses
            and tale.terms.slots <= room
            for tale in self.tasks.values()
        )

    def _check_suspects(self, hand: Hand, tales: list[Tale]) -> None:
        """Tasks that lost workers share their next one with the fewer of their kind, the fewer
        losses they have left. The last attempt is alone."""
        slots = hand.facts.slots_total
        left: dict[int, int] = {}
        for tale in [*hand.held.values(), *tales]:
            if tale.losses:
                spare = min(3, tale.terms.crashes_max - 1 - tale.losses)
                left[spare] = left.get(spare, 0) + 1
                alone = len(hand.held) + len(tales) == 1
                self.require(spare > 0 or alone, "suspect", "its last attempt is not alone", tale)
                # A worker without a limit of slots may have asked for any number.
                few = not slots or (left[spare] - 1) ** 3 < slots ** max(1, spare)
                self.require(few, "suspect", f"{left[spare]} of its kind share a worker", tale)

    def _check_slots(self, worker: bytes, hand: Hand, tales: list[Tale]) -> None:
        slots = hand.facts.slots_total
        if not slots:
            return
        used = sum(tale.terms.slots for tale in hand.held.values()) + sum(hand.slots_kept)
        if used > slots + self.ahead.get(worker, 0):
            raise Violation("slots", f"{worker!r} has {used} slots taken: {hand}")
        if any(tale.terms.slots > slots for tale in tales):
            raise Violation("slots", f"{worker!r} has {slots} slots, and gets wider tasks: {tales}")

    def _pairs(self) -> dict[tuple[bytes, bytes, bytes], int]:
        """Who serves which lane, and how many of its tasks."""
        pairs: dict[tuple[bytes, bytes, bytes], int] = {}
        for worker, hand in self.workers.items():
            for tale in hand.held.values():
                key = (*tale.lane_key, worker)
                pairs[key] = pairs.get(key, 0) + 1
        return pairs

    def _check_limits(
        self, before: dict[tuple[bytes, bytes, bytes], int], tales: list[Tale], worker: bytes
    ) -> None:
        now = self._pairs()
        begun = [key for key in now if key not in before]
        broker_max = self.broker_workers_max
        if begun and broker_max and len(now) > broker_max:
            raise Violation(
                "limit", f"{len(now)} lanes are served, the broker's limit is {broker_max}"
            )
        for service, lane, _ in begun:
            clause = self.lanes.clause((service, lane))
            rules = clause.rules
            serving = sum(self.lanes.clause(key[:2]).name == clause.name for key in now)
            if rules.workers_max and serving > rules.workers_max:
                raise Violation("limit", f"clause {clause.name!r} has {serving} workers")
            in_lane = sum(key[:2] == (service, lane) for key in now)
            if lane and in_lane > rules.lane_workers_max:
                raise Violation("limit", f"lane {lane!r} has {in_lane} workers")
        for service, lane in dict.fromkeys(tale.lane_key for tale in tales):
            rules = self.lanes.clause((service, lane)).rules
            out = sum(count for key, count in now.items() if key[:2] == (service, lane))
            if lane and out > rules.lane_workers_max * (1 + rules.overfeed):
                raise Violation("limit", f"lane {lane!r} has {out} tasks out, latest to {worker!r}")

    def _check_order(self, tales: list[Tale]) -> None:
        """Within a lane: higher priority first, then what came back, then by arrival."""
        lanes = dict.fromkeys(
            tale.lane_key for tale in tales if tale.terms.service not in self._wide
        )
        if not lanes:
            return
        left = [
            tale
            for tale in self.tasks.values()
            if tale.state is READY and tale.lane_key in lanes and not tale.losses
            if tale.place != WAITS
        ]
        for tale in tales:
            if tale.losses:
                continue
            is_random = self.lanes.rules(tale).is_random
            for other in left:
                same = other.lane_key == tale.lane_key
                if same and goes_before(other, tale, is_random=is_random):
                    self.require(False, "order", f"{other.name!r} was passed over by", tale)  # noqa: FBT003

    def _check_rate(self, tales: list[Tale]) -> None:
        for tale in tales:
            clause = self.lanes.clause(tale.lane_key)
            interval_ns = clause.rules.rate_interval_ns
            if not interval_ns:
                continue
            times_ns = self.lease_times_ns.setdefault(clause.name, [])
            times_ns.append(self.now_ns)
            for back, then_ns in enumerate(reversed(times_ns[-20:]), start=1):
                allowed = (self.now_ns - then_ns + RATE_SAVED_NS) // interval_ns + 1
                self.require(
                    back <= allowed, "rate", f"{back} leases within too short a time", tale
                )

    def _finished(self, record: r.Finished) -> None:
        tales = self._named(record.names, (LEASED,), "completion")
        self._release(record, tales, "completion")
        if record.keeps_slots:
            self.workers[record.worker].slots_kept += [tale.terms.slots for tale in tales]
        for tale in tales:
            self._move(tale, DONE, "finished")
        for tale in self.tasks.values():
            if any(name in tale.after for name in record.names):
                for name in record.names:
                    tale.after.pop(name, None)
                if not tale.after and tale.state is BLOCKED:
                    self._ready(tale, record.at_ns, "released", front=True)

    def _failed(self, record: r.Failed) -> None:
        tales = self._named(record.names, (LEASED,), "failure")
        self._release(record, tales, "failure")
        for tale in tales:
            if record.own_fault:
                tale.failures += 1
            else:
                tale.losses += 1
                enough = tale.losses == tale.terms.crashes_max
                self.require(enough, "crashes", f"FAILED after {tale.losses} lost workers", tale)
            self._move(tale, FAILED, "own fault" if record.own_fault else "lost workers")

    def _postponed(self, record: r.Postponed) -> None:
        tales = self._named(record.names, (LEASED, READY), "postponement")
        for index, tale in enumerate(tales):
            if tale.state is LEASED:
                self._release_one(record.worker, tale, record.attempts[index], "postponement")
                if record.own_fault:
                    tale.failures += 1
                    self._check_schedule(tale, record.due_ns[index] - record.at_ns)
            tale.due_ns = record.due_ns[index]
        self._leave(tales, DELAYED, "postponed")

    def _check_schedule(self, tale: Tale, delay_ns: int) -> None:
        """It is tried again after what its schedule says, and a jitter that only adds; or, if its
        program died with it, a second later."""
        delays_ns = self.schedule(tale)
        crashes_left = tale.failures < tale.terms.crashes_max
        crashed = tale.failures > len(delays_ns) and delay_ns == CRASH_NS and crashes_left
        if crashed or self.lanes.fresh:
            return
        self.require(tale.failures <= len(delays_ns), "retry", "tried too often", tale)
        least_ns = delays_ns[tale.failures - 1]
        jitter = self.lanes.rules(tale).jitter_percent
        good = least_ns <= delay_ns <= least_ns + least_ns * jitter // 100
        self.require(good, "retry", f"put off by {delay_ns}, not {least_ns}", tale)

    def schedule(self, tale: Tale) -> tuple[int, ...]:
        own = tale.terms.retry_delays_ns
        return self.lanes.rules(tale).retry_delays_ns if own is None else own

    def _returned(self, record: r.Returned) -> None:
        tales = self._named(record.names, (LEASED,), "return")
        lanes = {tale.lane_key: self.lanes.of(tale.lane_key).released for tale in tales}
        self._release(record, tales, "return")
        front = record.reason not in (ReturnReason.TRANSFERRED, ReturnReason.DEFERRED_BACK)
        if front and record.reason is not ReturnReason.RESTARTED:
            for key, released in lanes.items():
                self.lanes.of(key).released = released  # nobody tried them
        back = record.reason is ReturnReason.DEFERRED_BACK
        for index, tale in enumerate(tales):
            if record.after is not None:
                tale.after.update(dict.fromkeys(record.after[index]))
                self.require(not self._close_cycle(tale), "cycle", "a cycle was accepted", tale)
            if record.reason is ReturnReason.RESTARTED:
                self._lose(tale)
            why = f"returned {record.reason.name}"
            self._ready(tale, record.at_ns, why, front=front, deferred=back, is_due=True)
        self.lanes.cap_released([*lanes])

    def _lose(self, tale: Tale) -> None:
        tale.losses += 1
        few = tale.losses < tale.terms.crashes_max
        self.require(few, "crashes", f"not FAILED after {tale.losses} lost workers", tale)

    def _expired(self, record: r.LeaseExpired) -> None:
        tales = self._named(record.names, (LEASED,), "expiry")
        self._release(record, tales, "expiry")
        for tale in tales:
            self._lose(tale)
            self._ready(tale, record.at_ns, "expired", front=True, is_due=True)

    def _came_due(self, record: r.CameDue) -> None:
        for tale in self._named(record.names, (DELAYED,), "coming due"):
            self.require(tale.due_ns <= record.at_ns, "due", "came due too early", tale)
            self._ready(tale, record.at_ns, "came due", front=False, deferred=True)

    def _aged(self, record: r.TaskExpired) -> None:
        for tale in self._named(record.names, WAITING, "aging"):
            terms = tale.terms
            hard = 0 < terms.expires_hard_ns <= record.at_ns
            soft = 0 < terms.expires_ns <= record.at_ns and tale.failures + tale.losses > 0
            asked = record.reason != b"too old"
            self.require(hard or soft or asked, "expiry", "too old before its time", tale)
            self._leave([tale], FAILED, "aged")

    def _cancelled(self, record: r.Cancelled) -> None:
        tales = self._named(record.names, (*WAITING, LEASED, FAILED), "cancelling")
        for tale in tales:
            if tale.state is LEASED:
                self._let_go(tale)
        self._leave(tales, CANCELLED, "cancelled")
        gone = dict.fromkeys(record.names)
        causes = record.causes or []
        asked = len(tales) - len(causes)
        for tale, place in zip(tales[asked:], causes, strict=True):
            waited = place < asked and any(name in gone for name in tale.after)
            self.require(waited, "cause", "was cancelled with what it did not wait for", tale)
        for tale in self.tasks.values():
            waits = any(name in gone for name in tale.after)
            orphan = waits and tale.state is not CANCELLED
            self.require(not orphan, "orphan", "waits for a cancelled task", tale)

    def _retried(self, record: r.Retried) -> None:
        for tale in self._named(record.names, (DELAYED, FAILED), "a retry"):
            if tale.state is FAILED:
                tale.failures = tale.losses = 0
                tale.forgiven = True
            tale.due_ns = 0
            self._ready(tale, record.at_ns, "retried", front=False)

    def _moved(self, record: r.Moved) -> None:
        for tale in self._named(record.names, (*WAITING, FAILED), "a move"):
            state, terms = tale.state, tale.terms
            if state is READY:
                tale.state = BLOCKED  # it is not among those that are left
                self.lanes.count_removed([tale])
                self.lanes.cap_released([tale.lane_key])
            if record.service is not None:
                tale.terms = structs.replace(terms, service=record.service)
            if record.lane is not None:
                tale.lane = record.lane
            if terms.slots != 1:
                self._wide[tale.terms.service] = None
            if state is READY:
                self._ready(tale, record.at_ns, "moved", front=False, is_due=True)
            else:
                self._move(tale, state, "moved")

    def _reported(self, record: r.ReportedLate) -> None:
        for tale in self._named(record.names, (*WAITING, LEASED), "lateness"):
            late = 0 < tale.terms.report_ns <= record.at_ns
            self.require(late, "lateness", "is said to be late before its time", tale)
            self.require(not tale.reported, "lateness", "is said to be late again", tale)
            tale.reported = True

    def _released(self, record: r.Released) -> None:
        self.lanes.let_go(self._named(record.names, (READY,), "a release"))

    def _progressed(self, record: r.Progressed) -> None:
        for name, attempt in zip(record.names, record.attempts, strict=True):
            tale = self.tasks[name]
            own = tale.worker == record.worker and tale.attempt == attempt
            self.require(own, "fencing", "progress of a lease that is over", tale)

    def _nothing(self, record: r.StaleReport) -> None:
        """A stale report changes nothing."""

    def _joined(self, record: r.WorkerJoined) -> None:
        hand = self.workers.get(record.worker)
        if hand is None:
            self.workers[record.worker] = Hand(record.facts)
        else:
            hand.facts = record.facts

    def _left(self, record: r.WorkerLeft) -> None:
        hand = self.workers.pop(record.worker, None)
        if hand is None or hand.held:
            raise Violation(
                "story", f"{record.worker!r} left and is or holds what it must not: {hand}"
            )

    def _replaced(self, record: r.WorkerReplaced) -> None:
        for name, attempt in zip(record.names, record.attempts, strict=True):
            tale = self.tasks[name]
            own = self.leases.get((name, attempt)) == record.worker and tale.losses > 0
            self.require(own, "charge", f"was not lost with {record.worker!r}", tale)

    def _refunded(self, record: r.Refunded) -> None:
        """A process that was taken for dead is heard again: no worker was lost."""
        for tale in self._named(record.names, (*WAITING, LEASED), "a refund"):
            self.require(tale.losses > 0, "charge", "is refunded what was not charged", tale)
            tale.losses -= 1
            if tale.state is READY:
                tale.place = 0  # it waited among the suspects, and goes first now

    def _slots_freed(self, record: r.SlotsFreed) -> None:
        hand = self.workers[record.worker]
        if record.tasks > len(hand.slots_kept):
            raise Violation("slots", f"{record.worker!r} freed more slots than it kept")
        del hand.slots_kept[: record.tasks]
        hand.kept_before = min(hand.kept_before, len(hand.slots_kept))

    def _paused(self, record: r.Paused) -> None:
        self.paused[record.service, record.lane if record.service else None] = None

    def _resumed(self, record: r.Resumed) -> None:
        self.paused.pop((record.service, record.lane if record.service else None), None)
