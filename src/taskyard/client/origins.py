"""Payloads of pickled calls, with the search path on which a worker finds their functions.

Reads `sys.path`, and does not change it.
"""

from __future__ import annotations

import os
import secrets
import sys
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from msgspec import structs

from taskyard.core.limits import BLOB_BYTES_MIN
from taskyard.process import call_setup
from taskyard.wire import pickled
from taskyard.wire.main_globals import shared_globals
from taskyard.wire.pickled import Origin
from taskyard.wire.repeated_functions import RepeatedFunctions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from taskyard.process.call_values import CallValues, Restore

#: A payload, the tasks whose results it needs, and what stores its large parts again. None: it has
#: none.
Encoded: TypeAlias = "tuple[bytes, Sequence[str], Restore | None]"

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


class CallOrigins:
    """Encodes this program's calls with their origins. Follows changes of `sys.path`."""

    def __init__(self, token: str = "", values: CallValues | None = None) -> None:
        """Put a token into all calls, which precedes their exceptions in the output.

        `values` stores large parts. Without it, calls are limited in size.
        """
        self._token = token
        self._values = values
        #: Fields of the header with what a process does before its first call.
        self._setup: dict[str, Any] = {}
        #: See `main_globals`.
        self._globals_key = ""
        self._repeated = RepeatedFunctions()
        self._sys_path: list[str] | None = None
        self._origin = Origin()
        #: Of calls that need no results.
        self._header = b""

    def encode(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        marks_of: Callable[[bytes], Marks] | None = None,
    ) -> tuple[bytes, Encoded]:
        """Return the pickle of a call, and the call encoded. `marks_of` takes the pickle.

        Raise `NotEncodable`.
        """
        if self._sys_path != sys.path:
            self._refresh()
        function = self._repeated.substitute(function, self.pickle_once)
        values = self._values
        is_large = None if values is None else values.is_large
        with self._shared_globals():
            body = pickled.pickle_call(function, args, kwargs, is_large=is_large)
        origin = self._origin
        if body.results:
            origin = structs.replace(origin, results=body.results)
        if marks_of is not None:
            origin = structs.replace(origin, **marks_of(body.pickle)._asdict())
        if values is not None and (body.buffers or len(body.pickle) >= BLOB_BYTES_MIN):
            payload, restore = values.encode(body, origin)
            return body.pickle, (payload, body.results, restore)
        if origin is self._origin:
            return body.pickle, (self._header + body.pickle, (), None)
        payload = pickled.encode_pickled_call(body.pickle, origin)
        return body.pickle, (payload, body.results, None)

    def pickle_once(self, function: Callable[..., Any]) -> Any:  # noqa: ANN401  # a callable in the worker
        """Return a substitute for a function that many calls share."""
        if self._sys_path != sys.path:
            self._refresh()
        with self._shared_globals():
            return pickled.pickle_once(function)

    def use_setup(self, *, file: str = "", call: bytes = b"", globals_key: str = "") -> None:
        """Have processes make a setup before their first call of these."""
        self._setup = {"setup_file": file, "setup": call}
        self._globals_key, self._sys_path = globals_key, None
        self._repeated = RepeatedFunctions()

    def _shared_globals(self) -> AbstractContextManager[None]:
        return shared_globals(self._globals_key) if self._globals_key else _NOTHING

    def _refresh(self) -> None:
        users = filter(_is_user_directory, sys.path)
        path = tuple(dict.fromkeys(map(os.path.abspath, users)))  # "" is the current directory
        self._origin = Origin(path=path, token=self._token, **self._setup)
        self._header = pickled.encode_pickled_call(b"", self._origin)
        self._sys_path = [*sys.path]


class Initializer(NamedTuple):
    """An initializer and its arguments as the payload of a call."""

    call: bytes = b""
    #: Globals that it sets in the main script or session are seen by calls with this key.
    globals_key: str = ""


def encode_initializer(initializer: Callable[..., Any], args: Sequence[Any]) -> Initializer:
    """Encode the call of an initializer. Raise `NotEncodable`."""
    origins, key = CallOrigins(), secrets.token_hex(8)
    origins.use_setup(globals_key=key)
    with call_setup.inheritance():
        _, (call, _, _) = origins.encode(initializer, args, {})
    return Initializer(call, key if pickled.refers_to_main(call) else "")


def _is_user_directory(place: str) -> bool:
    """Return whether a directory is neither the standard library nor installed packages."""
    if place.startswith(_INSTALL_DIRECTORIES):
        return False
    return not (place.startswith(sys.base_prefix) and place.endswith(".zip"))
