"""Where the broker is, if nobody says: the flag, the environment, then the state directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from taskyard.net import endpoints

if TYPE_CHECKING:
    from collections.abc import Mapping

BROKER_VARIABLE: Final = "TASKYARD_BROKER"
STATE_VARIABLE: Final = "TASKYARD_STATE"
STATE_DEFAULT: Final = "./.taskyard"


def state_directory(
    state: str | Path | None = None, environment: Mapping[str, str] = os.environ
) -> Path:
    """The state directory that is meant."""
    return Path(state or environment.get(STATE_VARIABLE) or STATE_DEFAULT)


def endpoint(
    broker: str | None = None,
    state: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """The endpoint to connect to. A state directory that is given means its own broker."""
    given = broker or (None if state else environment.get(BROKER_VARIABLE))
    if given:
        return endpoints.check_peer(given)
    return endpoints.native(state_directory(state, environment))
