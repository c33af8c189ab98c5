"""Calls of function objects: their encoding, the meaning of outcomes, and names by content.

Owns the pickling of a client's calls, and the unpickling of values and exceptions. That runs code
of the sender, so it happens when a caller asks for a result, in the caller's thread.

A name by content is a hash of a function's code, of all that it uses, and of its arguments. The
code is its bytecode, without comments and line numbers. Code of installed packages counts by its
name. Equal calls have equal names in every process with the same version of Python, so a later run
of a program finds the tasks of an earlier run. Imports no client and no futures.
"""

from __future__ import annotations

import copyreg
import difflib
import hashlib
import inspect
import marshal
import os
import re
import secrets
import sys
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from enum import EnumMeta
from hashlib import blake2b
from operator import itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from msgspec import Struct, structs

from taskyard.calls import payloads, pickled, plain_pickles
from taskyard.calls.main_functions import RepeatedFunctions, shared_globals
from taskyard.calls.pickled import CallHeader
from taskyard.core.limits import BLOB_BYTES_MIN
from taskyard.errors import (
    BytesDamaged,
    BytesMissing,
    NoBroker,
    NotEncodable,
    TaskFailed,
    TaskyardError,
    UserError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from taskyard.process.value_access import CallValues, Restore


class EncodedCall(Struct, frozen=True):
    """A call of a function, or other work, with what its task needs."""

    service: bytes
    payload: bytes
    #: The tasks whose results it needs.
    results: Sequence[str] = ()
    #: Stores its large parts again, if it has any.
    restore: Restore | None = None
    #: Unpickles its outcome, if that is a pickle.
    decoder: OutcomeDecoder | None = None
    #: A known task of its name is used.
    attaches: bool = False


#: Directories of the standard library and of installed packages. A worker has its own. Code in them
#: changes with a version of its package alone.
_INSTALL_DIRECTORIES: Final = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

_NOTHING: Final = nullcontext()


class Marks(NamedTuple):
    """The marks of one call, in place of the marks of its program."""

    #: Precedes the call's exception in the output.
    token: str
    #: Makes the payload differ in each program. The call then uses a known task of its name.
    nonce: str = ""


class CallKey(NamedTuple):
    """A name and a token that a call has by its content, in every process."""

    name: str
    #: Only who knows the call can compute it.
    token: str

    def marks(self) -> Marks:
        """Return the marks of a task of this call."""
        return Marks(self.token, secrets.token_hex(8))


class Initializer(NamedTuple):
    """An initializer and its arguments as the payload of a call."""

    call: bytes = b""
    #: Globals that it sets in the main script or session are seen by calls with this key.
    globals_key: str = ""


def encode_initializer(initializer: Callable[..., Any], args: Sequence[Any]) -> Initializer:
    """Encode the call of an initializer. Raise `NotEncodable`."""
    encoder, key = CallEncoder(None), secrets.token_hex(8)
    encoder.use_setup(globals_key=key)
    call = encoder.encode(initializer, args, {}).payload
    return Initializer(call, key if pickled.refers_to_main(call) else "")


def _is_user_directory(path: str) -> bool:
    """Return whether a directory is neither the standard library nor installed packages."""
    if path.startswith(_INSTALL_DIRECTORIES):
        return False
    return not (path.startswith(sys.base_prefix) and path.endswith(".zip"))


_T = TypeVar("_T")

#: The options of a call of `submit`. Other names are arguments of the function.
CALL_OPTIONS: Final = frozenset(
    {
        "after",
        "service",
        "lane",
        "priority",
        "due",
        "expiry",
        "retries",
        "backoff",
        "time_limit",
        "slots",
        "cpus",
        "memory",
        "gpus",
        "resources",
    }
)

#: The value of `key` for names by content. Any other value is an argument of the function.
CONTENT: Final = "content"

#: Options of calls that are named by their content.
_KEY_OPTIONS: Final = frozenset({"key", "version"})

#: A function that is called in another process by its import path has two more.
PATH_CALL_OPTIONS: Final = CALL_OPTIONS | {"env", "cwd"}

#: Names of an option and of an argument that are so similar are a mistake.
_SIMILAR: Final = 0.8

#: The first line of a traceback that Python prints.
_TRACEBACK_BEGIN: Final = "Traceback (most recent call last):\n"

#: Characters of a function's name in the names of its tasks.
_NAME_CHARACTERS_MAX: Final = 40

#: Digits of the token of a named call, as many as in a random token.
_TOKEN_DIGITS: Final = 32


class Outcome(Struct, frozen=True):
    """The outcome of a pickled call, as its worker sent it."""

    #: The pickled value, or the output of a failed call.
    data: bytes
    failure: TaskFailed | None = None


class OutcomeDecoder(Struct, frozen=True):
    """Unpickles the outcomes of calls."""

    #: Precedes the exceptions of the calls in their output. Empty: it is unknown, as that of a task
    #: of another client. Then exceptions are not unpickled, because other text could contain
    #: an exception.
    token: str = ""
    #: Loads large values.
    values: CallValues | None = None

    def decode(self, full_name: str, outcome: Outcome) -> tuple[Any, BaseException | None]:
        """Return the value of a call, or the exception that its future raises."""
        if outcome.failure is None:
            try:
                return value_of(full_name, outcome.data, self.values), None
            except TaskyardError as error:
                return None, error
        if not self.token:
            return None, outcome.failure
        raised, traceback = pickled.decode_exception(outcome.data, self.token)
        if raised is None and traceback:
            outcome.failure.__cause__ = pickled.RemoteTraceback(traceback)
        return None, outcome.failure if raised is None else raised


def traceback_of(error: BaseException | None, output: str) -> str | None:
    """Return the traceback of a failed task: that of its exception, or else the last printed.

    None if there is no error, or no traceback.
    """
    if error is None:
        return None
    if isinstance(error.__cause__, pickled.RemoteTraceback):
        return str(error.__cause__.args[0])
    _, begin, rest = output.rpartition(_TRACEBACK_BEGIN)
    return begin + rest if begin else None


def printed_text(stdout: bytes, stderr: bytes) -> str:
    """Return what a task has printed, as text, without the line of its exception."""
    return (pickled.without_exception(stdout) + stderr).decode(errors="replace")


def value_of(full_name: str, result: bytes, values: CallValues | None) -> Any:  # noqa: ANN401  # a task's own value
    """Return the value of a pickled call. Raises `TaskFailed`, or that a large value is missing.

    Unpickling runs users' code, which may raise anything, even `SystemExit`.
    """
    try:
        return pickled.unpickle(result) if values is None else values.load_result(result, full_name)
    except (BytesMissing, BytesDamaged) as error:
        raise type(error)(f"result of task {full_name}: {error}") from None
    except NoBroker:
        raise
    except BaseException as error:  # noqa: BLE001  # see above
        raise TaskFailed(
            f"the result of {full_name} can't be unpickled: {pickled.shown_error(error)} (can its "
            "module be imported here?)"
        ).with_traceback(error.__traceback__) from None


class CallEncoder:
    """Encodes the calls of one client. Follows changes of `sys.path`."""

    def __init__(self, values: CallValues | None) -> None:
        """`values` stores large parts. Without it, calls are limited in size."""
        token = secrets.token_hex(16)
        self.values = values
        self.decoder = OutcomeDecoder(token, values)
        #: Decodes the outcomes of other clients' calls.
        self.foreign_decoder = OutcomeDecoder("", values)
        #: Fields of the header: a token that precedes exceptions in the output, and what a process
        #: does before its first call.
        self._fields: dict[str, Any] = {"token": token}
        #: See `main_functions`.
        self._globals_key = ""
        self._repeated = RepeatedFunctions()
        self._sys_path: list[str] | None = None
        self._header = CallHeader()
        #: Of calls that need no results.
        self._header_bytes = b""

    def encode(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        marks_of: Callable[[bytes], Marks] | None = None,
    ) -> EncodedCall:
        """Encode a call. `marks_of` takes the pickle of a call with marks of its own.

        A plain call needs no more than `--allow MODULE`. Raises `NotEncodable`.
        """
        if self._sys_path != sys.path:
            self._refresh()
        function = self._repeated.substitute(function, self.pickle_once)
        values = self.values
        is_large = None if values is None else values.is_large
        with self._shared_globals():
            body = pickled.pickle_call(function, args, kwargs, is_large=is_large)
        header, decoder, restore = self._header, self.decoder, None
        if body.results:
            header = structs.replace(header, results=body.results)
        if marks_of is not None:
            marks = marks_of(body.pickle)
            header = structs.replace(header, token=marks.token, nonce=marks.nonce)
            decoder = OutcomeDecoder(marks.token, values)
        if values is not None and (body.buffers or len(body.pickle) >= BLOB_BYTES_MIN):
            payload, restore = values.encode(body, header)
        elif header is self._header:
            payload = self._header_bytes + body.pickle
        else:
            payload = pickled.encode_pickled_call(body.pickle, header)
        service = payloads.CALL if plain_pickles.is_plain_call(body.pickle) else pickled.PICKLE
        attaches = bool(header.nonce)
        return EncodedCall(service, payload, body.results, restore, decoder, attaches)

    def pickle_once(self, function: Callable[..., _T]) -> Callable[..., _T]:
        """Return a substitute for a function that many calls share."""
        if self._sys_path != sys.path:
            self._refresh()
        with self._shared_globals():
            substitute: Callable[..., _T] = pickled.pickle_once(function)
        return substitute

    def use_setup(self, *, file: str = "", call: bytes = b"", globals_key: str = "") -> None:
        """Have processes make a setup before their first call of these."""
        self._fields |= {"setup_file": file, "setup": call}
        self._globals_key, self._sys_path = globals_key, None
        self._repeated = RepeatedFunctions()

    def _shared_globals(self) -> AbstractContextManager[None]:
        return shared_globals(self._globals_key) if self._globals_key else _NOTHING

    def _refresh(self) -> None:
        users = filter(_is_user_directory, sys.path)
        path = tuple(dict.fromkeys(map(os.path.abspath, users)))  # "" is the current directory
        self._header = CallHeader(path=path, **self._fields)
        self._header_bytes = pickled.encode_pickled_call(b"", self._header)
        self._sys_path = [*sys.path]


def marks_of_named(body: bytes) -> Marks:
    """Return the marks of a call with a name of the user's.

    The token is made of the call, so that the same call in a later run is the same task. Only who
    knows the call can compute it.
    """
    return Marks(hashlib.sha256(b"token " + body).hexdigest()[:_TOKEN_DIGITS])


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, for the names of its tasks."""
    function = getattr(function, "func", function)  # of a partial
    name = getattr(function, "__name__", None) or type(function).__name__
    return str(name).strip("<>")[:_NAME_CHARACTERS_MAX]


def split_options(
    work: Callable[..., Any] | str,
    options: Mapping[str, Any],
    taken: Iterable[str],
    *,
    is_explicit: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a task, and the named arguments of its function.

    Raises `UserError` for a name that may be either, also for one that is `taken` as an option.
    With `is_explicit`, the arguments are given by `kwargs`, and such a name is an option.
    """
    known = PATH_CALL_OPTIONS if isinstance(work, str) else CALL_OPTIONS
    if options.get("key") == CONTENT:
        if isinstance(work, str):
            raise UserError("key: only for function objects, not for 'module:function'")
        known |= _KEY_OPTIONS
    own = {name: value for name, value in options.items() if name in known}
    named = {name: value for name, value in options.items() if name not in known}
    if isinstance(work, str):
        _check_similar(named, known)
    else:
        _check_names(work, () if is_explicit else (*own, *taken), named)
    return own, named


def _check_similar(named: Iterable[str], known: frozenset[str]) -> None:
    """Raise `UserError` for an argument that looks like a misspelled option."""
    for name in named:
        close = difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)
        if close:
            raise UserError(
                f"argument {name!r}: did you mean the option {close[0]!r}? "
                f"(else give it by kwargs={{{name!r}: ...}})"
            )


