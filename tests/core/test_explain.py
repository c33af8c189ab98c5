"""Explanations of tasks: every reason, its sentence compared literally."""

import re
from pathlib import Path
from typing import Any

import pytest

from taskyard.core.effects import Explanation, Reason
from taskyard.core.events import (
    DiskSpaceChanged,
    Outcome,
    PauseRequested,
    ResumeRequested,
    RulesSet,
    UnknownPolicy,
    WorkerLost,
    WorkerRegistered,
)
from taskyard.core.explain import cancelled, explain
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.core.rules import LaneOptions
from taskyard.core.scheduler import Scheduler
from tests.core.kit import Yard
from tests.kit.snapshots import reopened


def why(yard: Yard, name: bytes) -> Explanation:
    return explain(yard.scheduler.context, name)


def sentence(yard: Yard, name: bytes, reason: Reason) -> str:
    found = why(yard, name)
    assert found.reason is reason
    return found.sentence


@pytest.fixture
def yard() -> Yard:
    """Return a yard with a worker w of two slots."""
    yard = Yard()
    yard.join(b"w", slots_total=2)
    return yard


def test_unknown_task(yard: Yard) -> None:
    assert sentence(yard, b"\xff", Reason.UNKNOWN) == "unknown task \\xff"


def test_done_task(yard: Yard) -> None:
    yard.submit(b"a")
    yard.take(b"w")
    yard.finish(b"w", b"a")
    assert sentence(yard, b"a", Reason.DONE) == "it is done (attempt 1)"


def test_cancelled_task(yard: Yard) -> None:
    yard.submit(b"a")
    yard.cancel(b"a")
    expected = (
        "it was cancelled, on request or with a task that it waited for (its record has no cause)"
    )
    assert sentence(yard, b"a", Reason.CANCELLED) == expected


def test_cancelled_task_is_explained_by_its_cause() -> None:
    asked = Explanation(Reason.CANCELLED, "it was cancelled on request")
    assert cancelled(b"") == asked
    text = "it waited for a, which was cancelled on request"
    assert cancelled(b"a") == Explanation(Reason.CANCELLED, text, (b"a",))


def test_failed_task(yard: Yard) -> None:
    yard.submit(b"a", b"b", retry_delays_ns=(0,))
    yard.take(b"w", 2)
    yard.report(b"w", b"a", Outcome.FAILED_FINAL, texts=[b"no such file"])
    yard.report(b"w", b"b", Outcome.FAILED)
    yard.later(0)
    yard.take(b"w")
    yard.report(b"w", b"b", Outcome.FAILED)
    assert sentence(yard, b"a", Reason.FAILED) == "it failed after 1 attempt: no such file"
    assert sentence(yard, b"b", Reason.FAILED) == "it failed after 2 attempts: no reason given"


def test_failed_task_that_others_wait_for(yard: Yard) -> None:
    yard.submit(b"a", b"b", after=[[], [b"a"]])
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.FAILED, texts=[b"oh"])
    expected = "it failed after 1 attempt: oh; 1 task waits for it"
    assert sentence(yard, b"a", Reason.FAILED) == expected
    yard.submit(b"c", after=[[b"b"]])
    expected = "it failed after 1 attempt: oh; 2 tasks wait for it"
    assert sentence(yard, b"a", Reason.FAILED) == expected


def test_leased_task(yard: Yard) -> None:
    yard.submit(b"a")
    yard.take(b"w")
    yard.later(7.9)
    assert sentence(yard, b"a", Reason.LEASED) == "worker w has had it for 7 s (attempt 1)"


def test_leased_task_when_the_clock_has_jumped_back(yard: Yard) -> None:
    yard.clock(100 * SECOND_NS)
    yard.submit(b"a")
    yard.take(b"w")
    yard.clock(0)
    assert sentence(yard, b"a", Reason.LEASED) == "worker w has had it for 0 s (attempt 1)"


def test_task_that_waits_for_its_time(yard: Yard) -> None:
    yard.submit(b"a", due_ns=90 * SECOND_NS)
    assert sentence(yard, b"a", Reason.TIME) == "it is due in 1 min 30 s"
    yard.submit(b"b", retry_delays_ns=(5 * SECOND_NS,))
    yard.take(b"w")
    yard.report(b"w", b"b", Outcome.FAILED, texts=[b"host is down"])
    expected = "it is due in 5 s, after 1 failure, the last: host is down"
    assert sentence(yard, b"b", Reason.TIME) == expected


