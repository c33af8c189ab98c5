"""Names by content: a hash of a function's code, of all that it uses, and of its arguments.

Equal calls have equal names in every process with the same version of Python, so that a later run
of a program finds the tasks of an earlier one. The name has a hash for each of the three parts:
names that differ show which part changed. Imports no client and no futures.

The code of a function is its bytecode: neither comments nor places in a file are in it. Code of
installed packages counts by its name.
"""

from __future__ import annotations

import copyreg
import inspect
import marshal
import re
import sys
import sysconfig
from enum import EnumMeta
from hashlib import blake2b
from operator import itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from taskyard.client.functions import function_name
from taskyard.errors import NotEncodable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

#: Bytes of a hash inside.
_DIGEST_BYTES: Final = 20

#: Hexadecimal digits of the parts in a name. A function has few versions and many arguments.
_CODE_DIGITS: Final = 10
_ARGUMENTS_DIGITS: Final = 20

#: A name by content: the function, its code, what it uses, the arguments.
_NAME: Final = re.compile(r"(.+)-([0-9a-f]{10})-([0-9a-f]{10})-([0-9a-f]{20})")

#: Characters of a campaign that is named after a function.
_CAMPAIGN_CHARACTERS_MAX: Final = 80

#: Code below these directories changes with a version of its package alone.
_INSTALLED: Final = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

#: Types whose values `marshal` encodes in one way only, without references.
_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_MARSHAL_VERSION: Final = 0

#: Members of a class that are a part of its content, besides its functions.
_MEMBERS: Final = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)

#: The protocol of `__reduce_ex__`, for objects of other types.
_REDUCE_PROTOCOL: Final = 4


class ContentName(NamedTuple):
    """The parts of a name by content."""

    function: str
    code: str
    uses: str
    arguments: str

    def __str__(self) -> str:
        return "-".join(self)

    @classmethod
    def of(cls, name: str) -> ContentName | None:
        """Return the parts of a task's name, or None if it is not by content."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(*found.groups())

    def parts_to_compare(self) -> tuple[str, str]:
        """Return parts of names to compare with: with the same arguments, or with the same code."""
        return f"-{self.arguments}", f"{self.function}-{self.code}-{self.uses}-"

    def nearest(self, names: Sequence[str]) -> ContentName | None:
        """Return the last call of the function before this one in a list, or the first after it."""
        calls = [one for one in map(ContentName.of, names) if one is not None]
        calls = [one for one in calls if one.function == self.function]
        place = calls.index(self) if self in calls else len(calls)
        others = [*reversed(calls[:place]), *calls[place + 1 :]]
        return others[0] if others else None

    def difference(self, other: ContentName) -> str:
        """Return a clause on the part that differs from another name."""
        if self.arguments != other.arguments:
            return "named by content, and no other task of its function has its arguments"
        both = {
            "the function's code": self.code != other.code,
            "what the function uses": self.uses != other.uses,
        }
        changed = " and ".join(part for part, is_other in both.items() if is_other)
        return f"named by content, and unlike {other} in {changed}"


class ContentKeys:
    """The names of a function's calls by their content.

    A `version` stands for the code of the function and all that it uses.
    """

    def __init__(self, function: Callable[..., Any], version: object = None) -> None:
        """Hash a function. Raises `NotEncodable` if a part has no content that can be compared."""
        self._name = function_name(function).replace("/", "-")
        plain = function if isinstance(function, FunctionType) else _wrapped(function)
        if version is not None:
            code, uses = _Digester("version").of(("version", version)), b""
        elif isinstance(plain, FunctionType) and _is_user_code(plain):
            digester = _Digester(f"function {self._name}")
            code, uses = digester.of(plain.__code__), digester.uses(plain, is_root=True)
        else:
            code, uses = _Digester(f"function {self._name}").of(function), b""
        self._code, self._uses = code, uses
        self._prefix = (self._name, _digits(code, _CODE_DIGITS), _digits(uses, _CODE_DIGITS))
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):  # some built-in functions have none
            self._signature = None

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, str]:
        """Return the name of a call, and a token that only those who know the call can compute.

        Arguments are compared by the parameters that they are bound to. Raises `NotEncodable`.
        """
        digest = self._arguments(args, kwargs)
        token = _hash(b"token", self._code, self._uses, digest)
        name = ContentName(*self._prefix, _digits(digest, _ARGUMENTS_DIGITS))
        return str(name), token.hex()

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        named = self._bound(args, kwargs)
        parts = [(name, _Digester(f"argument {name!r}").of(value)) for name, value in named]
        return _hash(
            b"arguments", *(part for name, digest in parts for part in (_text(name), digest))
        )

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        if self._signature is not None:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError:  # the call will raise it
                pass
            else:
                bound.apply_defaults()
                return bound.arguments.items()
        return [*((str(place), one) for place, one in enumerate(args)), *kwargs.items()]


def digest_of_calls(calls: Sequence[tuple[Any, ...]]) -> str:
    """Return one hash of calls, for programs that can't declare a version of their functions.

    A variable of a function that has no content to compare counts by its type. Raises
    `NotEncodable` for an argument without one.
    """
    return _Digester("a call", is_lenient=True).of([*calls]).hex()


def campaign_of(function: Callable[..., Any]) -> str:
    """Return the campaign of a function's calls by content: its qualified name."""
    inner = getattr(function, "func", function)  # of a partial
    kind = type(inner)
    name = getattr(inner, "__qualname__", None) or kind.__qualname__
    module = getattr(inner, "__module__", None) or kind.__module__
    whole = name if module == "__main__" else f"{module}.{name}"
    return re.sub(r"[^\w.-]+", "-", whole).strip("-")[-_CAMPAIGN_CHARACTERS_MAX:]


