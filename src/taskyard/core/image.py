"""A ledger as plain columns and back: what a snapshot holds.

`restore(take(ledger))` is the same ledger. Only durable state is taken; indexes that follow from
it are built anew. `portrait` describes a ledger for comparison: two ledgers with the same portrait
go on alike.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from taskyard.core.ledger import Ledger, lane_counts
from taskyard.core.runs import Attempt
from taskyard.core.states import DELAYED, READY, TaskState
from taskyard.core.tasks import Ending, Lease, Task, Terms
from taskyard.core.workers import Replaced, Worker, WorkerFacts

if TYPE_CHECKING:
    from taskyard.core.agenda import Lane


#: What it takes to say which payload a task has.
_PLACE_BYTES: Final = 5


class QueueImage(Struct, array_like=True, gc=False):
    """The ready tasks of one lane and priority, by their places in the task columns."""

    priority: int
    items: list[int]
    front: list[int]


class LaneImage(Struct, array_like=True, gc=False):
    service: int
    name: bytes
    paused: bool
    queues: list[QueueImage]
    suspects: list[int]
    #: What waits for the next run, and how many tasks there are to go before it, at most.
    later: list[int] = field(default_factory=list)
    run_left: int = 0
    #: Tasks that may be tried though the lane is held.
    released: int = 0


class ServiceImage(Struct, array_like=True, gc=False):
    name: bytes
    paused: bool
    wide: bool
    counts: list[int]


class WorkerImage(Struct, array_like=True, gc=False):
    name: bytes
    facts: WorkerFacts
    slots_kept: list[int]


class LeaseImage(Struct, array_like=True, gc=False):
    number: int
    worker: int
    at_ns: int
    lease_ns: int
    tasks: list[int]


class Image(Struct, array_like=True, gc=False):
    """All durable state. Tasks refer to terms and lanes, and others to tasks, by place."""

    record: int
    paused: bool
    counts: list[int]
    campaigns: list[tuple[bytes, list[int]]]
    services: list[ServiceImage]
    lanes: list[LaneImage]
    workers: list[WorkerImage]
    terms: list[Terms]
    # The columns of tasks.
    names: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    terms_at: list[int] = field(default_factory=list)
    lane_at: list[int] = field(default_factory=list)
    states: list[TaskState] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    excused: list[int] = field(default_factory=list)
    due_ns: list[int] = field(default_factory=list)
    # What only some tasks have.
    endings: dict[int, tuple[int, int]] = field(default_factory=dict)
    dependents: dict[int, list[int]] = field(default_factory=dict)
    awaited: dict[bytes, list[int]] = field(default_factory=dict)
    leases: list[LeaseImage] = field(default_factory=list)
    reasons: dict[bytes, bytes] = field(default_factory=dict)
    envelopes: dict[bytes, bytes] = field(default_factory=dict)
    outputs: dict[bytes, int] = field(default_factory=dict)
    #: Which of `payloads` each task has; empty: each its own. Tasks may share one of megabytes.
    payload_at: list[int] = field(default_factory=list)
    #: Tasks that were reported as late.
    reported: list[bytes] = field(default_factory=list)
    #: Campaigns with truncated results, and how many.
    truncated: dict[bytes, int] = field(default_factory=dict)
    #: Processes that lost their name, by worker and incarnation, oldest first.
    replaced: list[tuple[bytes, int, Replaced]] = field(default_factory=list)
    tries: dict[bytes, list[Attempt]] = field(default_factory=dict)
    #: Campaigns whose tasks have their names alone as keys (`identity`). None: it was taken before
    #: there were others, so all campaigns have.
    bare: list[bytes] | None = None


def take(ledger: Ledger) -> Image:
    """The columns of a ledger. They share its objects: encode them before it goes on."""
    tasks = list(ledger.tasks.values())
    places = {id(task): place for place, task in enumerate(tasks)}
    terms = list({id(task.terms): task.terms for task in tasks}.values())
    terms_at = {id(one): place for place, one in enumerate(terms)}
    lanes, (payloads, payload_at) = _lanes(ledger, tasks), _payloads(tasks)
    lane_at = {id(lane): place for place, lane in enumerate(lanes)}
    services = list(ledger.services.values())
    service_at = {one.name: place for place, one in enumerate(services)}
    return Image(
        record=ledger.record,
        paused=ledger.paused,
        counts=ledger.counts,
        campaigns=[(one.name, one.counts) for one in ledger.campaigns.values()],
        truncated={one.name: one.truncated for one in ledger.campaigns.values() if one.truncated},
        services=[ServiceImage(one.name, one.paused, one.wide, one.counts) for one in services],
        lanes=[_lane_image(lane, service_at, places) for lane in lanes],
        workers=[WorkerImage(w.name, w.facts, w.slots_kept) for w in ledger.workers.values()],
        terms=terms,
        names=[task.name for task in tasks],
        payloads=payloads,
        terms_at=[terms_at[id(task.terms)] for task in tasks],
        lane_at=[lane_at[id(task.lane)] for task in tasks],
        states=[task.state for task in tasks],
        waits=[task.waits for task in tasks],
        attempts=[task.attempt for task in tasks],
        failures=[task.failures for task in tasks],
        excused=[task.excused for task in tasks],
        due_ns=[task.due_ns for task in tasks],
        endings=_endings(tasks),
        dependents={
            place: [places[id(one)] for one in task.dependents_list() if id(one) in places]
            for place, task in enumerate(tasks)
            if task.dependents is not None
        },
        awaited={
            name: [places[id(task)] for task in waiting if id(task) in places]
            for name, waiting in ledger.awaited.items()
        },
        leases=_lease_images(ledger, places),
        reasons=ledger.reasons,
        envelopes=ledger.envelopes,
        outputs=ledger.outputs,
        payload_at=payload_at,
        reported=list(ledger.reported),
        replaced=[(*key, one) for key, one in ledger.replaced.items()],
        tries=ledger.tries,
        bare=list(ledger.bare),
    )


def _endings(tasks: list[Task]) -> dict[int, tuple[int, int]]:
    return {
        place: (task.ending.record, task.ending.at_ns)
        for place, task in enumerate(tasks)
        if task.ending is not None
    }


def _payloads(tasks: list[Task]) -> tuple[list[bytes], list[int]]:
    """The payloads, and which of them each task has, if any is shared that is worth a number."""
    own = [task.payload for task in tasks]
    different = {id(payload): payload for payload in own}
    if sum(map(len, own)) - sum(map(len, different.values())) < len(own) * _PLACE_BYTES:
        return own, []
    places = {one: place for place, one in enumerate(different)}
    return list(different.values()), [places[id(payload)] for payload in own]


def _lanes(ledger: Ledger, tasks: list[Task]) -> list[Lane]:
    """The lanes of the services, and deleted ones that ended tasks still name."""
    lanes = {
        id(lane): lane for service in ledger.services.values() for lane in service.lanes.values()
    }
    for task in tasks:
        lanes.setdefault(id(task.lane), task.lane)
    return list(lanes.values())


def _lane_image(lane: Lane, services: dict[bytes, int], places: dict[int, int]) -> LaneImage:
    def at(tasks: list[Task]) -> list[int]:
        return [places[id(task)] for task in tasks if task.state is READY]

    queues = [
        QueueImage(queue.priority, at(queue.line()), at(queue.front)) for queue in lane.queues
    ]
    service = services[lane.service.name]
    image = LaneImage(service, lane.name, lane.paused, queues, at(lane.suspects))
    if lane.rare is not None:
        image.later = at(list(lane.rare.later.values()))
        image.run_left, image.released = lane.rare.run_left, lane.rare.released
    return image


def _lease_images(ledger: Ledger, places: dict[int, int]) -> list[LeaseImage]:
    images: list[LeaseImage] = []
    for index, worker in enumerate(ledger.workers.values()):
        for lease in worker.leases.values():
            out = [places[id(task)] for task in lease.tasks if task.lease is lease]
            images.append(LeaseImage(lease.number, index, lease.at_ns, lease.lease_ns, out))
    return images


def restore(image: Image) -> Ledger:
    """A ledger that goes on where the image was taken."""
    ledger = Ledger()
    ledger.record, ledger.paused, ledger.counts = image.record, image.paused, image.counts
    for name, counts in image.campaigns:
        campaign = ledger.campaign(name)
        campaign.counts, campaign.truncated = counts, image.truncated.get(name, 0)
    named = [name for name, _ in image.campaigns if name]
    ledger.bare = dict.fromkeys(named if image.bare is None else image.bare)
    for one in image.services:
        service = ledger.service(one.name)
        service.paused, service.wide, service.counts = one.paused, one.wide, one.counts
        ledger.wide = ledger.wide or one.wide
    tasks = _restore_tasks(ledger, image)
    _restore_graph(ledger, image, tasks)
    _restore_workers(ledger, image, tasks)
    ledger.plan([task for task in tasks if task.state is DELAYED])
    if any(terms.expires_ns or terms.expires_hard_ns for terms in image.terms):
        ledger.mind_age([task for task in tasks if task.ending is None])
    ledger.reported = dict.fromkeys(image.reported)
    _restore_lateness(ledger, image, tasks)
    ledger.reasons, ledger.envelopes = image.reasons, image.envelopes
    ledger.outputs, ledger.tries = image.outputs, image.tries
    ledger.replaced = {(name, number): one for name, number, one in image.replaced}
    return ledger


def _restore_tasks(ledger: Ledger, image: Image) -> list[Task]:
    lanes = [
        ledger.services[image.services[one.service].name].lane(one.name) for one in image.lanes
    ]
    columns = zip(
        image.names,
        [image.payloads[place] for place in image.payload_at] or image.payloads,
        [image.terms[place] for place in image.terms_at],
        [lanes[place] for place in image.lane_at],
        image.states,
        image.waits,
        repeat(None),  # dependents
        repeat(None),  # lease
        repeat(None),  # ending
        image.attempts,
        image.failures,
        image.excused,
        image.due_ns,
    )
    tasks = [Task(*row) for row in columns]
    ledger.tasks = dict(zip(image.names, tasks, strict=True))
    for place, (record, at_ns) in image.endings.items():
        tasks[place].ending = Ending(record, at_ns)
    for task in tasks:
        task.lane.tasks += task.ending is None
    for lane, one in zip(lanes, image.lanes, strict=True):
        _restore_lane(lane, one, tasks)
    return tasks


def _restore_lane(lane: Lane, one: LaneImage, tasks: list[Task]) -> None:
    lane.paused = lane.paused or one.paused
    for queue_image in one.queues:
        queue = lane.queue(queue_image.priority)
        queue.items += [tasks[place] for place in queue_image.items]
        queue.front += [tasks[place] for place in queue_image.front]
        lane.ready += len(queue_image.items) + len(queue_image.front)
    for place in one.suspects:
        lane.add_suspect(tasks[place], front=False)
    if one.later or one.released:
        rare = lane.with_rare()
        rare.later = {id(tasks[place]): tasks[place] for place in one.later}
        rare.run_left, rare.released = one.run_left, one.released
        lane.ready += len(one.later)
    lane.ready += len(one.suspects)
    if lane.ready:
        lane.branch.offer(lane)
    lane.service.drop_if_empty(lane)


def _restore_lateness(ledger: Ledger, image: Image, tasks: list[Task]) -> None:
    """Tasks that are to be reported one day, and were not yet."""
    if not any(terms.report_ns for terms in image.terms):
        return
    together: dict[int, list[bytes]] = {}
    for task in tasks:
        if task.terms.report_ns and task.ending is None and task.name not in ledger.reported:
            together.setdefault(task.terms.report_ns, []).append(task.name)
    for late_ns, names in together.items():
        ledger.agenda.report(late_ns, names)


def _restore_graph(ledger: Ledger, image: Image, tasks: list[Task]) -> None:
    for place, dependents in image.dependents.items():
        waiting = [tasks[one] for one in dependents]
        tasks[place].dependents = waiting[0] if len(waiting) == 1 else waiting or None
    for name, places in image.awaited.items():
        ledger.awaited[name] = [tasks[place] for place in places]
        for task in ledger.awaited[name]:
            ledger.note_awaited(task, name)


def _restore_workers(ledger: Ledger, image: Image, tasks: list[Task]) -> None:
    workers = [Worker(one.name, one.facts, slots_kept=one.slots_kept) for one in image.workers]
    for worker in workers:
        ledger.enlist(worker)
    for one in image.leases:
        out = [tasks[place] for place in one.tasks]
        given = (workers[one.worker], one.number, one.at_ns, one.lease_ns)
        names, attempts = [task.name for task in out], [task.attempt for task in out]
        lease = Lease(*given, len(out), out, names, attempts, lane_counts(out))
        for task in out:
            task.lease = lease
        ledger.entrust(lease, out)


def portrait(ledger: Ledger, *, ended: bool = True) -> dict[str, Any]:
    """What a ledger will do depends on nothing but this, the rules, and what is volatile. Ended
    tasks may be left out: which of them are in memory depends on what was archived."""
    tasks = sorted(task.name for task in ledger.tasks.values() if ended or task.ending is None)
    return {
        "record": ledger.record,
        "paused": ledger.paused,
        "counts": list(ledger.counts),
        "campaigns": {one.name: list(one.counts) for one in ledger.campaigns.values()},
        "truncated": {one.name: one.truncated for one in ledger.campaigns.values()},
        "bare": sorted(ledger.bare),
        "services": {
            one.name: (one.paused, one.wide, list(one.counts)) for one in ledger.services.values()
        },
        "workers": {one.name: (one.facts, list(one.slots_kept)) for one in ledger.workers.values()},
        "tasks": {name: _task_portrait(ledger.tasks[name]) for name in tasks},
        "leases": {
            lease.number: (lease.worker.name, lease.at_ns, lease.lease_ns, lease.left)
            for worker in ledger.workers.values()
            for lease in worker.leases.values()
        },
        "queues": {
            (lane.service.name, lane.name): _names(lane.in_order())
            for service in ledger.services.values()
            for lane in service.lanes.values()
            if lane.ready
        },
        "runs": {
            (lane.service.name, lane.name): (len(lane.rare.later), lane.rare.run_left)
            for service in ledger.services.values()
            for lane in service.lanes.values()
            if lane.rare is not None and lane.rare.later
        },
        "released": {
            (lane.service.name, lane.name): lane.released
            for service in ledger.services.values()
            for lane in service.lanes.values()
            if lane.released
        },
        "reported": sorted(ledger.reported),
        "replaced": list(ledger.replaced.items()),
        "awaited": {name: _names(tasks) for name, tasks in sorted(ledger.awaited.items())},
        "reasons": dict(ledger.reasons),
        "envelopes": dict(ledger.envelopes),
        "outputs": {name: ledger.outputs[name] for name in tasks if name in ledger.outputs},
        "tries": {name: list(ledger.tries[name]) for name in tasks if name in ledger.tries},
    }


def _task_portrait(task: Task) -> tuple[Any, ...]:
    ending = None if task.ending is None else (task.ending.record, task.ending.at_ns)
    return (
        task.payload,
        task.terms,
        task.lane.name,
        task.state,
        0 if task.ending else task.waits,
        [] if task.ending else _names(task.dependents_list()),
        ending,
        task.attempt,
        task.failures,
        task.excused,
        task.due_ns,
    )


def _names(tasks: list[Task]) -> list[bytes]:
    return [task.name for task in tasks if task.ending is None]
