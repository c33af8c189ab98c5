"""The whole scheduler against the model: the same states after any events, and all done at last."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from taskyard.core.effects import Accepted, Assign, Effect, ReportAck
from taskyard.core.events import (
    DuplicatePolicy,
    Outcome,
    PauseRequested,
    ResumeRequested,
    TasksReported,
    UnknownPolicy,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.records import Postponed
from taskyard.core.scheduler import Scheduler
from tests.core.kit import Yard
from tests.core.reference_model import READY, Model, ModelWorker
from tests.kit.snapshots import reopened

TASKS = [b"a", b"b", b"c", b"d", b"e", b"f"]
WORKERS = [b"u", b"v", b"w"]
MODES = {
    "harmless": (UnknownPolicy.REFUSE, DuplicatePolicy.IGNORE),
    "wait": (UnknownPolicy.WAIT, DuplicatePolicy.IGNORE),
    "extend": (UnknownPolicy.DONE, DuplicatePolicy.EXTEND),
}
OUTCOMES = [
    Outcome.DONE,
    Outcome.DONE,
    Outcome.FAILED,
    Outcome.FAILED_FINAL,
    Outcome.RETRY_AT,
    Outcome.REFUSED,
    Outcome.DEFER_BACK,
]

batches = st.dictionaries(
    st.sampled_from(TASKS), st.lists(st.sampled_from(TASKS), max_size=2), min_size=1, max_size=3
)
some_tasks = st.lists(st.sampled_from(TASKS), min_size=1, max_size=2)
workers = st.sampled_from(WORKERS)
seconds = st.sampled_from([0, 0, 1, 2])


class Machine(RuleBasedStateMachine):
    """Everything happens to the yard and to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.yard = Yard()
        self.model = Model()

    def see(self, effects: list[Effect]) -> None:
        """Pass assignments on to the model."""
        for effect in effects:
            if isinstance(effect, Assign):
                self.model.assigned(effect.worker, effect.names, effect.attempts)

    def shows_life(self, worker: bytes) -> None:
        if worker in self.model.workers:
            self.model.workers[worker].last_seen_ns = self.model.now_ns

    @invariant()
    def states_are_the_same(self) -> None:
        known = self.yard.scheduler.ledger.tasks
        assert {name: task.state for name, task in known.items()} == self.model.states()

    @invariant()
    def leases_are_the_same(self) -> None:
        known = self.yard.scheduler.ledger.workers
        held = {name: sorted(task.name for task in one.held()) for name, one in known.items()}
        assert held == {name: sorted(self.model.held_by(name)) for name in self.model.workers}

    @invariant()
    def no_task_waits_for_a_timer(self) -> None:
        assert self.model.neglected() == []

    @rule(
        after=batches,
        mode=st.sampled_from([*MODES]),
        lane=st.sampled_from([b"", b"1"]),
        due=seconds,
        expires=st.sampled_from([0, 0, 0, 4]),
        delays=st.sampled_from([(), (0, SECOND_NS)]),
        crashes_max=st.sampled_from([1, 2]),
    )
    def submit(self, after: dict[bytes, list[bytes]], mode: str, lane: bytes, **given: Any) -> None:
        now_ns = self.model.now_ns
        terms = {
            "due_ns": now_ns + given["due"] * SECOND_NS if given["due"] else 0,
            "retry_delays_ns": given["delays"],
            "crashes_max": given["crashes_max"],
        }
        expires_ns = now_ns + given["expires"] * SECOND_NS if given["expires"] else 0
        unknown, repeat = MODES[mode]
        effects = self.yard.submit(
            *after,
            after=list(after.values()),
            lanes=[lane] * len(after),
            unknown=unknown,
            repeat=repeat,
            expires_hard_ns=expires_ns,
            **terms,
        )
        taken = self.model.submit(after, mode, {**terms, "lane": lane, "expires_ns": expires_ns})
        assert isinstance(effects[0], Accepted) is taken
        self.see(effects)

    @rule(
        name=workers,
        slots=st.sampled_from([0, 1, 2]),
        lease_timeout_ns=st.sampled_from([0, 5 * SECOND_NS]),
        incarnation=st.sampled_from([0, 0, 1]),
    )
    def join(self, name: bytes, slots: int, lease_timeout_ns: int, incarnation: int) -> None:
        former = self.model.workers.get(name)
        facts = {
            "slots_total": slots,
            "lease_timeout_ns": lease_timeout_ns,
            "incarnation": incarnation,
        }
        if former is not None and former.incarnation == incarnation:
            facts["slots_total"] = former.slots
            facts["lease_timeout_ns"] = former.timeout_ns
            self.shows_life(name)
        else:
            if former is not None:
                self.model.lose(name, blamed=True)
            now_ns = self.model.now_ns
            self.model.workers[name] = ModelWorker(slots, lease_timeout_ns, incarnation, now_ns)
        self.see(self.yard.join(name, **facts))

    @rule(name=workers, count=st.sampled_from([1, 2]), parks=st.booleans())
    def ask(self, name: bytes, count: int, *, parks: bool) -> None:
        self.shows_life(name)
        effects = self.yard.ask(name, count, parks=parks)
        if name in self.model.workers and parks:
            self.model.workers[name].parked = True
        self.see(effects)

    @precondition(lambda self: any(task.holder for task in self.model.tasks.values()))
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES), late=st.sampled_from([0, 0, 0, 1]))
    def report(self, data: st.DataObject, outcome: Outcome, late: int) -> None:
        out = [name for name, task in self.model.tasks.items() if task.holder]
        name = data.draw(st.sampled_from(out))
        task = self.model.tasks[name]
        assert task.holder is not None
        worker, attempt = task.holder, task.attempt - late
        retry_at_ns = self.model.now_ns + SECOND_NS
        self.shows_life(worker)
        effects = self.yard.handle(
            TasksReported(0, worker, [name], [attempt], [outcome], None, [retry_at_ns])
        )
        taken = self.model.holds(worker, name, attempt)
        assert effects[0] == ReportAck(worker, 0, [] if taken else [name])
        if taken:
            if outcome is Outcome.DEFER_BACK:
                retry_at_ns = self.put_back(name, task.terms["lane"])
            self.model.settle(name, outcome, retry_at_ns)
        self.see(effects)

    def put_back(self, name: bytes, lane: bytes) -> int:
        """When a task comes due again that goes to the end of its lane; 0 if it is ready there.
        It must not be, if it is alone."""
        tasks = self.model.tasks.values()
        others = [one for one in tasks if one.state is READY and one.terms["lane"] == lane]
        postponed = isinstance(self.yard.records[0], Postponed)
        assert others or postponed
        return self.yard[name].due_ns if postponed else 0

    @rule(name=workers, task=st.sampled_from(TASKS), attempt=st.integers(0, 3))
    def report_of_a_zombie(self, name: bytes, task: bytes, attempt: int) -> None:
        """Send an arbitrary report, which counts only if the worker holds that attempt."""
        self.shows_life(name)
        taken = self.model.holds(name, task, attempt)
        effects = self.yard.finish(name, task, attempts=[attempt])
        assert effects[0] == ReportAck(name, 0, [] if taken else [task])
        if taken:
            self.model.settle(task, Outcome.DONE, 0)
        self.see(effects)

    @rule(name=workers)
    def leave(self, name: bytes) -> None:
        if name in self.model.workers:
            self.model.lose(name, blamed=False)
        self.see(self.yard.leave(name))

    @rule(names=some_tasks)
    def cancel(self, names: list[bytes]) -> None:
        self.model.cancel(names)
        self.see(self.yard.cancel(*names))

    @rule(names=some_tasks)
    def retry(self, names: list[bytes]) -> None:
        self.model.retry(names)
        self.see(self.yard.retry(*names))

    @rule()
    def pause(self) -> None:
        self.model.paused = True
        self.see(self.yard.handle(PauseRequested(0, b"client")))

    @rule()
    def resume(self) -> None:
        self.model.paused = False
        self.see(self.yard.handle(ResumeRequested(0, b"client")))

    @rule(some=st.sampled_from([0, 1, 3, 6]))
    def time(self, some: int) -> None:
        self.model.time_passes(self.model.now_ns + some * SECOND_NS)
        self.see(self.yard.later(some))

    @rule()
    def broker_restarts(self) -> None:
        """Recover the scheduler from its journal. No worker is parked afterwards."""
        again = Scheduler(self.yard.mirror)
        again.resume(self.yard.now_ns)
        again.context.wall_offset_ns = self.yard.scheduler.context.wall_offset_ns
        self.yard.scheduler = again
        self.yard.mirror = reopened(self.yard.mirror)
        for worker in self.model.workers.values():
            worker.last_seen_ns = self.model.now_ns
            worker.parked = False

    def teardown(self) -> None:
        """With one live worker and no more faults every task that can be done is done."""
        self.resume()
        for name in [*self.model.workers]:
            self.leave(name)
        self.model.workers[b"z"] = ModelWorker(0, 0, 0, self.model.now_ns)
        self.see(self.yard.join(b"z"))
        for _ in range(4 * len(TASKS)):
            self.retry([*self.model.tasks])
            self.ask(b"z", 9, parks=False)
            for name in self.model.held_by(b"z"):
                self.report_of_a_zombie(b"z", name, self.model.tasks[name].attempt)
        self.states_are_the_same()
        left = [name for name in self.model.tasks if self.model.unfinished(name)]
        assert sorted(left) == sorted(self.model.left_behind())


TestStory = pytest.mark.slow(Machine.TestCase)
TestStory.settings = settings(stateful_step_count=40)
