"""The environment of a submission: the directory and variables that its commands run with.

It travels beside the tasks as one JSON object, `{"host", "cwd", "env", "all"}`, and is kept once
per submission. Nothing compares or shows it. Owns the format, and which variables are passed on.
Does not read the process's own environment.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from msgspec import Struct

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