def test_task_that_waits_for_room_on_the_disk(yard: Yard) -> None:
    yard.submit(b"a")
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.RETRY_AT, texts=[b"no room"], retry_at_ns=[5 * SECOND_NS])
    assert sentence(yard, b"a", Reason.TIME) == "it is due in 5 s: no room"
    yard.handle(DiskSpaceChanged(0, accepting=False))
    expected = "it is due in 5 s when the broker's disk has room again: no room"
    assert sentence(yard, b"a", Reason.TIME) == expected
    yard.later(6)
    expected = "it is due when the broker's disk has room again: no room"
    assert sentence(yard, b"a", Reason.TIME) == expected


def test_task_that_waits_for_tasks(yard: Yard) -> None:
    yard.submit(b"a", due_ns=1)
    yard.submit(b"b", after=[[b"a"]])
    found = why(yard, b"b")
    assert found == Explanation(Reason.TASKS, "it waits for 1 task: a (DELAYED)", (b"a",))
    yard.submit(b"c", after=[[b"b", b"x"]], unknown=UnknownPolicy.WAIT)
    found = why(yard, b"c")
    text = "it waits for 2 tasks: b (BLOCKED), x (not submitted)"
    assert found == Explanation(Reason.TASKS, text, (b"b", b"x"))


def test_running_tasks_that_a_task_waits_for_come_first_with_their_times(yard: Yard) -> None:
    names = [b"%d" % number for number in range(6)]
    yard.submit(*names[:4])
    yard.submit(names[4], priority=1)
    yard.submit(names[5], priority=2)
    yard.submit(b"a", after=[names])
    assert yard.take(b"w") == [b"5"]
    yard.later(90)
    assert yard.take(b"w") == [b"4"]
    yard.later(5)
    assert sentence(yard, b"a", Reason.TASKS) == (
        "it waits for 6 tasks: 5 (LEASED for 1 min 35 s), 4 (LEASED for 5 s), 0 (READY), "
        "1 (READY), 2 (READY) and 1 more"
    )


def test_task_that_waits_for_many_tasks(yard: Yard) -> None:
    names = [b"%d" % number for number in range(7)]
    yard.submit(*names)
    yard.submit(b"a", after=[names])
    assert sentence(yard, b"a", Reason.TASKS) == (
        "it waits for 7 tasks: 0 (READY), 1 (READY), 2 (READY), 3 (READY), 4 (READY) and 2 more"
    )
    yard.submit(b"b", after=[[*names[:4], b"x", b"y"]], unknown=UnknownPolicy.WAIT)
    assert sentence(yard, b"b", Reason.TASKS) == (
        "it waits for 6 tasks: 0 (READY), 1 (READY), 2 (READY), 3 (READY), x (not submitted) "
        "and 1 more"
    )


def test_task_behind_a_failure(yard: Yard) -> None:
    yard.submit(b"f", b"g")
    yard.take(b"w", 2)
    yard.report(b"w", b"f", Outcome.FAILED, texts=[b"oh"])
    yard.report(b"w", b"g", Outcome.FAILED)
    yard.submit(b"c", after=[[b"f", b"g"]])
    yard.submit(b"d", after=[[b"c"]])
    yard.submit(b"e", after=[[b"d", b"f"]])
    text = "it is behind 2 failures: f failed (oh), g failed"
    assert why(yard, b"c") == Explanation(Reason.FAILURE, text, (b"f", b"g"))
    assert sentence(yard, b"d", Reason.FAILURE) == f"{text}; it waits for c (BLOCKED)"
    assert why(yard, b"e") == Explanation(
        Reason.FAILURE, f"{text}; it waits for d (BLOCKED)", (b"f", b"d")
    )


def test_task_far_behind_a_failure_is_explained_by_that_failure_alone(yard: Yard) -> None:
    yard.submit(b"other", b"bad")
    yard.take(b"w", 2)
    yard.report(b"w", b"bad", Outcome.FAILED, texts=[b"exit status 1"])
    yard.report(b"w", b"other", Outcome.FAILED)
    yard.submit(b"0", b"beside", after=[[b"bad"], [b"other"]])
    for step in range(1, 9):
        yard.submit(b"%d" % step, after=[[b"%d" % (step - 1)]])
    assert sentence(yard, b"8", Reason.FAILURE) == (
        "it is behind a failure: bad failed (exit status 1); it waits for 7 (BLOCKED)"
    )


