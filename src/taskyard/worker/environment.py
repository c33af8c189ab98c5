"""What agents find in their environment: little, and nothing by accident.

An agent serves many tasks of many owners, and may live for days: what it finds is what its user has
given it, and what every program needs. Nothing of what the worker was told about brokers and keys.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from taskyard.errors import UserError

#: What every program needs.
PASSED_VARIABLES: Final = ("PATH", "HOME", "LANG", "TZ", "USER", "TMPDIR")
PASSED_PREFIX: Final = "LC_"

#: What is the worker's own.
OWN_PREFIX: Final = "TASKYARD_"


def clean_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Of the worker's variables those that every program needs."""
    return {
        name: value
        for name, value in own.items()
        if name in PASSED_VARIABLES or name.startswith(PASSED_PREFIX)
    }


def read_variables(given: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """Those of `NAME=VALUE`, and those of `NAME`, which the worker has. Raises UserError."""
    return dict(_read_variable(one, own) for one in given)


def _read_variable(given: str, own: Mapping[str, str]) -> tuple[str, str]:
    name, sign, value = given.partition("=")
    if not name or "\0" in given:
        raise UserError(f"--env {given!r} is no variable: give NAME=VALUE, or NAME alone")
    if name.startswith(OWN_PREFIX):
        raise UserError(
            f"--env {name}: variables that begin with {OWN_PREFIX} are the worker's own, and not "
            "for agents; give it another name"
        )
    if sign:
        return name, value
    if name not in own:
        raise UserError(f"--env {name}: there is no such variable here; give {name}=VALUE")
    return name, own[name]
