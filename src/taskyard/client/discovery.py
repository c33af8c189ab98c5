"""Finds the broker and the key: from arguments, the environment, the settings file, or defaults.

A nearer source wins. In one source, a broker's endpoint wins over a state directory. A state
directory stands for its own broker, so one in the arguments wins over an endpoint in the
environment, and one in the environment over an endpoint in the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.settings.files import InvalidSettings
from taskyard.settings.loader import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskyard.net.keys import PeerKey
    from taskyard.settings.sections import Settings


class BrokerLocation(NamedTuple):
    """A broker's endpoint or state directory."""

    #: Its endpoint. None: that of the state directory.
    broker: str | None
    state: Path

    def endpoint(self) -> str:
        """Return the endpoint to connect to."""
        return (
            endpoints.peer_endpoint(self.broker)
            if self.broker
            else endpoints.native_endpoint(self.state)
        )


def locate(
    broker: str | None = None,
    state: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
    settings: Settings | None = None,
) -> BrokerLocation:
    """Return the broker's location. Reads the settings only if they are needed and not passed."""
    if state:
        return BrokerLocation(broker or None, Path(state))
    settings = settings or load(environment=environment)
    is_nearer = settings.source("broker.url") >= settings.source("broker.state")
    named = broker or (configured_endpoint(settings) if is_nearer else None)
    return BrokerLocation(named, settings.broker.state)


def configured_endpoint(settings: Settings) -> str | None:
    """Return the endpoint in the settings, if there is one. Raises `InvalidSettings` if invalid."""
    url = settings.broker.url
    try:
        return endpoints.peer_endpoint(url) if url is not None else None
    except UserError as wrong:
        raise InvalidSettings(
            f"{settings.all['broker.url'].origin}: broker.url: {wrong}"
        ) from wrong


def endpoint(
    broker: str | None = None,
    state: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
    settings: Settings | None = None,
) -> str:
    """Return the endpoint to connect to."""
    if broker:
        return endpoints.peer_endpoint(broker)
    return locate(broker, state, environment, settings).endpoint()


def key_for(
    endpoint: str,
    key: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
    settings: Settings | None = None,
) -> PeerKey | None:
    """Return the key for an endpoint, if there is one. Raises `UserError`.

    Only TCP uses keys. On other sockets the kernel authenticates the peer.
    """
    if not endpoint.startswith("tcp://"):
        return None
    path = Path(key) if key else (settings or load(environment=environment)).broker.key
    if path is None:
        return None
    from taskyard.net import keys  # noqa: PLC0415  # most calls have no key, and shell completion must be fast

    return keys.read_peer_key(path)


def connection_hint(endpoint: str, key: PeerKey | None) -> str:
    """Return a hint on an endpoint that does not answer. On TCP the key may be the cause."""
    if not endpoint.startswith("tcp://"):
        return "start one with `taskyard up`, or give another --broker or --state"
    if key is None:
        return "is it running? If it requires a key, give --key FILE or Client(key=…)"
    return f"is it running, and is {key.name} a key of this broker?"
