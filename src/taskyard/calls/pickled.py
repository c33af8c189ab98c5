"""Pickled calls: a function with its arguments, its return value, and the exception it raised.

A payload is one line of JSON, which describes the header of the pickle, and the pickle. An
exception is the last line of its task's output, in base64 with the traceback as text, so that logs
stay text.

Functions and classes of modules travel by name: the standard pickle has their import path. Code of
`__main__` and of notebooks, lambdas and closures travels by value, by cloudpickle.

Unpickling runs any code of the sender. A worker does it only if its owner allows it, and a client
when its program asks for a result. Knows nothing of processes.
"""

import base64
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Struct

from taskyard.core.limits import OUTPUT_BYTES_MAX
from taskyard.errors import NotEncodable, PeerError

#: The service of pickled calls. Workers that do not allow them do not offer it.
PICKLE: Final = b"pickle"

#: The pickle protocol that Python 3.11 and later share.
PROTOCOL: Final = 5

#: The line of an exception leaves room for the task's own output.
EXCEPTION_BYTES_MAX: Final = OUTPUT_BYTES_MAX * 3 // 4

#: Characters kept of a traceback. The end shows the error.
TRACEBACK_CHARACTERS_MAX: Final = 8_000

#: Replaces the cut beginning of a traceback.
_CUT: Final = "[...]\n"

#: Returns whether a buffer of so many bytes is a value of its own.
IsLarge = Callable[[int], bool]

_VERSION: Final = 1
_MARK: Final = b'{"pickle":'
_EXCEPTION_MARK: Final = b"[pickled exception] "


class CallHeader(
    Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag=_VERSION,
    tag_field="pickle",
):
    """Where to find the modules that a pickle refers to."""

    #: Further directories of `sys.path` there, without Python's own.
    path: tuple[str, ...] = ()
    #: Precedes an exception in the output. Other output of a task, such as text that it received
    #: from elsewhere, is never unpickled.
    token: str = ""
    #: What a process does before its first call with this token: a file, or the payload of a call.
    setup_file: str = ""
    setup: bytes = b""
    #: Differs between submissions of a call that is named by its content. So the broker never takes
    #: a repeated call for the same submission, and the client looks for the task of that name.
    nonce: str = ""
    #: Names of values: the buffers of the pickle in their order, and the pickle itself if that is
    #: one. See `value_access`.
    values: tuple[str, ...] = ()
    body: str = ""
    #: Tasks whose results replace references in the pickle. See `inputs`.
    results: tuple[str, ...] = ()


class Pickled(Struct, frozen=True):
    """A function call with its arguments, pickled."""

    call: bytes
    header: CallHeader


_headers = msgspec.json.Decoder(CallHeader)


def is_pickled(payload: bytes) -> bool:
    return payload.startswith(_MARK)


def encode_pickled_call(call: bytes, header: CallHeader) -> bytes:
    """Encode the payload of a pickled call. Raise UserError."""
    try:
        return msgspec.json.encode(header) + b"\n" + call
    except (TypeError, ValueError) as error:
        raise NotEncodable(f"search path can't be sent as JSON: {error}") from error


def decode_pickled_call(payload: bytes) -> Pickled:
    """Decode the payload of a pickled call without unpickling it. Raise PeerError."""
    if not is_pickled(payload):
        raise PeerError(
            "payload is not a pickled call, the only kind that this service takes (submit with an "
            "Executor, or to another service)"
        )
    header, _, call = payload.partition(b"\n")
    try:
        return Pickled(call, _headers.decode(header))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise PeerError(
            f"payload is not a pickled call of this version: {error} (use one version on both "
            "sides)"
        ) from error


# Calls.

#: Part of every pickle that refers to the main script or session, under any of its names.
_MAIN_MARK: Final = b"_main__"

#: A longer function is pickled once for all calls of a `map`.
_REPEATED_BYTES_MAX: Final = 1024

#: Functions of `map` that a process keeps. Their globals stay between calls, as a module's do.
_FUNCTIONS_KEPT: Final = 8


