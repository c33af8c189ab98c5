"""Plain pickles: calls of one function by its import path, with arguments that are plain data.

Loading such a pickle runs no code but that of Python's own types: the opcodes are those of data,
and every global but the function is one of a fixed list. The function itself is found by the
caller's rule, and nothing in the pickle can call it or change it. So a worker may load plain
pickles of anyone.
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
        ("taskyard.calls.inputs", "resolve"),
    }
)

#: Inserts the result of another task. It is a Python function: its globals lead to all modules, so
#: no argument may be this function itself.
_RESOLVE: Final = ("taskyard.calls.inputs", "resolve")

#: The opcodes STACK_GLOBAL, REDUCE, NEWOBJ and NEWOBJ_EX. Other bytes may look like them.
_GLOBAL: Final = b"\x93"
_REDUCE: Final = b"R"
_NEWOBJ: Final = b"\x81"
_NEWOBJ_EX: Final = b"\x92"

#: Part of the names of the main script.
_MAIN_MARK: Final = b"_main__"


#: Nesting. Python's pickler itself fails at about this.
_DEPTH_MAX: Final = 1000

#: The parts of keys and items of sets, which are hashed: so many, and more for each byte of the
#: pickle. A tuple that has itself many times, by the memo, is hashed each time.
_PARTS_MAX: Final = 1_000_000
_PARTS_PER_BYTE: Final = 16

#: The characters and the 64-bit words of an argument. Long numbers take the square of their length.
_TEXT_MAX: Final = 4096
_WORDS_MAX: Final = 100

#: The parts of what is never a key.
_NO_KEY: Final = 1 << 62


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
    """Loads our own pickle of a call, without its function, in a tenth of the time of `_Check`."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled), buffers=repeat(b""))
        self._has_function = False

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # see its base
        if ((module, name) in _HARMLESS) is not self._has_function:
            raise NotPlain(name)
        if self._has_function:
            return _no_key if (module, name) == _RESOLVE else super().find_class(module, name)
        self._has_function = True
        return _FUNCTION  # which can't be called


def _no_key(*_: object) -> list[object]:
    """Stand for the result of another task, which is no key: it may take forever to hash."""
    return []


def looks_pickled(result: bytes) -> bool:
    """Return whether a result is a pickle, or one whose large parts are values: never JSON."""
    return result.startswith(b"\x80") or (result.startswith(b'{"pickle":') and b"\n" in result)


class _Value:
    """Stands for a value of a pickle that is not loaded yet."""

    __slots__ = ("depth", "is_open", "items", "parts")

    def __init__(
        self, depth: int = 0, parts: int = 1, items: Sequence[Any] = (), *, is_open: bool = False
    ) -> None:
        self.depth = depth
        #: All that is hashed with it.
        self.parts = parts
        #: Of a short tuple.
        self.items = items
        #: A list, dict or set, which may get more.
        self.is_open = is_open


#: Stand for a short scalar, for the function of a call, and for the call, which has it.
_SCALAR: Final = _Value()
_FUNCTION: Final = object()
_CALL: Final = object()


class _Check:
    """Follows the opcodes of a pickle without loading it. Raises `NotPlain`.

    The stack and the memo have a `_Value`, a text, the names of a harmless global, `_FUNCTION` or
    `_CALL` for each object. It refuses whatever Python's unpickler would take as another object.
    """

    def __init__(self, pickled: bytes | memoryview) -> None:
        self._pickled = pickled
        #: The first of them may be none of the harmless names.
        self.names: list[tuple[str, str]] = []
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._parts_left = _PARTS_MAX + _PARTS_PER_BYTE * len(pickled)

    def run(self) -> list[tuple[str, str]]:
        """Return the globals."""
        try:
            for opcode, value, _ in pickletools.genops(io.BytesIO(self._pickled)):
                step = _STEPS.get(opcode.name)
                if step is None:
                    raise _not_plain(opcode.name)
                step(self, value)
            (found,) = self._pop(1)
        except (ValueError, IndexError) as error:
            raise NotPlain(f"pickle is damaged: {error}") from error
        if found is not _CALL:
            _measured([found])
        return self.names

    def _pop(self, count: int) -> list[Any]:
        """Remove objects above the latest mark."""
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise IndexError("its stack is too short")
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _pop_mark(self) -> list[Any]:
        """Remove all objects above the latest mark, and the mark."""
        found = self._pop(len(self._stack) - self._marks[-1])
        self._marks.pop()
        return found

    def nothing(self, _: object) -> None:
        """Follow an opcode that changes neither stack nor memo."""

    def scalar(self, _: object) -> None:
        self._stack.append(_SCALAR)

    def text(self, value: str) -> None:
        self._stack.append(value)

    def integer(self, value: int) -> None:
        self._stack.append(_Value(0, 1 + (value.bit_length() >> 6)))

    def buffer(self, _: object) -> None:
        self._stack.append(_Value(0, _NO_KEY))

    def read_only(self, _: object) -> None:
        self._pop(1)
        self.buffer(None)

    def empty(self, _: object) -> None:
        self._stack.append(_Value(1, is_open=True))

    def mark(self, _: object) -> None:
        self._marks.append(len(self._stack))

    def memoize(self, _: object) -> None:
        (found,) = self._pop(1)
        self._stack.append(found)
        self._memo.append(found)

    def get(self, number: int) -> None:
        found = self._memo[number]
        if found is _FUNCTION or found is _CALL:
            raise _not_plain("another use of its function")
        self._stack.append(found)

    def add_one(self, _: object) -> None:
        self._add(self._pop(1), [])

    def add_pair(self, _: object) -> None:
        pair = self._pop(2)
        self._add(pair, pair[:1])

    def add_all(self, _: object) -> None:
        self._add(self._pop_mark(), [])

    def add_pairs(self, _: object) -> None:
        pairs = self._pop_mark()
        self._add(pairs, pairs[::2])

    def add_keys(self, _: object) -> None:
        keys = self._pop_mark()
        self._add(keys, keys)

    def _add(self, items: list[Any], keys: list[Any]) -> None:
        """Add items to the list, dict or set below them. Keys of a dict and items of a set hash."""
        (found,) = self._pop(1)
        if type(found) is not _Value or not found.is_open:
            raise _not_plain("an object that is changed")
        depth, _ = _measured(items)
        found.depth = max(found.depth, depth)
        if keys:
            self._hash(keys)
        self._stack.append(found)

    def _hash(self, keys: list[Any]) -> None:
        self._parts_left -= _measured(keys)[1]
        if self._parts_left < 0:
            raise _not_plain("a key or an item of a set that has too many parts")

    def frozen(self, _: object) -> None:
        items = self._pop_mark()
        self._hash(items)
        self._stack.append(_Value(*_measured(items)))

    def long_tuple(self, _: object) -> None:
        self._stack.append(_Value(*_measured(self._pop_mark())))

    def short_tuple(self, count: int) -> None:
        items = self._pop(count)
        if items and items[0] is _FUNCTION and count == len(("function", "args", "kwargs")):
            _measured(items[1:])
            self._stack.append(_CALL)
        else:
            self._stack.append(_Value(*_measured(items), items))

    def stack_global(self, _: object) -> None:
        module, name = self._pop(2)
        if type(module) is not str or type(name) is not str:
            raise _not_plain("a name that is made")
        is_harmless = (module, name) in _HARMLESS
        if not is_harmless and self.names:
            raise _refusal((module, name))
        self.names.append((module, name))
        self._stack.append((module, name) if is_harmless else _FUNCTION)

    def reduce(self, _: object) -> None:
        called, args = self._pop(2)
        if type(called) is not tuple or type(args) is not _Value or not args.items:
            raise _not_plain("another use of its function")
        texts = [one for one in args.items if type(one) is str]
        words = [one.parts for one in args.items if type(one) is _Value]
        if max(map(len, texts), default=0) > _TEXT_MAX or max(words, default=0) > _WORDS_MAX:
            raise _not_plain(f"{called[1]} of a large argument")
        if called in (_RESOLVE, ("decimal", "Decimal")) and len(texts) < len(args.items):
            raise _not_plain(f"{called[1]} of other arguments than texts")
        self._stack.append(_Value(0, _NO_KEY if called == _RESOLVE else args.parts))


