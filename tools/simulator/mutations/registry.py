"""The registry of planted bugs, and the means to replace a function for a while."""
# ruff: noqa: ANN401 - a broken function takes whatever the sound one takes

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, TypeAlias

from taskyard.core import apply, scheduler

Mutation: TypeAlias = Callable[[], AbstractContextManager[None]]

#: Every planted bug by name.
MUTATIONS: Final[dict[str, Mutation]] = {}


#: Bugs that the core's invariants must catch, because they break no promise in the journal.
INVARIANT_MUTATIONS: Final[list[Mutation]] = []


#: Bugs of two brokers over one database.
PAIR_MUTATIONS: Final[list[Mutation]] = []


#: Bugs that only schedules with blobs can show.
BLOB_MUTATIONS: Final[list[Mutation]] = []


#: Kinds of workers to hunt with, if only these can have the bug.
WORKER_KINDS_OF: Final[dict[Mutation, tuple[str, ...]]] = {}

#: The scheduler's decider of each event.
DECIDERS: Final[dict[type, Any]] = scheduler._DECIDERS  # noqa: SLF001 - a bug is planted inside


def apply_table_of(record: type) -> dict[type, Any]:
    """Return the table of `apply` that holds a record."""
    tables: tuple[dict[type, Any], ...] = (apply._APPLY, apply._APPLY_TO_TASKS)  # noqa: SLF001
    return next(table for table in tables if record in table)


def no_op(*_arguments: Any, **_named: Any) -> None:
    """Do nothing."""


def mutation(function: Callable[[], Iterator[None]]) -> Mutation:
    planted = MUTATIONS[function.__name__] = contextmanager(function)
    return planted


def mutation_for_invariants(function: Callable[[], Iterator[None]]) -> Mutation:
    """Register a bug that the invariants must catch."""
    planted = mutation(function)
    INVARIANT_MUTATIONS.append(planted)
    return planted


def mutation_for_pair(function: Callable[[], Iterator[None]]) -> Mutation:
    """Register a bug that only two brokers over one database can have."""
    planted = mutation(function)
    PAIR_MUTATIONS.append(planted)
    return planted


def mutation_for_kinds(*kinds: str) -> Callable[[Callable[[], Iterator[None]]], Mutation]:
    """Register a bug that only workers of these kinds can have."""

    def planted_in(function: Callable[[], Iterator[None]]) -> Mutation:
        planted = mutation(function)
        WORKER_KINDS_OF[planted] = kinds
        return planted

    return planted_in


def mutation_for_blobs(function: Callable[[], Iterator[None]]) -> Mutation:
    """Register a bug that only a broker with blobs can have."""
    planted = mutation_for_kinds("native")(function)
    BLOB_MUTATIONS.append(planted)
    return planted


def mutation_for_blobs_of_pair(function: Callable[[], Iterator[None]]) -> Mutation:
    """Register a bug that only two brokers with blobs in their database can have."""
    planted = mutation_for_blobs(function)
    PAIR_MUTATIONS.append(planted)
    return planted


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute of a module or class inside a `with` block."""
    sound = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, sound)


@contextmanager
def patched_item(table: dict[Any, Any] | list[Any], key: Any, replacement: Any) -> Iterator[None]:
    """Replace an entry of a table inside a `with` block."""
    sound = table[key]
    table[key] = replacement
    try:
        yield
    finally:
        table[key] = sound