def test_task_behind_many_failures(yard: Yard) -> None:
    yard.join(b"wide")
    names = [b"%d" % number for number in range(7)]
    yard.submit(*reversed(names))
    yard.take(b"wide", 7)
    for name in reversed(names):
        yard.report(b"wide", name, Outcome.FAILED)
    yard.submit(b"a", after=[names])
    yard.submit(b"b", after=[[b"a"]])
    assert sentence(yard, b"b", Reason.FAILURE) == (
        "it is behind 7 failures: 0 failed, 1 failed, 2 failed, 3 failed, 4 failed and 2 more; "
        "it waits for a (BLOCKED)"
    )


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({}, "it is ready, but everything is paused (service default)"),
        ({"service": b"default"}, "it is ready, but its service is paused (service default)"),
        (
            {"service": b"default", "lane": b"x"},
            "it is ready, but its lane is paused (service default)",
        ),
    ],
)
def test_paused_task(yard: Yard, scope: dict[str, Any], expected: str) -> None:
    yard.submit(b"a", lanes=[b"x"])
    yard.handle(PauseRequested(0, b"client", **scope))
    assert sentence(yard, b"a", Reason.PAUSED) == expected


@pytest.mark.parametrize(
    ("reason", "event", "expected"),
    [
        (
            Reason.LIMIT_BROKER,
            RulesSet(0, workers_max=1),
            "the broker's limit on workers is reached",
        ),
        (
            Reason.LIMIT_SERVICE,
            RulesSet(0, defaults=LaneOptions(workers_max=1)),
            "its service's limit on workers is reached",
        ),
        (
            Reason.LIMIT_LANE,
            RulesSet(0),
            "its lane's limit on leased tasks is reached",
        ),
        (
            Reason.RATE,
            RulesSet(0, defaults=LaneOptions(rate_interval_ns=SECOND_NS, lane_workers_max=9)),
            "its service's rate limit is reached",
        ),
        (
            Reason.LANE_RATE,
            RulesSet(
                0, defaults=LaneOptions(lane_rate_interval_ns=60 * SECOND_NS, lane_workers_max=9)
            ),
            "its lane's rate limit is reached: 1/m, next in 1 min",
        ),
    ],
)
def test_task_held_back_by_a_limit(
    yard: Yard, reason: Reason, event: RulesSet, expected: str
) -> None:
    yard.handle(event)
    yard.submit(b"a", b"b", lanes=[b"x", b"x"])
    yard.take(b"w")
    assert sentence(yard, b"b", reason) == f"it is ready, but {expected} (service default)"


def test_task_without_a_worker() -> None:
    yard = Yard()
    yard.submit(b"a", service=b"rare")
    expected = "it is ready, but no worker of its service is connected (service rare)"
    assert sentence(yard, b"a", Reason.NO_WORKER) == expected


def test_task_that_no_worker_has_room_for(yard: Yard) -> None:
    yard.submit(b"a", slots=3)
    expected = "it is ready, but takes 3 slots, and no worker has that many"
    assert sentence(yard, b"a", Reason.NO_ROOM) == expected
    yard.join(b"plain")
    assert why(yard, b"a").reason is Reason.WORKERS_BUSY


def test_last_attempt_waits_until_the_only_worker_is_idle(yard: Yard) -> None:
    yard.submit(b"a")
    yard.lose(b"v", b"a", times=4)
    yard.submit(b"b", priority=-1, lanes=[b"x"])
    yard.handle(PauseRequested(0, b"c", b"default", b""))
    yard.take(b"w")
    yard.handle(ResumeRequested(0, b"c", b"default", b""))
    expected = (
        "it is ready, but it lost 4 workers, so its last attempt must run alone in a worker: "
        "none is idle"
    )
    assert sentence(yard, b"a", Reason.EXCLUSIVE) == expected


def test_last_attempt_names_the_worker_that_is_emptied_for_it() -> None:
    yard = Yard()
    yard.submit(b"a")
    yard.lose(b"v", b"a", times=3)
    yard.submit(b"b", b"c", b"d")
    for worker, name in ((b"u", b"a"), (b"w", b"b"), (b"t", b"c")):
        yard.join(worker, slots_total=2, lease_timeout_ns=60 * SECOND_NS)
        assert yard.take(worker) == [name]
    yard.handle(WorkerLost(0, b"u"))
    assert yard.take(b"w") == [b"d"]
    expected = (
        "it is ready, but it lost 4 workers, so its last attempt must run alone in a worker: "
        "worker w is reserved for it and still holds 2 tasks"
    )
    assert sentence(yard, b"a", Reason.EXCLUSIVE) == expected


