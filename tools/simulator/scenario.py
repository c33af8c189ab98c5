"""The scenario: requests of clients and faults, drawn from the plan second by second.

Clients submit batches with every feature of a submission and send commands about them. Faults
happen for some seconds. Then all faults end and every task must be settled.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final, TypeAlias
from zlib import crc32

from simulator import processes, product_workers
from simulator.calls import CallClient
from simulator.clients import CLIENTS, Client, JobClient, RequestMaker
from simulator.codecs.dialects import DO
from simulator.models import ENDED, LEASED, READY
from simulator.outputs import CALLS, draw_blobs, has_blobs
from simulator.plan import (
    KINDS_WITH_RESOURCES,
    MILLISECOND_NS,
    RESOURCE_SEED_OFFSET,
    SECOND_NS,
    TASK_RESOURCES,
    WORKER_RESOURCES,
    Faults,
    chance,
    draw_rules_of_services,
    with_lane_rates,
)
from simulator.product_clients import NativeProductClient, RoundRobinProductClient
from simulator.worker import Worker
from simulator.workers import KINDS as FOREIGN_KINDS
from taskyard.core import events, identity
from taskyard.core.events import DuplicatePolicy, Scope, UnknownPolicy
from taskyard.core.model import Refusal, Stream, Submission, Terms, TermsChanges

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.models import TaskModel
    from simulator.network import Network
    from simulator.world import World
    from taskyard.core.resources import Resources


AnyWorker: TypeAlias = Worker | processes.ProductWorker

#: Product workers, and model workers that a stranger could write from the dialects' pages.
KINDS: Final[dict[str, type[AnyWorker]]] = {**FOREIGN_KINDS, **product_workers.KINDS}

#: Later than any event.
_FAR_NS: Final = 1 << 62

#: In one of this many schedules there is a native relay, and in other schedules a worker that only
#: requests.
_NATIVE_RELAY_SCHEDULES: Final = 4
_STEALING_SCHEDULES: Final = 3

_FAULT_SEED_OFFSET: Final = 1 << 41
_EDIT_SEED_OFFSET: Final = 1 << 42
_CALL_SEED_OFFSET: Final = 1 << 45

#: Campaigns of product clients.
CAMPAIGNS: Final = (b"", b"k0")

#: Environments of submissions.
ENVIRONMENTS: Final = (b"", b'{"host":"h","cwd":"/a"}', b'{"host":"h","cwd":"/b"}')


class Scenario:
    """The clients, workers and faults of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.plan = world.plan
        self.services = [*world.plan.services]
        #: The services of all workers.
        self._served = [*self.services]
        self.clients: list[Client] = []
        self.workers: list[AnyWorker] = []
        #: Relays between workers and the broker.
        self.relays: list[product_workers.RelayProgram] = []
        #: Product clients.
        self.programs: list[NativeProductClient | RoundRobinProductClient] = []
        #: Names that some task waits for and no client has submitted yet.
        self.unsubmitted_names: list[bytes] = []
        self.probed = False
        #: When the last round began, and how often it submitted tasks.
        self._round_ns, self._rounds = _FAR_NS, 0
        #: For how long each product worker may be silent since then.
        self._silent_ns: dict[bytes, int] = {}
        #: Drained workers: not every dialect has a message that dismisses them.
        self._drained: dict[bytes, None] = {}
        self._tasks_left = world.plan.size.tasks
        #: Creates of plain peers so far.
        self._extensions = 0
        #: Separate, so that seeds without two workers of one name draw as before.
        self._fault_rng = Random(world.plan.seed + _FAULT_SEED_OFFSET)
        #: Random choices of edits, which leave the choices of other requests as they are.
        self._edit_rng = Random(world.plan.seed + _EDIT_SEED_OFFSET)
        self._resource_rng = Random(world.plan.seed + RESOURCE_SEED_OFFSET)

    def begin(self) -> None:
        self.world.host.start()
        for number in range(self.plan.size.clients):
            self._add_client(b"c%d" % number)
        for kind in self.plan.size.other_clients:
            self._add_other_client(kind)
        self._add_shipped_clients()
        if "wmp" in self.plan.size.workers:
            for number in range(self._fault_rng.choice((0, 1, 2))):
                self._add_relay(b"r%d" % number)
        if self.plan.seed % _NATIVE_RELAY_SCHEDULES == 0:
            self._add_native_relay(b"n0")
        for number, kind in enumerate(self.plan.size.workers):
            self._add_worker(kind, b"w%d" % number)
        if self.plan.seed % _STEALING_SCHEDULES == 2:  # noqa: PLR2004  # any remainder
            stealing = KINDS["stealing"](self.world, b"s0", self.plan.services, 2)
            self.workers.append(stealing)
            stealing.start()
        if has_blobs(self.plan.seed):
            self._add_calls()
        self.world.timeline.after(SECOND_NS // 4, self._inject_faults)

    def _add_relay(self, name: bytes) -> None:
        relay = product_workers.RelayProgram(self.world, name)
        self.relays.append(relay)
        self.world.relay_networks.append(relay.network)
        relay.start()

    def _add_native_relay(self, name: bytes) -> None:
        relay = product_workers.NativeRelayProgram(self.world, name)
        self.relays.append(relay)
        self.world.native_relay_networks.append(relay.network)
        relay.start()

    def _add_client(self, name: bytes) -> None:
        client = Client(self.world, name)
        self.clients.append(client)
        batches = 1 + self.plan.size.tasks // (self.plan.size.batch * self.plan.size.clients)
        for _ in range(batches):
            when_ns = self.rng.randrange(self.plan.size.faulty_ns * 2 // 3)
            client.pending.append((when_ns + 1, self._submit))
            for send_new in self._schedule_requests():
                later_ns = when_ns + self.rng.randrange(self.plan.size.faulty_ns // 3)
                client.pending.append((later_ns + 1, send_new))
            if self.rng.random() < self.plan.odds.repeat:
                self.world.timeline.at(when_ns + SECOND_NS, partial(self._repeat, client))
        client.start()

    def _add_other_client(self, kind: str) -> None:
        """Add a client of another dialect. It submits, and some can query."""
        client = CLIENTS[kind](self.world, b"c-" + kind.encode())
        self.clients.append(client)
        for _ in range(self.rng.choice((1, 3, 6))):
            when_ns = 1 + self.rng.randrange(self.plan.size.faulty_ns)
            if isinstance(client, JobClient):
                client.pending.append((when_ns, client.job))
            else:
                client.pending.append((when_ns, self._extend))
                client.pending.append((when_ns + SECOND_NS, self._look))
        client.start()

    def _add_shipped_clients(self) -> None:
        """Add clients that run the product's loops."""
        if chance(self._fault_rng, 0.4):
            client = NativeProductClient(self.world, b"n0")
            for number in range(self._fault_rng.choice((1, 3, 8))):
                when_ns = 1 + self._fault_rng.randrange(self.plan.size.faulty_ns)
                service = self._fault_rng.choice(self.services)
                client.plan(when_ns, self._fault_rng.choice(CAMPAIGNS), b"n%d" % number, service)
            self.programs.append(client)
        if chance(self._fault_rng, 0.2):
            prompt = RoundRobinProductClient(self.world, b"p0")
            for _ in range(self._fault_rng.choice((1, 3))):
                prompt.pending.append(1 + self._fault_rng.randrange(self.plan.size.faulty_ns))
            self.programs.append(prompt)
        for program in self.programs:
            program.start()

    def close(self) -> None:
        """End the product clients. Each holds a pipe."""
        for program in self.programs:
            if program.alive:
                program.end()

    def unsettled(self) -> list[bytes]:
        """Return the tasks that are not settled for product clients."""
        clients = [one for one in self.programs if isinstance(one, NativeProductClient)]
        return [name for client in clients for name in client.unsettled()]

    def _add_calls(self) -> None:
        """Add a client of calls with large arguments, and workers that can run these."""
        rng = Random(self.plan.seed + _CALL_SEED_OFFSET)
        drawn = draw_blobs(self.plan.seed, jumps=self.plan.faults.clock_jump > 0)
        client = CallClient(self.world, b"vc")
        names: list[tuple[bytes, bytes]] = []
        times_ns = sorted(rng.randrange(self.plan.size.faulty_ns) for _ in range(drawn.calls))
        for number, when_ns in enumerate(times_ns):
            campaign, name = rng.choice(CAMPAIGNS), b"%s%d" % (CALLS, number)
            needed: list[bytes] = []
            if names and chance(rng, 0.5):
                other = rng.choice(names)
                needed = [other[1] if other[0] == campaign else identity.spelling(*other)]
            names.append((campaign, name))
            client.plan_call(1 + when_ns, campaign, name, needed)
        self.programs.append(client)
        client.start()
        for number in range(drawn.workers):
            worker = KINDS["native"](self.world, b"v%d" % number, (CALLS,), rng.choice((1, 2)))
            self.workers.append(worker)
            self.world.timeline.after(rng.randrange(SECOND_NS), worker.start)
        self._served.append(CALLS)

    def _add_worker(self, kind: str, name: bytes) -> None:
        count = self.rng.randrange(len(self.services)) + 1
        services = tuple(self.rng.sample(self.services, count))
        worker = KINDS[kind](self.world, name, services, self.plan.size.slots)
        if kind in KINDS_WITH_RESOURCES and chance(self._resource_rng, self.plan.odds.resources):
            worker.resources = self._resource_rng.choice(WORKER_RESOURCES)
        self.workers.append(worker)
        self.world.timeline.after(self.rng.randrange(SECOND_NS), worker.start)
        if worker.sends_incarnation:
            worker.is_supervised = chance(self._fault_rng, 0.7)
            if chance(self._fault_rng, 0.2):
                self._add_twin(kind, name, services, worker.resources)

    def _add_twin(
        self, kind: str, name: bytes, services: tuple[bytes, ...], resources: Resources
    ) -> None:
        """Add another worker of the same name."""
        twin = KINDS[kind](self.world, name, services, self.plan.size.slots)
        twin.twin, twin.is_supervised = 1, chance(self._fault_rng, 0.5)
        twin.resources = resources
        self.workers.append(twin)
        self.world.timeline.after(self._fault_rng.randrange(4 * SECOND_NS), twin.start)

    def _repeat(self, client: Client) -> None:
        if client.alive:
            client.resend_answered()

    # Requests of clients.

    def _schedule_requests(self) -> list[Callable[[], RequestMaker | None]]:
        wishes = [self._cancel, self._retry, self._pause, self._move, self._watch, self._drain]
        return [*wishes, self._ask, self._ask]

    def _submit(self) -> RequestMaker | None:
        if self._tasks_left <= 0:
            return None
        count = min(self._tasks_left, self.rng.randrange(self.plan.size.batch) + 1)
        self._tasks_left -= count
        submission = Submission([])
        submission.terms = [self._terms() for _ in range(self.rng.choice((1, 1, 2, 3)))]
        if len(submission.terms) > 1:
            places = range(len(submission.terms))
            submission.terms_at = [self.rng.choice(places) for _ in range(count)]
        for index in range(count):
            submission.names.append(self._new_name(submission.terms_of(index).campaign))
        for name in submission.names:
            if self.rng.random() < self.plan.odds.poison:
                self.world.poisoned[name] = None
        # By the name, so that random numbers stay as in earlier schedules.
        submission.environment = ENVIRONMENTS[crc32(submission.names[0]) % len(ENVIRONMENTS)]
        event = events.SubmitRequested(0, b"", submission)
        self._shape(event, submission)
        self.world.names += submission.names
        return event

    def _extend(self) -> RequestMaker:
        """Send a plain Create: existing tasks get more predecessors, or begin again if they have
        ended."""
        rng = self.rng
        names = [self._new_name() for _ in range(rng.randrange(self.plan.size.batch) + 1)]
        tales = self.world.checker.model.tasks
        known = rng.choice(self.world.names or names)
        ended = [name for name in self.world.names if name in tales and tales[name].state in ENDED]
        if ended and chance(rng, 0.5):
            known = rng.choice(ended)
        if chance(rng, 0.5) and known not in names:
            names[0] = known
        submission = Submission(names)
        if chance(rng, 0.5):
            submission.after = [self._after(submission, index) for index in range(len(names))]
        self.world.names += [name for name in names if name not in self.world.names]
        self._add_conflict(submission)
        repeat, unknown = DuplicatePolicy.EXTEND, UnknownPolicy.DONE
        return events.SubmitRequested(0, b"", submission, unknown=unknown, repeat=repeat)

    def _add_conflict(self, submission: Submission) -> None:
        """Give some submissions a name twice, with another predecessor, and some a cycle."""
        self._extensions += 1
        names, kind = submission.names, self._extensions % 4
        if kind == 0:
            after = submission.after or [[] for _ in names]
            submission.after = [*after, names[1:2]]
            names.append(names[0])
        elif kind == 1:
            after = submission.after or [[] for _ in names]
            first, second = b"c%d" % self._extensions, b"d%d" % self._extensions
            names += [first, second]
            submission.after = [*after, [second], [first]]

    def _look(self) -> RequestMaker:
        names = self.world.names or [b"nobody"]
        looks: list[RequestMaker] = [
            events.StatsRequested(0, b""),
            events.LookupRequested(0, b"", [self.rng.choice(names)]),
        ]
        return self.rng.choice(looks)

    def _task_models(self) -> list[TaskModel]:
        return [*self.world.checker.model.tasks.values()]

    def _new_name(self, campaign: bytes = b"") -> bytes:
        """Return a full name. Some tasks have the name of another campaign's task."""
        rng, begin = self.rng, identity.prefix(campaign)
        unsubmitted_names = [
            name for name in self.unsubmitted_names if _campaign_of(name) == campaign
        ]
        if unsubmitted_names and chance(rng, 0.5):
            self.unsubmitted_names.remove(unsubmitted_names[-1])
            return unsubmitted_names[-1]
        others = [name for name in self.world.names if _campaign_of(name) not in (b"", campaign)]
        if others and begin and chance(rng, 0.2):
            twin = begin + rng.choice(others).partition(b"/")[2]
            if twin not in self.world.names:
                return twin
        return begin + b"t%03d" % (len(self.world.names) + rng.randrange(1 << 30))

    def _shape(self, event: events.SubmitRequested, submission: Submission) -> None:
        rng, odds, count = self.rng, self.plan.odds, len(submission.names)
        # Without a payload a task is its name. Some workers get nothing else.
        payloads = [DO + name for name in submission.names]
        submission.payloads = [b""] if chance(rng, 0.5) else payloads
        if rng.random() < odds.lane:
            lanes = [b"", *(b"l%d" % lane for lane in range(self.plan.size.lanes))]
            submission.lanes = [rng.choice(lanes) for _ in range(count)]
        if odds.after:
            submission.after = [self._after(submission, index) for index in range(count)]
        if rng.random() < odds.after_unknown:
            event.unknown = rng.choice((UnknownPolicy.WAIT, UnknownPolicy.DONE))
            if submission.after is not None:
                begin = identity.prefix(submission.terms_of(count - 1).campaign)
                promise = begin + b"u%d" % rng.randrange(1000)
                submission.after[-1].append(promise)
                self.unsubmitted_names.append(promise)

    def _after(self, submission: Submission, index: int) -> list[bytes]:
        rng, odds = self.rng, self.plan.odds
        if rng.random() >= odds.after:
            return []
        before = [*submission.names[:index], *filter(self._is_findable, self.world.names[-10:])]
        if rng.random() < odds.after_ahead:
            before = submission.names[index + 1 :] or before
        if rng.random() < odds.cycle:
            before = submission.names
        return rng.sample(before, min(len(before), rng.choice((1, 1, 2, 3))))

    def _is_findable(self, name: bytes) -> bool:
        """Return whether a name can be split at its campaign, which the broker must know."""
        campaign = _campaign_of(name)
        return not campaign or any(
            task_model.terms.campaign == campaign for task_model in self._task_models()
        )

    def _terms(self) -> Terms:
        rng, odds = self.rng, self.plan.odds
        wall_ns = self.world.clock.wall_ns()

        def soon_ns(seconds: int) -> int:
            return wall_ns + rng.randrange(seconds * SECOND_NS)

        terms = Terms(campaign=b"" if chance(rng, 0.2) else self._campaign())
        terms.service = rng.choice(self.services)
        if rng.random() < odds.due:
            terms.due_ns = soon_ns(6)
        if rng.random() < odds.priority:
            terms.priority = rng.choice((-1, 1, 5))
        if rng.random() < odds.expires:
            terms.expires_ns = soon_ns(8)
        if rng.random() < odds.expires:
            terms.expires_hard_ns = soon_ns(rng.choice((4, 20)))
        if rng.random() < odds.retries:
            delays = (0, 300 * MILLISECOND_NS, 2 * SECOND_NS)
            terms.retry_delays_ns = delays[: rng.randrange(4)]
        if rng.random() < odds.has_wide_tasks:
            terms.slots = 2
        if rng.random() < odds.lease:
            terms.lease_ns = rng.choice((2, 8)) * SECOND_NS
        terms.crashes_max = rng.choice((1, 2, 3, 5))
        if chance(self._resource_rng, odds.resources):
            terms.resources = self._resource_rng.choice(TASK_RESOURCES)
        return terms

    def _campaign(self) -> bytes:
        return b"k%d" % self.rng.randrange(self.plan.size.campaigns)

    def _scope(self) -> Scope:
        rng = self.rng
        kind = rng.randrange(5)
        if kind == 0:
            return Scope(campaign=self._campaign())
        if kind == 1:
            return Scope(service=rng.choice(self.services), lane=b"l0")
        names = self.world.names or [b"nobody"]
        return Scope(names=tuple(rng.choice(names) for _ in range(rng.randrange(3) + 1)))

    def _cancel(self) -> RequestMaker | None:
        if self.rng.random() >= self.plan.odds.cancel:
            return None
        at_work = [
            task_model.name for task_model in self._task_models() if task_model.state is LEASED
        ]
        if at_work and chance(self.rng, 0.5):
            return events.CancelRequested(0, b"", Scope(names=(self.rng.choice(at_work),)))
        return events.CancelRequested(0, b"", self._scope())

    def _retry(self) -> RequestMaker | None:
        if self.rng.random() < self.plan.odds.retry:
            return events.RetryRequested(0, b"", self._scope())
        return None

    def _pause(self) -> RequestMaker | None:
        if self.rng.random() >= self.plan.odds.pause:
            return None
        service = self.rng.choice([b"", *self.services, *self.services])
        lane = self.rng.choice((None, b"l0", b"")) if service else None
        kind = self.rng.choice(
            (events.PauseRequested, events.PauseRequested, events.ResumeRequested)
        )
        return kind(0, b"", service, lane)

    def _move(self) -> RequestMaker | None:
        """Move tasks to another lane, edit or expire them."""
        if self.rng.random() >= self.plan.odds.move:
            return None
        if chance(self.rng, 0.3):
            return events.ExpireRequested(0, b"", self._scope())
        lane = self.rng.choice((None, b"l0", b"l1", b""))
        service = self.rng.choice((None, *self.services)) if lane is not None else b"default"
        scope = self._scope()
        if chance(self._edit_rng, 0.5):
            return events.EditRequested(0, b"", scope, self._changes())
        return events.MoveRequested(0, b"", scope, service, lane)

    def _changes(self) -> TermsChanges:
        """Draw changes of terms, mostly of the priority."""
        rng, changes = self._edit_rng, TermsChanges()
        if chance(rng, 0.7):
            changes.priority = rng.choice((-1, 0, 1, 5))
        if chance(rng, 0.3):
            changes.retry_delays_ns = rng.choice(((), (0,), (SECOND_NS, SECOND_NS)))
        if chance(rng, 0.3) or changes.priority is None:
            soon_ns = self.world.clock.wall_ns() + rng.randrange(10 * SECOND_NS)
            changes.expires_hard_ns = rng.choice((0, soon_ns))
        if chance(rng, 0.2):
            changes.time_limit_ns = rng.choice((0, 60 * SECOND_NS))
        return changes

    def _watch(self) -> RequestMaker | None:
        if self.rng.random() >= self.plan.odds.watch or not self.world.names:
            return None
        if chance(self.rng, 0.3):
            return events.WatchRequested(0, b"", campaign=self._campaign())
        names = self.rng.sample(self.world.names, min(3, len(self.world.names)))
        return events.WatchRequested(0, b"", names)

    def _drain(self) -> RequestMaker | None:
        if self.rng.random() >= self.plan.odds.drain:
            return None
        # Without a name the broker itself would leave.
        name = _broker_name(self.rng.choice(self.workers))
        self._drained[name] = None
        return events.DrainRequested(0, b"", name)

    def _ask(self) -> RequestMaker | None:
        rng, known = self.rng, self.world.names or [b"nobody"]
        if rng.random() >= self.plan.odds.ask:
            return None
        names = rng.sample(known, min(3, len(known)))
        questions: list[RequestMaker] = [
            events.LookupRequested(0, b"", names[:1]),
            events.LookupRequested(0, b"", names[:1]),
            events.ResultsRequested(0, b"", names),
            events.ResultsRequested(0, b"", names),
            events.PartRequested(0, b"", names[0], stream=Stream.STDOUT),
            events.ExplainRequested(0, b"", names[0]),
            events.ListRequested(0, b"", self._scope(), count=rng.choice((1, 5, 100))),
            events.StatsRequested(0, b""),
            events.WorkersRequested(0, b""),
            events.RequestRejected(0, b"", 0, Refusal.MALFORMED, "no such request"),
        ]
        return rng.choice(questions)

    # Faults.

    def _inject_faults(self) -> None:
        """Inject the faults of a quarter of a second."""
        if self.world.healed:
            return
        self.world.timeline.after(SECOND_NS // 4, self._inject_faults)
        self.world.checker.check_timeouts()
        self.world.checker.check_due()
        faults = self.plan.faults
        self._fault_machine(faults)
        for worker in self.workers:
            self._fault_worker(worker, faults)
        self._fault_clients(faults)
        for relay in self.relays:
            self._fault_relay(relay, faults)
        for network in self.world.networks():
            for name in [*network.links]:
                if self._fault_happens(faults.partition):
                    self._partition(network, name)

    def _fault_clients(self, faults: Faults) -> None:
        for client in self.clients:
            if self._fault_happens(faults.crash_client) and client.alive:
                client.crash()
                self.world.timeline.after(self._downtime_ns(), client.start)
        for program in self.programs:
            if self._fault_happens(faults.crash_client) and program.alive:
                program.die()

    def _fault_relay(self, relay: product_workers.RelayProgram, faults: Faults) -> None:
        if self._fault_happens(faults.crash_worker) and relay.alive:
            relay.die()
        if self._fault_happens(faults.hang_worker):
            relay.hang(self.rng.randrange(2 * self.plan.size.silence_ns))

    def _fault_machine(self, faults: Faults) -> None:
        if self._fault_happens(faults.crash_broker):
            self.world.host.crash("killed")
        if self._fault_happens(faults.clock_jump):
            self._jump()
        if self._fault_happens(faults.rules_change):
            self._change_rules()
        if self._fault_happens(faults.disk_full):
            self._fill_disk()

    def _fault_happens(self, a_second: float) -> bool:
        return a_second > 0 and self.rng.random() < a_second / 4

    def _downtime_ns(self) -> int:
        return 1 + self.rng.randrange(self.plan.faults.restart_ns_max)

    def _fault_worker(self, worker: AnyWorker, faults: Faults) -> None:
        if self._fault_happens(faults.crash_worker) and worker.alive:
            worker.die()
        if self._fault_happens(faults.hang_worker):
            least_ns = self.rng.choice((0, self.plan.size.silence_ns))
            worker.hang(self.rng.randrange(least_ns, 2 * self.plan.size.silence_ns))
        if self._fault_happens(faults.stop_worker) and worker.alive:
            worker.stop()
            self.world.timeline.after(self._downtime_ns(), worker.start)

    def _jump(self) -> None:
        by_ns = self.rng.randrange(
            -self.plan.faults.clock_jump_ns_max, self.plan.faults.clock_jump_ns_max
        )
        self.world.trace("the wall clock jumps by", by_ns)
        self.world.clock.jump(by_ns)

    def _change_rules(self) -> None:
        limited = chance(self.rng, 0.7)
        drawn = draw_rules_of_services(self.rng, self.services, limited=limited)
        clauses = with_lane_rates(self.rng, drawn, wanted=self.plan.lane_rates)
        broker_max = self.rng.choice((0, 0, 1, 3)) if limited else 0
        self.world.host.set_rules(events.RulesSet(0, clauses, workers_max=broker_max))

    def _fill_disk(self) -> None:
        self._set_full(full=True)
        self.world.timeline.after(
            self.rng.randrange(4 * SECOND_NS), partial(self._set_full, full=False)
        )

    def _set_full(self, *, full: bool) -> None:
        self.world.trace("the disk is full" if full else "the disk has room")
        self.world.host.store.full = full
        self.world.checker.disk_full(full=full)

    def _partition(self, network: Network, name: bytes) -> None:
        way = self.rng.randrange(3)
        network.cut(name, to_broker=way != 0, to_peer=way != 1)
        self.world.trace("is cut off", name)
        reconnect = partial(network.reconnect, name)
        self.world.timeline.after(self.rng.randrange(5 * SECOND_NS), reconnect)

    # The end.

    def heal(self) -> None:
        """End all faults, and make sure that there is a worker for every service."""
        world = self.world
        world.trace("healed")
        world.healed = True
        perfect = Faults()
        for name in perfect.__struct_fields__:
            setattr(world.faults, name, getattr(perfect, name))
        world.faults.restart_ns_max = 100 * MILLISECOND_NS
        for network in world.networks():
            network.heal()
        for program in (*self.relays, *self.programs):
            program.start()
        world.clock.reset_wall_clock()
        if world.host.store.full:
            self._set_full(full=False)
        world.host.heal()

    def revive(self) -> None:
        """Restart all peers, resume paused lanes, and add new workers."""
        self.world.revived = True
        for client in self.clients:
            client.drop_blocking_requests()
            client.start()
            client.resend_open()
        self._resume_all()
        for worker in self.workers:
            if not worker.retired:
                worker.start()
                worker.on_free()
        for number, service in enumerate(self._served):
            kinds = ("native", "called") if number else ("native", "standing", "called")
            kind = "native" if service == CALLS else self.rng.choice(kinds)
            fresh = KINDS[kind](self.world, b"h%d" % number, (service,), 4)
            self.workers.append(fresh)
            fresh.start()
            if self.plan.odds.resources:
                self._add_large_worker(b"g%d" % number, service)
        self.world.timeline.after(SECOND_NS, self._probe)
        self.world.timeline.after(SECOND_NS, self._flush)

    def _add_large_worker(self, name: bytes, service: bytes) -> None:
        """Add a worker that has the resources of every task."""
        large = KINDS["native"](self.world, name, (service,), 4)
        large.resources = WORKER_RESOURCES[-1]
        self.workers.append(large)
        large.start()

    def _flush(self) -> None:
        """Release all tasks in held lanes, and tasks that a late Pause keeps."""
        self._resume_all()
        model = self.world.checker.model
        ready = [task_model for task_model in self._task_models() if task_model.state is READY]
        if any(model.lanes.rules(task_model).is_held for task_model in ready):
            scope = Scope(states=(READY,))
            self.clients[0].send_new(partial(events.RetryRequested, 0, b"", scope))
        self.world.timeline.after(2 * SECOND_NS, self._flush)

    def _resume_all(self) -> None:
        for service, lane in [*self.world.checker.model.paused]:
            self.clients[0].send_new(partial(events.ResumeRequested, 0, b"", service, lane))

    def begin_last_round(self) -> None:
        """Cause one more mishap of which no peer is notified."""
        self.world.is_last_round = True
        self.world.trace("last round")
        self.world.host.set_rules(events.RulesSet(0, ()))
        mishap = self.rng.randrange(3)
        if mishap == 1:
            for network in self.world.networks():
                network.reset_all()
        elif mishap == 2:  # noqa: PLR2004  # the last of three
            self.world.host.crash("killed once more")
        self.world.revived = False
        self.world.mishap_ns = self.world.timeline.now_ns

    def begin_work(self) -> None:
        """Submit tasks for every worker."""
        self.world.revived = True
        self._round_ns = self.world.timeline.now_ns
        products = [one for one in self.workers if isinstance(one, processes.ProductWorker)]
        self._silent_ns = {worker.name: worker.silent_ns_max for worker in products}
        for client in self.clients:
            client.resend_open()
        self._make_work()

    def _make_work(self) -> None:
        """Submit more tasks than all workers can run at once, repeatedly."""
        if not self.unserved():
            return
        self._rounds += 1
        for service in self._served:
            workers = [one for one in self.workers if one.alive and service in one.services]
            count = sum(min(4, worker.slots or 1) for worker in workers)
            names = [b"y%d-%d-%s" % (self._rounds, at, service) for at in range(count + 1)]
            work = Submission(names, terms=[Terms(service=service)])
            self.clients[0].send_new(partial(events.SubmitRequested, 0, b"", work))
        self.world.timeline.after(2 * SECOND_NS, self._make_work)

    def unserved(self, after_ns: int = 0) -> list[bytes]:
        """Return the product workers that got no task in the last round, although it began so long
        ago and they may be silent for no longer than that."""
        ago_ns = self.world.timeline.now_ns - self._round_ns
        names = Counter(worker.name for worker in self.workers if worker.alive)
        return [
            worker.name
            for worker in self.workers
            if isinstance(worker, processes.ProductWorker)
            and worker.alive
            and names[worker.name] == 1
            if worker.served_ns <= self._round_ns and worker.core_name() not in self._drained
            if not after_ns or ago_ns > after_ns + self._silent_ns.get(worker.name, 0)
        ]

    def _probe(self) -> None:
        """Submit one more task per service while most workers wait: none of them may be
        forgotten."""
        self.probed = True
        for number, service in enumerate(self.services):
            probe = Submission([b"z%d" % number], terms=[Terms(service=service)])
            self.clients[0].send_new(partial(events.SubmitRequested, 0, b"", probe))


def _campaign_of(full_name: bytes) -> bytes:
    """Return the campaign in a full name: names of simulated tasks have no `/`."""
    return full_name.rpartition(identity.SEPARATOR)[0]


def _broker_name(worker: AnyWorker) -> bytes:
    """Return the broker's name of a worker, as far as it is predictable."""
    return worker.core_name() if isinstance(worker, processes.ProductWorker) else worker.name