class CallBody(Struct, frozen=True):
    """A pickled call, with the facts for its header."""

    pickle: bytes
    #: Large buffers, which are not in the pickle.
    buffers: tuple[memoryview, ...] = ()
    #: Tasks whose results replace references.
    results: tuple[str, ...] = ()


class _Contents:
    """Notes on the call that is being pickled. Most calls need none."""

    #: Mentions of the main script inside functions that were pickled before.
    marks = 0
    #: Tasks whose results it refers to.
    results: tuple[str, ...] = ()


_contents: ContextVar[_Contents | None] = ContextVar("taskyard_call_contents", default=None)


def pickle_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_large: IsLarge | None = None,
) -> CallBody:
    """Pickle a call. Raise `NotEncodable` that names the part that can't be pickled.

    `is_large` returns whether a buffer of some bytes stays out of the pickle.
    """
    call = (function, tuple(args), dict(kwargs))
    try:
        if PickledFunction in (type(function), type(args[0]) if args else None):
            return _pickle_noted(call, is_large)
        return _pickle(call, is_large)
    except Exception as error:
        raise NotEncodable(_unpicklable_part(*call, error)) from error


def refers_to_main(pickle: bytes) -> bool:
    """Return whether a pickle mentions the main script or session, by value or by path."""
    return _MAIN_MARK in pickle


