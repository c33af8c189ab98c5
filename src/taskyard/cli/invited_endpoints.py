"""The endpoints in an invitation: given, of the running broker, or of the settings.

An endpoint for all addresses of a machine is no address, and only the user can choose one that the
other machine reaches. So the choice is printed, and nothing is created.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from taskyard.cli.daemon_options import DIALECT_SIDES
from taskyard.errors import UnusableEndpoint, UserError
from taskyard.net import endpoints
from taskyard.process.broker_files import OpenListener, open_listeners
from taskyard.wire.roles import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from taskyard.settings.loader import Settings

#: An address of the documentation range. Nothing is sent there: the system only chooses a route.
_ELSEWHERE: Final = ("192.0.2.1", 9)


def invited_endpoints(
    given: str | None, dialect: str, roles: Sequence[Role], settings: Settings, state: Path
) -> tuple[str, ...]:
    """Return the endpoints that a peer connects to. Raises `UserError`.

    Two for a relay of ping-pong, which has a backend and a frontend, and one for others.
    """
    count = DIALECT_SIDES[dialect] if Role.RELAY in roles else 1
    if given is not None:
        return _check_given(given, dialect, count)
    listeners = [one for one in open_listeners(state) if one.dialect == dialect]
    listeners += _configured(settings, dialect)
    remote = [one for one in listeners if _is_remote(one)]
    if not remote:
        raise UserError(f"{dialect}: {_missing(listeners)} (give --broker tcp://HOST:PORT)")
    sides = remote[0].endpoints
    if count == 1 and len(sides) > 1:  # workers use the backend, clients the frontend
        sides = sides[:1] if Role.WORKER in roles else sides[1:]
    if remote[0].identity:
        with suppress(UserError):  # it may be any text
            return (endpoints.peer_endpoint(remote[0].identity),)
    if any(endpoints.is_wildcard(endpoints.parse(one)) for one in sides):
        choice = " or ".join(f"--broker {_at(sides, host)}" for host in _own_addresses())
        raise UnusableEndpoint(
            f"{dialect} at {','.join(sides)}: stands for all addresses of this machine (give the "
            f"one that the peer reaches, such as {choice})"
        )
    return tuple(sides)


def _check_given(given: str, dialect: str, count: int) -> tuple[str, ...]:
    found = [endpoints.parse_places(one) for one in endpoints.split_endpoints(given)]
    if not all(isinstance(place, endpoints.Tcp) for places in found for place in places):
        raise UserError(f"--broker {given}: must be a TCP endpoint, as in tcp://HOST:PORT")
    if len(found) != count:
        wanted = "BACKEND,FRONTEND" if count > 1 else "one endpoint"
        raise UserError(f"--broker {given}: expected {wanted} of {dialect}")
    return tuple("+".join(map(str, places)) for places in found)


def _configured(settings: Settings, dialect: str) -> Iterator[OpenListener]:
    """Yield the listeners of a dialect in the settings, one for each socket."""
    for name, found in settings.listen.items():
        section = settings.listeners.get(name)
        if dialect != (name if section is None else section.dialect):
            continue
        identity = "" if section is None else section.identity
        for places in [found] if DIALECT_SIDES[dialect] > 1 else [(one,) for one in found]:
            yield OpenListener(dialect, tuple(places), identity)


def _is_remote(listener: OpenListener) -> bool:
    """Return whether other machines reach all endpoints of a listener, whose ports are fixed."""
    places = [endpoints.parse(one) for one in listener.endpoints]
    return all(
        isinstance(one, endpoints.Tcp) and one.port and endpoints.is_remote(one) for one in places
    )


def _missing(listeners: Sequence[OpenListener]) -> str:
    if not listeners:
        return "no broker is running with such a listener, and the settings have none in [listen]"
    places = ", ".join(dict.fromkeys(",".join(one.endpoints) for one in listeners))
    return f"other machines can't reach {places}"


def _at(places: Sequence[str], host: str) -> str:
    """Return endpoints with another host, joined by commas."""
    found = (endpoints.parse(one) for one in places)
    return ",".join(f"tcp://{host}:{one.port}" for one in found if isinstance(one, endpoints.Tcp))


def _own_addresses() -> list[str]:
    """Return the name of this machine, and the address from which it reaches others."""
    names = [socket.gethostname()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        names.append(probe.getsockname()[0])
    return names
