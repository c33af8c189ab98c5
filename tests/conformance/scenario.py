"""A scenario is a test that says which dialects it is about and which skills it needs.

Each is run over every combination: what a dialect can't express is skipped, with the driver's own
sentence for it. `SCENARIOS` remembers them all, so that a test can count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pytest
from msgspec import Struct

from tests.conformance.skills import CLIENT_SKILLS, WORKER_SKILLS, Answer, Asked, Job
from tests.conformance.yard import CLIENTS, PATIENCE_SECONDS, WORKERS, Yard
from tests.kit.processes import until

if TYPE_CHECKING:
    from tests.conformance.skills import Client, Worker

#: The other side where a scenario is about one side alone: it can do most.
NATIVE: Final = "dwork-extended"

Test: TypeAlias = Callable[..., None]
Decorator: TypeAlias = Callable[[Test], Test]


class Scenario(Struct):
    """Which combinations there are, and why those that are skipped are."""

    skipped: dict[str, str]
    run: list[str]


SCENARIOS: Final[dict[str, Scenario]] = {}


def pairs(client: Iterable[str] = (), worker: Iterable[str] = ()) -> Decorator:
    """Every client's dialect with every worker's; each side needs these skills."""
    return _over(product(CLIENTS, WORKERS), client, worker)


def each_client(*skills: str) -> Decorator:
    return _over(((kind, NATIVE) for kind in CLIENTS), skills, ())


def each_worker(*skills: str, client: Iterable[str] = ()) -> Decorator:
    return _over(((NATIVE, kind) for kind in WORKERS), client, skills)


def mixed_workers() -> Decorator:
    """Every two workers of different dialects."""

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


# What scenarios are made of.


def given(worker: Worker) -> Job:
    """The next task, which must come."""
    job = worker.take(PATIENCE_SECONDS)
    assert job is not None, f"no task came to the {worker.kind} worker"
    return job


def told(client: Client, asked: Asked) -> Answer:
    """What became of a task, which must be told."""
    answer = client.answer(asked, PATIENCE_SECONDS)
    assert answer is not None, f"the {client.kind} client was told nothing"
    return answer


def success(client: Client, worker: Worker, result: bytes) -> Answer:
    """What this client is told if this worker gives this result."""
    if "results" in client.cannot:
        return Answer(is_done=True)
    return Answer(is_done=True, text=b"" if "results" in worker.cannot else result)


def taken(yard: Yard, count: int = 1) -> list[str]:
    """The names of so many tasks, when the broker has them."""
    until(lambda: len(yard.ruler.unsettled()) == count, f"the broker has {count} tasks")
    return [task["name"] for task in yard.ruler.unsettled()]


def hear_all(yard: Yard, worker: Worker) -> None:
    """Whatever the worker has said was heard."""
    if "heartbeat" not in worker.cannot:
        worker.show_life()
    yard.ruler.counts()
