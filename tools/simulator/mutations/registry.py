"""How bugs are planted: a function of the real code is swapped for a broken one, and back."""
# ruff: noqa: ANN401 - a broken function takes whatever the sound one takes

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, TypeAlias

Mutation: TypeAlias = Callable[[], AbstractContextManager[None]]

#: Every planted bug by name.
MUTATIONS: Final[dict[str, Mutation]] = {}


#: Those that the invariants of the core find, because they break no promise in the journal.
INVARIANT_MUTATIONS: Final[list[Mutation]] = []


#: The workers to hunt with, where only these can have the bug.
WORKER_KINDS_OF: Final[dict[Mutation, tuple[str, ...]]] = {}


def mutation(function: Callable[[], Iterator[None]]) -> Mutation:
    planted = MUTATIONS[function.__name__] = contextmanager(function)
    return planted


def mutation_for_invariants(function: Callable[[], Iterator[None]]) -> Mutation:
    """Plant a bug that the invariants must find."""
    planted = mutation(function)
    INVARIANT_MUTATIONS.append(planted)
    return planted


def mutation_for_kinds(*kinds: str) -> Callable[[Callable[[], Iterator[None]]], Mutation]:
    """Plant a bug that only workers of these kinds can have."""

    def planted_in(function: Callable[[], Iterator[None]]) -> Mutation:
        planted = mutation(function)
        WORKER_KINDS_OF[planted] = kinds
        return planted

    return planted_in


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Another attribute for a while; of a module or a class."""
    sound = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, sound)


@contextmanager
def patched_item(table: dict[Any, Any], key: Any, replacement: Any) -> Iterator[None]:
    """Another entry of a table for a while."""
    sound = table[key]
    table[key] = replacement
    try:
        yield
    finally:
        table[key] = sound
