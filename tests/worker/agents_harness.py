"""Agents in shell, a gate where they wait, and an agent runner without a worker."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from taskyard.core.blobs import Content
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.worker.agents.rules import AgentSettings
from taskyard.worker.agents.runner import AgentRunner
from taskyard.worker.jobs import Job, JobResult
from tests.worker.runner_harness import RealClock, SetClock, a_fifo, read_fifo, turns, wait

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WALL_NS = 2_000_000_000 * SECOND_NS


class Clock(RealClock):
    def wall_ns(self) -> int:
        return WALL_NS


class StillClock(SetClock):
    def wall_ns(self) -> int:
        return WALL_NS


#: Reads a task, sets `id`, `lane` and `payload`, and runs `DO`.
SHELL = r"""
tab=$(printf '\t')
report() { printf '%s\t%s\t%s\n' "$id" "$1" "$2"; }
echo '#hungry'
while IFS= read -r line && [ -n "$line" ]; do
    [ "$line" = '#idle' ] && { eval "$IDLE"; continue; }
    id=${line%%"$tab"*} payload=${line##*"$tab"} lane=${line#*"$tab"} lane=${lane%%"$tab"*}
    eval "$DO"
    echo '#hungry'
done
eval "$AFTER"
"""


def shell(do: str, idle: str = "", after: str = "") -> tuple[str, ...]:
    """Return the command of an agent that runs `do` for every task."""
    words = {"DO": do, "IDLE": idle, "AFTER": after}
    return literal("env", *(f"{name}={text}" for name, text in words.items()), "sh", "-c", SHELL)


def literal(*words: str) -> tuple[str, ...]:
    """Return a command whose braces are not placeholders."""
    return tuple(word.replace("{", "{{").replace("}", "}}") for word in words)


class Gate:
    """Blocks agents at `read _ < gate` until the test opens it."""

    def __init__(self, directory: Path) -> None:
        self.path = a_fifo(directory / "gate")
        # Read and write: then opening never blocks, and the pipe never ends.
        self._descriptor = os.open(self.path, os.O_RDWR)

    def open(self, count: int = 1) -> None:
        os.write(self._descriptor, b"\n" * count)

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def a_pool(
    argv: tuple[str, ...],
    slots: int = 1,
    clock: Clock | StillClock | RealClock | None = None,
    **settings: Any,
) -> Iterator[AgentRunner]:
    pool = AgentRunner(slots, clock or Clock(), AgentSettings(argv, **settings))
    try:
        yield pool
    finally:
        pool.close()


def job(name: bytes = b"t", payload: bytes = b"payload", **terms: Any) -> Job:
    return Job(name, terms.pop("attempt", 1), b"s", payload, **terms)


def results_of(
    argv: tuple[str, ...], *jobs: Job, slots: int = 1, **settings: Any
) -> list[JobResult]:
    """Run jobs, and return their results in the order of their ends."""
    with a_pool(argv, slots, **settings) as pool:
        for one in jobs:
            pool.start(one)
        return turns(pool, len(jobs))


def done(one: Job, text: bytes, output: Content = b"") -> JobResult:
    return JobResult(one, Outcome.DONE, text, output)


def failed(one: Job, reason: bytes, output: Content = b"") -> JobResult:
    return JobResult(one, Outcome.FAILED, reason, output)


def crashed(one: Job, reason: bytes, output: Content = b"") -> JobResult:
    return JobResult(one, Outcome.CRASHED, reason, output)


def refused(one: Job, reason: bytes) -> JobResult:
    return JobResult(one, Outcome.REFUSED, reason)


def until_hungry(pool: AgentRunner) -> None:
    while not any(agent.can_eat() for agent in pool._agents()):  # noqa: SLF001
        wait(pool)
        assert pool.turn() == []


def until_fed(pool: AgentRunner) -> None:
    while True:
        assert pool.turn() == []
        if any(not agent.is_empty() for agent in pool._agents()):  # noqa: SLF001
            return
        wait(pool)


def until_waiting_for(pool: AgentRunner, moment_ns: int) -> None:
    while pool.wake_at_ns() != moment_ns:
        wait(pool)
        assert pool.turn() == []


def read_fifo_while_turning(pool: AgentRunner, fifo: str) -> int:
    """Turn until an agent that was fed has written a number to a FIFO."""
    until_fed(pool)
    return int(read_fifo(fifo))