class Buffers:
    """Collects the large buffers of a pickle, which stay out of it. `append` is a callback."""

    def __init__(self, is_large: IsLarge | None) -> None:
        self._is_large = is_large
        self.found: list[memoryview] = []

    @property
    def callback(self) -> Callable[[pickle.PickleBuffer], bool] | None:
        return None if self._is_large is None else self._add

    def _add(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer goes into the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:  # it is not contiguous
            return True
        if self._is_large is None or not self._is_large(raw.nbytes):
            return True
        self.found.append(raw)
        return False


def note_result(name: str) -> bool:
    """Note that the call that is being pickled needs a task's result. Return False outside one."""
    contents = _contents.get()
    if contents is not None and name not in contents.results:
        contents.results = (*contents.results, name)
    return contents is not None


class PickledFunction:
    """A function that was pickled before. In a worker it is the function itself."""

    def __init__(self, function: Callable[..., Any], body: CallBody) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._body = body
        self._marks = body.pickle.count(_MAIN_MARK)

    def __reduce__(self) -> tuple[Any, ...]:
        if (contents := _contents.get()) is not None:
            contents.marks += self._marks
            for name in self._body.results:
                note_result(name)
        return load_function, (pickle.PickleBuffer(self._body.pickle),)


def pickle_once(function: Callable[..., Any]) -> Any:  # noqa: ANN401  # a callable in the worker
    """Return a substitute for a function that is quick to pickle in many calls.

    It is the function itself if that is short and travels by path, or can't be pickled.
    """
    try:
        body = _pickle(function)
    except Exception:  # noqa: BLE001  # each call will raise it
        return function
    is_short = len(body.pickle) <= _REPEATED_BYTES_MAX and _MAIN_MARK not in body.pickle
    return function if is_short else PickledFunction(function, body)


def load_function(body: bytes | memoryview) -> Callable[..., Any]:
    """Return the function of a `PickledFunction`, one object for all calls in this process."""
    return _load_function(bytes(body))


@lru_cache(_FUNCTIONS_KEPT)
def _load_function(body: bytes) -> Callable[..., Any]:
    function: Callable[..., Any] = unpickle(body)
    return function


def call_each(function: Callable[..., Any], rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Call a function once for each row, for tasks that hold many calls."""
    return [function(*row) for row in rows]


#: Loads results whose large parts are values.
_load_large: ContextVar[Callable[[bytes], Any] | None] = ContextVar(
    "taskyard_load_large", default=None
)


@contextmanager
def large_results(load: Callable[[bytes], Any]) -> Iterator[None]:
    """Let `unpickle` load results whose large parts are values, by `load`."""
    before = _load_large.set(load)
    try:
        yield
    finally:
        _load_large.reset(before)


#: Replaces `pickle.loads` where the sender is not trusted.
_guarded_loads: ContextVar[Callable[..., Any] | None] = ContextVar(
    "taskyard_guarded_loads", default=None
)


@contextmanager
def guarded(loads: Callable[..., Any]) -> Iterator[None]:
    """Let `unpickle` use `loads`, which refuses what could run code of the sender."""
    before = _guarded_loads.set(loads)
    try:
        yield
    finally:
        _guarded_loads.reset(before)


def is_guarded() -> bool:
    return _guarded_loads.get() is not None


def unpickle(pickled: bytes | memoryview, buffers: Sequence[memoryview] = ()) -> Any:  # noqa: ANN401  # any value of a user
    """Unpickle a call, or a result. If large parts of it are values, it needs `large_results`."""
    if isinstance(pickled, bytes) and is_pickled(pickled):
        load = _load_large.get()
        if load is None:
            raise PeerError("large values: this process has no broker")
        return load(pickled)
    loads = _guarded_loads.get()
    if loads is not None:
        return loads(pickled, buffers)
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301  # callers must trust the sender


def _pickle(value: object, is_large: IsLarge | None = None) -> CallBody:
    """Pickle by name. If that refers to the main script or fails, look closer."""
    buffers = Buffers(is_large)
    try:
        by_name = pickle.dumps(value, PROTOCOL, buffer_callback=buffers.callback)
    except Exception:  # noqa: BLE001  # the error of the last way is raised
        return _pickle_noted(value, is_large)
    if _MAIN_MARK in by_name:
        return _pickle_noted(value, is_large)
    return CallBody(by_name, tuple(buffers.found))


def _pickle_noted(value: object, is_large: IsLarge | None) -> CallBody:
    """Pickle by name, and note what is found. If that does not do, pickle by value."""
    before = _contents.get()
    try:
        with suppress(Exception):  # the error of the other way is raised
            contents, buffers = _Contents(), Buffers(is_large)
            _contents.set(contents)
            by_name = pickle.dumps(value, PROTOCOL, buffer_callback=buffers.callback)
            if by_name.count(_MAIN_MARK) == contents.marks:
                return CallBody(by_name, tuple(buffers.found), contents.results)
        contents, buffers = _Contents(), Buffers(is_large)
        _contents.set(contents)
        by_value = _dumps_by_value(value, buffers)
        return CallBody(by_value, tuple(buffers.found), contents.results)
    finally:
        _contents.set(before)


def _dumps_by_value(value: object, buffers: Buffers) -> bytes:
    from taskyard.calls import value_pickler  # noqa: PLC0415  # cloudpickle, where it is needed

    return value_pickler.dumps(value, PROTOCOL, buffers.callback)


def _unpicklable_part(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,
) -> str:
    """Return an error text that names the part of a call that can't be pickled."""
    if function is call_each:  # its arguments are a function and the arguments of the calls
        function, rows = args
        args = next((row for row in rows if not _can_be_pickled(row)), ())
    if not _can_be_pickled(function):
        return f"function {function!r} can't be pickled: {error}{_global_at_fault(function)}"
    named = [(f"argument {number}", value) for number, value in enumerate(args, start=1)]
    named += [(f"argument {name!r}", value) for name, value in kwargs.items()]
    for name, value in named:
        if not _can_be_pickled(value):
            return f"{name}, of type {type(value).__name__}, can't be pickled: {error}"
    return f"call of {function!r} can't be pickled: {error}"


def _global_at_fault(function: Callable[..., Any]) -> str:
    """Return a hint that names the variable of a function that can't be pickled."""
    for name, value in _variables(inspect.unwrap(function)):
        if value is not function and not _can_be_pickled(value):
            kind = type(value).__name__
            return f" (it uses {name!r}, of type {kind}: make that inside the function)"
    return ""


def _variables(function: Callable[..., Any]) -> Iterator[tuple[str, object]]:
    try:
        used = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not a plain function, or a variable has no value yet
        return
    yield from used.nonlocals.items()
    yield from used.globals.items()


def _can_be_pickled(value: object) -> bool:
    try:
        _pickle(value)
    except Exception:  # noqa: BLE001  # a class of a user's may raise anything
        return False
    return True


# Results and exceptions.


def pickle_result(value: object) -> bytes:
    """Pickle a return value. Raise `NotEncodable`."""
    return pickle_value(value).pickle


def pickle_value(value: object, is_large: IsLarge | None = None) -> CallBody:
    """Pickle a return value, without its large buffers. Raise `NotEncodable`."""
    try:
        return _dumps_either(value, is_large)
    except Exception as error:
        raise _result_error(value, f"can't be pickled: {error}") from error


def _result_error(value: object, problem: str) -> NotEncodable:
    kind = type(value).__name__
    if inspect.iscoroutine(value):
        value.close()  # Python would warn that it was never awaited
        problem += " (the function is async: submit one that calls asyncio.run)"
    return NotEncodable(f"result of type {kind} {problem}")


def _dumps_either(value: object, is_large: IsLarge | None = None) -> CallBody:
    """Pickle by name or, where that fails, by value."""
    buffers = Buffers(is_large)
    try:
        pickled = pickle.dumps(value, PROTOCOL, buffer_callback=buffers.callback)
    except Exception:  # noqa: BLE001  # the error of the second way is raised
        buffers = Buffers(is_large)
        pickled = _dumps_by_value(value, buffers)
    return CallBody(pickled, buffers=tuple(buffers.found))


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text in `tb`."""

    def __init__(self, traceback: str) -> None:
        super().__init__(traceback)
        self.tb = f'\n"""\n{traceback}"""'

    def __str__(self) -> str:
        return self.tb


def encode_exception(error: BaseException, traceback: str, token: str = "") -> bytes:
    """Encode an exception as a line of output. If it can't be pickled or is too large, encode the
    traceback alone, and why."""
    mark = _mark(token)
    traceback = _cut(traceback)
    try:
        pickled = _dumps_either((error, traceback)).pickle
        unpickle(pickled)  # some exception classes can be pickled but not unpickled
    except BaseException as failed:  # noqa: BLE001  # a class of a user's may raise even SystemExit
        pickled, traceback = b"", _cut(traceback + _pickling_hint(error, failed))
    line = mark + base64.b64encode(pickled) + b"\n"
    if not pickled or len(line) > EXCEPTION_BYTES_MAX:
        line = mark + base64.b64encode(_without_error(traceback)) + b"\n"
    return line


def _cut(traceback: str) -> str:
    if len(traceback) <= TRACEBACK_CHARACTERS_MAX:
        return traceback
    return _CUT + traceback[len(_CUT) - TRACEBACK_CHARACTERS_MAX :]


def _pickling_hint(error: BaseException, failed: BaseException) -> str:
    """Return a line on why an exception does not arrive as itself."""
    return (
        f"\n{type(error).__name__} can't be sent: {shown_error(failed)} (give all arguments of its "
        "__init__ to super().__init__, or define __reduce__)\n"
    )


def shown_error(error: BaseException) -> str:
    """Return an exception as text, whatever its class raises."""
    try:
        return repr(error)
    except BaseException:  # noqa: BLE001  # a user's class
        return type(error).__name__


def without_exception(output: bytes) -> bytes:
    """Return the output of a task without the line of its exception, if it ends with one."""
    printed, newline, line = output.rstrip().rpartition(b"\n")
    return printed + newline if line.startswith(_EXCEPTION_MARK) else output


def _mark(token: str) -> bytes:
    return _EXCEPTION_MARK + token.encode() + b" "


def _without_error(traceback: str) -> bytes:
    return pickle.dumps((None, traceback), PROTOCOL)


def decode_exception(output: bytes, token: str = "") -> tuple[BaseException | None, str]:
    """Return the exception, with the remote traceback as its cause, and that traceback. Return None
    and "" if the output has none of the call with this token."""
    line = output.rstrip().rpartition(b"\n")[2]
    if not line.startswith(_mark(token)):
        return None, ""
    try:
        error, traceback = unpickle(base64.b64decode(line.removeprefix(_mark(token))))
        if isinstance(error, BaseException):
            error.__cause__ = RemoteTraceback(traceback)
    except BaseException:  # noqa: BLE001  # missing or changed classes, or classes that raise SystemExit
        return None, ""
    return (error if isinstance(error, BaseException) else None), str(traceback)