def test_task_that_lost_workers_is_explained_by_others_like_it() -> None:
    yard = Yard()
    yard.submit(b"a", b"b", b"c")
    yard.lose(b"v", b"a", b"b", b"c", times=3)
    yard.join(b"w", slots_total=8)
    assert yard.take(b"w", 8) == [b"a", b"b"]
    expected = (
        "it is ready, but it lost 3 workers: "
        "at most 2 tasks with such losses may share a worker, and none has room"
    )
    assert sentence(yard, b"c", Reason.ISOLATED) == expected


def test_wide_task_names_the_worker_that_is_reserved_for_it(yard: Yard) -> None:
    yard.submit(b"a")
    yard.take(b"w")
    yard.submit(b"wide", slots=2)
    assert yard.take(b"w") == []
    expected = "it is ready and takes 2 slots: worker w is reserved for it and has 1 free slot"
    assert sentence(yard, b"wide", Reason.RESERVED) == expected
    yard.submit(b"b")
    expected = "it is ready, but worker w, which has a free slot, is reserved for another task"
    assert sentence(yard, b"b", Reason.WORKERS_BUSY) == expected


def test_task_that_no_worker_asks_for(yard: Yard) -> None:
    yard.submit(b"a")
    expected = "it is ready, but no worker of service default with a free slot requests tasks"
    assert sentence(yard, b"a", Reason.WORKERS_BUSY) == expected


def test_task_that_finds_all_slots_in_use(yard: Yard) -> None:
    yard.submit(b"a", b"b", b"c")
    yard.take(b"w", 2)
    expected = "it is ready, but all 2 slots of its 1 worker are in use"
    assert sentence(yard, b"c", Reason.WORKERS_BUSY) == expected
    yard.handle(WorkerRegistered(0, b"v", WorkerFacts(slots_total=1), prefetch=2))
    expected = "it is ready, but no worker of service default with a free slot requests tasks"
    assert sentence(yard, b"c", Reason.WORKERS_BUSY) == expected
    yard.submit(b"d", b"e", b"f")
    yard.take(b"v", 3)
    expected = "it is ready, but all 3 slots of its 2 workers are in use"
    assert sentence(yard, b"f", Reason.WORKERS_BUSY) == expected
    yard.join(b"other", services=(b"other",))
    assert sentence(yard, b"f", Reason.WORKERS_BUSY) == expected


def test_task_that_finds_the_one_slot_in_use() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1)
    yard.submit(b"a", b"b")
    yard.take(b"w")
    expected = "it is ready, but the one slot of its worker is in use"
    assert sentence(yard, b"b", Reason.WORKERS_BUSY) == expected


def test_wide_task_that_finds_too_few_slots_free(yard: Yard) -> None:
    yard.submit(b"a")
    yard.take(b"w")
    yard.submit(b"b", slots=2)
    expected = "it is ready, but takes 2 slots, and no worker has more than 1 free"
    assert sentence(yard, b"b", Reason.WORKERS_BUSY) == expected


def test_task_that_waits_for_resources_names_the_workers_that_could_have_them() -> None:
    yard = Yard()
    yard.join(b"a", slots_total=9, resources=((b"gpus", 40_000), (b"memory", 8 << 30)))
    yard.join(b"b", slots_total=9)
    yard.submit(b"1", resources=((b"gpus", 30_000), (b"memory", 6 << 30)))
    assert yard.take(b"a") == [b"1"]
    yard.submit(b"2", resources=((b"gpus", 20_000),))
    expected = "it is ready, but waits for 2 gpus: worker a has 1 of 4 free, worker b has none"
    assert sentence(yard, b"2", Reason.RESOURCES_BUSY) == expected
    assert yard.take(b"a") == []
    reserved = f"{expected}; worker a is reserved for it"
    assert sentence(yard, b"2", Reason.RESOURCES_BUSY) == reserved
    yard.submit(b"3", resources=((b"gpus", 15_000), (b"memory", 5 << 29)))
    expected = (
        "it is ready, but waits for 1.5 gpus and 2.5 GiB of memory: "
        "worker a has 1 of 4 gpus free and 2 GiB of 8 GiB memory free, "
        "worker b has no gpus and no memory"
    )
    assert sentence(yard, b"3", Reason.RESOURCES_BUSY) == expected
    yard.finish(b"a", b"1")
    assert why(yard, b"3").reason is Reason.WORKERS_BUSY