def _hash(*parts: bytes) -> bytes:
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


def _text(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _digits(digest: bytes, count: int) -> str:
    return _hash(digest).hex()[:count]


class _NoContent(NotEncodable):
    """A variable of a function has no content to compare. The text names it."""


class _Digester:
    """Hashes values, whatever the order of sets and dicts. `what` names the value in errors."""

    def __init__(self, what: str, *, is_lenient: bool = False) -> None:
        self._what = what
        #: Whether a variable of a function may have no content.
        self._is_lenient = is_lenient
        #: Values that are being hashed, with their depths: they may contain themselves.
        self._open: dict[int, int] = {}
        #: Hashes by identity, with the values: another one must not get an old identity.
        self._known: dict[int, tuple[bytes, object]] = {}

    def of(self, value: Any) -> bytes:  # noqa: ANN401  # any value of a user
        """Return the hash of a value. Raises `NotEncodable`."""
        kind = type(value)
        if kind in _PLAIN:
            return _hash(marshal.dumps(value, _MARSHAL_VERSION))
        known = self._known.get(id(value))
        if known is not None:
            return known[0]
        depth = self._open.get(id(value))
        if depth is not None:
            return _hash(b"inside", str(len(self._open) - depth).encode())
        self._open[id(value)] = len(self._open)
        try:
            digest = self._content(kind, value)
        except RecursionError as error:
            raise NotEncodable(f"key of {self._what}: too deeply nested") from error
        finally:
            del self._open[id(value)]
        self._known[id(value)] = digest, value
        return digest

    def _content(self, kind: type, value: Any) -> bytes:  # noqa: ANN401, PLR0911  # a type each
        if kind in (list, tuple):
            return self._sequence(kind, value)
        if kind is dict:
            return self._dict(value)
        if kind in (set, frozenset):
            return _hash(b"set", *sorted(map(self.of, value)))
        if kind is FunctionType:
            return self._function(value)
        if kind is CodeType:
            return self._code(value)
        if kind is MethodType:
            return _hash(b"method", self.of(value.__func__), self.of(value.__self__))
        if kind is ModuleType:
            return _hash(b"module", _text(value.__name__))
        if isinstance(value, type):
            return self._class(value)
        return self._object(kind, value)

    def _sequence(self, kind: type, value: Sequence[Any]) -> bytes:
        tag = kind.__name__.encode()
        if _PLAIN.issuperset(map(type, value)):
            return _hash(tag, marshal.dumps([*value], _MARSHAL_VERSION))
        return _hash(tag, *map(self.of, value))

    def _dict(self, value: dict[Any, Any]) -> bytes:
        keys = sorted([(self.of(key), key) for key in value], key=itemgetter(0))
        return _hash(
            b"dict", *(one for digest, key in keys for one in (digest, self.of(value[key])))
        )

    # Code.

    def _function(self, function: FunctionType) -> bytes:
        if not _is_user_code(function):
            return _hash(b"installed", _text(f"{function.__module__}:{function.__qualname__}"))
        return _hash(b"function", self.of(function.__code__), self.uses(function))

    def _code(self, code: CodeType) -> bytes:
        facts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        table = getattr(code, "co_exceptiontable", b"")
        return self.of((b"code", facts, names, code.co_code, table, code.co_consts))

    def uses(self, function: FunctionType, *, is_root: bool = False) -> bytes:
        """Return the hash of defaults, closure and globals of a function.

        The code of the root is no part of it, even if its helpers call it.
        """
        if is_root:
            self._open[id(function)] = len(self._open)
        names = _names_used(function.__code__)
        parts = [
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            *(self._variable(*one, names) for one in _closure_of(function)),
        ]
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if value is not function:
                parts += [_text(name), self._variable(name, value, names)]
        return _hash(b"uses", *parts)

    def _variable(self, name: str, value: object, names: set[str]) -> bytes:
        if isinstance(value, ModuleType):
            return self._module(value, names)
        try:
            return self.of(value)
        except _NoContent:
            raise
        except NotEncodable as error:
            kind = type(value).__name__
            if self._is_lenient:
                return _hash(b"no content", _text(kind))
            raise _NoContent(
                f"key of {self._what}: it uses {name!r}, of type {kind}, which has no content to "
                "compare (make it an argument or local, or declare a version= of the function)"
            ) from error

    def _module(self, module: ModuleType, names: set[str]) -> bytes:
        """Return the hash of a module's members of these names. Of an installed one, its name."""
        parts = [_text(module.__name__)]
        if _is_user_module(module) and id(module) not in self._open:
            self._open[id(module)] = len(self._open)
            for name in sorted(names & vars(module).keys()):
                parts += [_text(name), self._variable(name, vars(module)[name], names)]
            del self._open[id(module)]
        return _hash(b"module", *parts)

    def _class(self, kind: type) -> bytes:
        where = _text(f"{kind.__module__}:{kind.__qualname__}")
        if not _is_user_code(kind):
            return _hash(b"installed", where)
        parts = [_text(kind.__qualname__), *map(self.of, kind.__bases__)]
        if isinstance(kind, EnumMeta):
            members: Iterable[Any] = kind
            parts.append(self.of([(one.name, one.value) for one in members]))
        for name, member in sorted(vars(kind).items()):
            function = _unwrapped(member)
            is_dunder = name.startswith("__") and name.endswith("__")
            if isinstance(function, FunctionType | type) or (
                isinstance(member, _MEMBERS) and not is_dunder
            ):
                parts += [_text(name), self._variable(name, function, set())]
        return _hash(b"class", *parts)

    # Objects.

    def _object(self, kind: type, value: Any) -> bytes:  # noqa: ANN401  # any value of a user
        if kind.__module__.startswith("taskyard.") and hasattr(value, "result_reference"):
            return _hash(b"result", _text(value.result_reference()[0]))
        if hasattr(value, "__wrapped__"):  # a cached function, or a task
            return _hash(b"wrapped", self.of(value.__wrapped__))
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind in (numpy.ndarray, numpy.memmap):
            return self._array(numpy, value)
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced = reduce(value) if reduce else value.__reduce_ex__(_REDUCE_PROTOCOL)
        except Exception as error:
            raise NotEncodable(
                f"key of {self._what}: a value of type {kind.__name__} has no content to compare "
                f"({error})"
            ) from error
        if isinstance(reduced, str):
            module = getattr(value, "__module__", None) or kind.__module__
            return _hash(b"global", _text(f"{module}:{reduced}"))
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        items = None if items is None else [*items]
        pairs = None if pairs is None else {**dict(pairs)}
        return _hash(b"object", *map(self.of, (make, args, state, items, pairs)))

    def _array(self, numpy: Any, array: Any) -> bytes:  # noqa: ANN401  # numpy has no types here
        facts = self.of((array.dtype.str, array.dtype.descr, array.shape))
        if array.dtype.hasobject:
            return _hash(b"array", facts, self.of(array.tolist()))
        hashed = blake2b(digest_size=_DIGEST_BYTES)
        if array.nbytes:
            hashed.update(numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8))
        return _hash(b"array", facts, hashed.digest())


