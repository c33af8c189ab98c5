"""Plain pickles: calls of one function by its import path, with arguments that are plain data.

Loading one runs no code but that of Python's own types: the opcodes are those of data, and every
global but the function is one of a fixed list. The function itself is found by the caller's rule,
and nothing in the pickle can call it or change it. So a worker may load plain pickles of anyone.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Classes that plain data needs, whose calls take no more memory than their arguments, and the
#: function that inserts the result of another task. Not `slice`: with a range, a pickle could fill
#: a list without end. Sets, bytes and byte arrays have opcodes of their own.
_HARMLESS: Final = frozenset(
    {
        ("builtins", "complex"),
        ("builtins", "range"),
        ("datetime", "date"),
        ("datetime", "datetime"),
        ("datetime", "time"),
        ("datetime", "timedelta"),
        ("datetime", "timezone"),
        ("decimal", "Decimal"),
        ("taskyard.wire.inputs", "resolve"),
    }
)

#: What Python's pickler writes for plain data. No BUILD, NEWOBJ or EXT, which make and change
#: objects, and no PUT: its number is a size of memory.
_OPCODES: Final = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4"),
        *("BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("NEXT_BUFFER", "READONLY_BUFFER"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
        *("EMPTY_SET", "ADDITEMS", "FROZENSET"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("STACK_GLOBAL", "REDUCE"),
    }
)

_GETS: Final = ("BINGET", "LONG_BINGET")

#: The opcodes STACK_GLOBAL, REDUCE, NEWOBJ and NEWOBJ_EX. Other bytes may look like them.
_GLOBAL: Final = b"\x93"
_REDUCE: Final = b"R"
_NEWOBJ: Final = b"\x81"
_NEWOBJ_EX: Final = b"\x92"

#: Part of the names of the main script.
_MAIN_MARK: Final = b"_main__"


#: Stand for a harmless class and for the function of a call in `_check`.
_CLASS: Final = object()
_FUNCTION: Final = object()


class NotPlain(UserError):
    """A pickle that has more than plain data."""


def is_plain_call(pickled: bytes) -> bool:
    """Return whether our pickle of a call is plain. Most have one global and make no objects."""
    if _MAIN_MARK in pickled:
        return False
    makes = _REDUCE in pickled or _NEWOBJ in pickled or _NEWOBJ_EX in pickled
    if not makes and pickled.count(_GLOBAL) == 1:
        return True
    try:
        _Probe(pickled).load()
    except Exception:  # noqa: BLE001  # whatever it is, the pickle has more than plain data
        return False
    return True


class _Probe(pickle.Unpickler):
    """Loads our own pickle of a call, without its function, in a tenth of the time of `_check`."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled), buffers=repeat(b""))
        self._has_function = False

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # see its base
        if ((module, name) in _HARMLESS) is not self._has_function:
            raise NotPlain(name)
        if self._has_function:
            return _nothing if name == "resolve" else super().find_class(module, name)
        self._has_function = True
        return _FUNCTION  # which can't be called


def _nothing(*_: object) -> None:
    """Stand for the result of another task."""


def looks_pickled(result: bytes) -> bool:
    """Return whether a result is a pickle, or one whose large parts are values: never JSON."""
    return result.startswith(b"\x80") or (result.startswith(b'{"pickle":') and b"\n" in result)


def _check(pickled: bytes | memoryview) -> list[tuple[Any, Any]]:
    """Raise `NotPlain` for more than plain data. Return the globals.

    Only the first of them may be none of the harmless ones.
    """
    found: list[tuple[Any, Any]] = []
    #: The two latest texts, which name a global, and the memo.
    recent: tuple[Any, Any] = (None, None)
    memo: list[Any] = []
    callables = 0
    try:
        for opcode, value, _ in pickletools.genops(io.BytesIO(pickled)):
            name = opcode.name
            pushed: object = value if isinstance(value, str) else None
            if name not in _OPCODES:
                raise NotPlain(f"pickle has more than plain data ({name})")
            if name == "MEMOIZE":
                memo.append(recent[1])
                continue
            if name in _GETS:
                pushed = memo[int(value or 0)]
            elif name == "STACK_GLOBAL":
                pushed = _CLASS if recent in _HARMLESS else _FUNCTION
                if pushed is _FUNCTION and found:
                    raise _refusal(recent)
                found.append(recent)
            callables += (pushed is _CLASS) - (name == "REDUCE")
            if callables < 0 or (pushed is _FUNCTION and name in _GETS):
                raise NotPlain("pickle has more than plain data (another use of its function)")
            recent = recent[1], pushed
    except (ValueError, IndexError) as error:
        raise NotPlain(f"pickle is damaged: {error}") from error
    return found


def _refusal(name: tuple[Any, Any]) -> NotPlain:
    return NotPlain(
        f"{name[0]}.{name[1]}: only plain data is allowed beside the function (start the worker "
        "with --allow-pickle if you trust every client of its broker)"
    )


class _Function:
    """The function of a call that is being loaded. The pickle can neither call nor change it."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class _Unpickler(pickle.Unpickler):
    """Finds the globals that were checked before, in their order, and no others."""

    def __init__(
        self,
        pickled: bytes | memoryview,
        buffers: Sequence[memoryview],
        names: list[tuple[str, str]],
        function: _Function | None,
    ) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self._names = iter(names)
        self._function = function

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # see its base
        if next(self._names, None) != (module, name):
            raise NotPlain("pickle has more than plain data (a name that is made)")
        found, self._function = self._function, None
        return super().find_class(module, name) if found is None else found


class PlainLoader:
    """Loads plain pickles of calls, whose functions it finds by `find`, and of results."""

    def __init__(self, find: Callable[[str], Callable[..., Any]]) -> None:
        """`find` returns the function "module:name", or raises `UserError`."""
        self._find = find
        #: 1 while a call is loaded. Results of other tasks are loaded inside that.
        self._depth = 0

    def load_call(self, load: Callable[[], Any]) -> tuple[Any, Any, Any]:
        """Return the function and the arguments of a call. `load` has to use `loads`."""
        self._depth = 1
        try:
            call = load()
        finally:
            self._depth = 0
        if type(call) is not tuple or [*map(type, call)] != [_Function, tuple, dict]:
            raise NotPlain("pickle is not a call of a function with arguments")
        return call[0].function, call[1], call[2]

    def loads(self, pickled: bytes | memoryview, buffers: Sequence[memoryview] = ()) -> Any:  # noqa: ANN401  # any value of a user
        """Load a plain pickle. Raises `NotPlain`, and what finding the function raises."""
        names = _check(pickled)
        is_call = self._depth == 1 and bool(names) and names[0] not in _HARMLESS
        if not is_call and not _HARMLESS.issuperset(names):
            raise _refusal(names[0])
        function = _Function(self._find(":".join(map(str, names[0])))) if is_call else None
        self._depth += 1
        try:
            return _Unpickler(pickled, buffers, names, function).load()
        finally:
            self._depth -= 1
