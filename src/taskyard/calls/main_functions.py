"""Functions of the main script or session: the globals that they share, and kept pickles of them.

A function that travels by value has globals of its own. An initializer that sets a global would set
it for itself alone. With a key, the functions of `__main__` in all pickles of that key have the
same globals. A global keeps the value that it had first, so that later calls do not undo what the
initializer did. This is what a forked process would see.

Pickling a function by value takes thirty times as long as by path, and a loop of `submit` repeats
it. A function is kept pickled if it refers to nothing but modules, what modules define, and values
that can't be changed in place. Each call compares what its names refer to now. Other functions,
for example with a list among their globals, are pickled for each call.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

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


#: Values of these types never change.
_FIXED: Final = (
    *(ModuleType, BuiltinFunctionType, type(None)),
    *(bool, int, float, complex, str, bytes),
)

#: Functions that are kept. A program submits few in turns.
_KEPT_MAX: Final = 16

_MISSING: Final = object()


class _Kept(NamedTuple):
    state: list[Any]
    substitute: Any


class RepeatedFunctions:
    """Substitutes for functions, each with the state of its function when it was pickled."""

    def __init__(self) -> None:
        self._kept: dict[FunctionType, _Kept] = {}

    def substitute(self, function: Any, pickle_once: Callable[[Any], Any]) -> Any:  # noqa: ANN401  # any callable
        """Return a substitute for a function of the main script, or the function itself."""
        if type(function) is not FunctionType or function.__module__ != "__main__":
            return function
        if function.__closure__ or function.__kwdefaults__ or function.__dict__:
            return function
        state = _state(function)
        kept = self._kept.get(function)
        if kept is not None and len(kept.state) == len(state) and all(map(is_, kept.state, state)):
            return kept.substitute
        if not all(map(_is_fixed, state[1:])):
            return function
        if len(self._kept) >= _KEPT_MAX:
            self._kept.clear()
        kept = self._kept[function] = _Kept(state, pickle_once(function))
        return kept.substitute


def _state(function: FunctionType) -> list[Any]:
    """Return the code of a function, its defaults and the globals that it refers to."""
    code, names = function.__code__, function.__globals__
    return [
        *(code, *(function.__defaults__ or ())),
        *(names.get(name, _MISSING) for name in _names(code)),
    ]


@lru_cache(_KEPT_MAX)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code may look up, with names of functions inside it."""
    return tuple(dict.fromkeys(_all_names(code)))


def _all_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_names(constant)


def _is_fixed(value: Any) -> bool:  # noqa: ANN401  # any global
    if value is _MISSING or type(value) in _FIXED:
        return True
    # A class or function that is looked up by its path in the worker.
    module = getattr(value, "__module__", None)
    if module == "__main__" or not isinstance(value, type | FunctionType):
        return False
    return getattr(sys.modules.get(module or ""), value.__qualname__, None) is value
