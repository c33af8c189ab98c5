"""A scenario is a test that names the dialects and skills that it needs.

It runs over every combination. One that a dialect can't express is skipped with the driver's
reason. `SCENARIOS` lists all of them, so that a test can count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pytest
from msgspec import Struct

from tests.conformance.skills import CLIENT_SKILLS, WORKER_SKILLS, Answer, Job, SubmittedTask
from tests.conformance.yard import CLIENTS, PATIENCE_SECONDS, WORKERS, Yard
from tests.kit.processes import until

if TYPE_CHECKING:
    from tests.conformance.skills import Client, Worker

#: The other side of a scenario about one side: it has the most skills.
NATIVE: Final = "dwork-extended"

Test: TypeAlias = Callable[..., None]
Decorator: TypeAlias = Callable[[Test], Test]


class Scenario(Struct):
    """The combinations of a scenario, and the reasons of those skipped."""

    skipped: dict[str, str]
    run: list[str]


SCENARIOS: Final[dict[str, Scenario]] = {}


def pairs(client: Iterable[str] = (), worker: Iterable[str] = ()) -> Decorator:
    """Run with every client dialect and every worker dialect. Each side needs these skills."""
    return _over(product(CLIENTS, WORKERS), client, worker)


def each_client(*skills: str) -> Decorator:
    return _over(((kind, NATIVE) for kind in CLIENTS), skills, ())


def each_worker(*skills: str, client: Iterable[str] = ()) -> Decorator:
    return _over(((NATIVE, kind) for kind in WORKERS), client, skills)


def mixed_workers() -> Decorator:
    """Run with every two workers of different dialects."""

    def decorate(test: Test) -> Test:
        found = [*combinations(WORKERS, 2)]
        ids = ["+".join(kinds) for kinds in found]
        SCENARIOS[test.__name__] = Scenario({}, ids)
        return _parametrize(
            test, "one,other", [pytest.param(*kinds, id="+".join(kinds)) for kinds in found]
        )

    return decorate


def _over(
    kinds: Iterable[tuple[str, str]], client: Iterable[str], worker: Iterable[str]
) -> Decorator:
    found, wanted = [*kinds], ((CLIENT_SKILLS, [*client]), (WORKER_SKILLS, [*worker]))
    for known, needed in wanted:
        assert set(needed) <= set(known), f"no such skill: {set(needed) - set(known)}"

    def decorate(test: Test) -> Test:
        scenario = SCENARIOS[test.__name__] = Scenario({}, [])
        params = []
        for from_kind, to_kind in found:
            combination = f"{from_kind}+{to_kind}"
            cannot = (CLIENTS[from_kind].cannot, WORKERS[to_kind].cannot)
            reasons = [
                of[skill]
                for of, (_, needed) in zip(cannot, wanted, strict=True)
                for skill in needed
                if skill in of
            ]
            if reasons:
                scenario.skipped[combination] = reasons[0]
            else:
                scenario.run.append(combination)
            marks = [pytest.mark.skip(reason=reasons[0])] if reasons else []
            params.append(pytest.param(from_kind, to_kind, id=combination, marks=marks))
        return _parametrize(test, "client_kind,worker_kind", params)

    return decorate


def _parametrize(test: Test, names: str, params: list[Any]) -> Test:
    decorated: Test = pytest.mark.parametrize(names, params)(test)
    return decorated


# Steps of scenarios.


def take_task(worker: Worker) -> Job:
    """Return the next task, which must come."""
    job = worker.take(PATIENCE_SECONDS)
    assert job is not None, f"no task came to the {worker.kind} worker"
    return job


def await_answer(client: Client, submitted: SubmittedTask) -> Answer:
    """Return the answer to a task, which must come."""
    answer = client.answer(submitted, PATIENCE_SECONDS)
    assert answer is not None, f"the {client.kind} client got no answer"
    return answer


def success(client: Client, worker: Worker, result: bytes) -> Answer:
    """Return the answer that this client gets for this worker's result."""
    if "results" in client.cannot:
        return Answer(is_done=True)
    return Answer(is_done=True, text=b"" if "results" in worker.cannot else result)


def taken(yard: Yard, count: int = 1) -> list[str]:
    """Wait until the broker has `count` tasks, and return their names."""
    until(lambda: len(yard.control.unsettled()) == count, f"the broker has {count} tasks")
    return [task["name"] for task in yard.control.unsettled()]


def sync(yard: Yard, worker: Worker) -> None:
    """Wait until the broker has handled all messages of the worker."""
    if "heartbeat" not in worker.cannot:
        worker.send_heartbeat()
    yard.control.counts()
