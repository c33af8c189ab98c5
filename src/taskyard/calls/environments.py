"""The surroundings of a task: directory and variables, and the setup of a call's process.

The environment of a submission travels beside its tasks as one JSON object, `{"host", "cwd", "env",
"all"}`, and is kept once per submission. Nothing compares or shows it. Owns the format, and which
variables are passed on. Does not read the process's own environment.

Before its first call of an executor, a process calls the executor's initializer. An executor with
its own processes writes it into a file that only its user can read, and the header of each call has
the path. Else the header has the initializer.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from taskyard.calls import pickled
from taskyard.calls.pickled import CallHeader, Pickled
from taskyard.errors import PeerError

#: Variables that are passed on unless the submitter chooses other variables: exact names, and
#: prefixes.
PASSED_NAMES: Final = (
    *("PATH", "HOME", "USER", "LANG", "TZ"),
    *("VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH"),
)
PASSED_PREFIXES: Final = ("LC_", "CONDA_")

#: Variables of the worker that are wrong in another directory.
_NOT_KEPT: Final = ("PWD", "OLDPWD")

#: Environments that are kept decoded. Few submitters are active at once.
_CACHE_SIZE: Final = 64

# The standard library's encoder keeps bytes that are not UTF-8, as escaped surrogates.
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Environment(Struct, frozen=True):
    """Where the commands of a submission run."""

    #: The machine of the submitter. Elsewhere all else means nothing.
    host: str
    #: The directory, an absolute path.
    cwd: str
    #: The variables that are passed on. None: none, and the worker keeps its own.
    env: Mapping[str, str] | None = None
    #: The variables are all that a command gets. False: they are added to the worker's own.
    is_whole: bool = False


def is_passed(name: str) -> bool:
    """Return whether a variable is passed on unless the submitter chooses other variables."""
    return name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)


def encode_environment(environment: Environment) -> bytes:
    fields: dict[str, Any] = {"host": environment.host, "cwd": environment.cwd}
    if environment.env is not None:
        fields["env"] = dict(environment.env)
    if environment.is_whole:
        fields["all"] = True
    return _encode(fields).encode()


@lru_cache(_CACHE_SIZE)
def decode_environment(raw: bytes) -> Environment:
    """Decode an environment. Raise PeerError."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        raise PeerError("environment: not valid JSON") from None
    if not isinstance(fields, dict) or not fields.keys() <= {"host", "cwd", "env", "all"}:
        raise PeerError("environment: must be an object of host, cwd, env and all")
    host, cwd, env = fields.get("host"), fields.get("cwd"), fields.get("env")
    if not isinstance(host, str) or not isinstance(cwd, str) or not cwd.startswith("/"):
        raise PeerError("environment: host and cwd must be texts, cwd an absolute path")
    if "\0" in cwd:
        raise PeerError("environment: cwd contains a NUL character")
    if env is not None:
        _check_variables(env)
    return Environment(host, cwd, env, fields.get("all") is True)


def _check_variables(env: object) -> None:
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise PeerError("environment: env must be an object of texts")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise PeerError(f"environment: invalid variable {name!r}")


@lru_cache(_CACHE_SIZE)
def without_variables(raw: bytes, host: bytes) -> bytes:
    """Return an environment for a worker on `host`: without variables unless it is the same."""
    environment = decode_environment(raw)
    if environment.env is None or environment.host.encode(errors="replace") == host:
        return raw
    return encode_environment(Environment(environment.host, environment.cwd))


def merged_variables(environment: Environment, own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a command: the submitter's, added to the worker's own.

    A variable that is passed on and that the submitter does not have is not taken from the worker:
    its VIRTUAL_ENV does not fit the submitter's PATH.
    """
    if environment.env is None:
        return dict(own)
    if environment.is_whole:
        return dict(environment.env)
    kept = {
        name: value for name, value in own.items() if name not in _NOT_KEPT and not is_passed(name)
    }
    return kept | dict(environment.env)


#: Where the standard library reports an initializer that raised.
_logger = logging.getLogger("concurrent.futures")


class InitializerFailed(Exception):
    """The initializer of an executor raised an exception. The text names that."""


def write_setup(path: Path, initializer: bytes) -> None:
    """Write a file with the payload of the initializer's call."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(initializer)


class Setups:
    """The setups that were made in this process, each once."""

    def __init__(
        self, load: Callable[[Pickled], tuple[Any, Any, Any]], on_failed: Callable[[], object]
    ) -> None:
        """`load` returns the function and the arguments of a call.

        `on_failed` is called after an initializer has raised, and before the error is returned.
        """
        self._load = load
        self._on_failed = on_failed
        #: By the token of the executor, the error that its calls raise.
        self._errors: dict[str, str] = {}

    def ensure(self, header: CallHeader) -> None:
        """Make a call's setup, unless that was done. Raises `InitializerFailed`, then and later."""
        token = header.token
        if token not in self._errors:
            self._errors[token] = self._set_up(header)
        if self._errors[token]:
            raise InitializerFailed(self._errors[token])

    def _set_up(self, header: CallHeader) -> str:
        """Return the error, or ""."""
        try:
            initializer = header.setup
            if header.setup_file:
                initializer = Path(header.setup_file).read_bytes()
            if initializer:
                function, args, kwargs = self._load(pickled.decode_pickled_call(initializer))
                function(*args, **kwargs)
        except BaseException as error:
            _logger.critical("Exception in initializer:", exc_info=True)
            self._on_failed()
            return f"its initializer raised {type(error).__name__}: {error}"
        return ""