def _check_names(function: Callable[..., Any], own: Iterable[str], named: Iterable[str]) -> None:
    """Raise `UserError` for an option that is also a parameter, and for an unknown argument."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have none
        return
    called = function_name(function)
    for name in own:
        if name in parameters:
            raise UserError(
                f"{name!r}: both an option of a task and a parameter of {called} (give named "
                f"arguments as kwargs={{...}}, then {name}= is the option)"
            )
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for name in named:
        if name not in parameters:
            close = difflib.get_close_matches(name, CALL_OPTIONS, n=1)
            hint = f" (did you mean the option {close[0]!r}?)" if close else ""
            if name == "key":
                hint = " (name= names its task, and key='content' does so by content)"
            raise UserError(f"{called}: unexpected argument {name!r}{hint}")


#: Bytes of a hash inside.
_DIGEST_BYTES: Final = 20

#: Hexadecimal digits of the parts in a name. A function has few versions and many arguments.
_CODE_DIGITS: Final = 10
_ARGUMENTS_DIGITS: Final = 20

#: A name by content: the function, its code, what it uses, the arguments.
_NAME: Final = re.compile(r"(.+)-([0-9a-f]{10})-([0-9a-f]{10})-([0-9a-f]{20})")

#: Characters of a campaign that is named after a function.
_CAMPAIGN_CHARACTERS_MAX: Final = 80

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
        """Return the last call of the function before this call, or the first after it."""
        calls = [one for one in map(ContentName.of, names) if one is not None]
        calls = [one for one in calls if one.function == self.function]
        index = calls.index(self) if self in calls else len(calls)
        others = [*reversed(calls[:index]), *calls[index + 1 :]]
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

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKey:
        """Return the key of a call.

        Arguments are compared by the parameters that they are bound to. Raises `NotEncodable`.
        """
        digest = self._arguments(args, kwargs)
        token = _hash(b"token", self._code, self._uses, digest)
        name = ContentName(*self._prefix, _digits(digest, _ARGUMENTS_DIGITS))
        return CallKey(str(name), token.hex())

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
        return [*((str(index), one) for index, one in enumerate(args)), *kwargs.items()]


def key_of_calls(calls: Sequence[tuple[Any, ...]]) -> CallKey:
    """Return one key of calls, for programs that can't declare a version of their functions.

    A variable of a function that has no content to compare counts by its type. Raises
    `NotEncodable` for an argument that has none.
    """
    digest = _Digester("a call", is_lenient=True).of([*calls])
    return CallKey(_hash(digest).hex(), _hash(b"token", digest).hex())


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
        """Return the hash of variables of a module. An installed module counts by its name."""
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
        return not file.startswith(_INSTALL_DIRECTORIES)
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
