"""Payloads of pickled calls, with where a worker finds their functions: search path and script.

Reads `sys.path` and `__main__`. Changes neither.
"""

from __future__ import annotations

import os
import secrets
import sys
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
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
        self._origin = self._origin_with_main = Origin()
        #: Whether a worker can run the main script. An interactive session has none.
        self._has_script = False
        #: Of calls that need neither the main script nor results.
        self._header = b""

    def encode(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        marks_of: Callable[[bytes], Marks] | None = None,
    ) -> tuple[bytes, Encoded]:
        """Return the pickle of a call, and the call encoded. `marks_of` takes the pickle.

        It names the main script only if it refers to that by path: the worker has to run it. Raise
        `NotEncodable`.
        """
        if self._sys_path != sys.path:
            self._refresh()
        function = self._repeated.substitute(function, self.pickle_once)
        values = self._values
        is_large = None if values is None else values.is_large
        more: Any = {"has_script": self._has_script, "is_large": is_large}
        with self._shared_globals():
            body = pickled.pickle_call(function, args, kwargs, **more)
        if body.needs_main:
            # Results refer to the script by the name under which a worker runs it.
            sys.modules.setdefault(pickled.MAIN_NAME, sys.modules["__main__"])
        origin = self._origin_with_main if body.needs_main else self._origin
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
            return pickled.pickle_once(function, has_script=self._has_script)

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
        main, module = _main_script()
        # Globals of a script that is run are not those of functions by value.
        self._has_script = not self._globals_key and (main is not None or module is not None)
        self._origin_with_main = Origin(main, module, path, self._token, **self._setup)
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


def _main_script() -> tuple[str | None, str | None]:
    """Return the path of the main script, or the name of the main module.

    Neither in an interactive session, which has no file.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return None, str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).exists():
        return None, None
    return os.path.abspath(file), None  # noqa: PTH100  # keep the name of a link
