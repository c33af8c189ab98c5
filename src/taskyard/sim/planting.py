"""How bugs are planted: a function of the real code is swapped for a broken one, and back."""
# ruff: noqa: ANN401 - a broken function takes whatever the sound one takes

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, TypeAlias

Planted: TypeAlias = Callable[[], AbstractContextManager[None]]

#: Every planted bug by name.
BUGS: Final[dict[str, Planted]] = {}


#: Those that the invariants of the core find, because they break no promise in the journal.
BY_INVARIANTS: Final[list[Planted]] = []


#: The workers to hunt with, where only these can have the bug.
KINDS_OF: Final[dict[Planted, tuple[str, ...]]] = {}


def plant(function: Callable[[], Iterator[None]]) -> Planted:
    planted = BUGS[function.__name__] = contextmanager(function)
    return planted


def plant_inside(function: Callable[[], Iterator[None]]) -> Planted:
    """Plant a bug that the invariants must find."""
    planted = plant(function)
    BY_INVARIANTS.append(planted)
    return planted


def plant_in(*kinds: str) -> Callable[[Callable[[], Iterator[None]]], Planted]:
    """Plant a bug that only workers of these kinds can have."""

    def planted_in(function: Callable[[], Iterator[None]]) -> Planted:
        planted = plant(function)
        KINDS_OF[planted] = kinds
        return planted

    return planted_in


@contextmanager
def swapped(owner: Any, name: str, broken: Any) -> Iterator[None]:
    """Another attribute for a while; of a module or a class."""
    sound = vars(owner)[name]
    setattr(owner, name, broken)
    try:
        yield
    finally:
        setattr(owner, name, sound)


@contextmanager
def swapped_item(table: dict[Any, Any], key: Any, broken: Any) -> Iterator[None]:
    """Another entry of a table for a while."""
    sound = table[key]
    table[key] = broken
    try:
        yield
    finally:
        table[key] = sound
