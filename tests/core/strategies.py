"""Random stories for a yard: small steps that hypothesis can choose, shrink and show.

A step is plain data, so that a failing story can be read. Names are few, so that they meet often.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from hypothesis import strategies as st

from taskyard.core.events import (
    CancelRequested,
    ClientDisconnected,
    DrainRequested,
    DuplicatePolicy,
    EditRequested,
    Event,
    ExpireRequested,
    ExplainRequested,
    LanesRequested,
    ListRequested,
    LookupRequested,
    MoveRequested,
    Outcome,
    PartRequested,
    PauseRequested,
    RequestRejected,
    ResultsRequested,
    ResumeRequested,
    RetryRequested,
    RulesRequested,
    RulesSet,
    Scope,
    SlotFreed,
    StatsRequested,
    SubmitRequested,
    TasksProgressed,
    TasksReported,
    TasksRequested,
    TasksReturned,
    UnknownPolicy,
    WaitEnded,
    WatchEnded,
    WatchRequested,
    WorkerExited,
    WorkerHeartbeat,
    WorkerReconnected,
    WorkerRegistered,
    WorkersRequested,
    WorkerUnreachable,
)
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal, Stream, Submission, Terms, TermsChanges, WorkerFacts
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.states import TaskState
from tests.core.kit import Yard

#: A kind of event, and its arguments.
Step: TypeAlias = "tuple[str, dict[str, Any]]"

TASKS = [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
WORKERS = [b"u", b"v", b"w"]
SERVICES = [b"default", b"x"]

names = st.lists(st.sampled_from(TASKS), min_size=1, max_size=4, unique=True)
afters = st.lists(st.sampled_from(TASKS), max_size=2)
#: Resources of tasks and workers.
CPU = (b"cpus", 10_000)
GPU, TWO_GPUS, HALF_GPU = (b"gpus", 10_000), (b"gpus", 20_000), (b"gpus", 5_000)
MEMORY = (b"memory", 1 << 30)

worker = st.sampled_from(WORKERS)
service = st.sampled_from(SERVICES)
lane = st.sampled_from([b"", b"1", b"2"])
seconds = st.sampled_from([0, 0, 0, 0, 1, 3, 7])


@st.composite
def submissions(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(names)
    terms = {
        "service": draw(service),
        "campaign": draw(st.sampled_from([b"", b"c"])),
        "priority": draw(st.sampled_from([0, 0, 1])),
        "slots": draw(st.sampled_from([1, 1, 2])),
        "resources": draw(st.sampled_from([(), (CPU,), (GPU,), (TWO_GPUS,), (HALF_GPU, MEMORY)])),
        "crashes_max": draw(st.sampled_from([1, 3])),
        "retry_delays_ns": draw(st.sampled_from([None, (), (0, SECOND_NS)])),
        "lease_ns": draw(st.sampled_from([0, 0, 8 * SECOND_NS])),
        #: In seconds from then.
        "due": draw(seconds),
        "expires_hard": draw(st.sampled_from([0, 0, 6])),
        "expires": draw(st.sampled_from([0, 0, 4])),
    }
    return {
        "names": chosen,
        "terms": terms,
        "lanes": draw(st.none() | st.lists(lane, min_size=len(chosen), max_size=len(chosen))),
        "after": draw(st.none() | st.lists(afters, min_size=len(chosen), max_size=len(chosen))),
        "unknown": draw(st.sampled_from(UnknownPolicy)),
        "repeat": draw(st.sampled_from(DuplicatePolicy)),
    }


facts = st.fixed_dictionaries(
    {
        "services": st.sampled_from([(b"default",), (b"x",), (b"x", b"default")]),
        "slots_total": st.sampled_from([0, 1, 2, 3]),
        "resources": st.sampled_from([(), (CPU, GPU), (TWO_GPUS, MEMORY)]),
        "lease_timeout_ns": st.sampled_from([0, 5 * SECOND_NS]),
        "incarnation": st.integers(0, 1),
        "wants_wake": st.booleans(),
        "always_ready": st.booleans(),
    }
)
rules = st.fixed_dictionaries(
    {
        "workers_max": st.sampled_from([0, 0, 1]),
        "lane_workers_max": st.sampled_from([1, 2]),
        "overfeed": st.sampled_from([0, 1]),
        "rate_interval_ns": st.sampled_from([0, 0, SECOND_NS]),
        "lane_rate_interval_ns": st.sampled_from([0, 0, 2 * SECOND_NS]),
        "weight": st.sampled_from([1, 1, 3]),
        "retry_delays_ns": st.sampled_from([(), (SECOND_NS,)]),
        "jitter_percent": st.sampled_from([0, 50]),
        "interval_ns": st.sampled_from([SECOND_NS, 3 * SECOND_NS]),
        "expiry_ns": st.sampled_from([0, 0, 4 * SECOND_NS]),
        "expiry_hard_ns": st.sampled_from([0, 0, 0, 6 * SECOND_NS]),
        "report_after_ns": st.sampled_from([0, 0, 2 * SECOND_NS]),
        "is_random": st.booleans(),
        "is_held": st.sampled_from([False, False, True]),
        "debounce_ns": st.sampled_from([0, 0, SECOND_NS]),
    }
)
lane_rules = st.lists(
    st.tuples(st.sampled_from([b"default/1", b"*/2", b"x/*", b"*", b"default/[12]"]), rules),
    max_size=2,
)
scopes = st.fixed_dictionaries(
    {
        "names": st.none() | names.map(tuple),
        "states": st.none() | st.sampled_from([(TaskState.FAILED,), (TaskState.READY,)]),
    }
)
pauses = st.fixed_dictionaries({"service": st.sampled_from([b"", *SERVICES]), "lane": st.none()})
lane_pauses = st.fixed_dictionaries({"service": service, "lane": lane})
#: Which of the tasks that a worker holds a report is about, and whether its attempt is right.
reports = st.fixed_dictionaries(
    {
        "worker": worker,
        "places": st.lists(st.integers(0, 3), min_size=1, max_size=3),
        "outcomes": st.none() | st.lists(st.sampled_from(Outcome), min_size=3, max_size=3),
        "wrong": st.sampled_from([0, 0, 0, 1]),
        "keeps_slots": st.booleans(),
        "random_bits": st.integers(0, 2**32 - 1),
    }
)

STEPS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "submit": submissions(),
    "join": st.fixed_dictionaries({"worker": worker, "facts": facts}),
    "ask": st.fixed_dictionaries(
        {"worker": worker, "count": st.integers(1, 3), "parks": st.booleans()}
    ),
    "report": reports,
    "return": st.fixed_dictionaries({"worker": worker, "after": st.none() | afters}),
    "progress": st.fixed_dictionaries({"worker": worker}),
    "free": st.fixed_dictionaries({"worker": worker}),
    "hear": st.fixed_dictionaries({"worker": worker, "lists": st.sampled_from([None, 0, 1, 9])}),
    "leave": st.fixed_dictionaries({"worker": worker}),
    "cut": st.fixed_dictionaries({"worker": worker}),
    "reconnect": st.fixed_dictionaries({"worker": worker}),
    "drain": st.fixed_dictionaries({"worker": worker}),
    "cancel": scopes,
    "retry": scopes,
    "pause": pauses | lane_pauses,
    "resume": pauses | lane_pauses,
    "watch": st.fixed_dictionaries({"names": names, "campaign": st.sampled_from([None, b"c"])}),
    "watch ended": st.just({}),
    "wait ended": st.fixed_dictionaries({"worker": worker}),
    "questions": st.fixed_dictionaries({"names": names}),
    "client gone": st.just({}),
    "move": st.fixed_dictionaries(
        {
            "scope": scopes,
            "service": st.none() | service,
            "lane": st.none() | lane,
        }
    ),
    "edit": st.fixed_dictionaries(
        {
            "scope": scopes,
            "changes": st.builds(
                TermsChanges,
                priority=st.none() | st.sampled_from([-1, 0, 1]),
                retry_delays_ns=st.none() | st.sampled_from([(), (0, SECOND_NS)]),
                expires_hard_ns=st.none() | st.sampled_from([0, 5 * SECOND_NS]),
            ),
        }
    ),
    "expire": scopes,
    "rules": st.fixed_dictionaries(
        {"rules": rules, "lane_rules": lane_rules, "workers_max": st.sampled_from([0, 0, 1])}
    ),
    "clock": st.fixed_dictionaries({"seconds": st.integers(0, 20)}),
    "time": st.fixed_dictionaries({"seconds": seconds}),
}
#: Steps that make a story go on are chosen more often.
OFTEN = ["submit", "join", "ask", "report"]


def steps(count: int, at_least: int = 0) -> st.SearchStrategy[list[Step]]:
    kinds = st.sampled_from([*STEPS, *OFTEN, *OFTEN, *OFTEN])
    one = kinds.flatmap(lambda kind: st.tuples(st.just(kind), STEPS[kind]))
    return st.lists(one, min_size=at_least, max_size=count)


def held_by(yard: Yard, name: bytes) -> list[tuple[bytes, int]]:
    """Return the tasks and attempts that a worker holds."""
    known = yard.scheduler.ledger.workers.get(name)
    return [] if known is None else [(task.name, task.attempt) for task in known.held()]


def take_step(yard: Yard, step: Step) -> list[Any]:
    """Let one step of a story happen. Returns the effects."""
    kind, given = step
    return _TAKE[kind](yard, **given)


def _submit(yard: Yard, terms: dict[str, Any], **given: Any) -> list[Any]:
    at_ns = yard.scheduler.context.at_ns
    own = dict(terms)
    for key in ("due", "expires", "expires_hard"):
        after_seconds = own.pop(key)
        own[key + "_ns"] = at_ns + after_seconds * SECOND_NS if after_seconds else 0
    submission = Submission(
        given["names"], given["names"], [Terms(**own)], None, given["lanes"], given["after"]
    )
    event = SubmitRequested(0, b"client", submission, 0, given["unknown"], given["repeat"])
    return yard.handle(event)


def _report(yard: Yard, worker: bytes, places: list[int], wrong: int, **given: Any) -> list[Any]:
    held = held_by(yard, worker) or [(b"a", 1)]
    chosen = [held[place % len(held)] for place in places]
    outcomes = given.pop("outcomes")
    event = TasksReported(
        0,
        worker,
        [name for name, _ in chosen],
        [attempt + wrong for _, attempt in chosen],
        None if outcomes is None else outcomes[: len(chosen)],
        [b"text of " + name for name, _ in chosen],
        **given,
    )
    return yard.handle(event)


def _return(yard: Yard, worker: bytes, after: list[bytes] | None) -> list[Any]:
    some = [name for name, _ in held_by(yard, worker)][:1] or [b"a"]
    return yard.handle(TasksReturned(0, worker, some, None if after is None else [after]))


def _progress(yard: Yard, worker: bytes) -> list[Any]:
    held = held_by(yard, worker) or [(b"a", 1)]
    columns = [name for name, _ in held], [attempt for _, attempt in held]
    return yard.handle(TasksProgressed(0, worker, *columns, None, [b"", *columns[0][1:]]))


def _ask_everything(yard: Yard, names: list[bytes]) -> list[Any]:
    """Every question at once: none of them may change anything."""
    questions: list[Event] = [
        RequestRejected(0, b"client", 1, Refusal.MALFORMED, "what?"),
        LookupRequested(0, b"client", names),
        ListRequested(0, b"client", Scope(), names[0], cursor=len(names), count=2),
        StatsRequested(0, b"client"),
        ExplainRequested(0, b"client", names[0]),
        LanesRequested(0, b"client", count=2),
        RulesRequested(0, b"client", services=(b"default",)),
        WorkersRequested(0, b"client"),
        ResultsRequested(0, b"client", names),
        PartRequested(0, b"client", names[0], stream=Stream.STDOUT),
    ]
    replies: list[Any] = []
    for question in questions:
        replies += yard.handle(question)
        assert yard.records == []
    assert len(replies) == len(questions)
    return replies


def _heartbeat(yard: Yard, worker: bytes, lists: int | None) -> list[Any]:
    held = None if lists is None else held_by(yard, worker)[:lists]
    waiting = tuple(name for name, _ in (held or ())[::2])  # every second one waits for others
    return yard.handle(WorkerHeartbeat(0, worker, held, SECOND_NS, waiting=waiting))


def _rules(
    yard: Yard,
    rules: dict[str, Any],
    lane_rules: list[tuple[bytes, dict[str, Any]]],
    workers_max: int,
) -> list[Any]:
    made = tuple(
        Rule(b"clause %d" % number, match, LaneOptions(**own))
        for number, (match, own) in enumerate(lane_rules)
    )
    return yard.handle(RulesSet(0, made, LaneOptions(**rules), workers_max))


def _move(
    yard: Yard, scope: dict[str, Any], service: bytes | None, lane: bytes | None
) -> list[Any]:
    return yard.handle(MoveRequested(0, b"client", Scope(**scope), service, lane))


_TAKE: dict[str, Callable[..., list[Any]]] = {
    "submit": _submit,
    "join": lambda yard, worker, facts: yard.handle(
        WorkerRegistered(0, worker, WorkerFacts(**facts))
    ),
    "ask": lambda yard, **given: yard.handle(TasksRequested(0, **given)),
    "report": _report,
    "return": _return,
    "progress": _progress,
    "free": lambda yard, worker: yard.handle(SlotFreed(0, worker)),
    "hear": _heartbeat,
    "leave": lambda yard, worker: yard.handle(WorkerExited(0, worker)),
    "cut": lambda yard, worker: yard.handle(WorkerUnreachable(0, worker)),
    "reconnect": lambda yard, worker: yard.handle(WorkerReconnected(0, worker)),
    "drain": lambda yard, worker: yard.handle(DrainRequested(0, b"client", worker)),
    "cancel": lambda yard, **given: yard.handle(CancelRequested(0, b"client", Scope(**given))),
    "retry": lambda yard, **given: yard.handle(RetryRequested(0, b"client", Scope(**given))),
    "move": _move,
    "edit": lambda yard, scope, changes: yard.handle(
        EditRequested(0, b"client", Scope(**scope), changes)
    ),
    "expire": lambda yard, **given: yard.handle(ExpireRequested(0, b"client", Scope(**given))),
    "pause": lambda yard, **given: yard.handle(PauseRequested(0, b"client", **given)),
    "resume": lambda yard, **given: yard.handle(ResumeRequested(0, b"client", **given)),
    "watch": lambda yard, **given: yard.handle(WatchRequested(0, b"watcher", **given)),
    "watch ended": lambda yard: yard.handle(WatchEnded(0, b"watcher", 0)),
    "wait ended": lambda yard, worker: yard.handle(WaitEnded(0, worker)),
    "questions": _ask_everything,
    "client gone": lambda yard: yard.handle(ClientDisconnected(0, b"watcher")),
    "rules": _rules,
    "clock": lambda yard, seconds: yard.clock(seconds * SECOND_NS),
    "time": lambda yard, seconds: yard.later(seconds),
}
