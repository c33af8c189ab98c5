"""The functions that `call` tasks may use: those of the modules named by `--allow`.

A module's name allows the module and everything below it. A function that an allowed module has
only imported is refused, unless the module lists it in `__all__`: a module that imports
`subprocess` would otherwise offer every program on the machine. Knows no processes.
"""

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from taskyard.errors import UserError

PICKLE_REFUSAL: Final = (
    "pickled functions are not allowed (start the worker with --allow-pickle if you trust every "
    "client of its broker)"
)


#: Among the modules of a child process: it may unpickle anything.
ANY_PICKLE: Final = "--allow-pickle"


def is_module_allowed(module: str, allow: Sequence[str]) -> bool:
    """Return whether a module may be used. `imaging` allows `imaging.colours`, not `imaging2`."""
    return any(module == name or module.startswith(f"{name}.") for name in allow)


def refusal(module: str) -> str:
    return f"module {module} is not allowed (start the worker with --allow {module})"


def find_pickled(call: str, allow: Sequence[str]) -> Callable[..., Any]:
    """Like `find_function`, for a pickled call. The error names both options."""
    try:
        return find_function(call, allow)
    except UserError as error:
        text = str(error)
        if "--allow " in text:
            text = text.removesuffix(")") + (
                ", or with --allow-pickle if you trust every client of its broker)"
            )
        raise UserError(text) from None


def find_function(call: str, allow: Sequence[str]) -> Callable[..., Any]:
    """Return the function that `module:function` or `module:Class.method` names.

    Raises `UserError` if it is not allowed. Exceptions of the import itself pass through.
    """
    module_name, _, path = call.partition(":")
    if not is_module_allowed(module_name, allow):
        raise UserError(refusal(module_name))
    module = importlib.import_module(module_name)
    function, home = _resolve_path(module, path)
    if not _is_in_allowed_module(module, path, home, allow):
        raise UserError(f"{call} is defined in {home}: {refusal(home)}")
    if not callable(function):
        kind = type(function).__name__
        raise UserError(f"{call}: not callable (type {kind})")
    found: Callable[..., Any] = function
    return found


def _resolve_path(module: ModuleType, path: str) -> tuple[object, str]:
    """Return the object at a path in a module, and the module that defines it."""
    found: object = module
    home = module.__name__
    for name in path.split("."):
        # Through classes only: a module that it imported would lead to anything.
        if found is not module and not isinstance(found, type):
            raise UserError(
                f"{module.__name__}:{path}: {found!r} is not a class (use module:function or "
                "module:Class.method)"
            )
        found = getattr(found, name)
        home = getattr(found, "__module__", None) or home
    return found, home


def _is_in_allowed_module(module: ModuleType, path: str, home: str, allow: Sequence[str]) -> bool:
    return is_module_allowed(home, allow) or path.partition(".")[0] in getattr(
        module, "__all__", ()
    )
