"""Where the broker is, and by which key: as was said, as the environment or the settings file says,
or in the usual state directory.

A broker goes before a state directory that was named in the same place. A state directory means its
own broker: one that was given is not overruled by a broker of the environment, nor one of the
environment by a broker of the file.
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
    """Where a broker is."""

    #: Its endpoint, if it was named; None: it is that of the state directory.
    broker: str | None
    state: Path

    def endpoint(self) -> str:
        """What to connect to."""
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
    """The place that is meant. Settings are looked for only if nothing is given, unless they are
    here already."""
    if state:
        return BrokerLocation(broker or None, Path(state))
    settings = settings or load(environment=environment)
    is_nearer = settings.source("broker.url") >= settings.source("broker.state")
    named = broker or (configured_endpoint(settings) if is_nearer else None)
    return BrokerLocation(named, settings.broker.state)


def configured_endpoint(settings: Settings) -> str | None:
    """The broker's endpoint, if one is set. Raises `InvalidSettings` if it can't be connected
    to."""
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
    """The endpoint to connect to."""
    if broker:
        return endpoints.peer_endpoint(broker)
    return locate(broker, state, environment, settings).endpoint()


def key_for(
    endpoint: str,
    key: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
    settings: Settings | None = None,
) -> PeerKey | None:
    """The key to come with. Only TCP asks for one: on other sockets the kernel says who comes.
    Raises UserError."""
    if not endpoint.startswith("tcp://"):
        return None
    path = Path(key) if key else (settings or load(environment=environment)).broker.key
    if path is None:
        return None
    from taskyard.net import keys  # noqa: PLC0415  # most calls have none, and a shell may wait

    return keys.read_peer_key(path)


def connection_hint(endpoint: str, key: PeerKey | None) -> str:
    """What else to look at, where nobody answers over TCP."""
    if not endpoint.startswith("tcp://"):
        return ""
    if key is None:
        return "; if that broker demands keys, give yours: --key, or Client(key=…)"
    return f"; the key {key.name} is good for one broker alone: see that it is the one there"
