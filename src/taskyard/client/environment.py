"""The environment that a client sends beside its commands: its directory and some variables.

The one place that builds it, for the command line, Python and Spark. Over TCP there is none: the
commands run where their workers were started.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from taskyard.core.limits import ENVIRONMENT_BYTES_MAX
from taskyard.errors import UserError
from taskyard.net.endpoints import is_local
from taskyard.wire.environments import Environment, encode_environment, is_passed

#: Which variables are passed on. None: the usual ones. Names: these too. True: all. False: none. A
#: mapping: exactly these.
Variables = Mapping[str, str] | Iterable[str] | bool | None


def submitter_environment(
    endpoint: str, variables: Variables = None, own: Mapping[str, str] = os.environ
) -> bytes:
    """Return the environment for a broker at this endpoint. b"": it is not on the local socket.

    Raises `UserError` for a variable that is not set, for variables that are too long, and if
    variables were chosen but can't be passed on.
    """
    if not is_local(endpoint):
        if variables not in (None, False):
            raise UserError(
                "environment: can't be passed on over TCP, only on the local socket of the broker "
                "(give NAME=VALUE)"
            )
        return b""
    env = _chosen(variables, own)
    is_whole = variables is True
    encoded = encode_environment(Environment(socket.gethostname(), _cwd(own), env, is_whole))
    if len(encoded) > ENVIRONMENT_BYTES_MAX:
        raise UserError(
            f"environment of {len(encoded):,} bytes: limit is {ENVIRONMENT_BYTES_MAX:,} (pass "
            "fewer variables)"
        )
    return encoded


def _cwd(own: Mapping[str, str]) -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a text is needed
    except FileNotFoundError:  # deleted: tasks that are submitted here fail with its name
        return own.get("PWD") or "/"


def _chosen(variables: Variables, own: Mapping[str, str]) -> dict[str, str] | None:
    if variables is False:
        return None
    if variables is True:
        return dict(own)
    if isinstance(variables, Mapping):
        return dict(variables)
    usual = {name: value for name, value in own.items() if is_passed(name)}
    return usual | {name: _value(name, own) for name in variables or ()}


def _value(name: str, own: Mapping[str, str]) -> str:
    if name not in own:
        raise UserError(f"variable {name}: not set (give {name}=VALUE)")
    return own[name]
