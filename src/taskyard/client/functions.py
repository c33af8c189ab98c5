"""Calls of function objects: how they are encoded, and what their tasks' outcomes mean.

Owns the pickling of a client's calls, and the unpickling of values and exceptions. That runs code
of the sender, so it happens when a caller asks for a result, in the caller's thread. Imports no
client and no futures.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import os
import secrets
import sys
import sysconfig
from contextlib import AbstractContextManager, nullcontext
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
    #: Stores its large parts again. None: it has none.
    restore: Restore | None = None
    #: Unpickles its outcome. None: that is no pickle.
    decoder: OutcomeDecoder | None = None


#: Directories of the standard library and of installed packages. A worker has its own.
_INSTALL_DIRECTORIES: Final = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

_NOTHING: Final = nullcontext()


class Marks(NamedTuple):
    """The marks of one call, in place of those of its program."""

    #: Precedes the call's exception in the output.
    token: str
    #: Makes the payload another one in each program.
    nonce: str = ""


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


def _is_user_directory(place: str) -> bool:
    """Return whether a directory is neither the standard library nor installed packages."""
    if place.startswith(_INSTALL_DIRECTORIES):
        return False
    return not (place.startswith(sys.base_prefix) and place.endswith(".zip"))


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

#: The value of `key` for names by content. Another one is an argument of the function.
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

#: Digits of the token of a named call, as many as those of a random one.
_TOKEN_DIGITS: Final = 32


class Outcome(Struct, frozen=True):
    """The outcome of a pickled call, as its worker sent it."""

    #: The pickled value, or the output of a failed call.
    data: bytes
    failure: TaskFailed | None = None


class OutcomeDecoder(Struct, frozen=True):
    """Unpickles the outcomes of calls."""

    #: Precedes the exceptions of the calls in their output. Empty: it is unknown, as that of a task
    #: of another client. Then exceptions are not unpickled, because other text could contain one.
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
    """Return the traceback of a failed task: that of its exception, or else the last printed one.

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
        return EncodedCall(service, payload, body.results, restore, decoder)

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

    The token is made of the call, so that the same call in a later run is the same task. Only those
    who know the call can compute it.
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