def _wrapped(function: Any) -> Any:  # noqa: ANN401  # any callable
    """Return the function of a task or of a cached function, else the callable itself."""
    return getattr(function, "__wrapped__", function)


def _names_used(code: CodeType) -> set[str]:
    nested = [_names_used(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*nested)


def _closure_of(function: FunctionType) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # it is not assigned yet
            found.append((name, None))
    return found


def _unwrapped(member: Any) -> Any:  # noqa: ANN401  # any member of a class
    """Return the function of a method or property."""
    return getattr(member, "__func__", None) or getattr(member, "fget", None) or member


def _is_user_module(module: ModuleType) -> bool:
    """Return whether a module is not of an installed package, nor built in."""
    if module.__name__.partition(".")[0] == "taskyard":
        return False
    file: str | None = getattr(module, "__file__", None)
    if file is not None:
        return not file.startswith(_INSTALLED)
    spec = getattr(module, "__spec__", None)  # none of `__main__` or of a module that code made
    return spec is None or spec.origin not in ("built-in", "frozen")


def _is_user_code(code: FunctionType | type) -> bool:
    """Return whether a function or class is not of an installed package, or has no import path."""
    module = sys.modules.get(code.__module__ or "")
    if module is None or _is_user_module(module):
        return True
    found: object = module
    for name in code.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not code and _wrapped(found) is not code
