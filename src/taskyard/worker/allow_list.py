"""The functions that `call` tasks may use: functions of the modules named by `--allow`.

A module's name allows the module and everything below it. Of a module, only what it defines itself
or lists in `__all__` can be called: a module that imports `subprocess` would otherwise offer every
program on the machine. Names are looked up in the dictionaries of modules and classes, and modules
on the search paths from before the first call, so a call can't change what the next call finds.
Knows no processes.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from importlib.abc import Loader
from importlib.machinery import BuiltinImporter, ExtensionFileLoader, ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final, NamedTuple

from taskyard.errors import UserError

PICKLE_REFUSAL: Final = (
    "pickled functions are not allowed (start the worker with --allow-pickle if you trust every "
    "client of its broker)"
)


#: Among the modules of a child process: it may unpickle anything.
ANY_PICKLE: Final = "--allow-pickle"

#: Functions that a process remembers.
_FUNCTIONS_KEPT: Final = 1024

#: Each part of a module's name is a level of its lookup.
_NAME_CHARACTERS_MAX: Final = 500

#: These carry the name of the module that defines them. Other objects get one from anywhere.
_DEFINED: Final = (FunctionType, BuiltinFunctionType, MethodType, type)

#: These call something else, which may be of any module.
_INDIRECT: Final = (
    partial,
    MethodWrapperType,
    WrapperDescriptorType,
    MethodDescriptorType,
    ClassMethodDescriptorType,
    ModuleType,
)


def is_module_allowed(module: str, allow: Iterable[str]) -> bool:
    """Return whether a module may be used. `imaging` allows `imaging.colours`, not `imaging2`.

    It also allows `_imaging`, if that is compiled, which only the child process can check.
    """
    return _is_plain_path(module) and any(
        _is_below(module, name) or module == _twin(name) for name in allow
    )


def _is_below(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _twin(name: str) -> str:
    """Return the name of the compiled part of a module: `_json` of `json`."""
    parent, dot, last = name.rpartition(".")
    return f"{parent}{dot}_{last}"


def _is_plain_path(module: str) -> bool:
    """Return whether all parts are names of modules. `__main__` would run a program.

    Finders of other kinds, such as that of ZIP files, would take `/` as the end of a directory.
    """
    return all(
        part.isidentifier() and not (part.startswith("__") and part.endswith("__"))
        for part in module.split(".")
    )


def refusal(module: str) -> str:
    if not _is_plain_path(module):
        return f"module {module} is not allowed"
    return f"module {module} is not allowed (start the worker with --allow {module})"


class AllowList:
    """Finds the functions of one process. Made before its first call."""

    def __init__(self, allow: Sequence[str]) -> None:
        self._allow = tuple(allow)
        self._modules = _Modules(allow)
        self._find = lru_cache(_FUNCTIONS_KEPT)(self._found)

    def find_pickled(self, call: str) -> Callable[..., Any]:
        """Like `find`, for a pickled call. The error names both options."""
        try:
            return self.find(call)
        except UserError as error:
            text = str(error)
            if "--allow " in text:
                text = text.removesuffix(")") + (
                    ", or with --allow-pickle if you trust every client of its broker)"
                )
            raise UserError(text) from None

    def find(self, call: str) -> Callable[..., Any]:
        """Return the function that `module:function` or `module:Class.method` names.

        Raises `UserError` if it is not allowed. Exceptions of the import itself pass through.
        """
        if len(call) > _NAME_CHARACTERS_MAX:
            raise UserError(
                f"name of a function: {len(call):,} characters are not allowed (at most "
                f"{_NAME_CHARACTERS_MAX})"
            )
        return self._find(call)

    def watch_imports(self) -> None:
        """Note what each module has when a call imports it, before that call can change it."""
        sys.meta_path.insert(0, _Watch(self._modules))

    def _module(self, name: str) -> "_Module":
        """Import an allowed module."""
        if not is_module_allowed(name, self._allow):
            raise UserError(refusal(name))
        is_twin = not any(_is_below(name, allowed) for allowed in self._allow)
        found = self._modules.load(name, must_be_compiled=is_twin)
        if not is_module_allowed(found.name, self._allow):
            # `os.path` is `posixpath`. A package may also give its names to foreign modules.
            if name not in self._allow:
                raise UserError(f"{name} is {found.name}: {refusal(found.name)}")
            self._allow += (found.name,)
            self._modules.add_alias(found)
        return found

    def _found(self, call: str) -> Callable[..., Any]:
        """Look up a function."""
        module_name, _, names = call.partition(":")
        module, path = self._module(module_name), names.split(".")
        if any(map(_is_private, path)):
            raise UserError(f"{call}: a name that begins with _ is not allowed")
        found, is_listed = module.member(path[0]), len(path) == 1 and path[0] in module.exported
        owner: type | None = None
        for parent, name in pairwise(path):
            # Through classes only: a module that it imported would lead to anything.
            if not isinstance(found, type):
                raise UserError(
                    f"{call}: {parent} is not a class (use module:function or module:Class.method)"
                )
            owner = found
            found = self._attribute(call, owner, name)
        return self._checked(call, module, found, owner, is_listed=is_listed)

    def _attribute(self, call: str, owner: type, name: str) -> object:
        """Return what a class of an allowed module, or an allowed base, has by a name."""
        self._require_home(call, owner.__module__)
        for base in owner.__mro__:
            if name in vars(base):
                self._require_home(call, base.__module__)
                return vars(base)[name]
        raise AttributeError(f"type object {owner.__name__!r} has no attribute {name!r}")

    def _checked(
        self, call: str, module: "_Module", found: object, owner: type | None, *, is_listed: bool
    ) -> Callable[..., Any]:
        """Return what was found in a module or in a class, if it may be called."""
        is_of_class = isinstance(found, classmethod)
        if owner is None:
            pass
        elif isinstance(found, classmethod | staticmethod):
            found = found.__func__
        elif isinstance(found, MethodDescriptorType | ClassMethodDescriptorType):
            self._require_home(call, found.__objclass__.__module__)
            function: Callable[..., Any] = found.__get__(None, owner)
            return function
        if not callable(found):
            raise UserError(f"{call}: not callable (type {type(found).__name__})")
        if is_listed:
            return found
        if isinstance(found, _INDIRECT):
            raise UserError(
                f"{call}: a {type(found).__name__} is not allowed (unless __all__ lists it)"
            )
        self._require_home(call, _home(found))
        if not isinstance(found, _DEFINED):
            # An object, whose type or function is that of this module, and not of any allowed
            # module.
            own = [name for name in self._allow if is_module_allowed(module.name, [name])]
            if not is_module_allowed(str(_home(found)), own):
                raise UserError(f"{call} is defined in {_home(found)}, not in {module.name}")
        return MethodType(found, owner) if is_of_class else found

    def _require_home(self, call: str, home: object) -> None:
        """Raise `UserError` unless the home of an object is an allowed module in its own place."""
        if type(home) is not str or not is_module_allowed(home, self._allow):
            raise UserError(f"{call} is defined in {home}: {refusal(str(home))}")
        while home not in sys.modules and "." in home:
            home = home.rpartition(".")[0]
        try:
            self._module(home)
        except (UserError, ImportError) as error:
            raise UserError(f"{call} is defined in {home}: {error}") from None


def _is_private(name: str) -> bool:
    return name.startswith("_")


def _home(found: object) -> object:
    """Return the name of the module that defines a callable."""
    if isinstance(found, MethodType):
        found = found.__func__
    home = getattr(found, "__module__", None)
    if home is None and isinstance(found, BuiltinFunctionType):
        owner = found.__self__
        return (owner if isinstance(owner, type) else type(owner)).__module__
    return type(found).__module__ if home is None else home


class _Module(NamedTuple):
    """A module as it was when it had been imported."""

    #: The name that it gives itself.
    name: str
    names: Mapping[str, object]
    exported: frozenset[str]
    #: Where modules below it are searched. None: it is no package.
    path: Sequence[str] | None
    is_compiled: bool
    module: ModuleType

    def member(self, name: str) -> object:
        """Return what a module has by a name. Listed names may be made at first use."""
        if name in self.names:
            return self.names[name]
        if name in self.exported:
            return getattr(self.module, name)
        raise AttributeError(f"module {self.name!r} has no attribute {name!r}")


def _described(name: str, module: ModuleType, path: Iterable[str] | None) -> _Module:
    """Note what a module has now."""
    # Another object if the module has replaced itself.
    names = getattr(module, "__dict__", {})
    loader = getattr(names.get("__spec__"), "loader", None)
    listed = names.get("__all__", ())
    return _Module(
        str(names.get("__name__", name)),
        {**names},
        frozenset(listed if isinstance(listed, list | tuple) else ()),
        None if path is None else list(path),
        _is_compiled(loader),
        module,
    )


def _is_compiled(loader: object) -> bool:
    return loader is BuiltinImporter or isinstance(loader, ExtensionFileLoader)


class _Modules:
    """Imports modules, by the search paths from before the first call."""

    def __init__(self, allow: Iterable[str]) -> None:
        tops = {name.partition(".")[0] for name in allow}
        self.tops = tops | {_twin(top) for top in tops}
        #: A call may change the directory.
        self._path = [str(Path(one).absolute()) if Path(one).is_dir() else one for one in sys.path]
        self._known: dict[str, _Module] = {}
        #: What calls have imported, from anywhere: its file, and what it was.
        self.imported: dict[str, tuple[str | None, _Module]] = {}
        self._add_new(frozenset())

    def add_alias(self, found: _Module) -> None:
        """Know a module by the name that it gives itself, too."""
        self._known.setdefault(found.name, found)
        self.tops.add(found.name.partition(".")[0])

    def load(self, name: str, *, must_be_compiled: bool = False) -> _Module:
        """Return a module. Raises what its import raises, and `UserError` if it is another
        module."""
        if name not in self._known:
            parent = name.rpartition(".")[0]
            path = self.load(parent).path if parent else self._path
            if path is None:
                text = f"No module named {name!r}; {parent!r} is not a package"
                raise ModuleNotFoundError(text, name=name)
            # The import of its parent may have imported it.
            if name not in self._known:
                spec = _find_spec(name, path)
                if must_be_compiled and spec is not None and not _is_compiled(spec.loader):
                    raise UserError(refusal(name))
                self._add(name, spec)
        if must_be_compiled and not self._known[name].is_compiled:
            raise UserError(refusal(name))
        return self._known[name]

    def _add(self, name: str, spec: ModuleSpec | None) -> None:
        module = sys.modules.get(name)
        if name in self.imported or module is not None:  # a call has imported it
            self._known[name] = self._imported_before(name, module, spec)
        elif spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        else:
            before = frozenset(sys.modules)
            module = _import(spec)
            self._add_new(before)
            parent, _, last = name.rpartition(".")
            # As `import` does, but a call must not replace a variable of the package.
            owner = self._known[parent].module if parent else None
            if owner is not None and last not in getattr(owner, "__dict__", {}):
                setattr(owner, last, module)

    def _imported_before(
        self, name: str, module: ModuleType | None, spec: ModuleSpec | None
    ) -> _Module:
        """Return what a module was when a call had imported it, if that is the module of `spec`."""
        own = getattr(getattr(module, "__spec__", None), "origin", None)
        origin, found = self.imported.get(name, (own, None))
        if origin != (None if spec is None else spec.origin):
            raise UserError(f"module {name} is not that of the worker's search path ({origin})")
        if found is None:
            raise UserError(f"module {name} was not imported, but made by a call")
        return found._replace(path=None if spec is None else spec.submodule_search_locations)

    def _add_new(self, before: frozenset[str]) -> None:
        """Add the modules that were not there before."""
        for name, module in [*sys.modules.items()]:
            if name not in before and name.partition(".")[0] in self.tops and module is not None:
                path = getattr(module, "__dict__", {}).get("__path__")
                self._known[name] = _described(name, module, path)


class _Watch:
    """Finds modules as the finders after it do, and notes what each has when it is imported."""

    def __init__(self, modules: _Modules) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = None
        if name.partition(".")[0] in self._modules.tops:
            spec = _find_spec(name, path, target)
        if spec is not None and spec.loader is None:
            # A namespace package has no code, and nothing of its own.
            empty = _Module(name, {}, frozenset(), None, is_compiled=False, module=ModuleType(name))
            self._modules.imported.setdefault(name, (spec.origin, empty))
        elif spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _WatchedLoader(spec.loader, self._modules.imported)
        return spec


class _WatchedLoader(Loader):
    """Loads a module by another loader, which it leaves as that of the module."""

    def __init__(self, loader: Any, imported: dict[str, tuple[str | None, _Module]]) -> None:  # noqa: ANN401  # any with its methods
        self._loader = loader
        self._imported = imported

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of a loader
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        spec.loader = self._loader
        try:
            module: ModuleType | None = self._loader.create_module(spec)
        finally:
            spec.loader = self
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        name = module.__name__ if spec is None else spec.name
        # It may have replaced itself.
        found = _described(name, sys.modules.get(name, module), None)
        # The first time: a call may load it again.
        self._imported.setdefault(name, (None if spec is None else spec.origin, found))


def _find_spec(
    name: str, path: Sequence[str] | None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """Find a module as `import` does, but on this path."""
    for finder in sys.meta_path:
        find: Callable[..., ModuleSpec | None] | None = getattr(finder, "find_spec", None)
        if find is None or isinstance(finder, _Watch):
            continue
        if (spec := find(name, path, target)) is not None:
            return spec
    return None


def _import(spec: ModuleSpec) -> ModuleType:
    """Import a module that was found."""
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    return sys.modules[spec.name]
