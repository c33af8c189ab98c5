"""What the people of the world want, and what befalls them: drawn from the plan, second by second.

Clients' scripts (batches with every feature a submission has, and wishes about them), mishaps
while the faults last, and the healing at the end.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final, TypeAlias

from taskyard.core import events, identity
from taskyard.core.events import DuplicatePolicy, Scope, UnknownPolicy
from taskyard.core.tasks import Submission, Terms
from taskyard.sim import programs, shipped
from taskyard.sim.clients import CLIENTS, Client, JobClient, Wish
from taskyard.sim.plan import MILLISECOND_NS, SECOND_NS, Faults, chance, draw_clauses
from taskyard.sim.shipped_clients import NativeClient, RoundRobinClient
from taskyard.sim.story import ENDED, LEASED, READY
from taskyard.sim.tongues import DO
from taskyard.sim.workers import KINDS as FOREIGN_KINDS
from taskyard.sim.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.sim.network import Network
    from taskyard.sim.story import Tale
    from taskyard.sim.world import World


AnyWorker: TypeAlias = Worker | programs.Worker

#: Workers that we ship, and those that a stranger may write from the dialects' pages.
KINDS: Final[dict[str, type[AnyWorker]]] = {**FOREIGN_KINDS, **shipped.KINDS}

#: Later than anything happens.
_FAR_NS: Final = 1 << 62

_FATE_OFFSET: Final = 1 << 41

#: Where the tasks of shipped clients are.
CAMPAIGNS: Final = (b"", b"k0")


class Scenario:
    """One world's people and misfortunes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.luck = world.luck
        self.plan = world.plan
        self.services = [*world.plan.services]
        self.clients: list[Client] = []
        self.workers: list[AnyWorker] = []
        #: Clients that we ship.
        self.programs: list[NativeClient | RoundRobinClient] = []
        #: Names that some task waits for and nobody has submitted yet.
        self.promised: list[bytes] = []
        self.probed = False
        #: When the last round began, and how often there was new work in it.
        self._round_ns, self._rounds = _FAR_NS, 0
        #: Workers that were drained: not every dialect has a word to dismiss them.
        self._drained: dict[bytes, None] = {}
        self._tasks_left = world.plan.size.tasks
        #: Creates of plain peers so far.
        self._extensions = 0
        #: Of names alone, so that a seed without two of one name means what it meant before.
        self._fate = Random(world.plan.seed + _FATE_OFFSET)

    def begin(self) -> None:
        self.world.host.start()
        for number in range(self.plan.size.clients):
            self._add_client(b"c%d" % number)
        for kind in self.plan.size.other_clients:
            self._add_other_client(kind)
        self._add_shipped_clients()
        if "wmp" in self.plan.size.workers:
            for number in range(self._fate.choice((0, 1, 2))):
                self.world.relays.append(shipped.RelayProgram(self.world, b"r%d" % number))
                self.world.relays[-1].start()
        for number, kind in enumerate(self.plan.size.workers):
            self._add_worker(kind, b"w%d" % number)
        self.world.timeline.after(SECOND_NS // 4, self._misfortune)

    def _add_client(self, name: bytes) -> None:
        client = Client(self.world, name)
        self.clients.append(client)
        batches = 1 + self.plan.size.tasks // (self.plan.size.batch * self.plan.size.clients)
        for _ in range(batches):
            when_ns = self.luck.randrange(self.plan.size.faulty_ns * 2 // 3)
            client.script.append((when_ns + 1, self._submit))
            for wish in self._wishes():
                later_ns = when_ns + self.luck.randrange(self.plan.size.faulty_ns // 3)
                client.script.append((later_ns + 1, wish))
            if self.luck.random() < self.plan.wants.repeat:
                self.world.timeline.at(when_ns + SECOND_NS, partial(self._repeat, client))
        client.start()

    def _add_other_client(self, kind: str) -> None:
        """One that has few words: it submits, and some can look."""
        client = CLIENTS[kind](self.world, b"c-" + kind.encode())
        self.clients.append(client)
        for _ in range(self.luck.choice((1, 3, 6))):
            when_ns = 1 + self.luck.randrange(self.plan.size.faulty_ns)
            if isinstance(client, JobClient):
                client.script.append((when_ns, client.job))
            else:
                client.script.append((when_ns, self._extend))
                client.script.append((when_ns + SECOND_NS, self._look))
        client.start()

    def _add_shipped_clients(self) -> None:
        """Add clients that run the loops which we ship."""
        if chance(self._fate, 0.4):
            client = NativeClient(self.world, b"n0")
            for number in range(self._fate.choice((1, 3, 8))):
                when_ns = 1 + self._fate.randrange(self.plan.size.faulty_ns)
                service = self._fate.choice(self.services)
                client.plan(when_ns, self._fate.choice(CAMPAIGNS), b"n%d" % number, service)
            self.programs.append(client)
        if chance(self._fate, 0.2):
            prompt = RoundRobinClient(self.world, b"p0")
            for _ in range(self._fate.choice((1, 3))):
                prompt.script.append(1 + self._fate.randrange(self.plan.size.faulty_ns))
            self.programs.append(prompt)
        for program in self.programs:
            program.start()

    def close(self) -> None:
        """End the clients of ours: each holds a pipe."""
        for program in self.programs:
            if program.alive:
                program.end()

    def unsettled(self) -> list[bytes]:
        """Return the tasks that clients of ours must still be told of."""
        clients = [one for one in self.programs if isinstance(one, NativeClient)]
        return [name for client in clients for name in client.unsettled()]

    def _add_worker(self, kind: str, name: bytes) -> None:
        count = self.luck.randrange(len(self.services)) + 1
        services = tuple(self.luck.sample(self.services, count))
        worker = KINDS[kind](self.world, name, services, self.plan.size.slots)
        self.workers.append(worker)
        self.world.timeline.after(self.luck.randrange(SECOND_NS), worker.start)
        if worker.says_process:
            worker.is_supervised = chance(self._fate, 0.7)
            if chance(self._fate, 0.2):
                self._add_twin(kind, name, services)

    def _add_twin(self, kind: str, name: bytes, services: tuple[bytes, ...]) -> None:
        """Another worker of the same name."""
        twin = KINDS[kind](self.world, name, services, self.plan.size.slots)
        twin.twin, twin.is_supervised = 1, chance(self._fate, 0.5)
        self.workers.append(twin)
        self.world.timeline.after(self._fate.randrange(4 * SECOND_NS), twin.start)

    def _repeat(self, client: Client) -> None:
        if client.alive:
            client.repeat()

    # What clients want.

    def _wishes(self) -> list[Callable[[], Wish | None]]:
        wishes = [self._cancel, self._retry, self._pause, self._move, self._watch, self._drain]
        return [*wishes, self._ask, self._ask]

    def _submit(self) -> Wish | None:
        if self._tasks_left <= 0:
            return None
        count = min(self._tasks_left, self.luck.randrange(self.plan.size.batch) + 1)
        self._tasks_left -= count
        submission = Submission([])
        submission.terms = [self._terms() for _ in range(self.luck.choice((1, 1, 2, 3)))]
        if len(submission.terms) > 1:
            places = range(len(submission.terms))
            submission.terms_at = [self.luck.choice(places) for _ in range(count)]
        for index in range(count):
            submission.names.append(self._new_name(submission.terms_of(index).campaign))
        for name in submission.names:
            if self.luck.random() < self.plan.wants.poison:
                self.world.poisoned[name] = None
        event = events.SubmitRequested(0, b"", submission)
        self._shape(event, submission)
        self.world.names += submission.names
        return event

    def _extend(self) -> Wish:
        """In plain dwork: what is known waits for more, or begins again if it has ended."""
        luck = self.luck
        names = [self._new_name() for _ in range(luck.randrange(self.plan.size.batch) + 1)]
        tales = self.world.checker.story.tasks
        known = luck.choice(self.world.names or names)
        ended = [name for name in self.world.names if name in tales and tales[name].state in ENDED]
        if ended and chance(luck, 0.5):
            known = luck.choice(ended)
        if chance(luck, 0.5) and known not in names:
            names[0] = known
        submission = Submission(names)
        if chance(luck, 0.5):
            submission.after = [self._after(submission, index) for index in range(len(names))]
        self.world.names += [name for name in names if name not in self.world.names]
        self._spoil(submission)
        repeat, unknown = DuplicatePolicy.EXTEND, UnknownPolicy.DONE
        return events.SubmitRequested(0, b"", submission, unknown=unknown, repeat=repeat)

    def _spoil(self, submission: Submission) -> None:
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

    def _look(self) -> Wish:
        names = self.world.names or [b"nobody"]
        looks: list[Wish] = [
            events.StatsRequested(0, b""),
            events.LookupRequested(0, b"", [self.luck.choice(names)]),
        ]
        return self.luck.choice(looks)

    def _tales(self) -> list[Tale]:
        return [*self.world.checker.story.tasks.values()]

    def _new_name(self, campaign: bytes = b"") -> bytes:
        """Return a full name. Some tasks are called as another campaign's task is."""
        luck, begin = self.luck, identity.prefix(campaign)
        promised = [name for name in self.promised if _campaign_of(name) == campaign]
        if promised and chance(luck, 0.5):
            self.promised.remove(promised[-1])
            return promised[-1]
        others = [name for name in self.world.names if _campaign_of(name) not in (b"", campaign)]
        if others and begin and chance(luck, 0.2):
            twin = begin + luck.choice(others).partition(b"/")[2]
            if twin not in self.world.names:
                return twin
        return begin + b"t%03d" % (len(self.world.names) + luck.randrange(1 << 30))

    def _shape(self, event: events.SubmitRequested, submission: Submission) -> None:
        luck, wants, count = self.luck, self.plan.wants, len(submission.names)
        # Without a payload a task is its name; some workers are told nothing else of it.
        payloads = [DO + name for name in submission.names]
        submission.payloads = [b""] if chance(luck, 0.5) else payloads
        if luck.random() < wants.lane:
            lanes = [b"", *(b"l%d" % lane for lane in range(self.plan.size.lanes))]
            submission.lanes = [luck.choice(lanes) for _ in range(count)]
        if wants.after:
            submission.after = [self._after(submission, index) for index in range(count)]
        if luck.random() < wants.after_unknown:
            event.unknown = luck.choice((UnknownPolicy.WAIT, UnknownPolicy.DONE))
            if submission.after is not None:
                begin = identity.prefix(submission.terms_of(count - 1).campaign)
                promise = begin + b"u%d" % luck.randrange(1000)
                submission.after[-1].append(promise)
                self.promised.append(promise)

    def _after(self, submission: Submission, index: int) -> list[bytes]:
        luck, wants = self.luck, self.plan.wants
        if luck.random() >= wants.after:
            return []
        before = [*submission.names[:index], *filter(self._is_findable, self.world.names[-10:])]
        if luck.random() < wants.after_ahead:
            before = submission.names[index + 1 :] or before
        if luck.random() < wants.cycle:
            before = submission.names
        return luck.sample(before, min(len(before), luck.choice((1, 1, 2, 3))))

    def _is_findable(self, name: bytes) -> bool:
        """Tell whether a name can be split at its campaign: the broker must know that."""
        campaign = _campaign_of(name)
        return not campaign or any(tale.terms.campaign == campaign for tale in self._tales())

    def _terms(self) -> Terms:
        luck, wants = self.luck, self.plan.wants
        wall_ns = self.world.clock.wall_ns()

        def soon_ns(seconds: int) -> int:
            return wall_ns + luck.randrange(seconds * SECOND_NS)

        terms = Terms(campaign=b"" if chance(luck, 0.2) else self._campaign())
        terms.service = luck.choice(self.services)
        if luck.random() < wants.due:
            terms.due_ns = soon_ns(6)
        if luck.random() < wants.priority:
            terms.priority = luck.choice((-1, 1, 5))
        if luck.random() < wants.expires:
            terms.expires_ns = soon_ns(8)
        if luck.random() < wants.expires:
            terms.expires_hard_ns = soon_ns(luck.choice((4, 20)))
        if luck.random() < wants.retries:
            delays = (0, 300 * MILLISECOND_NS, 2 * SECOND_NS)
            terms.retry_delays_ns = delays[: luck.randrange(4)]
        if luck.random() < wants.has_wide_tasks:
            terms.slots = 2
        if luck.random() < wants.lease:
            terms.lease_ns = luck.choice((2, 8)) * SECOND_NS
        terms.crashes_max = luck.choice((1, 2, 3, 5))
        return terms

    def _campaign(self) -> bytes:
        return b"k%d" % self.luck.randrange(self.plan.size.campaigns)

    def _scope(self) -> Scope:
        luck = self.luck
        kind = luck.randrange(5)
        if kind == 0:
            return Scope(campaign=self._campaign())
        if kind == 1:
            return Scope(service=luck.choice(self.services), lane=b"l0")
        names = self.world.names or [b"nobody"]
        return Scope(names=tuple(luck.choice(names) for _ in range(luck.randrange(3) + 1)))

    def _cancel(self) -> Wish | None:
        if self.luck.random() >= self.plan.wants.cancel:
            return None
        at_work = [tale.name for tale in self._tales() if tale.state is LEASED]
        if at_work and chance(self.luck, 0.5):
            return events.CancelRequested(0, b"", Scope(names=(self.luck.choice(at_work),)))
        return events.CancelRequested(0, b"", self._scope())

    def _retry(self) -> Wish | None:
        if self.luck.random() < self.plan.wants.retry:
            return events.RetryRequested(0, b"", self._scope())
        return None

    def _pause(self) -> Wish | None:
        if self.luck.random() >= self.plan.wants.pause:
            return None
        service = self.luck.choice([b"", *self.services, *self.services])
        lane = self.luck.choice((None, b"l0", b"")) if service else None
        kind = self.luck.choice(
            (events.PauseRequested, events.PauseRequested, events.ResumeRequested)
        )
        return kind(0, b"", service, lane)

    def _move(self) -> Wish | None:
        """To another lane, or to the end."""
        if self.luck.random() >= self.plan.wants.move:
            return None
        if chance(self.luck, 0.3):
            return events.ExpireRequested(0, b"", self._scope())
        lane = self.luck.choice((None, b"l0", b"l1", b""))
        service = self.luck.choice((None, *self.services)) if lane is not None else b"default"
        return events.MoveRequested(0, b"", self._scope(), service, lane)

    def _watch(self) -> Wish | None:
        if self.luck.random() >= self.plan.wants.watch or not self.world.names:
            return None
        if chance(self.luck, 0.3):
            return events.WatchRequested(0, b"", campaign=self._campaign())
        names = self.luck.sample(self.world.names, min(3, len(self.world.names)))
        return events.WatchRequested(0, b"", names)

    def _drain(self) -> Wish | None:
        if self.luck.random() >= self.plan.wants.drain:
            return None
        # Without a name the broker itself would be told to leave.
        name = _broker_name(self.luck.choice(self.workers))
        self._drained[name] = None
        return events.DrainRequested(0, b"", name)

    def _ask(self) -> Wish | None:
        luck, known = self.luck, self.world.names or [b"nobody"]
        if luck.random() >= self.plan.wants.ask:
            return None
        names = luck.sample(known, min(3, len(known)))
        questions: list[Wish] = [
            events.LookupRequested(0, b"", names[:1]),
            events.LookupRequested(0, b"", names[:1]),
            events.ResultsRequested(0, b"", names),
            events.ResultsRequested(0, b"", names),
            events.OutputRequested(0, b"", names[0]),
            events.ExplainRequested(0, b"", names[0]),
            events.ListRequested(0, b"", self._scope(), count=luck.choice((1, 5, 100))),
            events.StatsRequested(0, b""),
            events.WorkersRequested(0, b""),
            events.RequestRejected(0, b"", 0, "no such request"),
        ]
        return luck.choice(questions)

    # What befalls them.

    def _misfortune(self) -> None:
        """A quarter of a second of bad luck."""
        if self.world.healed:
            return
        self.world.timeline.after(SECOND_NS // 4, self._misfortune)
        self.world.checker.check_silence()
        self.world.checker.check_due()
        faults = self.plan.faults
        self._strike_machine(faults)
        for worker in self.workers:
            self._strike_worker(worker, faults)
        self._strike_clients(faults)
        for relay in self.world.relays:
            self._strike_relay(relay, faults)
        for network in self.world.networks():
            for name in [*network.links]:
                if self._strikes(faults.partition):
                    self._part(network, name)

    def _strike_clients(self, faults: Faults) -> None:
        for client in self.clients:
            if self._strikes(faults.crash_client) and client.alive:
                client.crash()
                self.world.timeline.after(self._downtime_ns(), client.start)
        for program in self.programs:
            if self._strikes(faults.crash_client) and program.alive:
                program.die()

    def _strike_relay(self, relay: shipped.RelayProgram, faults: Faults) -> None:
        if self._strikes(faults.crash_worker) and relay.alive:
            relay.die()
        if self._strikes(faults.hang_worker):
            relay.hang(self.luck.randrange(2 * self.plan.size.silence_ns))

    def _strike_machine(self, faults: Faults) -> None:
        if self._strikes(faults.crash_broker):
            self.world.host.crash("killed")
        if self._strikes(faults.clock_jump):
            self._jump()
        if self._strikes(faults.rules_change):
            self._change_rules()
        if self._strikes(faults.disk_full):
            self._fill_disk()

    def _strikes(self, a_second: float) -> bool:
        return a_second > 0 and self.luck.random() < a_second / 4

    def _downtime_ns(self) -> int:
        return 1 + self.luck.randrange(self.plan.faults.restart_ns_max)

    def _strike_worker(self, worker: AnyWorker, faults: Faults) -> None:
        if self._strikes(faults.crash_worker) and worker.alive:
            worker.die()
        if self._strikes(faults.hang_worker):
            least_ns = self.luck.choice((0, self.plan.size.silence_ns))
            worker.hang(self.luck.randrange(least_ns, 2 * self.plan.size.silence_ns))
        if self._strikes(faults.stop_worker) and worker.alive:
            worker.stop()
            self.world.timeline.after(self._downtime_ns(), worker.start)

    def _jump(self) -> None:
        by_ns = self.luck.randrange(
            -self.plan.faults.clock_jump_ns_max, self.plan.faults.clock_jump_ns_max
        )
        self.world.trace("the wall clock jumps by", by_ns)
        self.world.clock.jump(by_ns)

    def _change_rules(self) -> None:
        limited = chance(self.luck, 0.7)
        clauses = draw_clauses(self.luck, self.services, limited=limited)
        broker_max = self.luck.choice((0, 0, 1, 3)) if limited else 0
        self.world.host.set_rules(events.RulesSet(0, clauses, workers_max=broker_max))

    def _fill_disk(self) -> None:
        self._set_full(full=True)
        self.world.timeline.after(
            self.luck.randrange(4 * SECOND_NS), partial(self._set_full, full=False)
        )

    def _set_full(self, *, full: bool) -> None:
        self.world.trace("the disk is full" if full else "the disk has room")
        self.world.host.store.full = full
        self.world.checker.disk_full(full=full)

    def _part(self, network: Network, name: bytes) -> None:
        way = self.luck.randrange(3)
        network.cut(name, to_broker=way != 0, to_peer=way != 1)
        self.world.trace("is cut off", name)
        mend = partial(network.mend, name)
        self.world.timeline.after(self.luck.randrange(5 * SECOND_NS), mend)

    # The end.

    def heal(self) -> None:
        """No more faults; everybody is well; there is a worker for everything."""
        world = self.world
        world.trace("healed")
        world.healed = True
        perfect = Faults()
        for name in perfect.__struct_fields__:
            setattr(world.faults, name, getattr(perfect, name))
        world.faults.restart_ns_max = 100 * MILLISECOND_NS
        for network in world.networks():
            network.heal()
        for program in (*world.relays, *self.programs):
            program.start()
        world.clock.heal()
        if world.host.store.full:
            self._set_full(full=False)
        if not world.host.up:
            world.host.start()

    def revive(self) -> None:
        """Everybody comes back, what was paused goes on, and new workers come."""
        self.world.revived = True
        for client in self.clients:
            client.relent()
            client.start()
            client.ask_again()
        self._resume_all()
        for worker in self.workers:
            if not worker.retired:
                worker.start()
                worker.on_free()
        for number, service in enumerate(self.services):
            kinds = ("native", "called") if number else ("native", "standing", "called")
            kind = self.luck.choice(kinds)
            fresh = KINDS[kind](self.world, b"h%d" % number, (service,), 4)
            self.workers.append(fresh)
            fresh.start()
        self.world.timeline.after(SECOND_NS, self._probe)
        self.world.timeline.after(SECOND_NS, self._flush)

    def _flush(self) -> None:
        """What waits in a held lane is let go."""
        story = self.world.checker.story
        ready = [tale for tale in self._tales() if tale.state is READY]
        if any(story.lanes.rules(tale).is_held for tale in ready):
            scope = Scope(states=(READY,))
            self.clients[0].wish(partial(events.RetryRequested, 0, b"", scope))
        self.world.timeline.after(2 * SECOND_NS, self._flush)

    def _resume_all(self) -> None:
        for service, lane in [*self.world.checker.story.paused]:
            self.clients[0].wish(partial(events.ResumeRequested, 0, b"", service, lane))

    def begin_last_round(self) -> None:
        """Let one more mishap happen that no peer is told of."""
        self.world.is_last_round = True
        self.world.trace("last round")
        self.world.host.set_rules(events.RulesSet(0, ()))
        mishap = self.luck.randrange(3)
        if mishap == 1:
            for network in self.world.networks():
                network.reset_all()
        elif mishap == 2:  # noqa: PLR2004  # the last of three
            self.world.host.crash("killed once more")
        self.world.revived = False
        self.world.mishap_ns = self.world.timeline.now_ns

    def begin_work(self) -> None:
        """Make work for every worker."""
        self.world.revived = True
        self._round_ns = self.world.timeline.now_ns
        for client in self.clients:
            client.ask_again()
        self._make_work()

    def _make_work(self) -> None:
        """Submit more than all workers can do at once, again and again."""
        if not self.unserved():
            return
        self._rounds += 1
        for service in self.services:
            workers = [one for one in self.workers if one.alive and service in one.services]
            count = sum(min(4, worker.slots or 1) for worker in workers)
            names = [b"y%d-%d-%s" % (self._rounds, at, service) for at in range(count + 1)]
            work = Submission(names, terms=[Terms(service=service)])
            self.clients[0].wish(partial(events.SubmitRequested, 0, b"", work))
        self.world.timeline.after(2 * SECOND_NS, self._make_work)

    def unserved(self) -> list[bytes]:
        """Return the workers of ours that got nothing to do in the last round."""
        names = Counter(worker.name for worker in self.workers if worker.alive)
        return [
            worker.name
            for worker in self.workers
            if isinstance(worker, programs.Worker) and worker.alive and names[worker.name] == 1
            if worker.served_ns <= self._round_ns and worker.core_name() not in self._drained
        ]

    def _probe(self) -> None:
        """One more task for each service, when most workers wait: none of them is forgotten."""
        self.probed = True
        self._resume_all()  # a wish to pause may have been under way when all were revived
        for number, service in enumerate(self.services):
            probe = Submission([b"z%d" % number], terms=[Terms(service=service)])
            self.clients[0].wish(partial(events.SubmitRequested, 0, b"", probe))


def _campaign_of(full_name: bytes) -> bytes:
    """Return the campaign in a full name: names of simulated tasks have no `/`."""
    return full_name.rpartition(identity.SEPARATOR)[0]


def _broker_name(worker: AnyWorker) -> bytes:
    """Return the name that the broker knows a worker by, as far as it can be told."""
    return worker.core_name() if isinstance(worker, programs.Worker) else worker.name
