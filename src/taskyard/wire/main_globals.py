"""Globals of the main script or session that functions by value share where they are called.

A function that travels by value has globals of its own. An initializer that sets a global would set
it for itself alone. With a key, the functions of `__main__` in all pickles of that key have the
same globals. A global keeps the value that it had first, so that later calls do not undo what the
initializer did. This is what a forked process would see.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

_key: ContextVar[str] = ContextVar("taskyard_globals_key", default="")

#: By key, in a process that calls functions.
_globals: dict[str, dict[str, Any]] = {}


@contextmanager
def shared_globals(key: str) -> Iterator[None]:
    """Have functions that are pickled by value meanwhile share their globals."""
    before = _key.set(key)
    try:
        yield
    finally:
        _key.reset(before)


def share(function: FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return how to pickle a function, given how cloudpickle does it."""
    key = _key.get()
    if not key or function.__module__ != "__main__":
        return reduced
    make, args, state, items, pairs, set_state = reduced
    return make_sharing, (key, make, args), (set_state, state), items, pairs, set_sharing_state


def make_sharing(key: str, make: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """Make a function by value with the globals of a key."""
    code, base_globals, *more = args
    function: Callable[..., Any] = make(code, _globals.setdefault(key, base_globals), *more)
    return function


def set_sharing_state(function: FunctionType, state: tuple[Callable[..., Any], Any]) -> None:
    """Set the state of a function by value, except for globals that are there."""
    set_state, (attributes, slots) = state
    known, given = function.__globals__, slots["__globals__"]
    slots["__globals__"] = {name: given[name] for name in given if name not in known}
    set_state(function, (attributes, slots))
