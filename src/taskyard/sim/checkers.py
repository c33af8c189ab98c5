"""The checkers: what peers were told against what the journal says, and both against the promises.

They see what went over the network, the rows that became durable, and the settings. They never look
into the scheduler, but for one thing: after a recovery, and at the end, the broker's state
must be what the story of its journal says.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from taskyard.core import effects, events, identity
from taskyard.core import records as r
from taskyard.core.events import DuplicatePolicy, Outcome, UnknownPolicy
from taskyard.core.records import ReturnReason
from taskyard.journal.encoding import decode
from taskyard.sim.codecs.dialects import DO, argument_of
from taskyard.sim.listeners import Listener
from taskyard.sim.measurements import status_of
from taskyard.sim.network import Message
from taskyard.sim.plan import NAMED_BY_BROKER, SECOND_NS, TRUNCATED
from taskyard.sim.reference_model import (
    BLOCKED,
    CANCELLED,
    DELAYED,
    DONE,
    ENDED,
    FAILED,
    LEASED,
    READY,
    WAITING,
    ReferenceModel,
    Violation,
)
from taskyard.wire import dialect
from taskyard.wire.ping_pong import backend as ping_pong_backend
from taskyard.wire.round_robin import peers as round_robin_peers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.effects import Effect
    from taskyard.core.events import Event
    from taskyard.core.ledger import Ledger
    from taskyard.core.model import Submission, Terms
    from taskyard.core.states import TaskState
    from taskyard.core.workers import WorkerFacts
    from taskyard.journal.chain import Row
    from taskyard.sim.clock import SimClock, Timeline
    from taskyard.sim.plan import Plan
    from taskyard.sim.reference_model import TaskModel, WorkerModel

__all__ = ["Checker", "Violation"]

#: A silent worker's leases end within its lease time and this (G4).
LATE_NS_MAX: Final = SECOND_NS

#: A worker of round-robin may be silent for this much longer: it can't be told that what it holds
#: was cancelled, and what that allows it is still allowed.
STALE_NS_MAX: Final = 10 * SECOND_NS

#: When all is well again, a task that could be leased is, within this.
READY_NS_MAX: Final = 45 * SECOND_NS

#: What a client says of its tasks; the rest of their terms is the broker's.
_ASKED_TERMS: Final = (
    *("campaign", "service", "priority", "due_ns", "expires_ns", "expires_hard_ns"),
    *("retry_delays_ns", "lease_ns", "time_limit_ns", "slots", "crashes_max", "report_ns"),
)

#: WMP's WAKE, what ends it (TAKE and NO answer a GIVE, BYE sends the worker away), and where in a
#: message commands and headers are.
_WAKE: Final = b"\x02"
_END_OF_WAKE: Final = (b"\x04", b"\x05", b"\x0b")
_COMMAND_AT, _HEADERS_AT = 2, 3

#: LMQ's TRACKEXEC has its command at the same place, and its arguments from here on.
_TRACKEXEC: Final = b"\x04"
_ARGUMENTS_AT: Final = 4

_TIMED_OUT_BY_DIALECT: Final = (dialect.PING_PONG, dialect.ROUND_ROBIN)

#: The name of a worker by its route, where its dialect makes it of that.
_WORKER_OF: Final[dict[int, Callable[[bytes], bytes]]] = {
    Listener.NATIVE: lambda _route: b"",
    Listener.PING_FRONTEND: lambda _route: b"",
    Listener.WMP: lambda _route: b"",
    Listener.PING_BACKEND: ping_pong_backend.name_of,
    Listener.ROUND_ROBIN: lambda route: round_robin_peers.name_of(route[1:]),
}

#: The broker's wall clock may be this far from the true one when it decides.
WALL_DRIFT_NS_MAX: Final = SECOND_NS // 50

#: What became of a report, by its outcome: the records that may follow from it.
_FOLLOWS: Final[dict[Outcome, tuple[type, ...]]] = {
    Outcome.DONE: (r.Finished,),
    Outcome.FAILED: (r.Failed, r.Postponed),
    Outcome.FAILED_FINAL: (r.Failed,),
    Outcome.RETRY_AT: (r.Postponed,),
    Outcome.DEFER_ALL: (r.Failed, r.Postponed),
    Outcome.DEFER_BACK: (r.Returned, r.Postponed),
    Outcome.REFUSED: (r.Returned,),
    Outcome.CRASHED: (r.Failed, r.Postponed),
}

#: A worker whose dialect has no attempts reports on whichever it holds.
ANY_ATTEMPT: Final = 0

_HEARTBEAT_EVENTS: Final = (
    events.WorkerRegistered,
    events.WorkerHeartbeat,
    events.TasksRequested,
    events.TasksReported,
    events.TasksReturned,
    events.TasksProgressed,
    events.SlotFreed,
)


#: Two heartbeats of a worker are missed for certain when the third is due.
MISSED_HEARTBEATS: Final = 3


def _process_of(event: Event) -> int | None:
    """Return which process of its name a worker says it is; None: it does not say."""
    if isinstance(event, events.WorkerRegistered):
        return event.facts.incarnation if event.facts.heartbeat_ns else None
    return getattr(event, "incarnation", None)


#: The event by which a worker gives a task back, or is found to have lost it; else a report.
_RETURNED_AFTER: Final[dict[ReturnReason, type[Event]]] = {
    ReturnReason.RESTARTED: events.WorkerRegistered,
    ReturnReason.LEFT: events.WorkerExited,
    ReturnReason.UNLISTED: events.WorkerHeartbeat,
    ReturnReason.TRANSFERRED: events.TasksReturned,
}


class Checker:
    """Sees all that peers, network and disk see, and raises when a promise is broken."""

    def __init__(self, plan: Plan, timeline: Timeline, clock: SimClock) -> None:
        self._plan = plan
        self._timeline = timeline
        self._clock = clock
        self.model = ReferenceModel(plan)
        #: When each worker was last heard by the broker, and when the broker began to listen.
        self._last_seen_by_worker: dict[bytes, int] = {}
        #: The same for processes that say which one of their name they are.
        self._process_seen_ns: dict[tuple[bytes, int], int] = {}
        #: Until when a newcomer counts that wants the name of a worker.
        self._contested_until_ns: dict[bytes, int] = {}
        #: Processes that lost their name; those that were heard again, and are due to be refunded.
        self._replaced: dict[tuple[bytes, int], bool] = {}
        self._refunds_due: dict[tuple[bytes, int], None] = {}
        self._up_ns: int | None = None
        #: Records that were there when it began.
        self._recovered_records = 0
        #: What the broker received in this turn.
        self._turn: list[Event] = []
        #: Workers that were given up in this turn.
        self._lost_workers: dict[bytes, None] = {}
        #: What workers listed in this turn, as it arrived.
        self._lists: list[tuple[bytes, int | None, dict[bytes, int]]] = []
        #: (worker, name, attempt) to the outcomes that the worker has reported.
        self._reports: dict[tuple[bytes, bytes, int], dict[Outcome, None]] = {}
        #: (name, attempt) to how its lease ended.
        self._ends: dict[tuple[bytes, int], list[r.AnyRecord]] = {}
        #: (name, attempt) to when it was leased.
        self._leased_ns: dict[tuple[bytes, int], int] = {}
        #: Names that a client asked to begin again if they have ended.
        self._extendable: dict[bytes, None] = {}
        self._accepted: dict[bytes, None] = {}
        #: Results and outputs that are durable, by name.
        self._results: dict[bytes, dict[bytes, None]] = {}
        self._outputs: dict[bytes, dict[bytes, None]] = {}
        self._draining: dict[bytes, None] = {}
        self._drain_next: dict[bytes, None] = {}
        self._full_ns: int | None = None
        self._was_full = False
        #: Routes that turned out to lead nowhere, of this process of the broker.
        self._cut: dict[bytes, None] = {}
        #: Which workers were woken for each service in this turn, by their routes.
        self._woken: dict[bytes, dict[bytes, None]] = {}
        #: How many tasks of each service were ready in this turn, and are no more.
        self._were_ready: dict[bytes, int] = {}
        #: Names of jobs that have none but the broker's, by their payloads.
        self._job_names: dict[bytes, bytes] = {}
        #: (worker, task) that were sent to workers whose silence their dialects mind.
        self._jobs: dict[tuple[bytes, bytes], None] = {}
        self._jumps = plan.faults.clock_jump > 0

    # The broker.

    def on_received(self, arrived: Sequence[Message | events.RulesSet]) -> None:
        """What peers meant by what the broker received; not what its adapters made of it."""
        now_ns = self._timeline.now_ns
        self._turn = []
        for one in arrived:
            self._turn += one.sent_events if isinstance(one, Message) else [one]
        self._lists = []
        self._lost_workers = {}
        self.model.ahead = {**self.model.ahead_last}
        self._woken, self._were_ready = {}, {}
        if self._up_ns is None:
            self._up_ns = now_ns
        for event in self._turn:
            self._note_worker(event)
            if isinstance(event, events.RulesSet):
                self.model.lanes.set_rules(event.rules, event.defaults)
                self.model.broker_workers_max = event.workers_max
                self.model.lease_times_ns = {}
            elif isinstance(event, events.SubmitRequested):
                if event.repeat is DuplicatePolicy.EXTEND:
                    self._extendable.update(dict.fromkeys(event.submission.names))
            elif isinstance(event, events.DrainRequested):
                known = self.model.workers
                names = [name for name in known if event.worker in (None, name)]
                self._drain_next.update(dict.fromkeys(names))

    def _note_worker(self, event: Event) -> None:
        """Note when a worker, or a process of its name, was heard, and what it listed."""
        process = _process_of(event)
        if isinstance(event, events.WorkerRegistered):
            self._note_ahead(event)
        if process is not None:
            self._note_process(event, process)
        elif isinstance(event, _HEARTBEAT_EVENTS):
            self._last_seen_by_worker[event.worker] = self._timeline.now_ns
        if isinstance(event, events.WorkerHeartbeat) and event.held is not None:
            self._lists.append((event.worker, process, dict(event.held)))

    def _note_ahead(self, event: events.WorkerRegistered) -> None:
        """Note how much a worker takes ahead, if it is the process that holds its name."""
        worker_model = self.model.workers.get(event.worker)
        if worker_model is None or worker_model.facts.incarnation == event.facts.incarnation:
            most = self.model.ahead.get(event.worker, 0)
            self.model.ahead[event.worker] = max(most, event.prefetch)
            self.model.ahead_last[event.worker] = event.prefetch

    def _note_process(self, event: Event, process: int) -> None:
        """A process says which one of its name it is: it holds it, wants it, or has lost it."""
        name: bytes = event.worker  # type: ignore[attr-defined]
        if isinstance(event, _HEARTBEAT_EVENTS):
            self._process_seen_ns[name, process] = self._timeline.now_ns
        if self._replaced.get((name, process)) is False:
            self._refunds_due[name, process] = None
        holder = self._holder_facts(name)
        if holder is None or holder.incarnation == process:
            return
        if isinstance(event, events.WorkerRegistered):
            often_ns = max(holder.heartbeat_ns, event.facts.heartbeat_ns)
            until_ns = self._timeline.now_ns + MISSED_HEARTBEATS * often_ns
            self._contested_until_ns[name] = until_ns

    def _holder_facts(self, name: bytes) -> WorkerFacts | None:
        """Return the facts of the process that holds a name, or that gets it in this turn."""
        worker_model = self.model.workers.get(name)
        if worker_model is not None:
            return worker_model.facts
        sent_events = [one for one in self._turn if isinstance(one, events.WorkerRegistered)]
        return next((one.facts for one in sent_events if one.worker == name), None)

    def _check_name(self, record: r.WorkerJoined | r.WorkerReplaced | r.Refunded) -> None:
        """A process that has lost its name never gets it back, and is refunded once."""
        if isinstance(record, r.WorkerJoined):
            if (record.worker, record.facts.incarnation) in self._replaced:
                raise Violation("name", f"{record} has lost its name for good")
            return
        key = record.worker, record.incarnation
        self._replaced[key] = isinstance(record, r.Refunded)
        self._refunds_due.pop(key, None)

    def _last_seen_ns(self, worker: bytes) -> int:
        """When the holder of a name was heard; that the broker came up counts, too."""
        process = self.model.workers[worker].facts.incarnation
        heard_ns = self._process_seen_ns.get((worker, process), 0)
        return max(self._last_seen_by_worker.get(worker, 0), heard_ns, self._up_ns or 0)

    def on_sent(self, route: bytes, frames: Sequence[bytes]) -> None:
        """What leaves the broker, as far as peers alone could not judge it."""
        if route[0] == Listener.PING_BACKEND:
            what = self._task_name(frames[1].removeprefix(DO))
            self._jobs[ping_pong_backend.name_of(route), what] = None
        elif route[0] == Listener.ROUND_ROBIN and frames[_COMMAND_AT] == _TRACKEXEC:
            what = self._task_name(argument_of(frames[_ARGUMENTS_AT:]))
            self._jobs[round_robin_peers.name_of(route[1:]), what] = None
        elif route[0] == Listener.WMP:
            self._sent_wmp(route, frames)

    def _sent_wmp(self, route: bytes, frames: Sequence[bytes]) -> None:
        path = [*frames].index(b"")  # the routes of relays come first
        way = b" ".join([route, *frames[:path]])
        command = frames[path + _COMMAND_AT]
        if command == _WAKE:
            headers = msgspec.json.decode(frames[path + _HEADERS_AT])
            self._check_wake_count(way, headers["service"].encode())
        elif command in _END_OF_WAKE:
            for woken in self._woken.values():
                woken.pop(way, None)

    def _check_wake_count(self, way: bytes, service: bytes) -> None:
        """One task never calls a crowd."""
        woken = self._woken.setdefault(service, {})
        woken[way] = None
        task_models = self.model.tasks.values()
        ready = sum(one.state is READY and one.terms.service == service for one in task_models)
        ready += self._were_ready.get(service, 0)
        if len(woken) > ready + self._cancelled_wakes():
            raise Violation("herd", f"{len(woken)} workers are woken for {ready} tasks")

    def _cancelled_wakes(self) -> int:
        """Count the READYs of this turn: each cancels a WAKE that left before it was heard, if
        there was one, so another worker is woken in its place."""
        return sum(isinstance(one, events.TasksRequested) and one.parks for one in self._turn)

    def on_disconnected(self, route: bytes) -> None:
        """The broker notices that nobody is there."""
        self._cut[route] = None

    def on_turn_end(self) -> None:
        """A turn of the broker is over."""
        self.model.lanes.fresh = False
        if self._refunds_due:
            raise Violation("refund", f"{[*self._refunds_due]} were heard again")
        self._draining.update(self._drain_next)
        self._drain_next = {}

    def broker_down(self) -> None:
        self._up_ns = None
        self._turn = []
        self._draining, self._drain_next = {}, {}
        self._cut = {}
        self._contested_until_ns, self._refunds_due = {}, {}
        self.model.lease_times_ns = {}

    def on_recovered(self, ledger: Ledger) -> None:
        """What the broker knows after a restart is what its journal says."""
        self._last_seen_by_worker, self._process_seen_ns = {}, {}
        self._recovered_records = self.model.records
        for worker_model in self.model.workers.values():
            worker_model.kept_before = len(worker_model.slots_kept)
        self.compare(ledger, "recovered")

    def compare(self, ledger: Ledger, when: str) -> None:
        model = self.model
        if ledger.record != model.records:
            raise Violation("recovery", f"{when}: {ledger.record} of {model.records} records")
        told = {
            task_model.name: (
                task_model.state,
                task_model.attempt,
                task_model.worker,
                task_model.lane,
                task_model.failures,
                task_model.losses,
            )
            for task_model in model.tasks.values()
            if task_model.state not in ENDED
        }
        known = {
            task.name: (
                task.state,
                task.attempt,
                b"" if task.lease is None else task.lease.worker.name,
                task.lane.name,
                task.failures,
                task.losses,
            )
            for task in ledger.tasks.values()
            if task.state not in ENDED
        }
        for name in [*told, *known]:
            one, other = told.get(name), known.get(name)
            if one != other:
                task_model = model.tasks.get(name)
                model.require(False, "recovery", f"{when}: {other}, and was told {one}", task_model)  # noqa: FBT003
        lanes = _lane_state(ledger)
        if lanes != model.lanes.snapshot():
            raise Violation(
                "recovery", f"{when}: lanes {lanes}, and were told {model.lanes.snapshot()}"
            )
        replaced = {key: one.returned for key, one in ledger.replaced.items()}
        if replaced != self._replaced:
            raise Violation("recovery", f"{when}: replaced {replaced}, not {self._replaced}")
        if [*ledger.workers] != [*model.workers]:
            raise Violation(
                "recovery", f"{when}: workers {[*ledger.workers]}, not {[*model.workers]}"
            )

    # The journal.

    def row_durable(self, row: Row) -> None:
        for record in decode(row.body):
            self._before(record)
            for name in getattr(record, "names", ()):
                task_model = self.model.tasks.get(name)
                if task_model is not None and task_model.state is READY:
                    service = task_model.terms.service
                    self._were_ready[service] = self._were_ready.get(service, 0) + 1
            self.model.apply(record, self._timeline.now_ns)
            self._after(record)
            if isinstance(record, r.SlotsFreed):
                self._freed(record)

    def _freed(self, record: r.SlotsFreed) -> None:
        """Note slots that the broker freed by itself: those of answers from before a restart."""
        sent_events = [one for one in self._turn if isinstance(one, events.SlotFreed)]
        if all(one.worker != record.worker for one in sent_events):
            worker_model = self.model.workers[record.worker]
            worker_model.kept_before = max(0, worker_model.kept_before - record.tasks)

    def _before(self, record: r.AnyRecord) -> None:
        if abs(record.at_ns - self._clock.wall_ns()) > WALL_DRIFT_NS_MAX:
            raise Violation("clock", f"{record} is not of {self._clock.wall_ns()}")
        if isinstance(record, r.Submitted):
            self._check_submitted(record)
        elif isinstance(record, r.LeaseExpired) or (
            isinstance(record, r.Failed) and not record.own_fault
        ):
            self._check_lost(record.worker)
        elif isinstance(record, r.WorkerLeft) and record.reason in (b"silent", b"replaced"):
            self._check_timed_out(record.worker)
        elif isinstance(record, r.WorkerJoined | r.WorkerReplaced | r.Refunded):
            self._check_name(record)
        elif isinstance(record, r.Returned):
            self._check_returned(record)
        elif isinstance(record, r.Leased):
            self._check_leased(record)

    def _after(self, record: r.AnyRecord) -> None:
        self._store_outputs(record)
        if isinstance(record, r.Finished | r.Failed | r.Postponed | r.Returned | r.LeaseExpired):
            for name, attempt in zip(record.names, record.attempts, strict=True):
                self._ends.setdefault((name, attempt), []).append(record)
                self._jobs.pop((record.worker, name), None)
            if not isinstance(record, r.LeaseExpired):
                self._check_runs(record)
            if isinstance(record, r.Finished) or (
                isinstance(record, r.Failed | r.Postponed) and record.own_fault
            ):
                self._check_reported(record)
        elif isinstance(record, r.Cancelled):
            for key in [key for key in self._jobs if key[1] in record.names]:
                del self._jobs[key]
        elif isinstance(record, r.WorkerLeft):
            self._draining.pop(record.worker, None)
            self._drain_next.pop(record.worker, None)

    def _store_outputs(self, record: r.AnyRecord) -> None:
        """Results and outputs that somebody may be told."""
        if isinstance(record, r.Finished):
            for name, result in zip(record.names, record.results or repeat(b""), strict=False):
                self._results.setdefault(name, {})[result] = None
        elif isinstance(record, r.Progressed):
            for name, text in zip(record.names, record.texts, strict=True):
                self._outputs.setdefault(name, {})[text] = None

    def _check_submitted(self, record: r.Submitted) -> None:
        """What a client asked to wait for is waited for, or done, or was to be taken as done."""
        if self._full_ns is not None and self._timeline.now_ns > self._full_ns + 2 * SECOND_NS:
            raise Violation("full", "a submission was taken while the disk is full")
        submission = record.submission
        if submission.names[0].startswith(NAMED_BY_BROKER):
            self._check_job(submission)
            return
        for index, name in enumerate(submission.names):
            former = self.model.tasks.get(name)
            if former is not None and name not in self._extendable:
                raise Violation("twice", f"{name!r} was submitted again, and made again")
            asked = [one for one in self._turn if isinstance(one, events.SubmitRequested)]
            own = [one for one in asked if name in one.submission.names]
            kept = submission.after[index] if submission.after is not None else []
            own = [one for one in own if self._waits_as_asked(name, kept, one)]
            if not own:
                raise Violation("dependency", f"{name!r} waits for {kept}, and was not asked to")
            if not any(self._is_as_asked(record, index, name, one) for one in own):
                raise Violation("asked", f"{name!r} is not what was asked for in {own}")

    def _is_as_asked(
        self, record: r.Submitted, index: int, name: bytes, asked: events.SubmitRequested
    ) -> bool:
        """What became of a client's words on their way: nothing is lost, and nothing is added but
        the ages that the rules set for a task which sets none."""
        kept, sent_events = record.submission, asked.submission
        place = sent_events.names.index(name)
        lanes = [
            b"" if one.lanes is None else one.lanes[at]
            for one, at in ((kept, index), (sent_events, place))
        ]
        payloads = kept.payload_of(index), sent_events.payload_of(place)
        wanted = structs.replace(sent_events.terms_of(place))
        rules = self.model.lanes.rule((wanted.service, lanes[0])).rules
        debounce_until_ns = max(record.at_ns, wanted.due_ns)
        if rules.expiry_ns and not wanted.expires_ns:
            wanted.expires_ns = debounce_until_ns + rules.expiry_ns
        if rules.expiry_hard_ns and not wanted.expires_hard_ns:
            wanted.expires_hard_ns = debounce_until_ns + rules.expiry_hard_ns
        if rules.report_after_ns:
            wanted.report_ns = debounce_until_ns + rules.report_after_ns
        same = _asked_terms(kept.terms_of(index)) == _asked_terms(wanted)
        return lanes[0] == lanes[1] and payloads[0] == payloads[1] and same

    def _check_job(self, submission: Submission) -> None:
        """A job without a name is made once, as often as it was asked for."""
        job, name = submission.payloads[0], submission.names[0]
        asked = [one for one in self._turn if isinstance(one, events.SubmitRequested)]
        if not any(one.submission.names == [job] for one in asked):
            raise Violation("asked", f"nobody asked for {job!r}")
        if job in self._job_names:
            raise Violation("twice", f"{job!r} was asked for once, and made twice")
        self._job_names[job] = name

    def _task_name(self, name: bytes) -> bytes:
        """The name of a task, where peers know it by its payload."""
        return self._job_names.get(name, name)

    def awaits_unknown(self, job: bytes) -> bool:
        """Return whether a job, known by its payload, waits for a task that was never submitted: a
        worker gave it back with that."""
        task_model = self.model.tasks.get(self._job_names.get(job, b""))
        return task_model is not None and self.model.awaits_unknown(task_model)

    def on_job_result(self, job: bytes, text: bytes, *, failed: bool) -> None:
        """A client is told what came of a job; a job that failed may never have been taken."""
        name = self._task_name(job)
        if failed and name is job:
            return
        ends = (FAILED, CANCELLED, BLOCKED) if failed else (DONE,)  # behind a failure
        if not any((name, end) in self.model.states_reached for end in ends):
            raise Violation("told", f"{job!r} was told as {text!r}, and never was {ends}")
        if not failed and text not in self._results.get(name, {}):
            raise Violation("told", f"{text!r} was never the result of {job!r}")

    def _waits_as_asked(
        self, name: bytes, kept: list[bytes], asked: events.SubmitRequested
    ) -> bool:
        sent_events = asked.submission
        if sent_events.after is None:
            return not kept
        wanted = [
            self._meant(before, sent_events, index)
            for index, (one, after) in enumerate(
                zip(sent_events.names, sent_events.after, strict=True)
            )
            if one == name
            for before in after
        ]
        open_ = [before for before in wanted if not self._counts_as_done(before, asked)]
        return sorted(dict.fromkeys(open_)) == sorted(kept)

    def _meant(self, before: bytes, sent_events: Submission, index: int) -> bytes:
        """Return the full name that a predecessor is found by: in the campaign of its task, unless
        it is known only outside."""
        campaign = sent_events.terms_of(index).campaign
        written = identity.split(before, campaign)
        own = identity.spelling(campaign, written)
        for name in (own, written):
            if name in sent_events.names or name in self.model.tasks:
                return name
        return written if identity.SEPARATOR in written else own

    def _counts_as_done(self, before: bytes, asked: events.SubmitRequested) -> bool:
        task_model = self.model.tasks.get(before)
        if task_model is None:
            return asked.unknown is UnknownPolicy.DONE and before not in asked.submission.names
        begun_again = asked.repeat is DuplicatePolicy.EXTEND and before in asked.submission.names
        return task_model.state is DONE and not begun_again

    def _check_leased(self, record: r.Leased) -> None:
        for key in zip(record.names, record.attempts, strict=True):
            self._leased_ns[key] = record.at_ns
        if record.worker in self._draining:
            raise Violation("draining", f"{record.worker!r} is to go away and gets {record.names}")

    def _check_lost(self, worker: bytes) -> None:
        """A worker was given up: it came back as another process, or it was silent."""
        if not self._registered_again(worker):
            self._check_timed_out(worker)

    def _registered_again(self, worker: bytes) -> bool:
        facts = self.model.workers[worker].facts
        sent_events = [one for one in self._turn if isinstance(one, events.WorkerRegistered)]
        others = [one for one in sent_events if one.worker == worker]
        others = [one for one in others if one.facts.incarnation != facts.incarnation]
        if not facts.heartbeat_ns:
            return bool(others)
        # Only its own supervisor can say that it is dead.
        return any(0 < one.replaces <= facts.incarnation < one.facts.incarnation for one in others)

    def _is_lost_by_dialect(self, worker: bytes) -> bool:
        """A worker of ping-pong is lost with its connection; it and one of round-robin also by a
        silence that their dialects mind, while the core minds only a longer one."""
        if worker not in self._last_seen_by_worker:
            return True  # not since the broker's start: there is no way to it
        silent_ns = self._timeline.now_ns - self._last_seen_by_worker[worker]
        return silent_ns >= self._plan.size.silence_ns or self._is_cut(worker)

    def _is_cut(self, worker: bytes) -> bool:
        return worker in [_WORKER_OF[route[0]](route) for route in self._cut]

    def _check_timed_out(self, worker: bytes) -> None:
        """Looked at with the first record that gives a worker up, while it still holds all."""
        if worker in self._lost_workers:
            return
        self._lost_workers[worker] = None
        if worker.startswith(_TIMED_OUT_BY_DIALECT) and self._is_lost_by_dialect(worker):
            return
        worker_model = self.model.workers[worker]
        held_ns = [task_model.terms.lease_ns for task_model in worker_model.held.values()]
        lease_timeout_ns = worker_model.facts.lease_timeout_ns and max(
            [worker_model.facts.lease_timeout_ns, *held_ns]
        )
        heard_ns = self._last_seen_ns(worker)
        now_ns = self._timeline.now_ns
        least_ns = lease_timeout_ns
        if self._contested_until_ns.get(worker, 0) >= now_ns:
            least_ns = min(lease_timeout_ns, MISSED_HEARTBEATS * worker_model.facts.heartbeat_ns)
        if not lease_timeout_ns or now_ns < heard_ns + least_ns:
            raise Violation("early", f"{worker!r} was given up too early: heard at {heard_ns}")
        ends_ns = (
            max(
                heard_ns + max(lease_timeout_ns, worker_model.lease_ns_max),
                worker_model.lease_shortened_ns,
            )
            + LATE_NS_MAX
        )
        if worker.startswith(dialect.ROUND_ROBIN):
            ends_ns += STALE_NS_MAX
        if now_ns > ends_ns:
            raise Violation("late", f"{worker!r} was given up too late: heard at {heard_ns}")

    def check_timeouts(self) -> None:
        """No worker is silent for longer than it may be."""
        if self._up_ns is None:
            return
        now_ns = self._timeline.now_ns
        for name, worker_model in self.model.workers.items():
            lease_timeout_ns = max(worker_model.facts.lease_timeout_ns, worker_model.lease_ns_max)
            heard_ns = self._last_seen_ns(name)
            ends_ns = (
                max(heard_ns + lease_timeout_ns, worker_model.lease_shortened_ns) + LATE_NS_MAX
            )
            if name.startswith(dialect.ROUND_ROBIN):
                ends_ns += STALE_NS_MAX
            if lease_timeout_ns and now_ns > ends_ns:
                raise Violation("late", f"{name!r} is silent since {heard_ns}: {worker_model}")
            self._check_leaked(name, worker_model)

    def _check_leaked(self, name: bytes, worker_model: WorkerModel) -> None:
        """Require that a worker which lists nothing keeps nothing of before a restart for long."""
        lease_ns, up_ns = worker_model.facts.restart_lease_ns, self._up_ns or 0
        if not lease_ns or self._timeline.now_ns <= up_ns + lease_ns + LATE_NS_MAX:
            return
        old = [
            task_model.name
            for task_model in worker_model.held.values()
            if self._is_from_before_restart(task_model)
        ]
        if old or worker_model.kept_before:
            raise Violation("leaked", f"{name!r} keeps {old} and {worker_model.kept_before} slots")

    def _is_from_before_restart(self, task_model: TaskModel) -> bool:
        return task_model.lease_record <= self._recovered_records

    def _check_restarted(self, record: r.Returned) -> None:
        """Require that only leases of before a restart end by it, and none too early."""
        task_models = [self.model.tasks[name] for name in record.names]
        if not all(map(self._is_from_before_restart, task_models)):
            raise Violation("taken", f"{record} and it was leased since the restart")
        lease_ns = self.model.workers[record.worker].facts.restart_lease_ns
        ends_ns = (self._up_ns or 0) + lease_ns - WALL_DRIFT_NS_MAX
        is_lost = self._registered_again(record.worker) or self._is_lost_by_dialect(record.worker)
        if not lease_ns or (self._timeline.now_ns < ends_ns and not is_lost):
            raise Violation("early", f"{record} and the broker is up since {self._up_ns}")

    def check_ready(self, revive_ns: int) -> None:
        """When all is well nothing waits for long that a worker could have."""
        for task_model in self.model.tasks.values():
            waits_ns = self._timeline.now_ns - max(task_model.since_ns, revive_ns)
            late = task_model.state is READY and waits_ns > READY_NS_MAX
            self.model.require(not late, "forgotten", "is ready, and nobody gets it", task_model)

    def check_due(self) -> None:
        """What waits for time does not wait much longer; where nobody sets the clock."""
        now_ns, wall_ns = self._timeline.now_ns, self._clock.wall_ns()
        if self._jumps or self._up_ns is None or now_ns < self._up_ns + LATE_NS_MAX:
            return
        for task_model in self.model.tasks.values():
            late = task_model.state is DELAYED and task_model.due_ns + LATE_NS_MAX < wall_ns
            self.model.require(not late, "late", "is due and does not come due", task_model)
            waits = task_model.state in (*WAITING, LEASED) and not task_model.reported
            unsaid = waits and 0 < task_model.terms.report_ns < wall_ns - LATE_NS_MAX
            self.model.require(not unsaid, "lateness", "is late, and nobody says so", task_model)

    def _check_returned(self, record: r.Returned) -> None:
        """Nothing is taken from a worker without a reason that it gave itself."""
        own = [one for one in self._turn if getattr(one, "worker", None) == record.worker]
        reason = record.reason
        if reason is ReturnReason.BROKER_RESTARTED:
            self._check_restarted(record)
            return
        if record.worker.startswith(_TIMED_OUT_BY_DIALECT) and reason is not ReturnReason.LEFT:
            if not self._is_lost_by_dialect(record.worker) and self._was_sent(record):
                raise Violation("taken", f"{record} and the worker is there")
            return
        sent_events = _RETURNED_AFTER.get(reason, events.TasksReported)
        if not any(isinstance(one, sent_events) for one in own):
            raise Violation("taken", f"{record} and the worker said nothing of it")
        if reason is ReturnReason.RESTARTED and not self._registered_again(record.worker):
            raise Violation("name", f"{record} and its holder was not reported dead")
        if reason is ReturnReason.UNLISTED:
            self._check_unlisted(record)

    def _was_sent(self, record: r.Returned) -> bool:
        """To a worker whose hands may still be full when it is to get the next, or who is gone."""
        return any((record.worker, name) in self._jobs for name in record.names)

    def _check_unlisted(self, record: r.Returned) -> None:
        holder = self.model.workers[record.worker].facts.incarnation
        lists = [
            held
            for worker, process, held in self._lists
            if worker == record.worker and process in (None, holder)
        ]
        for name, attempt in zip(record.names, record.attempts, strict=True):
            if all(held.get(name) == attempt for held in lists):
                raise Violation("taken", f"{name!r} was taken from a worker that lists it")

    def _check_runs(self, record: r.Finished | r.Failed | r.Postponed | r.Returned) -> None:
        """Check that each run is its own attempt's, and lies within the lease."""
        for index, key in enumerate(zip(record.names, record.attempts, strict=True)):
            run = None if record.runs is None else record.runs.at(index)
            if run is None:
                continue
            if run.status != status_of(*key):
                raise Violation("runs", f"{key} has the run of another attempt: {run}")
            leased_ns = self._leased_ns[key]
            ends_ns = max(record.at_ns, leased_ns)
            if not leased_ns <= run.started_ns <= run.started_ns + run.run_ns <= ends_ns:
                raise Violation("runs", f"{key}, leased at {leased_ns}, does not hold {run}")

    def _check_reported(self, record: r.Finished | r.Failed | r.Postponed) -> None:
        """No result without a report of that very attempt by that very worker."""
        for name, attempt in zip(record.names, record.attempts, strict=True):
            if not attempt or self.model.leases.get((name, attempt)) != record.worker:
                continue
            outcomes = {
                **self._reports.get((record.worker, name, attempt), {}),
                **self._reports.get((record.worker, name, ANY_ATTEMPT), {}),
            }
            if not any(isinstance(record, _FOLLOWS[outcome]) for outcome in outcomes):
                task_model = self.model.tasks[name]
                text = f"{type(record).__name__} of attempt {attempt}, never so reported by"
                self.model.require(False, "stale", f"{text} {record.worker!r}", task_model)  # noqa: FBT003
            if isinstance(record, r.Failed) and Outcome.FAILED_FINAL not in outcomes:
                task_model = self.model.tasks[name]
                used_up = task_model.failures > len(self.model.schedule(task_model))
                self.model.require(used_up, "retry", "FAILED with attempts left", task_model)

    # Peers.

    def on_client_reply(self, event: Event | None, effect: Effect) -> None:
        if isinstance(event, events.SubmitRequested) and isinstance(effect, effects.Accepted):
            self._check_accepted(event)
        elif isinstance(event, events.SubmitRequested) and isinstance(effect, effects.Refused):
            self._check_refused(event)
        elif isinstance(effect, effects.Settled):
            for name, state, text in zip(effect.names, effect.states, effect.texts, strict=True):
                self._check_settled(name, state)
                if state is DONE:
                    self._check_result(name, text or b"", (effect.truncated or {}).get(name, 0))
        elif isinstance(effect, effects.TaskDetails | effects.TaskPage):
            for view in effect.views:
                self._check_view(view)
        elif isinstance(effect, effects.StatsReply | effects.TaskOutput):
            self._check_answer(effect)

    def _check_accepted(self, event: events.SubmitRequested) -> None:
        for name in event.submission.names:
            self._accepted[name] = None
            if name not in self.model.tasks:
                raise Violation("lost", f"{name!r} was accepted and is not in the journal")

    def _check_refused(self, event: events.SubmitRequested) -> None:
        """Check that a plain peer's Create lost nothing that waits for nothing."""
        if event.repeat is not DuplicatePolicy.EXTEND or self._was_full:
            return
        after = event.submission.after or [[] for _ in event.submission.names]
        waiting = [name for name, names in zip(event.submission.names, after, strict=True) if names]
        for name in event.submission.names:
            if name not in waiting and name not in self.model.tasks:
                raise Violation("lost", f"{name!r} is sound and was refused with its neighbours")

    def _check_result(self, name: bytes, text: bytes, bytes_total: int) -> None:
        """A result is one that the journal has, and is known as truncated if it is."""
        if text not in self._results.get(name, {}):
            raise Violation("told", f"{text!r} was never the result of {name!r}")
        if bool(bytes_total) != text.startswith(TRUNCATED):
            raise Violation("truncated", f"{text!r} of {name!r} was told as of {bytes_total} bytes")

    def _check_view(self, view: effects.TaskView) -> None:
        self._check_settled(view.name, view.state)
        if view.worker and self.model.leases.get((view.name, view.attempt)) != view.worker:
            raise Violation("told", f"{view.name!r} was never held by {view.worker!r}")

    def _check_answer(self, effect: effects.StatsReply | effects.TaskOutput) -> None:
        if isinstance(effect, effects.StatsReply):
            if effect.stats.records > self.model.records:
                raise Violation("told", f"{effect.stats.records} records are not in the journal")
        elif effect.text and effect.text not in self._outputs.get(effect.name, {}):
            raise Violation("told", f"{effect.name!r} never printed {effect.text!r}")

    def _check_settled(self, name: bytes, state: TaskState) -> None:
        """A client is told nothing that is not durable."""
        if (name, state) not in self.model.states_reached:
            raise Violation("told", f"{name!r} was never {state.name}")

    def on_assigned(self, assign: effects.Assign) -> None:
        for name, attempt in zip(map(self._task_name, assign.names), assign.attempts, strict=True):
            if not attempt and (name, assign.worker) in self.model.leased_to:
                continue  # its dialect does not say which attempt it is
            if self.model.leases.get((name, attempt)) != assign.worker:
                raise Violation("lost", f"lease {attempt} of {name!r} is not in the journal")

    def on_reporting(
        self, worker: bytes, names: list[bytes], attempts: list[int] | None, outcomes: list[Outcome]
    ) -> None:
        told = [ANY_ATTEMPT] * len(names) if attempts is None else attempts
        for name, attempt, outcome in zip(map(self._task_name, names), told, outcomes, strict=True):
            self._reports.setdefault((worker, name, attempt), {})[outcome] = None

    def was_cancelled(self, name: bytes) -> bool:
        return (self._task_name(name), CANCELLED) in self.model.states_reached

    def on_report_ack(self, event: Event, noted: effects.ReportAck) -> None:
        """What was noted is in the journal."""
        if not isinstance(event, events.TasksReported) or event.attempts is None:
            return
        for index, (name, attempt) in enumerate(zip(event.names, event.attempts, strict=True)):
            outcome = Outcome.DONE if event.outcomes is None else event.outcomes[index]
            ends = self._ends.get((name, attempt), [])
            kept = any(isinstance(end, _FOLLOWS[outcome]) for end in ends)
            if name not in noted.missing and not kept:
                text = f"{outcome.name} of attempt {attempt} was noted and is not in the journal"
                self.model.require(False, "lost", text, self.model.tasks.get(name))  # noqa: FBT003

    def disk_full(self, *, full: bool) -> None:
        self._full_ns = self._timeline.now_ns if full else None
        self._was_full = self._was_full or full

    # The end.

    def check_end(self, ledger: Ledger, poisoned: dict[bytes, None]) -> None:
        """Everything has come to an end, and to the right one."""
        self.compare(ledger, "at the end")
        wall_ns = self._clock.wall_ns()
        for task_model in self.model.tasks.values():
            terms = task_model.terms
            waits = task_model.state in WAITING and not task_model.retried_after_failure
            if waits and 0 < terms.expires_hard_ns < wall_ns - 2 * SECOND_NS:
                self.model.require(False, "expiry", "is too old and waits", task_model)  # noqa: FBT003
            if task_model.name in poisoned and task_model.state is DONE:
                self.model.require(False, "poison", "nobody can have done it", task_model)  # noqa: FBT003
        for name in self._accepted:
            if name not in self.model.tasks:
                raise Violation("lost", f"{name!r} was accepted and is gone")
        self._check_nothing_held()

    def _check_nothing_held(self) -> None:
        for name, worker_model in self.model.workers.items():
            if worker_model.held:
                raise Violation("stuck", f"{name!r} still holds {[*worker_model.held]}")


def _lane_state(ledger: Ledger) -> dict[tuple[bytes, bytes], tuple[int, list[bytes]]]:
    """What a broker knows of its lanes, beside their tasks."""
    lanes = {
        (service.name, lane.name): lane
        for service in ledger.services.values()
        for lane in service.lanes.values()
        if lane.extras is not None
    }
    waiting = {
        key: [] if lane.extras is None else [task.name for task in lane.extras.next_run.values()]
        for key, lane in sorted(lanes.items())
    }
    return {
        key: (lanes[key].released, names)
        for key, names in waiting.items()
        if names or lanes[key].released
    }


def _asked_terms(terms: Terms) -> list[object]:
    return [getattr(terms, field) for field in _ASKED_TERMS]
