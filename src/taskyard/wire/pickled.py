"""Calls that come pickled: a function and its arguments, its value, and the exception it raised.

A payload is one line of JSON, which says where the pickle comes from, and the pickle. An exception
travels as the last line of its task's output, in base64 with the traceback as text, so that a log
stays text.

To unpickle is to run whatever the sender wrote: a worker does it only where its owner allows it,
and a client only with what its own tasks return. Knows nothing of processes.
"""

import base64
import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from taskyard.core.limits import OUTPUT_BYTES_MAX
from taskyard.errors import PeerError, UserError

#: The service of tasks that are pickled calls: who does not allow them does not offer it.
PICKLE: Final = b"pickle"

#: The one that Python 3.11 and later read and write alike.
PROTOCOL: Final = 5

#: What a script is called where a worker runs it. Pickles name it, so both sides have to know it;
#: it is multiprocessing's name, because scripts and libraries look for that.
MAIN_NAME: Final = "__mp_main__"

#: Set in the environment while a worker runs a script to find its functions: a script that would
#: start an executor, whose workers run the script again, is told so instead.
IMPORTING_VARIABLE: Final = "TASKYARD_IMPORTING_MAIN"

#: The line that holds an exception leaves room for what the task printed before it.
EXCEPTION_BYTES_MAX: Final = OUTPUT_BYTES_MAX * 3 // 4

#: The end of a traceback says what went wrong; of an endless one this much is kept.
TRACEBACK_CHARACTERS_MAX: Final = 8_000

#: Stands for the lost beginning of a traceback.
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
    """By what the modules that a pickle names are found."""

    #: The script, or the module, that is `__main__` where the pickle was made.
    main: str | None = None
    main_module: str | None = None
    #: Where else modules were looked for there, beside the places of Python's own.
    path: tuple[str, ...] = ()
    #: What stands before an exception that comes back. Whatever else a task prints, such as a text
    #: that somebody sent it, is not unpickled.
    token: str = ""


class Pickled(Struct, frozen=True):
    """Call a function that comes along, with its arguments."""

    call: bytes
    origin: Origin


_origins = msgspec.json.Decoder(Origin)


def is_pickled(payload: bytes) -> bool:
    return payload.startswith(_MARK)


def encode_pickled_call(call: bytes, origin: Origin) -> bytes:
    """The payload of a pickled call."""
    try:
        return msgspec.json.encode(origin) + b"\n" + call
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the path of a script can't be sent as JSON: {error}; give it a name in UTF-8"
        ) from error


def decode_pickled_call(payload: bytes) -> Pickled:
    """Raises PeerError for what `encode` did not make. Unpickles nothing."""
    if not is_pickled(payload):
        raise PeerError(
            "the payload is no pickled call, which is all that this service takes; submit by an "
            "Executor, or to another service"
        )
    origin, _, call = payload.partition(b"\n")
    try:
        return Pickled(call, _origins.decode(origin))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise PeerError(
            f"the payload is no pickled call of this version: {error}; use one on both sides"
        ) from error


# Calls.


def pickle_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """A call as bytes. Raises UserError that names what can't be pickled.

    What the standard library's pickle refuses, such as a lambda, is left to cloudpickle where that
    is installed.
    """
    call = (function, tuple(args), dict(kwargs))
    try:
        return pickle.dumps(call, PROTOCOL)
    except Exception as error:
        dumps = _cloudpickle_dumps()
        if dumps is None:
            raise UserError(_unpicklable_part(*call, error)) from error
    try:
        return dumps(call, PROTOCOL)
    except Exception as error:
        raise UserError(_unpicklable_part(*call, error)) from error


def call_each(function: Callable[..., Any], rows: Sequence[Sequence[Any]]) -> list[Any]:
    """What a task of many calls does."""
    return [function(*row) for row in rows]


def unpickle(pickled: bytes) -> Any:  # noqa: ANN401  # whatever was sent
    return pickle.loads(pickled)  # noqa: S301  # whoever calls this trusts the sender


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
    """Which part of a call it is that can't be pickled."""
    if not _can_be_pickled(function):
        return (
            f"function {function!r} can't be pickled: {error}; give one that is defined at the top "
            "of a module (no lambda, no function inside a function), or install cloudpickle"
        )
    named = [(f"argument {number}", value) for number, value in enumerate(args, start=1)]
    named += [(f"argument {name!r}", value) for name, value in kwargs.items()]
    for name, value in named:
        if not _can_be_pickled(value):
            return f"{name}, of type {type(value).__name__}, can't be pickled: {error}"
    return f"the call of {function!r} can't be pickled: {error}"


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value, PROTOCOL)
    except Exception:  # noqa: BLE001  # a class of a user's may raise anything
        return False
    return True


# What comes back.


def pickle_result(value: object) -> bytes:
    """Raises UserError."""
    try:
        return pickle.dumps(value, PROTOCOL)
    except Exception as error:
        kind = type(value).__name__
        raise UserError(
            f"the result, of type {kind}, can't be pickled: {error}; give back plain data"
        ) from error


class RemoteTraceback(Exception):
    """Where a call raised: the traceback of the other process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def encode_exception(error: BaseException, traceback: str, token: str = "") -> bytes:
    """The line that carries an exception. Where that can't be pickled, or is too large, it carries
    the traceback alone."""
    mark = _mark(token)
    if len(traceback) > TRACEBACK_CHARACTERS_MAX:
        traceback = _CUT + traceback[len(_CUT) - TRACEBACK_CHARACTERS_MAX :]
    try:
        pickled = pickle.dumps((error, traceback), PROTOCOL)
        unpickle(pickled)  # an exception of its own making may be one-way
    except BaseException:  # noqa: BLE001  # a class of a user's may raise anything, also an exit
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
    """The exception, with where it was raised as its cause, and that traceback; None and "" where
    there are none, or none of the call with this token."""
    line = output.rstrip().rpartition(b"\n")[2]
    if not line.startswith(_mark(token)):
        return None, ""
    try:
        error, traceback = unpickle(base64.b64decode(line.removeprefix(_mark(token))))
        if isinstance(error, BaseException):
            error.__cause__ = RemoteTraceback(traceback)
    except BaseException:  # noqa: BLE001  # classes not here, or not the same, or that raise an exit
        return None, ""
    return (error if isinstance(error, BaseException) else None), str(traceback)