def _measured(items: Sequence[Any]) -> tuple[int, int]:
    """Return the depth and the parts of a value that has these. They may not be functions."""
    depth, parts = 0, 1
    for item in items:
        if type(item) is _Value:
            parts += item.parts
            depth = max(depth, item.depth)
        elif type(item) is str or (type(item) is tuple and item != _RESOLVE):
            parts += 1
        else:
            raise _not_plain("another use of its function")
    if depth >= _DEPTH_MAX:
        raise _not_plain(f"nested more than {_DEPTH_MAX:,} times")
    return depth + 1, min(parts, _NO_KEY)


def _steps(names: str, step: Callable[[_Check, Any], None]) -> dict[str, Callable[..., None]]:
    return dict.fromkeys(names.split(), step)


#: What Python's pickler writes for plain data. No BUILD, NEWOBJ or EXT, which make and change
#: objects, and no PUT: its number is a size of memory.
_STEPS: Final = {
    **_steps("PROTO FRAME STOP", _Check.nothing),
    **_steps("NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT", _Check.scalar),
    **_steps("SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8", _Check.scalar),
    **_steps("SHORT_BINUNICODE BINUNICODE BINUNICODE8", _Check.text),
    **_steps("LONG1 LONG4", _Check.integer),
    **_steps("NEXT_BUFFER", _Check.buffer),
    **_steps("READONLY_BUFFER", _Check.read_only),
    **_steps("EMPTY_LIST EMPTY_DICT EMPTY_SET", _Check.empty),
    **_steps("MARK", _Check.mark),
    **_steps("MEMOIZE", _Check.memoize),
    **_steps("BINGET LONG_BINGET", _Check.get),
    **_steps("APPEND", _Check.add_one),
    **_steps("APPENDS", _Check.add_all),
    **_steps("SETITEM", _Check.add_pair),
    **_steps("SETITEMS", _Check.add_pairs),
    **_steps("ADDITEMS", _Check.add_keys),
    **_steps("FROZENSET", _Check.frozen),
    **_steps("TUPLE", _Check.long_tuple),
    **_steps("EMPTY_TUPLE", lambda check, _: check.short_tuple(0)),
    **_steps("TUPLE1", lambda check, _: check.short_tuple(1)),
    **_steps("TUPLE2", lambda check, _: check.short_tuple(2)),
    **_steps("TUPLE3", lambda check, _: check.short_tuple(3)),
    **_steps("STACK_GLOBAL", _Check.stack_global),
    **_steps("REDUCE", _Check.reduce),
}


def _not_plain(part: str) -> NotPlain:
    return NotPlain(f"pickle has more than plain data ({part})")


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
    """Finds the globals that were checked before, in their order, and nothing else."""

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
        names = _Check(pickled).run()
        is_call = self._depth == 1 and bool(names) and names[0] not in _HARMLESS
        if not is_call and not _HARMLESS.issuperset(names):
            raise _refusal(names[0])
        if not is_call and _RESOLVE in names:
            raise _not_plain("the result of another task")
        function = _Function(self._find(":".join(map(str, names[0])))) if is_call else None
        self._depth += 1
        try:
            return _Unpickler(pickled, buffers, names, function).load()
        finally:
            self._depth -= 1
