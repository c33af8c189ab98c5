"""Pickled calls: a function with its arguments, its return value, and the exception it raised.

A payload is one line of JSON, which describes the origin of the pickle, and the pickle. An
exception is the last line of its task's output, in base64 with the traceback as text, so that logs
stay text.

Unpickling runs any code of the sender. A worker does it only if its owner allows it, and a client
only with results of its own tasks. Knows nothing of processes.
"""

import base64
import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from taskyard.core.limits import OUTPUT_BYTES_MAX
from taskyard.errors import NotEncodable, PeerError

#: The service of pickled calls. Workers that do not allow them do not offer it.
PICKLE: Final = b"pickle"

#: The pickle protocol that Python 3.11 and later share.
PROTOCOL: Final = 5

#: The module name of a script in a worker. Pickles contain it, so both sides must agree. It is
#: multiprocessing's name, because scripts and libraries check for it.
MAIN_NAME: Final = "__mp_main__"

#: Set in the environment while a worker imports a script. A script that then starts an executor,
#: whose workers would import the script again, gets an error instead.
IMPORTING_VARIABLE: Final = "TASKYARD_IMPORTING_MAIN"

#: The line of an exception leaves room for the task's own output.
EXCEPTION_BYTES_MAX: Final = OUTPUT_BYTES_MAX * 3 // 4

#: Characters kept of a traceback. Its end shows the error.
TRACEBACK_CHARACTERS_MAX: Final = 8_000

#: Replaces the cut beginning of a traceback.
_CUT: Final = "[...]\n"

_VERSION: Final = 1
_MARK: Final = b'{"pickle":'
_EXCEPTION_MARK: Final = b"[pickled exception] "


class Origin(
    Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag=_VERSION,
    tag_field="pickle",
):
    """Where to find the modules that a pickle refers to."""

    #: The script or the module that is `__main__` in the sending process.
    main: str | None = None
    main_module: str | None = None
    #: Further directories of `sys.path` there, without Python's own.
    path: tuple[str, ...] = ()
    #: Precedes an exception in the output. Other output of a task, such as text that it received
    #: from elsewhere, is never unpickled.
    token: str = ""


class Pickled(Struct, frozen=True):
    """A function call with its arguments, pickled."""

    call: bytes
    origin: Origin


_origins = msgspec.json.Decoder(Origin)


def is_pickled(payload: bytes) -> bool:
    return payload.startswith(_MARK)


def encode_pickled_call(call: bytes, origin: Origin) -> bytes:
    """Encode the payload of a pickled call. Raise UserError."""
    try:
        return msgspec.json.encode(origin) + b"\n" + call
    except (TypeError, ValueError) as error:
        raise NotEncodable(f"path of the script can't be sent as JSON: {error}") from error


def decode_pickled_call(payload: bytes) -> Pickled:
    """Decode the payload of a pickled call without unpickling it. Raise PeerError."""
    if not is_pickled(payload):
        raise PeerError(
            "payload is not a pickled call, the only kind that this service takes (submit with an "
            "Executor, or to another service)"
        )
    origin, _, call = payload.partition(b"\n")
    try:
        return Pickled(call, _origins.decode(origin))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise PeerError(
            f"payload is not a pickled call of this version: {error} (use one version on both "
            "sides)"
        ) from error


# Calls.


def pickle_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """Pickle a call. Raise UserError that names the part that can't be pickled.

    Objects that the standard library refuses, such as a lambda, are left to cloudpickle if that is
    installed.
    """
    call = (function, tuple(args), dict(kwargs))
    try:
        return pickle.dumps(call, PROTOCOL)
    except Exception as error:
        dumps = _cloudpickle_dumps()
        if dumps is None:
            raise NotEncodable(_unpicklable_part(*call, error)) from error
    try:
        return dumps(call, PROTOCOL)
    except Exception as error:
        raise NotEncodable(_unpicklable_part(*call, error)) from error


def call_each(function: Callable[..., Any], rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Call a function once for each row, for tasks that hold many calls."""
    return [function(*row) for row in rows]


def unpickle(pickled: bytes) -> Any:  # noqa: ANN401  # any value of a user
    return pickle.loads(pickled)  # noqa: S301  # callers must trust the sender


def _cloudpickle_dumps() -> Callable[[Any, int], bytes] | None:
    try:
        module = importlib.import_module("cloudpickle")
    except ImportError:
        return None
    dumps: Callable[[Any, int], bytes] = module.dumps
    return dumps


def _unpicklable_part(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,
) -> str:
    """Return an error text that names the part of a call that can't be pickled."""
    if not _can_be_pickled(function):
        return (
            f"function {function!r} can't be pickled: {error} (define it at the top of a module, "
            "not as a lambda or inside a function, or install cloudpickle)"
        )
    named = [(f"argument {number}", value) for number, value in enumerate(args, start=1)]
    named += [(f"argument {name!r}", value) for name, value in kwargs.items()]
    for name, value in named:
        if not _can_be_pickled(value):
            return f"{name}, of type {type(value).__name__}, can't be pickled: {error}"
    return f"call of {function!r} can't be pickled: {error}"


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value, PROTOCOL)
    except Exception:  # noqa: BLE001  # a class of a user's may raise anything
        return False
    return True


# Results and exceptions.


def pickle_result(value: object) -> bytes:
    """Pickle a return value. Raise UserError."""
    try:
        return pickle.dumps(value, PROTOCOL)
    except Exception as error:
        kind = type(value).__name__
        raise NotEncodable(f"result of type {kind} can't be pickled: {error}") from error


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text in `tb`."""

    def __init__(self, traceback: str) -> None:
        super().__init__(traceback)
        self.tb = f'\n"""\n{traceback}"""'

    def __str__(self) -> str:
        return self.tb


def encode_exception(error: BaseException, traceback: str, token: str = "") -> bytes:
    """Encode an exception as a line of output. If it can't be pickled or is too large, encode the
    traceback alone."""
    mark = _mark(token)
    if len(traceback) > TRACEBACK_CHARACTERS_MAX:
        traceback = _CUT + traceback[len(_CUT) - TRACEBACK_CHARACTERS_MAX :]
    try:
        pickled = pickle.dumps((error, traceback), PROTOCOL)
        unpickle(pickled)  # some exception classes can be pickled but not unpickled
    except BaseException:  # noqa: BLE001  # a class of a user's may raise anything, even SystemExit
        pickled = b""
    line = mark + base64.b64encode(pickled) + b"\n"
    if not pickled or len(line) > EXCEPTION_BYTES_MAX:
        line = mark + base64.b64encode(_without_error(traceback)) + b"\n"
    return line


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
    except BaseException:  # noqa: BLE001  # missing or changed classes, or ones that raise SystemExit
        return None, ""
    return (error if isinstance(error, BaseException) else None), str(traceback)
