"""Which functions a worker offers: those of the modules that its owner has named.

A module's name allows the module and everything below it. What an allowed module has merely
imported is not offered with it (a module that imports `subprocess` would offer every program on
the machine), unless the module lists it in `__all__`. Must not know processes.
"""

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from taskyard.errors import UserError

PICKLE_REFUSAL: Final = (
    "pickled functions are not allowed here; start the worker with --allow-pickle if you trust "
    "everybody who can reach its broker"
)


def is_module_allowed(module: str, allow: Sequence[str]) -> bool:
    """`imaging` allows `imaging` and `imaging.colours`, not `imaging2`."""
    return any(module == name or module.startswith(f"{name}.") for name in allow)


def refusal(module: str) -> str:
    return f"module {module} is not allowed here; start the worker with --allow {module}"


def find_function(call: str, allow: Sequence[str]) -> Callable[..., Any]:
    """The function that `module:function` or `module:Class.method` names.

    Raises UserError for what is not offered; what the import itself raises comes through.
    """
    module_name, _, path = call.partition(":")
    if not is_module_allowed(module_name, allow):
        raise UserError(refusal(module_name))
    module = importlib.import_module(module_name)
    function, home = _resolve_path(module, path)
    if not _is_in_allowed_module(module, path, home, allow):
        raise UserError(f"{call} comes from {home}: {refusal(home)}")
    if not callable(function):
        kind = type(function).__name__
        raise UserError(
            f"{call} is not a function, but of type {kind}; give one that can be called"
        )
    found: Callable[..., Any] = function
    return found


def _resolve_path(module: ModuleType, path: str) -> tuple[object, str]:
    """What the path leads to, and the module in which that was defined."""
    found: object = module
    home = module.__name__
    for name in path.split("."):
        # Through classes alone: through a module that it imported one could reach anything.
        if found is not module and not isinstance(found, type):
            raise UserError(
                f"{module.__name__}:{path} leads through {found!r}, which is no class; give a "
                "function of the module, or a method of a class of it"
            )
        found = getattr(found, name)
        home = getattr(found, "__module__", None) or home
    return found, home


def _is_in_allowed_module(module: ModuleType, path: str, home: str, allow: Sequence[str]) -> bool:
    return is_module_allowed(home, allow) or path.partition(".")[0] in getattr(
        module, "__all__", ()
    )
