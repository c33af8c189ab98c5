r"""Views as JSON: tasks, workers, statistics, explanations.

Owns the names of the fields, which scripts rely on: fields may be added, never renamed or removed.
Names are text. A byte that is not UTF-8 is shown as \x and its number. Times are seconds since the
epoch, to the millisecond, and null where there is none. `record_views` has the records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from taskyard.calls.payloads import CALL, EXEC
from taskyard.calls.pickled import PICKLE
from taskyard.core import runs
from taskyard.core.identity import split
from taskyard.core.lane_queues import rate_text
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Terms, shown
from taskyard.core.resources import MEMORY, UNIT
from taskyard.core.states import WorkerState
from taskyard.wire.documents import Document, filled, seconds
from taskyard.wire.health_views import Health

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskyard.core import effects
    from taskyard.core.resources import Resources


class Counts(Document):
    """Number of tasks in each state."""

    blocked: int
    delayed: int
    ready: int
    leased: int
    done: int
    failed: int
    cancelled: int


class Task(Document):
    """A task."""

    #: The name in its campaign.
    name: str
    #: A field of `Counts`.
    state: str
    #: Empty: no campaign.
    campaign: str
    service: str
    #: Empty: the open lane of its service.
    lane: str
    priority: int
    slots: int
    #: Named resources beside its slots: bytes of memory, and numbers of all other resources.
    resources: dict[str, float]
    attempt: int
    failures: int
    #: Workers that were lost while they ran it.
    losses: int
    waits_for: int
    dependents: int
    #: Full names of some blocking tasks, if the task was requested by name.
    after: list[str]
    worker: str | None
    #: The reason of its latest failure.
    reason: str
    submitted: float | None
    due: float | None
    leased: float | None
    ended: float | None
    #: The progress of a leased task, as its worker has reported it: per cent, and the last line of
    #: its text. Kept in memory only: a restart of the broker forgets it.
    percent: int | None
    progress: str


class MeasuredTask(Task):
    """A task of a list with the measurements of its latest attempt. Missing values are null."""

    #: As in `Attempt`.
    started: float | UnsetType | None = UNSET
    #: Seconds that the attempt ran. null: it runs, or was not measured.
    duration: float | UnsetType | None = UNSET
    exit_status: int | UnsetType | None = UNSET
    signal: int | UnsetType | None = UNSET
    host: str | UnsetType | None = UNSET
    cpu_seconds: float | UnsetType | None = UNSET
    memory_max: int | UnsetType | None = UNSET
    #: The worker of the attempt. `worker` is that of a leased task only.
    worker_last: str | UnsetType | None = UNSET


class Attempt(Document):
    """An attempt at a task. Values that were not measured are null."""

    attempt: int
    worker: str
    #: `finished`, `failed`, `postponed`, `returned`, `expired` or `cancelled`. null: leased.
    outcome: str | None
    #: By its worker. Of an attempt that runs, or whose worker was lost: when it was leased.
    started: float | None
    #: By its worker. If the worker was lost: when its lease ended.
    ended: float | None
    #: When the broker received the report, or ended the lease.
    settled: float | None
    exit_status: int | None
    #: The number of the signal that ended it.
    signal: int | None
    host: str | None
    cpu_seconds: float | None
    #: Peak resident memory in bytes.
    memory_max: int | None
    #: A remark of the worker: why it did not run the task, or ran it elsewhere.
    note: str | None
    #: When the broker leased it. null: not kept, as for `finished`.
    leased: float | None
    #: Why it ended without a result. Of a long reason the end.
    reason: str


class ShownTask(Task):
    """A task that was requested by name."""

    #: The command that it runs. null: it runs none, or has ended and left the journal.
    argv: list[str] | None
    #: The latest attempts. After a task has left the journal, they are in its history only.
    attempts: list[Attempt]
    #: The function that it calls, `module:function`. null: it calls none, as for `argv`.
    call: str | None
    #: The directory and the environment variables that it sets. null: its worker's.
    cwd: str | None
    env: dict[str, str] | None
    #: Seconds that one attempt may run. null: no limit.
    time_limit: float | None
    #: Seconds before each further attempt after a failure. null: by the rule of its lane.
    retry_delays: list[float] | None
    #: Workers that it may lose.
    crashes_max: int
    #: When it fails if it was tried before, and when it fails in any case. null: never.
    expires: float | None
    expires_hard: float | None
    #: The machine of its latest attempt. null: unknown.
    host: str | None
    #: A text of the program that submitted it. null: none.
    origin: str | None


class Campaign(Document):
    """A campaign."""

    name: str
    counts: Counts
    #: Done tasks whose result is truncated.
    truncated: int
    #: Tasks that ended and were submitted again. `counts` has each of their generations.
    restarted: int


class Service(Document):
    """A service."""

    name: str
    counts: Counts
    #: Workers that offer it.
    workers: int
    #: Since when its oldest ready task is ready. null: none is.
    oldest_ready: float | None


class Pause(Document):
    """A paused service or lane."""

    service: str
    lane: str | None


class RefusedTasks(Document):
    """Tasks that were refused while other tasks of their message were accepted."""

    #: A stable code.
    code: str
    #: The first few.
    names: list[str]
    #: Why the first of them was refused.
    text: str


class Stats(Document):
    """Statistics of a broker."""

    counts: Counts
    #: Blocked tasks that nothing can release any more.
    behind_failure: int
    workers: int
    #: Records since the journal began.
    records: int
    accepting: bool
    #: Whether everything is paused.
    paused: bool
    campaigns: list[Campaign]
    services: list[Service]
    #: Paused services and lanes. Lanes of a service with thousands of them are left out.
    pauses: list[Pause]
    #: Tasks of plain dwork peers that were refused since the broker started, and the latest of
    #: them.
    refused: int
    refused_last: RefusedTasks | None
    #: Work since the last compaction, relative to the work that makes one due. Above 1.5
    #: submissions are slowed, above 2.5 they are refused for a while.
    compaction_lag: float
    #: Connections cut since the broker started, by reason: "connections", "memory",
    #: "frames".
    connections_cut: dict[str, int]
    #: The broker's own health. null: none is running.
    health: Health | None


class Worker(Document):
    """A worker."""

    name: str
    #: "idle", "running" (has tasks, and room for more), "full" or "draining".
    state: str
    #: It has requested tasks and waits for them.
    parked: bool
    #: The machine and process that it runs in, if its dialect reports them.
    host: str | None
    pid: int | None
    dialect: str
    services: list[str]
    #: 0: no limit.
    slots: int
    slots_used: int
    #: Named resources beside its slots, in total, and without those of its tasks.
    resources: dict[str, float]
    resources_free: dict[str, float]
    tasks: int
    #: Of these, calls that wait for other tasks. They use no slots.
    waiting: int
    #: Seconds since its last message.
    last_seen_ago: float
    #: Seconds without a message after which its leases expire. Null: they don't.
    lease_timeout: float | None
    #: Why it can't start its agents. Empty if it can, or has none.
    agent_error: str
    #: Lines of its agents that are neither report nor comment.
    malformed: int
    #: It submits its tasks to another broker.
    forwards: bool
    #: That broker, in the worker's own words. Null: it forwards nothing, or does not name it.
    forwards_to: str | None


class Lane(Document):
    """A lane that has tasks."""

    service: str
    #: Empty: the open lane of its service.
    lane: str
    #: The rule that applies: the name of its section in the settings. Empty: the defaults.
    rule: str
    #: How many lanes of the rule may be served at once. 0: no limit.
    rule_limit: int
    #: Tasks that are not done or cancelled. Tasks in none of the following states have failed.
    tasks: int
    blocked: int
    delayed: int
    #: Due.
    ready: int
    leased: int
    #: Workers that serve it now.
    workers: int
    #: Tasks that may be leased at once. 0: no limit.
    limit: int
    #: Tasks of this lane that may be leased per time, such as "5/s". null: no limit.
    lane_rate: str | None
    #: The share among waiting lanes of its service, relative to 1.
    weight: int
    #: When the oldest of its tasks was submitted.
    oldest: float | None
    #: The largest number of attempts of one of its tasks.
    attempts: int
    next_due: float | None
    #: A stable code. `why` is a sentence for users.
    reason: str
    why: str


class Explanation(Document):
    """The reason why a task is in its state."""

    #: The name in its campaign.
    name: str
    #: Empty: no campaign.
    campaign: str
    #: A stable code. `sentence` is for users.
    reason: str
    sentence: str
    #: Full names of the tasks that it waits for, or of a cancelled task that it waited for.
    after: list[str]


def resources(amounts: Resources) -> dict[str, float]:
    """Return resources by name: bytes of memory, and numbers of all other resources."""
    return {
        shown(name): _in_units(amount) if name != MEMORY else amount for name, amount in amounts
    }


def _in_units(amount: int) -> float:
    return amount / UNIT if amount % UNIT else amount // UNIT


def counts(values: list[int]) -> Counts:
    return Counts(**dict(zip(Counts.__struct_fields__, values, strict=True)))


def task(view: effects.TaskView) -> Task:
    # Written out: a list has thousands, and `filled` takes twice as long.
    return Task(
        name=shown(split(view.name, view.campaign)),
        state=view.state.name.lower(),
        campaign=shown(view.campaign),
        service=shown(view.service),
        lane=shown(view.lane),
        priority=view.priority,
        slots=view.slots,
        resources=resources(view.resources),
        attempt=view.attempt,
        failures=view.failures,
        losses=view.losses,
        waits_for=view.waits,
        dependents=view.dependents,
        after=[shown(name) for name in view.after],
        worker=shown(view.worker) or None,
        reason=shown(view.reason),
        submitted=seconds(view.submitted_ns),
        due=seconds(view.due_ns),
        leased=seconds(view.leased_ns),
        ended=seconds(view.ended_ns),
        percent=view.percent if view.percent >= 0 else None,
        progress=shown(view.progress),
    )


def measured_task(view: effects.TaskView) -> MeasuredTask:
    latest = view.attempts[-1] if view.attempts else runs.Attempt(0, b"", b"none")
    last = attempt(latest)
    return MeasuredTask(
        **msgspec.structs.asdict(task(view)),
        started=last.started,
        duration=_seconds_run(latest),
        exit_status=last.exit_status,
        signal=last.signal,
        host=last.host,
        cpu_seconds=last.cpu_seconds,
        memory_max=last.memory_max,
        worker_last=last.worker or None,
    )


def shown_task(view: effects.TaskView) -> ShownTask:
    terms = Terms() if view.terms is None else view.terms
    delays, last = terms.retry_delays_ns, view.attempts[-1] if view.attempts else None
    command = _command(view)
    return ShownTask(
        **msgspec.structs.asdict(task(view)),
        **msgspec.structs.asdict(command),
        attempts=[*map(attempt, view.attempts)],
        time_limit=terms.time_limit_ns / SECOND_NS or None,
        retry_delays=None if delays is None else [delay_ns / SECOND_NS for delay_ns in delays],
        crashes_max=terms.crashes_max,
        expires=seconds(terms.expires_ns),
        expires_hard=seconds(terms.expires_hard_ns),
        host=(shown(last.host) or None) if last else None,
        origin=shown(terms.origin) or None,
    )


class _Command(Struct):
    """The parts of a payload that are shown. Payloads of other services are opaque."""

    argv: list[str] | None = None
    call: str | None = None
    cwd: str | None = None
    env: dict[str, str] | None = None


def _command(view: effects.TaskView) -> _Command:
    if not isinstance(view.payload, bytes) or view.service not in (EXEC, CALL):
        return _Command()
    try:
        return msgspec.json.decode(view.payload, type=_Command)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Command()


def attempt(one: runs.Attempt) -> Attempt:
    status = one.status
    started_ns, ended_ns = _span_ns(one)
    return filled(
        Attempt,
        one,
        attempt=one.number,
        started=seconds(started_ns),
        ended=seconds(ended_ns),
        exit_status=status if status is not None and status >= 0 else None,
        signal=-status if status is not None and status < 0 else None,
        cpu_seconds=one.cpu_ns / SECOND_NS if one.cpu_ns else None,
        memory_max=one.memory_max_bytes or None,
    )


#: Outcomes of attempts that may have run although their worker did not measure them.
_UNREPORTED: Final = (b"", b"expired", b"cancelled")


def _span_ns(one: runs.Attempt) -> tuple[int, int]:
    """Return when an attempt started and ended, zeros where that is unknown."""
    if one.started_ns:
        return one.started_ns, one.started_ns + one.run_ns
    if one.outcome in _UNREPORTED:
        return one.leased_ns, one.settled_ns if one.leased_ns else 0
    return 0, 0


def _seconds_run(one: runs.Attempt) -> float | None:
    started_ns, ended_ns = _span_ns(one)
    return (ended_ns - started_ns) / SECOND_NS if ended_ns else None


def stats(
    value: effects.Stats, connections_cut: Mapping[str, int], health: Health | None = None
) -> Stats:
    refused = value.refused_last
    return filled(
        Stats,
        value,
        counts=counts(value.counts),
        behind_failure=value.stuck,
        campaigns=[
            Campaign(name=shown(name), counts=counts(of), truncated=truncated, restarted=restarted)
            for name, of, truncated, restarted in value.campaigns
        ],
        services=[
            Service(
                name=shown(name),
                counts=counts(of),
                workers=workers,
                oldest_ready=seconds(value.oldest_ready_ns.get(name, 0)),
            )
            for name, of, workers in value.services
        ],
        pauses=[
            Pause(service=shown(name), lane=None if lane is None else shown(lane))
            for name, lane in value.pauses
        ],
        refused_last=refused and filled(RefusedTasks, refused, code=refused.refusal.value),
        compaction_lag=value.lag_percent / 100,
        connections_cut=dict(connections_cut),
        health=health,
    )


def worker(view: effects.WorkerView) -> Worker:
    return filled(
        Worker,
        view.facts,
        name=shown(view.name),
        state=_worker_state(view),
        parked=view.state in (WorkerState.PARKED, WorkerState.WOKEN),
        slots=view.facts.slots_total,
        slots_used=view.slots_used,
        resources=resources(view.facts.resources),
        resources_free=resources(view.resources_free),
        tasks=view.held,
        waiting=view.waiting,
        last_seen_ago=seconds(view.last_seen_ns_ago) or 0.0,
        agent_error=shown(view.trouble),
        malformed=view.malformed,
    )


def _worker_state(view: effects.WorkerView) -> str:
    """Return the state of a worker, from the slots that it uses."""
    if view.state is WorkerState.DRAINING:
        return "draining"
    if not (view.slots_used or view.waiting):
        return "idle"
    return "full" if 0 < view.facts.slots_total <= view.slots_used else "running"


def lane(view: effects.LaneView) -> Lane:
    rate = rate_text(view.rate_interval_ns) if view.rate_interval_ns else None
    return filled(Lane, view, lane_rate=rate, why=view.sentence)


#: How to start a worker of a service that workers do not offer by default.
_WORKER_HINTS: Final = {PICKLE: "start one with --allow-pickle if you trust all who submit"}


def explanation(effect: effects.ExplanationReply) -> Explanation:
    value = effect.explanation
    hint = _WORKER_HINTS.get(effect.service)
    return filled(
        Explanation,
        value,
        name=shown(split(effect.name, effect.campaign)),
        campaign=shown(effect.campaign),
        sentence=f"{value.sentence}; {hint}" if hint else value.sentence,
    )