@pytest.mark.parametrize(
    ("slots", "needed", "expected"),
    [
        (1, ((b"gpus", 80_000),), "no worker has 8 gpus (the largest has 4)"),
        (1, ((b"license", 10_000),), "no worker has 1 license (none has any)"),
        (
            9,
            ((b"gpus", 10_000), (b"memory", 1 << 30)),
            "no worker has 9 slots and 1 gpu and 1 GiB of memory together",
        ),
    ],
)
def test_task_with_more_resources_than_any_worker_has(
    slots: int, needed: tuple[tuple[bytes, int], ...], expected: str
) -> None:
    yard = Yard()
    yard.join(b"a", slots_total=1, resources=((b"gpus", 40_000), (b"memory", 8 << 30)))
    yard.join(b"b", slots_total=9)
    yard.submit(b"1", slots=slots, resources=needed)
    assert sentence(yard, b"1", Reason.NO_RESOURCES) == f"it is ready, but {expected}"


def test_task_with_resources_where_workers_have_none(yard: Yard) -> None:
    yard.submit(b"a", resources=((b"cpus", 5_000),))
    needs = "it is ready, but needs 0.5 cpus"
    expected = f"{needs}, and the 1 worker of service default has no named resources"
    assert sentence(yard, b"a", Reason.NO_RESOURCES) == expected


def test_every_reason_is_given_in_this_file() -> None:
    here = Path(__file__)
    text = here.read_text() + here.with_name("test_explain_lanes.py").read_text()
    assert [reason for reason in Reason if f"Reason.{reason.name}" not in text] == []


def test_page_has_every_reason_of_a_task_and_no_other() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "scheduling.md").read_text()
    section = page.partition("\n## Why a task waits\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    listed = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    of_lanes_only = (Reason.SERVED, Reason.IDLE)
    assert sorted(listed) == sorted(one.value for one in Reason if one not in of_lanes_only)


def test_task_that_workers_return_with_a_reason(yard: Yard) -> None:
    """A forwarder returns a task that has passed its brokers before, again and again."""
    loop = b"forwarding loop: 'c@a' has passed a before"
    yard.submit(b"a")
    for _ in range(3):
        yard.take(b"w")
        yard.report(b"w", b"a", Outcome.REFUSED, texts=[loop])
    expected = f"its last 3 attempts were returned by worker w: {loop.decode()}"
    assert sentence(yard, b"a", Reason.RETURNED) == f"it is ready, but {expected}"
    yard.scheduler = Scheduler(reopened(yard.mirror))  # restarted
    assert sentence(yard, b"a", Reason.RETURNED) == f"it is ready, but {expected}"
    yard.submit(b"b", b"c", priority=1)
    yard.take(b"w", 2)
    full = f"it is ready, but all 2 slots of its 1 worker are in use; {expected}"
    assert sentence(yard, b"a", Reason.WORKERS_BUSY) == full
    yard.finish(b"w", b"b")
    yard.take(b"w")
    assert sentence(yard, b"a", Reason.LEASED).endswith(f"(attempt 4); {expected}")
    assert (yard[b"a"].losses, yard[b"a"].failures) == (0, 0)


def test_task_of_a_forwarder_is_at_another_broker() -> None:
    yard = Yard()
    yard.join(b"w", slots_total=1, forwards=True)
    yard.submit(b"a")
    yard.take(b"w")
    assert sentence(yard, b"a", Reason.LEASED) == (
        "worker w has had it for 0 s (attempt 1); it waits or runs at the broker that this worker "
        "forwards to"
    )


def test_task_that_was_returned_once_waits_for_a_worker(yard: Yard) -> None:
    yard.submit(b"a")
    yard.take(b"w")
    yard.report(b"w", b"a", Outcome.REFUSED, texts=[b"stopped"])
    assert sentence(yard, b"a", Reason.WORKERS_BUSY) == (
        "it is ready, but no worker of service default with a free slot requests tasks; its last "
        "attempt was returned by worker w: stopped"
    )
