"""Pickles functions and classes by value, as cloudpickle does, and repairs two of its gaps.

A class that comes back to the process that defined it stays as it is there. cloudpickle would
replace its methods by copies with other globals. A function with a cache of `functools` travels
with its function and an empty cache. `main_functions` repairs a third gap.

Imports cloudpickle, so it is imported at first use only. Loading needs no code of this module but
the functions that its pickles name.
"""

import functools
import io
import sys
import weakref
from collections.abc import Callable
from pickle import PickleBuffer
from types import CodeType, FunctionType
from typing import Any, Final

import cloudpickle

from taskyard.calls import main_functions
from taskyard.errors import PeerError

#: Items of what `Pickler.reducer_override` returns for a class or a function by value: how to make
#: it, with which arguments, its state, and the function that sets the state.
_STATE_ITEMS: Final = 6

#: The version of Python whose bytecode this process runs.
_PYTHON: Final = sys.version_info[:2]

#: Classes that other processes defined. Each call sets their state anew.
_foreign_classes: weakref.WeakSet[type] = weakref.WeakSet()

#: Classes that this process defined and has pickled.
_own_classes: weakref.WeakSet[type] = weakref.WeakSet()


def dumps(
    value: object, protocol: int, buffer_callback: Callable[[PickleBuffer], object] | None = None
) -> bytes:
    """Pickle a value, with functions and classes by value that can't be imported."""
    with io.BytesIO() as file:
        _Pickler(file, protocol, buffer_callback=buffer_callback).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401  # any object of a user
        if isinstance(obj, functools._lru_cache_wrapper):  # noqa: SLF001  # its only name
            return make_cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, CodeType):
            _, arguments = self.dispatch_table[CodeType](obj)
            return make_code, (*_PYTHON, *arguments)
        reduced = super().reducer_override(obj)
        if not isinstance(reduced, tuple) or len(reduced) != _STATE_ITEMS:
            return reduced
        if not isinstance(obj, type):
            return main_functions.share(obj, reduced) if isinstance(obj, FunctionType) else reduced
        if obj not in _foreign_classes:
            _own_classes.add(obj)
        make, args, state, items, pairs, set_state = reduced
        return make, args, (set_state, state), items, pairs, set_class_state


def set_class_state(class_: type, state: tuple[Callable[[type, Any], Any], Any]) -> type:
    """Set the state of a class by value, unless this process defined it."""
    if class_ not in _own_classes:
        _foreign_classes.add(class_)
        set_state, content = state
        set_state(class_, content)
    return class_


def make_code(major: int, minor: int, *arguments: Any) -> CodeType:  # noqa: ANN401  # those of its constructor
    """Return the code of a function. Raise PeerError if it is of another version of Python."""
    if (major, minor) != _PYTHON:
        here = "{}.{}".format(*_PYTHON)
        raise PeerError(
            f"function by value: of Python {major}.{minor}, but this process runs {here} (use one "
            "version on both sides, or functions of modules)"
        )
    return CodeType(*arguments)


def make_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """Return a function with an empty cache of these parameters."""
    cached: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return cached
